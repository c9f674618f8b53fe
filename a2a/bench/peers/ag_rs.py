"""ag_rs: all-gather the tokens and ids, reduce-scatter the sums, over gloo or NCCL.

Owns the peer that needs no routing on the wire. Refuses to allocate rows during a round.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.bench.byte_count import destinations
from a2a.bench.implementation import Case, Experts, Implementation, Received
from a2a.bench.process_group import backend_of, rows_group
from a2a.bench.sorted_rows import Payloads
from a2a.comm import Comm

# Newer torch releases give these collectives another name and warn about the old one.
_all_gather: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class AllGatherReduceScatter(Implementation):
    """Every rank sees every token; each contributes a row for each, zero where it holds none of the picks."""

    name: ClassVar[str] = "ag-rs"

    def __init__(self, case: Case, comm: Comm) -> None:
        self._case = case
        self._group = rows_group(comm, case.device)
        rows = case.ep_size * case.max_tokens
        self._mine = Payloads(case, case.max_tokens)
        # Slots past this rank's tokens must pick nothing on any rank.
        self._mine.topk_ids.fill_(-1)
        self._all = Payloads(case, rows)
        self._contributions = torch.zeros(rows, case.hidden_size, dtype=case.row_dtype, device=case.device)
        self._sums = torch.zeros(case.max_tokens, case.hidden_size, dtype=case.row_dtype, device=case.device)
        self._rows = torch.zeros(0)

    @property
    def transport(self) -> str:
        return backend_of(self._case.device)

    def load(self, rows: Tensor) -> None:
        self._rows = rows

    def dispatch(self) -> None:
        case, mine, count = self._case, self._mine, self._case.num_tokens
        data, scales = case.quantize(self._rows)
        mine.data[:count] = data
        if scales is not None and mine.scales is not None:
            mine.scales[:count] = scales
        mine.topk_ids[:count] = case.topk_ids
        mine.topk_weights[:count] = case.topk_weights
        for everyone, own in zip(self._all.bytes, mine.bytes, strict=True):
            _all_gather(everyone, own, group=self._group)

    def received(self) -> Received:
        hit = self._hit()
        counts = hit.view(self._case.ep_size, -1).sum(dim=1).tolist()
        scales = None if self._all.scales is None else self._all.scales[hit]
        ids, weights = self._all.topk_ids[hit], self._all.topk_weights[hit]
        return Received(tuple(counts), self._all.data[hit], scales, ids, weights)

    def fill(self, experts: Experts) -> None:
        got = self.received()
        self._contributions.zero_()
        self._contributions[self._hit()] = experts(self._case.dequantize(got.data, got.scales), self._case.ep_rank)

    def combine(self) -> Tensor:
        _reduce_scatter(self._sums, self._contributions, group=self._group)
        return self._sums[: self._case.num_tokens]

    def _hit(self) -> Tensor:
        return destinations(self._all.topk_ids, self._case.placement)[:, self._case.ep_rank]

    def close(self) -> None:
        """The process group stays for the cases that follow; buffers go with the object."""


PEER = AllGatherReduceScatter
