"""Who holds which expert: a partition, whatever the table."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from a2a.placement import Placement

INT64 = (-(2**63), 2**63 - 1)

sizes = st.integers(1, 256).flatmap(lambda ep: st.tuples(st.just(ep), st.integers(ep, ep + 700)))


@given(sizes)
def test_contiguous_shares(size: tuple[int, int]) -> None:
    ep, num_experts = size
    placement = Placement.contiguous(num_experts, ep)
    base, rem = num_experts // ep, num_experts % ep
    first = 0
    for rank in range(ep):
        held = base + 1 if rank < rem else base
        assert placement.experts_of(rank).tolist() == list(range(first, first + held))
        assert placement.local[first : first + held].tolist() == list(range(held))
        first += held
    assert first == num_experts == placement.num_experts


@given(st.integers(1, 20).flatmap(lambda ep: st.tuples(st.just(ep), st.lists(st.integers(0, ep - 1), min_size=1))))
def test_any_table_is_a_partition(drawn: tuple[int, list[int]]) -> None:
    ep, ranks = drawn
    placement = Placement(ranks, ep)
    seen = []
    for rank in range(ep):
        experts = placement.experts_of(rank).tolist()
        assert experts == sorted(experts)
        for local, expert in enumerate(experts):
            assert placement.owner(expert) == rank == ranks[expert]
            assert int(placement.local[expert]) == local
        seen += experts
    assert sorted(seen) == list(range(len(ranks)))


@given(st.lists(st.integers(*INT64)), st.sampled_from([torch.int32, torch.int64]))
def test_ids_outside_have_no_owner(ids: list[int], dtype: torch.dtype) -> None:
    placement = Placement([2, 0, 0, 1, 2], 3)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = [min(max(each, low), high) for each in [*ids, -1, 0, 4, 5, low, high]]
    wanted = [{0: 2, 1: 0, 2: 0, 3: 1, 4: 2}.get(each, -1) for each in ids]
    owners = placement.owners(torch.tensor(ids, dtype=dtype).view(-1, 1))
    assert owners.dtype == torch.int64 and owners.flatten().tolist() == wanted
    assert [placement.owner(each) for each in ids] == wanted


def test_moved_and_replicated_experts() -> None:
    # Two experts of four changed places, and the fifth and sixth ids are replicas elsewhere.
    placement = Placement([0, 1, 0, 1, 2, 0], 3)
    assert placement.experts_of(0).tolist() == [0, 2, 5]
    assert placement.experts_of(1).tolist() == [1, 3]
    assert placement.experts_of(2).tolist() == [4]
    assert placement.local.tolist() == [0, 0, 1, 1, 0, 2]


def test_a_table_is_a_copy() -> None:
    table = torch.tensor([0, 1], dtype=torch.int32)
    placement = Placement(table, 2)
    table[0] = 1
    assert placement.table.tolist() == [0, 1] and placement.table.dtype == torch.int32
    assert Placement(torch.tensor([1, 0]), 2).experts_of(0).tolist() == [1]


def test_a_rank_may_hold_nothing() -> None:
    placement = Placement([1, 1], 3)
    assert placement.experts_of(0).tolist() == [] and placement.experts_of(2).tolist() == []
    assert placement.owners(torch.empty((0, 4), dtype=torch.int32)).shape == (0, 4)
