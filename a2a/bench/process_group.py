"""process_group: torch process groups among the ranks of a communicator, gloo or NCCL, for the peers that need one.

Owns how the group is made: from the communicator alone, whichever launcher started the ranks. Refuses to replace a
default process group that exists.
"""

from __future__ import annotations

import datetime
import functools
import socket
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from a2a.comm import Comm

_TIMEOUT: Final = datetime.timedelta(seconds=300)


def backend_of(device: torch.device) -> str:
    """Name of the backend that moves rows of that device."""
    return "nccl" if device.type == "cuda" else "gloo"


def rows_group(comm: Comm, device: torch.device) -> dist.ProcessGroup:
    """As `gloo_group`, over the backend of the device's rows."""
    group = gloo_group(comm)
    return _nccl_group() if device.type == "cuda" else group


@functools.cache
def _nccl_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="nccl")
    return group


def gloo_group(comm: Comm) -> dist.ProcessGroup:
    """A group in which rank i is rank i of `comm`. Collective; made once per process and size of the world."""
    if not dist.is_initialized():
        rank, size = comm.Get_rank(), comm.Get_size()
        hosts = comm.allgather(socket.gethostname())
        host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
        store = None
        if rank == 0:
            store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        port = comm.bcast(store.port if store is not None else None)
        if store is None:
            store = TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    if group is None or dist.get_backend(group) != "gloo":
        group = dist.new_group(backend="gloo")
    return group
