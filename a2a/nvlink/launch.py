"""nvlink/launch: one kernel launch: its parameters by value, its stream, its launch attributes.

Owns loaded kernels and the driver's launch call. Refuses to know what the parameters mean.

Loading and unloading code may wait for all that runs on the GPU. Where several ranks of a process share one, a rank's
kernel there may be waiting for a rank whose host thread is the one that loads. So code is loaded once for all of them,
and unloaded not when the collector finds it but at the next load, which whoever shares a GPU keeps out of rounds.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from cuda.bindings import driver as cu

from a2a.nvlink.driver import checked, on_device, ordinal

_LAUNCH: Final = b"cuLaunchKernelEx"
_LAUNCH_VERSION: Final = 11080
"""The first CUDA that has it."""
_LAUNCH_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
"""Lets other threads run meanwhile: a launch that finds a queue full waits for what one of them may have to end."""


class Library:
    """Machine code loaded on one device; kernels keep it loaded.

    Args:
        cubin: for the device's architecture.
        device: whose context runs the kernels.
    """

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self.device = device
        self._cubin = cubin
        self._shared_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        with on_device(device):
            _unload_what_is_left()
            self._library = checked("cuLibraryLoadData", cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))

    def kernel(self, name: str, parameters: type[ctypes.Structure], *, shared_bytes: int = 0) -> Kernel:
        """The kernel of that unmangled name, which takes one `parameters` by value."""
        return Kernel(self, name, parameters, shared_bytes)

    def allow_shared_bytes(self, name: str, function: Any, shared_bytes: int) -> None:
        """Let launches of a kernel have so much dynamic shared memory, or more where another user needs more."""
        key = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._lock:
            # The limit belongs to the loaded function, which exchanges of several widths may share.
            if shared_bytes > self._shared_bytes.get(name, 0):
                checked("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, key, shared_bytes))
                self._shared_bytes[name] = shared_bytes

    def __del__(self) -> None:
        library = getattr(self, "_library", None)
        if library is not None and _LEFT is not None:
            # The collector may come in the middle of a round, or of a capture, which unloading would void.
            _LEFT.append(library)


_LOADED: Final[weakref.WeakValueDictionary[tuple[int, bytes], Library]] = weakref.WeakValueDictionary()
_LEFT: Final[list[Any]] = []
"""Handles of code that nobody uses any more."""
_LOADING: Final = threading.Lock()


def load(cubin: bytes, device: torch.device) -> Library:
    """Machine code on a device, loaded once for all that use it at the same time in this process.

    Args:
        cubin, device: of `Library`.

    May wait for the GPU, unless the code is there already.
    """
    with _LOADING:
        key = (ordinal(device), cubin)
        library = _LOADED.get(key)
        if library is None:
            library = _LOADED[key] = Library(cubin, device)
        return library


def _unload_what_is_left() -> None:
    if torch.cuda.is_current_stream_capturing():
        return
    while _LEFT:
        cu.cuLibraryUnload(_LEFT.pop())


class Kernel:
    """A kernel with room for its parameters, which are copied at each launch.

    Not safe for use from several threads at once, as one set of parameters is reused.

    Args:
        library: holds it.
        name: unmangled.
        parameters: the one argument, passed by value.
        shared_bytes: largest dynamic shared memory of a launch.

    Attributes:
        parameters: filled in by the caller before `launch`.
        prepared: the caller's note of what the parameters and the shape are for.
        max_threads: of a block, as the kernel was compiled.
    """

    def __init__(self, library: Library, name: str, parameters: type[ctypes.Structure], shared_bytes: int) -> None:
        self.name = name
        self.parameters: Any = parameters()
        self.prepared: object = None
        self._library = library
        self._device_index = library.device.index
        with on_device(library.device):
            kernel = checked(f"cuLibraryGetKernel({name})", cu.cuLibraryGetKernel(library._library, name.encode()))
            self._function = checked("cuKernelGetFunction", cu.cuKernelGetFunction(kernel))
            keys = cu.CUfunction_attribute
            if shared_bytes:
                # 48 KiB, a kernel's static memory included, is all that a launch gets without asking.
                library.allow_shared_bytes(name, self._function, shared_bytes)
            self.max_threads = self._attribute(keys.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.parameters))
        self._config = cu.CUlaunchConfig()
        self._config.gridDimY = self._config.gridDimZ = 1
        self._config.blockDimY = self._config.blockDimZ = 1
        early = cu.CUlaunchAttribute()
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        # Once: the bindings free a list that makes way for an empty one, and once more with the next.
        self._config.attrs = [early]
        self._config.numAttrs = 0
        self._stream = 0
        self._pdl = False
        self._enqueue = functools.partial(
            _launcher(),
            ctypes.c_void_p(self._config.getPtr()),
            ctypes.c_void_p(int(self._function)),
            ctypes.c_void_p(ctypes.addressof(self._pointers)),
            None,
        )

    def _attribute(self, key: Any) -> int:
        return int(checked("cuFuncGetAttribute", cu.cuFuncGetAttribute(key, self._function)))

    def blocks_per_sm(self, num_threads: int, shared_bytes: int = 0) -> int:
        """Blocks of that size that one multiprocessor holds at a time."""
        with on_device(self._library.device):
            return int(
                checked(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, num_threads, shared_bytes),
                )
            )

    def shape(self, grid: tuple[int, int], num_threads: int, shared_bytes: int) -> None:
        """Of the launches that follow: blocks in x and y, threads and dynamic shared memory of a block."""
        config = self._config
        config.gridDimX, config.gridDimY = grid
        config.blockDimX = num_threads
        config.sharedMemBytes = shared_bytes

    def launch(self, stream: int, *, pdl: bool = False) -> None:
        """Enqueue one launch with the present parameters and shape; no host synchronisation, nothing is allocated.

        Args:
            stream: handle of a stream of the kernel's device.
            pdl: the kernel may start before its predecessor on the stream has ended (programmatic stream
                serialisation); it must wait for it itself.
        """
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        if pdl != self._pdl:
            self._config.numAttrs = int(pdl)
            self._pdl = pdl
        if torch._C._cuda_getDevice() == self._device_index:
            status = self._enqueue()
        else:
            with on_device(self._library.device):
                status = self._enqueue()
        if status:
            checked(self.name, (_named(status),))


def _launcher() -> Callable[..., int]:
    """The driver's own launch function: the bindings' converts its arguments and result anew for each launch."""
    address, _ = checked("cuGetProcAddress(cuLaunchKernelEx)", cu.cuGetProcAddress(_LAUNCH, _LAUNCH_VERSION, 0))
    return _LAUNCH_TYPE(address)


def _named(status: int) -> Any:
    """The status with its name; a newer driver's may have none in these bindings."""
    try:
        return cu.CUresult(status)
    except ValueError:
        return status
