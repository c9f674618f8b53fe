"""memcpy: the limit: every row that must be written is written once, and read once.

Owns the figure that no exchange over shared memory can beat by doing the same copies: one copy of each deduplicated row
into the receiver's block, one copy of each combine row into a private buffer, all ranks at once. Refuses to signal, to
sum and to look anything up during a round.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor

from a2a.bench.byte_count import destinations, pair_counts
from a2a.bench.exchange import build
from a2a.bench.implementation import Case, Experts, Implementation, Received, as_bytes, tensor_difference
from a2a.comm import Comm

_HOT_BYTES: Final = 256 * 1024
"""Rows that are sent to all ranks before the next ones are read: they stay in a core's own cache."""


class Memcpy(Implementation):
    """Plain copies through the workspace of an exchange object of the same case."""

    name: ClassVar[str] = "memcpy"
    role: ClassVar[str] = "limit"
    about: ClassVar[str] = "one copy of each row into the receiver's block and one of each combine row out of it"

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
        self._copies = self._chunks()
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
        for tokens, landing in self._copies:
            torch.index_select(self._wire, 0, tokens, out=landing)

    def _chunks(self) -> list[tuple[Tensor, Tensor]]:
        """(tokens, where they land): a few tokens to every rank before the next few, a row is read while hot."""
        case = self._case
        step = case.num_tokens if case.device.type == "cuda" else max(1, _HOT_BYTES // case.dispatch_row_bytes)
        copies = []
        for first in range(0, case.num_tokens, max(1, step)):
            for tokens, landing in zip(self._tokens, self._landing, strict=True):
                here = (tokens >= first) & (tokens < first + step)
                if bool(here.any()):
                    copies.append((tokens[here], landing[here.nonzero()[0, 0] : here.nonzero()[-1, 0] + 1]))
        return copies

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
