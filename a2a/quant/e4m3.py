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


def encode_(x: Tensor) -> Tensor:
    """e4m3 of fp32 values, to nearest even, saturated; x is overwritten.

    Values beyond +-448 and +-Inf become +-448; every NaN becomes the byte 0x7F, whatever its sign. Without the clamp
    torch versions and devices differ in what they do on overflow; without the second step, in the sign of a NaN.
    """
    return x.clamp_(-MAX, MAX).nan_to_num_(nan=math.nan).to(torch.float8_e4m3fn)


def decode(q: Tensor) -> Tensor:
    """fp32 values, exact, of e4m3 values (or their bytes) of any shape; contiguous.

    A look-up in a table of 256 made on the device: on CPUs several times faster than torch's element-wise cast.
    """
    table = torch.arange(256, dtype=torch.uint8, device=q.device).view(torch.float8_e4m3fn).float()
    index = q.view(torch.uint8).to(torch.int32)
    return torch.index_select(table, 0, index.reshape(-1)).view(index.shape)
