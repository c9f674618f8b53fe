"""e8m0: the mx scale byte b, worth 2^(b-127).

Owns the rule from a block's amax to the byte, and from the byte to exact powers of two. Refuses to know the element
format and where bytes lie. torch.float8_e8m0fnu is not needed: bytes are uint8.
Source of the encoding: OCP Microscaling Formats 1.0, section 5.4.1,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.quant.amax import INF_BITS

SPECIAL: Final = 254
"""The byte of a block that holds NaN or Inf; no finite block reaches it."""

NEUTRAL: Final = 127
"""The byte worth 1.0."""


def scale_bytes(bits: Tensor, largest: float) -> Tensor:
    """Scale byte of each block, as int32, from the amax bits of `amax_bits`.

    The rule: s = amax / largest in fp32; byte = biased exponent of s, plus 1 if its mantissa is nonzero (subnormal s:
    if it is above 0x400000); at most 254; 254 for a block with NaN or Inf. So byte = clamp(ceil(log2 s) + 127, 0, 254).

    Args:
        bits: int32, any shape; sign bit clear.
        largest: largest value of the element format, m * 2^e with m 1.75 (e4m3: 448) or 1.5 (e2m1: 6).

    Works on integers, so neither a device's division nor flushed subnormals can change a byte. With amax = a * 2^i,
    1 <= a < 2: a <= m gives s <= 2^(i-e), byte i - e + 127; a > m gives one more. Rounding of s never crosses a power
    of two: next to m it moves s by 0.57 or 0.67 of a unit, away from the power. The one exception is in the coarser
    grid of subnormal s: one unit above largest * 2^-127, s rounds down to 2^-127 and the byte is 0.
    """
    shift, mantissa = {448.0: (8, 0x600000), 6.0: (2, 0x400000)}[largest]
    exception = (shift << 23 | mantissa) + 1
    byte = ((bits - (bits == exception).to(torch.int32)).clamp_(max=INF_BITS) + (0x7FFFFF - mantissa) >> 23) - shift
    return byte.clamp_(min=0).masked_fill_(bits >= INF_BITS, SPECIAL)


def inverse_power(byte: Tensor) -> Tensor:
    """2^(127-b) as fp32, by bit pattern; 0 for b = 0, whose elements are 0 by rule. `byte`: int32 in 0..254."""
    bits = (254 - byte) << 23
    # 2^-127 is subnormal; 0 << 23 would be 0.
    return bits.masked_fill_(byte == 254, 0x400000).masked_fill_(byte == 0, 0).view(torch.float32)


def power(byte: Tensor) -> Tensor:
    """2^(b-127) as fp32, by bit pattern; 255 is NaN. `byte`: any one-byte dtype."""
    wide = byte.view(torch.uint8).to(torch.int32)
    bits = wide << 23
    return bits.masked_fill_(wide == 0, 0x400000).masked_fill_(wide == 255, 0x7FC00000).view(torch.float32)
