"""Several ranks of one process on one GPU, on an ordinary CUDA tensor: shapes, formats, ids and recorded routings."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from device_ranks import REGIMES, Ranks
from exchange_case import Case, Round, draw

from a2a.bench.workload import workload
from a2a.config import ExchangeConfig, model_preset
from a2a.errors import ShapeError
from a2a.layout import WorkspaceLayout
from a2a.nvlink.params import WIRE_FORMATS, control_regions
from a2a.quant import ScaleLayout
from a2a.reference import RankInput

pytestmark = pytest.mark.gpu(1)
QUANTIZED_OUTPUTS = ("mxfp8", "nvfp4", "mxfp4")
ROUNDS = int(os.environ.get("GPU_TEST_ROUNDS", "6"))

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "token order": {"row_order": "token", "top_k": 3},
    "scrub all": {"scrub": "all"},
    "no scrub": {"scrub": None},
    "int64 ids": {"id_dtype": torch.int64, "top_k": 5},
    "narrow payloads": {"more_row_bytes": (1, 3, 18, 36)},
    "narrow payloads, token order": {"more_row_bytes": (36, 18, 3, 1), "row_order": "token", "scrub": "all"},
    "hidden 7": {"hidden_size": 7},
    "hidden 2880": {"hidden_size": 2880},
    "hidden 7168": {"hidden_size": 7168, "max_num_tokens": 40, "top_k": 8, "num_experts": 256},
    "hidden 16384": {"hidden_size": 16384},
    "top_k 1": {"top_k": 1},
    "top_k 9": {"top_k": 9},
    "top_k 22": {"top_k": 22, "num_experts": 64},
    "top_k 40": {"top_k": 40, "num_experts": 64},
    "60 experts": {"num_experts": 60},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "statistics": {"eplb": 13},
    "many tokens": {"max_num_tokens": 300, "hidden_size": 128},
}


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_equal_the_oracle(shape: str, ep_size: int) -> None:
    ranks = Ranks(Case(ep_size=ep_size, **SHAPES[shape]))
    for regime in REGIMES:
        ranks.take(regime)
        for seed in range(ROUNDS):
            ranks.play(draw(ranks.case, seed), staged=seed % 2 == 0)
    # Regimes may take turns from round to round, and so may sizes.
    for seed in range(4):
        ranks.take(REGIMES[seed % len(REGIMES)])
        ranks.play(draw(ranks.case, 100 + seed), staged=seed < 2)


@pytest.mark.parametrize("ep_size", [2, 8])
@pytest.mark.parametrize("shape", ["plain", "narrow payloads", "hidden 7168", "fp32", "int64 ids"])
def test_addresses_may_be_anything(shape: str, ep_size: int) -> None:
    ranks = Ranks(Case(ep_size=ep_size, **SHAPES[shape]))
    for seed, shift in enumerate((1, 0, 3, 0, 2, 4)):
        ranks.shift = shift
        for regime in REGIMES:
            ranks.take(regime)
            # Two rounds of a size with rows at other addresses, which must not be taken for the first one's.
            ranks.play(draw(ranks.case, 5, counts=[9] * ep_size), staged=seed % 2 == 0)


FORMATS = {
    "fp8_block": [(256, 0)],
    "mxfp8": [(7168, 0), (2880, 256), (160, 128)],
    "nvfp4": [(96, 0), (2048, 0)],
    "mxfp4": [(96, 0), (2048, 0)],
}


@pytest.mark.parametrize("ep_size", [2, 4, 8])
@pytest.mark.parametrize("wire", FORMATS)
def test_formats_are_made_on_the_way_bit_for_bit(wire: str, ep_size: int) -> None:
    assert wire in WIRE_FORMATS
    for number, (hidden, alignment) in enumerate(FORMATS[wire]):
        order, dtype = ("compact", "token")[number % 2], (torch.bfloat16, torch.float16, torch.float32)[number]
        case = Case(ep_size=ep_size, hidden_size=hidden, row_order=order, scrub="all", max_num_tokens=40, dtype=dtype)
        ranks = Ranks(case, wire, alignment)
        for seed in range(4):
            ranks.take(REGIMES[seed % len(REGIMES)])
            round = draw(case, seed)
            for each in round.inputs:
                spread(each.payloads[0], seed)
            ranks.play(round, staged=False)


def spread(rows: torch.Tensor, seed: int) -> None:
    """Rows of every magnitude, blocks of zeros, NaN and Inf, and values halfway between two codes; in place."""
    generator = torch.Generator().manual_seed(seed)
    # What leaves fp16's range is infinite, which formats must take as well.
    rows.copy_(
        (rows.float() * torch.exp2(torch.randint(-12, 12, rows.shape, generator=generator).float())).to(rows.dtype)
    )
    if len(rows) > 1:
        rows[0, :64], rows[1, 50], rows[1, 70] = 0, float("nan"), float("-inf")
    rows[:, 32:48] = (torch.arange(16) - 4) / 4
    rows[:, 32] = 6


@pytest.mark.parametrize("ep_size", [2, 8])
def test_strange_ids_go_nowhere(ep_size: int) -> None:
    case = Case(ep_size=ep_size, num_experts=60, top_k=5, id_dtype=torch.int64)
    ranks = Ranks(case)
    far = 2**40
    for regime in REGIMES:
        ranks.take(regime)
        for number, values in enumerate(([-1], [60, 61], [far, -far, 2**31, -(2**31)], [-1, 0, 60], [59], [2**32])):
            round = draw(case, number, counts=[8] * ep_size)
            for each in round.inputs:
                each.topk_ids.copy_(torch.tensor(values).repeat(40)[:40].view(8, 5))
            ranks.play(round, staged=False)


@pytest.mark.parametrize("part", ["all", "warmup"])
@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen1.5-moe-a2.7b"])
def test_recorded_routings_over_eight_ranks(name: str, part: str) -> None:
    preset = model_preset(name)
    most = 64
    case = Case(
        ep_size=8,
        max_num_tokens=most,
        top_k=preset.top_k,
        num_experts=preset.num_experts,
        hidden_size=preset.hidden_size,
    )
    routed = workload(f"{name}:{part}", ep_size=8, tokens=most, num_experts=preset.num_experts, top_k=preset.top_k)
    ranks = Ranks(case)
    for seed, regime in enumerate(REGIMES):
        ranks.take(regime)
        inputs = []
        for ids, weights, drawn in zip(
            routed.topk_ids, routed.topk_weights, draw(case, seed, [most] * 8).inputs, strict=True
        ):
            inputs.append(RankInput(ids, [drawn.payloads[0], ids, weights]))
        ranks.play(Round(case, most, inputs), staged=False)


def test_a_table_places_experts() -> None:
    table = tuple(int(rank) for rank in torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(5)))
    ranks = Ranks(Case(ep_size=4, placement=table))
    for regime in REGIMES:
        ranks.take(regime)
        for seed in range(ROUNDS):
            ranks.play(draw(ranks.case, seed), staged=False)


def test_empty_ranks() -> None:
    ranks = Ranks(Case(ep_size=4))
    for regime in REGIMES:
        ranks.take(regime)
        for counts in ([0, 0, 0, 0], [0, 5, 0, 0], [16, 0, 16, 1]):
            for seed in range(3):
                ranks.play(draw(ranks.case, seed, counts), staged=False)


def test_output_types() -> None:
    ranks = Ranks(Case(ep_size=2))
    for regime in REGIMES:
        ranks.take(regime)
        for output in (torch.float32, torch.float16, torch.bfloat16):
            for seed in range(3):
                ranks.play(draw(ranks.case, seed), staged=True, output_dtype=output)


@pytest.mark.parametrize("ep_size", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", QUANTIZED_OUTPUTS)
def test_output_is_quantized_in_the_launch(name: str, dtype: torch.dtype, ep_size: int) -> None:
    for hidden, most in ((7168, 24), (160, 300)):
        ranks = Ranks(Case(ep_size=ep_size, hidden_size=hidden, max_num_tokens=most, dtype=dtype))
        for seed, regime in enumerate(REGIMES * 2):
            ranks.take(regime)
            ranks.shift = seed % 3
            for layout in ScaleLayout:
                ranks.play(draw(ranks.case, seed), staged=seed < 3, made=(name, layout))


def test_a_workspace_that_is_too_small_is_refused() -> None:
    from a2a.nvlink.exchange import Exchange

    case = Case(ep_size=2)
    config = ExchangeConfig(ep_size=2, **case.constructor())
    layout = WorkspaceLayout(config, control_regions(config))
    short = torch.zeros((2, layout.num_bytes - 128), dtype=torch.uint8, device="cuda")
    with pytest.raises(ShapeError, match="workspace"):
        Exchange(short, 0, config, layout, case.placed())
