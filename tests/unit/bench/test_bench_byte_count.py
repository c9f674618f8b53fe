"""Bytes of a round, against counts made by hand."""

from __future__ import annotations

import torch

from a2a.bench.byte_count import ByteCount, count_bytes, pair_counts
from a2a.bench.workload import workload
from a2a.placement import Placement

TWO_RANKS = Placement.contiguous(4, 2)  # experts 0 and 1 on rank 0, 2 and 3 on rank 1


def _ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1)


def test_counts_by_hand() -> None:
    # Rank 0: one token to both ranks (twice to rank 1, counted once), one that stays, one that goes nowhere.
    # Rank 1: one token with an id past the table, which stays; one to rank 0.
    ids = [_ids([0, 2, 3], [1, 0, 1], [-1, 4, 99]), _ids([3, 3, 4], [1, -5, 0])]
    assert pair_counts(ids, TWO_RANKS).tolist() == [[2, 1], [1, 1]]


def test_bytes_by_hand() -> None:
    counts = torch.tensor([[2, 1, 0], [1, 1, 4], [0, 3, 0]])
    got = count_bytes(counts, dispatch_row_bytes=10, combine_row_bytes=7)
    # dispatch: rows sent by a rank; rank 1 sends 5 away and keeps 1.
    # combine: rows returned by a rank; rank 1 holds 1 + 3 of others and 1 of its own, rank 2 holds 4 of others.
    assert got["dispatch"] == ByteCount(link_bytes=50, logical_bytes=60)
    assert got["combine"] == ByteCount(link_bytes=28, logical_bytes=35)
    # Rank 1 moves most: 5 rows out and 4 back.
    assert got["pair"] == ByteCount(link_bytes=50 + 28, logical_bytes=60 + 35)


def test_nothing_leaves_a_single_rank() -> None:
    ids = workload("uniform", ep_size=1, tokens=20, num_experts=4, top_k=2).topk_ids
    got = count_bytes(pair_counts(ids, Placement.contiguous(4, 1)), dispatch_row_bytes=100, combine_row_bytes=100)
    assert {phase: count.link_bytes for phase, count in got.items()} == {"dispatch": 0, "combine": 0, "pair": 0}
    assert got["dispatch"].logical_bytes == 2000


def test_nothing_leaves_ranks_that_pick_their_own_experts() -> None:
    counts = pair_counts([_ids([0, 1], [1, 0]), _ids([2, 3])], TWO_RANKS)
    got = count_bytes(counts, dispatch_row_bytes=8, combine_row_bytes=8)
    assert [got[phase].link_bytes for phase in ("dispatch", "combine", "pair")] == [0, 0, 0]
    assert got["pair"].logical_bytes == 32


def test_empty_ranks() -> None:
    counts = pair_counts([_ids([0, 0])[:0], _ids([0, 0])], TWO_RANKS)
    assert counts.tolist() == [[0, 0], [1, 0]]


def test_uniform_routing_as_expected() -> None:
    # A token with 8 distinct picks of 256 misses a given one of 8 ranks with probability C(224, 8) / C(256, 8).
    miss = 1.0
    for pick in range(8):
        miss *= (224 - pick) / (256 - pick)
    ids = workload("uniform", ep_size=8, tokens=500, num_experts=256, top_k=8).topk_ids
    counts = pair_counts(ids, Placement.contiguous(256, 8)).float()
    remote = (counts.sum() - counts.diagonal().sum()) / 4000
    assert abs(remote.item() - 7 * (1 - miss)) < 0.05
