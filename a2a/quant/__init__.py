"""quant: the wire formats, scale layouts and packed top-k, as bytes that are equal on every device.

Owns the list of formats. Refuses to know ranks, workspaces and transports.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from a2a.errors import ConfigError
from a2a.quant.format import WireFormat
from a2a.quant.fp8_block import Fp8Block, dequantize_blocks, quantize_blocks
from a2a.quant.mxfp4 import Mxfp4
from a2a.quant.mxfp8 import Mxfp8
from a2a.quant.nvfp4 import Nvfp4
from a2a.quant.packed_topk import pack_topk, unpack_topk
from a2a.quant.plain import Bf16, Fp16
from a2a.quant.scale_layout import ScaleLayout, swizzle_scales, unswizzle_scales

__all__ = [
    "WIRE_FORMATS",
    "ScaleLayout",
    "WireFormat",
    "dequantize_blocks",
    "pack_topk",
    "quantize_blocks",
    "swizzle_scales",
    "unpack_topk",
    "unswizzle_scales",
    "wire_format",
]

WIRE_FORMATS: Final[Mapping[str, WireFormat]] = MappingProxyType(
    {form.name: form for form in (Bf16(), Fp16(), Fp8Block(), Mxfp8(), Nvfp4(), Mxfp4())}
)
"""Every wire format by name.

A new one is a file of this room and an entry here; if it has scales, also a twin beside the file for GPUs, an entry in
`nvlink/params.WIRE_FORMATS` and its branch in `nvlink/kernels/quantize.cuh`, and with scales of one byte one in
`nvlink/quantize_rows.FORMATS`. Which dtypes of combine's output mean it, `arguments.Arguments.output` says.
"""


def wire_format(name: str) -> WireFormat:
    """The format of this name; ConfigError listing the names otherwise."""
    if name not in WIRE_FORMATS:
        raise ConfigError(what="wire_format", got=name, wanted="one of " + ", ".join(WIRE_FORMATS))
    return WIRE_FORMATS[name]
