"""comm/mpi: the group of an mpi4py communicator.

Owns every use of mpi4py: non-blocking collectives polled against a deadline, and the end of a failing MPI job. Refuses
to be imported before an MPI communicator is given or chosen.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import numpy as np

from a2a.comm.protocol import UNKNOWN_PEER, Comm, Deadline, check_color, check_root
from a2a.errors import ConfigError, Unsupported

_MPICH_SHARED_MEMORY = "/dev/shm/mpich_shm_"

_ABSENT = (
    "an MPI collective cannot tell which rank is absent: look for the rank that did not get here, or raise "
    "startup_timeout_s"
)


class MpiComm:
    """The ranks of `comm`, an mpi4py intracommunicator, which stays the caller's.

    Every wait has `timeout_s`. After an expired wait the communicator holds an unfinished collective, which MPI cannot
    take back: end the job, as the command line does.
    """

    def __init__(self, comm: Any, *, timeout_s: float) -> None:
        if comm.Is_inter():
            raise ConfigError(what="comm", got="an MPI intercommunicator", wanted="an intracommunicator")
        self._comm = comm
        self._timeout_s = timeout_s
        self._rank = int(comm.Get_rank())
        self._size = int(comm.Get_size())
        # MPI may write into the buffers of an expired collective at any later time: they live as long as this object.
        self._unfinished: list[Any] = []

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        mine = np.frombuffer(pickle.dumps(obj), dtype=np.uint8)
        length = np.array([mine.size], dtype=np.int64)
        lengths = np.zeros(self._size, dtype=np.int64)
        self._finish(self._comm.Iallgather(length, lengths), length, lengths)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        gathered = np.empty(int(ends[-1]), dtype=np.uint8)
        byte = _mpi().BYTE
        send = [mine, int(mine.size), byte]
        receive = [gathered, (lengths.tolist(), starts.tolist()), byte]
        self._finish(self._comm.Iallgatherv(send, receive), mine, gathered)
        return [pickle.loads(gathered[start:end].tobytes()) for start, end in zip(starts, ends, strict=True)]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self._size, self._rank)
        if self._rank == root:
            content = np.frombuffer(pickle.dumps(obj), dtype=np.uint8).copy()
            length = np.array([content.size], dtype=np.int64)
            self._finish(self._comm.Ibcast(length, root=root), length)
        else:
            length = np.zeros(1, dtype=np.int64)
            self._finish(self._comm.Ibcast(length, root=root), length)
            content = np.empty(int(length[0]), dtype=np.uint8)
        self._finish(self._comm.Ibcast([content, int(content.size), _mpi().BYTE], root=root), content)
        return pickle.loads(content.tobytes())

    def barrier(self) -> None:
        self._finish(self._comm.Ibarrier())

    def Split(self, color: int, key: int = 0) -> Comm:
        check_color(color, self._rank)
        # MPI's own split blocks without a deadline, so every rank is known to have arrived before it is called.
        self.barrier()
        return MpiComm(self._comm.Split(color, key), timeout_s=self._timeout_s)

    def _finish(self, request: Any, *buffers: Any) -> None:
        deadline = Deadline(self._timeout_s, self._rank)
        while not request.Test():
            if not deadline.pause():
                self._unfinished.append((request, buffers))
                peer = 1 - self._rank if self._size == 2 else UNKNOWN_PEER
                raise deadline.expired(peer, _ABSENT)


def world(*, timeout_s: float, wanted_size: int | None) -> MpiComm:
    """All ranks of the MPI job this process belongs to; starts MPI if nobody has.

    Raises:
        Unsupported: mpi4py or its MPI cannot be loaded; the reason names the extra to install.
        ConfigError: MPI counts other ranks than the launcher does.
    """
    comm = MpiComm(_mpi().COMM_WORLD, timeout_s=timeout_s)
    if wanted_size is not None and comm.Get_size() != wanted_size:
        raise ConfigError(
            what="size of MPI's COMM_WORLD",
            got=comm.Get_size(),
            wanted=f"{wanted_size}, as the launcher says",
            change="use the mpirun of the MPI that mpi4py was built for or finds first",
        )
    return comm


def abort(exit_status: int) -> None:
    """Ends all ranks of the MPI job with `exit_status`. Returns, having done nothing, where MPI does not run."""
    mpi = _mpi()
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(exit_status)


def forget_names(comm: Comm) -> None:
    """Takes away the names that MPICH gave this job's shared memory. Collective.

    MPICH does so itself only at the end of a job in good order: after a kill they would stay in /dev/shm. The memory
    itself lives until the last rank unmaps it. For programs that own the job, since nobody can attach by name later.
    """
    # Every rank has attached once all are here.
    comm.barrier()
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps if _MPICH_SHARED_MEMORY in line and "(deleted)" not in line}
    for name in names:
        # Every rank tries.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, its MPI library is not
        raise Unsupported(
            transport="mpi",
            reasons=[
                f"this process was started by an MPI launcher and mpi4py cannot be loaded ({error})",
                "install the extra: pip install 'a2a[mpi]'",
            ],
        ) from error
    return MPI
