"""mxfp8: e4m3 with one e8m0 scale per 32 elements, rows padded to an alignment.

Owns the format. Refuses to know who sends, and layouts of the scales other than one row per token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from a2a.errors import ConfigError
from a2a.quant import e4m3, e8m0
from a2a.quant.amax import amax_bits
from a2a.quant.format import FLOAT_DTYPES, WireFormat, check_output, check_row_block, check_rows, check_scales
from a2a.quant.ops import register
from a2a.quant.slabs import slabs

BLOCK: Final = 32


def _padded(width: int, alignment: int) -> int:
    step = alignment or BLOCK
    return -(-width // step) * step


def _check(x: Tensor, alignment: int) -> None:
    check_rows("x", x, FLOAT_DTYPES)
    if alignment < 0 or alignment % BLOCK:
        raise ConfigError(what="alignment", got=alignment, wanted=f"0 or a multiple of {BLOCK}")


def _quantize(x: Tensor, alignment: int = 0) -> tuple[Tensor, Tensor]:
    _check(x, alignment)
    rows, width = x.shape
    padded = _padded(width, alignment)
    blocks = (-1, padded // BLOCK, BLOCK)
    data = x.new_empty((rows, padded), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((rows, padded // BLOCK), dtype=torch.uint8)
    for part, (work,) in slabs(x, padded, 1):
        some = x[part].contiguous() if padded == width else pad(x[part], (0, padded - width))
        byte = e8m0.scale_bytes(amax_bits(some, BLOCK, work), e4m3.MAX)
        work.copy_(some).view(blocks).mul_(e8m0.inverse_power(byte).unsqueeze(-1))
        scales[part] = byte
        # The product with 0 left the sign of small negative elements.
        zero_or_one = scales[part].clamp(max=1).unsqueeze(-1)
        e4m3.encode(work, data[part]).view(torch.uint8).view(blocks).mul_(zero_or_one)
    return data, scales


def _dequantize(
    data: Tensor, scales: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    columns = _checked(data, scales, hidden_size, dtype)
    rows, padded = data.shape
    out = data.new_empty((rows, columns), dtype=dtype)
    values = e4m3.table(data.device)
    for part, (work, index) in slabs(data, padded, 2):
        e4m3.decode(data[part], values, index, work)
        work.view(-1, padded // BLOCK, BLOCK).mul_(e8m0.power(scales[part]).unsqueeze(-1))
        out[part] = work[:, :columns]
    return out


def _checked(data: Tensor, scales: Tensor, hidden_size: int | None, dtype: torch.dtype) -> int:
    check_rows("data", data, e4m3.STORED)
    check_row_block("data", data.shape[1], BLOCK)
    check_scales(scales, data, data.shape[1] // BLOCK, torch.uint8)
    return check_output(hidden_size, data.shape[1], dtype)


def _quantize_fake(x: Tensor, alignment: int = 0) -> tuple[Tensor, Tensor]:
    _check(x, alignment)
    rows, width = x.shape
    padded = _padded(width, alignment)
    return (
        x.new_empty((rows, padded), dtype=torch.float8_e4m3fn),
        x.new_empty((rows, padded // BLOCK), dtype=torch.uint8),
    )


def _dequantize_fake(
    data: Tensor, scales: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    return data.new_empty((data.shape[0], _checked(data, scales, hidden_size, dtype)), dtype=dtype)


_QUANTIZE = register("quantize_mxfp8(Tensor x, int alignment=0) -> (Tensor, Tensor)", _quantize, _quantize_fake)
_DEQUANTIZE = register(
    "dequantize_mxfp8(Tensor data, Tensor scales, SymInt? hidden_size=None, ScalarType dtype=float) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


class Mxfp8(WireFormat):
    """`K` e4m3 and `K/32` e8m0 scale bytes, K = H rounded up to the alignment; columns from H on are zero.

    With s = amax/448 of 32 elements: byte b = clamp(ceil(log2 s) + 127, 0, 254), 0 for a zero block (the rule in full:
    `e8m0.scale_bytes`); q = e4m3(x * 2^(127-b)), the byte 0x00 where b = 0; value q * 2^(b-127).
    A block with NaN or Inf has b = 254; NaN -> NaN (byte 0x7F), +-Inf -> +-448, which dequantises to +-Inf.
    """

    name = "mxfp8"
    data_dtype = torch.float8_e4m3fn
    scales_dtype = torch.uint8
    block = BLOCK
    neutral_scale_byte = e8m0.NEUTRAL

    def check(self, hidden_size: int, alignment: int = 0) -> list[str]:
        """Any hidden_size >= 1; the alignment must be 0 or a multiple of 32."""
        reasons = []
        if hidden_size < 1:
            reasons.append(f"hidden_size {hidden_size} must be at least 1")
        if alignment < 0 or alignment % BLOCK:
            reasons.append(f"alignment {alignment} must be 0 or a multiple of {BLOCK}")
        return reasons

    def padded_size(self, hidden_size: int, alignment: int = 0) -> int:
        """hidden_size rounded up to the alignment (0: 32)."""
        return _padded(hidden_size, alignment)

    def quantize(self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `WireFormat.quantize`."""
        self.refuse_extras(0, global_scale)
        data, scales = _QUANTIZE(x, alignment)
        return data, scales

    def dequantize(
        self,
        data: Tensor,
        scales: Tensor | None,
        *,
        hidden_size: int | None = None,
        global_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """See `WireFormat.dequantize`. The scale byte 255, which `quantize` never writes, reads as NaN."""
        self.refuse_extras(0, global_scale)
        out: Tensor = _DEQUANTIZE(data, self.need_scales(scales), hidden_size, dtype)
        return out
