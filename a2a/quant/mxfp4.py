"""mxfp4: packed e2m1 with one e8m0 scale per 32 elements.

Owns the format. Refuses to know who sends, and layouts of the scales other than one row per token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.quant import e2m1, e8m0
from a2a.quant.amax import amax_bits
from a2a.quant.format import FLOAT_DTYPES, WireFormat, check_output, check_row_block, check_rows, check_scales
from a2a.quant.ops import register
from a2a.quant.slabs import slabs

BLOCK: Final = 32


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    check_rows("x", x, FLOAT_DTYPES)
    check_row_block("x", x.shape[1], BLOCK)
    rows, width = x.shape
    data = x.new_empty((rows, width // 2), dtype=torch.uint8)
    scales = x.new_empty((rows, width // BLOCK), dtype=torch.uint8)
    blocks = (-1, width // BLOCK, BLOCK)
    for part, (work, first, second) in slabs(x, width, 3):
        some = x[part].contiguous()
        byte = e8m0.scale_bytes(amax_bits(some, BLOCK, work), e2m1.MAX)
        work.copy_(some).view(blocks).mul_(e8m0.inverse_power(byte).unsqueeze(-1))
        scales[part] = byte
        # The product with 0 left the sign of small negative elements.
        zero_or_one = scales[part].clamp(max=1).unsqueeze(-1)
        e2m1.encode(work, first, second, data[part]).view(-1, width // BLOCK, BLOCK // 2).mul_(zero_or_one)
    return data, scales


def _dequantize(
    data: Tensor, scales: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    columns = _checked(data, scales, hidden_size, dtype)
    rows, width = data.shape[0], 2 * data.shape[1]
    out = data.new_empty((rows, columns), dtype=dtype)
    values = e2m1.table(data.device)
    for part, (work, index) in slabs(data, width, 2):
        e2m1.decode(data[part], values, index, work)
        work.view(-1, width // BLOCK, BLOCK).mul_(e8m0.power(scales[part]).unsqueeze(-1))
        out[part] = work[:, :columns]
    return out


def _checked(data: Tensor, scales: Tensor, hidden_size: int | None, dtype: torch.dtype) -> int:
    check_rows("data", data, (torch.uint8,))
    check_row_block("data", 2 * data.shape[1], BLOCK)
    check_scales(scales, data, 2 * data.shape[1] // BLOCK, torch.uint8)
    return check_output(hidden_size, 2 * data.shape[1], dtype)


def _quantize_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    check_rows("x", x, FLOAT_DTYPES)
    check_row_block("x", x.shape[1], BLOCK)
    rows, width = x.shape
    return x.new_empty((rows, width // 2), dtype=torch.uint8), x.new_empty((rows, width // BLOCK), dtype=torch.uint8)


def _dequantize_fake(
    data: Tensor, scales: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    return data.new_empty((data.shape[0], _checked(data, scales, hidden_size, dtype)), dtype=dtype)


_QUANTIZE = register("quantize_mxfp4(Tensor x) -> (Tensor, Tensor)", _quantize, _quantize_fake)
_DEQUANTIZE = register(
    "dequantize_mxfp4(Tensor data, Tensor scales, SymInt? hidden_size=None, ScalarType dtype=float) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


class Mxfp4(WireFormat):
    """`H/2` bytes of packed e2m1, low nibble first, and `H/32` e8m0 scale bytes; H is a multiple of 32.

    The scale byte b follows the mxfp8 rule with s = amax/6; q = e2m1(x * 2^(127-b)), to nearest even, saturated at 6,
    the code 0 where b = 0; value q * 2^(b-127).

    e2m1 has neither NaN nor Inf. A block that holds one has b = 254, as all mx formats; NaN -> +6 and +-Inf -> +-6,
    which dequantise to +-Inf, so a poisoned element stays non-finite; its finite neighbours are x * 2^-127, mostly 0.
    """

    name = "mxfp4"
    data_dtype = torch.uint8
    scales_dtype = torch.uint8
    block = BLOCK
    packed = True
    neutral_scale_byte = e8m0.NEUTRAL

    def quantize(self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `WireFormat.quantize`."""
        self.refuse_extras(alignment, global_scale)
        data, scales = _QUANTIZE(x)
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
