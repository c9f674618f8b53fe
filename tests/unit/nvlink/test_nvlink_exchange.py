"""What kernels are told: by whatever calls it was preceded, a launch has the fields and shape of a first one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.config import ExchangeConfig, low_precision_bytes_per_token
from a2a.layout import SharedAreaLayout, WorkspaceLayout
from a2a.nvlink import params
from a2a.nvlink.tuning import Point, find_tuning
from a2a.placement import Placement
from a2a.quant import ScaleLayout, wire_format
from a2a.transport import CombineCall, DispatchCall, Payload, Quantize

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"
)
CONFIG = ExchangeConfig(
    ep_size=2,
    max_num_tokens=600,
    top_k=4,
    num_experts=8,
    hidden_size=256,
    wire_format="mxfp8",
    extra_payload_bytes_per_token=4096,
    eplb_stats_num_experts=5,
    num_contexts=2,
)
LAYOUT = WorkspaceLayout(CONFIG, params.control_regions(CONFIG))
WORKSPACE = torch.zeros((2, LAYOUT.num_bytes), dtype=torch.uint8)
ROWS = {dtype: torch.zeros((600, 256), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
IDS = {dtype: torch.zeros((600, 4), dtype=dtype) for dtype in (torch.int32, torch.int64)}
MORE = torch.zeros((600, 24), dtype=torch.uint8)
STATS = torch.zeros(5, dtype=torch.int32)
BLOCKS = torch.zeros((2, 600, 256), dtype=torch.bfloat16)
OUTPUTS = {dtype: torch.zeros((600, 256), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
SHIPPED = find_tuning("sm_90").tuning
TUNING = dataclasses.replace(
    SHIPPED,
    points=tuple(
        # At some sizes one thread moves two parts of a row.
        dataclasses.replace(each, threads=32, parts_per_thread=2)
        if each.regime == "small" and each.tokens > 8
        else each
        for each in SHIPPED.points
    ),
)
SUMS = {dtype: torch.zeros_like(output) for dtype, output in OUTPUTS.items()}
MADE = torch.zeros(600 * 256 + 4, dtype=torch.uint8)
SCALES = torch.zeros(600 * 256, dtype=torch.uint8)
_COMBINES = (
    *("small_words_bf16", "small_bytes_bf16", "bulk_bf16", "push_bf16", "bulk_e4m3"),
    *("small_quantized_bf16", "bulk_quantized_bf16", "push_quantized_bf16", "bulk_quantized_e4m3"),
)
FUSED = Quantize(wire_format("mxfp8"), 0, None)


class Recorder:
    """In place of a loaded kernel: keeps what each launch would pass."""

    max_threads = 512

    def __init__(self, name: str, kind: type[ctypes.Structure], launches: list[Any]) -> None:
        self.name, self.parameters, self.prepared, self._launches = name, kind(), None, launches
        self._shape: Any = None

    def blocks_per_sm(self, num_threads: int, shared_bytes: int = 0) -> int:
        return 2048 // num_threads

    def shape(self, *shape: Any) -> None:
        self._shape = shape

    def launch(self, stream: int, *, pdl: bool = False) -> None:
        fields = _fields(self.parameters)
        count = fields.get("num_payloads")
        if count is not None:
            # What lies beyond the payloads of a launch is not read.
            for name in ("payload_rows", "payload_offsets", "payload_bytes", "payload_fill"):
                fields[name] = fields[name][:count]
        if "small" in self.name:
            del fields["segments"]
        self._launches.append((self.name, self._shape, pdl, fields))


def _fields(struct: Any) -> dict[str, Any]:
    fields = {}
    for name, _ in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            value = _fields(value)
        fields[name] = list(value) if isinstance(value, ctypes.Array) else value
    return fields


@pytest.fixture(autouse=True)
def one_place_for_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two launches which are told the same are told the same address."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: SUMS[dtype][: shape[0], : shape[1]])


def exchange() -> tuple[Any, list[Any]]:
    """An exchange as its constructor leaves it, but for the GPU."""
    from a2a.nvlink.exchange import Exchange

    launches: list[Any] = []

    class Here(Exchange):
        def __init__(self) -> None:
            self.workspace, self.device, self.ep_rank, self.stream = WORKSPACE, WORKSPACE.device, 1, None
            self._config, self._layout, self.landing_tokens = CONFIG, LAYOUT, params.landing_tokens(CONFIG)
            self.tuning, self._small_max_tokens, self._points = TUNING, None, {}
            self._sharers, self._num_sms = 1, 132
            self._needs_table, self._table = False, Placement.contiguous(8, 2).table
            self._pinned = WORKSPACE.new_zeros(256)
            self._kernels, self._resident, self._whole, self._top_k = {}, {}, {}, [4, 4]
            self._alike = {}

        def _enter(self, stream: Any) -> Any:
            return SimpleNamespace(cuda_stream=7)

        def _load(self, wires: Any, top_k: int, *, combine: bool) -> None:
            for wire in wires:
                for name in ("dispatch_small_words", "dispatch_small_bytes", "dispatch_bulk"):
                    self._add(("dispatch", name, wire, top_k), name, params.DispatchParams)
            for name in _COMBINES if combine else ():
                self._add(("combine", "combine_" + name, top_k), name.rpartition("_")[0], params.CombineParams)

        def _add(self, key: tuple[object, ...], name: str, kind: type[ctypes.Structure]) -> None:
            kernel: Any = Recorder(name, kind, launches)
            self._constants(kernel.parameters)
            self._kernels[key] = kernel

    return Here(), launches


def dispatch_call(draw: random.Random) -> DispatchCall:
    n, context = draw.choice((0, 1, 3, 300)), draw.randrange(2)
    ids = IDS[draw.choice((torch.int32, torch.int64))][:n, : draw.choice((2, 4))]
    rows = ROWS[draw.choice((torch.bfloat16, torch.float32))][:n]
    fused = draw.random() < 0.4
    fill = draw.choice((None, 0))
    parts: list[tuple[Any, int]] = [(rows, 256), (None, 8)] if fused else [(rows[:, : draw.choice((8, 64))], 128)]
    parts += draw.choice(([], [(MORE[:n], 24)], [(MORE[:n], 24), (ids, 16)]))
    offsets = LAYOUT.payload_offsets([width for _, width in parts], context)
    return DispatchCall(
        context=context,
        round=1,
        topk_ids=ids,
        payloads=tuple(Payload(width, at, fill) for (_, width), at in zip(parts, offsets, strict=True)),
        rows=tuple(rows for rows, _ in parts),
        runtime_max_tokens_per_rank=max(n, draw.choice((1, 8, 500))),
        ids_payload=draw.choice((None, 1 if len(parts) > 1 else None)),
        invalid_id=draw.choice((-1, 77)),
        quantize=FUSED if fused else None,
        eplb_local_stats=draw.choice((None, STATS)),
        timeout_s=1.0,
        stream=None,
        num_sms=draw.choice((None, 16)),
        enable_pdl=draw.choice((None, False)),
        like=object(),
    )


def alike(draw: random.Random, call: DispatchCall) -> DispatchCall:
    """A call of which no more than `like` says may differ."""
    addresses = {
        torch.uint8: MORE,
        **{dtype: each for rows in (ROWS, IDS) for dtype, each in rows.items()},
    }
    first = call.rows[0]
    assert first is not None
    shift = draw.choice((0, 0, 8, 3))
    moved = addresses[first.dtype].view(-1)[shift : shift + first.numel()].view(first.shape)
    return call._replace(
        rows=(moved, *call.rows[1:]), num_sms=draw.choice((None, 16)), enable_pdl=draw.choice((None, False))
    )


def changed(draw: random.Random, call: DispatchCall) -> DispatchCall:
    """The same call but for one thing."""
    other = dispatch_call(draw)
    widths = [payload.row_bytes for payload in call.payloads]
    context = 1 - call.context
    offsets = LAYOUT.payload_offsets(widths, context)
    first = call.rows[0]
    assert first is not None
    another = ROWS[torch.float32 if first.dtype == torch.bfloat16 else torch.bfloat16][: first.shape[0]]
    changes: list[dict[str, Any]] = [
        {"ids_payload": len(widths) - 1 if call.ids_payload is None else None},
        {"invalid_id": call.invalid_id + 1},
        {"num_sms": 16 if call.num_sms is None else None},
        {"eplb_local_stats": STATS if call.eplb_local_stats is None else None},
        {"runtime_max_tokens_per_rank": call.runtime_max_tokens_per_rank + 1},
        {"topk_ids": IDS[torch.int64 if call.topk_ids.dtype == torch.int32 else torch.int32][: first.shape[0], :4]},
        {"payloads": tuple(each._replace(fill_byte=3) for each in call.payloads)},
        {"rows": (another, *call.rows[1:])},
        {
            "context": context,
            "payloads": tuple(each._replace(offset_bytes=at) for each, at in zip(call.payloads, offsets, strict=True)),
        },
    ]
    change = draw.choice(changes)
    return other if call.runtime_max_tokens_per_rank > 590 else call._replace(**change, like=object())


def combine_call(draw: random.Random, after: DispatchCall, likes: dict[object, object]) -> CombineCall:
    (n, top_k), most = after.topk_ids.shape, after.runtime_max_tokens_per_rank
    width, low = draw.choice((64, 256)), draw.random() < 0.3
    dtype = torch.bfloat16 if low else draw.choice((torch.bfloat16, torch.float32))
    shift = draw.choice((0, 0, 4, 1))
    return CombineCall(
        context=after.context,
        round=1,
        attempt=1,
        payload=BLOCKS.view(-1)[shift : shift + 2 * most * width].view(2, most, width),
        payload_in_workspace=draw.random() < 0.5,
        runtime_max_tokens_per_rank=most,
        num_tokens=n,
        low_precision=low,
        output=OUTPUTS[dtype][:n, :width],
        output_quantize=None,
        output_scales=None,
        scale_layout=ScaleLayout.LINEAR,
        timeout_s=1.0,
        stream=None,
        num_sms=draw.choice((None, 16)),
        enable_pdl=None,
        like=likes.setdefault((after.context, n, top_k, most, width, low, dtype), object()),
    )


def quantized(draw: random.Random, call: CombineCall, likes: dict[object, object]) -> CombineCall:
    """The same rows for an output of a format."""
    form, layout = wire_format(draw.choice(("mxfp8", "nvfp4"))), draw.choice(list(ScaleLayout))
    shift = draw.randrange(4)
    rows, width = call.num_tokens, call.payload.shape[2]
    columns = form.data_width(width, 0)
    return call._replace(
        output=MADE[shift : shift + rows * columns].view(form.data_dtype).view(rows, columns),
        output_quantize=Quantize(form, 0, torch.tensor(3.0) if form.needs_global_scale else None),
        output_scales=SCALES[shift:][: math.prod(layout.shape(rows, width // form.block))],
        scale_layout=layout,
        like=likes.setdefault((call.like, form.name, layout), object()),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_launch_owes_nothing_to_earlier_ones(seed: int) -> None:
    draw = random.Random(seed)
    used, seen = exchange()
    calls: list[DispatchCall] = []
    likes: dict[object, object] = {}
    for _ in range(100):
        # Most calls repeat an earlier one, as layers do, or all but repeat the last.
        kind = draw.random() if calls else 1.0
        if kind < 0.4:
            call = changed(draw, calls[-1])
        elif kind < 0.8:
            call = alike(draw, calls[-1] if kind < 0.6 else draw.choice(calls))
        else:
            call = dispatch_call(draw)
        calls.append(call)
        ended = combine_call(draw, call, likes)
        if draw.random() < 0.4:
            ended = quantized(draw, ended, likes)
        fresh, wanted = exchange()
        fresh._pinned = used._pinned
        for each in (used, fresh):
            each.dispatch(call)
            each.combine(ended)
        assert seen[-2:] == wanted, (seen[-2:], wanted)
    assert len(seen) == 200
    taken = [launch for launch in seen if "small_words" in launch[0]]
    assert taken and all(_covers_a_row(*launch) for launch in taken)


@pytest.mark.parametrize("way", ["small", "bulk", "push", "low precision"])
@pytest.mark.parametrize(("name", "columns"), [("mxfp8", 256), ("nvfp4", 128), ("mxfp4", 128)])
def test_sums_are_quantized_in_the_launch_that_makes_them(name: str, columns: int, way: str) -> None:
    """Straight into the caller's output and scales, by a kernel that was there before."""
    used, seen = pushing() if way == "push" else exchange()
    used._small_max_tokens = 500 if way == "small" else 0
    rows, low_precision = 500 if way == "small" else 600, way == "low precision"
    call = _large_combine(num_tokens=rows, runtime_max_tokens_per_rank=rows, payload=BLOCKS[:, :rows])
    form, scale = wire_format(name), torch.tensor(3.0)
    used.dispatch(dispatch_call(random.Random(1)))
    output = MADE[: rows * columns].view(form.data_dtype).view(rows, columns)
    scales = SCALES[: math.prod(ScaleLayout.SWIZZLED_8X4.shape(rows, 256 // form.block))]
    used.combine(
        call._replace(
            low_precision=low_precision,
            output=output,
            output_quantize=Quantize(form, 0, scale),
            output_scales=scales,
            scale_layout=ScaleLayout.SWIZZLED_8X4,
        )
    )
    assert len(seen) == 2
    kernel, ((blocks, _), _, _), _, fields = seen[1]
    assert kernel == f"{'bulk' if low_precision else way}_quantized"
    # Whoever quantises a row has all of it.
    assert blocks == 1 or way != "small"
    assert fields["output"] == SUMS[torch.bfloat16].data_ptr() and fields["output_type"] == 0
    told = fields["quantized"]
    assert told["rows"] == fields["output"] and told["data"] == output.data_ptr()
    assert told["scales"] == scales.data_ptr() and told["global_scale"] == scale.data_ptr()
    assert params.WIRE_FORMATS[told["wire_format"]] == name
    assert params.SCALE_LAYOUTS[told["scale_layout"]] == ScaleLayout.SWIZZLED_8X4.value
    assert (told["num_rows"], told["hidden_size"], told["row_elements"]) == (rows, 256, 256)


def pushing() -> tuple[Any, list[Any]]:
    """An exchange whose table pushes combine rows of rounds of 600 tokens where it may."""
    used, seen = exchange()
    point = Point(phase="combine", rows="copied", ep_size=2, row_bytes=512, tokens=600, regime="push", threads=512,
                  ctas=96, push_warps=3, unit_bytes=512, pair_us=1.0)  # fmt: skip
    rest = dataclasses.replace(point, regime="bulk", push_warps=0, pair_us=2.0)
    used.tune(used.tuning.with_points((point, rest), "made up"))
    used._small_max_tokens = 0
    return used, seen


def _large_combine(**more: Any) -> CombineCall:
    draw = random.Random(1)
    after = dispatch_call(draw)._replace(runtime_max_tokens_per_rank=600, topk_ids=IDS[torch.int32][:600])
    call = combine_call(draw, after, {})._replace(
        payload=BLOCKS, output=OUTPUTS[torch.bfloat16], payload_in_workspace=False, low_precision=False, num_sms=None
    )
    return call._replace(**more)


@pytest.mark.parametrize(("num_sms", "ctas", "push_warps"), [(None, 96, 3), (200, 96, 3), (16, 16, 8)])
def test_rows_are_pushed_by_a_share_of_the_warps(num_sms: int | None, ctas: int, push_warps: int) -> None:
    used, seen = pushing()
    used.combine(_large_combine(num_sms=num_sms))
    ((name, (grid, threads, _), _, fields),) = seen
    assert (name, grid, threads) == ("push", (ctas, 1), 512)
    assert (fields["push_warps"], fields["segments"], fields["payload"]) == (push_warps, 1, BLOCKS.data_ptr())
    assert fields["dispatch_offset"] == LAYOUT.region("dispatch", _large_combine().context).offset_bytes


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"low_precision": True, "payload": BLOCKS.to(torch.float8_e4m3fn)}, "rows of e4m3 are read where they lie"),
        ({"payload": BLOCKS[:, :, :4].contiguous(), "output": OUTPUTS[torch.bfloat16][:, :4]}, "rows of 8 bytes"),
    ],
)
def test_rows_that_cannot_be_pushed_are_pulled(more: dict[str, Any], why: str) -> None:
    used, seen = pushing()
    used.combine(_large_combine(**more))
    assert [each[0] for each in seen] == ["bulk"], why


def test_rows_are_pulled_where_a_caller_owns_the_workspace() -> None:
    """Its layout has no dispatch area in which they could land."""
    used, seen = pushing()
    used._layout = SharedAreaLayout(CONFIG, params.control_regions(CONFIG), payload_bytes=8 << 20)
    used.combine(_large_combine())
    assert [each[0] for each in seen] == ["bulk"]


@pytest.mark.parametrize("regime", ["push", "bulk", "small"])
def test_a_payload_that_peers_may_write_to_is_moved_first(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed rows, or those of a next round with other blocks, would land where this rank still reads."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    used, seen = pushing() if regime == "push" else exchange()
    used._small_max_tokens, used.landing_tokens = (600, 600) if regime == "small" else (0, 0)
    call = _large_combine()
    areas = {name: LAYOUT.region(name, call.context).offset_bytes for name in ("dispatch", "combine")}
    views = {
        name: WORKSPACE[1, start : start + BLOCKS.numel() * 2].view(torch.bfloat16).view(BLOCKS.shape)
        for name, start in areas.items()
    }
    for seed in range(2):
        views["dispatch"].copy_(torch.randn(BLOCKS.shape, generator=torch.Generator().manual_seed(seed)))
        used.combine(call._replace(payload=views["dispatch"]))
        assert regime in seen[-1][0] and not seen[-1][3]["staged"]
        assert seen[-1][3]["payload"] == views["combine"].data_ptr()
        assert torch.equal(views["combine"], views["dispatch"])
    for payload in (BLOCKS, views["dispatch"], BLOCKS):
        # Calls that are alike but for the place.
        used.combine(call._replace(payload=payload))
    assert [each[3]["payload"] == views["combine"].data_ptr() for each in seen[-3:]] == [False, True, False]
    assert [each[3]["staged"] for each in seen[-3:]] == [1, 0, 1]


@pytest.mark.parametrize("in_workspace", [False, True])
def test_rows_of_the_wire_are_made_by_combine_itself(in_workspace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the caller's own rows, or from a copy where the wire's rows come to lie on them."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    used, seen = exchange()
    call = _large_combine(low_precision=True, payload_in_workspace=in_workspace)
    if in_workspace:
        start = LAYOUT.region("combine", call.context).offset_bytes
        area = WORKSPACE[1, start : start + BLOCKS.numel() * 2].view(torch.bfloat16).view(BLOCKS.shape)
        call = call._replace(payload=area)
    used.combine(call)
    ((name, _, _, fields),) = seen
    assert name == "bulk" and fields["staged"] == fields["scaled"] == 1
    assert fields["row_pitch"] == low_precision_bytes_per_token(256) and fields["row_elements"] == 256
    assert (fields["payload"] == call.payload.data_ptr()) != in_workspace


def _covers_a_row(name: str, shape: Any, pdl: bool, fields: dict[str, Any]) -> bool:
    """What a kernel of whole words needs: a thread for each part of a row."""
    widths = fields["payload_bytes"] if "payload_bytes" in fields else [2 * fields["row_elements"]]
    (columns, _), threads, _ = shape
    return columns * threads >= 8 * params.lines(params.image_bytes(widths)) and not any(each % 8 for each in widths)


def one_token() -> DispatchCall:
    rows, ids = ROWS[torch.bfloat16][:1], IDS[torch.int32][:1]
    offsets = LAYOUT.payload_offsets([512, 16], 0)
    return dispatch_call(random.Random(1))._replace(
        topk_ids=ids,
        payloads=(Payload(512, offsets[0], None), Payload(16, offsets[1], None)),
        rows=(rows, ids),
        runtime_max_tokens_per_rank=1,
        quantize=None,
        num_sms=None,
    )


def test_whole_words_are_decided_by_the_size_of_the_round() -> None:
    """Few tokens have a thread for each part of their rows, more have not: the kernel must not be the first one's."""
    used, seen = exchange()
    call = one_token()
    for most in (1, 512, 1, 512):
        used.dispatch(call._replace(runtime_max_tokens_per_rank=most, like=None))
    assert [launch[0] for launch in seen] == ["dispatch_small_words", "dispatch_small_bytes"] * 2
    assert all(_covers_a_row(*launch) for launch in seen if "small_words" in launch[0])


def test_a_payload_without_bytes_has_no_words() -> None:
    """Nothing lies at its address, which kernels of whole words read behind the end of a row."""
    used, seen = exchange()
    call = one_token()
    none = torch.zeros((1, 0), dtype=torch.uint8)
    used.dispatch(
        call._replace(
            payloads=(Payload(0, call.payloads[0].offset_bytes, None), *call.payloads), rows=(none, *call.rows)
        )
    )
    assert seen[0][0] == "dispatch_small_bytes"


def test_rows_of_the_e4m3_wire_are_made_of_rows_that_lie_in_the_dispatch_area() -> None:
    """Straight from there: moved to the combine area they would lie where the narrower ones are made."""
    used, seen = exchange()
    call = _large_combine(low_precision=True)
    start = LAYOUT.region("dispatch", call.context).offset_bytes
    view = WORKSPACE[1, start : start + BLOCKS.numel() * 2].view(torch.bfloat16).view(BLOCKS.shape)
    used.combine(call._replace(payload=view))
    fields = seen[-1][3]
    assert fields["payload"] == view.data_ptr() and fields["staged"] == 1


def test_a_repeated_call_prepares_nothing() -> None:
    used, seen = exchange()
    call = one_token()
    used.dispatch(call)
    used._prepare_dispatch = None
    used.dispatch(call)
    assert seen[0] == seen[1]
    # Nor need it look for what it prepared, unless another call came between or the table is another one.
    look, used._dispatch_launch = used._dispatch_launch, None
    used.dispatch(call)
    assert seen[2] == seen[0]
    used._dispatch_launch = look
    del used._prepare_dispatch
    other = call._replace(invalid_id=call.invalid_id + 1, like=object())
    used.dispatch(other)
    used.dispatch(call)
    points = tuple(
        dataclasses.replace(each, threads=32, parts_per_thread=1) if each.regime == "small" else each
        for each in TUNING.points
    )
    used.tune(dataclasses.replace(TUNING, points=points))
    used.dispatch(call)
    assert seen[3] != seen[0] == seen[4] and seen[5][1] != seen[0][1]


def test_a_repeated_combine_finds_the_area_where_it_is_now() -> None:
    """The area of a workspace that its owner shares may move with the rounds between."""
    used, seen = exchange()
    draw = random.Random(1)
    after = dispatch_call(draw)._replace(runtime_max_tokens_per_rank=1, topk_ids=IDS[torch.int32][:1])
    call = combine_call(draw, after, {})._replace(low_precision=False)
    offset = LAYOUT.combine_offset(0, call.context)
    used._layout = SimpleNamespace(
        regions=LAYOUT.regions,
        region=LAYOUT.region,
        dispatch_offset=LAYOUT.dispatch_offset,
        combine_offset=lambda *_: next(place),
    )
    told, digests = [], []
    for at in (offset, offset, offset + 128, offset + 128, offset):
        place = itertools.repeat(at)
        used.combine(call)
        told.append(seen[-1][3]["combine_offset"] - offset)
        digests.append(seen[-1][3]["digest"])
    assert told == [0, 0, 128, 128, 0]
    # A rank that has another place, as after a wider dispatch that was refused on it alone, is told so by its peers.
    assert digests[0] == digests[1] == digests[4] != digests[2] == digests[3]


def test_a_repeated_call_goes_to_its_own_stream() -> None:
    used, seen = exchange()
    entered: list[Any] = []
    kept: list[tuple[int, set[int]]] = []
    used._enter = lambda stream: entered.append(stream) or SimpleNamespace(cuda_stream=stream or 7)
    used._used_on = lambda stream, tensors: kept.append(
        (stream.cuda_stream, {id(each) for each in tensors if each is not None})
    )
    call = one_token()._replace(eplb_local_stats=STATS)
    ended = combine_call(random.Random(1), call, {})._replace(low_precision=False)
    made = quantized(random.Random(2), ended, {})
    scale = torch.tensor(3.0)
    made = made._replace(output_quantize=Quantize(wire_format("nvfp4"), 0, scale))
    for stream in (None, 9, 9, 11, None):
        used.dispatch(call._replace(stream=stream))
        used.combine(ended._replace(stream=stream))
    assert entered == [None, None, 9, 9, 9, 9, 11, 11, None, None] and len(seen) == 10
    sent, summed = {id(each) for each in (*call.rows, call.topk_ids, STATS)}, {id(ended.payload), id(ended.output)}
    # What lies with the allocator is its own again only once that stream is done with it.
    assert kept == [(9, sent), (9, summed), (9, sent), (9, summed), (11, sent), (11, summed)]
    used.combine(made._replace(stream=9))
    written = {id(each) for each in (made.output, made.output_scales, scale)}
    # And the sums, which are nobody else's.
    assert set(entered[10:]) == {9} and len(kept[6][1] - written - {id(ended.payload)}) == 1 and written < kept[6][1]
    used.dispatch(fused_call()._replace(quantize=Quantize(wire_format("nvfp4"), 0, scale), stream=9))
    assert id(scale) in kept[7][1]


@pytest.mark.parametrize("played", [5, 2**31 - 1, 2**32 - 2])
def test_rounds_start_over_at_any_number(played: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    used, _ = exchange()
    used.words = (params.HostWords(), params.HostWords())
    used.start_over([played, played + 1])
    assert used.rounds() == [played, played + 1]
    assert [words.first_round for words in used.words] == [params.next_round(played), params.next_round(played + 1)]


def test_the_later_of_two_rounds_is_known_behind_the_last_number() -> None:
    used, _ = exchange()
    for context, (dispatched, combined, later) in enumerate([(2**32 - 1, 2, 2), (7, 8, 8)]):
        start = LAYOUT.region("round_state", context).offset_bytes
        WORKSPACE[1, start : start + 8].view(torch.uint32).copy_(
            torch.tensor([dispatched, combined], dtype=torch.uint32)
        )
        assert used.rounds()[context] == later
    WORKSPACE.zero_()
    assert [params.next_round(number) for number in (0, 5, 2**32 - 2, 2**32 - 1)] == [1, 6, 2**32 - 1, 2]
    assert params.later_round(3, 2**32 - 2) == 3 and params.later_round(2**31 + 5, 2**31) == 2**31 + 5


def fused_call() -> DispatchCall:
    rows, ids = ROWS[torch.bfloat16][:3], IDS[torch.int32][:3]
    widths = [256, 8, 16, 16]
    offsets = LAYOUT.payload_offsets(widths, 0)
    return dispatch_call(random.Random(1))._replace(
        context=0,
        topk_ids=ids,
        payloads=tuple(Payload(width, at, None) for width, at in zip(widths, offsets, strict=True)),
        rows=(rows, None, ids, ids),
        runtime_max_tokens_per_rank=100,
        quantize=FUSED,
        eplb_local_stats=None,
        num_sms=None,
    )


def test_ranks_that_take_different_ways_are_told_apart() -> None:
    """One makes the wire format itself, another was given it: the same bytes, and perhaps not the same regime."""
    used, seen = exchange()
    points = [each for each in used.tuning.points if each.phase == "dispatch"]
    small = next(each for each in points if each.rows == "quantized" and each.regime == "small")
    bulk = next(each for each in points if each.rows == "copied" and each.regime == "bulk")
    # At this size rows that are copied go in bulk, and rows that are made do not.
    here = [dataclasses.replace(each, ep_size=2, row_bytes=296, tokens=100, pair_us=0.0) for each in (small, bulk)]
    used.tune(used.tuning.with_points(here, "made up"))
    call = fused_call()
    rows, ids = call.rows[0], call.topk_ids
    used.dispatch(call)
    used.dispatch(call._replace(rows=(rows, MORE[:3, :8], ids, ids), quantize=None, like=object()))
    assert [each[0] for each in seen] == ["dispatch_small_words", "dispatch_bulk"]
    assert seen[0][3]["digest"] != seen[1][3]["digest"]


def test_rows_of_as_many_bytes_are_told_apart() -> None:
    """128 elements with a scale, and 132 without: both take 132 bytes of the e4m3 wire."""
    used, seen = exchange()
    call = _large_combine(low_precision=True)
    for width, dtype in ((128, torch.bfloat16), (132, torch.float8_e4m3fn)):
        blocks = torch.zeros((2, 600, width), dtype=dtype)
        output = torch.zeros((600, width), dtype=torch.bfloat16)
        used.combine(call._replace(payload=blocks, output=output, like=object()))
    assert [each[3]["row_pitch"] for each in seen] == [132, 132]
    assert seen[0][3]["digest"] != seen[1][3]["digest"]
