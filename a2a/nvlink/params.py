"""nvlink/params: the one declaration of what the kernels are told, and of the control memory they keep.

Owns the parameter structs, the words shared with the host, the names and sizes of the control regions, and the
device-side text of all of them. Refuses to know how a kernel is compiled, launched or how memory is mapped.

Memory
    All workspaces lie in one address range: byte `b` of rank `r` is `workspace + r * stride + b` on every rank. All
    `*_offset` fields count bytes from the start of a rank's workspace and come from `WorkspaceLayout`. The workspace
    must have been zeroed once, on all ranks, before the first kernel of any rank. Regions of a context
    (`control_regions`):

    round_state       2048                local words. u32 at byte 0: dispatch_round, the last round whose
                                          combine has run; 4: combine_round, the round whose dispatch has run;
                                          8: error, nonzero from the first failure until a reset; 12: the last
                                          round whose rows this rank has pushed. Each 128-byte
                                          line from 1 on holds one counter or time.
    dispatch_header   2*ep*32             by round parity and source: u64 (round << 32 | R), (round << 32 | digest),
                                          (round << 32 | CTAs that will raise a flag)
    combine_header    2*ep*32             the same for combine; R, digest of the row, CTAs that stage (0: none)
    dispatch_flags    2*ep*MAX_CTAS*4     u32 round, by parity, source, CTA of the source; bulk regime
    combine_flags     2*ep*MAX_CTAS*4     the same; staged rows of the bulk combine
    pushed_flags      ep*M*16             u32 round, by the rank that held a row, its slot there, segment; pushed rows
                                          of combine. Only with scrubbing: without it, rows that no token was
                                          written to stay as they are, and none may land there
    sent_bits         ep*W*8              local, by destination and 32 tokens: u64 (round << 32 | one bit per token)
    valid_bits        2*ep*W*8            by parity, source, 32 tokens: the same word as its source sent it
    tables_ready      W*4                 local u32 round per 32 tokens: this rank's tables are written
    eplb_landing      2*ep*Es*8           u64 (round << 32 | statistic); only if Es > 0
    dispatch_landing  2*ep*T*L*128        small regime: by parity, source, token: lines of 120 bytes and an 8-byte tag
    combine_landing   ep*T*L'*128         small regime: by the rank that held the row, and its slot there
    where W = ceil(M/32), T = `landing_tokens(config)`, and L, L' the lines of the widest row that the config allows.

Rounds
    The kernels count rounds themselves: dispatch plays round dispatch_round + 1 and writes combine_round, combine plays
    combine_round and writes dispatch_round, launches that find a failure too. Each reads only the word that the other
    writes, so no CTA sees it change. No round has the number 0, which all memory bears at first: behind 2^32 - 1 comes
    2, which keeps the parities in turn.
    A reset (all ranks' launched work done, then a barrier, then this, then a barrier) writes dispatch_round =
    combine_round = N on all ranks, N being `next_round` of the latest that any rank has played (`later_round`), and
    zeroes the rest of round_state; HostWords.first_round = next_round(N) gives that round the start-up budget again.

Regimes
    "small", "bulk" or, for combine, "push", as the regime table has it for R, the widths of the rows and ep. Must be
    equal on all ranks: R, the widths, the config and the table are. dispatch and combine of a round may differ in
    regime. A small launch handles any R <= landing_tokens(config), a push any R for which `pushed_rows_fit`: its rows
    land in the dispatch area, which is dead from the start of combine on. The next bulk dispatch of a rank that has
    pushed waits for every rank's header before it writes there, and so until those rows are read.

Kernels, of dispatch.cu a module for each wire format it makes, of combine.cu two for each type of payload; entry points
    dispatch.cu   dispatch_small_{words,bytes}, dispatch_bulk                        (DispatchParams by value)
    combine.cu    combine_small_{words,bytes}_{bf16,fp16,fp32}, combine_bulk_{bf16,fp16,fp32,e4m3},
                  combine_push_{bf16,fp16,fp32}; with the constant QUANTIZED_OUTPUT instead
                  combine_small_quantized_{bf16,fp16,fp32}, combine_bulk_quantized_{bf16,fp16,fp32,e4m3},
                  combine_push_quantized_{bf16,fp16,fp32}                            (CombineParams)
    the suffix being the type of the payload; the output type is the field output_type. e4m3: rows of
    low_precision_bytes_per_token, which a launch that stages makes of rows of payload_type, or plain e4m3 rows;
    row_pitch apart. quantized: sums are left in `output`, then made into what `quantized` says by those who wrote them.

Launch rules
    block: (x, 1, 1), x a multiple of 32 up to MAX_THREADS; small launches but those of a quantising dispatch:
        MAX_SMALL_THREADS; bulk and push with quantised output: 3/4 of MAX_THREADS. What a kernel was compiled for
        bounds it in any case.
    small dispatch: grid (c, 1 + y, 1): row 0 of the grid routes and counts, rows 1.. walk the tokens 0..R-1.
        c * x / 8 should cover the lines of a row (`lines(image_bytes(...))`), y = R; any c, y >= 1 is right.
        With a quantising wire format c must be 1 and dynamic shared memory `image_bytes(...)`, rounded up to 16.
    small combine: grid (c, 1 + y, 1), likewise, lines of a row from its bytes; c = 1 where output is quantised, for a
        CTA then makes whole rows of it.
    small_words: c * x / 8 covers the lines of a row; rows of all payloads (combine: of payload and output, of one type)
        are multiples of 8 bytes and lie on such. small_bytes takes anything.
    bulk: grid (g, 1, 1), g <= MAX_CTAS, x >= 64 (the last warp only signals). segments >= 1 cuts a row's copy into
        that many units, so that n * segments units feed g * (x/32 - 1) warps.
    push: as bulk, segments <= MAX_PUSHED_SEGMENTS, rows of whole 16 bytes, payload not in the dispatch area; of the
        warps of a CTA push_warps, at least one and fewer than all, send before they add, each fencing for itself.
    All CTAs of a launch, and those of all ranks that share a device, must be resident together: that is what bounds
    c * (1 + y) and g, and why programmatic launch (which makes the next kernel resident early) must be off when ranks
    share a device.

Compile-time constants (-D): `defines(config, ...)`, and for combine.cu ONE_TYPE, an index into OUTPUT_TYPES or 3 for
e4m3 (all types where it is not given), and QUANTIZED_OUTPUT for the kernels that make a format of their sums.

Waiting
    Every wait ends: by its signal, by HostWords.timeout_ns (start-up budget in first_round), by HostWords.abort, or
    because another CTA failed. The first failure of a context fills the record in HostWords, `recorded` last, and sets
    round_state's error. The failing launch then writes recv_counts 0, every id of the ids payload invalid, or the
    output NaN; later launches do the same at once. The host may change abort and the budgets at any time, also under
    a captured graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from a2a.config import MAX_PAYLOADS, ExchangeConfig

MAX_CTAS: Final = 512
"""CTAs of a bulk launch; each has a flag of its own at every receiver."""
MAX_PUSHED_SEGMENTS: Final = 4
"""Parts of a pushed row that come with a flag of their own."""
MAX_THREADS: Final = 512
"""Threads of a CTA: at most 128 registers each."""
MAX_SMALL_THREADS: Final = 320
"""Threads of a CTA of the small regime where nothing is quantised: three fit at once with 64 registers each."""
LINE_BYTES: Final = 128
LINE_DATA_BYTES: Final = 120
"""What a line carries beside its 8-byte tag."""
PIECE_BYTES: Final = 8
"""Every payload of a row starts on such a boundary of its image in a landing area."""
ROUND_STATE_BYTES: Final = 2048
HEADER_BYTES: Final = 32
MAX_LANDING_TOKENS: Final = 512
ROUND_NUMBERS: Final = 1 << 32
LANDING_BUDGET_BYTES: Final = 64 << 20
"""Landing areas of all contexts together take at most this."""

TYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OUTPUT_TYPES: Final = tuple(TYPE_NAMES.values())
"""CombineParams.output_type is an index into this; so is DispatchParams.input_type."""
WIRE_FORMATS: Final = (None, "fp8_block", "mxfp8", "nvfp4", "mxfp4")
"""The constant WIRE_FORMAT is an index into this, and QuantizeParams.wire_format; None: rows are copied as bytes."""

SCALE_LAYOUTS: Final = ("linear", "swizzled_128x4", "swizzled_8x4")
"""QuantizeParams.scale_layout is an index into this."""

KINDS: Final = {1: "timeout", 2: "aborted", 3: "mismatch of runtime_max_tokens_per_rank", 4: "mismatch of row widths"}
"""HostWords.kind."""
PHASES: Final = {1: "dispatch", 2: "combine"}
"""HostWords.phase."""
SIGNALS: Final = {1: "header", 2: "routing bits", 3: "row", 4: "completion flag", 5: "eplb statistics"}
"""HostWords.signal: what was waited for."""


class HostWords(ctypes.Structure):
    """Pinned host memory that kernels of one context can read and write; one block per context, zeroed at build.

    Host writes: abort, first_round, timeout_ns, startup_timeout_ns. Kernels write the rest, once, `recorded` last.
    """

    _fields_ = (
        ("abort", ctypes.c_uint32),  # 0: no; else 1 + the rank that is lost, or 0xFFFFFFFF for no rank in particular
        ("first_round", ctypes.c_uint32),  # the round with the start-up budget
        ("timeout_ns", ctypes.c_uint64),
        ("startup_timeout_ns", ctypes.c_uint64),
        ("recorded", ctypes.c_uint32),  # 1 once all fields below hold
        ("kind", ctypes.c_uint32),  # KINDS
        ("phase", ctypes.c_uint32),  # PHASES
        ("signal", ctypes.c_uint32),  # SIGNALS
        ("peer", ctypes.c_uint32),
        ("round", ctypes.c_uint32),
        ("seen", ctypes.c_uint32),  # timeout: round last seen; mismatch: the peer's value
        ("wanted", ctypes.c_uint32),  # timeout: round waited for; mismatch: this rank's value
        ("waited_us", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class DispatchParams(ctypes.Structure):
    """What dispatch_small and dispatch_bulk are told. Pointers are device addresses, offsets count from a workspace."""

    _fields_ = (
        ("workspace", ctypes.c_uint64),  # of rank 0, as mapped here
        ("stride", ctypes.c_uint64),  # bytes from one rank's workspace to the next
        ("host_words", ctypes.c_uint64),  # HostWords of the context, as the device sees it
        ("topk_ids", ctypes.c_uint64),  # [n, k], id_bytes each; may be null if n = 0
        ("placement", ctypes.c_uint64),  # int32 [E]; read only with PLACEMENT_TABLE
        ("eplb_local_stats", ctypes.c_uint64),  # int32 [Es], or null
        ("global_scale", ctypes.c_uint64),  # fp32 scalar, or null for 1.0
        ("payload_rows", ctypes.c_uint64 * MAX_PAYLOADS),  # [n, *]; null where quantisation makes the rows
        ("payload_offsets", ctypes.c_uint64 * MAX_PAYLOADS),  # Payload.offset_bytes
        ("payload_bytes", ctypes.c_uint32 * MAX_PAYLOADS),  # row on the wire
        ("payload_fill", ctypes.c_int32 * MAX_PAYLOADS),  # byte of padded rows, or -1 to leave them alone
        ("round_state_offset", ctypes.c_uint64),
        ("dispatch_header_offset", ctypes.c_uint64),
        ("dispatch_flags_offset", ctypes.c_uint64),
        ("sent_bits_offset", ctypes.c_uint64),
        ("valid_bits_offset", ctypes.c_uint64),
        ("tables_ready_offset", ctypes.c_uint64),
        ("eplb_landing_offset", ctypes.c_uint64),
        ("dispatch_landing_offset", ctypes.c_uint64),
        ("send_counts_offset", ctypes.c_uint64),
        ("recv_counts_offset", ctypes.c_uint64),
        ("topk_target_ranks_offset", ctypes.c_uint64),
        ("topk_send_indices_offset", ctypes.c_uint64),
        ("eplb_gathered_stats_offset", ctypes.c_uint64),
        ("row_valid_offset", ctypes.c_uint64),  # uint8 [ep, R]; written with ROW_ORDER_TOKEN
        ("rank_mask_offset", ctypes.c_uint64),  # uint64 [ceil(ep/64)]; read with RANK_MASK
        ("ep_rank", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),  # n
        ("runtime_max_tokens_per_rank", ctypes.c_uint32),  # R
        ("max_num_tokens", ctypes.c_uint32),  # M
        ("num_payloads", ctypes.c_uint32),
        ("ids_payload", ctypes.c_int32),  # payload whose padded rows get invalid_id, or -1
        ("invalid_id", ctypes.c_int32),
        ("id_bytes", ctypes.c_uint32),  # 4 or 8, of topk_ids
        ("digest", ctypes.c_uint32),  # of widths, statistics and regime; compared with every peer's
        ("landing_tokens", ctypes.c_uint32),  # T
        ("num_eplb_stats", ctypes.c_uint32),  # Es when eplb_local_stats is given, else 0; equal on all ranks
        ("segments", ctypes.c_uint32),  # units that a row is cut into; bulk
        ("hidden_size", ctypes.c_uint32),  # elements of an unquantised row; with WIRE_FORMAT
        ("input_type", ctypes.c_uint32),  # index into OUTPUT_TYPES; with WIRE_FORMAT
    )


class QuantizeParams(ctypes.Structure):
    """Rows and what becomes of them in a format with scales of one byte; see quantize_rows.fill."""

    _fields_ = (
        ("rows", ctypes.c_uint64),  # [n, hidden_size]
        ("data", ctypes.c_uint64),  # [n, row_elements] of the wire format
        ("scales", ctypes.c_uint64),  # [layout_rows, layout_columns] bytes in scale_layout
        ("global_scale", ctypes.c_uint64),  # fp32 scalar, or null for 1.0
        ("num_rows", ctypes.c_uint32),
        ("hidden_size", ctypes.c_uint32),
        ("row_elements", ctypes.c_uint32),  # columns of padding included
        ("scale_columns", ctypes.c_uint32),
        ("layout_rows", ctypes.c_uint32),  # padding of the layout included
        ("layout_columns", ctypes.c_uint32),
        ("input_type", ctypes.c_uint32),  # index into OUTPUT_TYPES
        ("scale_layout", ctypes.c_uint32),  # index into SCALE_LAYOUTS
        ("wire_format", ctypes.c_uint32),  # index into WIRE_FORMATS
        ("pad", ctypes.c_uint32),
    )


class CombineParams(ctypes.Structure):
    """What combine_small_*, combine_bulk_* and combine_push_* are told."""

    _fields_ = (
        ("workspace", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("host_words", ctypes.c_uint64),
        ("payload", ctypes.c_uint64),  # [ep, R, H']; this rank's combine area itself, or any other memory
        ("output", ctypes.c_uint64),  # [n, H'] sums; may be null if n = 0
        ("round_state_offset", ctypes.c_uint64),
        ("combine_header_offset", ctypes.c_uint64),
        ("combine_flags_offset", ctypes.c_uint64),
        ("valid_bits_offset", ctypes.c_uint64),
        ("combine_landing_offset", ctypes.c_uint64),
        ("topk_target_ranks_offset", ctypes.c_uint64),
        ("topk_send_indices_offset", ctypes.c_uint64),
        ("recv_counts_offset", ctypes.c_uint64),
        ("combine_offset", ctypes.c_uint64),  # the combine area, [ep, R, H'] this round
        ("rank_mask_offset", ctypes.c_uint64),
        ("dispatch_offset", ctypes.c_uint64),  # the dispatch area, where pushed rows land as [ep, R, H']
        ("pushed_flags_offset", ctypes.c_uint64),
        ("ep_rank", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("runtime_max_tokens_per_rank", ctypes.c_uint32),
        ("max_num_tokens", ctypes.c_uint32),
        ("row_elements", ctypes.c_uint32),  # H'
        ("output_type", ctypes.c_uint32),  # index into OUTPUT_TYPES
        ("staged", ctypes.c_uint32),  # bulk: 1 if payload is not the combine area and must be copied there
        ("digest", ctypes.c_uint32),  # of width, type and place of the rows; compared with every peer's
        ("landing_tokens", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("row_pitch", ctypes.c_uint32),  # bytes from one row to the next; combine_bulk_e4m3
        ("scaled", ctypes.c_uint32),  # 1 if rows carry a scale per 128 elements; combine_bulk_e4m3
        ("push_warps", ctypes.c_uint32),  # warps of a CTA that send rows before they add; combine_push
        ("payload_type", ctypes.c_uint32),  # scaled: index into OUTPUT_TYPES of the rows that become e4m3 when staged
        ("quantized", QuantizeParams),  # what becomes of `output`; combine_*_quantized_*
    )


class ProbeParams(ctypes.Structure):
    """What probe_lines is told."""

    _fields_ = (
        ("memory", ctypes.c_uint64),  # of rank 0, as mapped here
        ("stride", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),  # u32 [ep, 2] of this rank: lines looked at, lines torn
        ("peers", ctypes.c_uint64 * 4),  # bit r: lines go to and come from rank r
        ("budget_ns", ctypes.c_uint64),
        ("ep_rank", ctypes.c_uint32),
        ("updates", ctypes.c_uint32),  # of every line
    )


class ScrubParams(ctypes.Structure):
    """What scrub_ids is told; see scrub_ids.py."""

    _fields_ = (
        ("ids", ctypes.c_uint64),  # [ep, R, k], on a multiple of id_bytes
        ("recv_counts", ctypes.c_uint64),  # int32 [ep]
        ("invalid_id", ctypes.c_uint64),  # two's complement
        ("ep_size", ctypes.c_uint32),
        ("runtime_max_tokens_per_rank", ctypes.c_uint32),  # R
        ("top_k", ctypes.c_uint32),  # k
        ("id_bytes", ctypes.c_uint32),  # 4 or 8
    )


STRUCTS: Final = (HostWords, DispatchParams, QuantizeParams, CombineParams, ProbeParams, ScrubParams)
_C_NAMES: Final = {ctypes.c_uint32: "u32", ctypes.c_int32: "i32", ctypes.c_uint64: "u64"}


def device_source() -> str:
    """CUDA C++ text that declares the integer types, the shared constants and the structs, and asserts their sizes.

    To be placed before the text of every kernel file; it needs no header.
    """
    lines = [
        "using u8 = unsigned char; using u16 = unsigned short; using u32 = unsigned int; using i32 = int;",
        "using u64 = unsigned long long; using i64 = long long;",
        f"constexpr u32 MAX_CTAS = {MAX_CTAS}, MAX_THREADS = {MAX_THREADS}, MAX_SMALL_THREADS = {MAX_SMALL_THREADS};",
        f"[[maybe_unused]] constexpr u32 MAX_PUSHED_SEGMENTS = {MAX_PUSHED_SEGMENTS};",
        f"[[maybe_unused]] constexpr u32 MAX_LANDING_TOKENS = {MAX_LANDING_TOKENS};",
        *(
            f"[[maybe_unused]] constexpr u32 WIRE_{name.upper()} = {number};"
            for number, name in enumerate(WIRE_FORMATS)
            if name is not None
        ),
        f"constexpr u32 LINE_BYTES = {LINE_BYTES}, LINE_DATA_BYTES = {LINE_DATA_BYTES}, HEADER_BYTES = {HEADER_BYTES};",
    ]
    for struct in STRUCTS:
        lines.append(f"struct {struct.__name__} {{")
        fields: Sequence[tuple[str, Any]] = struct._fields_
        for name, kind in fields:
            count = ""
            if issubclass(kind, ctypes.Array):
                count, kind = f"[{kind._length_}]", kind._type_
            lines.append(f"  {_C_NAMES.get(kind, kind.__name__)} {name}{count};")
        lines.append("};")
        size, told = ctypes.sizeof(struct), f"{struct.__name__}: host and device differ"
        lines.append(f'static_assert(sizeof({struct.__name__}) == {size}, "{told}");')
    return "\n".join(lines) + "\n"


def defines(config: ExchangeConfig, *, wire_format: str | None = None, placement_table: bool) -> dict[str, int]:
    """Every -D constant that all kernel files share; combine.cu has two of its own.

    Args:
        config: the exchange.
        wire_format: format made inside dispatch, or None where rows are copied as bytes.
        placement_table: experts do not lie in contiguous equal shares, so the kernel reads DispatchParams.placement.
    """
    return {
        "EP_SIZE": config.ep_size,
        "TOP_K": config.top_k,
        "NUM_EXPERTS": config.num_experts,
        "ROW_ORDER_TOKEN": int(config.row_order == "token"),
        "RANK_MASK": int(config.enable_rank_mask),
        "PLACEMENT_TABLE": int(placement_table),
        "WIRE_FORMAT": WIRE_FORMATS.index(wire_format),
    }


def image_bytes(row_bytes: Sequence[int]) -> int:
    """Bytes of a token's payloads one after another, each starting on a multiple of 8."""
    return sum(-(-width // PIECE_BYTES) * PIECE_BYTES for width in row_bytes)


def lines(num_bytes: int) -> int:
    """Landing lines of a row of that many bytes."""
    return -(-num_bytes // LINE_DATA_BYTES)


def _max_lines(config: ExchangeConfig) -> tuple[int, int]:
    # Widths vary per round; each of MAX_PAYLOADS payloads may lose 7 bytes to its boundary.
    dispatch = config.dispatch_bytes_per_token + (PIECE_BYTES - 1) * MAX_PAYLOADS
    return lines(dispatch), lines(config.combine_bytes_per_token)


def next_round(number: int) -> int:
    """The number of the round behind one."""
    return 2 if number == ROUND_NUMBERS - 1 else number + 1


def later_round(one: int, other: int) -> int:
    """The later of two rounds, which are fewer than half of all numbers apart."""
    return one if (one - other) % ROUND_NUMBERS < ROUND_NUMBERS // 2 else other


def landing_tokens(config: ExchangeConfig) -> int:
    """Tokens per rank that the landing areas hold, 0 if the budget is too small for one."""
    dispatch, combine = _max_lines(config)
    per_token = config.ep_size * (2 * dispatch + combine) * LINE_BYTES * config.num_contexts
    return min(config.max_num_tokens, MAX_LANDING_TOKENS, LANDING_BUDGET_BYTES // per_token)


def pushed_rows_fit(config: ExchangeConfig, row_bytes: int, runtime_max_tokens_per_rank: int) -> bool:
    """Whether a dispatch area has room for pushed combine rows of that width; equal on all ranks."""
    area = config.ep_size * config.max_num_tokens * config.dispatch_bytes_per_token
    rows = config.ep_size * runtime_max_tokens_per_rank * row_bytes
    return config.scrub is not None and config.ep_size > 1 and row_bytes % 16 == 0 and rows <= area


def control_regions(config: ExchangeConfig) -> list[tuple[str, int]]:
    """(name, bytes) of the regions that the kernels need in each context; see the module's docstring."""
    ep, words = config.ep_size, -(-config.max_num_tokens // 32)
    dispatch, combine = _max_lines(config)
    tokens = landing_tokens(config)
    regions = [
        ("round_state", ROUND_STATE_BYTES),
        ("dispatch_header", 2 * ep * HEADER_BYTES),
        ("combine_header", 2 * ep * HEADER_BYTES),
        ("dispatch_flags", 2 * ep * MAX_CTAS * 4),
        ("combine_flags", 2 * ep * MAX_CTAS * 4),
        ("sent_bits", ep * words * 8),
        ("valid_bits", 2 * ep * words * 8),
        ("tables_ready", words * 4),
    ]
    if config.scrub is not None and ep > 1:
        regions.append(("pushed_flags", ep * config.max_num_tokens * MAX_PUSHED_SEGMENTS * 4))
    if config.eplb_stats_num_experts:
        regions.append(("eplb_landing", 2 * ep * config.eplb_stats_num_experts * 8))
    if tokens:
        regions.append(("dispatch_landing", 2 * ep * tokens * dispatch * LINE_BYTES))
        regions.append(("combine_landing", ep * tokens * combine * LINE_BYTES))
    return regions
