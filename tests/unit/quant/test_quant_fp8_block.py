"""fp8_block, and its form for rows of any width, against bytes by hand and the scalar oracle."""

from __future__ import annotations

import pytest
import quant_scalar_oracle as oracle
import torch

from a2a.quant import WIRE_FORMATS, dequantize_blocks, quantize_blocks

FP8_BLOCK = WIRE_FORMATS["fp8_block"]


def bytes_of(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    return pair[0].view(torch.uint8).tolist(), oracle.bits_of(pair[1])


def expected(x: torch.Tensor, block: int = 128) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = [], []
    for row in oracle.bits_of(x):
        blocks = [oracle.fp8_block_block([*row[i : i + block], 0]) for i in range(0, len(row), block)]
        scales.append([scale for scale, _ in blocks])
        data.append([q for _, qs in blocks for q in qs[:-1]])
    return data, scales


def test_by_hand():
    x = torch.zeros(4, 128)
    x[1, 0], x[1, 1], x[1, 127] = 448.0, -1.0, 0.5
    x[2, 0], x[2, 1] = 896.0, -448.0
    x[3, 0], x[3, 1], x[3, 2], x[3, 3], x[3, 4] = float("nan"), float("inf"), float("-inf"), 3.0, 1e6
    data, scales = bytes_of(FP8_BLOCK.quantize(x))
    want = [[0] * 128 for _ in range(4)]
    want[1][0], want[1][1], want[1][127] = 0x7E, 0xB8, 0x30
    want[2][0], want[2][1] = 0x7E, 0xF6
    want[3][:5] = [0x7F, 0x7E, 0xFE, 0x44, 0x7E]
    assert data == want
    assert [row[0] for row in scales][1:] == [oracle.bits(1.0), oracle.bits(2.0), oracle.bits(1.0)]
    assert scales[0][0] == oracle.f32_bits(oracle.f32(oracle.f32(oracle.Fraction("1e-10")) / 448))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_rows_of_every_dtype(dtype):
    torch.manual_seed(0)
    x = (torch.randn(4, 256) * torch.exp2(torch.randint(-14, 14, (4, 256)).float())).to(dtype)
    x[0, 40], x[1, 200], x[2, 3] = float("-inf"), float("nan"), -0.0
    x[3, :128] = 0
    assert bytes_of(FP8_BLOCK.quantize(x)) == expected(x)


def test_extremes():
    """From subnormal blocks, whose amax counts as 1e-10, to the largest float; quotients may pass 448 by a rounding."""
    spots = [1, 0x7FFFFF, 0x800000, 0x2EDBE6FE, 0x2EDBE6FF, 0x2EDBE700, 0x7F7FFFFF, 0x7F7FFFFE, 0x3F800001, 0x43E00001]
    x = torch.zeros(len(spots), 128)
    x[:, ::9] = oracle.from_bits([[b] for b in spots])
    x[:, 1::9] = -x[:, ::9] * 0.3
    assert bytes_of(FP8_BLOCK.quantize(x)) == expected(x)


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 144, 255, 257, 400])
def test_any_width(width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    data, scales = quantize_blocks(x)
    assert data.shape == (3, width) and scales.shape == (3, -(-width // 128)) and data.is_contiguous()
    assert bytes_of((data, scales)) == expected(x)
    back = dequantize_blocks(data, scales)
    sizes = torch.tensor([oracle.value_of_e4m3(q) for q in range(127)], dtype=torch.float32)
    code = data.view(torch.uint8).int()
    signed = sizes[code & 127] * torch.where(code > 127, -1.0, 1.0)
    assert torch.equal(back, signed * scales.repeat_interleave(128, 1)[:, :width])


def test_other_block_sizes():
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(9))
    data, scales = quantize_blocks(x, block=16)
    assert bytes_of((data, scales)) == expected(x, 16)
    assert (dequantize_blocks(data, scales, 16) - x).abs().max() < 0.2


def test_special_blocks_dequantize_to_what_they_say():
    x = torch.ones(1, 300)
    x[0, 5], x[0, 130], x[0, 131] = float("nan"), float("inf"), float("-inf")
    back = dequantize_blocks(*quantize_blocks(x), dtype=torch.bfloat16)[0]
    assert back[5].isnan() and back[130] == 448 and back[131] == -448
    assert back[6] == 1 and back[132] == 1 and torch.allclose(back[256:].float(), torch.ones(44), rtol=0.01)
