"""Several ranks of one process on one GPU, a stream each, on an ordinary CUDA tensor: the kernels without the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch
from exchange_case import Case, Round, assert_equal, assert_receipt
from torch import Tensor

from a2a import reference
from a2a.config import ExchangeConfig
from a2a.layout import WorkspaceLayout, align
from a2a.nvlink.params import control_regions
from a2a.nvlink.tuning import Point, Tuning
from a2a.quant import ScaleLayout, swizzle_scales, wire_format
from a2a.reference import RankInput, RankReceipt
from a2a.transport import CombineCall, DispatchCall, Payload, Quantize

REGIMES: Final = ("small", "bulk", "push")
"""push: dispatch in bulk, combine rows pushed where their width allows it."""
GLOBAL_SCALE: Final = 1.7
_ANY: Final = 1 << 20


def with_pushes(tuning: Tuning, ep_size: int, pushes: bool) -> Tuning:
    """The table, made to push combine rows of all large rounds that can, or of none."""
    points = [point for point in tuning.points if point.regime != "push"]
    if pushes:
        # Nothing is farther than another number of ranks.
        points = [
            dataclasses.replace(point, ep_size=_ANY) if (point.phase, point.regime) == ("combine", "bulk") else point
            for point in points
        ]
        points.append(
            Point(phase="combine", rows="copied", ep_size=ep_size, row_bytes=1024, tokens=64, regime="push",
                  threads=256, push_warps=3, unit_bytes=512)
        )  # fmt: skip
    return Tuning(tuning.name, tuning.source, tuple(points))


class Ranks:
    """`case.ep_size` ranks on one poisoned workspace tensor.

    Args:
        case: shape of the rounds.
        wire: format that dispatch makes of the hidden states, or None where they are copied.
        alignment: of its rows.
        timeout_s: deadline of every wait.
    """

    def __init__(self, case: Case, wire: str | None = None, alignment: int = 0, timeout_s: float = 20.0) -> None:
        from a2a.nvlink.exchange import Exchange

        self.case, self.wire, self.alignment = case, wire, alignment
        self.shift = 0
        """Elements by which inputs, expert rows and outputs miss the address that an allocator gives."""
        sizes = case.constructor()
        if wire is not None:
            del sizes["dispatch_dtype_bytes_per_elem"]
            sizes |= {"wire_format": wire, "mx_alignment": alignment}
        self.config = ExchangeConfig(ep_size=case.ep_size, **sizes)
        self.layout = WorkspaceLayout(self.config, control_regions(self.config))
        self.workspace = torch.zeros((case.ep_size, align(self.layout.num_bytes)), dtype=torch.uint8, device="cuda")
        for name in ("dispatch", "combine"):
            region = self.layout.region(name)
            self.workspace[:, region.offset_bytes : region.end_bytes] = 0xFF
        self.streams: list[Any] = [torch.cuda.Stream() for _ in range(case.ep_size)]
        self.global_scale = torch.tensor(GLOBAL_SCALE, device="cuda")
        self.ranks = [
            Exchange(self.workspace, rank, self.config, self.layout, case.placed(), sharers=case.ep_size)
            for rank in range(case.ep_size)
        ]
        for rank in self.ranks:
            rank.set_budgets(timeout_s, timeout_s)

    def take(self, regime: str) -> None:
        """Of the rounds that follow."""
        for rank in self.ranks:
            rank._small_max_tokens = _ANY if regime == "small" else 0
            rank.tune(with_pushes(rank.tuning, self.case.ep_size, regime == "push"))

    def region(self, rank: int, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        region = self.layout.region(name)
        return self.workspace[rank, region.offset_bytes : region.end_bytes].view(dtype)

    def play(
        self,
        round: Round,
        staged: bool,
        output_dtype: torch.dtype | None = None,
        made: tuple[str, ScaleLayout] | None = None,
    ) -> None:
        """One round, every defined byte compared with the oracle; `made`: format and layout of combine's output."""
        inputs = [self.on_wire(each) for each in round.inputs]
        receipts = reference.dispatch(
            inputs,
            self.case.placed(),
            round.runtime_max_tokens_per_rank,
            row_order=self.case.row_order,
            scrub=self.case.scrub,
            ids_payload=self.ids_payload,
        )
        calls = [self.dispatch_call(round, rank, inputs[rank]) for rank in range(self.case.ep_size)]
        torch.cuda.synchronize()
        # Ranks launch in an order of their own each time; none may need another to have been launched first.
        for rank in torch.randperm(self.case.ep_size).tolist():
            self.ranks[rank].dispatch(calls[rank])
        torch.cuda.synchronize()
        self.assert_fine()
        for rank, receipt in enumerate(receipts):
            self.assert_dispatched(rank, round, calls[rank], inputs[rank], receipt)
        self.combine(round, receipts, staged, output_dtype or self.case.dtype, made)

    @property
    def ids_payload(self) -> int:
        return 1 + (self.wire is not None)

    def on_wire(self, given: RankInput) -> RankInput:
        """The same input with its rows as they travel."""
        if self.wire is None:
            return given
        form = wire_format(self.wire)
        scale = torch.tensor(GLOBAL_SCALE) if form.needs_global_scale else None
        data, scales = form.quantize(given.payloads[0], alignment=self.alignment, global_scale=scale)
        assert scales is not None
        return RankInput(given.topk_ids, [data, scales, *given.payloads[1:]], given.eplb_local_stats)

    def dispatch_call(self, round: Round, rank: int, on_wire: RankInput) -> DispatchCall:
        given = round.inputs[rank]
        ids = self.shifted(given.topk_ids)
        widths = [each.shape[1] * each.dtype.itemsize for each in on_wire.payloads]
        rows: list[Tensor | None] = [ids if each is given.topk_ids else self.shifted(each) for each in given.payloads]
        quantize = None
        if self.wire is not None:
            rows[1:1] = [None]
            form = wire_format(self.wire)
            quantize = Quantize(form, self.alignment, self.global_scale if form.needs_global_scale else None)
        fill = 0 if self.case.scrub == "all" else None
        offsets = self.layout.payload_offsets(widths)
        stats = given.eplb_local_stats
        return DispatchCall(
            context=0,
            round=1,
            topk_ids=ids,
            payloads=tuple(Payload(*each, fill) for each in zip(widths, offsets, strict=True)),
            rows=tuple(rows),
            runtime_max_tokens_per_rank=round.runtime_max_tokens_per_rank,
            ids_payload=None if self.case.scrub is None else self.ids_payload,
            invalid_id=-1,
            quantize=quantize,
            eplb_local_stats=None if stats is None else stats.cuda(),
            timeout_s=20.0,
            stream=self.streams[rank],
            num_sms=None,
            enable_pdl=None,
        )

    def shifted(self, rows: Tensor) -> Tensor:
        """The same on the GPU, contiguous, `shift` elements behind an aligned address."""
        memory = torch.empty(rows.numel() + self.shift, dtype=rows.dtype, device="cuda")
        return memory[self.shift :].view(rows.shape).copy_(rows)

    def assert_fine(self) -> None:
        for rank, each in enumerate(self.ranks):
            words = each.words[0]
            facts = {name: getattr(words, name) for name, _ in words._fields_}
            assert not words.recorded, f"rank {rank}: {facts}"

    def assert_dispatched(
        self, rank: int, round: Round, call: DispatchCall, given: RankInput, receipt: RankReceipt
    ) -> None:
        ep, most = self.case.ep_size, round.runtime_max_tokens_per_rank
        views = []
        for payload, rows in zip(call.payloads, given.payloads, strict=True):
            raw = self.workspace[rank, payload.offset_bytes : payload.offset_bytes + ep * most * payload.row_bytes]
            views.append(raw.view(rows.dtype).view(ep, most, -1))
        assert_receipt(receipt, views)
        n, k = call.topk_ids.shape
        assert_equal("recv_counts", self.region(rank, "recv_counts")[:ep], receipt.recv_counts)
        assert_equal("send_counts", self.region(rank, "send_counts")[:ep], receipt.send_counts)
        for name in ("topk_target_ranks", "topk_send_indices"):
            assert_equal(name, self.region(rank, name)[: n * k].view(n, k), getattr(receipt, name))
        if receipt.eplb_gathered_stats is not None:
            got = self.region(rank, "eplb_gathered_stats")[: ep * self.case.eplb].view(ep, -1)
            assert_equal("eplb_gathered_stats", got, receipt.eplb_gathered_stats)

    def combine(
        self,
        round: Round,
        receipts: Sequence[RankReceipt],
        staged: bool,
        dtype: torch.dtype,
        made: tuple[str, ScaleLayout] | None,
    ) -> None:
        case, most = self.case, round.runtime_max_tokens_per_rank
        rows = [self.expert_rows(receipt) for receipt in receipts]
        ids = [each.topk_ids for each in round.inputs]
        sums = reference.combine(ids, rows, case.placed(), row_order=case.row_order, output_dtype=dtype)
        how: Quantize | None = None
        wanted: list[tuple[Tensor, Tensor | None]] = [(each, None) for each in sums]
        if made is not None:
            form = wire_format(made[0])
            how = Quantize(form, 0, self.global_scale if form.needs_global_scale else None)
            scale = torch.tensor(GLOBAL_SCALE) if form.needs_global_scale else None
            quantized = [form.quantize(each, global_scale=scale) for each in sums]
            wanted = [
                (data, swizzle_scales(form.need_scales(scales).view(torch.uint8), made[1]))
                for data, scales in quantized
            ]
        calls = []
        for rank in range(case.ep_size):
            payload = self.shifted(rows[rank])
            if not staged:
                area = self.region(rank, "combine", case.dtype)[: payload.numel()].view(payload.shape)
                area.copy_(payload)
                payload = area
            output, scales = wanted[rank]
            calls.append(
                CombineCall(
                    context=0,
                    round=1,
                    attempt=1,
                    payload=payload,
                    payload_in_workspace=not staged,
                    runtime_max_tokens_per_rank=most,
                    num_tokens=sums[rank].shape[0],
                    low_precision=False,
                    output=self.shifted(_poison(output)),
                    output_quantize=how,
                    output_scales=None if scales is None else self.shifted(_poison(scales)),
                    scale_layout=ScaleLayout.LINEAR if made is None else made[1],
                    timeout_s=20.0,
                    stream=self.streams[rank],
                    num_sms=None,
                    enable_pdl=None,
                )
            )
        torch.cuda.synchronize()
        for rank in torch.randperm(case.ep_size).tolist():
            self.ranks[rank].combine(calls[rank])
        torch.cuda.synchronize()
        self.assert_fine()
        for rank in range(case.ep_size):
            output, scales = wanted[rank]
            assert_equal(f"rank {rank}: output", calls[rank].output, output)
            if scales is not None:
                assert_equal(f"rank {rank}: scales", calls[rank].output_scales, scales)

    def expert_rows(self, receipt: RankReceipt) -> Tensor:
        """`[ep, R, H]`: what a rank gives back; NaN where it holds no row, so that a stray read shows."""
        generator = torch.Generator().manual_seed(int(receipt.recv_counts.sum()))
        rows = torch.randn((*receipt.valid.shape, self.case.hidden_size), generator=generator).to(self.case.dtype)
        rows[~receipt.valid] = float("nan")
        return rows


def _poison(like: Tensor) -> Tensor:
    """Of the same shape and dtype, with bytes that nobody wants."""
    return torch.full((like.numel() * like.dtype.itemsize,), 0xAA, dtype=torch.uint8).view(like.dtype).view(like.shape)
