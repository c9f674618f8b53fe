"""experts/mxfp8_rows: rows to mxfp8 with their scales in the layout that a matrix kernel reads, as one operator.

Owns the operator, and the choice of what runs it, which never shows in the bytes. Refuses to know the format's
arithmetic (quant/mxfp8) and where rows come from.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch import Tensor

from a2a.errors import ConfigError
from a2a.experts.flashinfer_kernels import find
from a2a.quant import ScaleLayout, swizzle_scales, wire_format
from a2a.quant.ops import register

BACKENDS: Final = ("torch", "flashinfer")

_FLASHINFER: Final = ("input", "is_sf_swizzled_layout", "alignment")
_MXFP8: Final = wire_format("mxfp8")


@dataclasses.dataclass(frozen=True)
class QuantizeChoice:
    """What quantises on a device.

    Attributes:
        backend: one of `BACKENDS`.
        why: the reason, in words.
    """

    backend: str
    why: str


def mxfp8_quantize(
    x: Tensor, alignment: int = 0, layout: ScaleLayout = ScaleLayout.LINEAR, *, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Rows in mxfp8 and their scales in a layout.

    Args:
        x: `[n, H]` bf16, fp16 or fp32 on any device, n >= 0; not modified.
        alignment: multiple of 32 to which rows are padded with zeros; 0: 32. K is H rounded up to it.
        layout: of the scales.
        backend: "torch", or what `choose_quantize` answered for this device; it does not show in the bytes.

    Returns:
        float8_e4m3fn `[n, K]`; uint8 scales `layout.shape(n, K / 32)`, bytes of no scale 0. Bit for bit what
        quantising and then `swizzle_scales` give.

    No host synchronisation. Gradients are not recorded.

    Raises:
        ShapeError: x is no matrix of these dtypes.
        ConfigError: alignment, layout or backend.
    """
    if not isinstance(layout, ScaleLayout):
        raise ConfigError(what="layout", got=layout, wanted="one of " + ", ".join(map(str, ScaleLayout)))
    data, scales = _QUANTIZE(x, alignment, layout.value, backend)
    return data, scales


def choose_quantize(device: torch.device | str) -> QuantizeChoice:
    """What may quantise on a device: flashinfer where its bytes are those of torch on rows that try them, else torch.

    Runs both: once per layer, not per call. Rows with NaN and Inf are among them, whose bytes the format fixes.
    """
    device = torch.device(device)
    found = find("mxfp8_quantize", _FLASHINFER, device)
    if found.function is None:
        return QuantizeChoice("torch", found.why)
    rows = _trial_rows(device)
    try:
        differ = any(
            not torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            for layout in (ScaleLayout.LINEAR, ScaleLayout.SWIZZLED_128X4)
            for got, want in zip(
                mxfp8_quantize(rows, 128, layout, backend="flashinfer"), mxfp8_quantize(rows, 128, layout), strict=True
            )
        )
    except RuntimeError as error:
        return QuantizeChoice("torch", f"mxfp8_quantize of {found.why} fails: {error}")
    if differ:
        return QuantizeChoice("torch", f"bytes of mxfp8_quantize of {found.why} differ from the format's")
    return QuantizeChoice("flashinfer", f"{found.why}, bytes equal to torch's on trial rows")


def _trial_rows(device: torch.device) -> Tensor:
    """bf16 `[130, 160]`: every power of two at and around 448, zeros of both signs, subnormals, NaN and Inf."""
    exponents = torch.arange(130 * 5, device=device) % 250 - 125
    largest = torch.exp2(exponents.double()).mul_(1.75).to(torch.bfloat16)
    blocks = largest[:, None] * torch.linspace(-1, 1, 32, device=device, dtype=torch.bfloat16)
    blocks[1::7, 3] *= 1.0078125
    blocks[2::7] = -0.0
    blocks[3::31, 5] = float("nan")
    blocks[4::31, 6] = float("-inf")
    return blocks.view(130, 160)


def _quantize(x: Tensor, alignment: int = 0, layout: str = "linear", backend: str = "torch") -> tuple[Tensor, Tensor]:
    _check_backend(backend)
    kind = ScaleLayout(layout)
    # What flashinfer's kernel does not take is left to torch, which makes the same bytes.
    if backend == "flashinfer" and x.shape[0] and x.dtype != torch.float32:
        return _by_flashinfer(x.contiguous(), alignment, kind)
    data, scales = _MXFP8.quantize(x, alignment=alignment)
    return data, swizzle_scales(_MXFP8.need_scales(scales), kind)


def _by_flashinfer(x: Tensor, alignment: int, layout: ScaleLayout) -> tuple[Tensor, Tensor]:
    import flashinfer

    padded = _MXFP8.padded_size(x.shape[1], alignment)
    swizzled = layout is ScaleLayout.SWIZZLED_128X4
    made: tuple[Any, Any] = flashinfer.mxfp8_quantize(
        x, is_sf_swizzled_layout=swizzled, alignment=alignment or _MXFP8.block
    )
    data, scales = made[0].view(torch.float8_e4m3fn), made[1].view(torch.uint8)
    if swizzled:
        return data, scales.view(layout.shape(x.shape[0], padded // _MXFP8.block))
    return data, swizzle_scales(scales.view(x.shape[0], padded // _MXFP8.block), layout)


def _quantize_fake(
    x: Tensor, alignment: int = 0, layout: str = "linear", backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    _check_backend(backend)
    data, linear = _MXFP8.quantize(x, alignment=alignment)
    scales = _MXFP8.need_scales(linear)
    return data, scales.new_empty(ScaleLayout(layout).shape(*scales.shape))


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(what="backend", got=backend, wanted="one of " + ", ".join(map(repr, BACKENDS)))


_QUANTIZE = register(
    'mxfp8_quantize(Tensor x, int alignment=0, str layout="linear", str backend="torch") -> (Tensor, Tensor)',
    _quantize,
    _quantize_fake,
)
