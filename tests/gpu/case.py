"""A random exchange, what the oracle makes of it, and the comparison with what ranks got."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from a2a import reference
from a2a.placement import Placement
from a2a.reference import RankInput, RankReceipt


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

    def constructor(self) -> dict[str, object]:
        """Keywords of `MoeAlltoAll`."""
        return {
            "max_num_tokens": self.max_num_tokens,
            "top_k": self.top_k,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "dispatch_dtype_bytes_per_elem": self.dtype.itemsize,
            "combine_dtype_bytes_per_elem": self.dtype.itemsize,
            "extra_payload_bytes_per_token": sum(self.more_row_bytes)
            + (4 * self.top_k if self.id_dtype == torch.int64 else 0),
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

    IDS_PAYLOAD = 1

    def receipts(self) -> list[RankReceipt]:
        return reference.dispatch(
            self.inputs,
            self.case.placed(),
            self.runtime_max_tokens_per_rank,
            row_order=self.case.row_order,
            scrub=self.case.scrub,
            ids_payload=self.IDS_PAYLOAD,
        )

    def expert_rows(self, rank: int, receipts: Sequence[RankReceipt]) -> Tensor:
        """`[ep, R, H]`: what a rank gives back; NaN where it holds no row, so that a stray read shows."""
        rows = receipts[rank].payloads[0].float() * (1 + 0.25 * rank)
        rows[~receipts[rank].valid] = float("nan")
        return rows.to(self.case.dtype)

    def sums(self, receipts: Sequence[RankReceipt]) -> list[Tensor]:
        rows = [self.expert_rows(rank, receipts) for rank in range(self.case.ep_size)]
        ids = [each.topk_ids for each in self.inputs]
        return reference.combine(ids, rows, self.case.placed(), row_order=self.case.row_order)


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


def assert_receipt(wanted: RankReceipt, views: Sequence[Tensor], scrubbed_only: bool = False) -> None:
    """Compare every row that is defined, bit for bit."""
    for index, (view, block) in enumerate(zip(views, wanted.payloads, strict=True)):
        got = view.cpu()
        assert got.dtype == block.dtype and got.shape == block.shape, f"payload {index}: {got.dtype} {got.shape}"
        defined = torch.ones_like(wanted.valid) if wanted.scrubbed[index] else wanted.valid
        same = (as_bytes(got) == as_bytes(block)).flatten(2).all(2) | ~defined
        assert same.all(), f"payload {index}: wrong rows at (source, slot) {(~same).nonzero()[:8].tolist()}"


def assert_equal(what: str, got: Tensor, wanted: Tensor) -> None:
    got = got.cpu()
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: {got.dtype} {tuple(got.shape)}"
    if not torch.equal(as_bytes(got), as_bytes(wanted)):
        differing = (as_bytes(got) != as_bytes(wanted)).nonzero()[:8].tolist()
        raise AssertionError(f"{what}: differs at bytes {differing}: got {got}, wanted {wanted}")


def as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous()
    return flat.view(torch.uint8) if flat.dim() else flat.reshape(1).view(torch.uint8)
