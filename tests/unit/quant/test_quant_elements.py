"""e4m3 and e2m1: every code, every midpoint between two codes, and the floats beside them."""

from __future__ import annotations

import itertools

import quant_scalar_oracle as oracle
import torch

from a2a.quant import e2m1, e4m3

E4M3_MAGNITUDES = [oracle.value_of_e4m3(code) for code in range(0x7F)]
E2M1_MAGNITUDES = [oracle.value_of_e2m1(code) for code in range(8)]


def neighbours(magnitudes: list) -> list[int]:
    """fp32 bits of each value and midpoint and of the floats one unit beside, with both signs."""
    points = [*magnitudes, *((a + b) / 2 for a, b in itertools.pairwise(magnitudes)), 464, 5e10]
    exact = [oracle.f32_bits(oracle.f32(point)) for point in points]
    around = {b + step for b in exact for step in (-1, 0, 1) if b + step >= 0}
    return [b | sign for b in sorted(around) for sign in (0, 1 << 31)]


def encode_e4m3(rows: list[list[int]]) -> list[list[int]]:
    x = oracle.from_bits(rows)
    return e4m3.encode(x, x.new_empty(x.shape, dtype=torch.float8_e4m3fn)).view(torch.uint8).tolist()


def encode_e2m1(row: list[int]) -> list[int]:
    x = oracle.from_bits([row])
    out = x.new_empty((1, len(row) // 2), dtype=torch.uint8)
    return e2m1.encode(x, torch.empty_like(x), torch.empty_like(x), out)[0].tolist()


def test_e4m3_by_hand():
    written = [
        (0.0, 0x00), (-0.0, 0x80), (2**-10, 0x00), (2**-9, 0x01), (1.5 * 2**-9, 0x02), (2**-6, 0x08), (1.0, 0x38),
        (-1.0, 0xB8), (1.0625, 0x38), (1.1875, 0x3A), (240.0, 0x77), (448.0, 0x7E), (-448.0, 0xFE), (463.0, 0x7E),
        (464.0, 0x7E), (1e30, 0x7E), (float("inf"), 0x7E), (float("-inf"), 0xFE), (float("nan"), 0x7F),
    ]  # fmt: skip
    for value, code in written:
        assert encode_e4m3([[oracle.bits(value)]]) == [[code]], value
    assert encode_e4m3([[0xFFC00000, 0xFF800001, 0x7F800001]]) == [[0x7F] * 3], "every NaN has one byte"


def test_e4m3_encode_is_nearest_even_and_saturates():
    row = neighbours(E4M3_MAGNITUDES)
    assert encode_e4m3([row]) == [[oracle.e4m3(oracle.magnitude(b), b >> 31) for b in row]]


def test_e4m3_vector_and_tail_paths_agree():
    for width in range(1, 40):
        row = neighbours(E4M3_MAGNITUDES)[-width:]
        assert encode_e4m3([row])[0] == [oracle.e4m3(oracle.magnitude(b), b >> 31) for b in row]
        assert encode_e4m3([[0xFFC00000] * width]) == [[0x7F] * width]


def test_e4m3_decode_every_byte():
    q = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    out = e4m3.decode(q, e4m3.table(q.device), torch.empty(16, 16), torch.empty(16, 16))
    want = [oracle.f32_bits(oracle.value_of_e4m3(b)) | (b & 0x80) << 24 for b in range(256)]
    got = [v for row in oracle.bits_of(out) for v in row]
    for byte in range(256):
        assert oracle.is_nan(got[byte]) if byte & 0x7F == 0x7F else got[byte] == want[byte], hex(byte)


def test_e2m1_by_hand():
    values = [0.0, -0.0, 0.25, 0.2500001, 0.75, 0.7499999, 1.25, 1.75, -2.5, 3.5, 5.0, 5.000001, -7.0, 0.5, 6.0, 1.5]
    codes = [0, 8, 0, 1, 2, 1, 2, 4, 12, 6, 6, 7, 15, 1, 7, 3]
    row = [oracle.f32_bits(oracle.f32(abs(oracle.Fraction(v)))) | (v < 0 or str(v) == "-0.0") << 31 for v in values]
    assert encode_e2m1(row) == oracle.pack(codes)


def test_e2m1_encode_is_nearest_even_and_saturates():
    row = neighbours(E2M1_MAGNITUDES)
    row += row[: len(row) % 2]
    assert encode_e2m1(row) == oracle.pack([oracle.e2m1(oracle.magnitude(b), b >> 31) for b in row])


def test_e2m1_without_nan_and_inf():
    row = [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001]
    assert encode_e2m1(row) == oracle.pack([7, 7, 7, 15, 7, 7, 15, 0])


def test_e2m1_decode_every_byte():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    out = e2m1.decode(packed, e2m1.table(packed.device), torch.empty(8, 64), torch.empty(8, 64))
    want = []
    for byte in range(256):
        for code in (byte & 15, byte >> 4):
            want.append(oracle.f32_bits(oracle.value_of_e2m1(code)) | (code & 8) << 28)
    assert [v for row in oracle.bits_of(out) for v in row] == want
