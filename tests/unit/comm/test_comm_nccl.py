"""A torch process group over NCCL as communicator: two GPUs of this machine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from a2a.comm import Comm, resolve

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 if torch.cuda.is_available() else True, reason="needs two GPUs of this machine"
)


def over_nccl(comm: Comm) -> object:
    rank, size = comm.Get_rank(), comm.Get_size()
    # The last device for rank 0 and so on: none may be taken by rank.
    device = torch.device("cuda", size - 1 - rank)
    torch.cuda.set_device(device)
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    group = resolve(dist.group.WORLD, timeout_s=60)
    seen = [group.allgather("x" * rank), group.bcast({"rank": rank}, root=1)]
    part = group.Split(0, key=-rank)
    seen += [part.allgather(rank), part.bcast(rank, root=0)]
    group.barrier()
    assert torch.cuda.current_device() == device.index, "the current device is the caller's"
    comm.barrier()
    dist.destroy_process_group()
    return seen


def test_verbs_over_nccl(run_ranks):
    assert run_ranks(over_nccl, 2) == [[["", "x"], {"rank": 1}, [1, 0], 1]] * 2
