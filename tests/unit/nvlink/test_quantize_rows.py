"""The kernel that quantises rows by themselves: the formats' bytes, in every layout, on the emulated device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_emulator import COMPILER, EmulatedModule

from a2a.nvlink import params
from a2a.quant import WIRE_FORMATS, ScaleLayout, swizzle_scales, wire_format

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


FORMATS = ("mxfp8", "nvfp4", "mxfp4")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    if COMPILER is None:
        pytest.skip("needs g++")
    from a2a.nvlink.quantize_rows import FILE, constants

    return EmulatedModule(FILE, constants(), params.QuantizeParams, tmp_path_factory.mktemp("quantize_rows"))


def hostile(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: NaN, Inf, subnormals; every second row of one size."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits, generator = torch.iinfo(integer), torch.Generator().manual_seed(rows * width)
    made = torch.randint(limits.min, limits.max, (rows, width), dtype=integer, generator=generator).view(dtype)
    made[::2] = (torch.randn(made[::2].shape, generator=generator) * 2.0**-7).to(dtype)
    return made


@pytest.mark.parametrize("layout", list(ScaleLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "rows", "hidden", "alignment"),
    [
        ("mxfp8", 3, 160, 128),
        ("mxfp8", 2, 2880, 256),
        ("mxfp8", 131, 33, 0),
        ("mxfp8", 1, 1024, 0),
        ("nvfp4", 3, 16, 0),
        ("nvfp4", 9, 1104, 0),
        ("mxfp4", 129, 32, 0),
        ("mxfp4", 2, 2848, 0),
    ],
)
def test_bytes(emulated: EmulatedModule, name: str, rows: int, hidden: int, alignment: int,
               dtype: torch.dtype, layout: ScaleLayout) -> None:  # fmt: skip
    """Every byte of rows and scales, padding of the layout among them, and none beside them."""
    from a2a.nvlink.quantize_rows import NUM_THREADS, fill

    x, form = hostile(rows, hidden, dtype), wire_format(name)
    scale = torch.tensor(0.37) if form.needs_global_scale else None
    wanted, linear = form.quantize(x, alignment=alignment, global_scale=scale)
    linear = form.need_scales(linear)
    arranged = swizzle_scales(linear.view(torch.uint8), layout)
    # Also where 16 bytes, and 8, cannot be written at once.
    for start in (0, 8, 3):
        held = torch.full((wanted.numel() + 32,), 0xAA, dtype=torch.uint8)
        data = held[start : start + wanted.numel()].view(wanted.dtype).view(wanted.shape)
        kept = torch.full((arranged.numel() + 9,), 0xAA, dtype=torch.uint8)
        scales = kept[start : start + arranged.numel()]
        told = params.QuantizeParams()
        fill(told, form, x, data, scales, layout, scale)
        emulated.launch("quantize_rows", [told], (2, 1), NUM_THREADS)
        assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales.view(arranged.shape), arranged)
        for memory, part in ((held, wanted), (kept, arranged)):
            assert (memory[:start] == 0xAA).all() and (memory[start + part.numel() :] == 0xAA).all()


class Launches:
    """In place of the kernel: what it was told, and the shape of its launch."""

    def __init__(self) -> None:
        self.parameters = params.QuantizeParams()
        self.told: list[tuple[tuple[int, int], int, int, int]] = []
        self.grid: tuple[int, int] = (0, 0)

    def shape(self, grid: tuple[int, int], threads: int, shared_bytes: int) -> None:
        assert shared_bytes == 0
        self.grid, self.threads = grid, threads

    def launch(self, stream: int) -> None:
        told = self.parameters
        self.told.append((self.grid, self.threads, told.layout_rows, told.layout_columns))


def test_one_launch_covers_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    from types import SimpleNamespace

    from a2a.nvlink.quantize_rows import RowQuantizer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    kernel = Launches()
    quantizer = RowQuantizer.__new__(RowQuantizer)
    quantizer._kernel, quantizer._most_ctas = kernel, 40  # type: ignore[assignment]
    quantizer._lock = threading.Lock()
    for rows, width, layout in (
        (3, 1040, ScaleLayout.LINEAR),
        (3, 1040, ScaleLayout.SWIZZLED_8X4),
        (3, 1040, ScaleLayout.SWIZZLED_128X4),
    ):
        data, scales = quantizer.quantize(torch.zeros((rows, width)), "nvfp4", 0, layout)
        assert data.shape == (rows, width // 2) and scales.shape == layout.shape(rows, width // 16)
    # Three warps for 65 or 68 columns of 16 elements each, for each row of the layout.
    assert kernel.told == [((2, 1), 256, 3, 65), ((3, 1), 256, 8, 68), ((40, 1), 256, 128, 68)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel
    from a2a.nvlink.quantize_rows import FILE, constants

    cubin, log = compile_kernel(FILE, constants(), arch, preamble=params.device_source(), cache=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    # It shares its preamble with kernels that use all of it.
    assert all("never referenced" in line for line in log.splitlines() if "warning #" in line), log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


def test_every_output_that_combine_can_quantize_has_the_kernel() -> None:
    from a2a.nvlink.quantize_rows import FORMATS as named

    assert named == FORMATS
    sizes = {name: form.scales_dtype.itemsize for name, form in WIRE_FORMATS.items() if form.scales_dtype is not None}
    assert set(named) == {name for name, size in sizes.items() if size == 1}


def test_every_format_with_scales_has_a_twin() -> None:
    wanted = {name for name, form in WIRE_FORMATS.items() if form.scales_dtype is not None}
    assert set(params.WIRE_FORMATS) == {None, *wanted}


def test_layouts_are_numbered_alike() -> None:
    assert [each.value for each in ScaleLayout] == list(params.SCALE_LAYOUTS)
