"""comm: who the ranks are.

Owns the choice between a torch process group, an mpi4py communicator, a caller's own object and the launcher's
environment. Refuses to import any of them before it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from a2a import env
from a2a.comm.launcher import MPI_KINDS, NONE, Launcher, detect
from a2a.comm.protocol import CheckedComm, Comm, SingleComm
from a2a.errors import ConfigError

__all__ = ["Comm", "Launcher", "detect", "resolve"]


def resolve(comm: object | None, *, timeout_s: float, environ: Mapping[str, str] | None = None) -> Comm:
    """The group that `comm` stands for. None: the ranks the launcher's environment names, a collective meeting.

    Args:
        comm: a torch ProcessGroup, an mpi4py communicator, any object with the verbs of `Comm`, or None.
        timeout_s: deadline of every wait, of this meeting and of the group's verbs.
        environ: the launcher's variables; by default this process's environment. Read only when `comm` is None.

    Raises:
        ConfigError: an object that is none of these, or an environment that names no rank or contradicts itself.
        Unsupported: an MPI launcher without mpi4py.
        PeerTimeout: a rank that did not come.
    """
    if not timeout_s > 0:
        raise ConfigError(what="timeout_s", got=timeout_s, wanted="a number of seconds above 0")
    if comm is None:
        return _from_launcher(detect(env.snapshot() if environ is None else environ), timeout_s)
    homes = {base.__module__.partition(".")[0] for base in type(comm).__mro__}
    if type(comm).__module__.startswith("a2a.comm."):
        return cast(Comm, comm)
    if "mpi4py" in homes and hasattr(comm, "Iallgather"):
        from a2a.comm.mpi import MpiComm

        return MpiComm(comm, timeout_s=timeout_s)
    if "torch" in homes:
        import torch.distributed as dist

        if dist.is_available() and isinstance(comm, dist.ProcessGroup):
            from a2a.comm.process_group import GroupComm

            return GroupComm(comm, timeout_s=timeout_s)
    return CheckedComm(comm)


def _from_launcher(launcher: Launcher, timeout_s: float) -> Comm:
    if launcher.kind == NONE:
        raise ConfigError(
            what="comm",
            got="None, in a process that no launcher made a rank"
            + (f" ({'; '.join(launcher.notes)})" if launcher.notes else ""),
            wanted="the variables of torchrun, Open MPI, MPICH, PMIx, Slurm or an indexed Kubernetes Job",
            change="start the ranks with one of them, or pass comm",
        )
    if launcher.kind in MPI_KINDS:
        from a2a.comm.mpi import world

        return world(timeout_s=timeout_s, wanted_size=launcher.size)
    if launcher.size == 1:
        return SingleComm()
    from a2a.comm.store import meet

    return meet(launcher, timeout_s=timeout_s)
