"""The checks that the bench makes: they pass what is right and see what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from a2a.bench.implementation import (
    Case,
    difference,
    expected_integer_sums,
    expected_received,
    integer_experts,
    integer_rows,
    tensor_difference,
)
from a2a.bench.workload import Workload
from a2a.quant import WIRE_FORMATS


def _case(rank: int) -> Case:
    # Two ranks, experts 0 and 1 on rank 0, 2 and 3 on rank 1.
    ids = (torch.tensor([[0, 2], [0, 1], [-1, 9]], dtype=torch.int32), torch.tensor([[3, 2]], dtype=torch.int32))
    weights = tuple(torch.arange(each.numel(), dtype=torch.float32).view(each.shape) for each in ids)
    return Case(rank, 2, 4, 4, 2, "bf16", 0, "compact", True, 3, Workload("by hand", ids, weights))


def test_what_must_arrive_by_hand() -> None:
    case = _case(1)
    rows = {rank: torch.full((n, 4), 10.0 * rank + 1, dtype=torch.bfloat16) for rank, n in ((0, 3), (1, 1))}
    got = expected_received(case, lambda rank: rows[rank])
    assert got.counts == (1, 1)
    assert got.data.tolist() == [[1.0] * 4, [11.0] * 4]
    assert got.topk_ids.tolist() == [[0, 2], [3, 2]] and got.topk_weights.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_integer_sums_by_hand() -> None:
    case = _case(0)
    rows = integer_rows(case, 0, seed=3)
    assert set(rows.unique().tolist()) <= {1.0, 2.0, 3.0}
    # Ranks 0 and 1 cancel, rank 0 alone stays, no rank gives zero.
    want = torch.stack([torch.zeros(4), rows[1].float(), torch.zeros(4)])
    assert tensor_difference("", expected_integer_sums(case, rows).float(), want) == ""
    assert torch.equal(integer_experts(rows, 1), -rows)


@pytest.mark.parametrize("name", list(WIRE_FORMATS))
def test_integer_rows_survive_every_format(name: str) -> None:
    case = dataclasses.replace(_case(0), hidden_size=256, format_name=name)
    rows = integer_rows(case, 0, seed=3)
    assert torch.equal(case.dequantize(*case.quantize(rows)), rows)


def test_every_difference_is_seen() -> None:
    case = _case(1)
    right = expected_received(case, lambda rank: integer_rows(case, rank, 0))
    assert difference(right, right) == ""
    bent = right.data.clone()
    bent[1, 3] += 1
    assert "data: row (1,)" in difference(dataclasses.replace(right, data=bent), right)
    assert "counts" in difference(dataclasses.replace(right, counts=(2, 0)), right)
    assert "topk_weights" in difference(dataclasses.replace(right, topk_weights=right.topk_weights + 1), right)
    # Bits, not values: minus zero is not zero, and equal NaN bits are equal.
    assert tensor_difference("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not tensor_difference("x", torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert "row (1,)" in tensor_difference("x", torch.tensor([1, 2, 3]), torch.tensor([1, 3, 3]))
    assert tensor_difference("x", torch.zeros(2, 1), torch.zeros(1, 1))
    assert tensor_difference("x", torch.zeros(1), torch.zeros(1).int())
