"""tune: finds, size by size, the regime and the launch shape with which a round is fastest, and makes the table of it.

Owns which shapes are tried, in which order, and when one is better. Refuses to know what a shape means to a kernel.

The pair of dispatch and combine is timed, in a graph, as the slowest rank has it: each phase's shapes in turn, the
other phase as the table has it so far. Every shape's sums must equal, bit by bit, those of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from a2a.bench.device_timing import replay_s
from a2a.bench.exchange import Exchange
from a2a.bench.implementation import Case, tensor_difference
from a2a.bench.report import commit
from a2a.bench.sweep import Sweep, checked_round
from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.env import Env
from a2a.errors import Unsupported
from a2a.nvlink.params import LINE_DATA_BYTES, MAX_THREADS, image_bytes
from a2a.nvlink.transport import NvlinkTransport
from a2a.nvlink.tuning import REGIMES, Point, Tuning, find_tuning

CTAS_OF_A_ROW: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30)
LARGE_SHAPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "ctas": (16, 24, 32, 48, 64, 96, 0),  # 0: one per SM
    "threads": (128, 256, 384, 512),
    "push_warps": (1, 2, 3, 4, 6, 8),
    "unit_bytes": (1792, 3584, 7168, 14336),
    "pdl": (False, True),
}
"""What is tried of bulk and push, one field after the other, from the best so far on."""
QUANTIZING_THREADS: Final = (128, 192, 256, 384, 512)
FEWEST_BULK_TOKENS: Final = 48
"""Below it flags and fences cost more than the rows: bulk shapes are not tried."""
_ROUND_BUDGET_US: Final = 12_000.0
"""About how long a replay lasts: many rounds of a small size, few of a large one."""
_REPLAYS, _FINAL_REPLAYS, _FINALISTS = 5, 15, 3
_PASSES: Final = 2
"""Over the fields of a large shape."""


@dataclasses.dataclass(frozen=True)
class Tune:
    """What `a2a tune` was asked for; picklable, equal on all ranks.

    Attributes:
        sweep: the sizes.
        budget_s: of the whole.
        output: file of the table, or None.
    """

    sweep: Sweep
    budget_s: float
    output: str | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One shape that was timed.

    Attributes:
        point: the shape and the size.
        pair_us: dispatch and combine of a round, slowest rank, median over replays.
        final: timed again, longer, among the best.
    """

    point: Point
    pair_us: float
    final: bool


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a sweep over shapes found; equal on all ranks.

    Attributes:
        tuning: the table that was there, with the sizes measured now.
        trials: everything that was timed.
        skipped: sizes for which the time did not last.
    """

    tuning: Tuning
    trials: tuple[Trial, ...]
    skipped: tuple[str, ...]


def tune(sweep: Sweep, comm: Comm, budget_s: float, on_size: Callable[[], None]) -> Tuned:
    """Find the best shapes for the sizes of a sweep. Collective; the answer is the same on every rank.

    Args:
        sweep: presets, tokens, formats; equal on all ranks. Its peers are not looked at.
        budget_s: after it no further shape is tried; sizes not begun are skipped.
        on_size: called after each size.

    Raises:
        Unsupported: the exchange does not run on GPUs, a shape's sums differ, or the time is over before the first
            size.
    """
    if not torch.cuda.is_available():
        raise Unsupported(transport="nvlink", reasons=("there is nothing to tune without GPUs",))
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    deadline = time.monotonic() + budget_s
    shipped = find_tuning(f"sm_{major}{minor}", Env.read().tuning).tuning
    table = shipped
    trials: list[Trial] = []
    winners: dict[tuple[object, ...], Point] = {}
    skipped: list[str] = []
    with contextlib.closing(Mesh(comm, ("barrier",), timeout_s=Env.read().startup_timeout_s)) as mesh:
        barrier = _barrier(mesh, device)
        for case in sweep.cases(comm.Get_rank(), comm.Get_size(), device):
            if comm.bcast(time.monotonic() > deadline):
                skipped.append(f"{case.format_name}, {case.tokens_per_rank} tokens")
                continue
            tried, won = _tune_case(case, sweep, comm, table, barrier, deadline)
            trials += tried
            winners |= {point.key: point for point in won}
            table = table.with_points(won, table.source)
            on_size()
    if not winners:
        raise Unsupported(transport="nvlink", reasons=(f"no size was tuned within {budget_s:g} s",))
    return Tuned(shipped.replaced_by(tuple(winners.values()), _source(comm, sweep)), tuple(trials), tuple(skipped))


def _barrier(mesh: Mesh, device: torch.device) -> Callable[[], None]:
    numbers = itertools.count()
    timeout_s = Env.read().startup_timeout_s

    def barrier() -> None:
        torch.cuda.synchronize(device)
        number = next(numbers)
        mesh.signal("barrier", 0, number, timeout_s=timeout_s)
        mesh.wait("barrier", 0, number, timeout_s=timeout_s)

    return barrier


def small_points(size: Mapping[str, Any]) -> list[Point]:
    """Every shape of the small regime that is tried for a size, given by its fields of `Point`."""
    shapes = _small_shapes(size["rows"], size["row_bytes"])
    return [Point(**size, regime="small", threads=each, parts_per_thread=parts, pdl=True) for each, parts in shapes]


def descend(start: Point, shapes: Mapping[str, Sequence[Any]], time_of: Callable[[Point], float | None]) -> None:
    """Look for the fastest shape, one field after the other, each from the best so far on.

    Args:
        start: tried first.
        shapes: the values of each field.
        time_of: of a shape; called once for each, None when the time is over. Equal on all ranks.
    """
    best, known = start, {start: time_of(start)}
    for _ in range(_PASSES):
        before = best
        for name, values in shapes.items():
            for point in [dataclasses.replace(best, **{name: value}) for value in values if _fits(best, name, value)]:
                if None in known.values():
                    return
                if point not in known:
                    known[point] = time_of(point)
            best = min(known, key=lambda point: known[point] or math.inf)
        if best == before:
            return


def _fits(point: Point, name: str, value: Any) -> bool:
    """Whether a CTA keeps a warp that does not push."""
    shape = {"threads": point.threads, "push_warps": point.push_warps, name: value}
    return bool(shape["push_warps"] < shape["threads"] // 32)


def _small_shapes(rows: str, row_bytes: int) -> list[tuple[int, int]]:
    """(threads, parts per thread), each splitting a row evenly."""
    if rows == "quantized":
        # One CTA makes a whole row.
        return [(threads, 1) for threads in QUANTIZING_THREADS]
    of_row = -(-row_bytes // LINE_DATA_BYTES) * 8
    shapes = {}
    for parts, ctas in itertools.product((1, 2), CTAS_OF_A_ROW):
        threads = -(-of_row // (parts * ctas * 32)) * 32
        if 32 <= threads <= MAX_THREADS:
            shapes[threads, parts] = True
    return sorted(shapes)


def _tune_case(
    case: Case, sweep: Sweep, comm: Comm, table: Tuning, barrier: Callable[[], None], deadline: float
) -> tuple[list[Trial], list[Point]]:
    """What was tried for a case, and the best point of each phase. `table`: what other sizes and phases go by."""
    each = Exchange(case, comm)
    trials: list[Trial] = []
    winners: list[Point] = []
    try:
        transport = each.mover
        if not isinstance(transport, NvlinkTransport):
            raise Unsupported(transport=each.transport, reasons=("only the nvlink transport has shapes to tune",))
        transport.tune(table)
        for phase, reason in checked_round(each, case, sweep.seed, barrier).items():
            if reason:
                raise Unsupported(transport=each.transport, reasons=(f"{phase} is wrong before any tuning: {reason}",))
        timer = _Timer(each, transport, comm, barrier)
        for phase, rows, row_bytes in _phases(case):
            size: dict[str, Any] = {
                "phase": phase, "rows": rows, "ep_size": case.ep_size, "row_bytes": row_bytes, "tokens": case.max_tokens
            }  # fmt: skip
            search = _Search(timer, comm, table, deadline)
            small = case.max_tokens <= transport.landing_tokens
            for point in small_points(size) if small else ():
                search.time(point)
            if case.max_tokens >= FEWEST_BULK_TOKENS or not small:
                shapes = {name: values for name, values in LARGE_SHAPES.items() if name != "push_warps"}
                descend(Point(**size, regime="bulk", threads=512), shapes, search.time)
                if phase == "combine" and transport.pushes(row_bytes, case.max_tokens):
                    start = Point(**size, regime="push", threads=512, push_warps=4, unit_bytes=14336)
                    descend(start, LARGE_SHAPES, search.time)
            search.finish()
            winners += _winners([trial for trial in search.trials if trial.final])
            table = table.with_points(winners, table.source)
            trials += search.trials
    finally:
        each.close()
    return trials, winners


def _winners(finals: Sequence[Trial]) -> list[Point]:
    """The fastest shape, and where that pushes the fastest that does not: some rounds of a size cannot."""
    best: dict[str, Trial] = {}
    for trial in sorted(finals, key=lambda trial: trial.pair_us):
        best.setdefault(trial.point.regime, trial)
    kept = list(best.values())[:1]
    if kept and kept[0].point.regime == "push" and "bulk" in best:
        kept.append(best["bulk"])
    return [dataclasses.replace(trial.point, pair_us=round(trial.pair_us, 2)) for trial in kept]


def _phases(case: Case) -> list[tuple[str, str, int]]:
    """(phase, rows, bytes of a row) whose shapes a case decides."""
    widths = [case.wire_format.data_bytes_per_token(case.hidden_size, case.mx_alignment)]
    scales = case.wire_format.scale_bytes_per_token(case.hidden_size, case.mx_alignment)
    widths += [scales] * bool(scales) + [4 * case.top_k, 4 * case.top_k]
    dispatch = ("dispatch", "quantized" if scales else "copied", image_bytes(widths))
    if scales:
        # Combine's rows are those of the unquantised format, which has decided them.
        return [dispatch]
    return [dispatch, ("combine", "copied", image_bytes([case.combine_row_bytes]))]


class _Search:
    """The shapes of one size and phase, timed with a table for all else.

    Attributes:
        trials: everything timed so far.
    """

    def __init__(self, timer: _Timer, comm: Comm, table: Tuning, deadline: float) -> None:
        self.trials: list[Trial] = []
        self._timer, self._comm, self._table, self._deadline = timer, comm, table, deadline

    def time(self, point: Point, *, final: bool = False) -> float | None:
        """Microseconds of a pair with this shape; None, on every rank, when the time is over."""
        if self._comm.bcast(time.monotonic() > self._deadline):
            return None
        table = self._table.with_points((point,), self._table.source)
        us = self._timer.pair_us(table, _FINAL_REPLAYS if final else _REPLAYS)
        self.trials.append(Trial(point, us, final))
        return us

    def finish(self) -> None:
        """Time the best of each regime again, longer."""
        for regime in REGIMES:
            tried = sorted((each for each in self.trials if each.point.regime == regime), key=lambda each: each.pair_us)
            for trial in tried[:_FINALISTS]:
                self.time(trial.point, final=True)


class _Timer:
    """Times rounds of one case with one table after the other."""

    def __init__(self, each: Exchange, transport: NvlinkTransport, comm: Comm, barrier: Callable[[], None]) -> None:
        self._each, self._transport, self._comm, self._barrier = each, transport, comm, barrier
        self._barrier()
        each.dispatch()
        self._wanted = each.combine().clone()
        self._rounds = 10
        # As many rounds as fill a replay, equal on all ranks.
        self._rounds = max(2, min(100, int(_ROUND_BUDGET_US / self.pair_us(transport.tuning, 2))))

    def pair_us(self, tuning: Tuning, replays: int) -> float:
        """Microseconds of a round, the slowest rank of each replay, median over replays."""
        each = self._each
        self._barrier()
        self._transport.tune(tuning)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._rounds):
                each.dispatch()
                output = each.combine()
        self._barrier()
        graph.replay()
        times = []
        for _ in range(replays):
            times.append(replay_s(graph, each, output, self._barrier) * 1e6 / self._rounds)
        each.moe.check()
        wrong = tensor_difference("sums", output, self._wanted)
        told = self._comm.allgather((times, wrong))
        for rank, (_, text) in enumerate(told):
            if text:
                raise Unsupported(transport=each.transport, reasons=(f"rank {rank}: a shape's {text}",))
        slowest: list[float] = [max(of_ranks) for of_ranks in zip(*(each for each, _ in told), strict=True)]
        return statistics.median(slowest)


def _source(comm: Comm, sweep: Sweep) -> str:
    gpu = torch.cuda.get_device_name(torch.cuda.current_device())
    what = f"{sweep.preset.name}, tokens {', '.join(map(str, sweep.tokens))}, {', '.join(sweep.wire_formats)}"
    return f"a2a tune on {comm.Get_size()} ranks, {gpu}, CUDA {torch.version.cuda}, commit {commit()}: {what}"


def rows_of(tuned: Tuned) -> Sequence[Mapping[str, Any]]:
    """Every trial as a flat row for JSON."""
    return [
        {**dataclasses.asdict(trial.point), "pair_us": trial.pair_us, "final": trial.final} for trial in tuned.trials
    ]
