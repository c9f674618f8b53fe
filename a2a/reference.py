"""reference: the dense oracle in plain torch: the specification all transports are compared with.

Owns what a round means: from all ranks' inputs to all ranks' receive blocks, counts, tables and combined rows. Refuses
to know processes, memory and transports; slow and obvious on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from a2a.config import LOW_PRECISION_BLOCK
from a2a.placement import Placement
from a2a.quant import dequantize_blocks, quantize_blocks


@dataclasses.dataclass(frozen=True)
class RankInput:
    """What one rank passes to a dispatch.

    Attributes:
        topk_ids: int32 or int64 `[n, k]` global expert ids.
        payloads: `[n, *]` each, already in their wire form.
        eplb_local_stats: int32 `[Es]` or None.
    """

    topk_ids: Tensor
    payloads: Sequence[Tensor]
    eplb_local_stats: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class RankReceipt:
    """What one rank holds after a dispatch.

    Attributes:
        payloads: `[ep, R, *]` each, the dtype of the input; rows outside `valid` are zero unless `scrubbed` names them.
        valid: bool `[ep, R]`, the slots that hold a row.
        scrubbed: per payload, whether its padded rows are defined too.
        recv_counts, send_counts: int32 `[ep]`.
        topk_target_ranks, topk_send_indices: int32 `[n, k]`.
        eplb_gathered_stats: int32 `[ep, Es]`, or None.
    """

    payloads: Sequence[Tensor]
    valid: Tensor
    scrubbed: Sequence[bool]
    recv_counts: Tensor
    send_counts: Tensor
    topk_target_ranks: Tensor
    topk_send_indices: Tensor
    eplb_gathered_stats: Tensor | None


def destinations(
    topk_ids: Tensor, placement: Placement, active_ranks: Collection[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Where the picks of a rank go.

    Args:
        topk_ids: `[n, k]`.
        placement: who holds which expert.
        active_ranks: ranks that take part; None for all.

    Returns:
        int64 `[n, k]` rank of each pick, -1 for one that goes nowhere; bool `[n, ep]`, whether a token has a pick at
        a rank.
    """
    owners = placement.owners(topk_ids.cpu())
    if active_ranks is not None:
        for rank in range(placement.ep_size):
            if rank not in active_ranks:
                owners = torch.where(owners == rank, -1, owners)
    hits = torch.stack([(owners == rank).any(1) for rank in range(placement.ep_size)], dim=1)
    return owners, hits


def dispatch(
    inputs: Sequence[RankInput],
    placement: Placement,
    runtime_max_tokens_per_rank: int,
    *,
    row_order: str = "compact",
    scrub: str | None = "ids",
    ids_payload: int | None = None,
    invalid_id: int = -1,
    fill_bytes: Sequence[int] | None = None,
    active_ranks: Collection[int] | None = None,
) -> list[RankReceipt]:
    """What every rank receives.

    Args:
        inputs: of all ranks, by rank.
        placement: who holds which expert.
        runtime_max_tokens_per_rank: rows of a block.
        row_order: "compact": row `j` of block `s` is the j-th token of `s` with a pick here; "token": it is token `j`.
        scrub: "ids", "all" or None.
        ids_payload: which payload's padded rows become `invalid_id`; None for none.
        invalid_id: the value.
        fill_bytes: per payload, the byte that padded rows are made of with `scrub="all"`; None for 0.
        active_ranks: ranks that take part; None for all. Receipts of others are those of a rank nobody sends to.

    Returns:
        One receipt per rank, on the CPU.
    """
    ep = placement.ep_size
    routes = [destinations(each.topk_ids, placement, active_ranks) for each in inputs]
    takes_part = [active_ranks is None or rank in active_ranks for rank in range(ep)]
    slots = [_slots(hits, row_order) for _, hits in routes]
    receipts = []
    for dst in range(ep):
        rows = runtime_max_tokens_per_rank
        like = inputs[dst].payloads
        blocks = [torch.zeros((ep, rows, *payload.shape[1:]), dtype=payload.dtype) for payload in like]
        valid = torch.zeros(ep, rows, dtype=torch.bool)
        for src in range(ep):
            if not takes_part[src]:
                continue
            tokens = routes[src][1][:, dst].nonzero().flatten()
            where = slots[src][tokens, dst]
            valid[src, where] = True
            for block, payload in zip(blocks, inputs[src].payloads, strict=True):
                rows_of_src = payload.cpu().clone(memory_format=torch.contiguous_format)
                _as_bytes(block)[src, where] = _as_bytes(rows_of_src)[tokens]
        scrubbed = []
        for index, block in enumerate(blocks):
            fill = 0 if fill_bytes is None else fill_bytes[index]
            if scrub is not None and index == ids_payload:
                block[~valid] = invalid_id
            elif scrub == "all":
                _as_bytes(block)[~valid] = fill
            scrubbed.append(scrub == "all" or (scrub == "ids" and index == ids_payload))
        owners, hits = routes[dst]
        first = _first_picks(owners)
        stats = [each.eplb_local_stats for each in inputs]
        receipts.append(
            RankReceipt(
                payloads=blocks,
                valid=valid,
                scrubbed=scrubbed,
                recv_counts=valid.sum(1, dtype=torch.int32),
                send_counts=hits.sum(0, dtype=torch.int32),
                topk_target_ranks=torch.where(first, owners, -1).int(),
                topk_send_indices=torch.where(first, slots[dst].gather(1, owners.clamp(min=0)), -1).int(),
                eplb_gathered_stats=torch.stack([each.cpu() for each in stats if each is not None])
                if stats[0] is not None
                else None,
            )
        )
    return receipts


def combine(
    topk_ids: Sequence[Tensor],
    payloads: Sequence[Tensor],
    placement: Placement,
    *,
    row_order: str = "compact",
    output_dtype: torch.dtype | None = None,
    low_precision: bool = False,
    active_ranks: Collection[int] | None = None,
) -> list[Tensor]:
    """What every rank gets back: per token the sum over its distinct destination ranks, in ascending rank.

    Sums start at +0 in fp32 and are rounded once, to nearest, ties to even.

    Args:
        topk_ids: of all ranks, `[n, k]` each, as dispatched.
        payloads: of all ranks, `[ep, R, H']` each: rank `r`'s block `s` holds the rows for source rank `s`.
        output_dtype: None for the payload's (bf16 with `low_precision`).
        low_precision: rows travel as e4m3 with an fp32 scale per 128 elements (e4m3 payloads as they are).

    Returns:
        `[n, H']` per rank, on the CPU.
    """
    outputs = []
    for src, ids in enumerate(topk_ids):
        _, hits = destinations(ids, placement, active_ranks)
        slots = _slots(hits, row_order)
        total = torch.zeros(ids.shape[0], payloads[src].shape[-1], dtype=torch.float32)
        for dst in range(placement.ep_size):
            tokens = hits[:, dst].nonzero().flatten()
            rows = payloads[dst].cpu()[src, slots[tokens, dst]]
            if low_precision and rows.dtype != torch.float8_e4m3fn:
                rows = dequantize_blocks(*quantize_blocks(rows, LOW_PRECISION_BLOCK), LOW_PRECISION_BLOCK)
            total[tokens] += rows.float()
        dtype = output_dtype or (torch.bfloat16 if low_precision else payloads[src].dtype)
        outputs.append(total.to(dtype))
    return outputs


def _slots(hits: Tensor, row_order: str) -> Tensor:
    """int64 `[n, ep]`, the slot a token takes at a rank; meaningful where `hits`."""
    if row_order == "token":
        return torch.arange(hits.shape[0])[:, None].expand_as(hits)
    return hits.long().cumsum(0) - 1


def _first_picks(owners: Tensor) -> Tensor:
    """bool `[n, k]`, whether a pick is the first of its token on its rank."""
    first = owners >= 0
    for pick in range(owners.shape[1]):
        first[:, pick] &= ~(owners[:, :pick] == owners[:, pick : pick + 1]).any(1)
    return first


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
