"""The kernel that quantises rows by themselves: the format's bytes, in every layout, on the emulated device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_emulator import COMPILER, EmulatedModule

from a2a.nvlink import params
from a2a.quant import ScaleLayout, swizzle_scales, wire_format

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
@pytest.mark.parametrize(("rows", "hidden", "alignment"), [(3, 160, 128), (2, 2880, 256), (131, 33, 0), (1, 1024, 0)])
def test_bytes(emulated: EmulatedModule, rows: int, hidden: int, alignment: int, dtype: torch.dtype,
               layout: ScaleLayout) -> None:  # fmt: skip
    from a2a.nvlink.quantize_rows import NUM_THREADS, fill

    x = hostile(rows, hidden, dtype)
    wanted, linear = wire_format("mxfp8").quantize(x, alignment=alignment)
    assert linear is not None
    data = torch.full(wanted.shape, 0xAA, dtype=torch.uint8).view(wanted.dtype)
    scales = torch.zeros(layout.shape(*linear.shape), dtype=torch.uint8)
    told = params.QuantizeParams()
    fill(told, x, data, scales, layout)
    emulated.launch("quantize_rows", [told], (2, 1), NUM_THREADS)
    assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, swizzle_scales(linear, layout))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel
    from a2a.nvlink.quantize_rows import FILE, constants

    cubin, log = compile_kernel(FILE, constants(), arch, preamble=params.device_source(), cache=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    # It shares its preamble with kernels that use all of it.
    assert all("never referenced" in line for line in log.splitlines() if "warning #" in line), log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


def test_layouts_are_numbered_alike() -> None:
    assert [each.value for each in ScaleLayout] == list(params.SCALE_LAYOUTS)
