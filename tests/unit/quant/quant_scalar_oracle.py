"""A slow oracle of the wire formats: one element at a time, in exact fractions.

It shares no code with a2a.quant and uses no torch arithmetic: floats enter and leave as fp32 bit patterns.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import torch

INF = math.inf
Number = Fraction | float  # a float only for Inf


def bits_of(x: torch.Tensor) -> list[list[int]]:
    """fp32 bit patterns of a matrix of bf16, fp16 or fp32, widened bit by bit."""
    if x.dtype == torch.bfloat16:
        return [[(v & 0xFFFF) << 16 for v in row] for row in x.view(torch.int16).tolist()]
    if x.dtype == torch.float16:
        return [[widen_half(v & 0xFFFF) for v in row] for row in x.view(torch.int16).tolist()]
    return [[v & 0xFFFFFFFF for v in row] for row in x.view(torch.int32).tolist()]


def from_bits(rows: list[list[int]]) -> torch.Tensor:
    """fp32 matrix of these bit patterns."""
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(value: float) -> int:
    """fp32 bits of a Python float that fp32 holds exactly."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def widen_half(half: int) -> int:
    if half & 0x7C00 == 0x7C00 and half & 0x3FF:
        return (half & 0x8000) << 16 | 0x7FC00000
    return bits(struct.unpack("<e", struct.pack("<H", half))[0])


def is_nan(b: int) -> bool:
    return b & 0x7FFFFFFF > 0x7F800000


def is_special(b: int) -> bool:
    return b & 0x7FFFFFFF >= 0x7F800000


def magnitude(b: int) -> Number:
    """|value| of fp32 bits that are not NaN."""
    exponent, mantissa = b >> 23 & 0xFF, b & 0x7FFFFF
    if exponent == 255:
        return INF
    if exponent == 0:
        return Fraction(mantissa, 1 << 149)
    return Fraction(mantissa | 1 << 23) * Fraction(2) ** (exponent - 150)


def floor_log2(v: Fraction) -> int:
    guess = v.numerator.bit_length() - v.denominator.bit_length()
    return guess if Fraction(2) ** guess <= v else guess - 1


def nearest(v: Fraction, mantissa_bits: int, smallest_exponent: int) -> Fraction:
    """v >= 0 rounded to a binary float of unlimited range above, to nearest, ties to even."""
    if v == 0:
        return v
    quantum = Fraction(2) ** (max(floor_log2(v), smallest_exponent) - mantissa_bits)
    count, rest = divmod(v / quantum, 1)
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2):
        count += 1
    return count * quantum


def f32(v: Number) -> Number:
    """v >= 0 in fp32."""
    if v == INF:
        return INF
    rounded = nearest(Fraction(v), 23, -126)
    return INF if rounded >= Fraction(2) ** 128 else rounded


def f32_bits(v: Number) -> int:
    """fp32 bits of v >= 0, which fp32 holds exactly."""
    if v == INF:
        return 0x7F800000
    if v < Fraction(1, 1 << 126):
        return int(v * (1 << 149))
    exponent = floor_log2(Fraction(v))
    return (exponent + 127) << 23 | int((v / Fraction(2) ** exponent - 1) * (1 << 23))


def small_float(v: Number, mantissa_bits: int, bias: int, largest: int) -> int:
    """Code of v >= 0 in a small float without sign: nearest, ties to even, saturated."""
    if v == INF:
        v = Fraction(largest)
    v = min(nearest(Fraction(v), mantissa_bits, 1 - bias), Fraction(largest))
    if v < Fraction(2) ** (1 - bias):
        return int(v * Fraction(2) ** (mantissa_bits + bias - 1))
    exponent = floor_log2(v)
    return (exponent + bias) << mantissa_bits | int((v / Fraction(2) ** exponent - 1) * (1 << mantissa_bits))


def e4m3(v: Number, sign: int) -> int:
    return sign << 7 | small_float(v, 3, 7, 448)


def e2m1(v: Number, sign: int) -> int:
    return sign << 3 | small_float(v, 1, 1, 6)


def value_of_e4m3(byte: int) -> Fraction:
    """|value| of an e4m3 byte other than NaN."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def value_of_e2m1(code: int) -> Fraction:
    """|value| of a 4-bit code."""
    return [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")][code & 7]


def mx_byte(block: list[int], largest: int) -> int:
    """The contract's rule, read off the fp32 bits of s."""
    if any(map(is_special, block)):
        return 254
    s = f32_bits(f32(max(map(magnitude, block)) / largest))
    exponent, mantissa = s >> 23, s & 0x7FFFFF
    if exponent == 0:
        return int(mantissa > 0x400000)
    return min(254, exponent + (mantissa != 0))


def mxfp8_block(block: list[int]) -> tuple[int, list[int]]:
    """Scale byte and e4m3 bytes of one block."""
    byte = mx_byte(block, 448)
    factor = Fraction(2) ** (127 - byte)
    return byte, [0 if byte == 0 else e4m3_element(b, lambda m: f32(m * factor)) for b in block]


def e4m3_element(b: int, scaled) -> int:
    sign = b >> 31
    if is_nan(b):
        return 0x7F
    m = magnitude(b)
    return e4m3(m if m == INF else scaled(m), sign)


def fp8_block_block(block: list[int]) -> tuple[int, list[int]]:
    """fp32 bits of the scale and e4m3 bytes of one block."""
    if any(map(is_special, block)):
        scale = Fraction(1)
    else:
        scale = f32(max(*map(magnitude, block), f32(Fraction("1e-10"))) / 448)
    return f32_bits(scale), [e4m3_element(b, lambda m: f32(m / scale)) for b in block]


def e2m1_element(b: int, scaled) -> int:
    if is_nan(b):
        return 7
    m = magnitude(b)
    return e2m1(m if m == INF else scaled(m), b >> 31)


def mxfp4_block(block: list[int]) -> tuple[int, list[int]]:
    """Scale byte and 4-bit codes of one block."""
    byte = mx_byte(block, 6)
    factor = Fraction(2) ** (127 - byte)
    return byte, [0 if byte == 0 else e2m1_element(b, lambda m: f32(m * factor)) for b in block]


def nvfp4_block(block: list[int], g: Fraction) -> tuple[int, list[int]]:
    """Scale byte (e4m3) and 4-bit codes of one block."""
    if any(map(is_nan, block)):
        return 0x7F, [7] * len(block)
    amax = f32(max(map(magnitude, block)) * g)
    scale = e4m3(amax if amax == INF else f32(amax / 6), 0)
    sf = value_of_e4m3(scale)
    if sf == 0:
        return scale, [0] * len(block)
    factor = f32(g / sf)
    return scale, [e2m1_element(b, lambda m: f32(m * factor)) for b in block]


def pack(codes: list[int]) -> list[int]:
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
