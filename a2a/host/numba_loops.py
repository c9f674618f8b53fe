"""host/numba_loops: the loops over tokens and rows as numba kernels; imported only where numba is installed.

Owns the kernels, which are compiled once per machine and read from disk afterwards. Refuses to know the protocol.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from a2a.host.loops import Loops
from a2a.host.numba_atomics import fence, pointer

_BF16: Final = 0
_FP16: Final = 1
_FP32: Final = 2
_KINDS: Final = {torch.bfloat16: _BF16, torch.float16: _FP16, torch.float32: _FP32}
_BLOCK: Final = 8192
"""Columns summed at a time: their fp32 accumulators take 32 KiB of the first-level cache, and a row of the usual width
is read in one go, as the hardware prefetches best."""

_FEW: Final = 4
"""Rows that are summed in one pass."""

_LINE_BYTES: Final = 64
_STREAMED_BYTES: Final = 8 << 20
"""From here on rows are written past the caches: they would not stay there until the experts read them, and a line that
is not read before it is written takes half the memory traffic. Measured with two ranks on two cores: twice as fast at
100 MiB, a third faster at 14 MiB, half as fast at 1 MiB."""


@intrinsic
def _float_of(typingctx: Any, bits: Any) -> Any:
    """fp32 with the given uint32 pattern; numba itself can only view arrays, which keeps loops from vectorising."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(typingctx: Any, value: Any) -> Any:
    """uint32 pattern of an fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float_of_half(typingctx: Any, bits: Any) -> Any:
    """fp32 value of a uint16 fp16 pattern, exact."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _half_of(typingctx: Any, value: Any) -> Any:
    """uint16 fp16 pattern of an fp32, to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _copy_bytes(typingctx: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy between two addresses; a loop over slices is not recognised as one, since they might overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to_bytes, from_bytes = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, to_bytes, from_bytes, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _stream_bytes(typingctx: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """Like `_copy_bytes`, past the caches: a line is written without being read first.

    The target and `num_bytes` are multiples of 64. Such stores are ordered by `fence` alone.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8).as_pointer()
        to_lines, from_lines = (builder.inttoptr(address, line) for address in args[:2])
        past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        lines = builder.udiv(args[2], ir.Constant(ir.IntType(64), _LINE_BYTES))
        with cgutils.for_range(builder, lines) as loop:
            value = builder.load(builder.gep(from_lines, [loop.index]), align=1)
            store = builder.store(value, builder.gep(to_lines, [loop.index]), align=_LINE_BYTES)
            store.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@njit(inline="always")
def _bf16_of(value: Any) -> Any:
    bits = _bits_of(value)
    if value != value:
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(cache=True, nogil=True)
def _route(
    ids_at: int,
    wide_ids: bool,
    num_tokens: int,
    top_k: int,
    owners_at: int,
    num_experts: int,
    active_at: int,
    ep: int,
    compact: bool,
    slots_at: int,
    counts_at: int,
    targets_at: int,
    indices_at: int,
) -> None:
    narrow = carray(pointer(ids_at), (num_tokens, top_k), np.int32)
    wide = carray(pointer(ids_at), (num_tokens, top_k), np.int64)
    owners = carray(pointer(owners_at), num_experts, np.int32)
    active = carray(pointer(active_at), ep, np.uint8)
    slots = carray(pointer(slots_at), (num_tokens, ep), np.int32)
    counts = carray(pointer(counts_at), ep, np.int32)
    targets = carray(pointer(targets_at), (num_tokens, top_k), np.int32)
    indices = carray(pointer(indices_at), (num_tokens, top_k), np.int32)
    slots[:] = -1
    counts[:] = 0
    for token in range(num_tokens):
        for pick in range(top_k):
            expert = wide[token, pick] if wide_ids else np.int64(narrow[token, pick])
            rank = -1
            if 0 <= expert < num_experts:
                rank = owners[expert]
                if active[rank] == 0:
                    rank = -1
            if rank >= 0 and slots[token, rank] < 0:
                slot = counts[rank] if compact else token
                counts[rank] += 1
                slots[token, rank] = slot
                targets[token, pick] = rank
                indices[token, pick] = slot
            else:
                targets[token, pick] = -1
                indices[token, pick] = -1


@njit(cache=True, nogil=True)
def _write_counts(counts_at: int, active_at: int, ep: int, there_at: int, stride: int) -> None:
    counts = carray(pointer(counts_at), ep, np.int32)
    active = carray(pointer(active_at), ep, np.uint8)
    there = carray(pointer(there_at), (ep - 1) * stride + 1, np.int32)
    for rank in range(ep):
        if active[rank] != 0:
            there[rank * stride] = counts[rank]


@njit(cache=True, nogil=True)
def _write_rows(rows_at: int, row_bytes: int, slots_at: int, num_tokens: int, ep: int, to: int, stride: int) -> None:
    slots = carray(pointer(slots_at), (num_tokens, ep), np.int32)
    # Token by token, so that a row is read from memory once and stored to every rank from the cache.
    if (to | stride | row_bytes) % _LINE_BYTES == 0 and (slots >= 0).sum() * row_bytes >= _STREAMED_BYTES:
        for token in range(num_tokens):
            for rank in range(ep):
                slot = slots[token, rank]
                if slot >= 0:
                    _stream_bytes(to + rank * stride + slot * row_bytes, rows_at + token * row_bytes, row_bytes)
        fence()
        return
    for token in range(num_tokens):
        for rank in range(ep):
            slot = slots[token, rank]
            if slot >= 0:
                _copy_bytes(to + rank * stride + slot * row_bytes, rows_at + token * row_bytes, row_bytes)


@njit(cache=True, nogil=True)
def _fill_padded(
    area_at: int,
    item_bytes: int,
    ep: int,
    rows: int,
    columns: int,
    counts_at: int,
    valid_at: int,
    valid_stride: int,
    value: int,
) -> None:
    elements = ep * rows * columns
    bytes_ = carray(pointer(area_at), elements, np.uint8)
    words = carray(pointer(area_at), elements, np.int32)
    doubles = carray(pointer(area_at), elements, np.int64)
    counts = carray(pointer(counts_at), ep, np.int32)
    valid = carray(pointer(valid_at), ep * valid_stride, np.uint8)
    for block in range(ep):
        for row in range(rows):
            padded = row >= counts[block] if valid_at == 0 else valid[block * valid_stride + row] == 0
            if padded:
                first = (block * rows + row) * columns
                if item_bytes == 1:
                    bytes_[first : first + columns] = value
                elif item_bytes == 4:
                    words[first : first + columns] = value
                else:
                    doubles[first : first + columns] = value


@njit(inline="always")
def _of_bf16(bits: Any) -> Any:
    return _float_of(np.uint32(bits) << np.uint32(16))


@njit(cache=True, nogil=True)
def _sum_few(rows: Any, starts: Any, count: int, out: Any) -> None:
    """Sum up to four bf16 rows of `rows`, starting at `starts[:count]`, into bf16: the usual case.

    In one pass, without accumulators in memory: twice as fast as `_sum_rows` from the caches.
    """
    width, zero = out.shape[0], np.float32(0.0)
    first = rows[starts[0] : starts[0] + width]
    second = rows[starts[1] : starts[1] + width]
    third = rows[starts[2] : starts[2] + width]
    fourth = rows[starts[3] : starts[3] + width]
    if count == 1:
        for column in range(width):
            out[column] = _bf16_of(zero + _of_bf16(first[column]))
    elif count == 2:
        for column in range(width):
            out[column] = _bf16_of(zero + _of_bf16(first[column]) + _of_bf16(second[column]))
    elif count == 3:
        for column in range(width):
            total = zero + _of_bf16(first[column]) + _of_bf16(second[column])
            out[column] = _bf16_of(total + _of_bf16(third[column]))
    else:
        for column in range(width):
            total = zero + _of_bf16(first[column]) + _of_bf16(second[column])
            out[column] = _bf16_of(total + _of_bf16(third[column]) + _of_bf16(fourth[column]))


@njit(cache=True, nogil=True)
def _sum_rows(
    memory_at: int,
    kind: int,
    start: int,
    stride: int,
    slots_at: int,
    num_tokens: int,
    ep: int,
    width: int,
    out_at: int,
    out_kind: int,
) -> None:
    """Sum each token's rows; see `Loops.sum_rows` for `start`, `stride` and `slots`.

    Args:
        memory_at: address of all workspaces, whose rows are of `kind`.
        kind, out_kind: 0 bf16, 1 fp16, 2 fp32.
        slots_at: address of the slots, int32 `[num_tokens, ep]`.
        width: H'.
        out_at: address of the output, `[num_tokens, width]` of `out_kind`.
    """
    # Each array ends where the last block may end: nothing indexes beyond what `slots` names.
    words = start + ep * stride + num_tokens * width
    halves = carray(pointer(memory_at), words, np.uint16)
    floats = carray(pointer(memory_at), words, np.float32)
    slots = carray(pointer(slots_at), (num_tokens, ep), np.int32)
    out_halves = carray(pointer(out_at), num_tokens * width, np.uint16)
    out_floats = carray(pointer(out_at), num_tokens * width, np.float32)
    total = np.empty(_BLOCK, np.float32)
    starts = np.zeros(max(ep, _FEW), np.int64)
    for token in range(num_tokens):
        count = 0
        for rank in range(ep):
            if slots[token, rank] >= 0:
                starts[count] = start + rank * stride + slots[token, rank] * width
                count += 1
        if kind == _BF16 and out_kind == _BF16 and 0 < count <= _FEW:
            _sum_few(halves, starts, count, out_halves[token * width : (token + 1) * width])
            continue
        for first in range(0, width, _BLOCK):
            columns = min(_BLOCK, width - first)
            total[:columns] = np.float32(0.0)
            for row_start in starts[:count]:
                at = row_start + first
                if kind == _BF16:
                    row = halves[at : at + columns]
                    for column in range(columns):
                        total[column] += _of_bf16(row[column])
                elif kind == _FP16:
                    row = halves[at : at + columns]
                    for column in range(columns):
                        total[column] += _float_of_half(row[column])
                else:
                    values = floats[at : at + columns]
                    for column in range(columns):
                        total[column] += values[column]
            to = token * width + first
            if out_kind == _BF16:
                out = out_halves[to : to + columns]
                for column in range(columns):
                    out[column] = _bf16_of(total[column])
            elif out_kind == _FP16:
                out = out_halves[to : to + columns]
                for column in range(columns):
                    out[column] = _half_of(total[column])
            else:
                sums = out_floats[to : to + columns]
                for column in range(columns):
                    sums[column] = total[column]


class NumbaLoops(Loops):
    """See `Loops`. Building one compiles the kernels, or loads them, so that no round has to."""

    def __init__(self) -> None:
        one, flags = torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.uint8)
        slots, counts = one.clone(), one[0].clone()
        self.route(one, one[0], flags, True, one.clone(), one.clone(), counts, slots)
        self.write_counts(counts, flags, one[0].clone())
        self.write_rows(one, 4, slots, torch.zeros(4, dtype=torch.uint8), 0, 0)
        self.fill_padded(one[None].clone(), one[0], None, 0)
        self.sum_rows(torch.zeros(4), 0, 0, slots, torch.zeros((1, 4)))

    def route(
        self,
        ids: Tensor,
        owners: Tensor,
        active: Tensor,
        compact: bool,
        targets: Tensor,
        indices: Tensor,
        counts: Tensor,
        slots: Tensor,
    ) -> None:
        (num_tokens, top_k), ep = ids.shape, active.shape[0]
        _route(
            ids.data_ptr(),
            ids.dtype == torch.int64,
            num_tokens,
            top_k,
            owners.data_ptr(),
            owners.shape[0],
            active.data_ptr(),
            ep,
            compact,
            slots.data_ptr(),
            counts.data_ptr(),
            targets.data_ptr(),
            indices.data_ptr(),
        )

    def write_counts(self, counts: Tensor, active: Tensor, there: Tensor) -> None:
        _write_counts(counts.data_ptr(), active.data_ptr(), counts.shape[0], there.data_ptr(), there.stride(0))

    def write_rows(self, rows: Tensor, row_bytes: int, slots: Tensor, memory: Tensor, start: int, stride: int) -> None:
        to = memory.data_ptr() + start
        _write_rows(rows.data_ptr(), row_bytes, slots.data_ptr(), *slots.shape, to, stride)

    def fill_padded(self, area: Tensor, counts: Tensor, valid: Tensor | None, value: int) -> None:
        valid_at, valid_stride = (0, 0) if valid is None else (valid.data_ptr(), valid.stride(0))
        _fill_padded(
            area.data_ptr(), area.dtype.itemsize, *area.shape, counts.data_ptr(), valid_at, valid_stride, value
        )

    def sum_rows(self, words: Tensor, start: int, stride: int, slots: Tensor, output: Tensor) -> None:
        kind, out_kind = _KINDS[words.dtype], _KINDS[output.dtype]
        num_tokens, ep = slots.shape
        width = output.shape[1]
        _sum_rows(
            words.data_ptr(),
            kind,
            start,
            stride,
            slots.data_ptr(),
            num_tokens,
            ep,
            width,
            output.data_ptr(),
            out_kind,
        )
