"""e4m3: the 8-bit float with 4 exponent and 3 mantissa bits (no Inf, largest value 448).

Owns fp32 -> e4m3 with the saturation and NaN rule of the formats, and back. Refuses to know blocks and scales.
Source of the encoding: https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

MAX: Final = 448.0
"""The largest finite e4m3 value."""

STORED: Final = (torch.float8_e4m3fn, torch.uint8)
"""Dtypes in which e4m3 rows may come back: their own, and bytes."""


def encode(x: Tensor, out: Tensor) -> Tensor:
    """e4m3 of fp32 values, to nearest even, saturated, into `out` of the same shape; x is overwritten.

    Values beyond +-448 and +-Inf become +-448; every NaN becomes the byte 0x7F, whatever its sign. Without the clamp
    torch versions and devices differ in what they do on overflow; without the second step, in the sign of a NaN.
    """
    return out.copy_(x.clamp_(-MAX, MAX).nan_to_num_(nan=math.nan))


def table(device: torch.device) -> Tensor:
    """fp32 `[256]`: the value of each byte, exact, made on the device without a copy from the host."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def decode(q: Tensor, values: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Exact fp32 values of e4m3 `q` (or its bytes) into the contiguous `out` of the same shape.

    A look-up, on CPUs several times faster than torch's element-wise cast.

    Args:
        values: `table(device)`.
        index: fp32 buffer of the size of q, overwritten.
    """
    where = index.view(torch.int32).view(-1)[: q.numel()]
    where.view(q.shape).copy_(q.view(torch.uint8))
    torch.index_select(values, 0, where, out=out.view(-1))
    return out
