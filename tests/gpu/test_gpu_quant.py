"""The wire formats on a GPU: the bytes of the CPU, no host synchronisation, and capture in a graph."""

from __future__ import annotations

import pytest
import torch

from a2a.quant import WIRE_FORMATS, ScaleLayout, pack_topk, swizzle_scales, unpack_topk, unswizzle_scales

pytestmark = pytest.mark.gpu(1)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).cpu()


def hostile_rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of the dtype is possible: NaN, Inf, subnormal, huge; and plain blocks between them."""
    generator = torch.Generator().manual_seed(rows + width)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    patterns = torch.randint(limits.min, limits.max, (rows, width), dtype=integer, generator=generator).view(dtype)
    plain = torch.randn(rows, width, generator=generator)
    plain *= torch.exp2(torch.randint(-12, 12, (rows, width), generator=generator).float())
    tiny = (patterns.float() * 2.0**-100).nan_to_num(0, 0, 0).to(dtype)
    which = torch.randint(0, 4, (rows, 1), generator=generator)
    return torch.where(which == 0, patterns, torch.where(which == 1, tiny, plain.to(dtype))).contiguous()


@pytest.mark.parametrize("name", list(WIRE_FORMATS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_the_cpu(name, dtype):
    form = WIRE_FORMATS[name]
    x = hostile_rows(512, 1024, dtype)
    if name in ("bf16", "fp16"):
        x = x.nan_to_num()  # a plain cast keeps whatever NaN the device writes
    for g in (None, torch.tensor(0.731), torch.tensor(1234.5)) if form.needs_global_scale else (None,):
        cpu = form.quantize(x, global_scale=g)
        gpu = form.quantize(x.cuda(), global_scale=None if g is None else g.cuda())
        for want, got in zip(cpu, gpu, strict=True):
            assert (want is None and got is None) or torch.equal(raw(want), raw(got))
        for out in DTYPES:
            want = form.dequantize(*cpu, global_scale=g, dtype=out)
            got = form.dequantize(*gpu, global_scale=None if g is None else g.cuda(), dtype=out).cpu()
            assert torch.equal(want.isnan(), got.isnan())
            assert torch.equal(want.nan_to_num(0, 1, -1), got.nan_to_num(0, 1, -1))


def test_padded_rows():
    form = WIRE_FORMATS["mxfp8"]
    x = hostile_rows(33, 160, torch.bfloat16)
    for want, got in zip(form.quantize(x, alignment=128), form.quantize(x.cuda(), alignment=128), strict=True):
        assert torch.equal(raw(want), raw(got))


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_layouts(layout):
    scales = torch.randint(0, 256, (300, 9), dtype=torch.uint8)
    swizzled = swizzle_scales(scales.cuda(), layout)
    assert torch.equal(swizzled.cpu(), swizzle_scales(scales, layout))
    assert torch.equal(unswizzle_scales(swizzled, layout, 300, 9).cpu(), scales)


def test_packing_turns_what_does_not_fit_into_minus_one():
    ids = torch.tensor([[0, 32767, -1, 32768, -2, 1 << 40, 65535]], device="cuda")
    weights = torch.tensor([[1.0, -0.5, float("nan"), -1.0, 1.0, 1.0, 0.25]], device="cuda")
    back, values = unpack_topk(pack_topk(ids, weights))
    assert back.tolist() == [[0, 32767, -1, -1, -1, -1, -1]]
    fits = ids.clone().masked_fill_(back == -1, -1).cpu()
    assert torch.equal(pack_topk(ids, weights).cpu(), pack_topk(fits, weights.cpu()))
    assert values[0, 2].isnan()


@pytest.mark.parametrize("name", list(WIRE_FORMATS))
def test_no_host_synchronisation_and_capture(name):
    form = WIRE_FORMATS[name]
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    g = torch.full((), 2.5, device="cuda") if form.needs_global_scale else None
    ids, weights = torch.zeros(64, 8, dtype=torch.int64, device="cuda"), torch.ones(64, 8, device="cuda")

    def everything():
        data, scales = form.quantize(x, global_scale=g)
        laid_out = (
            None if scales is None or scales.dtype.itemsize > 1 else swizzle_scales(scales, ScaleLayout.SWIZZLED_128X4)
        )
        return form.dequantize(data, scales, global_scale=g), laid_out, *unpack_topk(pack_topk(ids, weights))

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(64, 1024))
        graph.replay()
        for got, want in zip(captured, everything(), strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
