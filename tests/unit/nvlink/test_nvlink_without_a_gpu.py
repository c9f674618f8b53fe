"""What of the nvlink room can be tested without a GPU: reasons, compiling, the cache, tensors over foreign memory."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from a2a.config import ExchangeConfig
from a2a.errors import CompileError, Unsupported
from a2a.nvlink.transport import TRANSPORT
from a2a.transport import choose

CONFIG = ExchangeConfig(ep_size=1, max_num_tokens=8, top_k=2, num_experts=4, hidden_size=64)
SOURCE = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }\n'
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"
)


class Alone:
    """A communicator of one rank."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, item: object) -> list[object]:
        return [item]

    def bcast(self, item: object, root: int = 0) -> object:
        return item

    def barrier(self) -> None:
        return

    def Split(self, color: int, key: int = 0) -> Alone:
        return self


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_reasons_without_a_gpu_are_readable() -> None:
    reasons = TRANSPORT.reasons(CONFIG, Alone())
    assert any("no GPU" in reason for reason in reasons)


def test_reasons_name_what_to_install() -> None:
    # In a process of its own, where the CUDA packages cannot be found.
    script = f"""
import sys
sys.modules["cuda"] = None
sys.path[:0] = {sys.path!r}
from {__name__} import Alone, CONFIG
from a2a.nvlink.transport import TRANSPORT
print(TRANSPORT.reasons(CONFIG, Alone()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "a2a[cu13]" in done.stdout


@needs_compiler
def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from a2a.nvlink import compile as module

    def absent() -> None:
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(module.nvrtc, "nvrtcVersion", absent)
    assert any("NVRTC cannot be loaded: no libnvrtc" in reason for reason in TRANSPORT.reasons(CONFIG, Alone()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_without_a_gpu_chooses_the_host() -> None:
    assert choose("auto", CONFIG, Alone()).name == "host"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "fill.cu").write_text(SOURCE)
    return tmp_path


@needs_compiler
def test_a_kernel_is_compiled_once(source: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    cache = source / "cache"
    first, log = compile_kernel("fill.cu", {"VALUE": 3}, "sm_90", include_path=source, cache=cache)
    again, no_log = compile_kernel("fill.cu", {"VALUE": 3}, "sm_90", include_path=source, cache=cache)
    assert first == again and "registers" in log and no_log == ""
    other, _ = compile_kernel("fill.cu", {"VALUE": 4}, "sm_90", include_path=source, cache=cache)
    assert other != first
    assert len(list(cache.glob("*.cubin"))) == 2


@needs_compiler
def test_a_header_is_part_of_the_key(source: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    (source / "fill.cu").write_text('#include "value.cuh"\n' + SOURCE)
    (source / "value.cuh").write_text('#include "deep/value.cuh"\n')
    (source / "deep").mkdir()
    results = []
    for value in (1, 2):
        (source / "deep" / "value.cuh").write_text(f"#define VALUE {value}\n")
        results.append(compile_kernel("fill.cu", {}, "sm_90", include_path=source, cache=source / "cache")[0])
    assert results[0] != results[1]


@needs_compiler
def test_a_damaged_cache_entry_is_compiled_again(source: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    cache = source / "cache"
    first, _ = compile_kernel("fill.cu", {"VALUE": 3}, "sm_90", include_path=source, cache=cache)
    (entry,) = cache.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:-1])
    again, log = compile_kernel("fill.cu", {"VALUE": 3}, "sm_90", include_path=source, cache=cache)
    assert again == first and log


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_used(source: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    blocked = source / "file"
    blocked.write_text("not a directory")
    cubin, _ = compile_kernel("fill.cu", {"VALUE": 3}, "sm_90", include_path=source, cache=blocked)
    assert cubin


@needs_compiler
def test_a_kernel_that_does_not_compile_shows_the_log(source: Path) -> None:
    from a2a.nvlink.compile import compile_kernel

    with pytest.raises(CompileError, match=r"fill\.cu\(1\).*nonsense"):
        compile_kernel("fill.cu", {"VALUE": "nonsense"}, "sm_90", include_path=source, cache=source / "cache")


class _Memory:
    """Host memory in place of a mapping."""

    shape = (2, 16)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.bytes = (ctypes.c_uint8 * 32)(*range(32))
        self.address = ctypes.addressof(self.bytes)


@needs_compiler
def test_views_keep_the_mapping_alive() -> None:
    from a2a.nvlink.memory import _tensor

    memory = _Memory()
    alive = weakref.ref(memory)
    tensor = _tensor(memory)
    del memory
    view = tensor[1, 4:8].view(torch.int32)
    del tensor
    gc.collect()
    assert alive() is not None
    assert view.item() == int.from_bytes(bytes(range(20, 24)), "little")
    del view
    gc.collect()
    assert alive() is None


@needs_compiler
def test_reasons_of_all_ranks_are_raised_on_each() -> None:
    from a2a.nvlink.memory import _agree

    class Two(Alone):
        def allgather(self, item: object) -> list[object]:
            return [item, "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"]

    with pytest.raises(Unsupported, match="rank 1: cuMemCreate"):
        _agree(Two(), None)
    _agree(Alone(), None)
