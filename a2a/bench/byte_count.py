"""byte_count: how many bytes a round moves, counted from the routing by hand.

Owns the formula of `link_bytes` and `logical_bytes`. Refuses to know which implementation moves them.

A token is sent once to each rank that holds one of its picks. With `D[s, d]` the number of tokens of rank `s` that have
a pick on rank `d`, rank `s` dispatches `D[s, d]` rows to `d`, and `d` returns as many rows to `s` in combine. Signals
and counters are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from a2a.placement import Placement


@dataclasses.dataclass(frozen=True)
class ByteCount:
    """Bytes of one phase of one round, of the rank that sends most.

    Attributes:
        link_bytes: of rows that leave the rank; on the host transport, of rows that lie in another rank's workspace.
        logical_bytes: those and the rows that stay.
    """

    link_bytes: int
    logical_bytes: int


def pair_counts(topk_ids: Sequence[Tensor], placement: Placement) -> Tensor:
    """int64 `[ep, ep]`: tokens of the row's rank that have at least one pick on the column's rank."""
    counts = torch.zeros(placement.ep_size, placement.ep_size, dtype=torch.int64)
    for src_rank, ids in enumerate(topk_ids):
        counts[src_rank] = destinations(ids, placement).sum(dim=0)
    return counts


def destinations(topk_ids: Tensor, placement: Placement) -> Tensor:
    """bool `[n, ep]`: which ranks a token is sent to. Ids outside the table go nowhere."""
    owners = placement.owners(topk_ids)
    hits = torch.zeros(topk_ids.shape[0], placement.ep_size + 1, dtype=torch.bool, device=owners.device)
    # The column before the first takes the picks that go nowhere.
    return hits.scatter_(1, owners + 1, True)[:, 1:]


def count_bytes(counts: Tensor, *, dispatch_row_bytes: int, combine_row_bytes: int) -> dict[str, ByteCount]:
    """Bytes of "dispatch", "combine" and "pair".

    Args:
        counts: of `pair_counts`.
        dispatch_row_bytes: bytes of a token on the dispatch wire: row, scales, ids, weights.
        combine_row_bytes: bytes of a row on the combine wire.
    """
    remote = counts.clone().fill_diagonal_(0)

    def busiest(table: Tensor) -> tuple[int, int, int]:
        sent, returned = table.sum(dim=1) * dispatch_row_bytes, table.sum(dim=0) * combine_row_bytes
        return int(sent.max()), int(returned.max()), int((sent + returned).max())

    phases = ("dispatch", "combine", "pair")
    return {
        phase: ByteCount(link, logical)
        for phase, link, logical in zip(phases, busiest(remote), busiest(counts), strict=True)
    }
