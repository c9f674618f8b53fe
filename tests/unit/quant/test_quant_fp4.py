"""nvfp4 and mxfp4 against bytes written by hand and against the scalar oracle."""

from __future__ import annotations

import itertools
import random

import pytest
import quant_scalar_oracle as oracle
import torch

from a2a.quant import WIRE_FORMATS
from a2a.quant.e8m0 import scale_bytes

NVFP4 = WIRE_FORMATS["nvfp4"]
MXFP4 = WIRE_FORMATS["mxfp4"]


def nvfp4(x: torch.Tensor, g: float | None = None) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = NVFP4.quantize(x, global_scale=None if g is None else torch.tensor(g))
    return data.tolist(), scales.view(torch.uint8).tolist()


def mxfp4(x: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = MXFP4.quantize(x)
    return data.tolist(), scales.tolist()


def expected(x: torch.Tensor, block: int, one) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = [], []
    for row in oracle.bits_of(x):
        blocks = [one(row[i : i + block]) for i in range(0, len(row), block)]
        scales.append([scale for scale, _ in blocks])
        data.append([byte for _, codes in blocks for byte in oracle.pack(codes)])
    return data, scales


def expected_nvfp4(x: torch.Tensor, g: float = 1.0) -> tuple[list[list[int]], list[list[int]]]:
    exact = oracle.magnitude(oracle.bits_of(torch.tensor([[g]]))[0][0])
    return expected(x, 16, lambda block: oracle.nvfp4_block(block, exact))


def expected_mxfp4(x: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    return expected(x, 32, oracle.mxfp4_block)


def spots_to_rows(spots: list[int], block: int) -> torch.Tensor:
    rows = []
    for place, b in enumerate(spots):
        halves = [b >> 1, max(b - (1 << 23), 0), max(b - (2 << 23), 0) | 1 << 31]
        row = [max(b - 1, 0), *halves, 1, max(b - 0x234567, 0) | 1 << 31] + [0] * (block - 7)
        row.insert(place % block, b | (place % 2) << 31)
        rows.append(row)
    return oracle.from_bits(rows)


def test_nvfp4_by_hand():
    x = torch.zeros(3, 16)
    x[0, :8] = torch.tensor([6.0, -6.0, 0.5, 1.0, 1.5, 2.0, 3.0, -4.0])  # amax 6: the scale is 1
    x[1, 0], x[1, 1] = 12.0, -1.0  # the scale is 2
    data, scales = nvfp4(x)
    assert scales == [[0x38], [0x40], [0x00]]
    assert data == [[0xF7, 0x21, 0x43, 0xE5, 0, 0, 0, 0], [0x97, 0, 0, 0, 0, 0, 0, 0], [0] * 8]


def test_nvfp4_global_scale_by_hand():
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 3.0, -1.5
    data, scales = nvfp4(x, 4.0)  # 4 * 3 / 6 = 2; factor 4 / 2
    assert (data, scales) == ([[0xD7, 0, 0, 0, 0, 0, 0, 0]], [[0x40]])
    back = NVFP4.dequantize(*NVFP4.quantize(x, global_scale=torch.tensor(4.0)), global_scale=torch.tensor(4.0))
    assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("g", [None, 1.0, 0.37, 417.3, 2688.0 / 3.7])
def test_nvfp4_random_rows(dtype, g):
    torch.manual_seed(0)
    x = (torch.randn(4, 64) * torch.exp2(torch.randint(-10, 10, (4, 64)).float())).to(dtype)
    x[3, :16] = 0
    x[2, 3] = -0.0
    assert nvfp4(x, g) == expected_nvfp4(x, g or 1.0)


def test_nvfp4_scale_boundaries():
    """amax / 6 on every e4m3 value and every midpoint, and one unit beside; from underflow to saturation."""
    values = [oracle.value_of_e4m3(code) for code in range(0x7F)]
    points = values + [(a + b) / 2 for a, b in itertools.pairwise(values)] + [oracle.Fraction(460), 1 << 120]
    spots = sorted({max(oracle.f32_bits(oracle.f32(6 * p)) + d, 1) for p in points for d in (-1, 0, 1)})
    spots += [1, 0x7FFFFF, 0x800000, 0x7F7FFFFF]
    x = spots_to_rows(spots, 16)
    assert nvfp4(x) == expected_nvfp4(x)


@pytest.mark.parametrize("g", [0.37, 1.9, 417.3])
def test_nvfp4_order_of_multiplication_and_division(g):
    """amax where g * amax / 6 meets a midpoint of e4m3, elements where x * (g / sf) meets one of e2m1."""
    exact = oracle.magnitude(oracle.bits_of(torch.tensor([[g]]))[0][0])
    values = [oracle.value_of_e4m3(code) for code in range(8, 0x7F)]
    rows = []
    for middle in [(a + b) / 2 for a, b in itertools.pairwise(values)]:
        for step in (-1, 0, 1):
            amax = oracle.f32_bits(oracle.f32(6 * middle / exact)) + step
            (scale, _) = oracle.nvfp4_block([amax], exact)
            factor = oracle.f32(exact / oracle.value_of_e4m3(scale))
            middles = [oracle.Fraction(m) for m in ("0.25", "0.75", "1.25", "1.75", "2.5", "3.5", "5")]
            elements = [oracle.f32_bits(oracle.f32(m / factor)) for m in middles]
            rows.append([amax, *elements, *(b + (step or 2) | 1 << 31 for b in elements), 0])
    x = oracle.from_bits(rows)
    assert nvfp4(x, g) == expected_nvfp4(x, g)


def test_nvfp4_scale_zero_means_codes_zero():
    x = torch.full((1, 16), -(2.0**-12))
    assert nvfp4(x) == ([[0] * 8], [[0]])
    assert not NVFP4.dequantize(*NVFP4.quantize(x)).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_nvfp4_inf_saturates_and_nan_stays_visible(sign):
    x = torch.ones(1, 48)
    x[0, 4] = sign * float("inf")
    x[0, 20] = sign * float("nan")
    data, scales = nvfp4(x)
    assert (data, scales) == expected_nvfp4(x)
    assert scales == [[0x7E, 0x7F, e4m3_of_sixth := 0x23]] and e4m3_of_sixth == oracle.e4m3(oracle.Fraction(1, 6), 0)
    assert data[0][2] == (0x7 if sign > 0 else 0xF) and data[0][8:16] == [0x77] * 8
    values = NVFP4.dequantize(*NVFP4.quantize(x))[0]
    assert values[4] == sign * 2688.0 and values[16:32].isnan().all() and values[32:].isfinite().all()


def test_nvfp4_value_order():
    """(q * sf) / g in fp32, bit for bit."""
    torch.manual_seed(1)
    g = torch.tensor(321.7)
    x = torch.randn(3, 32)
    data, scales = NVFP4.quantize(x, global_scale=g)
    exact = oracle.magnitude(oracle.bits_of(g.view(1, 1))[0][0])
    want = []
    for row, sf in zip(data.tolist(), scales.view(torch.uint8).tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        for place, code in enumerate(codes):
            product = oracle.f32(oracle.value_of_e2m1(code) * oracle.value_of_e4m3(sf[place // 16]))
            want.append(oracle.f32_bits(oracle.f32(product / exact)) | (code & 8) << 28)
    got = NVFP4.dequantize(data, scales, global_scale=g)
    assert [b for row in oracle.bits_of(got) for b in row] == want


def test_mxfp4_by_hand():
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -3.0, 0.25  # s = 1
    x[1, 0], x[1, 31] = 6.03125, -1.0  # the next bf16 above 6: s > 1, so values are halved
    x[2, 0] = 1.0  # s = 1/6, rounded up to 1/4
    x[3, 0], x[3, 1] = 2.0**-133, -(2.0**-133)
    data, scales = mxfp4(x)
    assert scales == [[127], [128], [125], [0], [0]]
    want = [[0] * 16 for _ in range(5)]
    want[0][0] = 0xD7
    want[1][0], want[1][15] = 0x05, 0x90
    want[2][0] = 0x06
    assert data == want


def test_mxfp4_amax_at_every_power_of_two():
    spots = []
    for k in range(-149, 126):
        exact = oracle.f32_bits(6 * oracle.Fraction(2) ** k) if k > -150 else 0
        spots += [exact - 1, exact, exact + 1, exact + 2]
    x = spots_to_rows(spots, 32)
    assert mxfp4(x) == expected_mxfp4(x)


def test_mxfp4_subnormals():
    rng = random.Random(2)
    spots = [1, 2, 0x400000, 0x7FFFFF] + [rng.randrange(1, 6 << 23) for _ in range(100)]
    x = spots_to_rows(spots, 32)
    assert mxfp4(x) == expected_mxfp4(x)


def test_mxfp4_scale_bytes_equal_the_rule_computed_by_fp32_division():
    near = 0x400000 + torch.arange(-40, 41)
    random_mantissas = torch.randint(0, 1 << 23, (200,), generator=torch.Generator().manual_seed(0))
    mantissa = torch.cat([near, torch.tensor([0, 1, 0x7FFFFE, 0x7FFFFF]), random_mantissas])
    amax = (torch.arange(255).view(-1, 1) << 23 | mantissa).to(torch.int32)
    s = (amax.view(torch.float32) / torch.tensor(6.0)).view(torch.int32)
    up = torch.where(s >> 23 == 0, (s & 0x7FFFFF) > 0x400000, (s & 0x7FFFFF) != 0)
    assert torch.equal(scale_bytes(amax.clone(), 6.0), ((s >> 23) + up).clamp(max=254).to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_random_rows(dtype):
    torch.manual_seed(3)
    x = (torch.randn(4, 96) * torch.exp2(torch.randint(-6, 6, (4, 96)).float())).to(dtype)
    x[3, :32] = 0
    assert mxfp4(x) == expected_mxfp4(x)


def test_mxfp4_nan_and_inf_stay_non_finite():
    x = torch.ones(1, 64)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = float("nan"), float("inf"), float("-inf"), 2.0**127
    data, scales = mxfp4(x)
    assert (data, scales) == expected_mxfp4(x)
    assert scales[0][0] == 254 and data[0][:3] == [0x77, 0x2F, 0x00]
    values = MXFP4.dequantize(*MXFP4.quantize(x))[0]
    assert values[0] == float("inf") and values[1] == float("inf") and values[2] == float("-inf")
    assert values[3] == 2.0**127 and values[32:].isfinite().all()
