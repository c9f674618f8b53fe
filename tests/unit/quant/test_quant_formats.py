"""What all formats share: names, sizes, checks, empty input, refusals, and independence of how the work is cut."""

from __future__ import annotations

import pytest
import torch

from a2a.errors import ConfigError, ShapeError
from a2a.quant import WIRE_FORMATS, slabs, wire_format

NAMES = ("bf16", "fp16", "fp8_block", "mxfp8", "nvfp4", "mxfp4")
WIDTH = {"bf16": 33, "fp16": 33, "fp8_block": 256, "mxfp8": 96, "nvfp4": 48, "mxfp4": 96}


def raw(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.view(torch.uint8)


def same(a, b) -> bool:
    return all((x is None and y is None) or torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def test_names():
    assert tuple(WIRE_FORMATS) == NAMES
    assert all(wire_format(name) is WIRE_FORMATS[name] and wire_format(name).name == name for name in NAMES)
    with pytest.raises(ConfigError, match="bf16, fp16, fp8_block, mxfp8, nvfp4, mxfp4"):
        wire_format("fp8")
    with pytest.raises(TypeError):
        WIRE_FORMATS["other"] = WIRE_FORMATS["bf16"]


@pytest.mark.parametrize(
    ("name", "data_bytes", "scale_bytes"),
    [("bf16", 14336, 0), ("fp16", 14336, 0), ("fp8_block", 7168, 224), ("mxfp8", 7168, 224), ("nvfp4", 3584, 448),
     ("mxfp4", 3584, 224)],
)  # fmt: skip
def test_bytes_per_token_of_7168(name, data_bytes, scale_bytes):
    form = wire_format(name)
    assert form.data_bytes_per_token(7168) == data_bytes and form.scale_bytes_per_token(7168) == scale_bytes
    assert form.data_width(7168) * form.data_dtype.itemsize == data_bytes
    assert (form.scales_dtype is None) == (form.scales_width(7168) == 0)
    assert form.padded_size(7168) == 7168 and form.check(7168) == []


def test_neutral_bytes_and_global_scales():
    assert [wire_format(n).neutral_scale_byte for n in NAMES] == [0, 0, 0, 127, 0, 127]
    assert [wire_format(n).needs_global_scale for n in NAMES] == [False] * 4 + [True, False]


def test_check_lists_every_reason():
    assert len(wire_format("fp8_block").check(100, 32)) == 2
    assert wire_format("fp8_block").check(160) and not wire_format("fp8_block").check(256)
    assert wire_format("nvfp4").check(24) and not wire_format("nvfp4").check(48)
    assert wire_format("mxfp4").check(48) and not wire_format("mxfp4").check(64)
    assert wire_format("bf16").check(1) == [] and wire_format("bf16").check(0) and wire_format("bf16").check(8, 32)
    mxfp8 = wire_format("mxfp8")
    assert mxfp8.check(1) == [] and mxfp8.check(2880, 256) == [] and mxfp8.check(0) and mxfp8.check(64, 48)
    assert len(mxfp8.check(0, -32)) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes(name, rows, dtype):
    form, width = wire_format(name), WIDTH[name]
    x = torch.randn(rows, width).to(dtype)
    before = x.clone()
    data, scales = form.quantize(x)
    assert torch.equal(x, before)
    assert data.shape == (rows, form.data_width(width)) and data.dtype == form.data_dtype and data.is_contiguous()
    if form.scales_dtype is None:
        assert scales is None
    else:
        assert scales.shape == (rows, form.scales_width(width)) and scales.dtype == form.scales_dtype
    for out in (torch.bfloat16, torch.float16, torch.float32):
        back = form.dequantize(data, scales, dtype=out)
        assert back.shape == (rows, form.padded_size(width)) and back.dtype == out and back.is_contiguous()
        some = form.dequantize(data, scales, hidden_size=7, dtype=out)
        assert torch.equal(some, back[:, :7]) and some.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_strided_rows(name):
    form, width = wire_format(name), WIDTH[name]
    x = torch.randn(6, 2 * width)[::2, ::2]
    assert same(form.quantize(x), form.quantize(x.contiguous()))
    x = torch.randn(2 * width, 3).T[:, :width]
    assert same(form.quantize(x), form.quantize(x.contiguous()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("elements", [1, 700, 1 << 18])
def test_how_the_work_is_cut_shows_in_no_byte(name, elements, monkeypatch):
    form, width = wire_format(name), WIDTH[name]
    x = torch.randn(37, width)
    one_by_one = [form.quantize(row[None]) for row in x]
    monkeypatch.setattr(slabs, "SLAB_ELEMENTS", elements)
    data, scales = form.quantize(x)
    assert torch.equal(raw(data), raw(torch.cat([d for d, _ in one_by_one])))
    assert scales is None or torch.equal(raw(scales), raw(torch.cat([s for _, s in one_by_one])))
    rows = [form.dequantize(d, s) for d, s in one_by_one]
    assert torch.equal(form.dequantize(data, scales), torch.cat(rows))


def test_plain_rows():
    x = torch.tensor([[1.0, -0.0, 3.0e38, 1.00390625, float("inf"), 65520.0]])
    data, scales = wire_format("bf16").quantize(x)
    assert scales is None
    assert [v & 0xFFFF for v in data.view(torch.int16)[0].tolist()] == [0x3F80, 0x8000, 0x7F62, 0x3F80, 0x7F80, 0x4780]
    data, _ = wire_format("fp16").quantize(x)
    assert [v & 0xFFFF for v in data.view(torch.int16)[0].tolist()] == [0x3C00, 0x8000, 0x7C00, 0x3C04, 0x7C00, 0x7C00]
    already = x.bfloat16()
    assert wire_format("bf16").quantize(already)[0] is already
    assert wire_format("bf16").dequantize(already, None, dtype=torch.bfloat16).data_ptr() != already.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_refusals(name):
    form, width = wire_format(name), WIDTH[name]
    x = torch.randn(2, width)
    data, scales = form.quantize(x)
    with pytest.raises(ShapeError, match="2 dimensions"):
        form.quantize(x[0])
    with pytest.raises(ShapeError, match="float64"):
        form.quantize(x.double())
    with pytest.raises(ConfigError, match="alignment"):
        form.quantize(x, alignment=33)
    with pytest.raises(ConfigError, match="dtype"):
        form.dequantize(data, scales, dtype=torch.float64)
    with pytest.raises(ShapeError, match="hidden_size"):
        form.dequantize(data, scales, hidden_size=width + 1)
    with pytest.raises(ShapeError, match="data"):
        form.dequantize(data.view(torch.int8), scales)
    if form.needs_global_scale:
        for bad in (torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")):
            with pytest.raises(ShapeError, match="global_scale"):
                form.quantize(x, global_scale=bad)
    else:
        with pytest.raises(ConfigError, match="global_scale"):
            form.quantize(x, global_scale=torch.ones(()))
        with pytest.raises(ConfigError, match="global_scale"):
            form.dequantize(data, scales, global_scale=torch.ones(()))
    if scales is None:
        with pytest.raises(ShapeError, match="scales"):
            form.dequantize(data, torch.ones(2, 1))
    else:
        for bad in (None, scales[:1], scales[:, 1:], scales.double(), scales[0], scales.to("meta")):
            with pytest.raises(ShapeError, match="scales"):
                form.dequantize(data, bad)
    if name not in ("bf16", "fp16", "mxfp8"):
        with pytest.raises(ShapeError, match="multiple of"):
            form.quantize(x[:, 1:])
        with pytest.raises(ShapeError, match="multiple of"):
            form.dequantize(data[:, 1:], scales)


def test_e4m3_rows_may_come_as_bytes():
    for name, width in (("fp8_block", 128), ("mxfp8", 64)):
        form = wire_format(name)
        data, scales = form.quantize(torch.randn(2, width))
        assert torch.equal(form.dequantize(raw(data), scales), form.dequantize(data, scales))


def test_scales_of_any_one_byte_dtype():
    x = torch.randn(2, 64)
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        form = wire_format(name)
        data, scales = form.quantize(x)
        want = form.dequantize(data, scales)
        kinds = [torch.uint8, torch.float8_e4m3fn, *filter(None, [getattr(torch, "float8_e8m0fnu", None)])]
        for kind in kinds:
            assert torch.equal(form.dequantize(data, scales.view(kind)), want)


def test_without_e8m0_in_torch(monkeypatch):
    x = torch.randn(2, 64)
    want = [wire_format(name).quantize(x) for name in ("mxfp8", "mxfp4")]
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    for name, pair in zip(("mxfp8", "mxfp4"), want, strict=True):
        assert same(wire_format(name).quantize(x), pair)
        assert wire_format(name).dequantize(*pair).isfinite().all()


def test_gradients_are_not_recorded():
    x = torch.randn(2, 128, requires_grad=True)
    for name in ("fp8_block", "mxfp8", "nvfp4", "mxfp4"):
        data, scales = wire_format(name).quantize(x)
        assert not data.requires_grad and not scales.requires_grad
        assert not wire_format(name).dequantize(data, scales).requires_grad
