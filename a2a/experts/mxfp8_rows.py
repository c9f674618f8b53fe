"""experts/mxfp8_rows: rows to mxfp8 with their scales in the layout that a matrix kernel reads, as one operator.

Owns the operator, and the choice of what runs it, which never shows in the bytes. Refuses to know the format's
arithmetic (quant/mxfp8) and where rows come from.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from a2a.errors import A2AError, ConfigError
from a2a.experts.flashinfer_kernels import find
from a2a.quant import ScaleLayout, swizzle_scales, wire_format
from a2a.quant.format import FLOAT_DTYPES
from a2a.quant.ops import register

BACKENDS: Final = ("nvrtc", "flashinfer", "torch")
"""This package's kernel, flashinfer's, and torch operations, which run anywhere; the one to try first first."""

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
    x: Tensor, alignment: int = 0, layout: ScaleLayout = ScaleLayout.LINEAR, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Rows in mxfp8 and their scales in a layout.

    Args:
        x: `[n, H]` bf16, fp16 or fp32 on any device, n >= 0; not modified.
        alignment: multiple of 32 to which rows are padded with zeros; 0: 32. K is H rounded up to it.
        layout: of the scales.
        backend: "auto" for this package's kernel on a GPU whose bindings are installed and torch elsewhere, or one of
            `BACKENDS`, as `choose_quantize` answers. It does not show in the bytes.

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
    """What may quantise on a device: the first of `BACKENDS` whose bytes are those of torch on rows that try them.

    Runs what it tries: once per layer, not per call. The rows hold NaN and Inf too, whose bytes the format fixes.
    """
    device = torch.device(device)
    why: list[str] = []
    for backend in BACKENDS[:-1]:
        problem = _problem(backend, device)
        if problem is None:
            return QuantizeChoice(backend, "; ".join([*why, f"{backend}: bytes equal to torch's on trial rows"]))
        why.append(f"{backend}: {problem}")
    return QuantizeChoice("torch", "; ".join(why))


def _problem(backend: str, device: torch.device) -> str | None:
    """Why a kernel may not quantise on a device, or None: it made the right bytes."""
    if backend == "nvrtc" and device.type != "cuda":
        return f"tensors on {device.type}"
    if backend == "flashinfer":
        found = find("mxfp8_quantize", _FLASHINFER, device)
        if found.function is None:
            return found.why
    rows = _trial_rows(device)
    try:
        for layout in ScaleLayout:
            made, wanted = (mxfp8_quantize(rows, 128, layout, backend=each) for each in (backend, "torch"))
            if not all(map(_same_bytes, made, wanted)):
                return f"its bytes differ from the format's in layout {layout.value}"
    # What a kernel that is not there raises differs between releases.
    except (A2AError, ImportError, RuntimeError, ValueError, TypeError) as error:
        return f"a trial fails: {type(error).__name__}: {error}"
    return None


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _trial_rows(device: torch.device) -> Tensor:
    """bf16 `[130, 160]`: every power of two at and around 448, zeros of both signs, subnormals, NaN and Inf."""
    exponents = torch.arange(130 * 5, device=device) % 250 - 125
    largest = torch.exp2(exponents.double()).mul_(1.75).to(torch.bfloat16)
    blocks = largest[:, None] * torch.linspace(-1, 1, 32, device=device, dtype=torch.bfloat16)
    blocks[1::7, 31] *= 1.0078125
    blocks[2::7] = -0.0
    blocks[3::31, 5] = float("nan")
    blocks[4::31, 6] = float("-inf")
    return blocks.view(130, 160)


def _quantize(x: Tensor, alignment: int = 0, layout: str = "linear", backend: str = "auto") -> tuple[Tensor, Tensor]:
    _check_backend(backend)
    kind = ScaleLayout(layout)
    if backend == "auto" and x.is_cuda:
        backend = "torch" if find_spec("cuda") is None else "nvrtc"
    if backend == "nvrtc" and x.dim() == 2 and x.shape[0] and x.dtype in FLOAT_DTYPES:
        return _by_our_kernel(x.contiguous(), alignment, kind)
    # What a kernel does not take is left to torch, which makes the same bytes or says what is wrong.
    if backend == "flashinfer" and x.shape[0] and x.dtype != torch.float32:
        return _by_flashinfer(x.contiguous(), alignment, kind)
    data, scales = _MXFP8.quantize(x, alignment=alignment)
    return data, swizzle_scales(_MXFP8.need_scales(scales), kind)


def _by_our_kernel(x: Tensor, alignment: int, layout: ScaleLayout) -> tuple[Tensor, Tensor]:
    # It needs CUDA bindings, which only those who have a GPU install.
    from a2a.nvlink.quantize_rows import row_quantizer

    index = torch.cuda.current_device() if x.device.index is None else x.device.index
    return row_quantizer(index).quantize(x, "mxfp8", alignment, layout)


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
    x: Tensor, alignment: int = 0, layout: str = "linear", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    _check_backend(backend)
    data, linear = _MXFP8.quantize(x, alignment=alignment)
    scales = _MXFP8.need_scales(linear)
    return data, scales.new_empty(ScaleLayout(layout).shape(*scales.shape))


def _check_backend(backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        wanted = "'auto' or one of " + ", ".join(map(repr, BACKENDS))
        raise ConfigError(what="backend", got=backend, wanted=wanted)


_QUANTIZE = register(
    'mxfp8_quantize(Tensor x, int alignment=0, str layout="linear", str backend="auto") -> (Tensor, Tensor)',
    _quantize,
    _quantize_fake,
)
