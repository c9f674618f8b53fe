"""The kernel that gives padded slots the invalid id: every id and no other byte, on the emulated device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_emulator import COMPILER, EmulatedModule

from a2a.errors import ConfigError
from a2a.nvlink import params

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    if COMPILER is None:
        pytest.skip("needs g++")
    from a2a.nvlink.scrub_ids import FILE

    return EmulatedModule(FILE, {}, params.ScrubParams, tmp_path_factory.mktemp("scrub_ids"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("ep", "most", "top_k"), [(1, 1, 1), (3, 7, 5), (4, 40, 8), (2, 1, 64), (9, 3, 1), (2, 700, 3)]
)
def test_padding_and_nothing_else(emulated: EmulatedModule, ep: int, most: int, top_k: int, dtype: torch.dtype) -> None:
    """Wherever the ids begin among 16 bytes, with few and many CTAs, and counts that no good round writes."""
    from a2a.nvlink.scrub_ids import NUM_THREADS, fill, grid_of

    generator = torch.Generator().manual_seed(ep * most)
    for start in range(16 // dtype.itemsize + 1):
        memory = torch.randint(0, 100, (ep * most * top_k + 12,), dtype=dtype, generator=generator)
        ids = memory[start : start + ep * most * top_k].view(ep, most, top_k)
        counts = torch.randint(0, most + 1, (ep,), dtype=torch.int32, generator=generator)
        if start == 1:
            counts[0], counts[-1] = -3, most + 5
        wanted = memory.clone()
        invalid = -(2**40) - 3 if dtype == torch.int64 else -7
        part = wanted[start : start + ids.numel()].view_as(ids)
        part.masked_fill_((torch.arange(most) >= counts.unsqueeze(1)).unsqueeze(2), invalid)
        told = params.ScrubParams()
        fill(told, ids, counts, invalid)
        emulated.launch("scrub_ids", [told], grid_of(ids, most_ctas=2 + start), 64 if start else NUM_THREADS)
        assert torch.equal(memory, wanted)


def test_a_grid_covers_every_source_and_stays_within_its_limit() -> None:
    from a2a.nvlink.scrub_ids import NUM_THREADS, grid_of

    for shape, most_ctas, wanted in [
        ((8, 1, 4), 1056, (1, 8)),
        ((8, 2048, 8), 1056, (17, 8)),
        ((8, 1 << 20, 8), 1056, (132, 8)),
        ((2000, 9, 9), 1056, (1, 1056)),
    ]:
        ids = torch.empty(shape, dtype=torch.int32, device="meta")
        columns, rows = grid_of(ids, most_ctas)
        assert (columns, rows) == wanted and columns * rows <= most_ctas and NUM_THREADS == 256


def test_an_id_that_does_not_fit_is_refused() -> None:
    from a2a.nvlink.scrub_ids import fill

    counts = torch.zeros(1, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        ids = torch.zeros((1, 1, 1), dtype=dtype)
        for value in (limits.min, limits.max):
            fill(params.ScrubParams(), ids, counts, value)
        for value in (limits.min - 1, limits.max + 1):
            with pytest.raises(ConfigError, match="invalid_expert_id"):
                fill(params.ScrubParams(), ids, counts, value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel
    from a2a.nvlink.scrub_ids import FILE

    cubin, log = compile_kernel(FILE, {}, arch, preamble=params.device_source(), cache=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    # It shares its preamble with kernels that use all of it.
    assert all("never referenced" in line for line in log.splitlines() if "warning #" in line), log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
