"""nvfp4: packed e2m1 with one e4m3 scale per 16 elements and a scale of the whole tensor.

Owns the format. Refuses to know who sends, and how the global scale was chosen.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.quant import e2m1, e4m3
from a2a.quant.amax import amax_bits
from a2a.quant.format import (
    FLOAT_DTYPES,
    WireFormat,
    check_global_scale,
    check_output,
    check_row_block,
    check_rows,
    check_scales,
)
from a2a.quant.ops import register
from a2a.quant.slabs import slabs

BLOCK: Final = 16


def _quantize(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check(x, global_scale)
    rows, width = x.shape
    data = x.new_empty((rows, width // 2), dtype=torch.uint8)
    scales = x.new_empty((rows, width // BLOCK), dtype=torch.float8_e4m3fn)
    blocks = (-1, width // BLOCK, BLOCK)
    # Tensors as operands of a division: by a Python number CUDA multiplies with its rounded inverse.
    largest = torch.full((), e2m1.MAX, device=x.device)
    scale = torch.ones((), device=x.device) if global_scale is None else global_scale.view(())
    for part, (work, first, second) in slabs(x, width, 3):
        some = x[part].contiguous()
        amax = amax_bits(some, BLOCK, work).view(torch.float32)
        decoded = e4m3.encode(amax.mul_(scale).div_(largest).clamp_(min=0.0), scales[part]).float()
        work.copy_(some).view(blocks).mul_(torch.div(scale, decoded).unsqueeze(-1))
        # Where the scale is 0 the factor was infinite; those codes are 0 by rule. (A NaN is not 0.)
        zero_or_one = (decoded != 0).view(torch.uint8).unsqueeze(-1)
        e2m1.encode(work, first, second, data[part]).view(-1, width // BLOCK, BLOCK // 2).mul_(zero_or_one)
    return data, scales


def _dequantize(
    data: Tensor,
    scales: Tensor,
    global_scale: Tensor | None = None,
    hidden_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    columns = _checked(data, scales, global_scale, hidden_size, dtype)
    rows, width = data.shape[0], 2 * data.shape[1]
    out = data.new_empty((rows, columns), dtype=dtype)
    values = e2m1.table(data.device)
    for part, (work, index) in slabs(data, width, 2):
        e2m1.decode(data[part], values, index, work)
        scale = scales[part].view(torch.float8_e4m3fn).float()
        work.view(-1, width // BLOCK, BLOCK).mul_(scale.unsqueeze(-1))
        if global_scale is not None:
            work.div_(global_scale.view(()))
        out[part] = work[:, :columns]
    return out


def _check(x: Tensor, global_scale: Tensor | None) -> None:
    check_rows("x", x, FLOAT_DTYPES)
    check_row_block("x", x.shape[1], BLOCK)
    check_global_scale(global_scale, x)


def _checked(
    data: Tensor, scales: Tensor, global_scale: Tensor | None, hidden_size: int | None, dtype: torch.dtype
) -> int:
    check_rows("data", data, (torch.uint8,))
    check_row_block("data", 2 * data.shape[1], BLOCK)
    check_scales(scales, data, 2 * data.shape[1] // BLOCK, torch.float8_e4m3fn)
    check_global_scale(global_scale, data)
    return check_output(hidden_size, 2 * data.shape[1], dtype)


def _quantize_fake(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check(x, global_scale)
    rows, width = x.shape
    return (
        x.new_empty((rows, width // 2), dtype=torch.uint8),
        x.new_empty((rows, width // BLOCK), dtype=torch.float8_e4m3fn),
    )


def _dequantize_fake(
    data: Tensor,
    scales: Tensor,
    global_scale: Tensor | None = None,
    hidden_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    columns = _checked(data, scales, global_scale, hidden_size, dtype)
    return data.new_empty((data.shape[0], columns), dtype=dtype)


_QUANTIZE = register(
    "quantize_nvfp4(Tensor x, Tensor? global_scale=None) -> (Tensor, Tensor)", _quantize, _quantize_fake
)
_DEQUANTIZE = register(
    "dequantize_nvfp4(Tensor data, Tensor scales, Tensor? global_scale=None, SymInt? hidden_size=None, "
    "ScalarType dtype=float) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


class Nvfp4(WireFormat):
    """`H/2` bytes of packed e2m1, low nibble first, and `H/16` e4m3 scales; H is a multiple of 16.

    With the global scale g: sf = e4m3(clamp((g * amax) / 6, 0, 448)); q = e2m1(x * (g / sf)), to nearest even,
    saturated at 6, the code 0 where sf = 0; value (q * sf) / g. All in fp32 in this order, divisions IEEE.

    NaN and Inf follow from these lines, in which every step passes NaN on: a block with Inf has sf = 448 and
    +-Inf -> +-6; a block with NaN has sf = NaN (byte 0x7F), all its codes are +6 (e2m1 has no NaN), and all of it
    dequantises to NaN, so that a poisoned block stays visible.
    """

    name = "nvfp4"
    data_dtype = torch.uint8
    scales_dtype = torch.float8_e4m3fn
    block = BLOCK
    packed = True
    needs_global_scale = True

    def quantize(self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `WireFormat.quantize`."""
        self.refuse_extras(alignment)
        data, scales = _QUANTIZE(x, global_scale)
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
        """See `WireFormat.dequantize`."""
        out: Tensor = _DEQUANTIZE(data, self.need_scales(scales), global_scale, hidden_size, dtype)
        return out
