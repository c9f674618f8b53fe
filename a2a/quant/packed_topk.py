"""packed_topk: an expert id and its bf16 weight in one int32.

Owns the packing. Refuses to know routing, and whether an id names an expert that exists.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError
from a2a.quant.format import FLOAT_DTYPES
from a2a.quant.ops import register

MAX_EXPERTS: Final = 32768
"""Ids must fit in the upper 16 bits of a signed integer."""


def pack_topk(ids: Tensor, weights: Tensor) -> Tensor:
    """`(id << 16) | bf16_bits(weight)`.

    Args:
        ids: int32 or int64, any shape: -1 (this pick goes nowhere) or 0..32767.
        weights: bf16, fp16 or fp32 of the same shape and device; rounded to bf16, to nearest even. NaN: 0x7FC0.

    Returns:
        int32 of the same shape, contiguous.

    No host synchronisation: on a CPU other ids are refused; on a device, where looking would wait for it, they
    become -1.

    Raises:
        ShapeError: dtypes, shapes or devices do not fit.
        ConfigError: an id on the CPU that does not fit.
    """
    out: Tensor = _PACK(ids, weights)
    return out


def unpack_topk(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The ids (int32) and weights (fp32, exactly the packed bf16) of `pack_topk`; same shape, contiguous.

    No host synchronisation. Raises ShapeError unless `packed` is int32.
    """
    ids, weights = _UNPACK(packed)
    return ids, weights


def _check_pair(ids: Tensor, weights: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(what="ids", got=ids.dtype, wanted="int32 or int64")
    if weights.dtype not in FLOAT_DTYPES:
        raise ShapeError(what="weights", got=weights.dtype, wanted="one of " + ", ".join(map(str, FLOAT_DTYPES)))
    if ids.shape != weights.shape:
        raise ShapeError(what="weights", got=tuple(weights.shape), wanted=f"{tuple(ids.shape)} like the ids")
    if ids.device != weights.device:
        raise ShapeError(what="weights", got=f"on {weights.device}", wanted=f"on {ids.device} like the ids")


def _check_packed(packed: Tensor) -> None:
    if packed.dtype != torch.int32:
        raise ShapeError(what="packed", got=packed.dtype, wanted="int32")


def _pack(ids: Tensor, weights: Tensor) -> Tensor:
    _check_pair(ids, weights)
    ids, weights = ids.contiguous(), weights.contiguous()
    if ids.device.type == "cpu" and ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < -1 or int(high) >= MAX_EXPERTS:
            got = int(low) if int(low) < -1 else int(high)
            raise ConfigError(what="packed expert id", got=got, wanted=f"-1 or 0..{MAX_EXPERTS - 1}")
    fits = (ids >= 0) & (ids < MAX_EXPERTS)
    upper = torch.where(fits, ids, -1).to(torch.int32) << 16
    # Devices write different bits for a bf16 NaN.
    half = weights.to(torch.bfloat16).view(torch.int16).masked_fill(weights.isnan(), 0x7FC0)
    # Widened, a negative weight has ones above its 16 bits; they would wipe the id.
    return upper.bitwise_or_(half.to(torch.int32).bitwise_and_(0xFFFF))


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    _check_packed(packed)
    packed = packed.contiguous()
    # The shift of a signed integer keeps the sign: -1 comes back. bf16 is the upper half of fp32.
    return packed >> 16, (packed << 16).view(torch.float32)


def _pack_fake(ids: Tensor, weights: Tensor) -> Tensor:
    _check_pair(ids, weights)
    return ids.new_empty(ids.shape, dtype=torch.int32)


def _unpack_fake(packed: Tensor) -> tuple[Tensor, Tensor]:
    _check_packed(packed)
    return packed.new_empty(packed.shape), packed.new_empty(packed.shape, dtype=torch.float32)


_PACK = register("pack_topk(Tensor ids, Tensor weights) -> Tensor", _pack, _pack_fake)
_UNPACK = register("unpack_topk(Tensor packed) -> (Tensor, Tensor)", _unpack, _unpack_fake)
