"""What an mxfp8 MoE layer is made of: quantising into a layout, weight layouts, products, routed experts."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import silu

from a2a.errors import ConfigError, ShapeError
from a2a.experts import (
    GatedMlp,
    Mxfp8Experts,
    Mxfp8Linear,
    align_mxfp8_moe_parameters,
    align_mxfp8_moe_weights,
    dispatch_w8a8_mxfp8_linear,
    flashinfer_kernels,
    mm_mxfp8,
    mxfp8_linear,
    mxfp8_quantize,
    mxfp8_rows,
    pack_topk,
)
from a2a.experts.mxfp8_rows import choose_quantize
from a2a.quant import ScaleLayout, wire_format

MAP = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23,
       31]  # fmt: skip
"""Where a row of a block of 32 goes."""

LINEAR, SWIZZLED, NARROW = ScaleLayout.LINEAR, ScaleLayout.SWIZZLED_128X4, ScaleLayout.SWIZZLED_8X4


def offset(layout: ScaleLayout, row: int, column: int, columns: int) -> int:
    """Where the byte of a scale lies, from the formulas."""
    wide = -(-columns // 4) * 4
    if layout is LINEAR:
        return row * columns + column
    if layout is NARROW:
        return (row // 8) * (wide // 4) * 32 + (column // 4) * 32 + (row % 8) * 4 + column % 4
    block = (row // 128) * 128 * wide
    return block + column % 4 + (column // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4


def drawn(n: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + n + width)
    sizes = torch.exp2(torch.randint(-9, 9, (n, 1), generator=generator).float())
    return (torch.randn(n, width, generator=generator) * sizes).bfloat16()


# ---- quantising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(ScaleLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize(("hidden", "alignment", "wide"), [(160, 128, 256), (2880, 256, 3072), (48, 0, 64)])
@pytest.mark.parametrize("n", [0, 1, 3, 130])
def test_quantised_into_a_layout(n: int, hidden: int, alignment: int, wide: int, layout: ScaleLayout) -> None:
    x = drawn(n, hidden)
    if n:
        x[0, :2], x[-1, 40] = torch.tensor([float("nan"), float("-inf")]).bfloat16(), -0.0
    data, scales = mxfp8_quantize(x, alignment, layout)
    assert (data.dtype, tuple(data.shape)) == (torch.float8_e4m3fn, (n, wide))
    assert (scales.dtype, tuple(scales.shape)) == (torch.uint8, layout.shape(n, wide // 32))
    # The format has tests of its own, against a scalar oracle.
    plain = wire_format("mxfp8").quantize(x, alignment=alignment)
    assert torch.equal(data.view(torch.uint8), plain[0].view(torch.uint8)) and plain[1] is not None
    memory, filled = scales.flatten().tolist(), [0] * scales.numel()
    for row, column in itertools.product(range(n), range(wide // 32)):
        filled[offset(layout, row, column, wide // 32)] = int(plain[1][row, column])
    assert memory == filled


def test_quantising_refuses() -> None:
    x = torch.ones(2, 32)
    for call in (
        lambda: mxfp8_quantize(x, 0, "linear"),  # type: ignore[arg-type]
        lambda: mxfp8_quantize(x, 33),
        lambda: mxfp8_quantize(x, backend="cublas"),
    ):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ShapeError):
        mxfp8_quantize(x[0])
    assert choose_quantize("cpu").backend == "torch"


# ---- weight layouts --------------------------------------------------------------------------------------------------


def aligned_by_hand(indices: Tensor, multiple: int, gated: bool) -> Tensor:
    """One expert's rows, one element at a time."""
    rows, width = indices.shape
    half = rows // 2 if gated else rows
    wide = -(-half // multiple) * multiple
    made = torch.zeros(2 * wide if gated else wide, width, dtype=indices.dtype)
    for row in range(rows):
        which, within = divmod(row, half) if gated else (0, row)
        ordered = 2 * within + which if gated else within
        made[ordered // 32 * 32 + MAP[ordered % 32]] = indices[row]
    return made


def swizzled_by_hand(scales: Tensor) -> Tensor:
    rows, columns = scales.shape
    height, width = -(-rows // 128) * 128, -(-columns // 4) * 4
    made = torch.zeros(height * width, dtype=scales.dtype)
    for row, column in itertools.product(range(rows), range(columns)):
        made[offset(SWIZZLED, row, column, columns)] = scales[row, column]
    return made.view(height, width)


def weights_of(experts: int, hidden: int, inner: int, gated: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index matrices: every element of the weights is its own position; scales are bytes that look like noise."""
    rows = 2 * inner if gated else inner
    w13 = torch.arange(1, experts * rows * hidden + 1).view(experts, rows, hidden)
    w2 = -torch.arange(1, experts * hidden * inner + 1).view(experts, hidden, inner)
    shapes = (experts, rows, hidden // 32), (experts, hidden, -(-inner // 32))
    generator = torch.Generator().manual_seed(inner)
    scales = [torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    return w13, scales[0], w2, scales[1]


SHAPES = [(2, 64, 64, True), (1, 96, 48, True), (2, 32, 16, True), (1, 160, 112, True), (3, 64, 96, False),
          (1, 32, 128, False), (2, 32, 16, False), (1, 160, 48, False)]  # fmt: skip
"""Experts, hidden, inner, gated; inner widths of 16 mod 32 among them."""


@pytest.mark.parametrize(("experts", "hidden", "inner", "gated"), SHAPES)
def test_weights_on_an_index_matrix(experts: int, hidden: int, inner: int, gated: bool) -> None:
    given = weights_of(experts, hidden, inner, gated)
    before = [each.clone() for each in given]
    made = align_mxfp8_moe_weights(*given, gated=gated)
    assert all(map(torch.equal, given, before)), "the arguments are left alone"
    multiple = 32 if gated else 128
    wide = -(-inner // multiple) * multiple
    for expert in range(experts):
        w13, s13, w2, s2 = (each[expert] for each in given)
        assert torch.equal(made[0][expert], aligned_by_hand(w13, multiple, gated))
        assert torch.equal(made[1][expert], swizzled_by_hand(aligned_by_hand(s13, multiple, gated)))
        padded = torch.zeros(hidden, wide, dtype=w2.dtype)
        padded[:, :inner] = w2
        assert torch.equal(made[2][expert], aligned_by_hand(padded, 32, False))
        padded = torch.zeros(hidden, wide // 32, dtype=torch.uint8)
        padded[:, : s2.shape[1]] = s2
        assert torch.equal(made[3][expert], swizzled_by_hand(aligned_by_hand(padded, 32, False)))


def test_rows_padded_as_on_the_wire() -> None:
    """w13 is wider than w2 is high where rows travel padded; columns stay where they are."""
    w13, s13, w2, s2 = weights_of(2, 96, 48, True)
    narrow = align_mxfp8_moe_weights(w13[..., :64], s13[..., :2], w2[:, :64], s2[:, :64])
    wide = align_mxfp8_moe_weights(w13, s13, w2[:, :64], s2[:, :64])
    assert torch.equal(wide[0][..., :64], narrow[0]) and tuple(wide[0].shape) == (2, 128, 96)
    assert all(map(torch.equal, wide[2:], narrow[2:]))


def test_the_first_rows_by_hand() -> None:
    """I = 16: rows 0 and 16 of w13, the first of gate and of up, become rows 0 and 8; padding keeps to each half."""
    w13, s13, w2, s2 = weights_of(1, 32, 16, True)
    made = align_mxfp8_moe_weights(w13, s13, w2, s2)
    assert tuple(made[0].shape) == (1, 64, 32) and tuple(made[1].shape) == (1, 128, 4)
    assert made[0][0, :, 0].nonzero().numel() == 32
    assert [int(made[0][0, row, 0]) for row in (0, 8, 16, 24, 1)] == [int(w13[0, row, 0]) for row in (0, 16, 1, 17, 2)]
    # Row 32 of the interleaved ones is padding of the gate, 33 of up.
    assert not made[0][0, 32:].any()
    assert int(made[1][0].flatten()[8 * 16]) == int(s13[0, 16, 0])
    assert int(made[2][0, 8, 0]) == int(w2[0, 1, 0]) and not made[2][0, :, 16:].any()


def test_parameters_stay_themselves() -> None:
    for inner in (64, 16):
        given = weights_of(2, 64, inner, True)
        w13, w2 = (each.to(torch.uint8).view(torch.float8_e4m3fn) for each in (given[0], given[2]))
        parameters = [Parameter(each, requires_grad=False) for each in (w13.clone(), given[1], w2.clone(), given[3])]
        wanted = align_mxfp8_moe_weights(w13, given[1].clone(), w2, given[3].clone())
        addresses = [each.data_ptr() for each in parameters]
        seen = list(parameters)
        align_mxfp8_moe_parameters(*parameters)
        for parameter, other, want in zip(parameters, seen, wanted, strict=True):
            assert parameter is other and parameter.dtype == want.dtype and isinstance(parameter, Parameter)
            assert torch.equal(parameter.data.view(torch.uint8), want.view(torch.uint8))
        kept = [each.data_ptr() == address for each, address in zip(parameters, addresses, strict=True)]
        assert kept[0] is (inner == 64), "memory stays where the shape does"


def test_weights_that_do_not_fit_are_refused() -> None:
    w13, s13, w2, s2 = weights_of(2, 64, 48, True)
    for bad in (
        (w13[:, :95], s13, w2, s2), (w13, s13[..., :1], w2, s2), (w13, s13, w2, s2[..., :1]), (w13.int(), s13, w2, s2),
        (w13, s13.int(), w2, s2), (w13[0], s13, w2, s2), (w13[..., :48], s13, w2[:, :48], s2),
        (w13[..., :32], s13[..., :1], w2, s2), (w13, s13, w2[:, :48], s2[:, :48]),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            align_mxfp8_moe_weights(*bad)
    with pytest.raises(ShapeError, match="w13"):
        align_mxfp8_moe_weights(w13, s13, w2, s2, gated=False)


# ---- products --------------------------------------------------------------------------------------------------------


def quantized(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    data, scales = mxfp8_quantize(drawn(rows, width, seed))
    return data, scales


@pytest.mark.parametrize("m", [0, 1, 7, 128])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_product(m: int, out_dtype: torch.dtype) -> None:
    (a, a_scales), (b, b_scales) = quantized(m, 96, 1), quantized(40, 96, 2)
    form = wire_format("mxfp8")
    left, right = (form.dequantize(*each, dtype=torch.float32).double() for each in ((a, a_scales), (b, b_scales)))
    wanted = left @ right.T
    got = mm_mxfp8(a, b, a_scales, b_scales, out_dtype)
    assert got.dtype == out_dtype and tuple(got.shape) == (m, 40)
    # 96 terms in fp32 in any order, then one rounding, which in fp16 may be to a subnormal.
    bound = 96 * 2.0**-24 * (left.abs() @ right.abs().T) + wanted.abs() * torch.finfo(out_dtype).eps + 2.0**-25
    fine = ((got.double() - wanted).abs() <= bound) | (wanted.abs() > torch.finfo(out_dtype).max)
    assert fine.all()
    for layout in (SWIZZLED, NARROW):
        laid_out = [mxfp8_quantize(drawn(rows, 96, seed), 0, layout)[1] for rows, seed in ((m, 1), (40, 2))]
        same = mm_mxfp8(a, b, *laid_out, out_dtype, a_layout=layout, b_layout=layout)  # type: ignore[misc]
        assert torch.equal(same, got)
        flat = mm_mxfp8(a, b, a_scales, laid_out[1].flatten(), out_dtype, b_layout=layout)
        assert torch.equal(flat, got)


def test_linear_on_this_machine_says_what_it_is() -> None:
    linear = dispatch_w8a8_mxfp8_linear(device="cpu")
    assert linear.backend == "dequantize" and linear.weight_layout is LINEAR
    assert [line.partition(":")[0] for line in linear.why[:-1]] == list(mxfp8_linear.BACKENDS)
    assert linear.why[-1] == "quantised by torch (nvrtc: tensors on cpu; flashinfer: tensors on cpu)"
    assert "tensors on cpu" in linear.why[0] and "a trial fails" in linear.why[1]
    weight, scales = quantized(24, 192, 3)
    x = drawn(10, 176, 4).view(2, 5, 176)
    rows, row_scales = mxfp8_quantize(x.view(10, 176), 192)
    wanted = mm_mxfp8(rows, weight, row_scales, scales).view(2, 5, 24)
    assert torch.equal(linear(x, weight, scales), wanted)
    given = linear(rows.view(2, 5, 192), weight, scales, input_scales=row_scales.view(2, 5, 6))
    assert torch.equal(given, wanted)
    bias = torch.arange(24.0)
    assert torch.equal(linear(x, weight, scales, bias=bias), wanted + bias.bfloat16())
    assert linear(x, weight, scales, output_dtype=torch.float32).dtype == torch.float32
    assert torch.equal(linear(x[:0], weight, scales), wanted[:0])
    with pytest.raises(ShapeError, match="at most 192"):
        linear(torch.ones(1, 193), weight, scales)
    for name, match in (("scaled_mm", "a trial fails"), ("flashinfer", "tensors on cpu"), ("cublas", "one of")):
        with pytest.raises(ConfigError, match=match):
            dispatch_w8a8_mxfp8_linear(name, "cpu")


def test_linear_compiled_for_any_number_of_rows() -> None:
    linear = dispatch_w8a8_mxfp8_linear(device="cpu")
    weight, scales = quantized(24, 192, 3)
    bias, graphs = torch.arange(24.0), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def apply(x: Tensor) -> Tensor:
        return linear(x, weight, scales, bias=bias)

    program = torch.compile(apply, fullgraph=True, dynamic=True, backend=backend)
    for n in (7, 128, 0, 1, 33):
        assert torch.equal(program(drawn(n, 176)), apply(drawn(n, 176)))
    assert len(graphs) <= 3


def test_products_that_do_not_fit_are_refused() -> None:
    a, scales = quantized(4, 64, 5)
    for bad in (
        (a[:, :48], a, scales, scales), (a, a[:, :32], scales, scales[:, :1]), (a.view(torch.uint8), a, scales, scales),
        (a, a, scales[:3], scales), (a, a, scales, scales.int()), (a[0], a, scales, scales),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            mm_mxfp8(*bad)
    for keywords in ({"out_dtype": torch.float64}, {"backend": "cublas"},
                     {"backend": "flashinfer", "out_dtype": torch.float32}):  # fmt: skip
        with pytest.raises(ConfigError):
            mm_mxfp8(a, a, scales, scales, **keywords)


# ---- flashinfer ------------------------------------------------------------------------------------------------------


def stand_in(**functions: Any) -> types.ModuleType:
    package = types.ModuleType("flashinfer")
    package.__version__ = "0.0-stand-in"  # type: ignore[attr-defined]
    for name, function in functions.items():
        setattr(package, name, function)
    return package


def its_mm(a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, out: Any = None,
           out_dtype: torch.dtype = torch.bfloat16) -> Tensor:  # fmt: skip
    assert a_descale.dim() == b_descale.dim() == 1 and b.stride(0) == 1
    return mm_mxfp8(a, b.t(), a_descale, b_descale, out_dtype, a_layout=SWIZZLED, b_layout=SWIZZLED)


def its_quantize(input: Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32) -> tuple[Tensor, Tensor]:
    data, scales = mxfp8_quantize(input, alignment, SWIZZLED if is_sf_swizzled_layout else LINEAR)
    return data, scales.flatten()


def ignoring_nan(input: Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32) -> tuple[Tensor, Tensor]:
    return its_quantize(input.nan_to_num(0, 0, 0), is_sf_swizzled_layout, alignment)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in package where flashinfer would be, and lets a CPU pass for a GPU that it serves."""

    def put(**functions: Any) -> None:
        package = stand_in(**functions)
        monkeypatch.setitem(sys.modules, "flashinfer", package)

        def found(name: str, parameters: Any, device: torch.device) -> Any:
            return flashinfer_kernels._with_parameters(package, name, parameters)

        for module in (mxfp8_linear, mxfp8_rows):
            monkeypatch.setattr(module, "find", found)

    return put


def test_a_flashinfer_that_is_right_is_used(flashinfer: Any) -> None:
    flashinfer(mm_mxfp8=its_mm, mxfp8_quantize=its_quantize)
    linear = dispatch_w8a8_mxfp8_linear(device="cpu")
    assert (linear.backend, linear.quantize) == ("flashinfer", "flashinfer")
    assert linear.weight_layout is SWIZZLED and linear.accumulator_dtype == torch.bfloat16
    weight, scales = quantized(24, 192, 3)
    x = drawn(7, 176, 4)
    plain = Mxfp8Linear("dequantize", "torch", ())
    assert torch.equal(linear(x, weight, scales), plain(x, weight, scales))
    ready = mxfp8_quantize(drawn(24, 192, 3), 0, SWIZZLED)[1]
    assert torch.equal(linear(x, weight, ready, weight_layout=SWIZZLED), plain(x, weight, scales))
    assert linear(x.float(), weight, scales).dtype == torch.float32
    for layout in ScaleLayout:
        for got, want in zip(
            mxfp8_quantize(x, 256, layout, backend="flashinfer"), mxfp8_quantize(x, 256, layout), strict=True
        ):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_flashinfer_that_is_not_is_not(flashinfer: Any) -> None:
    flashinfer(mm_mxfp8=lambda a, b, a_descale, b_descale, out_dtype: its_mm(a, b, a_descale, b_descale) + 1,
               mxfp8_quantize=ignoring_nan)  # fmt: skip
    linear = dispatch_w8a8_mxfp8_linear(device="cpu")
    assert (linear.backend, linear.quantize) == ("dequantize", "torch")
    assert linear.why[0] == "flashinfer: a trial product is wrong" and "differ from the format's" in linear.why[-1]
    flashinfer(mm_mxfp8=lambda a, b: a, mxfp8_quantize=lambda input, alignment: input)
    linear = dispatch_w8a8_mxfp8_linear(device="cpu")
    assert linear.why[0] == "flashinfer: mm_mxfp8 of flashinfer 0.0-stand-in takes no a_descale, b_descale, out_dtype"
    assert "takes no is_sf_swizzled_layout" in linear.why[-1]
    flashinfer()
    assert "has no mm_mxfp8" in dispatch_w8a8_mxfp8_linear(device="cpu").why[0]


def test_flashinfer_is_not_imported_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer_kernels.find("mm_mxfp8", (), torch.device("cpu")).why == "tensors on cpu"
    for capability, why in (((9, 0), "compute capability 9.0 is below 10.0"), ((10, 0), "cannot be imported")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        found = flashinfer_kernels.find("mm_mxfp8", (), torch.device("cuda"))
        assert found.function is None and why in found.why


# ---- routed experts --------------------------------------------------------------------------------------------------


def one_by_one(experts: Mxfp8Experts, rows: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """The definition, a row and a pick at a time."""
    form = wire_format("mxfp8")
    total = torch.zeros(rows.shape[0], experts.hidden_size)
    w13, w2 = (
        torch.stack([form.dequantize(*each) for each in zip(*pair, strict=True)])
        for pair in ((experts.w13, experts.w13_scales), (experts.w2, experts.w2_scales))
    )
    for token, row in enumerate(rows):
        for pick, weight in zip(picks[token].tolist(), weights[token].tolist(), strict=True):
            if pick >= 0:
                gate, up = (w13[pick] @ row).chunk(2)
                inner, scales = mxfp8_quantize((silu(gate) * up)[None])
                total[token] += weight * (w2[pick] @ form.dequantize(inner, scales)[0])
    return total


@pytest.mark.parametrize("inner", [48, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routed_experts(inner: int, dtype: torch.dtype) -> None:
    experts = Mxfp8Experts.quantize(GatedMlp.random(3, 160, inner, seed=1), alignment=128)
    assert (experts.num_experts, experts.hidden_size, experts.wire_width) == (3, 160, 256)
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(22, 160, generator=generator).bfloat16()
    # Global ids 0..6, of which 1, 4 and 5 are here; ids beyond, padded slots, and a row with nothing here.
    ids = torch.randint(-1, 9, (22, 4), generator=generator, dtype=torch.int32)
    ids[3], ids[4], ids[5] = torch.tensor([0, 2, -1, 8]), torch.tensor([4, 4, 4, 1]), -1
    weights = torch.randn(22, 4, generator=generator)
    local = torch.tensor([-1, 0, -1, -1, 1, 2, -1], dtype=torch.int32)
    packed = pack_topk(ids, weights)
    # What a stale slot may hold: no id here, and a weight that is no number.
    packed[5] = torch.tensor([-1, -64, (6 << 16) | 0x7FC0, -1], dtype=torch.int32)
    data, scales = mxfp8_quantize(x, 128)
    out = torch.full((2, 11, 160), 5.0, dtype=dtype)
    blocks = [each.view(2, 11, -1) for each in (packed, data, scales)]
    experts.write(out, *blocks, local)
    known = (ids >= 0) & (ids < 7)
    picks = torch.where(known, local[torch.where(known, ids, 0)], -1)
    wanted = one_by_one(experts, wire_format("mxfp8").dequantize(data, scales), picks, weights.bfloat16().float())
    here = (picks >= 0).any(1)
    assert not here[3] and not here[5] and out.view(22, 160)[~here].eq(5).all()
    off = (out.view(22, 160).float() - wanted)[here].abs().max() / wanted.abs().max()
    # A quantised inner value may fall on the other side of a boundary where the order of a sum differs.
    assert off <= 2.0**-6
    again = torch.zeros_like(out)
    experts.write(again, *blocks, local)
    assert torch.equal(again.view(22, 160)[here], out.view(22, 160)[here])


def test_routed_experts_refuse() -> None:
    experts = Mxfp8Experts.quantize(GatedMlp.random(2, 64, 32, seed=1))
    data, scales = mxfp8_quantize(torch.ones(3, 64))
    packed, local = torch.zeros(3, 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    out = torch.zeros(3, 64)
    experts.write(out, packed, data, scales, local)
    for bad in (
        (out[:2], packed, data, scales, local), (out.double(), packed, data, scales, local),
        (out, packed.long(), data, scales, local), (out, packed, data.view(torch.uint8), scales, local),
        (out, packed, data, scales[:, :1], local), (out, packed, data, scales, local.long()),
        (torch.zeros(3, 128)[:, ::2], packed, data, scales, local),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            experts.write(*bad)
    with pytest.raises(ShapeError, match="w2_scales"):
        Mxfp8Experts(experts.w13, experts.w13_scales, experts.w2, experts.w2_scales[:, :32])
    with pytest.raises(ShapeError, match="w13, w2"):
        Mxfp8Experts(experts.w13[:, :61], experts.w13_scales, experts.w2, experts.w2_scales)


def test_a_rank_without_experts() -> None:
    experts = Mxfp8Experts.quantize(GatedMlp.random(2, 64, 32, seed=1).select(torch.empty(0, dtype=torch.int64)))
    data, scales = mxfp8_quantize(torch.ones(3, 64))
    out = torch.full((3, 64), 2.0)
    experts.write(out, torch.zeros(3, 2, dtype=torch.int32), data, scales, torch.full((4,), -1, dtype=torch.int32))
    assert experts.num_experts == 0 and out.eq(2).all()


# ---- operators -------------------------------------------------------------------------------------------------------


def samples(rows: int) -> list[tuple[str, tuple[Any, ...]]]:
    """(operator, arguments), in `rows` rows."""
    x = drawn(rows, 160)
    found: list[tuple[str, tuple[Any, ...]]] = [("mxfp8_quantize", (x,))]
    found += [("mxfp8_quantize", (x, 128, layout.value, "torch")) for layout in ScaleLayout]
    (a, a_scales), (b, b_scales) = mxfp8_quantize(x, 128), quantized(24, 256, 2)
    swizzled = mxfp8_quantize(x, 128, SWIZZLED)[1]
    found.append(("mm_mxfp8", (a, b, a_scales, b_scales, torch.bfloat16, "linear", "linear", "dequantize")))
    found.append(("mm_mxfp8", (a, b, swizzled, b_scales, torch.float32, SWIZZLED.value, "linear", "dequantize")))
    experts = Mxfp8Experts.quantize(GatedMlp.random(2, 160, 48, seed=1), alignment=128)
    picks = pack_topk(torch.arange(2 * rows).view(rows, 2) % 3, torch.ones(rows, 2))
    weights = experts.w13, experts.w13_scales, experts.w2, experts.w2_scales
    local = torch.tensor([0, 1, -1], dtype=torch.int32)
    out = torch.zeros(rows, 160, dtype=torch.bfloat16)
    found.append(("routed_mxfp8_moe", (out, picks, a, a_scales, *weights, local, "dequantize", "torch", "linear")))
    for gated in (True, False):
        found.append(("align_mxfp8_moe_weights", (*weights_of(max(rows, 1), 32, 16, gated), gated)))
    return found


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck(rows: int) -> None:
    for name, arguments in samples(rows):
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        if any(each.dtype == torch.float8_e4m3fn for each in tensors):
            # torch's schema test compares inputs with allclose, which has no float8 kernel.
            tests = tests[1:]
        torch.library.opcheck(getattr(torch.ops.a2a, name).default, arguments, test_utils=tests)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_inputs_are_unchanged(rows: int) -> None:
    for name, arguments in samples(rows):
        kept = arguments[1:] if name == "routed_mxfp8_moe" else arguments
        tensors = [each for each in kept if isinstance(each, Tensor)]
        before = [each.view(torch.uint8).clone() for each in tensors]
        made = getattr(torch.ops.a2a, name).default(*arguments)
        assert all(torch.equal(each.view(torch.uint8), was) for each, was in zip(tensors, before, strict=True)), name
        results = [] if made is None else [made] if isinstance(made, Tensor) else list(made)
        memory = [each.untyped_storage().data_ptr() for each in results if each.numel()]
        assert not set(memory) & {each.untyped_storage().data_ptr() for each in tensors}, name
        assert len(set(memory)) == len(memory), name
