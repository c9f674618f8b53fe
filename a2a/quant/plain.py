"""plain: bf16 and fp16 rows, no scales.

Owns the two formats that only cast. Refuses to know blocks and scales.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from a2a.errors import ShapeError
from a2a.quant.format import FLOAT_DTYPES, WireFormat, check_output, check_rows
from a2a.quant.ops import register


def _quantize_bf16(x: Tensor) -> Tensor:
    check_rows("x", x, FLOAT_DTYPES)
    return x.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)


def _quantize_fp16(x: Tensor) -> Tensor:
    check_rows("x", x, FLOAT_DTYPES)
    return x.to(torch.float16, copy=True, memory_format=torch.contiguous_format)


def _dequantize_plain(data: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    check_rows("data", data, FLOAT_DTYPES)
    columns = check_output(hidden_size, data.shape[1], dtype)
    return data[:, :columns].to(dtype, copy=True, memory_format=torch.contiguous_format)


def _quantize_bf16_fake(x: Tensor) -> Tensor:
    check_rows("x", x, FLOAT_DTYPES)
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _quantize_fp16_fake(x: Tensor) -> Tensor:
    check_rows("x", x, FLOAT_DTYPES)
    return x.new_empty(x.shape, dtype=torch.float16)


def _dequantize_plain_fake(data: Tensor, hidden_size: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    check_rows("data", data, FLOAT_DTYPES)
    return data.new_empty((data.shape[0], check_output(hidden_size, data.shape[1], dtype)), dtype=dtype)


_QUANTIZE: Final = {
    torch.bfloat16: register("quantize_bf16(Tensor x) -> Tensor", _quantize_bf16, _quantize_bf16_fake),
    torch.float16: register("quantize_fp16(Tensor x) -> Tensor", _quantize_fp16, _quantize_fp16_fake),
}
_DEQUANTIZE: Final = register(
    "dequantize_plain(Tensor data, SymInt? hidden_size=None, ScalarType dtype=float) -> Tensor",
    _dequantize_plain,
    _dequantize_plain_fake,
)


class _Plain(WireFormat):
    """Rows cast to `data_dtype`, to nearest even; NaN stays NaN, overflow becomes Inf."""

    def quantize(self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None) -> tuple[Tensor, None]:
        """See `WireFormat.quantize`. Rows that already have `data_dtype` are returned as they are, not copied."""
        self.refuse_extras(alignment, global_scale)
        check_rows("x", x, FLOAT_DTYPES)
        if x.dtype == self.data_dtype:
            return x.contiguous(), None
        return _QUANTIZE[self.data_dtype](x), None

    def dequantize(
        self,
        data: Tensor,
        scales: Tensor | None,
        *,
        hidden_size: int | None = None,
        global_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """See `WireFormat.dequantize`. Always a new tensor."""
        self.refuse_extras(0, global_scale)
        if scales is not None:
            raise ShapeError(what="scales", got="a tensor", wanted=f"None for wire format {self.name!r}")
        check_rows("data", data, (self.data_dtype,))
        out: Tensor = _DEQUANTIZE(data, hidden_size, dtype)
        return out


class Bf16(_Plain):
    """bf16 rows, 2 bytes an element."""

    name = "bf16"
    data_dtype = torch.bfloat16


class Fp16(_Plain):
    """fp16 rows, 2 bytes an element."""

    name = "fp16"
    data_dtype = torch.float16
