"""The probe of lines, on an emulated device that tears them or does not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import kernel_emulator
import pytest
import torch
from kernel_emulator import COMPILER, EmulatedModule

from a2a.nvlink import params

probe = pytest.importorskip("a2a.nvlink.probe", reason="needs cuda-core and NVRTC: install a2a[cu13]")
needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the kernels for the CPU")
RANKS = 3


def _probe(module: EmulatedModule, updates: int, ranks: list[int], budget_s: float = 60.0) -> list[list[list[int]]]:
    used = RANKS * probe._CTAS * probe._PROBE_BYTES
    raw = torch.zeros(RANKS * used + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 128
    counts = torch.zeros((RANKS, RANKS, 2), dtype=torch.int32)
    told = []
    for rank in ranks:
        fields = params.ProbeParams()
        fields.memory, fields.stride = raw.data_ptr() + start, used
        fields.counts, fields.ep_rank = counts[rank].data_ptr(), rank
        fields.updates, fields.budget_ns = updates, int(budget_s * 1e9)
        fields.peers[0] = 0b111 & ~(1 << rank)
        told.append(fields)
    module.launch("probe_lines", told, (2, RANKS), 64)
    return counts.tolist()


STORE = r"st\.relaxed\.sys\.global\.v2\.u64"
TAG = "const bool tag = ((unsigned long long)(%0) & 127) == 112;"


@pytest.fixture(params=["whole", "torn"])
def module(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, EmulatedModule]:
    """The probe on a device that shows the tag of a line last, or long before the rest."""
    plain = "__atomic_store_n(%0, %1, __ATOMIC_RELEASE); __atomic_store_n(%0 + 1, %2, __ATOMIC_RELEASE);"
    stores = {
        "whole": kernel_emulator.INSTRUCTIONS[STORE],
        "torn": f"{TAG} if (!tag) for (int i = 0; i < 40; ++i) emulated::yield(); {plain}",
    }
    monkeypatch.setitem(kernel_emulator.INSTRUCTIONS, STORE, stores[request.param])
    return request.param, EmulatedModule("probe.cu", {}, params.ProbeParams, tmp_path)


@needs_emulator
def test_torn_lines_are_seen_and_no_others(module: tuple[str, EmulatedModule]) -> None:
    kind, device = module
    for rank, of_rank in enumerate(_probe(device, 10, [0, 1, 2])):
        for peer, (seen, torn) in enumerate(of_rank):
            if peer == rank:
                assert (seen, torn) == (0, 0)
            else:
                # 2 CTAs, 4 lines, 10 updates.
                assert seen == 80 and (torn > 0) == (kind == "torn")


@needs_emulator
def test_a_rank_that_does_not_come_ends_it(module: tuple[str, EmulatedModule]) -> None:
    counts = _probe(module[1], 5, [0, 2], budget_s=3.0)
    assert counts[0][1] == [0, 0] and counts[0][2][0] == 40


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_it_compiles(arch: str, tmp_path: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    cubin, log = compile_kernel("probe.cu", {}, arch, preamble=params.device_source(), cache=tmp_path)
    assert cubin[:4] == b"\x7fELF" and "0 bytes spill stores" in log


def test_the_sentence() -> None:
    assert "not tried" in probe.Lines({}, {}).text()
    fine = probe.Lines({(0, 1): 5, (1, 0): 6}, {(0, 1): 0, (1, 0): 0})
    assert fine.whole and "none of 11 lines between 2 pairs" in fine.text()
    torn = probe.Lines({(0, 1): 5, (1, 0): 6}, {(0, 1): 0, (1, 0): 2})
    assert not torn.whole and "2 from rank 1 to 0" in torn.text() and "bulk" in torn.text()


def test_the_struct_has_room_for_every_rank() -> None:
    assert params.ProbeParams.peers.size * 8 == 256
    assert 256 * probe._CTAS * probe._PROBE_BYTES <= 2 << 20
    assert ctypes.sizeof(params.ProbeParams) % 8 == 0
