"""host/numba_loops: the loops over tokens and rows as numba kernels; imported only where numba is installed.

Owns the kernels, which are compiled once per machine and read from disk afterwards. Refuses to know the protocol.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from a2a.host.loops import Loops

_BF16: Final = 0
_FP16: Final = 1
_FP32: Final = 2
_KINDS: Final = {torch.bfloat16: _BF16, torch.float16: _FP16, torch.float32: _FP32}
_BLOCK: Final = 8192
"""Columns summed at a time: their fp32 accumulators take 32 KiB of the first-level cache, and a row of the usual width
is read in one go, as the hardware prefetches best."""

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
def _copy_bytes(typingctx: Any, to: Any, to_start: Any, source: Any, source_start: Any, num_bytes: Any) -> Any:
    """memcpy between two 1-D uint8 arrays; a loop over slices is not recognised as one, since they might overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = context.make_array(signature.args[0])(context, builder, args[0]).data
        out_of = context.make_array(signature.args[2])(context, builder, args[2]).data
        cgutils.raw_memcpy(builder, builder.gep(into, [args[1]]), builder.gep(out_of, [args[3]]), args[4], 1)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), generate


@intrinsic
def _stream_bytes(typingctx: Any, to: Any, to_start: Any, source: Any, source_start: Any, num_bytes: Any) -> Any:
    """Like `_copy_bytes`, past the caches: a line is written without being read first.

    The target and `num_bytes` are multiples of 64. Such stores are ordered by `_fence` alone.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = context.make_array(signature.args[0])(context, builder, args[0]).data
        out_of = context.make_array(signature.args[2])(context, builder, args[2]).data
        line = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8).as_pointer()
        to_lines = builder.bitcast(builder.gep(into, [args[1]]), line)
        from_lines = builder.bitcast(builder.gep(out_of, [args[3]]), line)
        past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        lines = builder.udiv(args[4], ir.Constant(ir.IntType(64), _LINE_BYTES))
        with cgutils.for_range(builder, lines) as loop:
            value = builder.load(builder.gep(from_lines, [loop.index]), align=1)
            store = builder.store(value, builder.gep(to_lines, [loop.index]), align=_LINE_BYTES)
            store.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), generate


@intrinsic
def _fence(typingctx: Any) -> Any:
    """Orders the stores of `_stream_bytes` before everything after it, such as a doorbell."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(inline="always")
def _bf16_of(value: Any) -> Any:
    bits = _bits_of(value)
    if value != value:
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(cache=True, nogil=True)
def _route(
    ids: Any, owners: Any, active: Any, compact: bool, slots: Any, counts: Any, targets: Any, indices: Any
) -> None:
    slots[:] = -1
    counts[:] = 0
    for token in range(ids.shape[0]):
        for pick in range(ids.shape[1]):
            expert = ids[token, pick]
            rank = -1
            if 0 <= expert < owners.size:
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
def _write_rows(
    rows: Any, row_bytes: int, slots: Any, memory: Any, start: int, stride: int, whole_lines: bool
) -> None:
    # Token by token, so that a row is read from memory once and stored to every rank from the cache.
    if whole_lines and (slots >= 0).sum() * row_bytes >= _STREAMED_BYTES:
        for token in range(slots.shape[0]):
            for rank in range(slots.shape[1]):
                slot = slots[token, rank]
                if slot >= 0:
                    _stream_bytes(memory, start + rank * stride + slot * row_bytes, rows, token * row_bytes, row_bytes)
        _fence()
        return
    for token in range(slots.shape[0]):
        for rank in range(slots.shape[1]):
            slot = slots[token, rank]
            if slot >= 0:
                _copy_bytes(memory, start + rank * stride + slot * row_bytes, rows, token * row_bytes, row_bytes)


@njit(cache=True, nogil=True)
def _fill_padded(area: Any, counts: Any, valid: Any, value: int) -> None:
    for block in range(area.shape[0]):
        for row in range(area.shape[1]):
            padded = row >= counts[block] if valid.size == 0 else valid[block, row] == 0
            if padded:
                for column in range(area.shape[2]):
                    area[block, row, column] = value


@njit(cache=True, nogil=True)
def _sum_rows(
    halves: Any,
    floats: Any,
    kind: int,
    start: int,
    stride: int,
    slots: Any,
    out_halves: Any,
    out_floats: Any,
    out_kind: int,
) -> None:
    """Sum each token's rows; see `Loops.sum_rows` for `start`, `stride` and `slots`.

    Args:
        halves, floats: uint16 and float32 `[words]`, all workspaces; the one named by `kind` is read.
        kind, out_kind: 0 bf16, 1 fp16, 2 fp32.
        out_halves, out_floats: uint16 and float32 `[n * H']`; the one named by `out_kind` is written.
    """
    num_tokens, ep = slots.shape
    if num_tokens == 0:
        return
    width = (out_floats.size if out_kind > _FP16 else out_halves.size) // num_tokens
    total = np.empty(_BLOCK, np.float32)
    for token in range(num_tokens):
        for first in range(0, width, _BLOCK):
            columns = min(_BLOCK, width - first)
            total[:columns] = np.float32(0.0)
            for rank in range(ep):
                slot = slots[token, rank]
                if slot < 0:
                    continue
                at = start + rank * stride + slot * width + first
                if kind == _BF16:
                    row = halves[at : at + columns]
                    for column in range(columns):
                        total[column] += _float_of(np.uint32(row[column]) << np.uint32(16))
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


_NO_HALVES: Final = np.empty(0, np.uint16)
_NO_FLOATS: Final = np.empty(0, np.float32)
_NO_FLAGS: Final = np.empty((0, 0), np.uint8)


class NumbaLoops(Loops):
    """See `Loops`. Building one compiles the kernels, or loads them, so that no round has to."""

    def __init__(self) -> None:
        bytes_, row = torch.zeros(4, dtype=torch.uint8), torch.zeros((1, 4), dtype=torch.uint8)
        one = torch.zeros((1, 1), dtype=torch.int32)
        for ids in (one, one.long()):
            slots = self.route(
                ids, one[0], torch.ones(1, dtype=torch.uint8), True, one.clone(), one.clone(), one[0].clone()
            )
            self.fill_padded(ids[None].clone(), one[0], None, 0)
        self.write_rows(row, slots, bytes_, 0, 0)
        self.fill_padded(row[None].clone(), one[0], None, 0)
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
    ) -> Tensor:
        slots = torch.empty((ids.shape[0], active.shape[0]), dtype=torch.int32)
        _route(
            ids.numpy(),
            owners.numpy(),
            active.numpy(),
            compact,
            slots.numpy(),
            counts.numpy(),
            targets.numpy(),
            indices.numpy(),
        )
        return slots

    def write_rows(self, rows: Tensor, slots: Tensor, memory: Tensor, start: int, stride: int) -> None:
        row_bytes = rows.shape[1]
        whole_lines = not (memory.data_ptr() + start | stride | row_bytes) % _LINE_BYTES
        _write_rows(rows.view(-1).numpy(), row_bytes, slots.numpy(), memory.numpy(), start, stride, whole_lines)

    def fill_padded(self, area: Tensor, counts: Tensor, valid: Tensor | None, value: int) -> None:
        _fill_padded(area.numpy(), counts.numpy(), _NO_FLAGS if valid is None else valid.numpy(), value)

    def sum_rows(self, words: Tensor, start: int, stride: int, slots: Tensor, output: Tensor) -> None:
        kind, out_kind = _KINDS[words.dtype], _KINDS[output.dtype]
        _sum_rows(*_views(words), kind, start, stride, slots.numpy(), *_views(output), out_kind)


def _views(tensor: Tensor) -> tuple[Any, Any]:
    """The same memory as 16-bit words and as fp32; the one that does not fit the dtype is empty."""
    flat = tensor.view(-1)
    if tensor.dtype == torch.float32:
        return _NO_HALVES, flat.numpy()
    return flat.view(torch.uint16).numpy(), _NO_FLOATS
