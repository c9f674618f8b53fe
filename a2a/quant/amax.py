"""amax: the largest magnitude of each block, as fp32 bits.

Owns the reduction that every block format starts with. Refuses to know what a scale is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

INF_BITS: Final = 0x7F800000
"""fp32 bits of +Inf; a block's amax bits are at least this exactly when it holds NaN or Inf."""


def amax_bits(x: Tensor, block: int, buffer: Tensor) -> Tensor:
    """Bits of max |x| over each run of `block` elements.

    Args:
        x: `[n, W]` contiguous bf16, fp16 or fp32, n >= 1, W a multiple of `block`.
        buffer: fp32 `[n, W]` contiguous, overwritten.

    Returns:
        int32 `[n, W / block]`: the fp32 bits of amax, sign bit clear. NaN counts as larger than Inf, on every device.

    Magnitudes of floats order as their bits do, so an integer maximum is exact, needs no conversion of bf16 rows, and
    leaves no choice of what a maximum does with NaN. No host synchronisation.
    """
    rows, width = x.shape
    if x.dtype == torch.bfloat16:
        narrow = buffer.view(torch.int16).view(-1)[: x.numel()].view(rows, width)
        torch.bitwise_and(x.view(torch.int16), 0x7FFF, out=narrow)
        return narrow.view(rows, width // block, block).amax(-1).to(torch.int32).bitwise_left_shift_(16)
    bits = buffer.copy_(x).view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return bits.view(rows, width // block, block).amax(-1)
