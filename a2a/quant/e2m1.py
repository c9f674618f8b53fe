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


def encode(x: Tensor, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """Packed e2m1 of fp32 values, to nearest even, saturated at +-6; x is overwritten.

    Args:
        x: `[n, W]` contiguous fp32, W even.
        first, second: fp32 buffers of the same shape, overwritten.
        out: uint8 `[n, W/2]`, written: the element of the lower index in the low nibble. The sign of zero is kept.
            +-Inf -> +-6. e2m1 has no NaN: it becomes +6, as the conversion of NVIDIA GPUs does
            (cvt.rn.satfinite.e2m1x2.f32, https://docs.nvidia.com/cuda/parallel-thread-execution/).
    """
    # Codes step by 1/2 below 2, by 1 up to 4 and by 2 above. The three lines a -> 2a, a + 2, a/2 + 4 meet at 2 and 4
    # and each is lowest where its step holds; rounding is monotone, so the lowest rounded line is the rounded code,
    # and an even code is an even integer, so ties agree.
    torch.abs(x.nan_to_num_(nan=MAX), out=first).clamp_(max=MAX)
    torch.round(first, out=second).add_(2)
    torch.minimum(first.mul_(0.5).round_().add_(4), second, out=first)
    x.mul_(2).round_()  # keeps the sign, also of zero
    torch.minimum(first, torch.abs(x, out=second), out=first)
    nibble, sign = second.view(torch.uint8).view(-1)[: 2 * x.numel()].view(2, *x.shape)
    nibble.copy_(first)
    sign.copy_(x.view(torch.int32).bitwise_right_shift_(28))
    nibble.bitwise_or_(sign.bitwise_and_(8))
    return torch.bitwise_left_shift(nibble[..., 1::2], 4, out=out).bitwise_or_(nibble[..., 0::2])


def table(device: torch.device) -> Tensor:
    """int64 `[256]`, the two fp32 values of each byte, exact, made on the device without a copy from the host."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    nibble = torch.stack((byte & 15, byte >> 4), -1)
    code = nibble & 7
    # Codes from 2 on are the top bits of an fp32 number, up to the exponent's bias; code 1 is subnormal: 0.5.
    magnitude = torch.where(code < 2, code * (126 << 23), (code << 22) + (126 << 23))
    return (magnitude | (nibble & 8) << 28).view(torch.int64).view(-1)


def decode(packed: Tensor, values: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Exact fp32 values of packed bytes `[n, W/2]` into the contiguous `out` `[n, W]`, one look-up a byte.

    Args:
        values: `table(device)`.
        index: fp32 buffer of the size of out, overwritten.
    """
    where = index.view(torch.int32).view(-1)[: packed.numel()]
    where.view(packed.shape).copy_(packed)
    torch.index_select(values, 0, where, out=out.view(torch.int64).view(-1))
    return out
