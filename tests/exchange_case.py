"""A random exchange, what the oracle makes of it, and the comparison with what ranks got."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import a2a
from a2a import reference
from a2a.placement import Placement
from a2a.reference import RankInput, RankReceipt

IDS_PAYLOAD = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shape of an exchange; `draw` makes one round of it."""

    ep_size: int
    max_num_tokens: int = 16
    top_k: int = 4
    num_experts: int = 16
    hidden_size: int = 64
    row_order: str = "compact"
    scrub: str | None = "ids"
    more_row_bytes: tuple[int, ...] = ()
    """Widths of byte payloads beyond hidden states, ids and weights."""
    id_dtype: torch.dtype = torch.int32
    dtype: torch.dtype = torch.bfloat16
    eplb: int = 0
    placement: tuple[int, ...] | None = None

    def placed(self) -> Placement:
        if self.placement is None:
            return Placement.contiguous(self.num_experts, self.ep_size)
        return Placement(self.placement, self.ep_size)

    def constructor(self) -> dict[str, Any]:
        """Keywords of `MoeAlltoAll`."""
        wide_ids = 4 * self.top_k if self.id_dtype == torch.int64 else 0
        return {
            "max_num_tokens": self.max_num_tokens,
            "top_k": self.top_k,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "dispatch_dtype_bytes_per_elem": self.dtype.itemsize,
            "combine_dtype_bytes_per_elem": self.dtype.itemsize,
            "extra_payload_bytes_per_token": sum(self.more_row_bytes) + wide_ids,
            "row_order": self.row_order,
            "scrub": self.scrub,
            "eplb_stats_num_experts": self.eplb,
            "placement": self.placement,
        }


@dataclasses.dataclass(frozen=True)
class Round:
    """Inputs of all ranks on the CPU; equal on every rank that draws with the same seed."""

    case: Case
    runtime_max_tokens_per_rank: int
    inputs: Sequence[RankInput]

    def receipts(self, active_ranks: Sequence[int] | None = None, invalid_id: int = -1) -> list[RankReceipt]:
        return reference.dispatch(
            self.inputs,
            self.case.placed(),
            self.runtime_max_tokens_per_rank,
            row_order=self.case.row_order,
            scrub=self.case.scrub,
            ids_payload=IDS_PAYLOAD,
            invalid_id=invalid_id,
            active_ranks=active_ranks,
        )

    def expert_rows(self, rank: int, receipts: Sequence[RankReceipt]) -> Tensor:
        """`[ep, R, H]`: what a rank gives back; NaN where it holds no row, so that a stray read shows."""
        rows = receipts[rank].payloads[0].float() * (1 + 0.25 * rank)
        rows[~receipts[rank].valid] = float("nan")
        return rows.to(self.case.dtype)

    def sums(self, receipts: Sequence[RankReceipt], active_ranks: Sequence[int] | None = None) -> list[Tensor]:
        rows = [self.expert_rows(rank, receipts) for rank in range(self.case.ep_size)]
        ids = [each.topk_ids for each in self.inputs]
        return reference.combine(
            ids, rows, self.case.placed(), row_order=self.case.row_order, active_ranks=active_ranks
        )


def draw(case: Case, seed: int, counts: Sequence[int] | None = None, most: int | None = None) -> Round:
    """One round with random token counts (unless given), ids (some beyond the experts or negative) and rows."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    if most is None:
        most = max(counts) if counts is not None else integer(1, case.max_num_tokens)
        most = max(1, most)
    if counts is None:
        counts = [0 if integer(0, 4) == 0 else integer(0, most) for _ in range(case.ep_size)]
    inputs = []
    for n in counts:
        ids = torch.randint(-1, case.num_experts + 1, (n, case.top_k), generator=generator)
        if integer(0, 3) == 0:
            ids[:, : case.top_k // 2] = ids[:, :1]
        rows = torch.randn((n, case.hidden_size), generator=generator).to(case.dtype)
        weights = torch.rand((n, case.top_k), generator=generator)
        more = [
            torch.randint(0, 256, (n, width), dtype=torch.uint8, generator=generator) for width in case.more_row_bytes
        ]
        stats = torch.randint(0, 99, (case.eplb,), dtype=torch.int32, generator=generator) if case.eplb else None
        ids = ids.to(case.id_dtype)
        inputs.append(RankInput(ids, [rows, ids, weights, *more], stats))
    return Round(case, most, inputs)


def play(moe: Any, drawn: Round, *, poison: bool = True, in_workspace: bool = True, **keywords: Any) -> None:
    """One round of this rank, from poisoned memory, compared with the oracle in every defined byte.

    Args:
        moe: a `MoeAlltoAll` or one of its contexts.
        drawn: the round, equal on all ranks.
        poison: fill this rank's areas with 0xFF first.
        in_workspace: experts write into the combine view; else the payload is a tensor of their own.
        **keywords: further arguments of dispatch.
    """
    rank, device = moe.ep_rank, moe._region("dispatch").device
    receipts = drawn.receipts(invalid_id=keywords.get("invalid_token_expert_id", -1))
    wanted, mine = receipts[rank], drawn.inputs[rank]
    if device.type == "cuda":
        # There a peer that is ahead may write without asking: all ranks poison between two rounds, or none does.
        poison = poison and isinstance(moe, a2a.MoeAlltoAll)
    if poison:
        _area(moe, "dispatch").fill_(0xFF)
        if device.type == "cuda":
            torch.cuda.synchronize()
            moe._comm.barrier()
    ids = mine.topk_ids.to(device)
    rows = [ids if each is mine.topk_ids else each.to(device) for each in mine.payloads]
    kept = [each.clone() for each in rows]
    stats = None if mine.eplb_local_stats is None else mine.eplb_local_stats.to(device)
    most = drawn.runtime_max_tokens_per_rank
    views = moe.dispatch(ids, rows, most, eplb_local_stats=stats, **keywords)
    assert_receipt(wanted, views)
    for before, after in zip(kept, rows, strict=True):
        assert_equal("an input after dispatch", after, before.cpu())
    assert_equal("recv_counts", moe.recv_counts, wanted.recv_counts)
    assert_equal("send_counts", moe.send_counts, wanted.send_counts)
    assert_equal("topk_target_ranks", moe.topk_target_ranks, wanted.topk_target_ranks)
    assert_equal("topk_send_indices", moe.topk_send_indices, wanted.topk_send_indices)
    if wanted.eplb_gathered_stats is not None:
        assert moe.eplb_gathered_stats is not None
        assert_equal("eplb_gathered_stats", moe.eplb_gathered_stats, wanted.eplb_gathered_stats)
    if poison:
        # Every peer has entered this round, so nobody reads the last round's combine rows any more.
        _area(moe, "combine").fill_(0xFF)
    made = drawn.expert_rows(rank, receipts).to(device)
    if in_workspace:
        payload = moe.get_combine_payload_tensor_in_workspace(most, made.shape[2], made.dtype)
        payload.copy_(made)
    else:
        payload = made
    combined = moe.combine(payload, most, payload_in_workspace=in_workspace)
    assert_equal("combined", combined, drawn.sums(receipts)[rank])


def _area(moe: Any, name: str) -> Tensor:
    area: Tensor = moe._region(name)
    return area


def assert_receipt(wanted: RankReceipt, views: Sequence[Tensor]) -> None:
    """Compare every row that is defined, bit for bit."""
    for index, (view, block) in enumerate(zip(views, wanted.payloads, strict=True)):
        got = view.cpu()
        assert got.dtype == block.dtype and got.shape == block.shape, f"payload {index}: {got.dtype} {got.shape}"
        assert view.is_contiguous()
        defined = torch.ones_like(wanted.valid) if wanted.scrubbed[index] else wanted.valid
        same = (as_bytes(got) == as_bytes(block)).flatten(2).all(2) | ~defined
        assert same.all(), f"payload {index}: wrong rows at (source, slot) {(~same).nonzero()[:8].tolist()}"


def assert_equal(what: str, got: Tensor, wanted: Tensor) -> None:
    got, wanted = got.cpu(), wanted.cpu()
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: {got.dtype} {tuple(got.shape)}"
    if not torch.equal(as_bytes(got), as_bytes(wanted)):
        differing = (as_bytes(got) != as_bytes(wanted)).nonzero()[:8].tolist()
        raise AssertionError(f"{what}: differs at bytes {differing}: got {got}, wanted {wanted}")


def as_bytes(tensor: Tensor) -> Tensor:
    # A last dimension of one or no element may carry any stride and still count as contiguous.
    return tensor.clone(memory_format=torch.contiguous_format).unsqueeze(-1).view(torch.uint8).flatten(-2)
