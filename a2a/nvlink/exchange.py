"""nvlink/exchange: one rank's kernels on a workspace: which module, which grid, which parameters.

Owns the kernel modules, the fields of their parameter structs and the words shared with the host. Refuses to know
how the workspace came to be (any uint8 CUDA tensor will do, several ranks of one process on one GPU among them), who
the peers are and what becomes of a recorded failure.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from a2a.config import MAX_PAYLOADS, ExchangeConfig, low_precision_bytes_per_token
from a2a.errors import ShapeError
from a2a.layout import ALIGNMENT, WorkspaceLayout
from a2a.nvlink.compile import compile_kernel
from a2a.nvlink.driver import arch_of
from a2a.nvlink.launch import Kernel, Library, load
from a2a.nvlink.params import (
    MAX_CTAS,
    MAX_PUSHED_SEGMENTS,
    MAX_THREADS,
    OUTPUT_TYPES,
    PIECE_BYTES,
    ROUND_NUMBERS,
    TYPE_NAMES,
    WIRE_FORMATS,
    CombineParams,
    DispatchParams,
    HostWords,
    defines,
    device_source,
    image_bytes,
    landing_tokens,
    later_round,
    lines,
    next_round,
    pushed_rows_fit,
)
from a2a.nvlink.quantize_rows import fill
from a2a.nvlink.tuning import Point, Tuning, find_tuning
from a2a.placement import Placement
from a2a.transport import CombineCall, DispatchCall

_WORDS_STRIDE: Final = 128
"""Bytes from one context's host words to the next: a cache line of their own."""
_LINE_THREADS: Final = 8
"""Threads that move one landing line, 16 bytes each."""
_ALIGNMENT: Final = 16
"""Of the rows' addresses: what it is modulo this may decide which kernel takes a call."""
_SEGMENT_BYTES: Final = 1024
"""A row is not cut into less, however few rows there are."""
_CROWDED_UNIT_BYTES: Final = 7 * 512
"""What a warp has in flight at once at least, where fewer CTAs than were found best must keep the link busy."""
_DISPATCH_OFFSETS: Final = tuple(name for name, _ in DispatchParams._fields_ if name.endswith("_offset"))
_COMBINE_OFFSETS: Final = tuple(name for name, _ in CombineParams._fields_ if name.endswith("_offset"))
_WAYS: Final = {"small": ("small_words", "small_bytes")}
"""Kernels of a regime that has several."""
_MAX_KEPT: Final = 256
"""Of launches that are known by what their calls are like."""


class _Launch(NamedTuple):
    """A kernel and what it was prepared for; as long as it still is, calls that are alike need only tell addresses."""

    kernel: Kernel
    prepared: object
    pdl: bool
    top_k: int
    row_bytes: int
    combine_offset: int


class _CombineRows(NamedTuple):
    """How combine's rows lie in the combine area: bytes of one, where they start, whether the launch brings them there,
    and the type of rows of which it makes the e4m3 wire."""

    row_bytes: int
    offset_bytes: int
    staged: bool
    made_of: str | None


class Exchange:
    """One rank's rounds on `workspace`.

    Args:
        workspace: uint8 `[ep, bytes]` on a GPU, zero at first, row `r` being rank `r`'s; rows at least
            `layout.num_bytes` long, each starting on a multiple of 128 bytes. Kept alive by this object.
        ep_rank: this rank.
        config, layout, placement: of the object, equal on all ranks.
        tuning: table of regimes and launch shapes, equal on all ranks; None: the one shipped for this GPU.
        small_max_tokens: largest R of the small regime, whatever the table says; None: the table decides. Equal on all
            ranks; 0 where the machine tears lines.
        sharers: ranks of this process on this GPU, this one included; their kernels must be resident together.

    Attributes:
        tuning: the table in use.
        landing_tokens: largest R that the small regime can take.
        words: per context, what the host tells the kernels and what they record; pinned memory.
        stream: the last one used, or None.

    Raises:
        ShapeError: a workspace that does not fit.
        CompileError: with the compiler's log.
    """

    def __init__(
        self,
        workspace: Tensor,
        ep_rank: int,
        config: ExchangeConfig,
        layout: WorkspaceLayout,
        placement: Placement,
        *,
        tuning: Tuning | None = None,
        small_max_tokens: int | None = None,
        sharers: int = 1,
    ) -> None:
        _check_workspace(workspace, config, layout)
        self.workspace = workspace
        self.device = workspace.device
        self._arch = arch_of(self.device)
        self.ep_rank = ep_rank
        self.stream: Any = None
        self._config = config
        self._layout = layout
        self.landing_tokens = landing_tokens(config)
        self.tuning = find_tuning(self._arch).tuning if tuning is None else tuning
        self._small_max_tokens = small_max_tokens
        self._points: dict[tuple[str, bool, object, int], Point] = {}
        self._sharers = sharers
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        contiguous = Placement.contiguous(config.num_experts, config.ep_size)
        self._needs_table = not torch.equal(contiguous.table, placement.table)
        self._table = placement.table.to(self.device)
        num_bytes = config.num_contexts * _WORDS_STRIDE
        self._pinned = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").pin_memory()
        self.words = tuple(
            HostWords.from_address(self._pinned.data_ptr() + index * _WORDS_STRIDE)
            for index in range(config.num_contexts)
        )
        for words in self.words:
            words.first_round = 1
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._resident: dict[tuple[Kernel, int, int], int] = {}
        self._whole: dict[tuple[Kernel, Point, tuple[int, ...], int | None], bool] = {}
        self._alike: dict[tuple[object, ...], _Launch] = {}
        self._top_k = [config.top_k] * config.num_contexts
        # Everything a captured graph can need is loaded before the constructor returns.
        fused = config.wire_format if config.wire_format in WIRE_FORMATS else None
        wires = [None] if fused is None else [None, fused]
        self._load(wires, config.top_k, combine=True)

    def regime(self, runtime_max_tokens_per_rank: int) -> str:
        """Either "small": rows and flags travel as one, by a landing area; "bulk": rows straight to their place, or
        read where they lie; "push": combine rows sent to their tokens' ranks.

        Of rows as wide as the configuration's; "small, bulk" where dispatch and combine differ.
        """
        config, most = self._config, runtime_max_tokens_per_rank
        fused = config.wire_format in WIRE_FORMATS
        dispatch = self._point("dispatch", fused, (config.dispatch_bytes_per_token,), most).regime
        combine = self._point("combine", False, (config.combine_bytes_per_token,), most).regime
        return dispatch if dispatch == combine else f"{dispatch}, {combine}"

    def pushes(self, row_bytes: int, runtime_max_tokens_per_rank: int) -> bool:
        """Whether combine may push rows of that many bytes; equal on all ranks."""
        # Where callers own the workspace there is no dispatch area for rows to land in.
        has_area = any(region.name == "dispatch" for region in self._layout.regions)
        return has_area and pushed_rows_fit(self._config, row_bytes, runtime_max_tokens_per_rank)

    def tune(self, tuning: Tuning) -> None:
        """Take another table for the launches that follow; every rank the same, between the same two rounds."""
        self.tuning = tuning
        self._points.clear()
        self._whole.clear()
        self._alike.clear()
        for kernel in self._kernels.values():
            kernel.prepared = None

    # ---- the two verbs ---------------------------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall) -> None:
        """Enqueue one dispatch; no host synchronisation. See `Transport.dispatch`."""
        ids, stats = call.topk_ids, call.eplb_local_stats
        addresses = [0 if rows is None else rows.data_ptr() for rows in call.rows]
        alignment = 0
        for address in addresses:
            alignment |= address
        key = (call.like, call.num_sms, call.enable_pdl, alignment % _ALIGNMENT)
        launch = self._alike.get(key)
        if launch is None or launch.kernel.prepared is not launch.prepared:
            launch = self._dispatch_launch(call, addresses)
            self._keep(key, launch)
        self._top_k[call.context] = launch.top_k
        stream = self._enter(call.stream)
        params = launch.kernel.parameters
        params.payload_rows[: len(addresses)] = addresses
        params.topk_ids = ids.data_ptr()
        params.eplb_local_stats = 0 if stats is None else stats.data_ptr()
        scale = None
        if call.quantize is not None:
            scale = call.quantize.global_scale
            params.global_scale = 0 if scale is None else scale.data_ptr()
        launch.kernel.launch(stream.cuda_stream, pdl=launch.pdl)
        if call.stream is not None:
            self._used_on(stream, [*call.rows, ids, stats, scale])

    def _dispatch_launch(self, call: DispatchCall, addresses: Sequence[int]) -> _Launch:
        """The kernel for a call, prepared."""
        most, ids, payloads = call.runtime_max_tokens_per_rank, call.topk_ids, call.payloads
        n, top_k = ids.shape
        wire = call.quantize.wire_format.name if call.quantize is not None else None
        widths = tuple([payload.row_bytes for payload in payloads])
        point = self._point("dispatch", wire is not None, widths, most)
        name = "dispatch_bulk" if point.regime == "bulk" else "dispatch_small_bytes"
        kernel = self._dispatch_kernel(name, wire, top_k)
        if point.regime == "small":
            words = self._dispatch_kernel("dispatch_small_words", wire, top_k)
            if self._whole_words(words, point, widths, addresses, call.num_sms, fused=wire is not None):
                kernel = words
        fills = tuple([payload.fill_byte for payload in payloads])
        rows, has_stats = call.rows[0], call.eplb_local_stats is not None
        rows_type = None if wire is None or rows is None else (rows.shape[1], rows.dtype)
        shape = (n, most, widths, fills, call.ids_payload, call.invalid_id, ids.dtype, has_stats, rows_type)
        key = (call.context, call.num_sms, shape)
        if kernel.prepared != key:
            kernel.prepared = None
            self._prepare_dispatch(kernel, call, point)
            kernel.prepared = key
        return _Launch(kernel, kernel.prepared, self._pdl(call.enable_pdl, point), top_k, 0, 0)

    def _prepare_dispatch(self, kernel: Kernel, call: DispatchCall, point: Point) -> None:
        """Every field but the caller's addresses, and the shape of the launch."""
        params, stats = kernel.parameters, call.eplb_local_stats
        n = call.topk_ids.shape[0]
        self._offsets(params, _DISPATCH_OFFSETS, call.context)
        for index, payload in enumerate(call.payloads):
            params.payload_offsets[index] = payload.offset_bytes
            params.payload_bytes[index] = payload.row_bytes
            params.payload_fill[index] = -1 if payload.fill_byte is None else payload.fill_byte
        params.id_bytes = call.topk_ids.dtype.itemsize
        params.num_tokens = n
        params.runtime_max_tokens_per_rank = call.runtime_max_tokens_per_rank
        params.num_payloads = len(call.payloads)
        params.ids_payload = -1 if call.ids_payload is None else call.ids_payload
        params.invalid_id = call.invalid_id
        params.num_eplb_stats = 0 if stats is None else stats.numel()
        widths = [payload.row_bytes for payload in call.payloads]
        # The regime too: rows made here and rows made before may have different ones for the same widths.
        params.digest = _digest(widths, (stats is not None, point.regime))
        rows = call.rows[0]
        if call.quantize is not None and rows is not None:
            params.hidden_size = rows.shape[1]
            params.input_type = OUTPUT_TYPES.index(TYPE_NAMES[rows.dtype])
        image = image_bytes(widths)
        if point.regime == "small":
            fused = call.quantize is not None
            shared = _shared_bytes(image, fused)
            most = call.runtime_max_tokens_per_rank
            self._small_shape(kernel, point, image, most, call.num_sms, one_cta=fused, shared_bytes=shared)
        else:
            self._bulk_shape(kernel, point, n, image, call.num_sms)

    def combine(self, call: CombineCall) -> None:
        """Enqueue one combine; no host synchronisation. See `Transport.combine`."""
        output = call.output
        if call.output_quantize is not None:
            # Sums of the payload's own type: rounded to that first, then quantised by those who wrote them.
            dtype = torch.bfloat16 if call.low_precision else call.payload.dtype
            with torch.cuda.stream(self._enter(call.stream)):
                output = torch.empty((call.num_tokens, call.payload.shape[2]), dtype=dtype, device=self.device)
        alignment = (call.payload.data_ptr() | output.data_ptr()) % _ALIGNMENT
        key = (call.like, call.payload_in_workspace, call.num_sms, call.enable_pdl, alignment)
        alike = self._alike.get(key)
        if (
            alike is not None
            and alike.kernel.prepared is alike.prepared
            # The place of the combine area may change with the rounds before.
            and self._layout.combine_offset(alike.row_bytes, call.context) == alike.combine_offset
            and not self._is_overwritten(call, alike.combine_offset)
        ):
            self._launch_combine(alike.kernel, call, call.payload, output, self._enter(call.stream), alike.pdl)
            return
        payload = call.payload
        most, width = call.runtime_max_tokens_per_rank, payload.shape[2]
        makes_wire = call.low_precision and payload.dtype != torch.float8_e4m3fn
        point = self._point("combine", call.low_precision, (width * payload.dtype.itemsize,), most)
        # The tables that dispatch wrote have as many columns as its tokens had picks.
        top_k = self._top_k[call.context]
        kernel = self._kernel_that_combines(call, output, point, top_k)
        stream = self._enter(call.stream)
        row_bytes = low_precision_bytes_per_token(width) if makes_wire else width * payload.dtype.itemsize
        offset = self._layout.combine_offset(row_bytes, call.context)
        if makes_wire and self._meets(payload, offset, payload.shape[0] * most * row_bytes):
            # Rows of the wire are made there, and are narrower.
            with torch.cuda.stream(stream):
                payload = payload.clone()
        elif not makes_wire and self._is_overwritten(call, offset):
            with torch.cuda.stream(stream):
                payload = self._staged(payload, call.context)
        # What was moved to the area needs no staging.
        staged = makes_wire or not (call.payload_in_workspace or payload is not call.payload)
        rows = _CombineRows(row_bytes, offset, staged, TYPE_NAMES[payload.dtype] if makes_wire else None)
        how = call.output_quantize
        made = None if how is None else (how.wire_format.name, call.scale_layout)
        prepared = (call.context, call.num_sms, call.num_tokens, most, width, rows, output.dtype, made)
        if kernel.prepared != prepared:
            kernel.prepared = None
            self._prepare_combine(kernel, call, output, point, rows)
            kernel.prepared = prepared
        pdl = self._pdl(call.enable_pdl, point)
        if not makes_wire and payload is call.payload:
            self._keep(key, _Launch(kernel, kernel.prepared, pdl, top_k, row_bytes, offset))
        self._launch_combine(kernel, call, payload, output, stream, pdl)

    def _kernel_that_combines(self, call: CombineCall, output: Tensor, point: Point, top_k: int) -> Kernel:
        payload, regime = call.payload, point.regime
        kind = "e4m3" if call.low_precision else TYPE_NAMES[payload.dtype]
        if call.output_quantize is not None:
            return self._combine_kernel(f"combine_{regime}_quantized_{kind}", top_k)
        if regime != "small":
            return self._combine_kernel(f"combine_{regime}_{kind}", top_k)
        if output.dtype == payload.dtype:
            words = self._combine_kernel(f"combine_small_words_{kind}", top_k)
            widths, addresses = (payload.shape[2] * payload.dtype.itemsize,), (payload.data_ptr(), output.data_ptr())
            if self._whole_words(words, point, widths, addresses, call.num_sms):
                return words
        return self._combine_kernel(f"combine_small_bytes_{kind}", top_k)

    def _prepare_combine(
        self, kernel: Kernel, call: CombineCall, output: Tensor, point: Point, rows: _CombineRows
    ) -> None:
        """Every field but the caller's addresses, and the shape of the launch."""
        params, most, num_sms = kernel.parameters, call.runtime_max_tokens_per_rank, call.num_sms
        how, scales = call.output_quantize, call.output_scales
        self._offsets(params, _COMBINE_OFFSETS, call.context)
        params.combine_offset = rows.offset_bytes
        params.row_pitch = rows.row_bytes
        params.scaled = int(rows.made_of is not None)
        params.payload_type = 0 if rows.made_of is None else OUTPUT_TYPES.index(rows.made_of)
        params.num_tokens = call.num_tokens
        params.runtime_max_tokens_per_rank = most
        params.row_elements = call.payload.shape[2]
        params.output_type = OUTPUT_TYPES.index(TYPE_NAMES[output.dtype])
        params.staged = int(rows.staged)
        kind = "e4m3" if call.low_precision else TYPE_NAMES[call.payload.dtype]
        # A narrower row with scales may take as many bytes as a wider one without; and where rows lie behind the widest
        # dispatch so far, ranks that have seen different ones would read elsewhere than was written.
        params.digest = _digest([call.payload.shape[2], rows.row_bytes, rows.offset_bytes], kind)
        if how is not None and scales is not None:
            fill(params.quantized, how.wire_format, output, call.output, scales, call.scale_layout, None)
            # The table's threads of a small round are those of one of several CTAs that share a row.
            point = dataclasses.replace(point, threads=MAX_THREADS) if point.regime == "small" else point
        if point.regime == "small":
            self._small_shape(kernel, point, rows.row_bytes, most, num_sms, one_cta=how is not None)
        elif point.regime == "push":
            self._push_shape(kernel, point, rows.row_bytes, num_sms)
        else:
            self._bulk_shape(kernel, point, call.num_tokens, rows.row_bytes, num_sms)

    def _launch_combine(
        self, kernel: Kernel, call: CombineCall, payload: Tensor, output: Tensor, stream: Any, pdl: bool
    ) -> None:
        params = kernel.parameters
        params.payload = payload.data_ptr()
        params.output = output.data_ptr()
        how, scales = call.output_quantize, call.output_scales
        scale = None if how is None else how.global_scale
        if scales is not None:
            made = params.quantized
            made.rows, made.data, made.scales = params.output, call.output.data_ptr(), scales.data_ptr()
            made.global_scale = 0 if scale is None else scale.data_ptr()
        kernel.launch(stream.cuda_stream, pdl=pdl)
        if call.stream is not None:
            more = [] if scales is None else [call.output, scales, scale]
            self._used_on(stream, [payload, output, *more])

    def _is_overwritten(self, call: CombineCall, combine_offset: int) -> bool:
        """Whether peers may write to the payload while it is read: it lies in this rank's dispatch area.

        Once they know that this rank has begun, they push their rows there, or begin the next round, whose blocks lie
        elsewhere than this one's if R or a width is another.
        """
        if call.payload_in_workspace:
            return False
        start = self._layout.dispatch_offset(call.context)
        return self._meets(call.payload, start, combine_offset - start)

    def _meets(self, payload: Tensor, offset_bytes: int, num_bytes: int) -> bool:
        """Whether any of the payload lies in those bytes of this rank's workspace."""
        start = payload.data_ptr() - self.workspace.data_ptr() - self.ep_rank * self.workspace.stride(0) - offset_bytes
        return start < num_bytes and start + payload.numel() * payload.element_size() > 0

    def _staged(self, payload: Tensor, context: int) -> Tensor:
        """The payload copied to the combine area, where nobody writes."""
        num_bytes = payload.numel() * payload.element_size()
        start = self._layout.combine_offset(payload.shape[2] * payload.element_size(), context)
        area = self.workspace[self.ep_rank, start : start + num_bytes].view(payload.dtype).view(payload.shape)
        return area.copy_(payload)

    def _keep(self, key: tuple[object, ...], launch: _Launch) -> None:
        """Know a launch by `key`, whose first part is what its call is like; the last few of them."""
        if key[0] is not None:
            if len(self._alike) >= _MAX_KEPT:
                self._alike.clear()
            self._alike[key] = launch

    # ---- the host's side of failures -------------------------------------------------------------------------------

    def abort(self, reason: int) -> None:
        """Make every wait of launched and later kernels end; `reason` as in `HostWords.abort`."""
        for words in self.words:
            if not words.abort:
                words.abort = reason

    def retract(self, reason: int) -> None:
        """Take an `abort` of that reason back where nothing has ended by it."""
        for words in self.words:
            if words.abort == reason and not words.recorded:
                words.abort = 0

    def set_budgets(self, startup_timeout_s: float, timeout_s: float) -> None:
        """Deadlines of waits, also of those under captured graphs."""
        for words in self.words:
            words.startup_timeout_ns = int(startup_timeout_s * 1e9)
            words.timeout_ns = int(timeout_s * 1e9)

    def busy(self) -> bool:
        """Whether work launched so far is still under way; does not wait."""
        return self.stream is not None and not self.stream.query()

    def wait(self) -> None:
        """Wait for the work launched so far."""
        if self.stream is not None:
            self.stream.synchronize()

    def rounds(self) -> list[int]:
        """The last round that any kernel of each context has played. Waits for the device."""
        words = [self._round_state(context)[:2].tolist() for context in range(self._config.num_contexts)]
        return [later_round(*(word % ROUND_NUMBERS for word in of_context)) for of_context in words]

    def start_over(self, rounds: Sequence[int]) -> None:
        """Go on after `rounds` (per context, equal on all ranks, beyond what any has played), without failures."""
        for context, played in enumerate(rounds):
            state = self._round_state(context)
            state.zero_()
            # Numbers of 32 bits without a sign, in words with one.
            state[:2] = (played + ROUND_NUMBERS // 2) % ROUND_NUMBERS - ROUND_NUMBERS // 2
            words = self.words[context]
            words.recorded = words.kind = words.abort = 0
            words.first_round = next_round(played)
        torch.cuda.current_stream(self.device).synchronize()

    def _round_state(self, context: int) -> Tensor:
        region = self._layout.region("round_state", context)
        return self.workspace[self.ep_rank, region.offset_bytes : region.end_bytes].view(torch.int32)

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def _dispatch_kernel(self, name: str, wire: str | None, top_k: int) -> Kernel:
        key = ("dispatch", name, wire, top_k)
        if key not in self._kernels:
            self._load([wire], top_k, combine=False)
        return self._kernels[key]

    def _combine_kernel(self, name: str, top_k: int) -> Kernel:
        key = ("combine", name, top_k)
        if key not in self._kernels:
            self._load([], top_k, combine=True)
        return self._kernels[key]

    def _load(self, wires: Sequence[str | None], top_k: int, *, combine: bool) -> None:
        """Load the modules of dispatch for some wire formats, and those of combine; compiled side by side."""
        config, table = dataclasses.replace(self._config, top_k=top_k), self._needs_table
        sources = [("dispatch.cu", defines(config, wire_format=wire, placement_table=table)) for wire in wires]
        kinds = enumerate((*OUTPUT_TYPES, "e4m3") if combine else ())
        modules = [(kind, number, quantized) for number, kind in kinds for quantized in (False, True)]
        constants = defines(config, placement_table=table)
        for _, number, quantized in modules:
            chosen = {"ONE_TYPE": number, **({"QUANTIZED_OUTPUT": 1} if quantized else {})}
            sources.append(("combine.cu", {**constants, **chosen}))
        with ThreadPoolExecutor(max_workers=len(sources)) as pool:
            cubins = list(pool.map(self._compiled, sources))
        for wire, cubin in zip(wires, cubins, strict=False):
            self._take_dispatch(load(cubin, self.device), wire, top_k)
        for (kind, _, quantized), cubin in zip(modules, cubins[len(wires) :], strict=True):
            self._take_combine(load(cubin, self.device), kind, quantized, top_k)

    def _compiled(self, source: tuple[str, dict[str, int]]) -> bytes:
        return compile_kernel(*source, self._arch, preamble=device_source())[0]

    def _take_dispatch(self, library: Library, wire: str | None, top_k: int) -> None:
        image = image_bytes([self._config.dispatch_bytes_per_token] + [0] * MAX_PAYLOADS) + PIECE_BYTES * MAX_PAYLOADS
        for name in ("dispatch_small_words", "dispatch_small_bytes", "dispatch_bulk"):
            fused = wire is not None and name != "dispatch_bulk"
            kernel = library.kernel(name, DispatchParams, shared_bytes=_shared_bytes(image, fused))
            kernel.parameters.placement = self._table.data_ptr()
            self._constants(kernel.parameters)
            self._kernels["dispatch", name, wire, top_k] = kernel

    def _take_combine(self, library: Library, kind: str, quantized: bool, top_k: int) -> None:
        # Rows of the e4m3 wire are read where they lie, however few.
        regimes = ["bulk"] if kind == "e4m3" else ["small", "bulk", "push"]
        if quantized:
            ways = [f"{regime}_quantized" for regime in regimes]
        else:
            ways = [way for regime in regimes for way in _WAYS.get(regime, (regime,))]
        for way in ways:
            kernel = library.kernel(f"combine_{way}_{kind}", CombineParams)
            self._constants(kernel.parameters)
            self._kernels["combine", f"combine_{way}_{kind}", top_k] = kernel

    def _constants(self, params: Any) -> None:
        params.workspace = self.workspace.data_ptr()
        params.stride = self.workspace.stride(0)
        params.ep_rank = self.ep_rank
        params.max_num_tokens = self._config.max_num_tokens
        params.landing_tokens = self.landing_tokens

    def _offsets(self, params: Any, names: Sequence[str], context: int) -> None:
        """Fields that depend on the context alone."""
        params.host_words = self._pinned.data_ptr() + context * _WORDS_STRIDE
        for name in names:
            try:
                region = self._layout.region(name.removesuffix("_offset"), context)
            except KeyError:
                # A region that this configuration does not have; its kernels do not read the field.
                continue
            setattr(params, name, region.offset_bytes)

    # ---- shapes of launches ----------------------------------------------------------------------------------------

    def _point(self, phase: str, quantized: bool, widths: tuple[int, ...], most: int) -> Point:
        """The table's answer for a round, kept: `quantized` says that dispatch makes or combine reads a wire format."""
        key = (phase, quantized, widths, most)
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = self.tuning.choose(
                phase,
                "quantized" if quantized and phase == "dispatch" else "copied",
                ep_size=self._config.ep_size,
                row_bytes=image_bytes(widths),
                tokens=most,
                regimes=self._regimes(phase, quantized, widths, most),
            )
        return point

    def _regimes(self, phase: str, quantized: bool, widths: tuple[int, ...], most: int) -> tuple[str, ...]:
        # Rows of combine's e4m3 wire are read where they lie, however few.
        if phase == "combine" and quantized:
            return ("bulk",)
        pushes = phase == "combine" and self.pushes(widths[0], most)
        large = ("bulk", "push") if pushes else ("bulk",)
        if most > self.landing_tokens:
            return large
        if self._small_max_tokens is None:
            return ("small", *large)
        return ("small",) if most <= self._small_max_tokens else large

    def _whole_words(
        self,
        kernel: Kernel,
        point: Point,
        widths: tuple[int, ...],
        addresses: Sequence[int],
        num_sms: int | None,
        *,
        fused: bool = False,
    ) -> bool:
        """Whether a small launch may take `kernel`, which asks nothing of its bytes: see "Launch rules" in params."""
        if any(address % PIECE_BYTES for address in addresses):
            return False
        # The same rows have other CTAs at another R.
        key = (kernel, point, widths, num_sms)
        answer = self._whole.get(key)
        if answer is None:
            num_bytes = image_bytes(widths)
            columns, threads, _ = self._small_columns(
                kernel, point, num_bytes, num_sms, one_cta=fused, shared_bytes=_shared_bytes(num_bytes, fused)
            )
            one_sweep = columns * threads >= lines(num_bytes) * _LINE_THREADS
            # A row without bytes has no address, and the first payload's is read past the end of an image.
            answer = self._whole[key] = one_sweep and not any(width % PIECE_BYTES or not width for width in widths)
        return answer

    def _small_columns(
        self,
        kernel: Kernel,
        point: Point,
        num_bytes: int,
        num_sms: int | None,
        *,
        one_cta: bool = False,
        shared_bytes: int = 0,
    ) -> tuple[int, int, int]:
        """CTAs and threads of a row of the grid, and CTAs that may be resident."""
        threads_of_row = max(32, -(-lines(num_bytes) * _LINE_THREADS // 32) * 32)
        threads = min(threads_of_row, point.threads, kernel.max_threads)
        resident = self._max_resident(kernel, threads, shared_bytes, num_sms)
        columns = 1 if one_cta else -(-threads_of_row // (threads * point.parts_per_thread))
        return min(columns, max(1, resident // 2)), threads, resident

    def _small_shape(
        self,
        kernel: Kernel,
        point: Point,
        num_bytes: int,
        most: int,
        num_sms: int | None,
        *,
        one_cta: bool,
        shared_bytes: int = 0,
    ) -> None:
        """`one_cta`: whoever quantises has a whole row."""
        columns, threads, resident = self._small_columns(
            kernel, point, num_bytes, num_sms, one_cta=one_cta, shared_bytes=shared_bytes
        )
        rows = max(1, min(most, resident // columns - 1))
        kernel.shape((columns, 1 + rows), threads, shared_bytes)

    def _bulk_shape(self, kernel: Kernel, point: Point, num_rows: int, row_bytes: int, num_sms: int | None) -> None:
        blocks, threads, crowded = self._large_grid(kernel, point, num_sms)
        unit_bytes = max(point.unit_bytes, _CROWDED_UNIT_BYTES) if crowded else point.unit_bytes
        kernel.parameters.segments = _segments(num_rows, row_bytes, blocks * (threads // 32 - 1), unit_bytes)
        kernel.shape((blocks, 1), threads, 0)

    def _push_shape(self, kernel: Kernel, point: Point, row_bytes: int, num_sms: int | None) -> None:
        blocks, threads, crowded = self._large_grid(kernel, point, num_sms)
        # Equal on all ranks: each reads the flags that the others raise.
        kernel.parameters.segments = max(1, min(MAX_PUSHED_SEGMENTS, row_bytes // point.unit_bytes))
        push_warps = max(point.push_warps, threads // 64) if crowded else point.push_warps
        kernel.parameters.push_warps = max(1, min(push_warps, threads // 32 - 1))
        kernel.shape((blocks, 1), threads, 0)

    def _large_grid(self, kernel: Kernel, point: Point, num_sms: int | None) -> tuple[int, int, bool]:
        """CTAs, their threads, and whether they are fewer than the point's: then each has all the threads it can."""
        wanted = min(point.ctas or self._num_sms, self._num_sms)
        allowed = wanted if num_sms is None else min(wanted, max(1, num_sms))
        threads = min(point.threads if allowed == wanted else MAX_THREADS, kernel.max_threads)
        return min(allowed, self._max_resident(kernel, threads, 0, None), MAX_CTAS), threads, allowed < wanted

    def _max_resident(self, kernel: Kernel, threads: int, shared: int, num_sms: int | None) -> int:
        key = (kernel, threads, shared)
        per_sm = self._resident.get(key)
        if per_sm is None:
            per_sm = self._resident[key] = kernel.blocks_per_sm(threads, shared)
        sms = self._num_sms if num_sms is None else max(1, min(num_sms, self._num_sms))
        return max(2, per_sm * sms // self._sharers)

    def _pdl(self, wanted: bool | None, point: Point) -> bool:
        # A grid that comes early may take the place of another rank's, for which this device is waiting.
        if self._sharers > 1:
            return False
        return point.pdl if wanted is None else wanted

    # ---- streams ---------------------------------------------------------------------------------------------------

    def _enter(self, stream: Any) -> Any:
        """The stream to launch on, behind what this object launched on another one."""
        if stream is None:
            # Making a stream object takes longer than a launch, and nearly always it is the stream of the last one.
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            last = self.stream
            if last is not None and last.cuda_stream == handle:
                return last
            stream = torch.cuda.current_stream(self.device)
        elif isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]
        last = self.stream
        if last is not None and last.cuda_stream != stream.cuda_stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)
        self.stream = stream
        return stream

    def _used_on(self, stream: Any, tensors: Sequence[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


def _shared_bytes(num_bytes: int, fused: bool) -> int:
    """Of a CTA that quantises: it makes the image of a token there."""
    return -(-num_bytes // 16) * 16 if fused else 0


def _segments(num_rows: int, row_bytes: int, num_warps: int, unit_bytes: int) -> int:
    """Units that a row is cut into: one that a warp moves at a time, or less where few rows must feed all warps."""
    most = max(1, row_bytes // _SEGMENT_BYTES)
    return max(-(-row_bytes // unit_bytes), min(most, -(-2 * num_warps // max(num_rows, 1))))


def _digest(widths: Sequence[int], more: object) -> int:
    return zlib.crc32(repr((widths, more)).encode())


def _check_workspace(workspace: Tensor, config: ExchangeConfig, layout: WorkspaceLayout) -> None:
    fits = (
        workspace.is_cuda
        and workspace.dtype == torch.uint8
        and workspace.dim() == 2
        and workspace.shape[0] == config.ep_size
        and workspace.shape[1] >= layout.num_bytes
        and workspace.stride(1) == 1
        and workspace.stride(0) % ALIGNMENT == 0
        and workspace.data_ptr() % ALIGNMENT == 0
    )
    if not fits:
        raise ShapeError(
            what="workspace",
            got=f"{workspace.dtype} {tuple(workspace.shape)} strides {workspace.stride()} on {workspace.device}",
            wanted=f"uint8 [{config.ep_size}, >= {layout.num_bytes}] on a GPU, rows on multiples of {ALIGNMENT} bytes",
        )
