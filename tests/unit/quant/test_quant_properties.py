"""Properties over random shapes and values: how far a value may move, and what must not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2a.quant import WIRE_FORMATS, dequantize_blocks, quantize_blocks

# Largest relative step of the element format (half a unit of the mantissa), and smallest step relative to amax: half of
# the smallest subnormal over the largest value, times 2 where the scale may be rounded up to a power of two.
E4M3_RELATIVE = 2.0**-4
E2M1_RELATIVE = 2.0**-2


@st.composite
def rows(draw, step: int):
    n, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed, spread = draw(st.integers(0, 2**31)), draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, blocks * step, generator=generator)
    x *= torch.exp2(torch.randint(-spread, spread + 1, x.shape, generator=generator).float())
    x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    return x.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


def check_error(x: torch.Tensor, back: torch.Tensor, block: int, relative: float, absolute: float) -> None:
    x, back = x.double(), back.double()
    amax = x.view(x.shape[0], -1, block).abs().amax(-1).repeat_interleave(block, 1)
    assert ((back - x).abs() <= torch.maximum(x.abs() * relative, amax * absolute) * (1 + 1e-5)).all()
    assert ((back == 0) | (back.sign() == x.sign())).all()


@settings(deadline=None, max_examples=60)
@given(x=rows(128))
def test_fp8_block_error(x):
    check_error(
        x,
        WIRE_FORMATS["fp8_block"].dequantize(*WIRE_FORMATS["fp8_block"].quantize(x)),
        128,
        E4M3_RELATIVE,
        2.0**-10 / 448,
    )


@settings(deadline=None, max_examples=60)
@given(x=rows(32))
def test_mxfp8_error(x):
    check_error(
        x, WIRE_FORMATS["mxfp8"].dequantize(*WIRE_FORMATS["mxfp8"].quantize(x)), 32, E4M3_RELATIVE, 2.0**-9 / 448
    )


@settings(deadline=None, max_examples=60)
@given(x=rows(32))
def test_mxfp4_error(x):
    check_error(
        x, WIRE_FORMATS["mxfp4"].dequantize(*WIRE_FORMATS["mxfp4"].quantize(x)), 32, E2M1_RELATIVE, 2 * 0.25 / 6
    )


@settings(deadline=None, max_examples=60)
@given(x=rows(16))
def test_nvfp4_error(x):
    """With g = 448 * 6 / amax of all, as users choose it; tiny blocks lose up to half the smallest scale."""
    amax = x.abs().amax().float()
    g = torch.where(amax > 0, 448 * 6 / amax, torch.ones(()))
    data, scales = WIRE_FORMATS["nvfp4"].quantize(x, global_scale=g)
    back = WIRE_FORMATS["nvfp4"].dequantize(data, scales, global_scale=g).double()
    x = x.double()
    blocks = x.view(x.shape[0], -1, 16).abs().amax(-1).repeat_interleave(16, 1)
    # The scale itself is e4m3: off by up to 1/16, or by half of 2^-9 over g; a small one may saturate its block.
    bound = torch.maximum(x.abs() * E2M1_RELATIVE, blocks * 0.5 / 6 * 17 / 16) + blocks / 16 + 6 * 2.0**-10 / g
    assert ((back - x).abs() <= bound * (1 + 1e-5)).all()


@settings(deadline=None, max_examples=60)
@given(x=rows(1), width=st.integers(1, 300))
def test_blocks_of_any_width(x, width):
    x = x.repeat(1, width)[:, :width]
    data, scales = quantize_blocks(x)
    assert data.shape == x.shape and scales.shape == (x.shape[0], -(-width // 128))
    whole = -(-width // 128) * 128
    padded = torch.nn.functional.pad(x, (0, whole - width))
    long, same_scales = quantize_blocks(padded)
    assert torch.equal(long[:, :width].view(torch.uint8), data.view(torch.uint8)) and torch.equal(scales, same_scales)
    assert torch.equal(dequantize_blocks(long, scales)[:, :width], dequantize_blocks(data, scales))


@pytest.mark.parametrize(("name", "block"), [("fp8_block", 128), ("mxfp8", 32), ("nvfp4", 16), ("mxfp4", 32)])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), poison=st.sampled_from([float("nan"), float("inf"), -1e38, 0.0]))
def test_a_block_does_not_touch_its_neighbours(name, block, seed, poison):
    form = WIRE_FORMATS[name]
    x = torch.randn(3, 3 * block, generator=torch.Generator().manual_seed(seed))
    clean = form.dequantize(*form.quantize(x))
    y = x.clone()
    y[1, block + seed % block] = poison
    back = form.dequantize(*form.quantize(y))
    keep = torch.ones_like(x, dtype=torch.bool)
    keep[1, block : 2 * block] = False
    assert torch.equal(back[keep], clean[keep])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@settings(deadline=None, max_examples=40)
@given(x=rows(32))
def test_quantising_quantised_values_changes_none(name, x):
    form = WIRE_FORMATS[name]
    once = form.dequantize(*form.quantize(x))
    assert torch.equal(form.dequantize(*form.quantize(once)), once)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@settings(deadline=None, max_examples=40)
@given(x=rows(32), shift=st.integers(-30, 30))
def test_a_power_of_two_moves_only_the_scale_bytes(name, x, shift):
    form = WIRE_FORMATS[name]
    x = x.float()
    data, scales = form.quantize(x)
    moved, bytes_ = form.quantize(x * 2.0**shift)
    assert torch.equal(moved.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(bytes_.int(), torch.where(scales == 0, 0, scales.int() + shift))
