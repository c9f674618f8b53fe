"""Scale layouts: the formula of the contract, byte by byte, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2a.errors import ConfigError, ShapeError
from a2a.quant import WIRE_FORMATS, ScaleLayout, swizzle_scales, unswizzle_scales

SWIZZLED = (ScaleLayout.SWIZZLED_128X4, ScaleLayout.SWIZZLED_8X4)


def offset(layout: ScaleLayout, r: int, c: int, cols: int) -> int:
    p = 4 * -(-cols // 4)
    if layout is ScaleLayout.SWIZZLED_128X4:
        return c % 4 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + (r // 128) * 128 * p
    return (r // 8) * (p // 4) * 32 + (c // 4) * 32 + (r % 8) * 4 + c % 4


def by_formula(linear: torch.Tensor, layout: ScaleLayout) -> list[int]:
    rows, cols = linear.shape
    step = 128 if layout is ScaleLayout.SWIZZLED_128X4 else 8
    memory = [0] * (step * -(-rows // step) * 4 * -(-cols // 4))
    for r, row in enumerate(linear.tolist()):
        for c, byte in enumerate(row):
            memory[offset(layout, r, c, cols)] = byte
    return memory


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_by_hand():
    x = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]], dtype=torch.uint8)
    eight = swizzle_scales(x, ScaleLayout.SWIZZLED_8X4)
    assert eight.shape == (8, 8)
    assert eight.flatten().tolist()[:12] == [11, 12, 13, 14, 21, 22, 23, 24, 0, 0, 0, 0]
    assert eight.flatten().tolist()[32:40] == [15, 0, 0, 0, 25, 0, 0, 0]
    large = swizzle_scales(x, ScaleLayout.SWIZZLED_128X4)
    assert large.shape == (128, 8)
    memory = large.flatten().tolist()
    assert memory[:4] == [11, 12, 13, 14] and memory[16:20] == [21, 22, 23, 24]
    assert memory[512:516] == [15, 0, 0, 0] and memory[528:532] == [25, 0, 0, 0]
    assert sum(map(bool, memory)) == 10


@pytest.mark.parametrize("layout", SWIZZLED)
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 300), cols=st.integers(1, 13))
def test_equals_the_formula_and_comes_back(layout, rows, cols):
    x = random_bytes(rows, cols)
    swizzled = swizzle_scales(x, layout)
    assert swizzled.shape == layout.shape(rows, cols) and swizzled.is_contiguous()
    assert swizzled.flatten().tolist() == by_formula(x, layout)
    assert torch.equal(unswizzle_scales(swizzled, layout, rows, cols), x)
    assert torch.equal(unswizzle_scales(swizzled.flatten(), layout, rows, cols), x)


@pytest.mark.parametrize("layout", SWIZZLED)
@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 3), cols=st.integers(1, 5))
def test_whole_tiles_are_a_permutation(layout, rows, cols):
    height, width = rows * layout.row_multiple, cols * 4
    places = torch.arange(height * width)
    # Two bytes of the place, laid out apart, show where each element went.
    low, high = (places & 255).to(torch.uint8), (places >> 8).to(torch.uint8)
    moved = [swizzle_scales(part.view(height, width), layout).flatten().long() for part in (low, high)]
    assert sorted((moved[0] + 256 * moved[1]).tolist()) == places.tolist()


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_each_matrix_of_a_batch_by_itself(layout):
    x = random_bytes(3, 2, 130, 6)
    together = swizzle_scales(x, layout)
    assert together.shape == (3, 2, *layout.shape(130, 6))
    for i in range(3):
        for j in range(2):
            assert torch.equal(together[i, j], swizzle_scales(x[i, j], layout))
    assert torch.equal(unswizzle_scales(together, layout, 130, 6), x)
    assert torch.equal(unswizzle_scales(together.flatten(-2), layout, 130, 6), x)


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
def test_scales_of_the_formats_keep_their_dtype(name, layout):
    _, scales = WIRE_FORMATS[name].quantize(torch.randn(5, 96))
    swizzled = swizzle_scales(scales, layout)
    assert swizzled.dtype == scales.dtype
    back = unswizzle_scales(swizzled, layout, *scales.shape)
    assert back.dtype == scales.dtype and torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_not_contiguous_and_not_modified():
    x = random_bytes(40, 12)[::2, ::3]
    before = x.clone()
    for layout in SWIZZLED:
        assert swizzle_scales(x, layout).flatten().tolist() == by_formula(x, layout)
    assert torch.equal(x, before)


def test_refusals():
    x = random_bytes(8, 4)
    with pytest.raises(ConfigError, match="layout"):
        swizzle_scales(x, "swizzled_8x4")
    with pytest.raises(ConfigError, match="layout"):
        unswizzle_scales(x, None, 8, 4)
    with pytest.raises(ShapeError, match="one-byte"):
        swizzle_scales(x.int(), ScaleLayout.SWIZZLED_8X4)
    with pytest.raises(ShapeError, match="one-byte"):
        swizzle_scales(x.flatten(), ScaleLayout.LINEAR)
    for layout in ScaleLayout:
        with pytest.raises(ShapeError, match="swizzled scales"):
            unswizzle_scales(x, layout, 9, 4)
        with pytest.raises(ShapeError, match="swizzled scales"):
            unswizzle_scales(swizzle_scales(x, layout).int(), layout, 8, 4)
