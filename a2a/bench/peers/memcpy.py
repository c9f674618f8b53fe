"""memcpy: the limit: every row that must be written is written once, and read once.

Owns the figure that no exchange over shared memory can beat by doing the same copies: one copy of each deduplicated row
into the receiver's block, one copy of each combine row into a private buffer, all ranks at once. Refuses to signal, to
sum and to look anything up during a round.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from a2a.bench.byte_count import destinations, pair_counts
from a2a.bench.exchange import build
from a2a.bench.implementation import Case, Experts, Implementation, Received, as_bytes, tensor_difference
from a2a.comm import Comm


class Memcpy(Implementation):
    """Plain copies through the workspace of an exchange object of the same case."""

    name: ClassVar[str] = "memcpy"
    role: ClassVar[str] = "limit"

    def __init__(self, case: Case, comm: Comm) -> None:
        self._case = case
        self._moe = build(case, comm, "bench-memcpy")
        layout = self._moe.layout
        start = layout.region("dispatch").offset_bytes
        payload_start = layout.region("combine").offset_bytes
        workspace, me, rows = self._moe.workspace, case.ep_rank, case.max_tokens
        hits = destinations(case.topk_ids, case.placement)
        self._tokens = [hits[:, rank].nonzero().flatten() for rank in range(case.ep_size)]
        self._arriving = pair_counts(case.workload.topk_ids, case.placement)[:, me].tolist()
        self._wire = torch.zeros(case.num_tokens, case.dispatch_row_bytes, dtype=torch.uint8, device=case.device)

        def block(owner: int, area: int, src: int, count: int, width: int) -> Tensor:
            first = area + src * rows * width
            return workspace[owner, first : first + count * width].view(count, width)

        # Where this rank's rows land, what arrived here, and where the rows to be combined lie.
        self._landing = [
            block(rank, start, me, tokens.numel(), case.dispatch_row_bytes) for rank, tokens in enumerate(self._tokens)
        ]
        self._blocks = [
            block(me, start, src, count, case.dispatch_row_bytes) for src, count in enumerate(self._arriving)
        ]
        self._combine_rows = [
            block(rank, payload_start, me, tokens.numel(), case.combine_row_bytes)
            for rank, tokens in enumerate(self._tokens)
        ]
        self._outgoing = [
            block(me, payload_start, src, count, case.combine_row_bytes) for src, count in enumerate(self._arriving)
        ]
        self._row_copies = self._addresses()
        total = sum(tokens.numel() for tokens in self._tokens)
        self._private = torch.zeros(total, case.combine_row_bytes, dtype=torch.uint8, device=case.device)
        self._private_parts = torch.split(self._private, [tokens.numel() for tokens in self._tokens])

    @property
    def transport(self) -> str:
        return str(self._moe.transport)

    def load(self, rows: Tensor) -> None:
        data, scales = self._case.quantize(rows)
        parts = [data, *([scales] if scales is not None else []), self._case.topk_ids, self._case.topk_weights]
        torch.cat([as_bytes(part) for part in parts], dim=1, out=self._wire)

    def dispatch(self) -> None:
        if self._case.device.type == "cuda":
            for tokens, landing in zip(self._tokens, self._landing, strict=True):
                torch.index_select(self._wire, 0, tokens, out=landing)
            return
        num_bytes = self._case.dispatch_row_bytes
        for destination, source in self._row_copies:
            ctypes.memmove(destination, source, num_bytes)

    def _addresses(self) -> list[tuple[int, int]]:
        """(to, from) of every row, token by token: a row is read from memory once and sent to its ranks while hot."""
        width = self._case.dispatch_row_bytes
        order = sorted(
            (token, rank, slot)
            for rank, tokens in enumerate(self._tokens)
            for slot, token in enumerate(tokens.tolist())
        )
        starts = [landing.data_ptr() for landing in self._landing]
        first = self._wire.data_ptr()
        return [(starts[rank] + slot * width, first + token * width) for token, rank, slot in order]

    def received(self) -> Received:
        case = self._case
        packed = torch.cat(self._blocks)
        form = case.wire_format
        data_bytes = form.data_bytes_per_token(case.hidden_size, case.mx_alignment)
        sizes = [data_bytes, case.wire_row_bytes - data_bytes, 4 * case.top_k, 4 * case.top_k]
        data, scales, ids, weights = (part.contiguous() for part in torch.split(packed, sizes, dim=1))
        return Received(
            tuple(self._arriving),
            data.view(form.data_dtype),
            None if form.scales_dtype is None else scales.view(form.scales_dtype),
            ids.view(torch.int32),
            weights.view(torch.float32),
        )

    def fill(self, experts: Experts) -> None:
        got = self.received()
        rows = experts(self._case.dequantize(got.data, got.scales), self._case.ep_rank)
        for part, outgoing in zip(torch.split(as_bytes(rows), self._arriving), self._outgoing, strict=True):
            outgoing.copy_(part)

    def combine(self) -> Tensor:
        for private, rows in zip(self._private_parts, self._combine_rows, strict=True):
            private.copy_(rows)
        return self._private

    def copied_difference(self, rows: Tensor, experts: Experts) -> str:
        """Whether the private buffer holds, by destination rank and token, what each rank's experts wrote."""
        case = self._case.on_host
        mine = case.dequantize(*case.quantize(rows))
        parts = [experts(mine[tokens.cpu()], rank) for rank, tokens in enumerate(self._tokens)]
        return tensor_difference("copied rows", self._private, as_bytes(torch.cat(parts)))

    def close(self) -> None:
        self._moe.close()


PEER = Memcpy
