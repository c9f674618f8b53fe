"""sorted_rows: payloads sorted by destination rank for variable all-to-alls.

Owns what every peer built on a collective all-to-all does before and after it: deduplication by rank, sorting, and the
sum of what comes back. Each payload (rows, scales, ids, weights) arrives in a contiguous tensor, as a2a's do and as an
expert kernel takes it, so each is exchanged by itself. Refuses to know which library moves bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from a2a.bench.byte_count import pair_counts
from a2a.bench.implementation import Case, Experts, Received


class Payloads:
    """Contiguous payloads of `capacity` rows.

    Attributes:
        data, scales, topk_ids, topk_weights: `[capacity, *]`; scales is None for formats without.
        bytes: all of them as uint8 `[capacity, row_bytes]`.
    """

    def __init__(self, case: Case, capacity: int) -> None:
        form, shape = case.wire_format, (case.hidden_size, case.mx_alignment)

        def rows(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(capacity, width, dtype=dtype, device=case.device)

        self.data = rows(form.data_width(*shape), form.data_dtype)
        self.scales = None if form.scales_dtype is None else rows(form.scales_width(*shape), form.scales_dtype)
        self.topk_ids = rows(case.top_k, torch.int32)
        self.topk_weights = rows(case.top_k, torch.float32)
        parts = (self.data, self.scales, self.topk_ids, self.topk_weights)
        self.bytes = [part.view(torch.uint8) for part in parts if part is not None]


class SortedRows:
    """Buffers and steps around a variable all-to-all; nothing is allocated for rows during a round.

    Attributes:
        send, arrived: payloads of dispatch, outgoing and incoming.
        expert_rows: `[capacity, H]`, what experts return for the arrived rows, in their order.
        returned: `[capacity, H]`, what comes back for the sent rows, in their order.
        send_counts, recv_counts: rows to and from each rank in this round.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        counts = pair_counts(case.workload.topk_ids, case.placement)
        sent, arriving = int(counts[case.ep_rank].sum()), int(counts[:, case.ep_rank].sum())
        self.send = Payloads(case, sent)
        self.arrived = Payloads(case, arriving)
        self.expert_rows = torch.zeros(arriving, case.hidden_size, dtype=case.row_dtype, device=case.device)
        self.returned = torch.zeros(sent, case.hidden_size, dtype=case.row_dtype, device=case.device)
        self.output = torch.zeros(case.num_tokens, case.hidden_size, dtype=case.row_dtype, device=case.device)
        # One column more than ranks: picks that go nowhere fall into the first.
        self._hits = torch.zeros(case.num_tokens, case.ep_size + 1, dtype=torch.bool, device=case.device)
        owners = torch.cat([case.placement.table.long() + 1, torch.zeros(1, dtype=torch.int64)])
        self._owners = owners.to(case.device)
        self.rows = torch.zeros(0)
        self.send_counts: list[int] = [0] * case.ep_size
        self.recv_counts: list[int] = [0] * case.ep_size
        self._token_of_row = torch.zeros(0, dtype=torch.int64)

    def pack(self) -> None:
        """Sort this rank's tokens by destination into `send`."""
        case = self.case
        # Any id outside the table, negative ones included, is mapped to the entry past its end.
        ids = case.topk_ids.long()
        ids = torch.where((ids >= 0) & (ids < case.num_experts), ids, case.num_experts)
        self._hits.zero_().scatter_(1, self._owners[ids], True)
        ranks, tokens = self._hits[:, 1:].T.nonzero(as_tuple=True)
        self.send_counts = torch.bincount(ranks, minlength=case.ep_size).tolist()
        self._token_of_row = tokens
        data, scales = case.quantize(self.rows)
        count = tokens.numel()
        gather_rows(data, tokens, self.send.data[:count])
        if scales is not None and self.send.scales is not None:
            gather_rows(scales, tokens, self.send.scales[:count])
        torch.index_select(case.topk_ids, 0, tokens, out=self.send.topk_ids[:count])
        torch.index_select(case.topk_weights, 0, tokens, out=self.send.topk_weights[:count])

    def received(self) -> Received:
        """The arrived rows of this round."""
        total = sum(self.recv_counts)
        scales = None if self.arrived.scales is None else self.arrived.scales[:total].clone()
        return Received(
            tuple(self.recv_counts),
            self.arrived.data[:total].clone(),
            scales,
            self.arrived.topk_ids[:total].clone(),
            self.arrived.topk_weights[:total].clone(),
        )

    def fill(self, experts: Experts) -> None:
        """Run the experts over the arrived rows."""
        got = self.received()
        total = sum(self.recv_counts)
        self.expert_rows[:total] = experts(self.case.dequantize(got.data, got.scales), self.case.ep_rank)

    def sum_returned(self) -> Tensor:
        """Add every returned row to its token."""
        count = self._token_of_row.numel()
        return self.output.zero_().index_add_(0, self._token_of_row, self.returned[:count])


def gather_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """`out[i] = rows[index[i]]`, one copy; 1-byte float types go as bytes, since indexing does not know them all."""
    if rows.dtype.itemsize == 1:
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    torch.index_select(rows, 0, index, out=out)
