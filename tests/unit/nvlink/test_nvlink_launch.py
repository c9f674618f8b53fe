"""What the driver is handed at a launch, and what becomes of its refusal; the driver is a function of the test's."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.errors import Unsupported

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-core and NVRTC: install a2a[cu13]"
)
FUNCTION = 0x5050


class Told(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_uint32))


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding up to 8 bytes, 64 bytes of value."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_int32 * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


class Driver:
    """Writes down what a launch was told; `status` is what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from a2a.nvlink import launch

        self.launches: list[dict[str, Any]] = []
        self.status, self.current_device, self.entered = 0, 0, 0
        pointer = ctypes.c_void_p
        self._called = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch)
        address = ctypes.cast(self._called, pointer).value
        answers = {
            "cuLibraryLoadData": lambda *_: (0, 1),
            "cuLibraryUnload": lambda *_: (0,),
            "cuLibraryGetKernel": lambda *_: (0, 2),
            "cuKernelGetFunction": lambda *_: (0, FUNCTION),
            "cuFuncGetAttribute": lambda *_: (0, 256),
            "cuGetProcAddress": lambda *_: (0, address, 0),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(launch.cu, name, answer)
        monkeypatch.setattr(launch, "on_device", self._on_device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current_device, raising=False)
        library = launch.Library(b"", SimpleNamespace(index=0))  # type: ignore[arg-type]
        self.kernel = library.kernel("move", Told)
        self.entered = 0

    @contextlib.contextmanager
    def _on_device(self, device: Any) -> Any:
        self.entered += 1
        yield

    def _launch(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        told = Config.from_address(config)
        (place,) = (ctypes.c_void_p * 1).from_address(parameters)
        fields = Told.from_address(place)
        self.launches.append(
            {
                "grid": list(told.grid),
                "block": list(told.block),
                "shared_bytes": told.shared_bytes,
                "stream": told.stream or 0,
                "attributes": [
                    (each.id, each.value[0]) for each in (told.attributes[i] for i in range(told.num_attributes))
                ],
                "function": function,
                "extra": extra,
                "fields": (fields.first, fields.second),
            }
        )
        return self.status


def test_a_launch_tells_the_driver_what_holds_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    kernel = driver.kernel
    wanted = []
    for number, (stream, pdl) in enumerate([(0, False), (7, False), (7, True), (1 << 40, True), (0, False), (0, True)]):
        kernel.shape((3, 1 + number), 64, 16 * number)
        kernel.parameters.first, kernel.parameters.second = (1 << 50) + number, number
        kernel.launch(stream, pdl=pdl)
        wanted.append(
            {
                "grid": [3, 1 + number, 1],
                "block": [64, 1, 1],
                "shared_bytes": 16 * number,
                "stream": stream,
                "attributes": [(6, 1)] if pdl else [],
                "function": FUNCTION,
                "extra": None,
                "fields": ((1 << 50) + number, number),
            }
        )
    assert driver.launches == wanted and driver.entered == 0


def test_a_launch_makes_the_kernels_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.current_device = 1
    driver.kernel.launch(7)
    assert driver.entered == 1 and len(driver.launches) == 1


@pytest.mark.parametrize(("status", "said"), [(719, "CUDA_ERROR_LAUNCH_FAILED"), (123456, "123456")])
def test_a_refused_launch_says_which_and_why(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    for current in (0, 1):
        driver.status, driver.current_device = status, current
        with pytest.raises(Unsupported, match=f"move: {said}"):
            driver.kernel.launch(0)
        driver.status = 0
        driver.kernel.launch(0)
    assert len(driver.launches) == 4
