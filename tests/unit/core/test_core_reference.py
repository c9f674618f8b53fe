"""The oracle against examples worked out by hand: two and three ranks, every number written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from a2a import reference
from a2a.placement import Placement
from a2a.reference import RankInput, RankReceipt

PLACED = Placement([0, 0, 1, 1], 2)

# Rank 0 has three tokens, rank 1 two. Experts 0 and 1 are rank 0's, 2 and 3 rank 1's.
IDS0 = torch.tensor([[0, 3], [2, 3], [9, 1]], dtype=torch.int32)
IDS1 = torch.tensor([[-1, 2], [1, 0]], dtype=torch.int32)
ROWS0 = torch.tensor([[10.0], [11.0], [12.0]])
ROWS1 = torch.tensor([[20.0], [21.0]])
INPUTS = [RankInput(IDS0, [ROWS0, IDS0]), RankInput(IDS1, [ROWS1, IDS1])]


def dispatched(**keywords: object) -> list[RankReceipt]:
    return reference.dispatch(INPUTS, PLACED, 3, ids_payload=1, **keywords)  # type: ignore[arg-type]


def rows(receipt: RankReceipt) -> list[list[float]]:
    found: list[list[float]] = receipt.payloads[0].squeeze(2).tolist()
    return found


def test_compact_rows_counts_and_tables() -> None:
    zero, one = dispatched()
    # Token 0 goes to both, token 1 to rank 1 once though both its picks are there, token 2 to rank 0 (9 is no expert).
    assert rows(zero) == [[10, 12, 0], [21, 0, 0]]
    assert zero.valid.tolist() == [[True, True, False], [True, False, False]]
    assert rows(one) == [[10, 11, 0], [20, 0, 0]]
    assert one.valid.tolist() == [[True, True, False], [True, False, False]]
    assert zero.recv_counts.tolist() == [2, 1] and one.recv_counts.tolist() == [2, 1]
    assert zero.send_counts.tolist() == [2, 2] and one.send_counts.tolist() == [1, 1]
    assert zero.topk_target_ranks.tolist() == [[0, 1], [1, -1], [-1, 0]]
    assert zero.topk_send_indices.tolist() == [[0, 0], [1, -1], [-1, 1]]
    assert one.topk_target_ranks.tolist() == [[-1, 1], [0, -1]]
    assert one.topk_send_indices.tolist() == [[-1, 0], [0, -1]]
    # Valid rows keep all their ids, those of the other rank and of nobody too; padded slots hold -1.
    assert zero.payloads[1].tolist() == [[[0, 3], [9, 1], [-1, -1]], [[1, 0], [-1, -1], [-1, -1]]]
    assert one.payloads[1].tolist() == [[[0, 3], [2, 3], [-1, -1]], [[-1, 2], [-1, -1], [-1, -1]]]
    assert zero.scrubbed == [False, True]
    assert zero.eplb_gathered_stats is None
    for each in (zero.recv_counts, zero.send_counts, zero.topk_target_ranks, zero.topk_send_indices):
        assert each.dtype == torch.int32


def test_rows_in_token_order() -> None:
    zero, one = dispatched(row_order="token")
    assert rows(zero) == [[10, 0, 12], [0, 21, 0]]
    assert zero.valid.tolist() == [[True, False, True], [False, True, False]]
    assert rows(one) == [[10, 11, 0], [20, 0, 0]]
    assert zero.topk_send_indices.tolist() == [[0, 0], [1, -1], [-1, 2]]
    assert one.topk_send_indices.tolist() == [[-1, 0], [1, -1]]
    assert zero.payloads[1].tolist() == [[[0, 3], [-1, -1], [9, 1]], [[-1, -1], [1, 0], [-1, -1]]]
    assert zero.recv_counts.tolist() == [2, 1]


def test_masked_ranks_are_not_there() -> None:
    zero, one = dispatched(active_ranks=[0])
    assert rows(zero) == [[10, 12, 0], [0, 0, 0]]
    assert zero.recv_counts.tolist() == [2, 0] and zero.send_counts.tolist() == [2, 0]
    assert zero.topk_target_ranks.tolist() == [[0, -1], [-1, -1], [-1, 0]]
    assert zero.topk_send_indices.tolist() == [[0, -1], [-1, -1], [-1, 1]]
    assert one.recv_counts.tolist() == [0, 0] and not one.valid.any()


def test_scrubbing() -> None:
    zero, _ = dispatched(scrub="all", invalid_id=77, fill_bytes=[127, 0])
    # Four bytes of 127 make one fp32.
    fill = torch.full((4,), 127, dtype=torch.uint8).view(torch.float32).item()
    assert rows(zero) == [[10, 12, fill], [21, fill, fill]]
    assert zero.payloads[1][0, 2].tolist() == [77, 77] and zero.scrubbed == [True, True]
    zero, _ = dispatched(scrub=None, invalid_id=77)
    assert zero.scrubbed == [False, False]
    receipts = reference.dispatch(INPUTS, PLACED, 3, scrub="ids", ids_payload=None)
    assert receipts[0].scrubbed == [False, False]


def test_statistics_and_empty_ranks() -> None:
    none = torch.empty((0, 2), dtype=torch.int64)
    stats = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)]
    inputs = [RankInput(IDS0, [ROWS0], stats[0]), RankInput(none, [torch.empty((0, 1))], stats[1])]
    zero, one = reference.dispatch(inputs, PLACED, 3)
    assert zero.recv_counts.tolist() == [2, 0] and one.recv_counts.tolist() == [2, 0]
    assert one.send_counts.tolist() == [0, 0] and one.topk_target_ranks.shape == (0, 2)
    for each in (zero, one):
        assert each.eplb_gathered_stats is not None and each.eplb_gathered_stats.tolist() == [[1, 2], [3, 4]]
    zero, one = reference.combine([IDS0, none], [torch.ones(2, 3, 1)] * 2, PLACED)
    assert zero.tolist() == [[2.0], [1.0], [1.0]] and one.shape == (0, 1)


def test_moved_experts() -> None:
    zero, one = reference.dispatch(INPUTS, Placement([1, 0, 1, 1], 2), 3)
    assert rows(zero) == [[12, 0, 0], [21, 0, 0]]
    assert rows(one) == [[10, 11, 0], [20, 21, 0]]


def test_sums_by_hand() -> None:
    # Block s of rank r: what r made for the rows that s sent, NaN where it holds none.
    nan = float("nan")
    made = [
        torch.tensor([[[1.0], [2.0], [nan]], [[4.0], [nan], [nan]]]),
        torch.tensor([[[10.0], [20.0], [nan]], [[40.0], [nan], [nan]]]),
    ]
    zero, one = reference.combine([IDS0, IDS1], made, PLACED)
    assert zero.tolist() == [[11.0], [20.0], [2.0]]
    assert one.tolist() == [[40.0], [4.0]]
    zero, one = reference.combine([IDS0, IDS1], made, PLACED, active_ranks=[1])
    assert zero.tolist() == [[10.0], [20.0], [0.0]] and one.tolist() == [[40.0], [0.0]]
    by_token = [
        torch.tensor([[[1.0], [nan], [2.0]], [[nan], [4.0], [nan]]]),
        torch.tensor([[[10.0], [20.0], [nan]], [[40.0], [nan], [nan]]]),
    ]
    zero, one = reference.combine([IDS0, IDS1], by_token, PLACED, row_order="token")
    assert zero.tolist() == [[11.0], [20.0], [2.0]] and one.tolist() == [[40.0], [4.0]]


def three(values: list[float], dtype: torch.dtype, **keywords: object) -> Tensor:
    """What a token gets whose rows at ranks 0, 1, 2 are `values`."""
    ids = torch.tensor([[2, 0, 1]])
    made = [torch.full((3, 1, 1), value, dtype=dtype) for value in values]
    nobody = torch.full((0, 3), -1)
    return reference.combine([ids, nobody, nobody], made, Placement.contiguous(3, 3), **keywords)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        # In ascending rank: (2**24 + 1) + 1 stays, the other way round it would be 2**24 + 2.
        ([16777216.0, 1.0, 1.0], torch.float32, 16777216.0),
        ([1.0, 1.0, 16777216.0], torch.float32, 16777218.0),
        # bf16 has 8 bits: between 256 and 258 lies 257; 256 is even, 260 is even.
        ([256.0, 1.0, 0.0], torch.bfloat16, 256.0),
        ([258.0, 1.0, 0.0], torch.bfloat16, 260.0),
        # Rounded once, not after each addition.
        ([256.0, 1.0, 1.0], torch.bfloat16, 258.0),
        ([2048.0, 1.0, 0.0], torch.float16, 2048.0),
        ([2050.0, 1.0, 0.0], torch.float16, 2052.0),
        ([65504.0, 65504.0, 0.0], torch.float16, float("inf")),
    ],
)
def test_order_and_rounding(values: list[float], dtype: torch.dtype, wanted: float) -> None:
    total = three(values, dtype)
    assert total.dtype == dtype and total.item() == wanted


def test_sums_start_at_plus_zero() -> None:
    assert torch.signbit(three([-0.0, -0.0, -0.0], torch.bfloat16)).item() is False


def test_output_dtype() -> None:
    assert three([256.0, 1.0, 0.0], torch.bfloat16, output_dtype=torch.float32).item() == 257.0


def test_the_e4m3_wire_by_hand() -> None:
    # With 448 in the block the scale is 1; e4m3 has 1, 1.125, 1.25: 1.0625 is a tie and goes to 1, 1.1875 to 1.25.
    row = torch.zeros(1, 1, 128)
    row[0, 0, :4] = torch.tensor([448.0, 1.0625, 1.1875, -1.125])
    ids = torch.tensor([[0]])
    (total,) = reference.combine([ids], [row], Placement([0], 1), low_precision=True)
    assert total.dtype == torch.bfloat16 and total[0, :4].tolist() == [448.0, 1.0, 1.25, -1.125]
    (exact,) = reference.combine([ids], [row.to(torch.float8_e4m3fn)], Placement([0], 1), low_precision=True)
    assert exact[0, :4].tolist() == [448.0, 1.0, 1.25, -1.125]


def test_destinations() -> None:
    owners, hits = reference.destinations(IDS0, PLACED)
    assert owners.tolist() == [[0, 1], [1, 1], [-1, 0]]
    assert hits.tolist() == [[True, True], [False, True], [True, False]]
    owners, hits = reference.destinations(IDS0, PLACED, active_ranks=[1])
    assert owners.tolist() == [[-1, 1], [1, 1], [-1, -1]] and hits[:, 0].tolist() == [False] * 3
