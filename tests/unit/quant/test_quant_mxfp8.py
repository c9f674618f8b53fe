"""mxfp8 against bytes written by hand and against the scalar oracle."""

from __future__ import annotations

import random

import pytest
import quant_scalar_oracle as oracle
import torch

from a2a.quant import WIRE_FORMATS
from a2a.quant.e8m0 import scale_bytes

MXFP8 = WIRE_FORMATS["mxfp8"]


def quantize(x: torch.Tensor, alignment: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = MXFP8.quantize(x, alignment=alignment)
    return data.view(torch.uint8).tolist(), scales.tolist()


def expected(x: torch.Tensor, padded: int) -> tuple[list[list[int]], list[list[int]]]:
    data, scales = [], []
    for row in oracle.bits_of(x):
        row = row + [0] * (padded - len(row))
        blocks = [oracle.mxfp8_block(row[i : i + 32]) for i in range(0, padded, 32)]
        scales.append([byte for byte, _ in blocks])
        data.append([q for _, qs in blocks for q in qs])
    return data, scales


def amax_blocks(spots: list[int]) -> torch.Tensor:
    """One block a row: a largest element with these fp32 bits, and 6 smaller ones of several sizes and signs."""
    rows = []
    for place, b in enumerate(spots):
        smaller = [b >> 1, max(b - (3 << 23), 0), max(b - (9 << 23), 0) | 1 << 31]
        row = [max(b - 1, 0), *smaller, 1, max(b - 0x234567, 0) | 1 << 31] + [0] * 25
        row.insert(place % 32, b | (place % 2) << 31)
        rows.append(row)
    return oracle.from_bits(rows)


def test_by_hand():
    x = torch.zeros(6, 32, dtype=torch.bfloat16)
    x[1, 3] = 448.0
    x[2, 0], x[2, 31] = 450.0, -225.0  # the next bf16 above 448
    x[3, 5], x[3, 6] = 1.0, -0.5
    x[4, 0], x[4, 1] = 2.0**-133, -(2.0**-133)  # smallest bf16: s is 0 in fp32, so the byte is 0 and so are elements
    x[5, 0], x[5, 1], x[5, 2], x[5, 3], x[5, 4] = float("nan"), float("inf"), float("-inf"), 1.0, 2.0**127
    data, scales = quantize(x)
    assert scales == [[0], [127], [128], [119], [0], [254]]
    want = [[0] * 32 for _ in range(6)]
    want[1][3] = 0x7E
    want[2][0], want[2][31] = 0x76, 0xEE
    want[3][5], want[3][6] = 0x78, 0xF0
    want[5][0], want[5][1], want[5][2], want[5][3], want[5][4] = 0x7F, 0x7E, 0xFE, 0x00, 0x38
    assert data == want


def test_negative_zero_is_kept_beside_values_and_dropped_where_the_byte_is_zero():
    x = torch.full((2, 32), -0.0)
    x[1, 0] = 1.0
    data, scales = quantize(x)
    assert scales == [[0], [119]]
    assert data == [[0] * 32, [0x78] + [0x80] * 31]


def test_amax_exactly_448_times_every_power_of_two_and_one_unit_beside():
    spots = []
    for k in range(-155, 120):
        exact = oracle.f32_bits(oracle.Fraction(448) * oracle.Fraction(2) ** k)
        spots += [exact - 1, exact, exact + 1, exact + 2]
    x = amax_blocks(spots)
    data, scales = quantize(x)
    assert (data, scales) == expected(x, 32)
    # At and below 448 * 2^k the byte is k + 127, one above it one more; beside the lowest bytes s is subnormal.
    for k in range(-125, 120):
        below, at, above, _ = (row[0] for row in scales[4 * (k + 155) : 4 * (k + 155) + 4])
        assert (below, at, above) == (k + 127, k + 127, k + 128)


def test_subnormal_inputs_and_subnormal_scales():
    rng = random.Random(5)
    spots = [1, 2, 3, 0x400000, 0x7FFFFF, 0x800000, 0x800001]
    spots += [rng.randrange(1, 12 << 23) for _ in range(200)]
    for exponent in range(12):
        spots += [exponent << 23 | m for m in (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF)]
    x = amax_blocks([b for b in spots if b])
    assert quantize(x) == expected(x, 32)


def test_scale_bytes_equal_the_rule_computed_by_fp32_division():
    """Every mantissa near the step and many others, in every exponent, against division and log2, as specified."""
    torch.manual_seed(0)
    near = 0x600000 + torch.arange(-40, 41)
    mantissa = torch.cat(
        [
            near,
            torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF]),
            torch.randint(0, 1 << 23, (200,)),
        ]
    )
    amax = (torch.arange(255).view(-1, 1) << 23 | mantissa).to(torch.int32)
    got = scale_bytes(amax.clone(), 448.0)
    s = amax.view(torch.float32) / torch.tensor(448.0)
    exponent, rest = s.view(torch.int32) >> 23, s.view(torch.int32) & 0x7FFFFF
    up = torch.where(exponent == 0, rest > 0x400000, rest != 0)
    assert torch.equal(got, (exponent + up).clamp(max=254).to(torch.int32))
    positive = s > 0
    by_log = (torch.ceil(torch.log2(s.double())) + 127).clamp(0, 254).to(torch.int32)
    assert torch.equal(got[positive], by_log[positive])
    assert not got[~positive].any()


def test_no_scale_is_too_small():
    """|x| * 2^(127-b) never exceeds 448: the floor(log2 amax) variants do."""
    spots = torch.randint(1, 0x7F800000, (1 << 16,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    byte = scale_bytes(spots.clone(), 448.0)
    kept = byte > 0
    scaled = spots.view(torch.float32)[kept].double() * torch.exp2(127.0 - byte[kept].double())
    assert scaled.max() <= 448.0
    assert scaled[byte[kept] > 1].min() > 224.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_rows_of_every_dtype(dtype):
    torch.manual_seed(2)
    x = (torch.randn(4, 96) * torch.exp2(torch.randint(-14, 14, (4, 96)).float())).to(dtype)
    x[0, 40], x[1, 70], x[2, 3] = float("nan"), float("inf"), -0.0
    x[3, 32:64] = 0
    assert quantize(x) == expected(x, 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("special", [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000])
def test_a_block_with_nan_or_inf(dtype, special):
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[0, 50] = oracle.from_bits([[special]])[0, 0].to(dtype)
    x[0, 40] = torch.finfo(dtype).max
    data, scales = quantize(x)
    assert (data, scales) == expected(x, 96)
    assert scales[0][1] == 254 and 254 not in (scales[0][0], scales[0][2])
    values = MXFP8.dequantize(*MXFP8.quantize(x))[0]
    assert not values[50].isfinite() and values[:32].isfinite().all() and values[64:].isfinite().all()
    assert bool(values[50].isnan()) == oracle.is_nan(special)


def test_b_0_and_254_have_exact_powers():
    """2^127 would flush to Inf and 2^-127 is subnormal: both ends by hand."""
    data = torch.tensor([[0x7E] + [1] * 31] * 4, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0], [1], [246], [255]], dtype=torch.int32).to(torch.uint8)
    got = oracle.bits_of(MXFP8.dequantize(data, scales))
    for row, byte in zip(got, (0, 1, 246), strict=False):
        assert row[0] == oracle.f32_bits(448 * oracle.Fraction(2) ** (byte - 127))
        assert row[1] == oracle.f32_bits(oracle.Fraction(2) ** (byte - 136))
    assert all(map(oracle.is_nan, got[3]))


@pytest.mark.parametrize(
    ("hidden_size", "alignment", "padded"),
    [(160, 128, 256), (2880, 256, 3072), (2880, 0, 2880), (48, 0, 64), (16, 0, 32), (1, 0, 32), (33, 64, 64),
     (176, 32, 192)],
)  # fmt: skip
def test_padding(hidden_size, alignment, padded):
    x = torch.randn(2, hidden_size, generator=torch.Generator().manual_seed(hidden_size)).bfloat16()
    assert MXFP8.padded_size(hidden_size, alignment) == padded
    assert MXFP8.data_bytes_per_token(hidden_size, alignment) == padded
    assert MXFP8.scale_bytes_per_token(hidden_size, alignment) == padded // 32
    data, scales = quantize(x, alignment)
    assert (data, scales) == expected(x, padded)
    assert all(not any(row[hidden_size:]) for row in data)
    assert all(not any(row[-(-hidden_size // 32) :]) for row in scales)
    back = MXFP8.dequantize(*MXFP8.quantize(x, alignment=alignment), hidden_size=hidden_size, dtype=torch.bfloat16)
    assert back.shape == x.shape and back.is_contiguous()


def test_dequantize_is_exact_and_rounds_once():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)) * 100
    data, scales = MXFP8.quantize(x)
    exact = [
        (-1) ** (q >> 7) * oracle.value_of_e4m3(q) * oracle.Fraction(2) ** (scales[r][c // 32].item() - 127)
        for r, row in enumerate(data.view(torch.uint8).tolist())
        for c, q in enumerate(row)
    ]
    assert [oracle.Fraction(v) for v in MXFP8.dequantize(data, scales).flatten().tolist()] == exact
    for dtype, mantissa_bits in ((torch.bfloat16, 7), (torch.float16, 10)):
        got = MXFP8.dequantize(data, scales, dtype=dtype).flatten().float().tolist()
        assert [oracle.Fraction(abs(v)) for v in got] == [oracle.nearest(abs(v), mantissa_bits, -14) for v in exact]
