"""torch_a2a: sort by rank, all_to_all_single with splits both ways, index-add, over gloo or NCCL.

Owns the peer that a user of plain torch would write. Refuses to allocate rows during a round.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from a2a.bench.implementation import Case, Experts, Implementation, Received
from a2a.bench.process_group import backend_of, rows_group
from a2a.bench.sorted_rows import SortedRows
from a2a.comm import Comm


class TorchAllToAll(Implementation):
    """One collective for the counts and one for each payload out, one back."""

    name: ClassVar[str] = "torch-a2a"
    # Splits are lists of the host, which has to read the counts first.
    capturable: ClassVar[bool] = False

    def __init__(self, case: Case, comm: Comm) -> None:
        self._group = rows_group(comm, case.device)
        self._device = case.device
        self._rows = SortedRows(case)
        self._send_counts = torch.zeros(case.ep_size, dtype=torch.int64, device=case.device)
        self._recv_counts = torch.zeros(case.ep_size, dtype=torch.int64, device=case.device)

    @property
    def transport(self) -> str:
        return backend_of(self._device)

    def load(self, rows: Tensor) -> None:
        self._rows.rows = rows

    def dispatch(self) -> None:
        rows = self._rows
        rows.pack()
        self._send_counts.copy_(torch.tensor(rows.send_counts))
        dist.all_to_all_single(self._recv_counts, self._send_counts, group=self._group)
        rows.recv_counts = self._recv_counts.tolist()
        for arrived, sent in zip(rows.arrived.bytes, rows.send.bytes, strict=True):
            self._exchange(arrived, rows.recv_counts, sent, rows.send_counts)

    def received(self) -> Received:
        return self._rows.received()

    def fill(self, experts: Experts) -> None:
        self._rows.fill(experts)

    def combine(self) -> Tensor:
        rows = self._rows
        self._exchange(rows.returned, rows.send_counts, rows.expert_rows, rows.recv_counts)
        return rows.sum_returned()

    def _exchange(self, output: Tensor, output_counts: list[int], input: Tensor, input_counts: list[int]) -> None:
        dist.all_to_all_single(
            output[: sum(output_counts)], input[: sum(input_counts)], output_counts, input_counts, group=self._group
        )

    def close(self) -> None:
        """The process group stays for the cases that follow; buffers go with the object."""


PEER = TorchAllToAll
