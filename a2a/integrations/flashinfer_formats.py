"""integrations/flashinfer_formats: the two format functions that dispatchers import beside the exchange.

Owns their historical signatures and flat results. Refuses to know the formats' rules, which are `a2a.quant`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from a2a.errors import ConfigError
from a2a.integrations.flashinfer_functions import output_format
from a2a.quant import ScaleLayout, swizzle_scales, wire_format


def nvfp4_block_scale_interleave(unswizzled_sf: Tensor) -> Tensor:
    """Block scales `[rows, cols]` or `[E, rows, cols]` of one byte in the 128x4 layout, flat; each matrix by itself."""
    return swizzle_scales(unswizzled_sf.contiguous(), ScaleLayout.SWIZZLED_128X4).reshape(-1)


def mxfp8_quantize(
    input: Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: Any = None,
) -> tuple[Tensor, Tensor]:
    """mxfp8 values `[M, K]` and their scale bytes, flat.

    Args:
        input: `[M, H]`; K is H rounded up to `alignment`.
        is_sf_swizzled_layout: scales in the 128x4 layout, unless `sf_swizzle_layout` says otherwise.
        enable_pdl, backend: of other kernels; the bytes are the same.
    """
    if input.dim() != 2:
        raise ConfigError(what="input", got=f"{input.dim()} dimensions", wanted="a matrix [M, H]")
    data, scales = wire_format("mxfp8").quantize(input.contiguous(), alignment=alignment)
    if scales is None:
        raise ConfigError(what="mxfp8", got="no scales", wanted="a format with scales")
    layout = ScaleLayout.SWIZZLED_128X4 if is_sf_swizzled_layout else ScaleLayout.LINEAR
    if sf_swizzle_layout is not None:
        layout = output_format(scales, 1.0, sf_swizzle_layout)[1]
    return data, swizzle_scales(scales.view(torch.uint8), layout).reshape(-1)
