"""host/sums: adding the rows of all ranks in fp32, one pass, as numba kernels or chunked torch.

Owns the arithmetic of combine on the CPU: bf16, fp16 and fp32 rows, summed from +0 in ascending rank, rounded once to
nearest, ties to even. Refuses to know where rows come from: it gets addresses as element offsets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

SumRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(words, base, slots, output): see `sum_rows_torch`."""

_CHUNK_ELEMENTS: Final = 1 << 17
"""fp32 accumulators of one chunk, half a MiB: they stay in the second-level cache between ranks."""


def have_numba() -> bool:
    """Whether the numba kernels can be had; looks, imports nothing."""
    return importlib.util.find_spec("numba") is not None


def sum_rows_torch(words: Tensor, base: Tensor, slots: Tensor, output: Tensor) -> None:
    """Write into every row of `output` the sum of that token's rows.

    Args:
        words: all workspaces as one 1-D tensor of the rows' dtype (bf16, fp16 or fp32).
        base: int64 `[ep]`, element offset in `words` of the block that each rank keeps for this one.
        slots: int64 `[n, ep]`, the token's row within that block, -1 where the rank has none.
        output: `[n, H']` bf16, fp16 or fp32, contiguous.
    """
    num_tokens, width = output.shape
    if not num_tokens or not width:
        return
    rows = max(1, _CHUNK_ELEMENTS // width)
    bases = base.tolist()
    for start in range(0, num_tokens, rows):
        stop = min(start + rows, num_tokens)
        total = torch.zeros((stop - start, width), dtype=torch.float32)
        for rank, offset in enumerate(bases):
            taken = slots[start:stop, rank]
            tokens = (taken >= 0).nonzero().flatten()
            if tokens.numel():
                picked = taken[tokens]
                last = int(picked.max()) + 1
                block = words[offset : offset + last * width].view(last, width)
                total.index_add_(0, tokens, block.index_select(0, picked).float())
        output[start:stop] = total


def sum_rows_numba() -> SumRows:
    """The numba kernel behind the arguments of `sum_rows_torch`; compiled once per machine, then read from disk."""
    from a2a.host import kernels

    def sum_rows(words: Tensor, base: Tensor, slots: Tensor, output: Tensor) -> None:
        kernels.sum_rows(
            *_views(words), _KINDS[words.dtype], base.numpy(), slots.numpy(), *_views(output), _KINDS[output.dtype]
        )

    # Compiles (or loads) now, not in the first round.
    for dtype in _KINDS:
        row = torch.zeros(4, dtype=dtype)
        sum_rows(row, torch.zeros(1, dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64), row.view(1, 4).clone())
    return sum_rows


_KINDS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _views(tensor: Tensor) -> tuple[Any, Any]:
    """The same memory as 16-bit words and as fp32; the one that does not fit the dtype is empty."""
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.float32:
        return torch.empty(0, dtype=torch.uint16).numpy(), flat.numpy()
    return flat.view(torch.uint16).numpy(), torch.empty(0, dtype=torch.float32).numpy()
