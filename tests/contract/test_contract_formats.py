"""Wire formats through the exchange: bit-equal to quantising first and dispatching the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_case import assert_equal, assert_receipt
from ranks import Ranks

import a2a
from a2a import ScaleLayout, reference
from a2a.comm import Comm
from a2a.config import LOW_PRECISION_BLOCK
from a2a.errors import ConfigError, ShapeError
from a2a.quant import WIRE_FORMATS, swizzle_scales, wire_format
from a2a.reference import RankInput

COUNTS = (5, 0, 9)
MOST, TOP_K, EXPERTS = 9, 3, 7


def inputs(ep_size: int, hidden: int, dtype: torch.dtype, seed: int) -> list[tuple[torch.Tensor, ...]]:
    drawn = []
    for rank in range(ep_size):
        generator = torch.Generator().manual_seed(31 * seed + rank)
        n = COUNTS[rank % len(COUNTS)]
        rows = (torch.randn((n, hidden), generator=generator) * 3).to(dtype)
        rows[:1, :32] = 0
        ids = torch.randint(-1, EXPERTS + 1, (n, TOP_K), generator=generator, dtype=torch.int32)
        drawn.append((rows, ids, torch.rand((n, TOP_K), generator=generator)))
    return drawn


def tokens(comm: Comm, transport: str, name: str, row_order: str, hidden: int, alignment: int) -> None:
    rank, ep = comm.Get_rank(), comm.Get_size()
    wire = wire_format(name)
    built: dict[str, Any] = {
        "max_num_tokens": MOST,
        "top_k": TOP_K,
        "num_experts": EXPERTS,
        "hidden_size": hidden,
        "wire_format": name,
        "mx_alignment": alignment,
        "row_order": row_order,
        "scrub": "all",
    }
    with a2a.MoeAlltoAll(**built, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            if wire.scales_dtype is None and dtype != wire.data_dtype:
                continue
            scale = torch.tensor(0.5 + seed) if wire.needs_global_scale and seed else None
            drawn = inputs(ep, hidden, dtype, seed)
            quantised = [wire.quantize(rows, alignment=alignment, global_scale=scale) for rows, _, _ in drawn]
            ranks = [
                RankInput(ids, [data, *([] if scales is None else [scales]), ids, weights])
                for (data, scales), (_, ids, weights) in zip(quantised, drawn, strict=True)
            ]
            has_scales = wire.scales_dtype is not None
            fills = [0, *([wire.neutral_scale_byte] if has_scales else []), 0, 0]
            wanted = reference.dispatch(
                ranks,
                moe.placement,
                MOST,
                row_order=row_order,
                scrub="all",
                ids_payload=1 + has_scales,
                fill_bytes=fills,
            )[rank]
            rows, ids, weights = (each.to(device) for each in drawn[rank])
            layouts = [ScaleLayout.LINEAR]
            if has_scales and wire.scales_dtype.itemsize == 1:
                layouts += [ScaleLayout.SWIZZLED_128X4, ScaleLayout.SWIZZLED_8X4]
            for layout in layouts:
                moe._region("dispatch").fill_(0xFF)
                got = moe.dispatch_tokens(
                    rows,
                    ids,
                    weights,
                    runtime_max_tokens_per_rank=MOST,
                    global_scale=None if scale is None else scale.to(device),
                    scale_layout=layout,
                )
                views = [got.hidden_states, *([] if got.scales is None else [got.scales]), got.topk_ids]
                if layout is ScaleLayout.LINEAR:
                    assert_receipt(wanted, [*views, got.topk_weights])
                else:
                    linear = wanted.payloads[1].view(torch.uint8).flatten(0, 1)
                    assert_equal("swizzled scales", got.scales.view(torch.uint8), swizzle_scales(linear, layout))
                assert_equal("recv_counts", got.recv_counts, wanted.recv_counts)
                moe.combine(torch.zeros(ep, MOST, hidden, dtype=torch.bfloat16, device=device), MOST)
            if has_scales:
                data, scales = (each.to(device) for each in quantised[rank])
                got = moe.dispatch_tokens(data, ids.long(), weights, runtime_max_tokens_per_rank=MOST, scale=scales)
                assert_receipt(wanted, [got.hidden_states, got.scales, got.topk_ids, got.topk_weights])
                moe.combine(torch.zeros(ep, MOST, hidden, dtype=torch.bfloat16, device=device), MOST)


def narrower(comm: Comm, transport: str, name: str) -> None:
    """Rows narrower than the object was built for, as a second layer that shares it has them."""
    rank, ep, built, hidden = comm.Get_rank(), comm.Get_size(), 256, 128
    wire = wire_format(name)
    with a2a.MoeAlltoAll(
        max_num_tokens=MOST,
        top_k=TOP_K,
        num_experts=EXPERTS,
        hidden_size=built,
        wire_format=name,
        comm=comm,
        transport=transport,
    ) as moe:
        device = moe.workspace.device
        drawn = inputs(ep, hidden, torch.float16 if name == "fp16" else torch.bfloat16, 3)
        ranks = []
        for rows, ids, weights in drawn:
            data, scales = wire.quantize(rows)
            ranks.append(RankInput(ids, [data, *([] if scales is None else [scales]), ids, weights]))
        wanted = reference.dispatch(ranks, moe.placement, MOST, ids_payload=len(ranks[0].payloads) - 2)[rank]
        rows, ids, weights = (each.to(device) for each in drawn[rank])
        got = moe.dispatch_tokens(rows, ids, weights, runtime_max_tokens_per_rank=MOST)
        scales = [] if got.scales is None else [got.scales]
        assert_receipt(wanted, [got.hidden_states, *scales, got.topk_ids, got.topk_weights])
        moe.combine(torch.zeros(ep, MOST, hidden, dtype=torch.bfloat16, device=device), MOST)
        if got.scales is not None:
            with pytest.raises(ConfigError, match="ScaleLayout"):
                moe.dispatch_tokens(rows, ids, weights, runtime_max_tokens_per_rank=MOST, scale_layout="linear")
        for width in (0, built + 128):
            bad = torch.zeros(rows.shape[0], width, dtype=rows.dtype, device=device)
            with pytest.raises(ShapeError, match="hidden_states"):
                moe.dispatch_tokens(bad, ids, weights, runtime_max_tokens_per_rank=MOST)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_block", "mxfp8", "nvfp4", "mxfp4"])
def test_narrower_rows_than_built_for(run_ranks: Ranks, transport: str, name: str) -> None:
    run_ranks(narrower, 3, transport, name)


@pytest.mark.parametrize("row_order", ["compact", "token"])
@pytest.mark.parametrize(
    ("name", "hidden", "alignment"),
    [
        ("bf16", 40, 0),
        ("fp16", 40, 0),
        ("fp8_block", 256, 0),
        ("mxfp8", 160, 128),
        ("mxfp8", 64, 0),
        ("mxfp8", 2880, 256),
        ("nvfp4", 96, 0),
        ("mxfp4", 96, 0),
    ],
)
def test_quantised_inside_equals_quantised_before(
    run_ranks: Ranks, transport: str, name: str, row_order: str, hidden: int, alignment: int
) -> None:
    assert name in WIRE_FORMATS
    run_ranks(tokens, 3, transport, name, row_order, hidden, alignment)


def outputs(comm: Comm, transport: str) -> None:
    rank, ep, hidden = comm.Get_rank(), comm.Get_size(), 64
    with a2a.MoeAlltoAll(
        max_num_tokens=MOST, top_k=TOP_K, num_experts=EXPERTS, hidden_size=hidden, comm=comm, transport=transport
    ) as moe:
        device = moe.workspace.device
        drawn = inputs(ep, hidden, torch.bfloat16, 5)
        ids = [each[1] for each in drawn]
        payloads = [
            torch.randn((ep, MOST, hidden), generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ep)
        ]
        sums = reference.combine(ids, payloads, moe.placement)[rank]
        n = sums.shape[0]
        for name, dtype, scalar in (
            ("mxfp8", torch.float8_e4m3fn, 1.0),
            ("mxfp4", torch.uint8, 1.0),
            ("nvfp4", torch.uint8, 1.0),
            ("nvfp4", torch.uint8, 0.25),
        ):
            wire = wire_format(name)
            scale = torch.tensor(scalar) if wire.needs_global_scale else None
            data, scales = wire.quantize(sums, global_scale=scale)
            for layout in ScaleLayout:
                moe.dispatch(ids[rank].to(device), [ids[rank].to(device)], MOST)
                shape = layout.shape(n, wire.scales_width(hidden))
                made = torch.empty(shape, dtype=wire.scales_dtype, device=device)
                got = moe.combine(
                    payloads[rank].to(device),
                    MOST,
                    output_dtype=dtype,
                    output_scales=made,
                    output_scalar_scale=scalar,
                    sf_layout=layout,
                )
                assert_equal(f"{name} output", got.view(torch.uint8), data.view(torch.uint8))
                arranged = swizzle_scales(scales.view(torch.uint8), layout)
                assert_equal(f"{name} {layout} scales", made.view(torch.uint8), arranged.reshape(shape))
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            moe.dispatch(ids[rank].to(device), [ids[rank].to(device)], MOST)
            got = moe.combine(payloads[rank].to(device), MOST, output_dtype=dtype)
            wanted = reference.combine(ids, payloads, moe.placement, output_dtype=dtype)[rank]
            assert_equal(f"{dtype} output", got, wanted)


def test_quantised_output_is_the_rounded_sum_quantised(run_ranks: Ranks, transport: str) -> None:
    run_ranks(outputs, 3, transport)


def low_precision(comm: Comm, transport: str, hidden: int, row_order: str) -> None:
    rank, ep = comm.Get_rank(), comm.Get_size()
    with a2a.MoeAlltoAll(
        max_num_tokens=MOST,
        top_k=TOP_K,
        num_experts=EXPERTS,
        hidden_size=hidden,
        row_order=row_order,
        comm=comm,
        transport=transport,
    ) as moe:
        device = moe.workspace.device
        drawn = inputs(ep, hidden, torch.bfloat16, 6)
        ids = [each[1] for each in drawn]
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            payloads = [
                torch.randn((ep, MOST, hidden), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ep)
            ]
            wanted = reference.combine(ids, payloads, moe.placement, row_order=row_order, low_precision=True)[rank]
            for place in ("combine area", "dispatch area", "memory of its own"):
                sent = [ids[rank].to(device), payloads[rank][0, : len(ids[rank])].to(device)]
                views = moe.dispatch(sent[0], sent, MOST)
                payload = payloads[rank].to(device)
                if place == "combine area":
                    payload = moe.get_combine_payload_tensor_in_workspace(MOST, hidden, dtype).copy_(payload)
                if place == "dispatch area":
                    payload = views[1].copy_(payload)
                got = moe.combine(payload, MOST, payload_in_workspace=place == "combine area", use_low_precision=True)
                assert_equal(f"low precision {dtype}, {place}", got, wanted)
            if dtype == torch.bfloat16:
                _within_stated_error(ids, payloads, moe, wanted, row_order)


def _within_stated_error(
    ids: list[torch.Tensor], payloads: list[torch.Tensor], moe: a2a.MoeAlltoAll, wanted: torch.Tensor, row_order: str
) -> None:
    """Each element of a row: half a unit of a 3-bit mantissa, or of the smallest step, of its block's largest."""
    rank = moe.ep_rank
    exact = reference.combine(ids, payloads, moe.placement, row_order=row_order, output_dtype=torch.float32)[rank]
    bounds = []
    for each in payloads:
        padded = torch.nn.functional.pad(each.float().abs(), (0, -each.shape[-1] % LOW_PRECISION_BLOCK))
        largest = padded.unflatten(-1, (-1, LOW_PRECISION_BLOCK)).amax(-1)
        largest = largest.repeat_interleave(LOW_PRECISION_BLOCK, -1)[..., : each.shape[-1]]
        bounds.append(each.float().abs() * 2**-4 + largest * 2**-10 / 448)
    bound = reference.combine(ids, bounds, moe.placement, row_order=row_order)[rank]
    # One more rounding to bf16 on the way out.
    slack = bound * (1 + 2**-7) + exact.abs() * 2**-8 + 1e-30
    assert ((wanted.float() - exact).abs() <= slack).all()


@pytest.mark.parametrize("row_order", ["compact", "token"])
@pytest.mark.parametrize("hidden", [256, 200])
def test_low_precision_combine(run_ranks: Ranks, transport: str, hidden: int, row_order: str) -> None:
    run_ranks(low_precision, 3, transport, hidden, row_order)
