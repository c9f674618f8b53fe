"""amax: the largest magnitude of each block, as fp32 bits.

Owns the reduction that every block format starts with. Refuses to know what a scale is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

INF_BITS: Final = 0x7F800000
"""fp32 bits of +Inf; a block's amax bits are at least this exactly when it holds NaN or Inf."""


def amax_bits(x: Tensor, block: int) -> Tensor:
    """Bits of max |x| over each run of `block` elements.

    Args:
        x: `[n, W]` contiguous bf16, fp16 or fp32, W a multiple of `block`.

    Returns:
        int32 `[n, W / block]`: the fp32 bits of amax, sign bit clear. NaN counts as larger than Inf, on every device.

    Magnitudes of floats order as their bits do, so an integer maximum is exact, needs no conversion of bf16 rows, and
    leaves no choice of what a maximum does with NaN. No host synchronisation.
    """
    if x.dtype == torch.bfloat16:
        bits = (x.view(torch.int16) & 0x7FFF).view(x.shape[0], x.shape[1] // block, block)
        return bits.amax(-1).to(torch.int32) << 16
    bits = (x.float().view(torch.int32) & 0x7FFFFFFF).view(x.shape[0], x.shape[1] // block, block)
    return bits.amax(-1)
