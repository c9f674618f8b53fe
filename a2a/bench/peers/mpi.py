"""mpi: sort by rank, Alltoallv both ways through mpi4py, index-add.

Owns the peer that an MPI user would write. Refuses to start MPI where no launcher did, and to tune it: a user's own
settings count, such as MPICH's MPIR_CVAR_POLLS_BEFORE_YIELD=1, which helps it where there are more ranks than cores.
"""

from __future__ import annotations

import importlib
import importlib.util
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from a2a.bench.implementation import Case, Experts, Implementation, Received
from a2a.bench.sorted_rows import SortedRows
from a2a.comm import Comm
from a2a.errors import Unsupported


class MpiAllToAllv(Implementation):
    """One Alltoall of counts and an Alltoallv of each payload out, one Alltoallv back."""

    name: ClassVar[str] = "mpi"

    def __init__(self, case: Case, comm: Comm) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise Unsupported(transport="mpi", reasons=("mpi4py is not installed: pip install 'a2a[mpi]'",))
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (comm.Get_rank(), comm.Get_size()):
            raise Unsupported(
                transport="mpi",
                reasons=(f"rank {comm.Get_rank()} of {comm.Get_size()} is another one in MPI: start with mpiexec",),
            )
        self._comm = world
        self._rows = SortedRows(case)
        self._send_counts = torch.zeros(case.ep_size, dtype=torch.int64)
        self._recv_counts = torch.zeros(case.ep_size, dtype=torch.int64)

    @property
    def transport(self) -> str:
        return "mpi"

    def load(self, rows: Tensor) -> None:
        self._rows.rows = rows

    def dispatch(self) -> None:
        rows = self._rows
        rows.pack()
        self._send_counts.copy_(torch.tensor(rows.send_counts))
        self._comm.Alltoall(self._send_counts.numpy(), self._recv_counts.numpy())
        rows.recv_counts = self._recv_counts.tolist()
        for arrived, sent in zip(rows.arrived.bytes, rows.send.bytes, strict=True):
            self._exchange(arrived, rows.recv_counts, sent, rows.send_counts)

    def received(self) -> Received:
        return self._rows.received()

    def fill(self, experts: Experts) -> None:
        self._rows.fill(experts)

    def combine(self) -> Tensor:
        rows = self._rows
        self._exchange(
            rows.returned.view(torch.uint8), rows.send_counts, rows.expert_rows.view(torch.uint8), rows.recv_counts
        )
        return rows.sum_returned()

    def close(self) -> None:
        """MPI stays up for the cases that follow; buffers go with the object."""

    def _exchange(self, output: Tensor, output_counts: list[int], input: Tensor, input_counts: list[int]) -> None:
        byte = self._mpi.BYTE
        self._comm.Alltoallv(
            [input.numpy(), *_spans(input_counts, input.shape[1]), byte],
            [output.numpy(), *_spans(output_counts, output.shape[1]), byte],
        )


def _spans(counts: list[int], row_bytes: int) -> tuple[list[int], list[int]]:
    """Bytes to or from each rank, and where they start."""
    sizes = [count * row_bytes for count in counts]
    return sizes, [0, *accumulate(sizes[:-1])]


PEER = MpiAllToAllv
