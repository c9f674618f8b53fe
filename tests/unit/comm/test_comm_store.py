"""Ranks that meet at MASTER_ADDR:MASTER_PORT, where one of them serves the store."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch.distributed as dist

from a2a import env
from a2a.comm import Comm, detect, resolve
from a2a.comm.store import StoreComm, split
from a2a.errors import ConfigError, MismatchError, PeerLost, PeerTimeout


def served_by_rank_0(**changes: str) -> dict[str, str]:
    """Slurm's variables for this rank of the local spawn, so that nobody but rank 0 can serve."""
    now = env.snapshot()
    environ = {
        "SLURM_PROCID": now["RANK"],
        "SLURM_NTASKS": now["WORLD_SIZE"],
        "SLURM_LOCALID": now["LOCAL_RANK"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": now["MASTER_PORT"],
        **changes,
    }
    assert detect(environ).local_store is None
    return environ


@pytest.fixture
def own_ranks(run_ranks):
    if run_ranks.in_job:
        pytest.skip("needs the variables of the local spawn")
    return run_ranks


def verbs_and_leave(spawned: Comm) -> object:
    rank, size = spawned.Get_rank(), spawned.Get_size()
    comm = resolve(None, timeout_s=60, environ=served_by_rank_0())
    seen = [comm.allgather(rank), comm.bcast(rank, root=size - 1)]
    color = 0 if rank == 0 else 1
    part = comm.Split(color, key=-rank)
    seen.append(part.allgather(rank))
    if rank == 0:
        # The serving rank leaves first: the others go on in a group without it.
        del comm, part
        os._exit(0)
    time.sleep(0.3)
    seen += [part.allgather(rank), part.bcast(rank, root=part.Get_size() - 1)]
    return seen


def test_serving_rank_may_leave_first(own_ranks):
    ended = sorted(own_ranks.outcomes(verbs_and_leave, 3), key=lambda outcome: outcome.rank)
    # Rank 0 says nothing and exits with 0; its exit starts no grace period's end for the others before they are done.
    assert (ended[0].exit_status, ended[0].error) == (0, None)
    for outcome in ended[1:]:
        assert outcome.ok, outcome.error
        assert outcome.result == [[0, 1, 2], 2, [2, 1], [2, 1], 1]


def objects_in_a_row(spawned: Comm) -> object:
    seen = []
    for index in range(5):
        comm = resolve(None, timeout_s=60, environ=served_by_rank_0())
        seen.append(comm.allgather((index, spawned.Get_rank())))
        del comm  # rank 0's server ends here, while others may already be at the next object
    spawned.barrier()
    return seen


def test_objects_in_a_row_with_a_server_each(own_ranks):
    for result in own_ranks(objects_in_a_row, 3):
        assert result == [[(index, rank) for rank in range(3)] for index in range(5)]


def beside_a_process_group(spawned: Comm) -> object:
    environ = served_by_rank_0()
    before = resolve(None, timeout_s=60, environ=environ)
    assert not dist.is_initialized(), "the default group is the caller's to make"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))  # same address and port
    after = resolve(None, timeout_s=60, environ=environ)
    rank = spawned.Get_rank()
    seen = [before.allgather(rank), after.allgather(rank)]
    del before, after
    objects: list[object] = [None] * spawned.Get_size()
    dist.all_gather_object(objects, rank)
    dist.destroy_process_group()
    return [*seen, objects]


def test_shares_the_port_with_a_process_group(own_ranks):
    assert own_ranks(beside_a_process_group, 3) == [[[0, 1, 2]] * 3] * 3


def keys_left(spawned: Comm) -> object:
    store = dist.TCPStore(
        "127.0.0.1", int(env.snapshot()["MASTER_PORT"]), is_master=spawned.Get_rank() == 0, wait_for_workers=False
    )
    own = store.num_keys()
    spawned.barrier()
    comm = StoreComm(store, "prefix", spawned.Get_rank(), spawned.Get_size(), server=0, timeout_s=60)
    for index in range(10):
        comm.allgather(index)
        comm.bcast(index, root=index % 3)
        comm.barrier()
        comm.Split(0).barrier()
    spawned.barrier()
    left = store.num_keys()
    spawned.barrier()
    return left - own


def test_keys_are_cleaned_up(own_ranks):
    assert own_ranks(keys_left, 3) == [0, 0, 0]


def nobody_else(spawned: Comm) -> object:
    caught = None
    if spawned.Get_rank() == 0:
        with pytest.raises(PeerTimeout) as error:
            resolve(None, timeout_s=0.5, environ=served_by_rank_0())
        caught = error.value.to_facts()
    spawned.barrier()
    return caught


def test_rank_that_did_not_come_is_named(own_ranks):
    facts = own_ranks(nobody_else, 2)[0]
    assert (facts["rank"], facts["peer"], facts["phase"], facts["round"]) == (0, 1, "startup", 0)
    assert facts["waited_s"] >= 0.5


def server_missing(spawned: Comm) -> object:
    with pytest.raises(PeerTimeout, match="nothing answers at") as error:
        resolve(None, timeout_s=0.3, environ=served_by_rank_0(SLURM_PROCID="1"))
    return error.value.peer


def test_server_that_did_not_come_is_named(own_ranks):
    assert own_ranks(server_missing, 2) == [0, 0]


def server_lost(spawned: Comm) -> object:
    comm = resolve(None, timeout_s=60, environ=served_by_rank_0())
    if spawned.Get_rank() == 0:
        os._exit(0)
    with pytest.raises(PeerLost) as error:
        comm.allgather("rank 0 is gone")
    return error.value.peer


def test_lost_server_is_seen_before_the_deadline(own_ranks):
    ended = {outcome.rank: outcome for outcome in own_ranks.outcomes(server_lost, 2, grace_s=60)}
    assert ended[1].ok, ended[1].error
    assert ended[1].result == 0


def sizes_differ(spawned: Comm) -> object:
    rank = spawned.Get_rank()
    environ = served_by_rank_0(SLURM_NTASKS=str(2 + rank))
    with pytest.raises((MismatchError, PeerTimeout)) as error:
        resolve(None, timeout_s=1, environ=environ)
    return type(error.value).__name__, str(error.value)


def test_ranks_that_count_different_sizes(own_ranks):
    (_, (kind, text)) = own_ranks(sizes_differ, 2)
    assert kind == "MismatchError"
    assert "rank 0: 2, rank 1: 3" in text


def port_taken(spawned: Comm) -> object:
    import socket

    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            resolve(None, timeout_s=5, environ=served_by_rank_0(MASTER_PORT=str(port), SLURM_PROCID="0"))
    return True


def test_port_of_another_program(own_ranks):
    assert own_ranks(port_taken, 2) == [True, True]


def split_of_any_group(spawned: Comm) -> object:
    rank = spawned.Get_rank()
    part = split(spawned, rank % 2, -rank, timeout_s=60)
    return part.Get_rank(), part.allgather(rank)


def test_split_of_any_group_over_a_store_of_its_own(run_ranks):
    results = run_ranks(split_of_any_group, 3)
    assert results == [(1, [2, 0]), (0, [1]), (0, [2, 0])]
