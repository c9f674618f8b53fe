"""fp8_block: e4m3 with one fp32 scale per 128 elements.

Owns the dispatch format, whose rows are whole blocks, and its form for rows of any width that the combine's
low-precision wire uses. Refuses to know who sends.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from a2a.errors import ConfigError
from a2a.quant import e4m3
from a2a.quant.amax import amax_bits
from a2a.quant.format import FLOAT_DTYPES, WireFormat, check_output, check_row_block, check_rows, check_scales
from a2a.quant.ops import register
from a2a.quant.slabs import slabs

BLOCK: Final = 128
SMALLEST_AMAX: Final = 1e-10
"""A smaller amax counts as this, so that a zero block has a scale to divide by."""


def _check_block(block: int) -> None:
    if block < 1:
        raise ConfigError(what="block", got=block, wanted="at least 1 element")


def _quantize(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    check_rows("x", x, FLOAT_DTYPES)
    _check_block(block)
    rows, width = x.shape
    num_blocks = -(-width // block)
    whole = num_blocks * block
    data = x.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((rows, num_blocks), dtype=torch.float32)
    # A tensor as divisor: by a Python number CUDA multiplies with its rounded inverse.
    largest = torch.full((), e4m3.MAX, device=x.device)
    for part, (work,) in slabs(x, whole, 1):
        # Zeros beside a short last block change no maximum.
        some = x[part].contiguous() if whole == width else pad(x[part], (0, whole - width))
        amax = amax_bits(some, block, work).view(torch.float32)
        scale = amax.clamp_(min=SMALLEST_AMAX).div_(largest).nan_to_num_(nan=1.0, posinf=1.0)
        work.copy_(some).view(-1, num_blocks, block).div_(scale.unsqueeze(-1))
        e4m3.encode(work[:, :width], data[part])
        scales[part] = scale
    return data, scales


def _dequantize(
    data: Tensor,
    scales: Tensor,
    hidden_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    block: int = BLOCK,
) -> Tensor:
    columns, num_blocks = _checked(data, scales, hidden_size, dtype, block)
    rows, width = data.shape
    whole = num_blocks * block
    out = data.new_empty((rows, columns), dtype=dtype)
    values = e4m3.table(data.device)
    for part, (work, index) in slabs(data, whole, 2):
        some = data[part].view(torch.uint8)
        e4m3.decode(some if whole == width else pad(some, (0, whole - width)), values, index, work)
        work.view(-1, num_blocks, block).mul_(scales[part].unsqueeze(-1))
        out[part] = work[:, :columns]
    return out


def _checked(data: Tensor, scales: Tensor, hidden_size: int | None, dtype: torch.dtype, block: int) -> tuple[int, int]:
    """Columns to return and number of blocks, or an error."""
    check_rows("data", data, e4m3.STORED)
    _check_block(block)
    num_blocks = -(-data.shape[1] // block)
    check_scales(scales, data, num_blocks, torch.float32)
    return check_output(hidden_size, data.shape[1], dtype), num_blocks


def _quantize_fake(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    check_rows("x", x, FLOAT_DTYPES)
    _check_block(block)
    rows, width = x.shape
    return (
        x.new_empty((rows, width), dtype=torch.float8_e4m3fn),
        x.new_empty((rows, -(-width // block)), dtype=torch.float32),
    )


def _dequantize_fake(
    data: Tensor,
    scales: Tensor,
    hidden_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    block: int = BLOCK,
) -> Tensor:
    columns, _ = _checked(data, scales, hidden_size, dtype, block)
    return data.new_empty((data.shape[0], columns), dtype=dtype)


_QUANTIZE = register(f"quantize_fp8_block(Tensor x, int block={BLOCK}) -> (Tensor, Tensor)", _quantize, _quantize_fake)
_DEQUANTIZE = register(
    "dequantize_fp8_block(Tensor data, Tensor scales, SymInt? hidden_size=None, ScalarType dtype=float, "
    f"int block={BLOCK}) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


def quantize_blocks(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """e4m3 and fp32 scales of rows of any width; the last block of a row may be short.

    Args:
        x: `[rows, H]` bf16, fp16 or fp32, H >= 1; not modified.
        block: elements that share a scale.

    Returns:
        e4m3 `[rows, H]` and fp32 `[rows, ceil(H / block)]`: scale = max(amax, 1e-10) / 448, q = e4m3(x / scale), both
        divisions IEEE fp32, saturated at +-448. A block with NaN or Inf has scale 1.0; NaN -> NaN (byte 0x7F),
        +-Inf -> +-448.

    No host synchronisation.

    Raises:
        ShapeError: x does not fit.
        ConfigError: block < 1.
    """
    data, scales = _QUANTIZE(x, block)
    return data, scales


def dequantize_blocks(
    data: Tensor, scales: Tensor, block: int = BLOCK, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values `[rows, H]` of `quantize_blocks`: q * scale in fp32, then rounded to `dtype`. No host synchronisation.

    Raises:
        ShapeError: data (e4m3 `[rows, H]`) or scales (fp32 `[rows, ceil(H / block)]`) does not fit.
        ConfigError: block < 1, or a dtype other than bf16, fp16, fp32.
    """
    out: Tensor = _DEQUANTIZE(data, scales, None, dtype, block)
    return out


class Fp8Block(WireFormat):
    """`H` e4m3 and `H/128` fp32 scales; H is a multiple of 128. The arithmetic is that of `quantize_blocks`."""

    name = "fp8_block"
    data_dtype = torch.float8_e4m3fn
    scales_dtype = torch.float32
    block = BLOCK

    def quantize(self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `WireFormat.quantize` and `quantize_blocks`."""
        self.refuse_extras(alignment, global_scale)
        check_rows("x", x, FLOAT_DTYPES)
        check_row_block("x", x.shape[1], BLOCK)
        return quantize_blocks(x)

    def dequantize(
        self,
        data: Tensor,
        scales: Tensor | None,
        *,
        hidden_size: int | None = None,
        global_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """See `WireFormat.dequantize`: q * scale."""
        self.refuse_extras(0, global_scale)
        check_rows("data", data, e4m3.STORED)
        check_row_block("data", data.shape[1], BLOCK)
        out: Tensor = _DEQUANTIZE(data, self.need_scales(scales), hidden_size, dtype)
        return out
