"""scale_layout: where the byte of row r, column c of a scale matrix lies for the kernel that reads it.

Owns the layouts and the way to and from them. Refuses to know what a scale means. On the wire scales are always linear.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError
from a2a.quant.ops import register


class ScaleLayout(enum.Enum):
    """Order of the bytes of a scale matrix `[rows, cols]`. With P = cols rounded up to 4, the byte of (r, c) lies at:

    * LINEAR: r * cols + c.
    * SWIZZLED_128X4: c%4 + (c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + (r//128)*128*P; rows padded to 128.
    * SWIZZLED_8X4: (r//8)*(P/4)*32 + (c//4)*32 + (r%8)*4 + c%4; rows padded to 8.

    Source of 128x4: https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """

    LINEAR = "linear"
    SWIZZLED_128X4 = "swizzled_128x4"
    SWIZZLED_8X4 = "swizzled_8x4"

    @property
    def row_multiple(self) -> int:
        """Multiple to which rows are padded."""
        return {"linear": 1, "swizzled_128x4": 128, "swizzled_8x4": 8}[self.value]

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns that the laid out matrix takes; their product is its size in bytes."""
        if self is ScaleLayout.LINEAR:
            return rows, cols
        step = self.row_multiple
        return -(-rows // step) * step, -(-cols // 4) * 4


def swizzle_scales(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """The scale matrix in the given layout.

    Args:
        scales: `[..., rows, cols]` of a one-byte dtype, linear; each matrix is laid out by itself.

    Returns:
        `[..., *layout.shape(rows, cols)]` of the same dtype, contiguous: its memory, read in order, is the layout.
        Bytes that stand for no scale are 0. LINEAR: the argument itself.

    No host synchronisation.

    Raises:
        ShapeError: fewer than 2 dimensions or a dtype of another size.
        ConfigError: layout is not a ScaleLayout.
    """
    _check_layout(layout)
    _check_matrix(scales)
    if layout is ScaleLayout.LINEAR:
        return scales
    out: Tensor = _SWIZZLE(scales, layout.value)
    return out


def unswizzle_scales(swizzled: Tensor, layout: ScaleLayout, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_scales`.

    Args:
        swizzled: what `swizzle_scales` returned, or the same bytes with the last two dimensions flattened.
        rows, cols: of the linear matrix.

    Returns:
        `[..., rows, cols]` of the same dtype, contiguous. LINEAR: the argument, reshaped.

    No host synchronisation.

    Raises:
        ShapeError: the bytes are not as many as the layout takes, or a dtype of another size.
        ConfigError: layout is not a ScaleLayout.
    """
    _check_layout(layout)
    if layout is ScaleLayout.LINEAR:
        return swizzled.reshape(*_lead(swizzled, layout, rows, cols), rows, cols)
    out: Tensor = _UNSWIZZLE(swizzled, layout.value, rows, cols)
    return out


def _check_layout(layout: ScaleLayout) -> None:
    if not isinstance(layout, ScaleLayout):
        raise ConfigError(what="layout", got=layout, wanted="one of " + ", ".join(map(str, ScaleLayout)))


def _check_matrix(scales: Tensor) -> None:
    if scales.dim() < 2 or scales.dtype.itemsize != 1:
        got = f"{scales.dim()} dimensions of {scales.dtype}"
        raise ShapeError(what="scales", got=got, wanted="[..., rows, cols] of a one-byte dtype")


def _lead(swizzled: Tensor, layout: ScaleLayout, rows: int, cols: int) -> tuple[int, ...]:
    """The dimensions before the matrix, after checking that the matrix has the bytes of the layout."""
    height, width = layout.shape(rows, cols)
    if swizzled.dtype.itemsize == 1:
        shape = tuple(swizzled.shape)
        if len(shape) >= 2 and shape[-2] == height and shape[-1] == width:
            return shape[:-2]
        if len(shape) >= 1 and shape[-1] == height * width:
            return shape[:-1]
    raise ShapeError(
        what="swizzled scales",
        got=f"{tuple(swizzled.shape)} of {swizzled.dtype}",
        wanted=f"[..., {height}, {width}] or [..., {height * width}] of a one-byte dtype for {layout}",
    )


def _swizzle(scales: Tensor, layout: str) -> Tensor:
    _check_matrix(scales)
    kind = ScaleLayout(layout)
    if kind is ScaleLayout.LINEAR:
        return scales.clone(memory_format=torch.contiguous_format)
    *lead, rows, cols = scales.shape
    height, width = kind.shape(rows, cols)
    linear = torch.nn.functional.pad(scales.contiguous().view(torch.uint8), (0, width - cols, 0, height - rows))
    if kind is ScaleLayout.SWIZZLED_128X4:
        tiles = linear.view(*lead, height // 128, 4, 32, width // 4, 4).transpose(-4, -2)
    else:
        tiles = linear.view(*lead, height // 8, 8, width // 4, 4).transpose(-3, -2)
    # A clone, since an operator must not return its input, and with whole tiles nothing above copied.
    return tiles.clone(memory_format=torch.contiguous_format).view(*lead, height, width).view(scales.dtype)


def _unswizzle(swizzled: Tensor, layout: str, rows: int, cols: int) -> Tensor:
    kind = ScaleLayout(layout)
    lead = _lead(swizzled, kind, rows, cols)
    height, width = kind.shape(rows, cols)
    memory = swizzled.contiguous().view(torch.uint8)
    if kind is ScaleLayout.SWIZZLED_128X4:
        tiles = memory.view(*lead, height // 128, width // 4, 32, 4, 4).transpose(-4, -2)
    elif kind is ScaleLayout.SWIZZLED_8X4:
        tiles = memory.view(*lead, height // 8, width // 4, 8, 4).transpose(-3, -2)
    else:
        tiles = memory
    linear = tiles.reshape(*lead, height, width)[..., :rows, :cols]
    return linear.clone(memory_format=torch.contiguous_format).view(swizzled.dtype)


def _swizzle_fake(scales: Tensor, layout: str) -> Tensor:
    _check_matrix(scales)
    *lead, rows, cols = scales.shape
    return scales.new_empty((*lead, *ScaleLayout(layout).shape(rows, cols)))


def _unswizzle_fake(swizzled: Tensor, layout: str, rows: int, cols: int) -> Tensor:
    return swizzled.new_empty((*_lead(swizzled, ScaleLayout(layout), rows, cols), rows, cols))


_SWIZZLE = register("swizzle_scales(Tensor scales, str layout) -> Tensor", _swizzle, _swizzle_fake)
_UNSWIZZLE = register(
    "unswizzle_scales(Tensor swizzled, str layout, SymInt rows, SymInt cols) -> Tensor", _unswizzle, _unswizzle_fake
)
