"""slabs: long inputs on a CPU are worked through a few rows at a time, in buffers that stay in its cache.

Owns how many rows that is. Refuses to know what is done with them. Fresh memory for every intermediate of a whole input
would cost more than the arithmetic, and hundreds of MiB at full capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

SLAB_ELEMENTS: Final = 1 << 18
"""Elements of a slab; its fp32 buffer is 1 MiB."""


def slabs(like: Tensor, width: int, buffers: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Row ranges that cover `like` and, for each, contiguous fp32 buffers `[rows of the range, width]`.

    The buffers of all ranges share memory. On devices other than a CPU one range covers all. No rows, no range.
    """
    total = like.shape[0]
    step = total if like.device.type != "cpu" else min(total, max(1, SLAB_ELEMENTS // width))
    if total == 0:
        return
    memory = torch.empty((buffers, step * width), dtype=torch.float32, device=like.device)
    for start in range(0, total, step):
        rows = min(step, total - start)
        yield slice(start, start + rows), tuple(row[: rows * width].view(rows, width) for row in memory)
