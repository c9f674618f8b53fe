"""check: the oracle against random exchanges, and the proof that it would notice.

Owns the random shapes, ids, payloads and poisons, what is compared, and the faults that can be planted. Refuses to know
how rows move. Everything follows from (seed, scenario, round, rank), so every rank can make every other's input.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from a2a import reference
from a2a.alltoall import MoeAlltoAll, RoundContext
from a2a.bench.implementation import tensor_difference
from a2a.comm import Comm
from a2a.config import MAX_TOP_K, low_precision_bytes_per_token
from a2a.errors import A2AError, ConfigError
from a2a.quant import WIRE_FORMATS, wire_format
from a2a.transport import transport_class

FAULTS: Final = ("drop-row", "flip-byte")
ROUNDS_PER_SCENARIO: Final = 8
KILL_ROUND: Final = 3
"""The round in which `--kill-at` ends a rank: late enough for the steady state."""

_KILL_ROUNDS: Final = 20
_HIDDEN_SIZES: Final = (1, 2, 3, 7, 31, 32, 64, 96, 127, 128, 160, 256, 384, 512)
_RAW_DTYPES: Final = (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64)
_ID_KINDS: Final = ("valid", "int64", "duplicates", "out of range", "nowhere", "one expert")
_POISON: Final = 0xFF

Histogram = dict[str, collections.Counter[str]]


@dataclasses.dataclass(frozen=True)
class Check:
    """What `a2a check` was asked for; picklable, equal on all ranks.

    Attributes:
        rounds: rounds in all.
        seed: of everything that is random.
        transport: "auto" or a name.
        fault: one of `FAULTS` to be planted, or None.
        kill_rank, kill_at: a rank and the named point at which it is ended, or None.
    """

    rounds: int
    seed: int
    transport: str
    fault: str | None = None
    kill_rank: int | None = None
    kill_at: str | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """What a check covered and what was wrong.

    Attributes:
        covered: by topic, how many rounds had which property.
        failures: one line each: round, rank, what differs.
        planted: where a fault was planted, or None.
        rounds: rounds that were run.
    """

    covered: Mapping[str, Mapping[str, int]]
    failures: tuple[str, ...]
    planted: str | None
    rounds: int


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One object and what is passed to its rounds; equal on all ranks."""

    number: int
    format_name: str | None
    mx_alignment: int
    hidden_size: int
    num_experts: int
    top_k: int
    max_tokens: int
    row_order: str
    scrub: str | None
    num_contexts: int
    eplb: int
    combine_dtype: torch.dtype
    payload_dtypes: tuple[torch.dtype, ...]
    payload_widths: tuple[int, ...]
    placement: tuple[int, ...] | None

    def build(self, comm: Comm, transport: str) -> MoeAlltoAll:
        """The object; collective."""
        raw = [width * dtype.itemsize for dtype, width in zip(self.payload_dtypes, self.payload_widths, strict=True)]
        wire: dict[str, Any] = {"wire_format": self.format_name, "mx_alignment": self.mx_alignment}
        return MoeAlltoAll(
            max_num_tokens=self.max_tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            combine_dtype_bytes_per_elem=self.combine_dtype.itemsize,
            extra_payload_bytes_per_token=sum(raw),
            comm=comm,
            transport=transport,
            placement=self.placement,
            name=f"check-{self.number}",
            row_order=self.row_order,
            scrub=self.scrub,
            eplb_stats_num_experts=self.eplb,
            num_contexts=self.num_contexts,
            **(wire if self.format_name else {}),
        )


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """One round of a scenario; equal on all ranks."""

    context: int
    num_tokens: tuple[int, ...]
    runtime_max_tokens_per_rank: int
    id_kind: str
    num_picks: int
    invalid_id: int
    poison: bool
    in_workspace: bool
    low_precision: bool
    output_dtype: torch.dtype | None
    with_eplb: bool


def check(asked: Check, comm: Comm, on_round: Callable[[], None]) -> Found:
    """Run the rounds. Collective; the findings of all ranks are returned on every rank."""
    if asked.fault is not None and asked.fault not in FAULTS:
        raise ConfigError(what="fault", got=asked.fault, wanted="one of " + ", ".join(FAULTS))
    covered: Histogram = collections.defaultdict(collections.Counter)
    failures: list[str] = []
    planter = _Planter(asked.fault, comm.Get_rank())
    done = number = 0
    while done < asked.rounds:
        scenario = _scenario(asked.seed, number, comm.Get_size())
        rounds = min(ROUNDS_PER_SCENARIO, asked.rounds - done)
        with scenario.build(comm, asked.transport) as moe:
            _count_scenario(covered, scenario, rounds)
            for index in range(rounds):
                chooser = random.Random(f"{asked.seed} {number} {index}")
                plan = _round_plan(chooser, scenario, comm.Get_size())
                _count_round(covered, scenario, plan)
                runner = _Round(asked.seed, index, scenario, plan, comm, planter)
                failures += [
                    f"round {done + index}, rank {comm.Get_rank()}: {what} ({scenario.format_name or 'raw'}, "
                    f"hidden {scenario.hidden_size}, {scenario.row_order}, R {plan.runtime_max_tokens_per_rank})"
                    for what in runner.run(moe)
                ]
                on_round()
            # A rank that is still checking must not find its peers gone.
            comm.barrier()
        done += rounds
        number += 1
    everything = [line for lines in comm.allgather(failures) for line in lines]
    planted = next((where for where in comm.allgather(planter.where) if where is not None), None)
    if asked.fault is not None and planted is None:
        everything.append(f"fault {asked.fault} was never planted: no round moved a row")
    return Found({topic: dict(counts) for topic, counts in covered.items()}, tuple(everything), planted, done)


def kill(asked: Check, comm: Comm, on_round: Callable[[], None]) -> None:
    """Run plain rounds in which rank `kill_rank` ends itself by SIGKILL at `kill_at`. Survivors raise what they meet.

    Raises:
        ConfigError: no such rank or point, or a point that no round has reached.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if asked.kill_rank is None or not 0 <= asked.kill_rank < size:
        raise ConfigError(what="kill-rank", got=asked.kill_rank, wanted=f"an integer in 0..{size - 1}")
    tokens, hidden, experts, top_k = 8, 256, 4 * size, 4
    with MoeAlltoAll(
        max_num_tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        hidden_size=hidden,
        wire_format="bf16",
        comm=comm,
        transport=asked.transport,
        name="check-kill",
    ) as moe:
        points = transport_class(moe.transport).POINTS
        if asked.kill_at not in points:
            raise ConfigError(what="kill-at", got=asked.kill_at, wanted="one of " + ", ".join(points))

        def end_here(point: str, round: int) -> None:
            if point == asked.kill_at and round >= KILL_ROUND:
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == asked.kill_rank:
            moe.on_point(end_here)
        device = moe.workspace.device
        rows = torch.full((tokens, hidden), float(rank), dtype=torch.bfloat16, device=device)
        # Every token has picks on every rank it can, so every rank waits for every other.
        ids = torch.arange(tokens * top_k, device=device).view(tokens, top_k) * experts // top_k % experts
        ids, weights = ids.to(torch.int32), torch.ones(tokens, top_k, device=device)
        for _ in range(_KILL_ROUNDS):
            got = moe.dispatch_tokens(rows, ids, weights, runtime_max_tokens_per_rank=tokens)
            # On GPUs a round is over, for good or ill, when its sums can be read.
            moe.combine(got.hidden_states.clone(), tokens).cpu()
            on_round()
        comm.barrier()
    raise ConfigError(
        what="kill-at", got=asked.kill_at, wanted=f"a point that a round of transport {moe.transport!r} reaches"
    )


class _Planter:
    """Plants one fault, on the lowest rank that received a row in the first round that moved one."""

    def __init__(self, fault: str | None, rank: int) -> None:
        self._fault = fault
        self._rank = rank
        self._done = fault is None
        self.where: str | None = None

    def plant(self, views: list[Tensor], receipts: list[reference.RankReceipt]) -> None:
        """Damage this rank's received rows in place, if it is its turn."""
        if self._done:
            return
        ranks = [rank for rank, receipt in enumerate(receipts) if bool(receipt.valid.any())]
        if not ranks:
            return
        self._done = True
        if ranks[0] != self._rank:
            return
        src, slot = receipts[self._rank].valid.nonzero()[0].tolist()
        row = views[0][src, slot].view(torch.uint8)
        if self._fault == "drop-row":
            # What a row that never came would leave behind: something else in every byte.
            row.copy_(255 - row)
        else:
            row[-1] = 255 - row[-1]
        self.where = f"{self._fault} in block {src}, row {slot} of rank {self._rank}"


class _Round:
    """One round of this rank, from inputs to what differs from the oracle."""

    def __init__(
        self, seed: int, index: int, scenario: Scenario, plan: RoundPlan, comm: Comm, planter: _Planter
    ) -> None:
        self._key = f"{seed} {scenario.number} {index}"
        self._scenario = scenario
        self._plan = plan
        self._comm = comm
        self._planter = planter
        self._rank = comm.Get_rank()
        self._size = comm.Get_size()

    def run(self, moe: MoeAlltoAll) -> list[str]:
        plan, scenario = self._plan, self._scenario
        context = moe.contexts[plan.context]
        if plan.poison:
            self._poison(moe)
        inputs = [self._input(rank) for rank in range(self._size)]
        mine = inputs[self._rank].on(moe.workspace.device)
        before = [each.clone() for each in (mine.ids, *mine.sent)]
        views, ids_payload = self._dispatch(context, mine)
        receipts = reference.dispatch(
            [reference.RankInput(each.ids, each.wire, each.stats) for each in inputs],
            moe.placement,
            plan.runtime_max_tokens_per_rank,
            row_order=scenario.row_order,
            scrub=scenario.scrub,
            ids_payload=ids_payload,
            invalid_id=plan.invalid_id,
            fill_bytes=self._fill_bytes(),
        )
        self._planter.plant(views, receipts)
        wrong = self._compare_dispatch(context, views, receipts[self._rank])
        wrong += self._combine(context, inputs, moe)
        after = (mine.ids, *mine.sent)
        if any(tensor_difference("", old, new) for old, new in zip(before, after, strict=True)):
            wrong.append("an input was modified")
        return wrong

    def _poison(self, moe: MoeAlltoAll) -> None:
        """Fill this rank's dispatch and combine areas; nobody may be writing to them meanwhile."""
        self._comm.barrier()
        for name in ("dispatch", "combine"):
            region = moe.layout.region(name, self._plan.context)
            moe.workspace[self._rank, region.offset_bytes : region.end_bytes].fill_(_POISON)
        if moe.workspace.is_cuda:
            torch.cuda.synchronize()
        self._comm.barrier()

    def _input(self, rank: int) -> _Input:
        scenario, plan = self._scenario, self._plan
        generator = _generator(f"{self._key} {rank} input")
        n = plan.num_tokens[rank]
        ids = _ids(generator, plan.id_kind, n, plan.num_picks, scenario.num_experts)
        stats = None
        if plan.with_eplb:
            stats = torch.randint(0, 1000, (scenario.eplb,), generator=generator, dtype=torch.int32)
        if scenario.format_name is None:
            rows = [
                _random_bytes(generator, n, width, dtype)
                for dtype, width in zip(scenario.payload_dtypes, scenario.payload_widths, strict=True)
            ]
            return _Input(ids, rows, [*rows, ids], stats)
        form = wire_format(scenario.format_name)
        weights = torch.rand(n, plan.num_picks, generator=generator)
        hidden = torch.randn(n, scenario.hidden_size, generator=generator) * 4
        rows_in = hidden.to(torch.float16 if form.name == "fp16" else torch.bfloat16)
        if form.scales_dtype is None:
            wire: list[Tensor] = [rows_in]
        else:
            data, scales = form.quantize(rows_in, alignment=scenario.mx_alignment)
            wire = [data] if scales is None else [data, scales]
        # On the wire ids are int32; those that int32 cannot hold arrive as -1.
        wide = ids.long()
        narrow = torch.where((wide >= -(2**31)) & (wide < 2**31), wide, -1).to(torch.int32)
        return _Input(ids, [rows_in, weights], [*wire, narrow, weights], stats)

    def _dispatch(self, context: RoundContext, mine: _Input) -> tuple[list[Tensor], int]:
        plan = self._plan
        if self._scenario.format_name is None:
            payloads = [*mine.sent, mine.ids]
            views = context.dispatch(
                mine.ids, payloads, plan.runtime_max_tokens_per_rank, plan.invalid_id, eplb_local_stats=mine.stats
            )
            return views, len(payloads) - 1
        got = context.dispatch_tokens(
            mine.sent[0],
            mine.ids,
            mine.sent[1],
            runtime_max_tokens_per_rank=plan.runtime_max_tokens_per_rank,
            invalid_token_expert_id=plan.invalid_id,
            eplb_local_stats=mine.stats,
        )
        wire = [got.hidden_states] if got.scales is None else [got.hidden_states, got.scales]
        return [*wire, got.topk_ids, got.topk_weights], len(wire)

    def _fill_bytes(self) -> list[int] | None:
        name = self._scenario.format_name
        if name is None:
            return None
        form = wire_format(name)
        scales = [] if form.scales_dtype is None else [form.neutral_scale_byte]
        return [0, *scales, 0, 0]

    def _compare_dispatch(self, context: RoundContext, views: list[Tensor], want: reference.RankReceipt) -> list[str]:
        wrong = []
        for index, (view, block) in enumerate(zip(views, want.payloads, strict=True)):
            if want.scrubbed[index]:
                wrong.append(tensor_difference(f"payload {index} and its padding", view, block))
            else:
                wrong.append(tensor_difference(f"payload {index}", view[want.valid], block[want.valid]))
        for name in ("recv_counts", "send_counts", "topk_target_ranks", "topk_send_indices", "eplb_gathered_stats"):
            wrong.append(tensor_difference(name, getattr(context, name), getattr(want, name)))
        return [line for line in wrong if line]

    def _combine(self, context: RoundContext, inputs: list[_Input], moe: MoeAlltoAll) -> list[str]:
        scenario, plan = self._scenario, self._plan
        most = plan.runtime_max_tokens_per_rank
        hits = [reference.destinations(each.ids, moe.placement)[1] for each in inputs]
        payloads = [self._expert_rows(rank, hits) for rank in range(self._size)]
        payload = payloads[self._rank].to(moe.workspace.device)
        if plan.in_workspace:
            view = context.get_combine_payload_tensor_in_workspace(most, scenario.hidden_size, payload.dtype)
            payload = view.copy_(payload)
        sums = context.combine(
            payload,
            most,
            payload_in_workspace=plan.in_workspace,
            output_dtype=plan.output_dtype,
            use_low_precision=plan.low_precision,
        )
        want = reference.combine(
            [each.ids for each in inputs],
            payloads,
            moe.placement,
            row_order=scenario.row_order,
            output_dtype=plan.output_dtype,
            low_precision=plan.low_precision,
        )[self._rank]
        reason = tensor_difference("combined rows", sums, want)
        return [reason] if reason else []

    def _expert_rows(self, rank: int, hits: list[Tensor]) -> Tensor:
        """What a rank's experts return: NaN wherever no row belongs, which must never show."""
        scenario, most = self._scenario, self._plan.runtime_max_tokens_per_rank
        generator = _generator(f"{self._key} {rank} experts")
        rows = torch.randn(self._size, most, scenario.hidden_size, generator=generator).to(scenario.combine_dtype)
        for src_rank in range(self._size):
            comes_here = hits[src_rank][:, rank]
            used = torch.zeros(most, dtype=torch.bool)
            if scenario.row_order == "token":
                used[: comes_here.numel()] = comes_here
            else:
                used[: int(comes_here.sum())] = True
            rows[src_rank, ~used] = float("nan")
        return rows


@dataclasses.dataclass(frozen=True)
class _Input:
    """One rank's input: ids, what is passed beside them, what must arrive, statistics."""

    ids: Tensor
    sent: list[Tensor]
    wire: list[Tensor]
    stats: Tensor | None

    def on(self, device: torch.device) -> _Input:
        """The same with what is passed on another device; what must arrive stays where it is compared."""
        if device.type == "cpu":
            return self
        sent = [self.ids.to(device) if each is self.ids else each.to(device) for each in self.sent]
        return _Input(self.ids.to(device), sent, self.wire, None if self.stats is None else self.stats.to(device))


def _scenario(seed: int, number: int, ep_size: int) -> Scenario:
    chooser = random.Random(f"{seed} {number}")
    names: list[str | None] = [None, *WIRE_FORMATS]
    # In turn, so that a short check still meets every format.
    format_name = names[number % len(names)]
    mx_alignment = chooser.choice((0, 32, 64, 128, 256)) if format_name == "mxfp8" else 0
    hidden = chooser.choice(_HIDDEN_SIZES)
    if format_name is not None and wire_format(format_name).check(hidden, mx_alignment):
        hidden = 128 * chooser.randint(1, 3)
    experts = ep_size + chooser.randint(0, 3 * ep_size + 5)
    count = chooser.randint(1, 3) if format_name is None else 0
    placement = None
    if chooser.random() < 0.3:
        # Every rank keeps an expert, the others are anywhere.
        table = [*range(ep_size), *(chooser.randrange(ep_size) for _ in range(experts - ep_size))]
        chooser.shuffle(table)
        placement = tuple(table)
    return Scenario(
        number=number,
        format_name=format_name,
        mx_alignment=mx_alignment,
        hidden_size=hidden,
        num_experts=experts,
        top_k=chooser.randint(1, min(MAX_TOP_K, 10, experts)),
        max_tokens=chooser.randint(1, 40),
        row_order=chooser.choice(("compact", "token")),
        scrub=chooser.choice(("ids", "all", None)),
        num_contexts=chooser.choice((1, 1, 2)),
        eplb=chooser.choice((0, experts)),
        combine_dtype=chooser.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        payload_dtypes=tuple(chooser.choice(_RAW_DTYPES) for _ in range(count)),
        payload_widths=tuple(chooser.choice((1, 2, 3, 5, 17, 64, 257)) for _ in range(count)),
        placement=placement,
    )


def _round_plan(chooser: random.Random, scenario: Scenario, ep_size: int) -> RoundPlan:
    most = chooser.randint(1, scenario.max_tokens)
    sizes = tuple(chooser.choice((0, 1, most, chooser.randint(0, most))) for _ in range(ep_size))
    if chooser.random() < 0.05:
        sizes = (0,) * ep_size
    # Very short rows take more bytes with scales than without: more than the workspace was built for.
    fits = low_precision_bytes_per_token(scenario.hidden_size) <= 2 * scenario.hidden_size
    low = scenario.combine_dtype == torch.bfloat16 and fits and chooser.random() < 0.3
    output_dtype = None if low else chooser.choice((None, None, torch.bfloat16, torch.float16, torch.float32))
    return RoundPlan(
        context=chooser.randrange(scenario.num_contexts),
        num_tokens=sizes,
        runtime_max_tokens_per_rank=most,
        id_kind=chooser.choice(_ID_KINDS),
        num_picks=chooser.choice((scenario.top_k, scenario.top_k, chooser.randint(1, scenario.top_k))),
        invalid_id=chooser.choice((-1, -1, scenario.num_experts, -7)),
        poison=chooser.random() < 0.5,
        in_workspace=chooser.random() < 0.5,
        low_precision=low,
        output_dtype=output_dtype,
        with_eplb=bool(scenario.eplb) and chooser.random() < 0.7,
    )


def _ids(generator: torch.Generator, kind: str, n: int, top_k: int, experts: int) -> Tensor:
    dtype = torch.int64 if kind == "int64" else torch.int32
    if kind == "duplicates":
        ids = torch.randint(0, experts, (n, 1), generator=generator).expand(n, top_k).clone()
        ids[:, top_k // 2 :] = torch.randint(0, experts, (n, top_k - top_k // 2), generator=generator)
    elif kind == "one expert":
        ids = torch.full((n, top_k), experts - 1)
    elif kind == "nowhere":
        ids = torch.full((n, top_k), -1)
    else:
        ids = torch.rand(n, experts, generator=generator).topk(top_k, dim=1).indices
    if kind == "out of range" and n:
        strange = torch.tensor([-1, experts, -(2**31), 2**31 - 1, experts + 1, -experts])
        where = torch.rand(n, top_k, generator=generator) < 0.4
        ids[where] = strange[torch.randint(0, 6, (int(where.sum()),), generator=generator)]
    if kind == "int64" and n:
        where = torch.rand(n, top_k, generator=generator) < 0.1
        ids[where] = 2**40 + 1
    return ids.to(dtype).contiguous()


def _random_bytes(generator: torch.Generator, n: int, width: int, dtype: torch.dtype) -> Tensor:
    raw = torch.randint(0, 256, (n, width * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random(key).getrandbits(63))


def _count_scenario(covered: Histogram, scenario: Scenario, rounds: int) -> None:
    covered["wire format"][scenario.format_name or "raw payloads"] += rounds
    covered["row order"][scenario.row_order] += rounds
    covered["scrub"][str(scenario.scrub)] += rounds
    covered["contexts"][str(scenario.num_contexts)] += rounds
    covered["placement"]["contiguous" if scenario.placement is None else "table"] += rounds
    covered["combine dtype"][str(scenario.combine_dtype).removeprefix("torch.")] += rounds
    size = scenario.hidden_size
    covered["hidden size"]["< 32" if size < 32 else "multiple of 32" if size % 32 == 0 else "other"] += rounds


def _count_round(covered: Histogram, scenario: Scenario, plan: RoundPlan) -> None:
    empty = sum(1 for count in plan.num_tokens if count == 0)
    covered["empty ranks"]["all" if empty == len(plan.num_tokens) else str(empty)] += 1
    covered["ids"][plan.id_kind] += 1
    covered["picks"]["all top_k" if plan.num_picks == scenario.top_k else "fewer"] += 1
    covered["memory"]["poisoned" if plan.poison else "as the last round left it"] += 1
    covered["payload"]["in workspace" if plan.in_workspace else "own tensor"] += 1
    covered["combine wire"]["e4m3" if plan.low_precision else "as given"] += 1
    covered["statistics"]["gathered" if plan.with_eplb else "none"] += 1


def story(error: A2AError, rank: int) -> str:
    """One line of an error, with the rank that prints it."""
    text = str(error)
    return text if text.startswith(f"rank {rank}:") else f"rank {rank}: {text}"
