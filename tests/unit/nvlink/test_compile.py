"""Every kernel variant compiles for every architecture, without spills and within its registers; no GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from a2a.config import ExchangeConfig
from a2a.errors import CompileError
from a2a.nvlink import params

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"),
    pytest.mark.timeout(600),
]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
PLAIN_SMALL, OTHER = 64, 160
"""Registers of a thread. With 64 a multiprocessor holds 1024 threads, with 160 a CTA has 384."""
FEW = ExchangeConfig(ep_size=2, max_num_tokens=64, top_k=8, num_experts=256, hidden_size=7168, row_order="token")
COMPACT = ExchangeConfig(ep_size=8, max_num_tokens=64, top_k=8, num_experts=256, hidden_size=7168)
MASKED = ExchangeConfig(ep_size=8, max_num_tokens=64, top_k=22, num_experts=60, hidden_size=64, enable_rank_mask=True)
MANY = ExchangeConfig(ep_size=72, max_num_tokens=64, top_k=40, num_experts=256, hidden_size=64)
FORMATS = [name for name in params.WIRE_FORMATS if name is not None]
DISPATCH = ("dispatch_small_bytes", "dispatch_bulk", "dispatch_small_words")
WAYS = ("small_words", "small_bytes", "bulk", "push")
COMBINE = tuple(f"combine_{way}_{kind}" for way in WAYS for kind in params.OUTPUT_TYPES)
MADE = tuple(f"combine_{way}_quantized_{kind}" for way in ("small", "bulk", "push") for kind in params.OUTPUT_TYPES)
QUANTIZED = {"QUANTIZED_OUTPUT": 1}
VARIANTS = {
    "few ranks": ("dispatch.cu", params.defines(FEW, placement_table=False), DISPATCH),
    "compact": ("dispatch.cu", params.defines(COMPACT, placement_table=False), DISPATCH),
    "combine, compact": ("combine.cu", params.defines(COMPACT, placement_table=False), COMBINE),
    "masked, placed": ("dispatch.cu", params.defines(MASKED, placement_table=True), DISPATCH),
    "many ranks": ("dispatch.cu", params.defines(MANY, placement_table=False), DISPATCH),
    "combine, few ranks": ("combine.cu", params.defines(FEW, placement_table=False), (*COMBINE, "combine_bulk_e4m3")),
    "combine, many ranks": ("combine.cu", params.defines(MANY, placement_table=False), COMBINE),
    "combine, quantised": (
        "combine.cu",
        {**params.defines(FEW, placement_table=False), **QUANTIZED},
        (*MADE, "combine_bulk_quantized_e4m3"),
    ),
    "combine, many ranks, quantised": (
        "combine.cu",
        {**params.defines(MANY, placement_table=False), **QUANTIZED},
        MADE,
    ),
    **{
        name: ("dispatch.cu", params.defines(FEW, wire_format=name, placement_table=False), DISPATCH)
        for name in FORMATS
    },
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_compiles_without_spills(variant: str, arch: str, tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    file, constants, kernels = VARIANTS[variant]
    cubin, log = compile_kernel(file, constants, arch, preamble=params.device_source(), cache=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    assert "warning" not in log
    used = _registers(log)
    assert set(kernels) <= set(used)
    for kernel, count in used.items():
        plain = constants["EP_SIZE"] <= 32 and not constants["RANK_MASK"] and not constants["WIRE_FORMAT"]
        budget = PLAIN_SMALL if plain and "_small_words" in kernel else OTHER
        assert count <= budget, f"{kernel}: {count} registers, its budget is {budget}"
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert spills and not any(spills), log


def _registers(log: str) -> dict[str, int]:
    """Registers of each entry in the assembler's log."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name, used = re.match(r"'(\w+)'", part), re.search(r"Used (\d+) registers", part)
        assert name and used, part
        found[name.group(1)] = int(used.group(1))
    return found


@pytest.mark.parametrize("struct", params.STRUCTS)
def test_the_device_refuses_a_struct_of_another_size(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    text = params.device_source()
    size = f"sizeof({struct.__name__}) == {ctypes.sizeof(struct)}"
    assert size in text
    other = text.replace(size, f"sizeof({struct.__name__}) == {ctypes.sizeof(struct) + 8}")
    (tmp_path / "empty.cu").write_text("")
    compile_kernel("empty.cu", {}, "sm_90", preamble=text, include_path=tmp_path, cache=tmp_path)
    with pytest.raises(CompileError, match=struct.__name__):
        compile_kernel("empty.cu", {}, "sm_90", preamble=other, include_path=tmp_path, cache=tmp_path)


def test_landing_areas_stay_within_their_budget() -> None:
    for ep_size in (1, 2, 8, 72, 256):
        for contexts in (1, 2):
            config = ExchangeConfig(
                ep_size=ep_size, max_num_tokens=8192, top_k=8, num_experts=256, hidden_size=7168, num_contexts=contexts
            )
            sizes = dict(params.control_regions(config))
            landing = contexts * sum(size for name, size in sizes.items() if name.endswith("_landing"))
            assert landing <= params.LANDING_BUDGET_BYTES
            assert params.landing_tokens(config) <= params.MAX_LANDING_TOKENS
            # One more token would not fit, unless another limit holds.
            if 0 < params.landing_tokens(config) < params.MAX_LANDING_TOKENS:
                per_token = landing // params.landing_tokens(config)
                assert landing + per_token > params.LANDING_BUDGET_BYTES


def test_control_memory_does_not_depend_on_hidden_size() -> None:
    def control(hidden_size: int) -> int:
        config = ExchangeConfig(ep_size=8, max_num_tokens=512, top_k=8, num_experts=256, hidden_size=hidden_size)
        return sum(size for name, size in params.control_regions(config) if not name.endswith("_landing"))

    assert control(64) == control(16384)


def test_the_struct_file_needs_no_cuda_package() -> None:
    script = "import sys; sys.modules['cuda'] = None; import a2a.nvlink.params as p; print(len(p.device_source()))"
    assert int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout) > 0
