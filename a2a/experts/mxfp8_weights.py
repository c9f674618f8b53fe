"""experts/mxfp8_weights: the order of rows, columns and scales in which tile-shuffled MoE kernels read mxfp8 weights.

Owns the order: padding, interleaving of the gated halves, the shuffle within blocks of rows, the scales' layout.
Refuses to know what the weights mean: every element keeps its value.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from a2a.errors import ShapeError
from a2a.quant import ScaleLayout, swizzle_scales
from a2a.quant.ops import register

BLOCK: Final = 32
"""Elements that share a scale, and rows that are shuffled among themselves."""

GATED_MULTIPLE: Final = 32
PLAIN_MULTIPLE: Final = 128
"""Multiples to which the inner width is padded: each half of gated weights by itself, and weights without a gate."""


def align_mxfp8_moe_weights(
    w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, *, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights of E experts as a tile-shuffled kernel reads them.

    With I' = I rounded up to 32 (gated) or 128: inner rows and columns beyond I are zeros, their scale bytes 0; of
    gated rows, row 2r is row r of the first half and row 2r + 1 is row r of the second, in storage order; then the row
    o of a block of 32 moves to (o % 4) * 8 + o // 4 in it, weights and scales alike, of w13 and w2; then each expert's
    scales are laid out 128x4.

    Args:
        w13: `[E, 2I, K]`, the halves one after the other, or `[E, I, K]` without a gate; K is H, or H padded as rows
            are on the wire; H and K multiples of 32.
        w13_scales: one-byte `[E, 2I, K / 32]` or `[E, I, K / 32]`.
        w2: `[E, H, I]`, of the dtype of w13: float8_e4m3fn or any other, elements are only moved.
        w2_scales: one-byte `[E, H, ceil(I / 32)]`.
        gated: whether w13 holds two halves.

    Returns:
        w13 `[E, 2I', K]`, its scales, w2 `[E, H, I']`, its scales; new tensors. Scales `[E, rows, cols]` are padded to
        128 rows and 4 columns, their memory being the layout.

    No host synchronisation. Gradients are not recorded.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other.
    """
    made = _ALIGN(w13, w13_scales, w2, w2_scales, gated)
    return made[0], made[1], made[2], made[3]


def align_mxfp8_moe_parameters(
    w13: Parameter, w13_scales: Parameter, w2: Parameter, w2_scales: Parameter, *, gated: bool = True
) -> None:
    """`align_mxfp8_moe_weights` on the parameters themselves: the objects stay, and who holds one sees the new order.

    A parameter whose shape stays keeps its memory too, so that captured graphs go on reading it. Running it twice
    shuffles twice.

    Raises:
        ShapeError: as there; nothing has changed.
    """
    made = align_mxfp8_moe_weights(w13.data, w13_scales.data, w2.data, w2_scales.data, gated=gated)
    for parameter, aligned in zip((w13, w13_scales, w2, w2_scales), made, strict=True):
        if parameter.shape == aligned.shape and parameter.is_contiguous():
            parameter.data.copy_(aligned)
        else:
            parameter.data = aligned


def padded_inner_size(intermediate_size: int, *, gated: bool = True) -> int:
    """I': the inner width after padding."""
    multiple = GATED_MULTIPLE if gated else PLAIN_MULTIPLE
    return -(-intermediate_size // multiple) * multiple


def _align(
    w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(w13, w13_scales, w2, w2_scales, gated)
    inner = w2.shape[2]
    wide = padded_inner_size(inner, gated=gated)
    rows = [_shuffled(_inner_rows(_as_bytes(each), wide - inner, gated)) for each in (w13, w13_scales)]
    columns = pad(_as_bytes(w2), (0, wide - inner)), pad(_as_bytes(w2_scales), (0, wide // BLOCK - w2_scales.shape[2]))
    down = [_shuffled(each) for each in columns]
    return (
        rows[0].view(w13.dtype),
        swizzle_scales(rows[1].view(w13_scales.dtype), ScaleLayout.SWIZZLED_128X4),
        down[0].view(w2.dtype),
        swizzle_scales(down[1].view(w2_scales.dtype), ScaleLayout.SWIZZLED_128X4),
    )


def _inner_rows(weights: Tensor, missing: int, gated: bool) -> Tensor:
    """Rows padded, each half by itself, and halves interleaved."""
    if not gated:
        return pad(weights, (0, 0, 0, missing))
    experts, rows, width = weights.shape
    halves = pad(weights.reshape(experts, 2, rows // 2, width), (0, 0, 0, missing))
    return halves.transpose(1, 2).reshape(experts, -1, width)


def _shuffled(weights: Tensor) -> Tensor:
    """Row 4a + b of each block of 32 at 8b + a of it."""
    experts, rows, width = weights.shape
    blocks = weights.reshape(experts, rows // BLOCK, 8, 4, width)
    # A clone, since an operator must not return its input, and a transpose of one element a row copies nothing.
    return blocks.transpose(2, 3).clone(memory_format=torch.contiguous_format).view(experts, rows, width)


def _as_bytes(weights: Tensor) -> Tensor:
    """8-bit floats as bytes, which every operation of torch takes; other dtypes as they are."""
    weights = weights.contiguous()
    return weights.view(torch.uint8) if weights.dtype.itemsize == 1 else weights


def _check(w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, gated: bool) -> None:
    if w13.dim() != 3 or w2.dim() != 3:
        raise ShapeError(what="w13, w2", got=f"{w13.dim()} and {w2.dim()} dimensions", wanted="3 dimensions each")
    experts, hidden, inner = w2.shape
    rows, width = 2 * inner if gated else inner, w13.shape[2]
    if hidden % BLOCK or width % BLOCK or not 0 < hidden <= width:
        raise ShapeError(
            what="hidden size of w2, row width of w13",
            got=[hidden, width],
            wanted=f"multiples of {BLOCK}, the width at least the hidden size",
        )
    for what, tensor, shape in (
        ("w13", w13, (experts, rows, width)),
        ("w13_scales", w13_scales, (experts, rows, width // BLOCK)),
        ("w2_scales", w2_scales, (experts, hidden, -(-inner // BLOCK))),
    ):
        if tensor.dim() != 3 or tuple(tensor.shape) != shape:
            raise ShapeError(
                what=what, got=list(tensor.shape), wanted=f"{list(shape)} beside w2 of shape {list(w2.shape)}"
            )
    if w13_scales.dtype.itemsize != 1 or w2_scales.dtype.itemsize != 1 or w13.dtype != w2.dtype:
        raise ShapeError(
            what="dtypes of w13, w13_scales, w2, w2_scales",
            got=", ".join(str(each.dtype) for each in (w13, w13_scales, w2, w2_scales)),
            wanted="one dtype for both weights, and scales of one byte",
        )
    if len({each.device for each in (w13, w13_scales, w2, w2_scales)}) > 1:
        raise ShapeError(what="w13, w13_scales, w2, w2_scales", got="several devices", wanted="one device")


def _align_fake(
    w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(w13, w13_scales, w2, w2_scales, gated)
    experts, hidden, inner = w2.shape
    wide = padded_inner_size(inner, gated=gated)
    rows = 2 * wide if gated else wide
    layout = ScaleLayout.SWIZZLED_128X4
    return (
        w13.new_empty((experts, rows, w13.shape[2])),
        w13_scales.new_empty((experts, *layout.shape(rows, w13.shape[2] // BLOCK))),
        w2.new_empty((experts, hidden, wide)),
        w2_scales.new_empty((experts, *layout.shape(hidden, wide // BLOCK))),
    )


_ALIGN = register(
    "align_mxfp8_moe_weights(Tensor w13, Tensor w13_scales, Tensor w2, Tensor w2_scales, bool gated) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _align,
    _align_fake,
)
