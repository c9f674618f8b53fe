"""Loaded code: once for all ranks of a process, with room for the widest, and no unloading in the middle of a round."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.nvlink import params

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"
)
GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def number_of(library: int, name: str) -> int:
    """Of the function of that one-letter name."""
    return 1000 * library + ord(name)


class Driver:
    """In place of the CUDA driver: numbers what is loaded and writes down what is asked."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.unloaded: list[int] = []
        self.limits: list[tuple[int, int]] = []

    def cuLibraryLoadData(self, *_: Any) -> tuple[int, int]:
        self.loaded.append(len(self.loaded))
        return 0, self.loaded[-1]

    def cuLibraryUnload(self, library: int) -> tuple[int]:
        self.unloaded.append(library)
        return (0,)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int, int]:
        return 0, number_of(library, name.decode())

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return 0, kernel

    def cuFuncGetAttribute(self, key: Any, function: int) -> tuple[int, int]:
        return 0, 0

    def cuFuncSetAttribute(self, function: int, key: Any, value: int) -> tuple[int]:
        assert key.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        self.limits.append((function, value))
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    from a2a.nvlink import launch

    made = Driver()
    gc.collect()
    for name in dir(made):
        if name.startswith("cu"):
            monkeypatch.setattr(launch.cu, name, getattr(made, name))
    monkeypatch.setattr(launch, "_launcher", lambda: print)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_LEFT", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_ranks_share_what_is_loaded_on_their_gpu(driver: Driver) -> None:
    from a2a.nvlink.launch import load

    # As each rank reads the cache by itself.
    ranks = [load(bytes(bytearray(b"code of all")), GPU) for _ in range(8)]
    assert len({id(each) for each in ranks}) == 1 and driver.loaded == [0]
    others = [load(b"code of all", OTHER), load(b"other code", GPU)]
    assert driver.loaded == [0, 1, 2] and len({id(each) for each in [*ranks, *others]}) == 3
    kernels = [each.kernel("f", params.QuantizeParams) for each in ranks[:2]]
    kernels[0].parameters.num_rows = 3
    assert kernels[1].parameters.num_rows == 0, "parameters are each rank's own"


def test_nothing_is_unloaded_before_the_next_load(driver: Driver) -> None:
    from a2a.nvlink.launch import load

    kernel = load(b"code", GPU).kernel("f", params.QuantizeParams)
    assert load(b"code", GPU) is kernel._library, "a kernel keeps its code"
    del kernel
    gc.collect()
    assert driver.unloaded == [] and driver.loaded == [0]
    again = load(b"code", GPU)
    assert driver.unloaded == [0] and driver.loaded == [0, 1]
    del again


def test_nothing_is_unloaded_in_a_capture(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from a2a.nvlink.launch import load

    kept = [load(b"code", GPU)]
    kept.clear()
    gc.collect()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kept.append(load(b"other", GPU))
    assert driver.unloaded == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept.append(load(b"third", GPU))
    assert driver.unloaded == [0]


@pytest.mark.parametrize("context", [0, 5])
def test_a_thread_that_is_new_to_a_gpu_does_not_wait_for_it(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from a2a.nvlink import driver as module

    asked: list[torch.device] = []

    def refuse(device: Any = None) -> None:
        raise AssertionError("waits for kernels that may wait for this thread")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: asked.append(device))
    )
    monkeypatch.setattr(module, "cu", SimpleNamespace(cuCtxGetCurrent=lambda: (0, context)))
    with module.on_device(GPU):
        assert asked == ([] if context else [GPU])


def test_a_shared_function_has_room_for_the_widest_of_its_users(driver: Driver) -> None:
    from a2a.nvlink.launch import load

    users = [
        load(b"code", GPU).kernel(name, params.QuantizeParams, shared_bytes=shared)
        for name, shared in (("f", 0), ("f", 60_000), ("f", 50_000), ("g", 50_000), ("f", 70_000))
    ]
    f, g = number_of(0, "f"), number_of(0, "g")
    assert driver.limits == [(f, 60_000), (g, 50_000), (f, 70_000)] and len(users) == 5
