"""exchange: a2a itself as one of the timed implementations.

Owns how the bench drives `MoeAlltoAll`. Refuses to know what is behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from a2a.alltoall import Dispatched, MoeAlltoAll
from a2a.bench.implementation import Case, Experts, Implementation, Received
from a2a.comm import Comm
from a2a.errors import StateError
from a2a.transport import Transport


def build(case: Case, comm: Comm, name: str, num_contexts: int = 1) -> MoeAlltoAll:
    """The object of a case: exactly the capacity that the case needs."""
    return MoeAlltoAll(
        max_num_tokens=case.max_tokens,
        top_k=case.top_k,
        num_experts=case.num_experts,
        hidden_size=case.hidden_size,
        wire_format=case.format_name,
        mx_alignment=case.mx_alignment,
        comm=comm,
        transport=case.transport,
        row_order=case.row_order,
        num_contexts=num_contexts,
        name=name,
    )


class Exchange(Implementation):
    """dispatch_tokens and combine, with the experts' output in the workspace or in a tensor of their own."""

    name: ClassVar[str] = "a2a"

    def __init__(self, case: Case, comm: Comm) -> None:
        self._case, self._comm = case, comm
        # As a layer has them at hand: what a case has to look up is no part of a round.
        self._most, self._ids, self._weights = case.max_tokens, case.topk_ids, case.topk_weights
        self._moe = build(case, comm, "bench")
        self._rows = torch.zeros(0)
        self._output = torch.zeros(case.num_tokens, case.hidden_size, dtype=case.row_dtype, device=case.device)
        self._dispatched: Dispatched | None = None
        shape = (case.ep_size, case.max_tokens, case.hidden_size)
        self._payload = (
            None if case.payload_in_workspace else torch.zeros(shape, dtype=case.row_dtype, device=case.device)
        )

    @property
    def moe(self) -> MoeAlltoAll:
        """The object that is timed."""
        return self._moe

    @property
    def mover(self) -> Transport:
        """The transport object under it."""
        return self._moe._shared.transport

    @property
    def transport(self) -> str:
        return str(self._moe.transport)

    @property
    def regime(self) -> str:
        return self._moe.regime(self._case.max_tokens)

    def load(self, rows: Tensor) -> None:
        self._rows = rows

    def dispatch(self) -> None:
        self._dispatched = self._moe.dispatch_tokens(
            self._rows,
            self._ids,
            self._weights,
            runtime_max_tokens_per_rank=self._most,
            num_sms=self._case.num_sms,
        )

    def received(self) -> Received:
        return received(self._case, self._got())

    def fill(self, experts: Experts) -> None:
        got = self._got()
        valid = _valid(self._case, got)
        scales = None if got.scales is None else got.scales[valid]
        rows = self._case.dequantize(got.hidden_states[valid], scales)
        self._target()[valid] = experts(rows, self._case.ep_rank)

    def combine(self) -> Tensor:
        case = self._case
        self._dispatched = None
        return self._moe.combine(
            self._target(),
            self._most,
            payload_in_workspace=case.payload_in_workspace,
            output=self._output,
            num_sms=case.num_sms,
        )

    @contextlib.contextmanager
    def dispatches(self, count: int) -> Iterator[ContextDispatches | None]:
        with build(self._case, self._comm, "bench-dispatches", count) as moe:
            # Contexts share what memory there is for landing areas, and so few tokens may be many for them.
            same = moe.regime(self._most) == self.regime
            yield ContextDispatches(self._case, moe, self._rows) if same else None

    def close(self) -> None:
        self._moe.close()

    def _target(self) -> Tensor:
        if self._payload is not None:
            return self._payload
        case = self._case
        return self._moe.get_combine_payload_tensor_in_workspace(self._most, case.hidden_size, self._output.dtype)

    def _got(self) -> Dispatched:
        if self._dispatched is None:
            raise StateError(rank=self._case.ep_rank, call="received", state="idle", change="call dispatch first")
        return self._dispatched


class ContextDispatches:
    """A dispatch in each context of an object of their own; see `Dispatches`."""

    def __init__(self, case: Case, moe: MoeAlltoAll, rows: Tensor) -> None:
        self._case, self._moe, self._rows = case, moe, rows
        self._sent: dict[int, Dispatched] = {}
        self._output = torch.zeros(case.num_tokens, case.hidden_size, dtype=case.row_dtype, device=case.device)

    def dispatch(self, index: int) -> None:
        case = self._case
        self._sent[index] = self._moe.contexts[index].dispatch_tokens(
            self._rows,
            case.topk_ids,
            case.topk_weights,
            runtime_max_tokens_per_rank=case.max_tokens,
            num_sms=case.num_sms,
        )

    def combine(self, index: int) -> None:
        case, context = self._case, self._moe.contexts[index]
        area = context.get_combine_payload_tensor_in_workspace(case.max_tokens, case.hidden_size, case.row_dtype)
        context.combine(area, case.max_tokens, payload_in_workspace=True, output=self._output, num_sms=case.num_sms)

    def received(self) -> Received:
        return received(self._case, self._sent[max(self._sent)])


def received(case: Case, got: Dispatched) -> Received:
    """Copies of the rows that are there."""
    valid = _valid(case, got)
    counts = tuple(int(count) for count in got.recv_counts)
    scales = None if got.scales is None else got.scales[valid]
    return Received(counts, got.hidden_states[valid], scales, got.topk_ids[valid], got.topk_weights[valid])


def _valid(case: Case, got: Dispatched) -> Tensor:
    """bool `[ep, R]`: the slots that hold a row."""
    if case.row_order == "token":
        # Scrubbed ids are -1 in every column of a padded slot.
        return (got.topk_ids >= 0).any(dim=-1)
    return torch.arange(case.max_tokens) < got.recv_counts.cpu().unsqueeze(1)
