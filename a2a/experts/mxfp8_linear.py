"""experts/mxfp8_linear: the product of mxfp8 rows and mxfp8 weights, and a linear layer on the best way to make it.

Owns the operator, its ways, and the choice between them by trying. Refuses to know what a product is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError
from a2a.experts.flashinfer_kernels import find
from a2a.experts.mxfp8_rows import choose_quantize, mxfp8_quantize
from a2a.quant import ScaleLayout, swizzle_scales, unswizzle_scales, wire_format
from a2a.quant.ops import register

BACKENDS: Final = ("flashinfer", "scaled_mm", "dequantize")
"""Ways to make the product, the one to try first first; the last works everywhere."""

BLOCK: Final = 32

_FLASHINFER: Final = ("a", "b", "a_descale", "b_descale", "out_dtype")
_MXFP8: Final = wire_format("mxfp8")
_OUTPUTS: Final = (torch.bfloat16, torch.float16, torch.float32)
_SWIZZLED: Final = ScaleLayout.SWIZZLED_128X4


def mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    a_layout: ScaleLayout = ScaleLayout.LINEAR,
    b_layout: ScaleLayout = ScaleLayout.LINEAR,
    backend: str = "dequantize",
) -> Tensor:
    """`a @ b.T` of mxfp8 matrices.

    Args:
        a: float8_e4m3fn `[m, K]`, K a multiple of 32, m >= 0.
        b: float8_e4m3fn `[N, K]`, as weights are stored.
        a_scales, b_scales: uint8 scales, `[m, K / 32]` and `[N, K / 32]`, or in another layout the bytes of it.
        out_dtype: bf16, fp16 or fp32. "flashinfer" makes no fp32.
        a_layout, b_layout: of the scales. Kernels read 128x4, "dequantize" reads linear; others are laid out anew at
            each call.
        backend: one of `BACKENDS`. "dequantize" forms values and sums in fp32 and rounds once; the others accumulate as
            their tensor cores do.

    Returns:
        `[m, N]` of out_dtype.

    No host synchronisation. Gradients are not recorded.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other.
        ConfigError: out_dtype or backend.
    """
    out: Tensor = _MM(a, b, a_scales, b_scales, out_dtype, a_layout.value, b_layout.value, backend)
    return out


@dataclasses.dataclass(frozen=True)
class Mxfp8Linear:
    """A linear layer with mxfp8 weights; made by `dispatch_w8a8_mxfp8_linear`.

    Attributes:
        backend: how products are made.
        quantize: how inputs are quantised.
        why: one line per way that was looked at.
    """

    backend: str
    quantize: str
    why: tuple[str, ...]

    @property
    def weight_layout(self) -> ScaleLayout:
        """The layout in which weight scales are read without being laid out anew."""
        return ScaleLayout.LINEAR if self.backend == "dequantize" else _SWIZZLED

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """The widest output: fp32, or bf16 where the kernel makes no wider one."""
        return torch.bfloat16 if self.backend == "flashinfer" else torch.float32

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
        *,
        input_scales: Tensor | None = None,
        weight_layout: ScaleLayout = ScaleLayout.LINEAR,
        bias: Tensor | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`x @ weight.T + bias`.

        Args:
            x: `[..., H]` bf16, fp16 or fp32, H at most K; or float8_e4m3fn `[..., K]` with `input_scales`.
            weight: float8_e4m3fn `[N, K]`.
            weight_scales: uint8 `[N, K / 32]`, or the bytes of `weight_layout`.
            input_scales: uint8 `[..., K / 32]` of an x that is quantised already.
            weight_layout: of the weight's scales; this object's `weight_layout` costs nothing.
            bias: `[N]`, added to the rounded product.
            output_dtype: None for the dtype of x, bf16 if that is e4m3.

        Returns:
            `[..., N]`.

        Raises:
            ShapeError, ConfigError: as `mm_mxfp8`; also x wider than the weight.
        """
        width = weight.shape[1]
        flat = x.reshape(-1, x.shape[-1])
        if input_scales is not None:
            rows, scales, layout = flat, input_scales.reshape(-1, input_scales.shape[-1]), ScaleLayout.LINEAR
        else:
            if x.shape[-1] > width:
                raise ShapeError(what="x", got=list(x.shape), wanted=f"rows of at most {width} elements")
            layout = self.weight_layout
            # A multiple of one whole weight row pads to exactly that.
            rows, scales = mxfp8_quantize(flat, width, layout, backend=self.quantize)
        wanted = output_dtype or (x.dtype if input_scales is None else torch.bfloat16)
        kernel_dtype = torch.bfloat16 if wanted == torch.float32 else wanted
        out = mm_mxfp8(
            rows, weight, scales, weight_scales, kernel_dtype if self.backend == "flashinfer" else wanted,
            a_layout=layout, b_layout=weight_layout, backend=self.backend,
        ).to(wanted)  # fmt: skip
        if bias is not None:
            out = out + bias.to(wanted)
        return out.reshape(*x.shape[:-1], weight.shape[0])


def dispatch_w8a8_mxfp8_linear(backend: str = "auto", device: torch.device | str | None = None) -> Mxfp8Linear:
    """The best linear layer with mxfp8 weights and inputs that this machine can run.

    Each way is tried on a small product whose result is known exactly: flashinfer (Blackwell), torch's own block-scaled
    product, dequantising and multiplying. `why` of the answer says what became of each.

    Args:
        backend: "auto", or one of `BACKENDS` to insist on.
        device: where tensors will be; None for the current GPU, the CPU if there is none.

    Raises:
        ConfigError: an unknown backend, or one that does not work here, with the reason.
    """
    if backend not in ("auto", *BACKENDS):
        wanted = "'auto' or one of " + ", ".join(map(repr, BACKENDS))
        raise ConfigError(what="backend", got=backend, wanted=wanted)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    why: list[str] = []
    for name in BACKENDS if backend == "auto" else (backend,):
        problem = _problem(name, device)
        if problem is None:
            quantize = choose_quantize(device)
            why += [f"{name}: chosen", f"quantised by {quantize.backend} ({quantize.why})"]
            return Mxfp8Linear(name, quantize.backend, tuple(why))
        why.append(f"{name}: {problem}")
    raise ConfigError(what="backend", got=backend, wanted=f"one that works on {device}", change="; ".join(why))


def _problem(backend: str, device: torch.device) -> str | None:
    """Why a way cannot be taken on a device, or None: it was taken, and its product was right."""
    if backend == "flashinfer":
        found = find("mm_mxfp8", _FLASHINFER, device)
        if found.function is None:
            return found.why
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (128, 128), generator=generator).to(torch.float8_e4m3fn).to(device) for _ in range(2))
    left, right = (
        torch.randint(126, 129, (128, 4), generator=generator, dtype=torch.uint8).to(device) for _ in range(2)
    )
    try:
        out = mm_mxfp8(a, b, left, right, torch.bfloat16, backend=backend)
    # What a kernel that is not there raises differs between releases.
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return f"a trial fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Every partial sum is a multiple of 1/4 and at most 2^13: exact in fp32 and in less, in any order.
    wanted = mm_mxfp8(a, b, left, right, torch.bfloat16, backend="dequantize")
    return None if torch.equal(out, wanted) else "a trial product is wrong"


def _by_flashinfer(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    import flashinfer

    out: Tensor = flashinfer.mm_mxfp8(a, b.t(), a_scales.flatten(), b_scales.flatten(), out_dtype=out_dtype)
    return out


def _by_scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    e8m0 = torch.float8_e8m0fnu
    left, right = a_scales.flatten().view(e8m0), b_scales.flatten().view(e8m0)
    functional: Any = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        return torch._scaled_mm(a, b.t(), scale_a=left, scale_b=right, out_dtype=out_dtype)
    recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    out: Tensor = functional.scaled_mm(
        a, b.t(), left, recipe, right, recipe, swizzle_a=order, swizzle_b=order, output_dtype=out_dtype
    )
    return out


def _by_dequantizing(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (_MXFP8.dequantize(a, a_scales) @ _MXFP8.dequantize(b, b_scales).t()).to(out_dtype)


_WAYS: Final[Mapping[str, tuple[Callable[..., Tensor], ScaleLayout]]] = MappingProxyType(
    {
        "flashinfer": (_by_flashinfer, _SWIZZLED),
        "scaled_mm": (_by_scaled_mm, _SWIZZLED),
        "dequantize": (_by_dequantizing, ScaleLayout.LINEAR),
    }
)


def _mm(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype,
    a_layout: str,
    b_layout: str,
    backend: str,
) -> Tensor:
    out = _mm_fake(a, b, a_scales, b_scales, out_dtype, a_layout, b_layout, backend)
    if not out.numel() or not a.shape[1]:
        return out.zero_()
    way, layout = _WAYS[backend]
    return way(
        a.contiguous(),
        b.contiguous(),
        _laid_out(a_scales, a, ScaleLayout(a_layout), layout),
        _laid_out(b_scales, b, ScaleLayout(b_layout), layout),
        out_dtype,
    )


def _laid_out(scales: Tensor, beside: Tensor, have: ScaleLayout, want: ScaleLayout) -> Tensor:
    if have is want:
        return scales.contiguous()
    rows, cols = beside.shape[0], beside.shape[1] // BLOCK
    return swizzle_scales(unswizzle_scales(scales.contiguous(), have, rows, cols), want)


def _mm_fake(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype,
    a_layout: str,
    b_layout: str,
    backend: str,
) -> Tensor:
    if backend not in BACKENDS:
        raise ConfigError(what="backend", got=backend, wanted="one of " + ", ".join(map(repr, BACKENDS)))
    if out_dtype not in _OUTPUTS or (backend == "flashinfer" and out_dtype == torch.float32):
        raise ConfigError(what="out_dtype", got=str(out_dtype), wanted=f"a dtype that {backend} makes")
    for what, matrix in (("a", a), ("b", b)):
        if matrix.dim() != 2 or matrix.dtype != torch.float8_e4m3fn or matrix.shape[1] % BLOCK:
            raise ShapeError(
                what=what,
                got=f"{matrix.dtype} {list(matrix.shape)}",
                wanted=f"float8_e4m3fn of two dimensions, rows of a multiple of {BLOCK}",
            )
    if a.shape[1] != b.shape[1] or len({each.device for each in (a, b, a_scales, b_scales)}) > 1:
        raise ShapeError(
            what="b",
            got=f"{list(b.shape)} on {b.device}",
            wanted=f"rows of {a.shape[1]} elements, on {a.device} with all scales",
        )
    for what, scales, matrix, layout in (("a_scales", a_scales, a, a_layout), ("b_scales", b_scales, b, b_layout)):
        _check_scales(what, scales, matrix, ScaleLayout(layout))
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check_scales(what: str, scales: Tensor, matrix: Tensor, layout: ScaleLayout) -> None:
    height, width = layout.shape(matrix.shape[0], matrix.shape[1] // BLOCK)
    if scales.dtype != torch.uint8 or scales.dim() not in (1, 2) or scales.numel() != height * width:
        raise ShapeError(
            what=what,
            got=f"{scales.dtype} {list(scales.shape)}",
            wanted=f"uint8 [{height}, {width}] beside a matrix {list(matrix.shape)}, {layout}",
        )


_MM = register(
    "mm_mxfp8(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, ScalarType out_dtype, str a_layout, str b_layout, "
    "str backend) -> Tensor",
    _mm,
    _mm_fake,
)
