"""format: what every wire format offers: sizes, checks, quantise, dequantise.

Owns the abstract base and the checks that all formats share. Refuses to know any format, and who sends the bytes.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class WireFormat(abc.ABC):
    """How a hidden-state row `[H]` travels: a row of data and, for most formats, a row of scales.

    Formats hold no state; there is one object of each. All sizes are per token and plain integers.

    Attributes:
        name: the word in configs and flags.
        data_dtype: dtype of the data tensor `[n, data_width]`.
        scales_dtype: dtype of the scales tensor `[n, scales_width]`, None when there are no scales.
        block: elements that share a scale, 0 when there are no scales.
        packed: whether a data element holds two values, the first in the low nibble.
        neutral_scale_byte: the byte that scrubbing writes into scales of padded slots.
        needs_global_scale: whether a scale of the whole tensor takes part (None then stands for 1.0).
    """

    name: ClassVar[str]
    data_dtype: ClassVar[torch.dtype]
    scales_dtype: ClassVar[torch.dtype | None] = None
    block: ClassVar[int] = 0
    packed: ClassVar[bool] = False
    neutral_scale_byte: ClassVar[int] = 0
    needs_global_scale: ClassVar[bool] = False

    def check(self, hidden_size: int, alignment: int = 0) -> list[str]:
        """Every reason why rows of this shape cannot be carried; empty means they can."""
        reasons = []
        if hidden_size < 1:
            reasons.append(f"hidden_size {hidden_size} must be at least 1")
        if self.block and hidden_size % self.block:
            reasons.append(f"hidden_size {hidden_size} must be a multiple of {self.block} for {self.name}")
        if alignment:
            reasons.append(f"alignment {alignment} must be 0 for {self.name}, whose rows are not padded")
        return reasons

    def padded_size(self, hidden_size: int, alignment: int = 0) -> int:
        """Elements of a row on the wire, padding included (K of the formats)."""
        return hidden_size

    def data_width(self, hidden_size: int, alignment: int = 0) -> int:
        """Columns of the data tensor, in elements of `data_dtype`."""
        padded = self.padded_size(hidden_size, alignment)
        return padded // 2 if self.packed else padded

    def scales_width(self, hidden_size: int, alignment: int = 0) -> int:
        """Columns of the scales tensor, 0 when there are no scales."""
        return self.padded_size(hidden_size, alignment) // self.block if self.block else 0

    def data_bytes_per_token(self, hidden_size: int, alignment: int = 0) -> int:
        """Bytes of one data row."""
        return self.data_width(hidden_size, alignment) * self.data_dtype.itemsize

    def scale_bytes_per_token(self, hidden_size: int, alignment: int = 0) -> int:
        """Bytes of one row of scales."""
        if self.scales_dtype is None:
            return 0
        return self.scales_width(hidden_size, alignment) * self.scales_dtype.itemsize

    @abc.abstractmethod
    def quantize(
        self, x: Tensor, *, alignment: int = 0, global_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows as they travel.

        Args:
            x: `[n, H]` bf16, fp16 or fp32 on any device, n >= 0; not modified.
            alignment: multiple, in elements, to which rows are padded; only mxfp8 takes one. 0: the format's block.
            global_scale: fp32 scalar tensor on the device of x, positive and finite, equal on all ranks; None: 1.0.
                Only for formats with `needs_global_scale`.

        Returns:
            data `[n, data_width]` of `data_dtype` and scales `[n, scales_width]` of `scales_dtype` or None; both
            contiguous. Bytes are a function of x alone: the same on every device and rank.

        No host synchronisation. Gradients are not recorded.

        Raises:
            ShapeError: x or global_scale does not fit.
            ConfigError: an alignment or a global scale that the format does not take.
        """

    @abc.abstractmethod
    def dequantize(
        self,
        data: Tensor,
        scales: Tensor | None,
        *,
        hidden_size: int | None = None,
        global_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The values that the bytes stand for.

        Args:
            data: `[n, data_width]` of `data_dtype`; e4m3 also as uint8 bytes.
            scales: `[n, scales_width]` of `scales_dtype` (one-byte scales: any one-byte dtype), None without scales.
            hidden_size: columns to return; None: all, padding included.
            global_scale: the one given to `quantize`.
            dtype: bf16, fp16 or fp32. Values are formed in fp32 and rounded once, to nearest even.

        Returns:
            `[n, hidden_size]` of `dtype`, contiguous.

        No host synchronisation. Gradients are not recorded.

        Raises:
            ShapeError: data, scales, hidden_size or global_scale does not fit.
            ConfigError: a dtype or a global scale that the format does not take.
        """

    def refuse_extras(self, alignment: int = 0, global_scale: Tensor | None = None) -> None:
        """ConfigError for an alignment or a global scale, for the formats that take neither."""
        if alignment:
            raise ConfigError(what="alignment", got=alignment, wanted=f"0 for wire format {self.name!r}")
        if global_scale is not None and not self.needs_global_scale:
            raise ConfigError(what="global_scale", got="a tensor", wanted=f"None for wire format {self.name!r}")

    def need_scales(self, scales: Tensor | None) -> Tensor:
        """The scales, or ShapeError when they are missing."""
        if scales is None:
            raise ShapeError(what="scales", got=None, wanted=f"the scales of wire format {self.name!r}")
        return scales


def check_rows(what: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """ShapeError unless x is a matrix of one of `dtypes`."""
    if x.dim() != 2:
        raise ShapeError(what=what, got=f"{x.dim()} dimensions", wanted="2 dimensions, [tokens, elements]")
    if x.dtype not in dtypes:
        raise ShapeError(what=what, got=x.dtype, wanted="one of " + ", ".join(map(str, dtypes)))


def check_row_block(what: str, width: int, block: int) -> None:
    """ShapeError unless rows of `width` elements split into whole blocks."""
    if width % block or width < 1:
        raise ShapeError(what=what, got=f"rows of {width} elements", wanted=f"rows of a multiple of {block} elements")


def check_scales(scales: Tensor, data: Tensor, width: int, dtype: torch.dtype) -> None:
    """ShapeError unless scales `[n, width]` stand beside data `[n, *]`; one-byte scales may have any one-byte dtype."""
    fits = scales.dtype == dtype if dtype.itemsize > 1 else scales.dtype.itemsize == 1
    if scales.dim() != 2 or not fits:
        got = f"{scales.dim()} dimensions of {scales.dtype}"
        raise ShapeError(what="scales", got=got, wanted=f"[n, {width}] of {dtype}")
    if scales.shape[1] != width or scales.shape[0] != data.shape[0]:
        raise ShapeError(what="scales", got=tuple(scales.shape), wanted=f"{(data.shape[0], width)} beside this data")
    if scales.device != data.device:
        raise ShapeError(what="scales", got=f"on {scales.device}", wanted=f"on {data.device} like the data")


def check_global_scale(global_scale: Tensor | None, beside: Tensor) -> None:
    """ShapeError unless the global scale is one fp32 number on the device of `beside`, or None."""
    if global_scale is None:
        return
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        got = f"{tuple(global_scale.shape)} of {global_scale.dtype}"
        raise ShapeError(what="global_scale", got=got, wanted="one fp32 number")
    if global_scale.device != beside.device:
        got = f"on {global_scale.device}"
        raise ShapeError(what="global_scale", got=got, wanted=f"on {beside.device} like the rows")


def check_output(hidden_size: int | None, width: int, dtype: torch.dtype) -> int:
    """Columns to return out of `width`; errors for a size or dtype that cannot be returned."""
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(what="dtype", got=str(dtype), wanted="one of " + ", ".join(map(str, FLOAT_DTYPES)))
    if hidden_size is None:
        return width
    if not 1 <= hidden_size <= width:
        raise ShapeError(what="hidden_size", got=hidden_size, wanted=f"1..{width}, what the data holds")
    return hidden_size
