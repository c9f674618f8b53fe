"""nvshmem/transport: transport: nvlink's kernels on memory that NVSHMEM has allocated.

Owns when it can serve. Refuses to know how memory is mapped and how rows move: both are nvlink's. Taken only when it is
asked for by name, since NVSHMEM then runs in the process to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from a2a.comm import Comm
from a2a.comm.mesh import host_identity
from a2a.config import ExchangeConfig
from a2a.nvlink.transport import NvlinkTransport, reasons_of_this_process

if TYPE_CHECKING:
    from a2a.nvlink.memory import SymmetricMemory


class NvshmemTransport(NvlinkTransport):
    """As `NvlinkTransport`, one rank per GPU, the ranks being all that NVSHMEM has in these processes."""

    name: ClassVar[str] = "nvshmem"

    @classmethod
    def reasons(cls, config: ExchangeConfig, comm: Comm) -> list[str]:
        mine = reasons_of_this_process()
        if not mine:
            from a2a.nvlink.nvshmem import library_reason

            missing = library_reason()
            mine += [missing] if missing else []
        identity = "" if mine else _gpu()
        found = comm.allgather((host_identity(), identity))
        if not mine and sum(each[1] == identity for each in found) > 1:
            mine.append("NVSHMEM needs a GPU for every rank, and this one's is another's too")
        if len({host for host, _ in found}) > 1:
            mine.append("the ranks are on several hosts")
        return mine

    @classmethod
    def memory_class(cls) -> type[SymmetricMemory]:
        from a2a.nvlink.nvshmem import NvshmemMemory

        return NvshmemMemory


def _gpu() -> str:
    import torch

    from a2a.nvlink.driver import device_uuid

    return device_uuid(torch.device("cuda", torch.cuda.current_device()))


TRANSPORT: Final = NvshmemTransport
