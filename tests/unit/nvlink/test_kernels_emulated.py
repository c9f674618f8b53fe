"""The kernels on an emulated device, ranks at once, against the oracle: slots, counts, formats, masks and failures."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import pytest
import torch
from exchange_case import IDS_PAYLOAD, Case, Round, assert_equal, assert_receipt, draw
from kernel_emulator import COMPILER, EmulatedModule
from torch import Tensor

from a2a import reference
from a2a.config import ExchangeConfig, low_precision_bytes_per_token
from a2a.layout import ALIGNMENT, WorkspaceLayout, align
from a2a.nvlink import params
from a2a.quant import ScaleLayout, swizzle_scales, wire_format
from a2a.reference import RankInput, RankReceipt

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the kernels for the CPU"),
    pytest.mark.timeout(300),
]
REGIMES: Final = ("small_words", "small_bytes", "bulk", "push")
"""push: dispatch in bulk, combine rows pushed."""
_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
GLOBAL_SCALE: Final = torch.tensor(1.7)
Modules = Callable[[str, dict[str, int]], EmulatedModule]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    """Modules by file and constants, each compiled once."""
    built: dict[object, EmulatedModule] = {}

    def get(file: str, constants: dict[str, int]) -> EmulatedModule:
        key = (file, tuple(constants.items()))
        if key not in built:
            struct = params.DispatchParams if file == "dispatch.cu" else params.CombineParams
            built[key] = EmulatedModule(file, constants, struct, tmp_path_factory.mktemp("kernels"))
        return built[key]

    return get


def lines_of(told: Any) -> int:
    """Lines of a row in a landing area."""
    if isinstance(told, params.CombineParams):
        return params.lines(told.row_elements * (2, 2, 4)[told.output_type])
    return params.lines(params.image_bytes(told.payload_bytes[: told.num_payloads]))


def is_of_words(told: params.DispatchParams) -> bool:
    """Whether all rows are of whole pieces that lie on multiples of one."""
    facts = [*told.payload_bytes[: told.num_payloads], *told.payload_rows[: told.num_payloads]]
    return not any(fact % params.PIECE_BYTES for fact in facts)


class Ranks:
    """All ranks of one workspace, their launches side by side."""

    def __init__(
        self,
        modules: Modules,
        case: Case,
        regime: str,
        *,
        wire: str | None = None,
        mask: Collection[int] | None = None,
        threads: int = 64,
        columns: int = 2,
        rows: int = 2,
    ) -> None:
        self.case, self.regime, self.wire, self.mask = case, regime, wire, mask
        self.threads, self.columns, self.rows = threads, columns, rows
        sizes = case.constructor()
        if wire is not None:
            del sizes["dispatch_dtype_bytes_per_elem"]
            sizes["wire_format"] = wire
        self.config = ExchangeConfig(ep_size=case.ep_size, enable_rank_mask=mask is not None, **sizes)
        self.layout = WorkspaceLayout(self.config, params.control_regions(self.config))
        size = align(self.layout.num_bytes)
        raw = torch.zeros(case.ep_size * size + ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT
        self.workspace = raw[start : start + case.ep_size * size].view(case.ep_size, size)
        for name in ("dispatch", "combine"):
            for rank in range(case.ep_size):
                self.region(rank, name, torch.uint8).fill_(0xFF)
        self.active = sorted(mask) if mask is not None else list(range(case.ep_size))
        if mask is not None:
            words = torch.zeros(-(-case.ep_size // 64) * 64, dtype=torch.bool)
            words[self.active] = True
            bits = (words.view(-1, 8).int() << torch.arange(8)).sum(1).to(torch.uint8)
            for rank in range(case.ep_size):
                self.region(rank, "rank_mask", torch.uint8).copy_(bits)
        table = case.placement is not None
        self.dispatches = modules("dispatch.cu", params.defines(self.config, wire_format=wire, placement_table=table))
        self.combines = modules("combine.cu", params.defines(self.config, placement_table=False))
        self.table = case.placed().table.int()
        self.words = (params.HostWords * case.ep_size)()
        self.taken: set[str] = set()
        """Ways of the kernels launched so far."""
        self.set_budget(60.0)

    def set_budget(self, seconds: float) -> None:
        for words in self.words:
            words.timeout_ns = words.startup_timeout_ns = int(seconds * 1e9)

    def region(self, rank: int, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        region = self.layout.region(name)
        return self.workspace[rank, region.offset_bytes : region.end_bytes].view(dtype)

    def told(self, struct: type[ctypes.Structure], rank: int, most: int, segments: int) -> Any:
        """The fields that dispatch and combine share."""
        fields: Any = struct()
        fields.workspace, fields.stride = self.workspace.data_ptr(), self.workspace.stride(0)
        fields.host_words = ctypes.addressof(self.words) + rank * ctypes.sizeof(params.HostWords)
        fields.ep_rank, fields.max_num_tokens = rank, self.config.max_num_tokens
        fields.runtime_max_tokens_per_rank, fields.segments = most, segments
        fields.landing_tokens = params.landing_tokens(self.config)
        offsets = {region.name: region.offset_bytes for region in self.layout.regions}
        for name, _ in fields._fields_:
            if name.endswith("_offset"):
                setattr(fields, name, offsets.get(name.removesuffix("_offset"), 0))
        return fields

    def dispatch_params(self, round: Round, segments: int) -> tuple[list[Any], list[RankInput]]:
        """Per rank what its dispatch is told, and its input as the oracle wants it."""
        structs, inputs = [], []
        for rank, each in enumerate(round.inputs):
            rows: list[Tensor | None] = list(each.payloads)
            on_wire = list(each.payloads)
            fields = self.told(params.DispatchParams, rank, round.runtime_max_tokens_per_rank, segments)
            if self.wire is not None:
                made = wire_format(self.wire)
                scale = GLOBAL_SCALE if made.needs_global_scale else None
                data, scales = made.quantize(each.payloads[0], global_scale=scale)
                assert scales is not None
                on_wire[:1], rows[1:1] = [data, scales], [None]
                fields.global_scale = 0 if scale is None else scale.data_ptr()
                fields.hidden_size = each.payloads[0].shape[1]
                fields.input_type = _TYPES.index(each.payloads[0].dtype)
            widths = [payload.shape[1] * payload.dtype.itemsize for payload in on_wire]
            for index, offset in enumerate(self.layout.payload_offsets(widths)):
                payload = rows[index]
                fields.payload_rows[index] = 0 if payload is None else payload.data_ptr()
                fields.payload_offsets[index], fields.payload_bytes[index] = offset, widths[index]
                fields.payload_fill[index] = 0 if self.case.scrub == "all" else -1
            fields.topk_ids, fields.id_bytes = each.topk_ids.data_ptr(), each.topk_ids.dtype.itemsize
            fields.placement = self.table.data_ptr()
            stats = each.eplb_local_stats
            fields.eplb_local_stats = 0 if stats is None else stats.data_ptr()
            fields.num_eplb_stats = 0 if stats is None else stats.numel()
            fields.num_tokens, fields.num_payloads = each.topk_ids.shape[0], len(on_wire)
            fields.ids_payload = -1 if self.case.scrub is None else self.ids_payload
            fields.invalid_id = -1
            structs.append(fields)
            inputs.append(RankInput(each.topk_ids, on_wire, stats))
        return structs, inputs

    @property
    def ids_payload(self) -> int:
        return IDS_PAYLOAD + (self.wire is not None)

    def launch(
        self, phase: str, structs: Sequence[Any], ranks: Sequence[int] | None = None, regime: str | None = None
    ) -> None:
        fused = phase == "dispatch" and self.wire is not None
        way, columns = regime or self.regime, self.columns
        if way == "push" and phase == "dispatch":
            way = "bulk"
        if way == "small_words":
            # One sweep takes all lines.
            needed = -(-max(map(lines_of, structs)) * 8 // self.threads)
            columns = max(columns, needed)
            if fused and (needed > 1 or not all(map(is_of_words, structs))):
                way = "small_bytes"
        if fused and way != "bulk":
            columns = 1
        grid = (columns, 1 + self.rows if way.startswith("small") else 1)
        self.taken.add(way)
        module = self.dispatches if phase == "dispatch" else self.combines
        suffix = "" if phase == "dispatch" else {0: "_bf16", 1: "_fp16", 2: "_fp32"}[_TYPES.index(self.case.dtype)]
        told = [structs[rank] for rank in (self.active if ranks is None else ranks)]
        module.launch(f"{phase}_{way}{suffix}", told, grid, self.threads)

    def facts(self, rank: int) -> dict[str, int]:
        return {name: getattr(self.words[rank], name) for name, _ in params.HostWords._fields_}

    def play(self, round: Round, *, staged: bool = False, segments: int = 1) -> None:
        """One round, every defined byte compared with the oracle."""
        case, most = self.case, round.runtime_max_tokens_per_rank
        structs, inputs = self.dispatch_params(round, segments)
        active = None if self.mask is None else set(self.active)
        receipts = reference.dispatch(
            inputs,
            case.placed(),
            most,
            row_order=case.row_order,
            scrub=case.scrub,
            ids_payload=self.ids_payload,
            active_ranks=active,
        )
        self.launch("dispatch", structs)
        for rank in self.active:
            assert not self.words[rank].recorded, self.facts(rank)
            self.assert_dispatched(rank, structs[rank], inputs[rank], receipts[rank], most)
        rows = [self.expert_rows(receipt) for receipt in receipts]
        combines, outputs = self.combine_params(rows, [each.topk_ids.shape[0] for each in inputs], staged, segments)
        ids = [each.topk_ids for each in inputs]
        sums = reference.combine(ids, rows, case.placed(), row_order=case.row_order, active_ranks=active)
        self.launch("combine", combines)
        for rank in self.active:
            assert not self.words[rank].recorded, self.facts(rank)
            assert_equal(f"rank {rank}: output", outputs[rank], sums[rank])

    def assert_dispatched(self, rank: int, told: Any, given: RankInput, wanted: RankReceipt, most: int) -> None:
        ep, (n, k) = self.case.ep_size, given.topk_ids.shape
        views = []
        for index, payload in enumerate(given.payloads):
            start, width = told.payload_offsets[index], told.payload_bytes[index]
            raw = self.workspace[rank, start : start + ep * most * width].clone()
            views.append(raw.view(payload.dtype).view(ep, most, -1))
        assert_receipt(wanted, views)
        assert_equal("recv_counts", self.region(rank, "recv_counts")[:ep], wanted.recv_counts)
        assert_equal("send_counts", self.region(rank, "send_counts")[:ep], wanted.send_counts)
        for name in ("topk_target_ranks", "topk_send_indices"):
            assert_equal(name, self.region(rank, name)[: n * k].view(n, k), getattr(wanted, name))
        if self.case.row_order == "token":
            valid = self.region(rank, "row_valid", torch.uint8)[: ep * most].view(ep, most).bool()
            assert_equal("row_valid", valid, wanted.valid)
        if wanted.eplb_gathered_stats is not None and self.mask is None:
            got = self.region(rank, "eplb_gathered_stats")[: ep * self.case.eplb].view(ep, -1)
            assert_equal("eplb_gathered_stats", got, wanted.eplb_gathered_stats)

    def expert_rows(self, receipt: RankReceipt) -> Tensor:
        """`[ep, R, H]` fresh rows; NaN where none is valid, so that a stray read shows."""
        rows = torch.randn((*receipt.valid.shape, self.case.hidden_size)).to(self.case.dtype)
        rows[~receipt.valid] = float("nan")
        return rows

    def combine_params(
        self, rows: Sequence[Tensor], counts: Sequence[int], staged: bool, segments: int
    ) -> tuple[list[Any], list[Tensor]]:
        self.alive = list(rows)
        told = [self.combine_told(rank, payload, counts[rank], staged, segments) for rank, payload in enumerate(rows)]
        return [fields for fields, _ in told], [output for _, output in told]

    def combine_told(self, rank: int, payload: Tensor, count: int, staged: bool, segments: int) -> tuple[Any, Tensor]:
        """What one rank's combine is told, and the output it writes."""
        fields = self.told(params.CombineParams, rank, payload.shape[1], segments)
        if not staged:
            area = self.region(rank, "combine", self.case.dtype)[: payload.numel()].view(payload.shape)
            payload = area.copy_(payload)
        output = torch.zeros((count, payload.shape[2]), dtype=self.case.dtype)
        fields.payload, fields.output = payload.data_ptr(), output.data_ptr()
        fields.num_tokens, fields.row_elements, fields.staged = count, payload.shape[2], int(staged)
        fields.output_type = _TYPES.index(self.case.dtype)
        fields.push_warps = 1
        return fields, output

    def start_over(self) -> None:
        """What a reset does on every rank."""
        played = max(int(self.region(rank, "round_state")[:2].max()) for rank in range(self.case.ep_size)) + 1
        for rank in range(self.case.ep_size):
            state = self.region(rank, "round_state").zero_()
            state[:2] = played
            self.words[rank].recorded = self.words[rank].abort = 0


ABLE: Final = {"small_words": 4, "push": 8}
"""What the elements of a row are a multiple of for a regime to take them."""
IN_TURN: Final = ["small_words", "push", "bulk", "push", "push", "small_bytes", "push", "small_words", "bulk", "push"]
"""Each regime behind each that it may disturb."""
TABLE: Final = (2, 0, 1, 1, 2, 0, 0, 2) * 2
SHAPES: dict[str, dict[str, Any]] = {
    "token order": {"ep_size": 2, "row_order": "token", "hidden_size": 40, "max_num_tokens": 150},
    "compact, words": {"ep_size": 3, "hidden_size": 76, "id_dtype": torch.int64, "more_row_bytes": (24,), "eplb": 5},
    "compact, whole": {"ep_size": 3, "hidden_size": 328, "max_num_tokens": 40},
    "compact, odd": {"ep_size": 3, "hidden_size": 7, "id_dtype": torch.int64, "scrub": "all", "eplb": 5,
                     "more_row_bytes": (1, 3, 18, 36), "placement": TABLE},
    # Rows on 8 bytes and not on 16, one of them longer than a warp moves at once; then on 2, 4 and 1.
    "bulk, eights": {"ep_size": 2, "hidden_size": 7172, "max_num_tokens": 5, "more_row_bytes": (24, 8, 1048)},
    "bulk, narrow": {"ep_size": 2, "hidden_size": 1051, "max_num_tokens": 9, "more_row_bytes": (1034, 1036, 515)},
    "34 ranks, 40 picks": {"ep_size": 34, "top_k": 40, "num_experts": 90, "max_num_tokens": 5, "dtype": torch.float32},
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "regime"),
    [
        (shape, regime)
        for shape, sizes in SHAPES.items()
        for regime in (REGIMES[2:] if "bulk" in shape else REGIMES)
        if regime not in ABLE or sizes.get("hidden_size", 64) % ABLE[regime] == 0
    ],
)
def test_rounds_equal_the_oracle(modules: Modules, shape: str, regime: str) -> None:
    case = Case(**SHAPES[shape])
    crowded = case.ep_size > 8
    ranks = Ranks(modules, case, regime, columns=1 if crowded else 2, rows=1 if crowded else 2)
    for seed in range(1 if crowded else 3):
        ranks.play(draw(case, seed), staged=seed % 2 == 0, segments=1 + seed)


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("hidden", [7, 128, 300, 520])
def test_rows_of_the_e4m3_wire_are_made_in_combine(modules: Modules, hidden: int, dtype: torch.dtype) -> None:
    """Of rows that lie anywhere, with blocks of zeros, infinities and numbers that are none."""
    case = Case(ep_size=3, row_order="token" if hidden % 2 else "compact", hidden_size=hidden, dtype=dtype)
    ranks = Ranks(modules, case, "bulk")
    for seed in range(3):
        round = draw(case, seed)
        most, ids = round.runtime_max_tokens_per_rank, [each.topk_ids for each in round.inputs]
        structs, inputs = ranks.dispatch_params(round, 1)
        receipts = reference.dispatch(inputs, case.placed(), most, row_order=case.row_order)
        ranks.launch("dispatch", structs)
        rows = [ranks.expert_rows(receipt) * 3.0 ** (seed - 1) for receipt in receipts]
        for each in rows:
            each[:, :, hidden // 2 :][each[:, :, hidden // 2 :].abs() < 0.2] = 0.0
            each[0, 0, -1], each[-1, -1, 0] = float("inf"), float("nan")
        # Neither the rows nor the outputs start where an allocator would let them.
        shift = seed * 3
        rows = [torch.cat([each.new_zeros(shift), each.flatten()])[shift:].view(each.shape) for each in rows]
        told, outputs = ranks.combine_params(rows, [len(each) for each in ids], True, 1 + seed)
        for fields in told:
            fields.scaled, fields.payload_type, fields.output_type = 1, _TYPES.index(dtype), 0
            fields.row_pitch = low_precision_bytes_per_token(hidden)
        outputs = [torch.zeros(each.shape, dtype=torch.bfloat16) for each in outputs]
        for fields, output in zip(told, outputs, strict=True):
            fields.output = output.data_ptr()
        ranks.combines.launch("combine_bulk_e4m3", told, (2, 1), 96)
        sums = reference.combine(ids, rows, case.placed(), row_order=case.row_order, low_precision=True)
        for rank, output in enumerate(outputs):
            assert not ranks.words[rank].recorded, ranks.facts(rank)
            assert_equal(f"rank {rank}: output", output, sums[rank])


@pytest.mark.parametrize(
    ("regime", "dtype"),
    [*itertools.product(("small", "bulk", "push"), _TYPES), ("low precision", torch.bfloat16)],
)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
def test_quantized_output_is_made_of_the_rounded_sum(
    modules: Modules, name: str, regime: str, dtype: torch.dtype
) -> None:
    """In each layout, at any address, by one launch; in a round that fails, of rows that are not a number."""
    pytest.importorskip("cuda.bindings", reason="its fields are filled in beside a launcher: install a2a[cu13]")
    from a2a.nvlink.quantize_rows import fill

    # More than one chunk of 512 elements; a row of mxfp8 need not be whole blocks.
    case = Case(ep_size=3, hidden_size=1064 if name == "mxfp8" else 1056, max_num_tokens=9, dtype=dtype)
    ways = {"small": "small_bytes", "low precision": "bulk"}
    ranks = Ranks(modules, case, ways.get(regime, regime))
    made = modules("combine.cu", {**params.defines(ranks.config, placement_table=False), "QUANTIZED_OUTPUT": 1})
    form, low_precision = wire_format(name), regime == "low precision"
    scale = GLOBAL_SCALE if form.needs_global_scale else None
    kind = "e4m3" if low_precision else params.OUTPUT_TYPES[_TYPES.index(dtype)]
    kernel = f"combine_{'bulk' if low_precision else regime}_quantized_{kind}"
    grid = (1, 3) if regime == "small" else (2, 1)
    for seed, layout in enumerate((*ScaleLayout, ScaleLayout.SWIZZLED_128X4)):
        fails = seed == len(ScaleLayout)
        round = draw(case, seed, [9, 0, 5] if seed == 1 else None)
        most, ids = round.runtime_max_tokens_per_rank, [each.topk_ids for each in round.inputs]
        structs, inputs = ranks.dispatch_params(round, 1)
        receipts = reference.dispatch(inputs, case.placed(), most, row_order=case.row_order)
        ranks.launch("dispatch", structs)
        rows = [ranks.expert_rows(receipt) * 2.0 ** (8 * seed - 8) for receipt in receipts]
        for each in rows:
            each[:, :, :64][each[:, :, :64].abs() < 0.5] = 0.0
            each[0, 0, 700], each[0, 0, 900] = float("inf"), float("nan")
        told, sums = ranks.combine_params(rows, [len(each) for each in ids], low_precision or seed == 1, 1 + seed)
        if low_precision:
            sums = [each.to(torch.bfloat16) for each in sums]
        outputs = []
        for fields, each in zip(told, sums, strict=True):
            each.fill_(3.0)
            data, linear = form.quantize(each, global_scale=scale)
            data = torch.zeros(data.numel() + 3, dtype=torch.uint8)[seed % 4 :][: data.numel()].view(data.shape)
            numel = swizzle_scales(form.need_scales(linear).view(torch.uint8), layout).numel()
            scales = torch.full((numel,), 0xAA, dtype=torch.uint8)
            fill(fields.quantized, form, each, data, scales, layout, scale)
            outputs.append((data, scales))
            fields.output = each.data_ptr()
            if low_precision:
                fields.scaled, fields.payload_type, fields.output_type = 1, _TYPES.index(dtype), 0
                fields.row_pitch = low_precision_bytes_per_token(case.hidden_size)
        if fails:
            ranks.set_budget(0.3)
        launched = [0, 2] if fails else range(3)
        made.launch(kernel, [told[rank] for rank in launched], grid, 96)
        wanted = reference.combine(ids, rows, case.placed(), row_order=case.row_order, low_precision=low_precision)
        for rank in launched:
            assert bool(ranks.words[rank].recorded) == fails, ranks.facts(rank)
            sum_ = torch.full_like(sums[rank], float("nan")) if fails else wanted[rank]
            data, linear = form.quantize(sum_, global_scale=scale)
            scales = swizzle_scales(form.need_scales(linear).view(torch.uint8), layout)
            assert_equal(f"rank {rank}: data", outputs[rank][0], data.view(torch.uint8))
            assert_equal(f"rank {rank}: scales", outputs[rank][1], scales.reshape(-1))


@pytest.mark.parametrize("row_order", ["token", "compact"])
@pytest.mark.parametrize("regimes", [["bulk"] * 6, ["push"] * 6, IN_TURN], ids=["bulk", "push", "in turn"])
def test_ranks_that_run_ahead_disturb_nobody(modules: Modules, regimes: Sequence[str], row_order: str) -> None:
    """Each rank goes on as soon as its own launch has ended, and is late by turns; blocks lie elsewhere each round."""
    case = Case(ep_size=3, row_order=row_order, hidden_size=64, max_num_tokens=24)
    ranks = Ranks(modules, case, regimes[0])
    counts = [[24, 9, 17], [3, 0, 2], [8, 16, 1], [0, 5, 24]]
    rounds = [draw(case, seed, counts[seed % 4]) for seed in range(len(regimes))]
    made, told = [], []
    for round in rounds:
        structs, inputs = ranks.dispatch_params(round, 1)
        most = round.runtime_max_tokens_per_rank
        receipts = reference.dispatch(
            inputs, case.placed(), most, row_order=row_order, scrub=case.scrub, ids_payload=IDS_PAYLOAD
        )
        rows = [ranks.expert_rows(receipt) for receipt in receipts]
        ids = [each.topk_ids for each in inputs]
        made.append((receipts, rows, reference.combine(ids, rows, case.placed(), row_order=row_order)))
        told.append((structs, inputs))
    faults: list[str] = []

    def play(rank: int) -> None:
        delays = random.Random(rank)
        try:
            for regime, (receipts, rows, sums), (structs, inputs) in zip(regimes, made, told, strict=True):
                most, count = structs[rank].runtime_max_tokens_per_rank, structs[rank].num_tokens
                ranks.launch("dispatch", structs, [rank], regime)
                # Its rows are this rank's until it combines.
                time.sleep(delays.choice((0.0, 0.0, 0.05)))
                ranks.assert_dispatched(rank, structs[rank], inputs[rank], receipts[rank], most)
                fields, output = ranks.combine_told(rank, rows[rank], count, staged=False, segments=1)
                ranks.launch("combine", [fields] * 3, [rank], regime)
                assert_equal("output", output, sums[rank])
                time.sleep(delays.choice((0.0, 0.0, 0.05)))
        except AssertionError as error:
            faults.append(f"rank {rank}: {error}; {ranks.facts(rank)}")

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(3)]
    ranks.combines.set_pauses(3000)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks.combines.set_pauses(0)
    assert not faults


@pytest.mark.parametrize("regime", REGIMES)
def test_masked_ranks_are_neither_sent_to_nor_waited_for(modules: Modules, regime: str) -> None:
    case = Case(ep_size=3, row_order="token")
    ranks = Ranks(modules, case, regime, mask={0, 2})
    for seed in range(2):
        ranks.play(draw(case, seed, [9, 5, 16]))


@pytest.mark.parametrize("row_order", ["token", "compact"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_rank_masked_out_since_the_dispatch_adds_nothing(modules: Modules, regime: str, row_order: str) -> None:
    """It has gone: neither its header nor its rows come, and what lies in its memory counts for nothing."""
    case = Case(ep_size=3, row_order=row_order)
    ranks = Ranks(modules, case, regime, mask={0, 1, 2})
    for seed in range(2):
        round = draw(case, seed, [9, 5, 16])
        ids = [each.topk_ids for each in round.inputs]
        structs, inputs = ranks.dispatch_params(round, 1)
        receipts = reference.dispatch(inputs, case.placed(), 16, row_order=row_order)
        ranks.launch("dispatch", structs)
        rows = [ranks.expert_rows(receipt) for receipt in receipts]
        combines, outputs = ranks.combine_params(rows, [9, 5, 16], bool(seed), 1)
        for rank in (0, 2):
            ranks.region(rank, "rank_mask", torch.uint8)[0] = 0b101
        ranks.launch("combine", combines, [0, 2])
        # Slots are those of the dispatch.
        gone = [torch.zeros_like(each) if rank == 1 else each for rank, each in enumerate(rows)]
        sums = reference.combine(ids, gone, case.placed(), row_order=row_order)
        for rank in (0, 2):
            assert not ranks.words[rank].recorded, ranks.facts(rank)
            assert_equal(f"rank {rank}: output", outputs[rank], sums[rank])
        ranks.start_over()
        for rank in (0, 2):
            ranks.region(rank, "rank_mask", torch.uint8)[0] = 0b111


@pytest.mark.parametrize("regime", [regime for regime in REGIMES if regime != "push"])  # dispatch's are three
@pytest.mark.parametrize("wire", [name for name in params.WIRE_FORMATS if name is not None])
def test_formats_are_made_on_the_way_bit_for_bit(modules: Modules, wire: str, regime: str) -> None:
    # One whole chunk of 512 elements and a part of one; mxfp8 rows need not be whole blocks. In whole words: one group
    # of elements for a thread, two where they have 4 bits.
    hidden_size = 620 if wire == "mxfp8" else 640
    if regime == "small_words":
        hidden_size = 1280 if wire.endswith("fp4") else 768
    case = Case(ep_size=2, hidden_size=hidden_size, max_num_tokens=6)
    ranks = Ranks(modules, case, regime, wire=wire, rows=1)
    for seed in range(2):
        round = draw(case, seed)
        hidden = round.inputs[0].payloads[0]
        hidden.mul_(torch.exp2(torch.randint(-20, 20, hidden.shape).float()))
        if len(hidden) > 1:
            hidden[0, :128], hidden[1, 200], hidden[1, 300] = 0, float("nan"), float("-inf")
        # Halfway between two codes, of e2m1 where the largest is 6, of e4m3 where it is 448.
        hidden[:, 128:160] = (torch.arange(32) - 8) / 4
        hidden[:, 128] = 6
        hidden[:, 160:192] = 448 - 16 * torch.arange(32)
        ranks.play(round, segments=2)
    assert ranks.taken == {regime}


@pytest.mark.parametrize("regime", REGIMES)
def test_failures_end_the_round_and_a_reset_starts_over(modules: Modules, regime: str) -> None:
    case = Case(ep_size=3, max_num_tokens=40, placement=TABLE)
    ranks = Ranks(modules, case, regime)
    ranks.play(draw(case, 1))
    round = draw(case, 2, [5, 6, 7], 36)
    structs, _ = ranks.dispatch_params(round, 1)
    rows = [torch.zeros(3, 36, case.hidden_size, dtype=case.dtype) for _ in range(3)]
    combines, outputs = ranks.combine_params(rows, [5, 6, 7], False, 1)

    # A peer that does not come.
    ranks.set_budget(0.3)
    ranks.launch("dispatch", structs, [0, 2])
    for rank in (0, 2):
        facts = ranks.facts(rank)
        assert facts["recorded"] == 1 and (facts["kind"], facts["phase"], facts["peer"]) == (1, 1, 1)
        assert_void(ranks, rank, structs[rank])
    start = time.monotonic()
    ranks.launch("combine", combines, [0])
    assert outputs[0].isnan().all() and time.monotonic() - start < 0.3, "a launch after a failure waited"

    # Ranks that differ, in rows of a block and in widths.
    ranks.set_budget(60.0)
    for field, other, kind in (("runtime_max_tokens_per_rank", 40, 3), ("digest", 9, 4)):
        ranks.start_over()
        ranks.play(draw(case, 3))
        kept = getattr(structs[1], field)
        setattr(structs[1], field, other)
        ranks.launch("dispatch", structs)
        setattr(structs[1], field, kept)
        for rank in range(3):
            facts = ranks.facts(rank)
            assert facts["recorded"] == 1 and facts["kind"] == kind
            assert {facts["wanted"], facts["seen"]} == {kept, other}
            assert rank == 1 or facts["peer"] == 1

    # The host's word.
    ranks.start_over()
    timer = threading.Timer(0.3, lambda: [setattr(ranks.words[rank], "abort", 2) for rank in (0, 2)])
    timer.start()
    ranks.launch("dispatch", structs, [0, 2])
    timer.join()
    assert [(ranks.facts(rank)["kind"], ranks.facts(rank)["peer"]) for rank in (0, 2)] == [(2, 1), (2, 1)]

    # A peer that does not come to combine.
    ranks.start_over()
    ranks.launch("dispatch", structs)
    ranks.set_budget(0.3)
    ranks.launch("combine", combines, [0, 2])
    for rank in (0, 2):
        assert (ranks.facts(rank)["phase"], ranks.facts(rank)["peer"]) == (2, 1)
        assert outputs[rank].isnan().all()
    ranks.set_budget(60.0)
    ranks.start_over()
    ranks.play(draw(case, 4), staged=True)


@pytest.mark.parametrize("regime", REGIMES)
def test_no_round_has_the_number_of_memory_that_was_never_written(modules: Modules, regime: str) -> None:
    case = Case(ep_size=3, max_num_tokens=24)
    ranks = Ranks(modules, case, regime)
    for rank in range(3):
        ranks.region(rank, "round_state")[:2] = -2
    for seed, counts in enumerate(([2, 1, 0], [24, 9, 17], [5, 5, 5])):
        ranks.play(draw(case, seed, counts))
    assert all(ranks.region(rank, "round_state")[:2].tolist() == [3, 3] for rank in range(3))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("regime", REGIMES)
def test_launches_behind_a_failure_play_no_round(modules: Modules, regime: str, phase: str) -> None:
    """Nor those of the phase that failed, though the signals that it missed have come by then."""
    case = Case(ep_size=2, max_num_tokens=8)
    ranks = Ranks(modules, case, regime)
    round = draw(case, 2, [5, 6])
    most = round.runtime_max_tokens_per_rank
    structs, _ = ranks.dispatch_params(round, 1)
    rows = [torch.ones(2, most, case.hidden_size, dtype=case.dtype) for _ in range(2)]
    if phase == "combine":
        ranks.launch("dispatch", structs)
    combines, outputs = ranks.combine_params(rows, [5, 6], False, 1)
    told = structs if phase == "dispatch" else combines
    ranks.set_budget(0.2)
    ranks.launch(phase, told, [0])
    ranks.launch(phase, told, [1])
    assert ranks.facts(0)["recorded"] == 1
    order = [("dispatch", structs), ("combine", combines)] * 2
    for name, each in order[1 if phase == "dispatch" else 2 :]:
        outputs[0].zero_()
        ranks.launch(name, each, [0])
        if name == "dispatch":
            assert_void(ranks, 0, structs[0])
        else:
            assert outputs[0].isnan().all()
    # What did nothing was counted.
    assert ranks.region(0, "round_state")[:2].tolist() == [2, 2]


def assert_void(ranks: Ranks, rank: int, told: Any) -> None:
    ep, most = ranks.case.ep_size, told.runtime_max_tokens_per_rank
    assert not ranks.region(rank, "recv_counts")[:ep].any()
    start, width = told.payload_offsets[IDS_PAYLOAD], told.payload_bytes[IDS_PAYLOAD]
    assert (ranks.workspace[rank, start : start + ep * most * width].view(torch.int32) == -1).all()
