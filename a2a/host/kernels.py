"""host/kernels: numba kernels of the host transport; imported only where numba is installed.

Owns loops that torch has no exact single pass for. Refuses to know tensors: it gets plain arrays and element offsets.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_BF16: Final = 0
_FP16: Final = 1
_BLOCK: Final = 2048
"""Columns summed at a time: their fp32 accumulators take 8 KiB of the first-level cache."""


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


@njit(inline="always")
def _bf16_of(value: Any) -> Any:
    bits = _bits_of(value)
    if value != value:
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(cache=True, nogil=True)
def sum_rows(
    halves: Any,
    floats: Any,
    kind: int,
    base: Any,
    slots: Any,
    out_halves: Any,
    out_floats: Any,
    out_kind: int,
) -> None:
    """Sum each token's rows; see `a2a.host.sums.sum_rows_torch` for `base` and `slots`.

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
        for start in range(0, width, _BLOCK):
            columns = min(_BLOCK, width - start)
            total[:columns] = np.float32(0.0)
            for rank in range(ep):
                slot = slots[token, rank]
                if slot < 0:
                    continue
                at = base[rank] + slot * width + start
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
            to = token * width + start
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
