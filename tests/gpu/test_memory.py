"""Symmetric memory: mapped by all, zero, alive as long as a view, and no descriptor left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from descriptors import open_descriptors

from a2a.comm import Comm

pytestmark = pytest.mark.gpu(1)


def device_of(comm: Comm) -> torch.device:
    """GPUs in turn, so that any number of ranks runs on any number of GPUs."""
    return torch.device("cuda", comm.Get_rank() % torch.cuda.device_count())


def _build_and_use(comm: Comm) -> dict[str, Any]:
    from a2a.comm.mesh import Mesh
    from a2a.nvlink.memory import SymmetricMemory

    device = device_of(comm)
    before = torch.cuda.current_device()
    mesh = Mesh(comm, (), timeout_s=60.0)
    memory = SymmetricMemory(3 << 20, device, comm, mesh, timeout_s=60.0)
    facts: dict[str, Any] = {
        "current device kept": torch.cuda.current_device() == before,
        "zero": not bool(memory.tensor[comm.Get_rank()].any()),
        "shape": tuple(memory.tensor.shape),
        "device": memory.tensor.device == device,
        "handle type": memory.handle_type,
    }
    comm.barrier()
    # Every rank fills its own row of every other's memory.
    for peer in range(comm.Get_size()):
        memory.tensor[peer, 256 * comm.Get_rank() :][:256] = comm.Get_rank() + 1
    torch.cuda.synchronize(device)
    comm.barrier()
    view = memory.tensor[comm.Get_rank(), : 256 * comm.Get_size()].view(-1, 256)
    del memory
    gc.collect()
    facts["rows of all"] = [int(row[0]) for row in view] == list(range(1, comm.Get_size() + 1))
    comm.barrier()
    mesh.close()
    return facts


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_reaches_every_other(run_ranks: Any, num_ranks: int) -> None:
    for facts in run_ranks(_build_and_use, num_ranks):
        shape = facts.pop("shape")
        assert shape[0] == num_ranks and shape[1] >= 3 << 20
        assert facts.pop("handle type") in ("posix", "fabric")
        assert all(facts.values()), facts


def _build_many(comm: Comm) -> tuple[list[int], list[int]]:
    from a2a.comm.mesh import Mesh
    from a2a.nvlink.memory import SymmetricMemory

    device = device_of(comm)
    descriptors, used = [], []
    for _ in range(6):
        mesh = Mesh(comm, (), timeout_s=60.0)
        memory = SymmetricMemory(64 << 20, device, comm, mesh, timeout_s=60.0)
        del memory
        comm.barrier()
        mesh.close()
        gc.collect()
        comm.barrier()
        free, total = torch.cuda.mem_get_info(device)
        descriptors.append(open_descriptors())
        used.append(total - free)
        comm.barrier()
    return descriptors, used


# What is free on the device is what all its processes leave free.
@pytest.mark.alone
def test_nothing_is_left_behind(run_ranks: Any) -> None:
    for descriptors, used in run_ranks(_build_many, 2):
        # The first build opens what the driver keeps for the life of the process.
        assert descriptors[-1] == descriptors[1], descriptors
        assert used[-1] <= used[1], used
