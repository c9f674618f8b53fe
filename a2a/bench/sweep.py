"""sweep: every combination of a plan: built, checked, timed, checked again, told.

Owns the order of things and what makes a figure worth showing. Refuses to know how a figure is measured (timing) and
how it is shown (report).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from a2a import reference
from a2a.bench.barrier import meeting
from a2a.bench.byte_count import ByteCount, count_bytes, destinations, pair_counts
from a2a.bench.device_timing import Replayed, time_eager_rounds, time_replays
from a2a.bench.exchange import Exchange
from a2a.bench.implementation import (
    Case,
    Experts,
    Implementation,
    Received,
    difference,
    expected_integer_sums,
    expected_received,
    integer_experts,
    integer_rows,
    random_experts,
    random_rows,
    tensor_difference,
)
from a2a.bench.peers import peer
from a2a.bench.peers.memcpy import Memcpy
from a2a.bench.timing import PHASES, Figures, clock_name, figures, time_rounds
from a2a.bench.workload import workload
from a2a.comm import Comm
from a2a.config import ExchangeConfig, ModelPreset
from a2a.env import Env
from a2a.transport import choose

GPU_TRANSPORTS: Final = ("nvlink", "nvshmem")
DEFAULT_ROUNDS_PER_GRAPH: Final = 20

Row = Mapping[str, Any]
"""One row of the report, as the contract's JSON names its fields."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What `a2a bench` was asked for; picklable, equal on all ranks.

    Attributes:
        preset: shape of the layer.
        tokens, wire_formats, routings, row_orders, payloads_in_workspace: every combination is run.
        peers: names of other implementations to time beside a2a.
        rounds: timed rounds of each combination.
        transport: asked for, "auto" or a name.
        modes: "eager", and "graph" on GPUs.
        seed: of routings and rows.
        num_sms: for GPU transports.
        rounds_per_graph: for GPU transports.
        arguments: the command line, for the record.
    """

    preset: ModelPreset
    tokens: tuple[int, ...]
    wire_formats: tuple[str, ...]
    routings: tuple[str, ...]
    row_orders: tuple[str, ...]
    payloads_in_workspace: tuple[bool, ...]
    peers: tuple[str, ...]
    rounds: int
    transport: str
    modes: tuple[str, ...]
    seed: int
    num_sms: int | None
    rounds_per_graph: int | None
    arguments: tuple[str, ...] = ()

    @property
    def num_cases(self) -> int:
        """Number of combinations."""
        return len(list(self._combinations()))

    @property
    def num_steps(self) -> int:
        """Counted rounds of all implementations and cases, for a progress bar."""
        return self.num_cases * len(self.modes) * (1 + len(self.peers)) * self.rounds

    def cases(self, ep_rank: int, ep_size: int, device: torch.device) -> Sequence[Case]:
        """The combinations, in the order in which they are run."""
        preset = self.preset
        made = []
        for routing, format_name, order, in_workspace, tokens in self._combinations():
            name = preset.wire_format if format_name == "preset" else format_name
            made.append(
                Case(
                    ep_rank=ep_rank,
                    ep_size=ep_size,
                    hidden_size=preset.hidden_size,
                    num_experts=preset.num_experts,
                    top_k=preset.top_k,
                    format_name=name,
                    mx_alignment=preset.mx_alignment if name == "mxfp8" else 0,
                    row_order=order,
                    payload_in_workspace=in_workspace,
                    tokens_per_rank=tokens,
                    workload=workload(
                        routing,
                        ep_size=ep_size,
                        tokens=tokens,
                        num_experts=preset.num_experts,
                        top_k=preset.top_k,
                        seed=self.seed,
                    ),
                    transport=self.transport,
                    num_sms=self.num_sms,
                    device=device,
                )
            )
        return made

    def _combinations(self) -> itertools.product[tuple[str, str, str, bool, int]]:
        return itertools.product(
            self.routings, self.wire_formats, self.row_orders, self.payloads_in_workspace, self.tokens
        )


def run(sweep: Sweep, comm: Comm, on_round: Callable[[], None]) -> list[Row]:
    """Run a sweep. Collective; the rows are the same on every rank.

    Args:
        sweep: equal on all ranks.
        comm: the ranks.
        on_round: called after every counted round of this rank.
    """
    device = _device(sweep, comm)
    with meeting(comm, Env.read().startup_timeout_s) as meet:

        def barrier() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            meet()

        rows: list[Row] = []
        for case in sweep.cases(comm.Get_rank(), comm.Get_size(), device):
            rows += _run_case(case, sweep, comm, barrier, on_round)
        return rows


def _device(sweep: Sweep, comm: Comm) -> torch.device:
    """Where rows lie: on this rank's GPU for the transports that move rows between GPUs."""
    if sweep.transport == "host" or not torch.cuda.is_available():
        return torch.device("cpu")
    asked = sweep.transport
    if asked == "auto":
        # As the objects of the sweep will choose.
        asked = Env.read().transport or asked
    any_config = ExchangeConfig(
        ep_size=comm.Get_size(), max_num_tokens=1, top_k=1, num_experts=comm.Get_size(), hidden_size=1
    )
    chosen = choose(asked, any_config, comm).name
    return torch.device("cuda", torch.cuda.current_device()) if chosen in GPU_TRANSPORTS else torch.device("cpu")


def _run_case(
    case: Case, sweep: Sweep, comm: Comm, barrier: Callable[[], None], on_round: Callable[[], None]
) -> list[Row]:
    implementations: list[Implementation] = [Exchange(case, comm), *(peer(name)(case, comm) for name in sweep.peers)]
    rows: list[Row] = []
    try:
        for mode in sweep.modes:
            # What the host has to steer cannot be captured; it is timed eagerly or not at all.
            timed = [each for each in implementations if mode == "eager" or each.capturable]
            rows += _run_mode(mode, timed, case, sweep, comm, barrier, on_round)
    finally:
        for each in implementations:
            each.close()
    return rows


def _run_mode(
    mode: str,
    implementations: Sequence[Implementation],
    case: Case,
    sweep: Sweep,
    comm: Comm,
    barrier: Callable[[], None],
    on_round: Callable[[], None],
) -> list[Row]:
    reasons = [checked_round(each, case, sweep.seed, barrier) for each in implementations]
    wall: Mapping[str, float] = {}
    replayed: Replayed | None = None
    if mode == "graph":
        per_graph = sweep.rounds_per_graph or DEFAULT_ROUNDS_PER_GRAPH
        replayed = time_replays(implementations, sweep.rounds, per_graph, barrier, on_round)
        times = replayed.rounds
        for index, each in enumerate(implementations):
            reasons[index]["pair"] = reasons[index]["pair"] or replayed.wrong[each.name]
    elif case.device.type == "cuda":
        times, wall = time_eager_rounds(implementations, sweep.rounds, barrier, on_round)
    else:
        times = time_rounds(implementations, sweep.rounds, barrier, on_round)
    # Once more with other rows: what was timed must still be right.
    for index, each in enumerate(implementations):
        for phase, reason in checked_round(each, case, sweep.seed + 1, barrier).items():
            reasons[index][phase] = reasons[index][phase] or reason
    gathered = comm.allgather((dict(times), reasons, clock_name(), dict(wall)))
    # Devices count from an event of their own.
    one_clock = case.device.type == "cpu" and len({clock for _, _, clock, _ in gathered}) == 1
    by_name = {
        each.name: dict(figures([stamps[each.name] for stamps, _, _, _ in gathered], one_clock))
        for each in implementations
    }
    alone: dict[str, float] = {}
    if replayed:
        # A graph is timed whole; its phases were timed in another.
        of_phases = comm.allgather(dict(replayed.phases))
        for name, found in by_name.items():
            found |= {
                phase: figure
                for phase, figure in figures([stamps[name] for stamps in of_phases], one_clock).items()
                if phase != "pair"
            }
        of_dispatches = comm.allgather(dict(replayed.dispatches))
        for name in replayed.dispatches:
            slowest = [max(of_ranks) for of_ranks in zip(*(told[name] for told in of_dispatches), strict=True)]
            alone[name] = statistics.median(slowest) * 1e6
    moved = count_bytes(
        pair_counts(case.workload.topk_ids, case.placement),
        dispatch_row_bytes=case.dispatch_row_bytes,
        combine_row_bytes=case.combine_row_bytes,
    )
    limits = [each.name for each in implementations if each.role == "limit"]
    rows: list[Row] = []
    for index, each in enumerate(implementations):
        for phase in PHASES:
            wrong = [
                f"rank {rank}: {reasons_of_rank[index][phase]}"
                for rank, (_, reasons_of_rank, _, _) in enumerate(gathered)
                if reasons_of_rank[index][phase]
            ]
            row = _row(each, case, sweep, phase, by_name[each.name][phase], moved[phase], wrong)
            limit = limits[0] if limits else None
            row |= {"mode": mode, "limit": limit, "limit_us": by_name[limit][phase].us_p50 if limit else None}
            if mode == "graph":
                row["rounds_per_graph"] = sweep.rounds_per_graph or DEFAULT_ROUNDS_PER_GRAPH
                row["events_between_phases"] = phase != "pair"
                if phase == "dispatch" and each.name in alone:
                    row["us_alone"] = alone[each.name]
            if wall and phase == "pair":
                row["us_wall"] = max(of_rank[each.name] for _, _, _, of_rank in gathered) * 1e6
            rows.append(row)
    return rows


def checked_round(each: Implementation, case: Case, seed: int, barrier: Callable[[], None]) -> dict[str, str]:
    """One checked round: what is wrong in each phase, empty strings where nothing is."""
    exact_sums = each.role == "exchange" and not isinstance(each, Exchange)
    make = integer_rows if exact_sums else random_rows
    experts: Experts = integer_experts if exact_sums else random_experts
    rows = make(case, case.ep_rank, seed)
    host = case.on_host
    each.load(rows.to(case.device))
    barrier()
    each.dispatch()
    # Without this a limit, which signals nothing, would be looked at before its peers have written.
    barrier()
    wrong_dispatch = difference(each.received(), _expected_received(host, make, seed))
    each.fill(experts)
    barrier()
    sums = each.combine()
    barrier()
    if isinstance(each, Memcpy):
        wrong_combine = each.copied_difference(rows, experts)
    elif exact_sums:
        on_wire = host.dequantize(*host.quantize(rows))
        wrong_combine = tensor_difference("sums", sums, expected_integer_sums(host, on_wire))
    else:
        wrong_combine = tensor_difference("sums", sums, _expected_sums(host, rows, experts))
    return {"dispatch": wrong_dispatch, "combine": wrong_combine, "pair": wrong_dispatch or wrong_combine}


def _expected_received(case: Case, make: Callable[[Case, int, int], Tensor], seed: int) -> Received:
    """Made once for all implementations and modes of a case: at thousands of tokens it takes longer than all rounds."""
    key = (make.__name__, seed)
    if key not in case.expected:
        case.expected[key] = expected_received(case, lambda rank: make(case, rank, seed))
    return case.expected[key]


def _expected_sums(case: Case, rows: Tensor, experts: Experts) -> Tensor:
    """This rank's rows of the oracle's combine.

    The oracle reads block `ep_rank` of every rank alone; all blocks of a payload share that one's memory here.
    """
    mine = case.dequantize(*case.quantize(rows))
    hits = destinations(case.topk_ids, case.placement)
    blocks = []
    for rank in range(case.ep_size):
        block = torch.zeros(case.max_tokens, case.hidden_size, dtype=case.row_dtype)
        tokens = hits[:, rank].nonzero().flatten()
        slots = tokens if case.row_order == "token" else torch.arange(tokens.numel())
        block[slots] = experts(mine[tokens], rank)
        blocks.append(block.expand(case.ep_size, -1, -1))
    ids = [case.topk_ids[:0]] * case.ep_size
    ids[case.ep_rank] = case.topk_ids
    sums: Tensor = reference.combine(ids, blocks, case.placement, row_order=case.row_order)[case.ep_rank]
    return sums


def _row(
    each: Implementation,
    case: Case,
    sweep: Sweep,
    phase: str,
    figure: Figures,
    moved: ByteCount,
    wrong: Sequence[str],
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "implementation": each.name,
        "transport": each.transport,
        "ep_size": case.ep_size,
        "tokens_per_rank": case.tokens_per_rank,
        "hidden_size": case.hidden_size,
        "top_k": case.top_k,
        "num_experts": case.num_experts,
        "wire_format": case.format_name,
        "phase": phase,
        "us_p50": figure.us_p50,
        "us_p99": figure.us_p99,
        "us_min": figure.us_min,
        "link_bytes": moved.link_bytes,
        "logical_bytes": moved.logical_bytes,
        "link_gbps": moved.link_bytes / figure.us_p50 / 1e3,
        "exact": not wrong,
        "routing": case.workload.name,
        "row_order": case.row_order,
        "payload_in_workspace": case.payload_in_workspace,
        "rounds": sweep.rounds,
        "num_sms": sweep.num_sms,
        "rounds_per_graph": None,
        "regime": each.regime,
    }
    if wrong:
        row["reason"] = "; ".join(wrong)
    return row
