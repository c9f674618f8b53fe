"""A torch process group as communicator: gloo here; registered with torch or not, default or a part."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from a2a.comm import Comm, resolve
from a2a.errors import ConfigError, PeerLost, PeerTimeout

LONG = datetime.timedelta(seconds=60)


def group_of(comm: Comm, prefix: str) -> dist.ProcessGroup:
    """A gloo group over all ranks that torch's registry does not know, at a store that rank 0 serves."""
    store = None
    if comm.Get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    prefixed = dist.PrefixStore(prefix, store)
    group = dist.ProcessGroup(prefixed, comm.Get_rank(), comm.Get_size())
    backend = dist.ProcessGroupGloo(prefixed, comm.Get_rank(), comm.Get_size(), LONG)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def unregistered(comm: Comm) -> object:
    group = resolve(group_of(comm, "unregistered"), timeout_s=60)
    assert not dist.is_initialized()
    rank, size = comm.Get_rank(), comm.Get_size()
    seen = [group.Get_rank(), group.Get_size(), group.allgather("x" * rank), group.bcast(rank, root=size - 1)]
    part = group.Split(int(rank == 0), key=-rank)
    seen += [part.Get_rank(), part.allgather(rank), part.bcast(rank, root=part.Get_size() - 1)]
    group.barrier()
    with pytest.raises(ConfigError, match="inside the group"):
        group.bcast(0, root=size)
    comm.barrier()
    return seen


def test_unregistered_group(run_ranks):
    assert run_ranks(unregistered, 3) == [
        [0, 3, ["", "x", "xx"], 2, 0, [0], 0],
        [1, 3, ["", "x", "xx"], 2, 1, [2, 1], 1],
        [2, 3, ["", "x", "xx"], 2, 0, [2, 1], 1],
    ]


def parts(comm: Comm) -> object:
    rank = comm.Get_rank()
    dist.init_process_group("gloo", timeout=LONG)
    members = dist.new_group([1, 2])
    seen: list[object] = [resolve(dist.group.WORLD, timeout_s=60).allgather(rank)]
    if rank == 0:
        with pytest.raises(ConfigError, match="comm"):
            resolve(members, timeout_s=60)
    else:
        part = resolve(members, timeout_s=60)
        seen += [part.Get_rank(), part.allgather(rank), part.bcast(rank, root=1), part.bcast(rank, root=0)]
    groups_before = len(dist.distributed_c10d._world.pg_map)
    resolve(dist.group.WORLD, timeout_s=60).Split(0)
    assert len(dist.distributed_c10d._world.pg_map) == groups_before, "Split leaves torch's registry alone"
    comm.barrier()
    dist.destroy_process_group()
    return seen


def test_ranks_and_roots_count_inside_the_group(run_ranks):
    if run_ranks.in_job and run_ranks.launcher.master_address is None:
        pytest.skip("torch needs MASTER_ADDR to make its default group")
    assert run_ranks(parts, 3) == [
        [[0, 1, 2]],
        [[0, 1, 2], 0, [1, 2], 2, 1],
        [[0, 1, 2], 1, [1, 2], 2, 1],
    ]


def absent(comm: Comm) -> object:
    group = group_of(comm, "absent")
    caught = None
    if comm.Get_rank() == 0:
        with pytest.raises(PeerTimeout) as error:
            resolve(group, timeout_s=0.5).allgather(1)
        caught = (error.value.peer, error.value.phase, error.value.round)
    comm.barrier()
    return caught


def test_absent_rank(run_ranks):
    assert run_ranks(absent, 2) == [(1, "startup", 0), None]


def lost(comm: Comm) -> object:
    group = resolve(group_of(comm, "lost"), timeout_s=60)
    group.barrier()
    if comm.Get_rank() == 1:
        raise SystemExit(3)
    with pytest.raises(PeerLost):
        group.barrier()
    return True


def test_lost_rank_is_seen_before_the_deadline(run_ranks):
    ended = {outcome.rank: outcome for outcome in run_ranks.outcomes(lost, 2, grace_s=60)}
    assert ended[0].ok, ended[0].error
    assert ended[1].exit_status == 3
