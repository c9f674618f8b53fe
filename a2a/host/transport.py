"""host/transport: transport: processes of one machine over shared memory.

Owns the protocol of a round on the CPU: three doorbells per peer, rows written straight into the receiver's workspace,
sums read straight from the peers'. Refuses to know states, argument checks and offsets.

A round of one context:

    dispatch.enter   every rank says what it will send (R, row bytes, mask); all must say the same before any writes.
                     Hearing it also means: that peer's last combine is over, so its rows may be overwritten.
    dispatch.done    this rank's rows, counts and statistics are in the receivers' workspaces.
    combine.ready    this rank's rows are in its own combine area; peers may read them until its next dispatch.enter.

What was stored before a doorbell was rung is seen by who has heard it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from a2a.comm import Comm
from a2a.comm.consent import gather
from a2a.comm.mesh import Mesh, host_identity
from a2a.config import LOW_PRECISION_BLOCK, MAX_PAYLOADS, ExchangeConfig
from a2a.errors import A2AError, MismatchError, from_facts
from a2a.host.bells import (
    DECLINED,
    DONE,
    ENTER,
    PHASES,
    READY,
    Active,
    Said,
    Signal,
    connect,
    control_regions,
    words,
)
from a2a.host.loops import fastest
from a2a.host.memory import drop_pages, shared_workspaces
from a2a.layout import WorkspaceLayout, combine_row_bytes
from a2a.placement import Placement
from a2a.quant import dequantize_blocks, quantize_blocks, swizzle_scales
from a2a.transport import CombineCall, DispatchCall, Transport

_PHASES: Final = {"dispatch": ENTER, "combine": READY}
_PAYLOAD_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Of a combine, as doorbells number them."""

_SUMMED: Final = (torch.bfloat16, torch.float16, torch.float32)
_MAX_KEPT: Final = 64
"""Of each kind of thing made for a round, how many are kept for rounds like it."""

_NOTHING: Final = Said(())

_LOW_PRECISION_CHUNK: Final = 1 << 18
"""Elements dequantised at a time, so that they stay in the second-level cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tables:
    """Views of one context's control regions, made once: a round makes few tensors of its own.

    Attributes:
        targets, indices: int32 `[M * top_k]`, flat space of the two tables of this rank.
        send_counts, recv_counts: int32 `[ep]` of this rank.
        counts_there: int32 `[ep]`, strided: this rank's entry in the recv_counts of each receiver. It lies at the same
            offset of each workspace, so that one store reaches all.
        statistics_there: int32 `[ep, Es]`, likewise, or None.
        valid: uint8 `[ep, M]`, slots of this rank's blocks that hold a row, or None for compact rows.
        valid_there: uint8 `[ep, M]`, strided: this rank's block at each receiver, or None.
        mask: uint64 `[ceil(ep/64)]`, or None.
    """

    targets: Tensor
    indices: Tensor
    send_counts: Tensor
    recv_counts: Tensor
    counts_there: Tensor
    statistics_there: Tensor | None
    valid: Tensor | None
    valid_there: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, workspace: Tensor, layout: WorkspaceLayout, context: int, rank: int) -> _Tables:
        ep = layout.config.ep_size

        def everywhere(name: str, dtype: torch.dtype) -> Tensor:
            region = layout.region(name, context)
            return workspace[:, region.offset_bytes : region.end_bytes].view(dtype)

        statistics = valid = mask = None
        if layout.config.eplb_stats_num_experts:
            statistics = everywhere("eplb_gathered_stats", torch.int32).view(ep, ep, -1)[:, rank]
        if layout.config.row_order == "token":
            valid = everywhere("row_valid", torch.uint8).view(ep, ep, -1)
        if layout.config.enable_rank_mask:
            mask = everywhere("rank_mask", torch.uint64)[rank]
        counts = everywhere("recv_counts", torch.int32)
        return cls(
            targets=everywhere("topk_target_ranks", torch.int32)[rank],
            indices=everywhere("topk_send_indices", torch.int32)[rank],
            send_counts=everywhere("send_counts", torch.int32)[rank],
            recv_counts=counts[rank],
            counts_there=counts[:, rank],
            statistics_there=statistics,
            valid=None if valid is None else valid[rank],
            valid_there=None if valid is None else valid[:, rank],
            mask=mask,
        )


class HostTransport(Transport):
    """Processes of one machine. See the module for the protocol and `Transport` for the interface."""

    name: ClassVar[str] = "host"
    POINTS: ClassVar[tuple[str, ...]] = (
        "dispatch.enter",
        "dispatch.write",
        "dispatch.signal",
        "dispatch.wait",
        "combine.stage",
        "combine.signal",
        "combine.wait",
        "combine.sum",
    )

    @classmethod
    def reasons(cls, config: ExchangeConfig, comm: Comm) -> list[str]:
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            comm.allgather("")
            return ["it needs Linux with memfd_create"]
        hosts = comm.allgather(host_identity())
        if hosts[comm.Get_rank()] != hosts[0]:
            return ["this rank is on another host or in another network namespace than rank 0"]
        return []

    @classmethod
    def control_regions(cls, config: ExchangeConfig) -> Sequence[tuple[str, int]]:
        return control_regions(config.ep_size)

    def __init__(
        self, config: ExchangeConfig, layout: WorkspaceLayout, placement: Placement, comm: Comm, *, timeout_s: float
    ) -> None:
        self._config = config
        self._layout = layout
        self._placement = placement
        self.rank = comm.Get_rank()
        self._mesh = Mesh(comm, PHASES, timeout_s=timeout_s)
        problem: A2AError | None = None
        try:
            self.workspace = shared_workspaces(layout.num_bytes, self._mesh, timeout_s=timeout_s)
        except A2AError as error:
            # Peers that wait for this rank's memory learn of it at once, and all meet again below.
            self._mesh.close()
            problem = error
        try:
            gather(comm, None, problem)
        except A2AError:
            self._mesh.close()
            raise
        self._everyone = Active(range(config.ep_size), self.rank, config.ep_size)
        self._stride = self.workspace.stride(0)
        self._memory = self.workspace.as_strided((config.ep_size * self._stride,), (1,))
        self._slots: dict[int, Tensor] = {}
        self._kept_said: dict[Hashable, Said] = {}
        self._kept_active: dict[tuple[int, ...], Active] = {}
        self._areas: dict[object, Tensor] = {}
        self._words = {dtype: self._memory.view(dtype) for dtype in _SUMMED}
        self._loops = fastest()
        self._tables = [
            _Tables.of(self.workspace, layout, context, self.rank) for context in range(config.num_contexts)
        ]
        self._set_active(self._everyone.ranks)
        # Collective, so that nobody writes before everybody's memory and mask are ready.
        self._bells = connect(self.workspace, layout, self._mesh, comm)

    # ---- dispatch --------------------------------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall) -> None:
        context, round = call.context, call.round
        self._at("dispatch.enter", round)
        active = self._active(context)
        said = self._dispatch_said(call, active)
        enter = Signal(ENTER, context, round, 0)
        self._bells.ring(enter, said, active, call.timeout_s)
        # The peers ring meanwhile.
        slots = self._route(call, active)
        sources = _wire_rows(call)
        self._hear(enter, said, active, call.timeout_s)
        self._at("dispatch.write", round)
        self._write_tables(call, slots, active)
        most = call.runtime_max_tokens_per_rank
        for payload, rows in zip(call.payloads, sources, strict=True):
            block = payload.offset_bytes + self.rank * most * payload.row_bytes
            self._loops.write_rows(rows, payload.row_bytes, slots, self._memory, block, self._stride)
        self._at("dispatch.signal", round)
        done = Signal(DONE, context, round, 0)
        self._bells.ring(done, _NOTHING, active, call.timeout_s)
        self._at("dispatch.wait", round)
        self._bells.wait(done, _NOTHING, active, call.timeout_s)
        self._scrub(call)

    def _dispatch_said(self, call: DispatchCall, active: Active) -> Said:
        widths = tuple([payload.row_bytes for payload in call.payloads])
        has_eplb = call.eplb_local_stats is not None
        key = (call.runtime_max_tokens_per_rank, widths, has_eplb, active)
        said = self._kept_said.get(key)
        if said is None:
            unused = [0] * (MAX_PAYLOADS - len(widths))
            words = (call.runtime_max_tokens_per_rank, len(widths), *widths, *unused, has_eplb, *active.mask)
            said = self._keep_said(key, words)
        return said

    def _combine_said(self, call: CombineCall, active: Active) -> Said:
        key = (call.payload.shape[2], call.payload.dtype, call.low_precision, active)
        said = self._kept_said.get(key)
        if said is None:
            columns, dtype = call.payload.shape[2], _PAYLOAD_DTYPES.index(call.payload.dtype)
            said = self._keep_said(key, (columns, dtype, call.low_precision, *active.mask))
        return said

    def _keep_said(self, key: Hashable, words: Sequence[int]) -> Said:
        if len(self._kept_said) >= _MAX_KEPT:
            self._kept_said.clear()
        said = self._kept_said[key] = Said(words)
        return said

    def _route(self, call: DispatchCall, active: Active) -> Tensor:
        tables, num_tokens = self._tables[call.context], call.topk_ids.shape[0]
        slots = self._slots.get(call.context)
        if slots is None or slots.shape[0] != num_tokens:
            # Kept, and not to be what a user's mode or default device would make of it.
            with torch.inference_mode(False):
                slots = torch.empty((num_tokens, self._config.ep_size), dtype=torch.int32, device="cpu")
            self._slots[call.context] = slots
        self._loops.route(
            call.topk_ids,
            self._placement.table,
            active.takes_part,
            self._config.row_order == "compact",
            tables.targets,
            tables.indices,
            tables.send_counts,
            slots,
        )
        return slots

    def _write_tables(self, call: DispatchCall, slots: Tensor, active: Active) -> None:
        tables = self._tables[call.context]
        self._loops.write_counts(tables.send_counts, active.takes_part, tables.counts_there)
        if call.eplb_local_stats is not None and tables.statistics_there is not None:
            tables.statistics_there[active.takes_part != 0] = call.eplb_local_stats
        if tables.valid_there is not None:
            most = call.runtime_max_tokens_per_rank
            valid = torch.zeros((self._config.ep_size, most), dtype=torch.uint8, device="cpu")
            valid[:, : slots.shape[0]] = (slots >= 0).T
            tables.valid_there[active.takes_part != 0, :most] = valid[active.takes_part != 0]
        if active is not self._everyone:
            silent = active.takes_part == 0
            tables.recv_counts[silent] = 0
            if tables.valid is not None:
                tables.valid[silent] = 0

    def _scrub(self, call: DispatchCall) -> None:
        most, tables = call.runtime_max_tokens_per_rank, self._tables[call.context]
        valid = None if tables.valid is None else tables.valid[:, :most]
        for index, payload in enumerate(call.payloads):
            is_ids = index == call.ids_payload
            if not is_ids and payload.fill_byte is None:
                continue
            dtype = torch.uint8
            if is_ids:
                dtype = torch.int64 if payload.row_bytes > 4 * call.topk_ids.shape[1] else torch.int32
            value = call.invalid_id if is_ids else payload.fill_byte or 0
            area = self._area(payload.offset_bytes, most, payload.row_bytes, dtype)
            self._loops.fill_padded(area, tables.recv_counts, valid, value)

    # ---- combine ---------------------------------------------------------------------------------------------------

    def combine(self, call: CombineCall) -> None:
        context, round = call.context, call.round
        active = self._active(context)
        self._at("combine.stage", round)
        replaced = self._stage(call)
        try:
            self._at("combine.signal", round)
            said = self._combine_said(call, active)
            ready = Signal(READY, context, round, call.attempt)
            self._bells.ring(ready, said, active, call.timeout_s)
            self._at("combine.wait", round)
            self._hear(ready, said, active, call.timeout_s)
        except A2AError:
            # A refused combine may be called again with the same view: it finds its rows as they were.
            for rows, original in replaced:
                rows.copy_(original)
            raise
        self._at("combine.sum", round)
        slots = self._slots[context]
        if active is not self._everyone:
            # A rank masked out since the dispatch adds nothing.
            slots = slots.clone()
            slots[:, active.takes_part == 0] = -1
        sums = call.output
        if call.output_quantize is not None:
            dtype = torch.bfloat16 if call.low_precision else call.payload.dtype
            sums = torch.empty((call.num_tokens, call.payload.shape[2]), dtype=dtype, device="cpu")
        if call.low_precision:
            self._sum_low_precision(call, slots, sums)
        else:
            self._sum(call, slots, sums)
        if call.output_quantize is not None:
            _quantize_output(call, sums)

    def _stage(self, call: CombineCall) -> list[tuple[Tensor, Tensor]]:
        """Bring the rows that peers will read into this rank's combine area, in their wire form.

        Returns:
            (rows, original) of the caller's own rows in the area that their wire form has replaced.
        """
        if call.payload_in_workspace and not call.low_precision:
            return []
        width = call.payload.shape[2]
        row_bytes = combine_row_bytes(width, call.payload.dtype, call.low_precision)
        area = self._combine_rows(call, self.rank, row_bytes)
        quantize = call.low_precision and call.payload.dtype != torch.float8_e4m3fn
        if not quantize:
            if not call.payload_in_workspace:
                for source, rows in self._rows_of_tokens(call):
                    area[source, :rows].copy_(call.payload[source, :rows].view(torch.uint8))
            return []
        # All rows are read before one is written: the payload may lie in the area itself, at another pitch.
        made = [
            (source, rows, *quantize_blocks(call.payload[source, :rows], LOW_PRECISION_BLOCK))
            for source, rows in self._rows_of_tokens(call)
        ]
        replaced = []
        if call.payload_in_workspace:
            mine = [call.payload[source, :rows] for source, rows, _, _ in made]
            replaced = [(rows, rows.clone()) for rows in mine]
        for source, rows, data, scales in made:
            area[source, :rows, :width] = data.view(torch.uint8)
            area[source, :rows, row_bytes - 4 * scales.shape[1] :] = scales.contiguous().view(torch.uint8)
        return replaced

    def _rows_of_tokens(self, call: CombineCall) -> list[tuple[int, int]]:
        """(source, rows) of every block that has any: rows up to its last token's, beyond which nobody reads."""
        tables = self._tables[call.context]
        if tables.valid is not None:
            valid = tables.valid[:, : call.runtime_max_tokens_per_rank] != 0
            ends = (valid * torch.arange(1, valid.shape[1] + 1, device="cpu")).amax(1).tolist()
        else:
            ends = tables.recv_counts.tolist()
        return [(source, rows) for source, rows in enumerate(ends) if rows]

    def _sum(self, call: CombineCall, slots: Tensor, sums: Tensor) -> None:
        size, width = call.payload.dtype.itemsize, call.payload.shape[2]
        block = call.runtime_max_tokens_per_rank * width
        start = self._layout.combine_offset(width * size, call.context) // size + self.rank * block
        self._loops.sum_rows(self._words[call.payload.dtype], start, self._stride // size, slots, sums)

    def _sum_low_precision(self, call: CombineCall, slots: Tensor, sums: Tensor) -> None:
        width = call.payload.shape[2]
        row_bytes = combine_row_bytes(width, call.payload.dtype, call.low_precision)
        rows_at_once = max(1, _LOW_PRECISION_CHUNK // max(width, 1))
        blocks = [self._combine_rows(call, rank, row_bytes)[self.rank] for rank in self._everyone.ranks]
        for start in range(0, call.num_tokens, rows_at_once):
            part = slots[start : start + rows_at_once]
            total = torch.zeros((part.shape[0], width), dtype=torch.float32, device="cpu")
            for rank, block in enumerate(blocks):
                tokens = (part[:, rank] >= 0).nonzero().flatten()
                rows = block[part[tokens, rank]]
                data = rows[:, :width].contiguous().view(torch.float8_e4m3fn)
                if call.payload.dtype == torch.float8_e4m3fn:
                    values = data.float()
                else:
                    num_scales = -(-width // LOW_PRECISION_BLOCK)
                    scales = rows[:, row_bytes - 4 * num_scales :].contiguous().view(torch.float32)
                    values = dequantize_blocks(data, scales, LOW_PRECISION_BLOCK)
                total.index_add_(0, tokens, values)
            sums[start : start + rows_at_once] = total

    # ---- errors, reset, close --------------------------------------------------------------------------------------

    def decline(self, phase: str, context: int, round: int, attempt: int, facts: Mapping[str, Any]) -> None:
        self._bells.decline(Signal(_PHASES[phase], context, round, attempt), facts)

    def check(self) -> None:
        self._mesh.check()

    def reset(self, *, timeout_s: float) -> None:
        everyone = set(self._everyone.ranks)
        masked = {
            rank
            for context in range(self._config.num_contexts)
            for rank in everyone.difference(self._active(context).ranks)
        }
        self._bells.forget()
        self._mesh.reset(timeout_s=timeout_s, absent=masked)
        self._slots.clear()
        self._set_active([rank for rank in self._everyone.ranks if rank not in self._mesh.lost])

    def release(self, comm: Comm) -> None:
        # Nobody reads or writes any more once all are here.
        comm.barrier()
        self._drop_pages(comm)

    def restore(self, comm: Comm, *, timeout_s: float) -> None:
        # Whoever has touched a view meanwhile has made pages anew.
        self._drop_pages(comm)
        self.reset(timeout_s=timeout_s)
        comm.barrier()

    def _drop_pages(self, comm: Comm) -> None:
        problem: A2AError | None = None
        try:
            drop_pages(self.workspace, self.rank)
        except A2AError as error:
            problem = error
        gather(comm, None, problem)

    def close(self) -> None:
        self._mesh.close()
        # What is left of the memory belongs to the views that a caller still holds.
        self._bells.close()
        for kept in (self._areas, self._slots, self._tables, self._words):
            kept.clear()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.workspace = torch.empty((self._config.ep_size, 0), dtype=torch.uint8, device="cpu")

    def _hear(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> None:
        """Wait for a doorbell; raise, on every rank alike, if any rank declined or says anything else than this one."""
        heard = self._bells.wait(signal, said, active, timeout_s)
        if not heard:
            return
        bodies = {**heard, self.rank: said.body}
        for rank in sorted(bodies):
            if bodies[rank].startswith(DECLINED):
                raise from_facts(json.loads(bodies[rank].removeprefix(DECLINED)), reporter=rank)
        told = _dispatch_told if signal.phase == ENTER else _combine_told
        facts = {rank: told(words(body)) for rank, body in sorted(bodies.items())}
        differing = [name for name, value in facts[self.rank].items() if any(f[name] != value for f in facts.values())]
        values = (
            {rank: each[differing[0]] for rank, each in facts.items()}
            if len(differing) == 1
            else {rank: {name: each[name] for name in differing} for rank, each in facts.items()}
        )
        raise MismatchError(what=f"{', '.join(differing)} in {PHASES[signal.phase]}", values=values)

    def _at(self, point: str, round: int) -> None:
        if self.hook is not None:
            self.hook(point, round)

    # ---- views -----------------------------------------------------------------------------------------------------

    def _area(self, offset_bytes: int, most: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
        """`[ep, R, *]` of this rank's own blocks of a payload; the last few are kept, since rounds repeat."""
        key = (offset_bytes, most, row_bytes, dtype)
        area = self._areas.get(key)
        if area is None:
            if len(self._areas) >= _MAX_KEPT:
                self._areas.clear()
            ep = self._config.ep_size
            with torch.inference_mode(False):
                raw = self._block(self.rank, offset_bytes, ep * most, row_bytes)
                area = self._areas[key] = raw.view(ep, most, row_bytes).view(dtype)
        return area

    def _block(self, rank: int, start_bytes: int, rows: int, row_bytes: int) -> Tensor:
        """uint8 `[rows, row_bytes]` in a rank's workspace."""
        return self.workspace[rank, start_bytes : start_bytes + rows * row_bytes].view(rows, row_bytes)

    def _combine_rows(self, call: CombineCall, rank: int, row_bytes: int) -> Tensor:
        """uint8 `[ep, R, row_bytes]`: a rank's combine area."""
        ep, most = self._config.ep_size, call.runtime_max_tokens_per_rank
        start = self._layout.combine_offset(row_bytes, call.context)
        return self._block(rank, start, ep * most, row_bytes).view(ep, most, row_bytes)

    def _active(self, context: int) -> Active:
        mask = self._tables[context].mask
        if mask is None:
            return self._everyone
        bits = tuple(mask.tolist())
        active = self._kept_active.get(bits)
        if active is None:
            if len(self._kept_active) >= _MAX_KEPT:
                self._kept_active.clear()
            ranks = [rank for rank in self._everyone.ranks if bits[rank // 64] >> (rank % 64) & 1]
            everyone = len(ranks) == self._config.ep_size
            active = self._everyone if everyone else Active(ranks, self.rank, self._config.ep_size)
            self._kept_active[bits] = active
        return active

    def _set_active(self, ranks: Sequence[int]) -> None:
        bits = [0] * -(-self._config.ep_size // 64)
        for rank in ranks:
            bits[rank // 64] |= 1 << rank % 64
        for tables in self._tables:
            if tables.mask is not None:
                tables.mask.copy_(torch.tensor(bits, dtype=torch.uint64, device="cpu"))


def _dispatch_told(said: Sequence[int]) -> dict[str, Any]:
    """What the words of `_dispatch_said` stand for."""
    most, count = said[:2]
    has_eplb, *mask = said[2 + MAX_PAYLOADS :]
    return {
        "runtime_max_tokens_per_rank": most,
        "payload_row_bytes": list(said[2 : 2 + count]),
        "eplb_local_stats": bool(has_eplb),
        "active_ranks": Active.ranks_of(mask),
    }


def _combine_told(said: Sequence[int]) -> dict[str, Any]:
    """What the words of `_combine_said` stand for."""
    columns, dtype, low_precision, *mask = said
    return {
        "payload_columns": columns,
        "payload_dtype": str(_PAYLOAD_DTYPES[dtype]).removeprefix("torch."),
        "use_low_precision": bool(low_precision),
        "active_ranks": Active.ranks_of(mask),
    }


def _wire_rows(call: DispatchCall) -> list[Tensor]:
    """Every payload's rows as they travel, contiguous, quantised where the call says so."""
    rows = list(call.rows)
    how = call.quantize
    if how is not None and rows[0] is not None:
        data, scales = how.wire_format.quantize(rows[0], alignment=how.alignment, global_scale=how.global_scale)
        rows[0] = data.contiguous()
        if scales is not None:
            rows[1] = scales.contiguous()
    return [each for each in rows if each is not None]


def _quantize_output(call: CombineCall, sums: Tensor) -> None:
    how = call.output_quantize
    if how is None or call.output_scales is None:
        return
    data, scales = how.wire_format.quantize(sums, alignment=how.alignment, global_scale=how.global_scale)
    call.output.view(torch.uint8).copy_(data.view(torch.uint8))
    if scales is not None:
        arranged = swizzle_scales(scales.view(torch.uint8), call.scale_layout)
        call.output_scales.view(torch.uint8).view(-1).copy_(arranged.reshape(-1))


TRANSPORT: Final = HostTransport
