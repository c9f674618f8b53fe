"""Every implementation of Comm keeps the same promises, over whatever carries it."""

from __future__ import annotations

import pytest

from a2a.comm import Comm, resolve
from a2a.comm.launcher import MPI_KINDS
from a2a.errors import ConfigError, PeerTimeout


def verbs(comm: Comm) -> list[object]:
    """Exercises all verbs; returns what must be equal on all ranks, checks what must not."""
    rank, size = comm.Get_rank(), comm.Get_size()
    seen: list[object] = [size, comm.allgather({"rank": rank, "bytes": bytes(1000 * rank)})]
    for root in range(size):
        got = comm.bcast(("from", rank) if rank == root else object, root=root)
        assert got == ("from", root), f"root {root} gave {got}"
    comm.barrier()
    color = 1 if rank == size - 1 else 0
    part = comm.Split(color, key=-rank)
    members = [size - 1] if color else list(reversed(range(size - 1)))
    assert part is not comm
    assert part.Get_size() == len(members), f"{part.Get_size()} ranks of {members}"
    assert part.allgather(rank) == members, f"{part.allgather(rank)} instead of {members}"
    last = part.Get_size() - 1
    got = part.bcast(rank, root=last)
    assert got == members[last], f"root {last} of {members} gave {got}"
    again = part.Split(0)
    assert again.allgather(rank) == members, "a part of a part"
    part.barrier()
    # The old group is as it was.
    assert (comm.Get_rank(), comm.Get_size()) == (rank, size)
    seen.append(comm.allgather(comm.Get_rank()))
    for wrong in (-1, size):
        with pytest.raises(ConfigError, match="inside the group"):
            comm.bcast(None, root=wrong)
    return seen


@pytest.mark.parametrize("num_ranks", [None, 1, 3])
def test_verbs(run_ranks, num_ranks):
    results = run_ranks(verbs, num_ranks)
    assert all(result == results[0] for result in results)
    size = len(results)
    assert results[0][1] == [{"rank": rank, "bytes": bytes(1000 * rank)} for rank in range(size)]
    assert results[0][2] == list(range(size))


def two_in_a_row(comm: Comm) -> list[object]:
    first = resolve(None, timeout_s=30)
    second = resolve(None, timeout_s=30)
    return [first.Get_size(), first.allgather("first"), second.allgather("second")]


def test_two_groups_from_the_environment_do_not_mix(run_ranks):
    for size, first, second in run_ranks(two_in_a_row):
        assert first == ["first"] * size
        assert second == ["second"] * size


def absent(comm: Comm) -> object:
    rank = comm.Get_rank()
    short = resolve(None, timeout_s=0.5)
    part = short.Split(0)
    comm.barrier()
    caught = []
    if rank != 2:
        for group in (short, part):
            with pytest.raises(PeerTimeout) as error:
                group.allgather(rank)
            caught.append((error.value.rank, error.value.peer, error.value.phase, error.value.round))
    comm.barrier()
    return caught


def test_absent_rank_is_named_at_the_deadline(run_ranks):
    if run_ranks.launcher.kind in MPI_KINDS:
        pytest.skip("MPI cannot take back an expired collective: test_comm_mpi has a job of its own for this")
    results = run_ranks(absent, 3)
    assert results[2] == []
    for rank in (0, 1):
        assert [fact[0] for fact in results[rank]] == [rank, rank]
        assert {fact[2:] for fact in results[rank]} == {("startup", 0)}
    assert {fact[1] for rank in (0, 1) for fact in results[rank]} == {2}


def first_leaves(comm: Comm) -> object:
    return [comm.allgather(index) for index in range(20)][-1]


def test_no_rank_needs_another_after_its_last_verb(run_ranks):
    results = run_ranks(first_leaves)
    assert results == [[19] * len(results)] * len(results)
