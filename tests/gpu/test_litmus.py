"""The order that the kernels rely on between two GPUs: never broken in 1e8 updates, and broken without the fence."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from a2a.comm import Comm

pytestmark = [pytest.mark.gpu(2), pytest.mark.alone, pytest.mark.timeout(200)]

UPDATES: Final = 200_000_000
_CTAS, _THREADS = 64, 256
_STORES, _BULK_COPIES = 0, 1
_TRIES: Final = 8
_BUDGET_S: Final = 20.0


class LitmusParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("peer_data", "peer_flags", "peer_answers", "data", "flags", "answers")),
        ("counts", ctypes.c_uint64),
        ("budget_ns", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("ctas", "vectors_per_thread", "updates", "style", "fenced", "split")),
    )


def _declaration() -> str:
    names = {ctypes.c_uint32: "u32", ctypes.c_uint64: "u64"}
    fields = "".join(f"  {names[kind]} {name};\n" for name, kind in LitmusParams._fields_)
    size = ctypes.sizeof(LitmusParams)
    return f'struct LitmusParams {{\n{fields}}};\nstatic_assert(sizeof(LitmusParams) == {size}, "struct");\n'


def compiled(arch: str, cache: Path | None = None) -> bytes:
    """The litmus kernels; they take their waits and stores from the product's own header."""
    from a2a.nvlink.compile import KERNELS, compile_kernel
    from a2a.nvlink.params import device_source

    preamble = device_source() + _declaration() + '#include "sync.cuh"\n'
    with tempfile.TemporaryDirectory() as folder:
        for file in (KERNELS / "sync.cuh", Path(__file__).with_name("litmus.cu")):
            shutil.copy(file, folder)
        return compile_kernel("litmus.cu", {}, arch, preamble=preamble, include_path=Path(folder), cache=cache)[0]


class Pair:
    """Two devices, each with memory that both can write."""

    def __init__(self, kernel: str) -> None:
        from a2a.nvlink.driver import arch_of
        from a2a.nvlink.launch import Library

        self.devices = [torch.device("cuda", index) for index in range(2)]
        _enable_peers(self.devices)
        self.streams: list[Any] = [torch.cuda.Stream(device) for device in self.devices]
        self.kernels = []
        for device in self.devices:
            library = Library(compiled(arch_of(device)), device)
            self.kernels.append(library.kernel(kernel, LitmusParams))

    def run(self, updates: int, vectors: int, **fields: int) -> tuple[int, int]:
        """(looked at, wrong) of both directions; fresh zeroed memory each time."""
        sizes = (_CTAS * _THREADS * 16 * vectors, _CTAS * 128 * (_THREADS // 32), _CTAS * 128 * (_THREADS // 32), 16)
        memory = [[torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes] for device in self.devices]
        for device in self.devices:
            torch.cuda.synchronize(device)
        for index, kernel in enumerate(self.kernels):
            (data, flags, answers, counts), theirs = memory[index], memory[1 - index]
            params = kernel.parameters
            for name, tensor in (("data", data), ("flags", flags), ("answers", answers), ("counts", counts)):
                setattr(params, name, tensor.data_ptr())
            for name, tensor in zip(("peer_data", "peer_flags", "peer_answers"), theirs[:3], strict=True):
                setattr(params, name, tensor.data_ptr())
            params.ctas, params.updates, params.vectors_per_thread = _CTAS, updates, vectors
            params.budget_ns = int(_BUDGET_S * 1e9)
            params.style, params.fenced, params.split = (fields.get(name, 0) for name in ("style", "fenced", "split"))
            kernel.shape((2 * _CTAS, 1), _THREADS, 16 * _THREADS)
        for kernel, stream in zip(self.kernels, self.streams, strict=True):
            kernel.launch(stream.cuda_stream)
        for stream in self.streams:
            stream.synchronize()
        counts = [each[3].view(torch.int64).tolist() for each in memory]
        return sum(each[0] for each in counts), sum(each[1] for each in counts)


def _enable_peers(devices: list[torch.device]) -> None:
    from cuda.bindings import driver as cu

    from a2a.nvlink.driver import checked, on_device

    contexts = []
    for device in devices:
        with on_device(device):
            torch.zeros(1, device=device)
            contexts.append(checked("cuCtxGetCurrent", cu.cuCtxGetCurrent()))
    for index, device in enumerate(devices):
        with on_device(device):
            (status,) = cu.cuCtxEnablePeerAccess(contexts[1 - index], 0)
            assert int(status) in (0, int(cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)), status


@pytest.mark.parametrize("style", [_STORES, _BULK_COPIES], ids=["stores", "bulk copies"])
def test_rows_behind_a_fenced_flag_are_never_stale(style: int) -> None:
    if style == _BULK_COPIES and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")
    vectors = 16
    updates = -(-UPDATES // (2 * _CTAS * _THREADS * vectors)) + 1
    seen, stale = Pair("rows_behind_a_flag").run(updates, vectors, style=style, fenced=1)
    assert seen >= UPDATES and stale == 0, (seen, stale)


def test_rows_of_a_warp_behind_its_fenced_flag_are_never_stale() -> None:
    vectors = 16
    updates = -(-UPDATES // (2 * _CTAS * _THREADS * vectors)) + 1
    seen, stale = Pair("rows_of_a_warp").run(updates, vectors, fenced=1)
    assert seen >= UPDATES and stale == 0, (seen, stale)


def test_rows_of_a_warp_without_the_fence_are_stale() -> None:
    pair = Pair("rows_of_a_warp")
    found = {}
    for attempt in range(_TRIES):
        vectors = (16, 4, 64, 1)[attempt % 4]
        found[attempt, vectors] = pair.run(400 * (1 + attempt), vectors, fenced=0)[1]
        if found[attempt, vectors]:
            return
    pytest.fail(f"cannot tell: without the fence nothing was stale either: {found}")


def test_without_the_fence_rows_are_stale() -> None:
    """The control: if nothing goes wrong without the fence, the test above proves nothing."""
    pair = Pair("rows_behind_a_flag")
    styles = (_STORES, _BULK_COPIES) if torch.cuda.get_device_capability() >= (9, 0) else (_STORES,)
    found = {}
    for attempt in range(_TRIES):
        for style in styles:
            # Short rows and long ones: what is late depends on how much is under way.
            vectors = (16, 4, 64, 1)[attempt % 4]
            _, stale = pair.run(400 * (1 + attempt), vectors, style=style, fenced=0)
            found[attempt, style, vectors] = stale
        if any(found.values()):
            print(f"stale by (attempt, style, vectors per thread): {found}")
            return
    pytest.fail(f"cannot tell: without the fence nothing was stale either: {found}")


def test_lines_with_a_tag_are_never_torn() -> None:
    updates = -(-UPDATES // (2 * _CTAS * (_THREADS // 32) * 4)) + 1
    seen, torn = Pair("lines_with_a_tag").run(updates, 1, split=0)
    assert seen >= UPDATES and torn == 0, (seen, torn)


def test_lines_of_two_stores_are_torn() -> None:
    pair = Pair("lines_with_a_tag")
    found = []
    for attempt in range(_TRIES):
        found.append(pair.run(2000 * (1 + attempt), 1, split=1)[1])
        if found[-1]:
            return
    pytest.fail(f"cannot tell: lines written in two halves looked whole too: {found}")


# ---- the probe of every build --------------------------------------------------------------------------------------


def _probe(comm: Comm) -> tuple[Any, bool, float]:
    from a2a.comm.mesh import Mesh
    from a2a.nvlink.memory import SymmetricMemory
    from a2a.nvlink.probe import LineProbe

    device = torch.device("cuda", torch.cuda.current_device())
    mesh = Mesh(comm, (), timeout_s=60.0)
    memory = SymmetricMemory(1, device, comm, mesh, timeout_s=60.0)
    LineProbe(memory).run(comm)
    probe = LineProbe(memory)
    comm.barrier()
    start = time.monotonic()
    lines = probe.run(comm)
    took_s = time.monotonic() - start
    zero = not bool(memory.tensor[comm.Get_rank()].any())
    comm.barrier()
    mesh.close()
    return lines, zero, took_s


def test_a_build_proves_its_lines(run_ranks: Any) -> None:
    for lines, zero, took_s in run_ranks(_probe, 2):
        assert zero and lines.whole, lines
        assert set(lines.seen) == {(0, 1), (1, 0)} and min(lines.seen.values()) == 8 * 4 * 1000, lines
        assert took_s < 0.05, took_s
