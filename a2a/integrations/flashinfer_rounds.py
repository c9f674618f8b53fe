"""integrations/flashinfer_rounds: rounds on a workspace that a caller owns: any uint8 CUDA tensor.

Owns what such a rank knows from call to call, and where it is kept: with the storage of the workspace, so that it lives
as long as the memory and is found through any view of it. Refuses to know who the other ranks are: they may be streams
of this process or other processes. Without a mesh between them a failure is found by its deadline and ends only here.
Rounds of any size take the bulk regime: a row of the historical size has no room for the landing areas of small ones.

Where the combine rows lie is told by dispatch, before their width is known: behind the widest dispatch that this
workspace has seen. A dispatch that is wider than every one before it moves them. Others may then still read combine
rows where the new rows go, so an empty round is played first, which ends when all ranks have left the last one. A graph
that was captured before such a move goes on with the old place, and every later dispatch that reaches beyond that place
plays the empty round too.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from a2a.arguments import Arguments, describe
from a2a.config import ExchangeConfig
from a2a.env import Env
from a2a.errors import A2AError, ConfigError, MismatchError, PeerTimeout, ShapeError, StateError
from a2a.layout import ALIGNMENT, GrowingDispatchLayout, combine_row_bytes
from a2a.nvlink.caller_workspace import caller_layout, metainfo_of, payload_bytes_of
from a2a.nvlink.driver import device_of_address
from a2a.nvlink.exchange import Exchange
from a2a.nvlink.memory import tensor_at
from a2a.nvlink.params import KINDS, PHASES
from a2a.nvlink.scrub_ids import id_scrubber
from a2a.placement import Placement
from a2a.quant import ScaleLayout
from a2a.transport import CombineCall, DispatchCall, Payload

_STATE: Final = "_a2a_ranks"
_LOADING: Final = threading.Lock()
_TIMEOUT: Final = 1
_EMPTY_ROW_BYTES: Final = torch.bfloat16.itemsize

Output = tuple[torch.dtype | None, Tensor | None, Any, ScaleLayout, Tensor | None]
"""dtype, scales, global scale, layout of the scales and tensor of a combine's output."""


def initialize(
    workspace: Tensor, ep_rank: int, ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int
) -> Tensor:
    """Zero a rank's row, forget its rounds; the offsets in it. See `moe_a2a_initialize`."""
    fits = (
        _is_on_gpu(workspace)
        and workspace.dtype == torch.uint8
        and workspace.dim() == 2
        and workspace.shape[0] == ep_size
        and workspace.stride(1) == 1
        and workspace.stride(0) % ALIGNMENT == 0
        and workspace.data_ptr() % ALIGNMENT == 0
    )
    if not fits:
        raise ShapeError(
            what="workspace",
            got=f"{describe(workspace)}, strides {workspace.stride()}",
            wanted=f"a uint8 tensor [{ep_size}, bytes] on a GPU, rows on multiples of {ALIGNMENT} bytes",
            rank=ep_rank,
        )
    if not 0 <= ep_rank < ep_size:
        raise ConfigError(what="ep_rank", got=ep_rank, wanted=f"an integer in 0..{ep_size - 1}")
    payload_bytes = payload_bytes_of(workspace.shape[1], ep_size, max_num_tokens, eplb_stats_num_experts)
    layout = caller_layout(ep_size, max_num_tokens, eplb_stats_num_experts, payload_bytes)
    workspace[ep_rank].zero_()
    kept = _kept_with(workspace)
    rank = CallerRank(workspace, ep_rank, layout, kept)
    rank.load()
    torch.cuda.current_stream(workspace.device).synchronize()
    kept[workspace.data_ptr(), ep_rank] = rank
    return metainfo_of(layout)


def rank_of(workspace: Tensor, ep_rank: int) -> CallerRank:
    """What is kept of a rank. StateError if it was not initialised in this process."""
    found = _kept_with(workspace).get((workspace.data_ptr(), ep_rank))
    if found is None:
        raise StateError(
            rank=ep_rank, call="a round", state="not initialised", change="call moe_a2a_initialize on this workspace"
        )
    return found


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _kept_with(workspace: Tensor) -> dict[tuple[int, int], CallerRank]:
    storage = workspace.untyped_storage()
    kept: dict[tuple[int, int], CallerRank] | None = getattr(storage, _STATE, None)
    if kept is None:
        kept = {}
        setattr(storage, _STATE, kept)
    return kept


@dataclasses.dataclass(slots=True)
class _Round:
    """A dispatch until its combine."""

    kind: tuple[int, int, bool]
    num_tokens: int
    runtime_max_tokens_per_rank: int
    combine_offset: int


class CallerRank:
    """One rank's rounds on a caller's workspace.

    Args:
        workspace: all ranks' rows; not kept alive.
        ep_rank: this rank.
        layout: of a row.
        neighbours: all ranks of this process on the same storage, by address of the workspace and rank; filled by the
            caller.
    """

    def __init__(
        self,
        workspace: Tensor,
        ep_rank: int,
        layout: GrowingDispatchLayout,
        neighbours: dict[tuple[int, int], CallerRank],
    ) -> None:
        self.ep_rank = ep_rank
        self.layout = layout
        # Of the same memory and no owner of it: what is kept with the storage must not keep the storage.
        self._workspace = tensor_at(workspace.data_ptr(), (workspace.shape[0], workspace.stride(0)), workspace.device)
        self._address = workspace.data_ptr()
        self._neighbours = neighbours
        self._exchanges: dict[tuple[int, int, bool], Exchange] = {}
        self._arguments: dict[tuple[int, int, bool], Arguments] = {}
        self._last: Exchange | None = None
        self._round: _Round | None = None
        self._played = 0
        self._mask_words: list[int] | None = None
        self._captured_reach_bytes: int | None = None

    def load(self) -> None:
        """Have everything loaded that this rank's calls use beside the kernels of a kind of round: see `_load`."""
        id_scrubber(self._workspace.device.index)
        # The same operators on the same addresses as when a mask is set.
        self._write_mask([0] * self._mask_region().numel())

    # ---- the two verbs ---------------------------------------------------------------------------------------------

    def dispatch(
        self,
        topk_ids: Tensor,
        payloads: Sequence[Tensor],
        runtime_max_tokens_per_rank: int,
        top_k: int,
        num_experts: int,
        enable_pdl: bool | None,
        eplb_local_stats: Tensor | None,
        enable_rank_mask: bool,
        active_rank_mask: Tensor | None,
    ) -> tuple[int, tuple[int, ...]]:
        """Launch one dispatch; where the combine area and the payloads lie in this rank's row.

        A round that was not combined ends first, on all ranks alike: its rows are lost.
        """
        self._raise_recorded()
        kind = (top_k, num_experts, enable_rank_mask)
        if kind not in self._arguments:
            for each in self._ranks_here():
                # What is allocated at all is allocated before any rank launches.
                each._arguments_of(kind)
        arguments = self._arguments_of(kind)
        ids = arguments.topk_ids(topk_ids)
        if ids.shape[1] != top_k:
            raise ShapeError(
                what="token_selected_experts", got=describe(ids), wanted=f"top_k = {top_k} columns", rank=self.ep_rank
            )
        rows = arguments.payloads(payloads, ids.shape[0])
        arguments.check_eplb(eplb_local_stats)
        most, n = runtime_max_tokens_per_rank, ids.shape[0]
        if not max(1, n) <= most <= self.layout.config.max_num_tokens:
            raise ShapeError(
                what="runtime_max_tokens_per_rank",
                got=most,
                wanted=f"an integer in max(1, n = {n})..max_num_tokens = {self.layout.config.max_num_tokens}",
                rank=self.ep_rank,
            )
        words = self._mask_of(enable_rank_mask, active_rank_mask)
        widths = [each.shape[1] * each.dtype.itemsize for each in rows]
        reach = self.layout.reach_bytes
        offsets = self.layout.payload_offsets(widths)
        self._load(kind)
        if self._round is not None:
            self._combine_nothing(self._enter(self._round.kind, None), self._round.runtime_max_tokens_per_rank)
            self._round = None
        exchange = self._enter(kind, words)
        # Only now, since a dispatch that was refused moves no rows: the next one would play no empty round for it.
        self.layout.claim_dispatch(widths)
        if self._wants_empty_round(reach, self.layout.extent_bytes(widths)):
            self._play_empty_round(exchange, top_k)
        if torch.cuda.is_current_stream_capturing():
            captured = self._captured_reach_bytes
            reach = self.layout.reach_bytes
            self._captured_reach_bytes = reach if captured is None else min(captured, reach)
        exchange.dispatch(
            self._dispatch_call(ids, rows, widths, offsets, most, eplb_local_stats, enable_pdl=enable_pdl)
        )
        self._played += 1
        offset = self.layout.combine_offset(0)
        self._round = _Round(kind, n, most, offset)
        return offset, offsets

    def combine(
        self,
        payload: Tensor,
        num_tokens: int,
        runtime_max_tokens_per_rank: int,
        top_k: int,
        combine_payload_offset: int,
        payload_in_workspace: bool,
        output: Output,
        low_precision: bool,
        enable_pdl: bool | None,
        enable_rank_mask: bool,
        active_rank_mask: Tensor | None,
    ) -> Tensor:
        """Launch the combine of the last dispatch; its output."""
        self._raise_recorded()
        this = self._round
        if this is None:
            raise StateError(
                rank=self.ep_rank, call="moe_a2a_combine", state="idle", change="call moe_a2a_dispatch first"
            )
        wanted = (this.num_tokens, this.runtime_max_tokens_per_rank, this.kind[0], this.kind[2], this.combine_offset)
        got = (num_tokens, runtime_max_tokens_per_rank, top_k, enable_rank_mask, combine_payload_offset)
        if got != wanted:
            raise ShapeError(
                what="local_num_tokens, runtime_max_tokens_per_rank, top_k, enable_rank_mask, combine_payload_offset",
                got=got,
                wanted=f"those of the dispatch, {wanted}",
                rank=self.ep_rank,
            )
        arguments = self._arguments_of(this.kind)
        arguments.check_combine_payload(payload, runtime_max_tokens_per_rank, low_precision)
        blocks = arguments.in_blocks(payload, runtime_max_tokens_per_rank)
        width = blocks.shape[2]
        row_bytes = combine_row_bytes(width, blocks.dtype, low_precision)
        widest = max(row_bytes, width * blocks.dtype.itemsize if payload_in_workspace else 0)
        self.layout.combine_offset(widest)
        if payload_in_workspace:
            self._check_address(blocks, combine_payload_offset)
        dtype, scales, scalar, scale_layout, out = output
        quantize, out_width, out_dtype = arguments.output(dtype, scales, scalar, scale_layout, blocks, low_precision)
        if out is None:
            out = torch.empty((num_tokens, out_width), dtype=out_dtype, device=blocks.device)
        else:
            arguments.check_matrix("output", out, (num_tokens, out_width), out_dtype)
        if quantize is not None and scales is not None:
            _check_scales(scales, scale_layout, num_tokens, quantize.wire_format.scales_width(width, 0), self.ep_rank)
        exchange = self._enter(this.kind, self._mask_of(enable_rank_mask, active_rank_mask))
        self.layout.claim_combine(widest)
        exchange.combine(
            CombineCall(
                context=0,
                round=self._played,
                attempt=1,
                payload=blocks,
                payload_in_workspace=payload_in_workspace,
                runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
                num_tokens=num_tokens,
                low_precision=low_precision,
                output=out,
                output_quantize=quantize,
                output_scales=scales,
                scale_layout=scale_layout,
                timeout_s=0.0,
                stream=None,
                num_sms=None,
                enable_pdl=enable_pdl,
            )
        )
        self._round = None
        return out

    # ---- the place of the combine rows -----------------------------------------------------------------------------

    def _wants_empty_round(self, reach_before: int, extent: int) -> bool:
        moved = self._played > 0 and extent > reach_before
        captured = self._captured_reach_bytes
        return moved or (captured is not None and extent > captured)

    def _play_empty_round(self, exchange: Exchange, top_k: int) -> None:
        """A round without tokens: when its dispatch has ended here, every rank has left the round before."""
        device = self._workspace.device
        ids = torch.empty((0, top_k), dtype=torch.int32, device=device)
        rows = torch.empty((0, _EMPTY_ROW_BYTES), dtype=torch.uint8, device=device)
        start = self.layout.region("payloads").offset_bytes
        exchange.dispatch(self._dispatch_call(ids, [rows], [_EMPTY_ROW_BYTES], (start,), 1, None, enable_pdl=None))
        self._combine_nothing(exchange, 1)

    def _combine_nothing(self, exchange: Exchange, most: int) -> None:
        """The combine of a round whose rows nobody wants."""
        ep, width = self.layout.config.ep_size, _EMPTY_ROW_BYTES // torch.bfloat16.itemsize
        offset = self.layout.combine_offset(_EMPTY_ROW_BYTES)
        area = self._workspace[self.ep_rank, offset : offset + ep * most * _EMPTY_ROW_BYTES]
        exchange.combine(
            CombineCall(
                context=0,
                round=self._played,
                attempt=1,
                payload=area.view(torch.bfloat16).view(ep, most, width),
                payload_in_workspace=True,
                runtime_max_tokens_per_rank=most,
                num_tokens=0,
                low_precision=False,
                output=torch.empty((0, width), dtype=torch.bfloat16, device=self._workspace.device),
                output_quantize=None,
                output_scales=None,
                scale_layout=ScaleLayout.LINEAR,
                timeout_s=0.0,
                stream=None,
                num_sms=None,
                enable_pdl=None,
            )
        )

    def _dispatch_call(
        self,
        ids: Tensor,
        rows: Sequence[Tensor],
        widths: Sequence[int],
        offsets: Sequence[int],
        most: int,
        stats: Tensor | None,
        *,
        enable_pdl: bool | None,
    ) -> DispatchCall:
        return DispatchCall(
            context=0,
            round=self._played + 1,
            topk_ids=ids,
            payloads=tuple(Payload(*each, None) for each in zip(widths, offsets, strict=True)),
            rows=tuple(rows),
            runtime_max_tokens_per_rank=most,
            ids_payload=None,
            invalid_id=-1,
            quantize=None,
            eplb_local_stats=stats,
            timeout_s=0.0,
            stream=None,
            num_sms=None,
            enable_pdl=enable_pdl,
        )

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def _load(self, kind: tuple[int, int, bool]) -> None:
        """Have the kernels of a kind of round ready for all ranks of this process before one of them is launched.

        Loading code may wait for the GPU, on which a rank's kernel may be waiting for a rank that is yet to launch.
        """
        if kind in self._exchanges:
            return
        with _LOADING:
            # Ranks may be threads: none finds its kernels, and launches, before those of all are loaded.
            made = [(rank, rank._make_exchange(kind)) for rank in self._ranks_here() if kind not in rank._exchanges]
            for rank, exchange in made:
                rank._exchanges[kind] = exchange

    def _ranks_here(self) -> list[CallerRank]:
        """Ranks of this process on this workspace, this one included."""
        return [rank for (address, _), rank in self._neighbours.items() if address == self._address]

    def _make_exchange(self, kind: tuple[int, int, bool]) -> Exchange:
        config, env = self._config_of(kind), Env.read()
        exchange = Exchange(
            self._workspace,
            self.ep_rank,
            config,
            self.layout,
            Placement.contiguous(config.num_experts, config.ep_size),
            small_max_tokens=0,
            sharers=self._num_sharers(),
        )
        exchange.set_budgets(env.startup_timeout_s, env.timeout_s)
        return exchange

    def _num_sharers(self) -> int:
        """Ranks whose rows lie on this GPU: their kernels wait for each other on it."""
        rows = [self._workspace[rank].data_ptr() for rank in range(self._workspace.shape[0])]
        gpus = [device_of_address(row) for row in rows]
        return gpus.count(gpus[self.ep_rank])

    def _config_of(self, kind: tuple[int, int, bool]) -> ExchangeConfig:
        top_k, num_experts, enable_rank_mask = kind
        return dataclasses.replace(
            self.layout.config, top_k=top_k, num_experts=num_experts, enable_rank_mask=enable_rank_mask
        )

    def _arguments_of(self, kind: tuple[int, int, bool]) -> Arguments:
        if kind not in self._arguments:
            self._arguments[kind] = Arguments(self._config_of(kind), self._workspace.device, self.ep_rank)
        return self._arguments[kind]

    def _enter(self, kind: tuple[int, int, bool], words: list[int] | None) -> Exchange:
        """The kernels of a kind of round, behind those of another kind, with the mask in place."""
        exchange = self._exchanges[kind]
        if self._last is not None and self._last is not exchange:
            exchange.stream = self._last.stream
        self._last = exchange
        if words is not None and words != self._mask_words:
            if torch.cuda.is_current_stream_capturing():
                raise StateError(
                    rank=self.ep_rank,
                    call="a change of active_rank_mask",
                    state="capturing a graph",
                    change="play one round with this mask before the capture",
                )
            self._write_mask(words)
            self._mask_words = words
        return exchange

    def _mask_region(self) -> Tensor:
        region = self.layout.region("rank_mask")
        return self._workspace[self.ep_rank, region.offset_bytes : region.end_bytes].view(torch.int64)

    def _write_mask(self, words: Sequence[int]) -> None:
        mask = self._mask_region()
        for index, word in enumerate(words):
            # As an argument of a kernel: a copy from the host might wait for the stream.
            mask[index].fill_(word - (1 << 64) if word >> 63 else word)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check_address(self, blocks: Tensor, offset: int) -> None:
        address = self._workspace[self.ep_rank].data_ptr() + offset
        if blocks.data_ptr() != address:
            raise ShapeError(
                what="payload with payload_in_workspace=True",
                got=f"address {blocks.data_ptr():#x}",
                wanted=f"{address:#x}, combine_payload_offset = {offset} of this rank's row",
                rank=self.ep_rank,
            )

    def _mask_of(self, enabled: bool, mask: Tensor | None) -> list[int] | None:
        """Words of the mask of a round; None where there is none."""
        ep = self.layout.config.ep_size
        if not enabled:
            if mask is not None:
                raise ConfigError(
                    what="active_rank_mask", got=describe(mask), wanted="None without enable_rank_mask=True"
                )
            return None
        num_words = -(-ep // 64)
        if mask is None:
            return [(1 << min(64, ep - 64 * word)) - 1 for word in range(num_words)]
        if mask.dtype != torch.uint64 or tuple(mask.shape) != (num_words,) or mask.is_cuda:
            raise ShapeError(
                what="active_rank_mask",
                got=describe(mask),
                wanted=f"a uint64 tensor [{num_words}] on the CPU",
                rank=self.ep_rank,
            )
        words = [int(word) for word in mask.tolist()]
        if not words[self.ep_rank // 64] >> (self.ep_rank % 64) & 1:
            raise ConfigError(
                what="active_rank_mask",
                got=[hex(word) for word in words],
                wanted=f"bit {self.ep_rank} set, the caller's own",
                rank=self.ep_rank,
            )
        return words

    def _raise_recorded(self) -> None:
        for exchange in self._exchanges.values():
            words = exchange.words[0]
            if words.recorded:
                raise _error_of(self.ep_rank, words)


def _error_of(ep_rank: int, words: Any) -> A2AError:
    phase, peer, kind = PHASES[int(words.phase)], int(words.peer), int(words.kind)
    if kind == _TIMEOUT:
        return PeerTimeout(
            rank=ep_rank,
            peer=peer,
            phase=phase,
            round=int(words.round),
            waited_s=int(words.waited_us) / 1e6,
            change="look at what the peer does, then call moe_a2a_initialize on all ranks",
        )
    return MismatchError(
        what=f"{KINDS[kind].removeprefix('mismatch of ')} in {phase}",
        values=dict(sorted({ep_rank: int(words.wanted), peer: int(words.seen)}.items())),
        change="pass the same value on every rank, after moe_a2a_initialize on all ranks",
    )


def _check_scales(scales: Tensor, layout: ScaleLayout, rows: int, columns: int, ep_rank: int) -> None:
    wanted = layout.shape(rows, columns)
    if scales.numel() != wanted[0] * wanted[1] or not scales.is_contiguous():
        raise ShapeError(
            what="output_scales",
            got=describe(scales),
            wanted=f"a contiguous tensor of {wanted[0] * wanted[1]} elements for {rows} rows of {columns} scales",
            rank=ep_rank,
        )
