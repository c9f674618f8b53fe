"""placement: expert id -> (EP rank, local expert).

Owns who holds which expert. Refuses to know what is sent to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Placement:
    """A table from global expert ids to EP ranks; each expert has exactly one rank.

    Redundant or moved experts are expressed by the table: a replica is an expert id of its own. The local index of an
    expert counts the experts of its rank in ascending global id.

    Attributes:
        table: int32 `[num_experts]`, on the CPU, the rank of each expert.
        local: int32 `[num_experts]`, on the CPU, the index of each expert within its rank.
        ep_size: number of ranks.
    """

    def __init__(self, ranks: Sequence[int] | Tensor, ep_size: int) -> None:
        self.ep_size = ep_size
        self.table = torch.as_tensor(ranks, dtype=torch.int32, device="cpu").clone()
        self.local = torch.empty_like(self.table)
        for rank in range(ep_size):
            mine = self.table == rank
            self.local[mine] = torch.arange(int(mine.sum()), dtype=torch.int32)

    @classmethod
    def contiguous(cls, num_experts: int, ep_size: int) -> Placement:
        """Equal shares in order of id; the first `num_experts % ep_size` ranks own one expert more."""
        base, rem = divmod(num_experts, ep_size)
        sizes = torch.full((ep_size,), base, dtype=torch.int64)
        sizes[:rem] += 1
        return cls(torch.repeat_interleave(torch.arange(ep_size), sizes), ep_size)

    @property
    def num_experts(self) -> int:
        """Global experts in the table."""
        return self.table.numel()

    def owner(self, expert_id: int) -> int:
        """EP rank of an expert; an id outside `[0, num_experts)` has none and gives -1."""
        return int(self.table[expert_id]) if 0 <= expert_id < self.num_experts else -1

    def experts_of(self, rank: int) -> Tensor:
        """int64 global ids of a rank's experts, ascending: entry `i` is local expert `i`."""
        return (self.table == rank).nonzero().flatten()

    def owners(self, expert_ids: Tensor) -> Tensor:
        """int64 ranks of a tensor of ids, -1 where the id is outside `[0, num_experts)`; no host synchronisation."""
        ids = expert_ids.long()
        known = (ids >= 0) & (ids < self.num_experts)
        ranks = self.table.to(ids.device).long()[torch.where(known, ids, 0)]
        return torch.where(known, ranks, -1)
