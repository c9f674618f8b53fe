"""e2m1: the 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; two to a byte.

Owns fp32 -> packed nibbles and back. Refuses to know blocks and scales.
Source of the encoding: OCP Microscaling Formats 1.0, section 5.3.3,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MAX: Final = 6.0
"""The largest e2m1 value."""


def encode_(x: Tensor) -> Tensor:
    """Packed e2m1 of fp32 values, to nearest even, saturated at +-6; x is overwritten.

    Args:
        x: `[..., W]` contiguous fp32, W even.

    Returns:
        uint8 `[..., W/2]`, the element of the lower index in the low nibble. The sign of zero is kept. +-Inf -> +-6.
        e2m1 has no NaN: it becomes +6, as the conversion of NVIDIA GPUs does
        (cvt.rn.satfinite.e2m1x2.f32, https://docs.nvidia.com/cuda/parallel-thread-execution/).
    """
    x.nan_to_num_(nan=MAX)
    sign = (x.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    x.abs_().clamp_(max=MAX)
    # Codes step by 1/2 below 2, by 1 up to 4 and by 2 above. The three lines x -> 2x, x + 2, x/2 + 4 meet at 2 and 4
    # and each is lowest where its step holds; rounding is monotone, so the lowest rounded line is the rounded code,
    # and an even code is an even integer, so ties agree.
    code = (x * 2).round_()
    torch.minimum(code, x.round().add_(2), out=code)
    torch.minimum(code, x.mul_(0.5).round_().add_(4), out=code)
    nibble = code.to(torch.uint8).bitwise_or_(sign)
    return (nibble[..., 1::2] << 4).bitwise_or_(nibble[..., 0::2])


def decode(packed: Tensor) -> Tensor:
    """fp32 values, exact, `[..., 2 * W]` of packed bytes `[..., W]`; contiguous.

    One look-up a byte in a table of 256 pairs made on the device.
    """
    byte = torch.arange(256, dtype=torch.int32, device=packed.device)
    nibble = torch.stack((byte & 15, byte >> 4), -1)
    code = nibble & 7
    # Codes from 2 on are the top bits of an fp32 number, up to the exponent's bias; code 1 is subnormal: 0.5.
    magnitude = torch.where(code < 2, code * (126 << 23), (code << 22) + (126 << 23))
    pairs = (magnitude | (nibble & 8) << 28).view(torch.int64)
    index = packed.view(torch.uint8).to(torch.int32)
    values = torch.index_select(pairs.view(-1), 0, index.reshape(-1)).view(torch.float32)
    return values.view(*index.shape[:-1], 2 * index.shape[-1])
