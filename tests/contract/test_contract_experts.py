"""The reference MoE layer on ranks against the dense layer without ranks, in every wire format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_case import assert_equal
from ranks import Ranks
from torch import Tensor

import a2a
from a2a.comm import Comm
from a2a.errors import ConfigError, ShapeError
from a2a.experts import GatedMlp, MoeLayer, dense_layer
from a2a.quant import wire_format

NUM_EXPERTS, TOP_K, MOST = 10, 4, 9
COUNTS = (5, 0, 9, 1)
"""Tokens by rank, repeated; each round starts one further on, so that every rank is empty once."""

CASES = {
    "bf16": {"compute_dtype": torch.float64},
    "bf16, experts in fp32": {"wire": "bf16", "compute_dtype": torch.float32},
    "mxfp8": {"compute_dtype": torch.float64, "mx_alignment": 256},
    "fp8_block": {"compute_dtype": torch.float64},
    "nvfp4": {"compute_dtype": torch.float64, "global_scale": 2.0},
}


def picks(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids, some beyond the experts or negative, some picked twice, several on one rank; and weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, NUM_EXPERTS + 1, (n, TOP_K), generator=generator, dtype=torch.int32)
    ids[n // 2 :, 1] = ids[n // 2 :, 0]
    return ids, torch.randn((n, TOP_K), generator=generator)


def built(wire: str, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "max_num_tokens": MOST,
        "top_k": TOP_K,
        "num_experts": NUM_EXPERTS,
        "hidden_size": hidden,
        "wire_format": wire,
        **more,
    }


def share(moe: a2a.MoeAlltoAll, experts: GatedMlp) -> GatedMlp:
    return experts.select(moe.placement.experts_of(moe.ep_rank)).to(moe.workspace.device)


def compared(layer: MoeLayer, experts: GatedMlp, number: int, scale: float | None = None) -> float:
    """One round of a layer on random data; the share of elements for which only one value was right."""
    moe = layer.moe
    wire, alignment = str(moe.config.wire_format), moe.config.mx_alignment
    n, seed = COUNTS[(moe.ep_rank + number) % len(COUNTS)], 100 * number + moe.ep_rank
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((n, experts.hidden_size), generator=generator).bfloat16()
    ids, weights = picks(n, seed)
    device = moe.workspace.device
    global_scale = None if scale is None else torch.tensor(scale)
    output = layer.forward(
        rows.to(device),
        ids.to(device),
        weights.to(device),
        MOST,
        global_scale=None if global_scale is None else global_scale.to(device),
    )
    wanted = dense_layer(
        experts, rows, ids, weights, moe.placement,
        wire=wire, mx_alignment=alignment, global_scale=global_scale, dtype=layer.dtype,
    )  # fmt: skip
    assert output.dtype == layer.dtype and output.shape == rows.shape, (output.dtype, output.shape)
    wrong = wanted.misses(output.cpu())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements wrong in round {number}, first at {wrong.nonzero()[0]}: "
        f"got {output.cpu()[wrong][:4]}, wanted {wanted.low[wrong][:4]} to {wanted.high[wrong][:4]}"
    )
    return float((wanted.low == wanted.high).double().mean()) if n else 1.0


ARRANGEMENTS = ({"row_order": "compact", "scrub": "ids"}, {"row_order": "token", "scrub": None, "moved": True})


def layers(comm: Comm, transport: str, wire: str, options: dict[str, Any]) -> float:
    experts = GatedMlp.random(NUM_EXPERTS, 128, 48, seed=7, compute_dtype=options["compute_dtype"])
    pinned = []
    for arranged in ARRANGEMENTS:
        keywords = built(wire, 128, row_order=arranged["row_order"], scrub=arranged["scrub"])
        if "moved" in arranged:
            keywords["placement"] = [(3 * expert + 1) % comm.Get_size() for expert in range(NUM_EXPERTS)]
        keywords["mx_alignment"] = options.get("mx_alignment", 0)
        with a2a.MoeAlltoAll(**keywords, comm=comm, transport=transport) as moe:
            layer = MoeLayer(moe, share(moe, experts))
            pinned += [compared(layer, experts, number, options.get("global_scale")) for number in range(4)]
            assert moe.state == "idle"
    return min(pinned)


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_the_dense_one(run_ranks: Ranks, transport: str, case: str) -> None:
    options = CASES[case]
    pinned = run_ranks(layers, None, transport, options.get("wire", case), options)
    # The interval is no loophole: with experts in fp64 every element has a single right value.
    assert options["compute_dtype"] == torch.float32 or min(pinned) == 1.0, pinned


def whole(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator).float()


def integers(comm: Comm, transport: str, wire: str, dtype: torch.dtype) -> None:
    """Integers on which no fp32 operation rounds, and gates that silu passes unchanged: bit for bit."""
    generator = torch.Generator().manual_seed(11)
    hidden, inner = 64, 16
    gate = torch.zeros(NUM_EXPERTS, inner, hidden)
    gate[..., :4] = 64 * whole(generator, 0, 1, NUM_EXPERTS, inner, 4)
    up = whole(generator, -1, 1, NUM_EXPERTS, inner, hidden)
    experts = GatedMlp(torch.cat([gate, up], dim=1), whole(generator, -1, 1, NUM_EXPERTS, hidden, inner))
    keywords = built(wire, hidden, combine_dtype_bytes_per_elem=dtype.itemsize)
    with a2a.MoeAlltoAll(**keywords, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        layer = MoeLayer(moe, share(moe, experts), dtype=dtype)
        for number in range(3):
            n, seed = COUNTS[(moe.ep_rank + number) % len(COUNTS)], 100 * number + moe.ep_rank
            mine = torch.Generator().manual_seed(seed)
            rows = whole(mine, -3, 3, n, hidden)
            rows[:, :4] = rows[:, :4].abs()
            # With an amax of 3 in every block nvfp4 too carries these integers as they are.
            rows[:, ::16] = 3
            ids, _ = picks(n, seed)
            weights = 2.0 ** whole(mine, -2, 1, n, TOP_K)
            form, sent = wire_format(wire), rows.bfloat16()
            assert_equal("carried integers", form.dequantize(*form.quantize(sent)), rows)
            output = layer.forward(sent.to(device), ids.to(device), weights.to(device), MOST)
            wanted = dense_layer(experts, sent, ids, weights, moe.placement, wire=wire, dtype=dtype)
            assert_equal(f"output of round {number}", output, wanted.nearest)


def all_integers(comm: Comm, transport: str) -> None:
    for wire, dtype in (("bf16", torch.bfloat16), ("mxfp8", torch.float32), ("nvfp4", torch.bfloat16)):
        integers(comm, transport, wire, dtype)


def test_layer_is_exact_on_integers(run_ranks: Ranks, transport: str) -> None:
    run_ranks(all_integers, None, transport)


def sharing(comm: Comm, transport: str) -> None:
    """A narrow layer, then a wider one on the same exchange, then both in turn, also in a context of its own."""
    narrow = GatedMlp.random(NUM_EXPERTS, 64, 32, seed=1, compute_dtype=torch.float64)
    wide = GatedMlp.random(NUM_EXPERTS, 160, 48, seed=2, compute_dtype=torch.float64)
    with a2a.MoeAlltoAll(**built("mxfp8", 64), comm=comm, transport=transport) as moe:
        first = MoeLayer(moe, share(moe, narrow))
        compared(first, narrow, 0)
        with pytest.raises(ConfigError, match=r"moe\.ensure\(hidden_size=160\)"):
            MoeLayer(moe, share(moe, wide))
        assert moe.ensure(hidden_size=160, num_contexts=2)
        second, third = MoeLayer(moe, share(moe, wide)), MoeLayer(moe, share(moe, wide), context=1)
        for number in range(1, 4):
            compared(first, narrow, 2 * number)
            compared(second, wide, 2 * number + 1)
            compared(third, wide, 2 * number)


def test_layers_of_different_widths_share_an_exchange(run_ranks: Ranks, transport: str) -> None:
    run_ranks(sharing, None, transport)


def refusals(comm: Comm, transport: str) -> None:
    experts = GatedMlp.random(NUM_EXPERTS, 64, 32, seed=1)
    plain = {**built("bf16", 64), "wire_format": None}
    with a2a.MoeAlltoAll(**plain, comm=comm, transport=transport) as moe, pytest.raises(ConfigError, match="wire_for"):
        MoeLayer(moe, share(moe, experts))
    with a2a.MoeAlltoAll(**built("bf16", 64), comm=comm, transport=transport) as moe:
        with pytest.raises(ShapeError, match="experts that the placement gives"):
            MoeLayer(moe, experts)
        with pytest.raises(ConfigError, match="num_contexts = 1"):
            MoeLayer(moe, share(moe, experts), context=1)
        layer = MoeLayer(moe, share(moe, experts))
        ids, weights = picks(2, 0)
        with pytest.raises(ShapeError, match=r"hidden_states: got \[2, 65\]"):
            layer.forward(torch.zeros(2, 65), ids, weights, MOST)
        compared(layer, experts, 0)


def test_what_does_not_fit_is_refused(run_ranks: Ranks, transport: str) -> None:
    run_ranks(refusals, 2, transport)
