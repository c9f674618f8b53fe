"""integrations/vllm/payload: which wire format a layer's quantisation means, and how many bytes a row of it takes.

Owns the four formats that the one-sided back end of vLLM carries and the words of its releases for their sizes. Refuses
to quantise and to send.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from a2a.errors import ConfigError
from a2a.integrations.rows import RowFormat

SUPPORTED: Final = "None (bf16 or fp16 rows), 'nvfp4', 'mxfp8', or float8_e4m3fn with block_shape [128, 128]"

BF16: Final = RowFormat("bf16")

_QUANT_FORMATS: Final = {"BF16": "bf16", "FP16": "bf16", "NVFP4": "nvfp4", "MXFP8": "mxfp8", "DeepSeekFp8": "fp8_block"}
"""Names of flashinfer's enumeration, which the newer releases pass, and ours."""


def row_format(quant_config: Any, *, defer_input_quant: bool = False) -> RowFormat:
    """The format in which a layer's hidden states are sent.

    Args:
        quant_config: vLLM's `FusedMoEQuantConfig`, or None for a layer without quantisation.
        defer_input_quant: the experts quantise by themselves: rows go as they are.

    Raises:
        ConfigError: a quantisation that cannot be sent; names those that can.
    """
    if quant_config is None or defer_input_quant:
        return BF16
    kind = quant_config.quant_dtype
    if kind is None:
        return BF16
    if kind == "nvfp4":
        return RowFormat("nvfp4")
    if kind == "mxfp8":
        return RowFormat("mxfp8", quant_config.mx_alignment)
    block = quant_config.block_shape
    if kind == torch.float8_e4m3fn and block is not None and list(block) == [128, 128]:
        return RowFormat("fp8_block")
    raise ConfigError(what="quant_dtype, block_shape", got=(kind, block), wanted=SUPPORTED)


@dataclasses.dataclass(frozen=True)
class DispatchLayout:
    """What a layer sends, in the words of every release: each reads those that it knows.

    Attributes:
        dispatch_format: the format itself; releases since 0.33 hand it on.
        extra_payload_bytes_per_token: 0, since the format counts its own padding.
        x_bytes_per_token: bytes of a row, padding included; releases up to 0.32 hand on this and the next.
        x_sf_bytes_per_token: bytes of a row's scales.
    """

    dispatch_format: RowFormat
    x_bytes_per_token: int
    x_sf_bytes_per_token: int
    extra_payload_bytes_per_token: int = 0


def dispatch_layout(hidden_dim: int, quant_config: Any, input_dtype: torch.dtype | None = None) -> DispatchLayout:
    """What a layer of that width sends; `input_dtype` says that the experts take rows of that dtype as they are.

    Raises:
        ConfigError, ShapeError: it cannot be sent.
    """
    if input_dtype not in (None, torch.float16, torch.bfloat16):
        raise ConfigError(what="input_dtype", got=str(input_dtype), wanted="float16, bfloat16 or None")
    form = row_format(quant_config, defer_input_quant=input_dtype is not None)
    form.bytes_per_token(hidden_dim)
    return DispatchLayout(form, form.data_bytes_per_token(hidden_dim), form.scale_bytes_per_token(hidden_dim))


def row_bytes_per_token(
    hidden_size: int,
    *,
    dispatch_format: Any = None,
    extra_payload_bytes_per_token: int = 0,
    x_bytes_per_token: int | None = None,
    x_sf_bytes_per_token: int = 0,
    dispatch_dtype_bytes_per_elem: int | None = None,
    dispatch_scale_bytes_per_token: int = 0,
) -> int:
    """Bytes of a row with its scales and padding, from any release's words for it; of a 16-bit row without any.

    Args:
        hidden_size: elements of a row, without padding.
        dispatch_format: a `RowFormat`, or a member of flashinfer's `QuantFormat`; with it the extra bytes that vLLM
            adds for the scales of padding.
        x_bytes_per_token, x_sf_bytes_per_token: sizes, the row's without padding.
        dispatch_dtype_bytes_per_elem, dispatch_scale_bytes_per_token: likewise; 0 bytes an element are half a byte.

    Raises:
        ConfigError: an unknown format.
    """
    if isinstance(dispatch_format, RowFormat):
        return dispatch_format.bytes_per_token(hidden_size) + extra_payload_bytes_per_token
    if dispatch_format is not None:
        name = _QUANT_FORMATS.get(getattr(dispatch_format, "name", ""))
        if name is None:
            known = ", ".join(_QUANT_FORMATS)
            raise ConfigError(what="dispatch_format", got=str(dispatch_format), wanted=f"one of {known}")
        # vLLM counts the scales of a padded row but not its padding, an element for every 1/32 of a scale's byte.
        padding = 33 * extra_payload_bytes_per_token if name == "mxfp8" else extra_payload_bytes_per_token
        return RowFormat(name).bytes_per_token(hidden_size) + padding
    row, scales = x_bytes_per_token, x_sf_bytes_per_token
    if dispatch_dtype_bytes_per_elem is not None:
        size = dispatch_dtype_bytes_per_elem
        row, scales = (hidden_size * size if size else hidden_size // 2), dispatch_scale_bytes_per_token
    if row is None:
        return BF16.bytes_per_token(hidden_size)
    if row == hidden_size:
        # Rows of one byte an element carry a scale byte (or four for 128) per 32: padding shows in the scales alone.
        row = max(row, 32 * scales)
    return row + scales
