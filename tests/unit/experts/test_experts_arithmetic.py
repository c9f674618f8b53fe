"""Experts and the dense layer by themselves: against one token at a time, and against outputs that are wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2a import Placement
from a2a.errors import ConfigError, ShapeError
from a2a.experts import GatedMlp, dense_layer


def one_by_one(experts: GatedMlp, rows: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition: a token, a pick, an expert at a time, in fp64."""
    total = torch.zeros(rows.shape, dtype=torch.float64)
    inner = experts.intermediate_size
    for token, row in enumerate(rows.double()):
        for pick, weight in zip(picks[token].tolist(), weights[token].tolist(), strict=True):
            if pick >= 0:
                gate = experts.w13[pick, :inner].double() @ row
                up = experts.w13[pick, inner:].double() @ row
                total[token] += weight * (experts.w2[pick].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return total


@settings(max_examples=30, deadline=None)
@given(num_experts=st.integers(1, 5), tokens=st.integers(0, 7), top_k=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_grouped_equals_one_by_one(num_experts: int, tokens: int, top_k: int, seed: int) -> None:
    experts = GatedMlp.random(num_experts, 24, 10, seed=seed, compute_dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((tokens, 24), generator=generator)
    picks = torch.randint(-1, num_experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights = torch.randn((tokens, top_k), generator=generator)
    made = experts.forward(rows, picks, weights)
    assert made.dtype == torch.float32 and made.shape == rows.shape
    # One rounding to fp32 apart; sums of a token may cancel, so the unit is that of the largest element.
    wanted = one_by_one(experts, rows, picks, weights)
    assert (made - wanted).abs().max().item() <= 2.0**-23 * wanted.abs().max().item() if tokens else made.numel() == 0
    assert made[(picks < 0).all(1)].eq(0).all()


def test_a_rank_without_experts() -> None:
    none = GatedMlp.random(3, 8, 4, seed=0).select(torch.empty(0, dtype=torch.int64))
    assert (none.num_experts, none.hidden_size, none.intermediate_size) == (0, 8, 4)
    made = none.forward(torch.ones(2, 8), torch.full((2, 1), -1), torch.ones(2, 1))
    assert torch.equal(made, torch.zeros(2, 8))


def test_select_and_dtypes() -> None:
    experts = GatedMlp.random(5, 8, 4, seed=3, dtype=torch.float16, compute_dtype=torch.float64)
    some = experts.select(torch.tensor([4, 1]))
    assert torch.equal(some.w13, experts.w13[[4, 1]]) and torch.equal(some.w2, experts.w2[[4, 1]])
    assert some.compute_dtype == torch.float64 and some.w13.dtype == torch.float16
    assert some.to("cpu").compute_dtype == torch.float64


def test_what_does_not_fit_is_refused() -> None:
    w13, w2 = torch.zeros(2, 8, 6), torch.zeros(2, 6, 4)
    for bad in ((w13[:1], w2), (w13[:, :6], w2), (w13, w2.bfloat16()), (w13.double(), w2.double()), (w13[0], w2[0])):
        with pytest.raises(ShapeError, match="w13, w2"):
            GatedMlp(*bad)
    with pytest.raises(ConfigError, match="compute_dtype"):
        GatedMlp(w13, w2, compute_dtype=torch.bfloat16)
    experts = GatedMlp(w13, w2)
    rows, picks, weights = torch.zeros(3, 6), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for what, arguments in {
        "rows": (rows[:, :5], picks, weights),
        "local_experts": (rows, picks[:2], weights),
        "topk_weights": (rows, picks, weights.double()),
        "index 2": (rows, picks + 2, weights),
    }.items():
        with pytest.raises(ShapeError, match=what):
            experts.forward(*arguments)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float64])
def test_bracket_takes_what_is_right_and_nothing_else(compute_dtype: torch.dtype) -> None:
    experts = GatedMlp.random(6, 96, 40, seed=5, compute_dtype=compute_dtype)
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn((64, 96), generator=generator).bfloat16()
    ids = torch.randint(-1, 7, (64, 3), generator=generator)
    weights = torch.rand((64, 3), generator=generator)
    placement = Placement([1, 0, 2, 0, 1, 1], 3)
    wanted = dense_layer(experts, rows, ids, weights, placement, dtype=torch.bfloat16)
    total = torch.zeros(rows.shape)
    for rank in range(3):
        mine = placement.experts_of(rank)
        local = torch.full((8,), -1)
        local[mine] = torch.arange(mine.numel())
        total += experts.select(mine).forward(rows.float(), local[ids], weights).bfloat16().float()
    output = total.bfloat16()
    assert not wanted.misses(output).any()
    # The bracket is no loophole: with experts in fp64 a single output is right everywhere.
    single = wanted.low == wanted.high
    assert single.all() if compute_dtype == torch.float64 else single.double().mean() > 0.2
    for nudge in (-1, 1):
        # The bf16 next to an output, away from zeros, whose neighbour is another matter.
        wrong = (output.view(torch.int16) + nudge).view(torch.bfloat16)
        assert wanted.misses(wrong)[single & (output != 0)].all()
    assert wanted.misses(torch.full_like(output, float("nan"))).all()
    assert wanted.nearest.eq(0)[((ids < 0) | (ids >= 6)).all(1)].all()
    # One rounding too few, one pick forgotten.
    assert wanted.misses(total)[single].any()
    forgotten = dense_layer(experts, rows, ids[:, :2].contiguous(), weights[:, :2], placement).nearest
    assert wanted.misses(forgotten).any()
