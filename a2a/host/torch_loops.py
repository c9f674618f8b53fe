"""host/torch_loops: the loops over tokens and rows in vectorised torch, where numba is not installed.

Owns no state. Refuses to know the protocol.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.host.loops import Loops

_CHUNK_ELEMENTS: Final = 1 << 17
"""fp32 accumulators of one chunk, half a MiB: they stay in the second-level cache between ranks."""


class TorchLoops(Loops):
    """See `Loops`."""

    def route(
        self,
        ids: Tensor,
        owners: Tensor,
        active: Tensor,
        compact: bool,
        targets: Tensor,
        indices: Tensor,
        counts: Tensor,
        slots: Tensor,
    ) -> None:
        (n, k), ep = ids.shape, active.shape[0]
        picks = ids.long()
        known = (picks >= 0) & (picks < owners.shape[0])
        ranks = owners[torch.where(known, picks, 0)].long()
        known &= active[ranks] != 0
        # Column ep collects the picks that go nowhere.
        ranks = torch.where(known, ranks, ep)
        hits = torch.zeros((n, ep + 1), dtype=torch.bool, device="cpu").scatter_(1, ranks, True)[:, :ep]
        places = hits.cumsum(0) - 1 if compact else torch.arange(n, device="cpu")[:, None]
        slots.copy_(torch.where(hits, places, -1))
        order = torch.arange(k, device="cpu").expand(n, k)
        first = torch.full((n, ep + 1), k, device="cpu").scatter_reduce_(1, ranks, order, "amin")
        first = first.gather(1, ranks) == order
        first &= known
        targets, indices = (each.view(-1)[: n * k].view(n, k) for each in (targets, indices))
        targets.copy_(torch.where(first, ranks, -1))
        indices.copy_(torch.where(first, torch.nn.functional.pad(slots, (0, 1), value=-1).gather(1, ranks), -1))
        counts.copy_(hits.sum(0))

    def write_counts(self, counts: Tensor, active: Tensor, there: Tensor) -> None:
        there[active != 0] = counts[active != 0]

    def write_rows(self, rows: Tensor, row_bytes: int, slots: Tensor, memory: Tensor, start: int, stride: int) -> None:
        num_tokens = rows.shape[0]
        # No rows, or rows of one element, count as contiguous with any stride; a view of another element size does not
        # accept that.
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
        for rank in range(slots.shape[1]):
            places = slots[:, rank]
            tokens = (places >= 0).nonzero().flatten()
            count = tokens.shape[0]
            if not count:
                continue
            places = places[tokens]
            at = start + rank * stride
            if count == num_tokens:
                memory[at : at + count * row_bytes].view(count, row_bytes).copy_(rows)
            elif int(places[-1]) == count - 1:
                block = memory[at : at + count * row_bytes].view(count, row_bytes)
                torch.index_select(rows, 0, tokens, out=block)
            else:
                # Rows in token order with gaps: the rows between are read and written as they are, by this rank alone.
                block = memory[at : at + num_tokens * row_bytes].view(num_tokens, row_bytes)
                torch.where((slots[:, rank] >= 0)[:, None], rows, block, out=block)

    def fill_padded(self, area: Tensor, counts: Tensor, valid: Tensor | None, value: int) -> None:
        if valid is None:
            valid = torch.arange(area.shape[1], device="cpu") < counts[:, None]
        area.masked_fill_((valid == 0)[..., None], value)

    def sum_rows(self, words: Tensor, start: int, stride: int, slots: Tensor, output: Tensor) -> None:
        num_tokens, width = output.shape
        if not num_tokens or not width:
            return
        rows = max(1, _CHUNK_ELEMENTS // width)
        for first in range(0, num_tokens, rows):
            stop = min(first + rows, num_tokens)
            total = torch.zeros((stop - first, width), dtype=torch.float32, device="cpu")
            for rank in range(slots.shape[1]):
                offset = start + rank * stride
                taken = slots[first:stop, rank]
                tokens = (taken >= 0).nonzero().flatten()
                if tokens.numel():
                    picked = taken[tokens]
                    last = int(picked.max()) + 1
                    block = words[offset : offset + last * width].view(last, width)
                    total.index_add_(0, tokens, block.index_select(0, picked).float())
            output[first:stop] = total
