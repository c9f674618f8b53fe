"""nvlink/driver: the CUDA driver's calls, checked.

Owns how a driver status becomes an error and which context is current meanwhile. Refuses to know what is called for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from cuda.bindings import driver as cu

from a2a.errors import Unsupported


def status_name(status: Any) -> str:
    """`CUDA_ERROR_...` of a `CUresult`."""
    return str(getattr(status, "name", status))


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """The values of a driver call's result.

    Raises:
        Unsupported: with `what` and the status, when the call failed.
    """
    status, *values = result
    if int(status) != 0:
        # Not by way of a variable: error, traceback and this frame would hold each other, and all callers' memory,
        # until the collector comes.
        raise Unsupported(transport="nvlink", reasons=(f"{what}: {status_name(status)}",))
    return values[0] if len(values) == 1 else tuple(values) if values else None


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` and its primary context current, and restore what was current before; waits for nothing."""
    with torch.cuda.device(device):
        if not int(checked("cuCtxGetCurrent", cu.cuCtxGetCurrent())):
            # torch makes the context current lazily; driver calls need it now. Asking a stream does so without waiting:
            # other ranks' kernels may wait on this GPU for a rank whose thread is new to it.
            torch.cuda.current_stream(device).query()
        yield


def device_uuid(device: torch.device) -> str:
    """Identity of a GPU, the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def arch_of(device: torch.device) -> str:
    """The architecture that kernels for a GPU are compiled for, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def attribute(device: torch.device, name: str) -> int:
    """A device attribute by its name without the CU_DEVICE_ATTRIBUTE_ prefix; 0 if this driver binding has none."""
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if key is None:
        return 0
    handle = checked("cuDeviceGet", cu.cuDeviceGet(ordinal(device)))
    return int(checked(f"cuDeviceGetAttribute({name})", cu.cuDeviceGetAttribute(key, handle)))


def ordinal(device: torch.device) -> int:
    """The driver's ordinal of a torch device: both count what CUDA_VISIBLE_DEVICES shows."""
    return torch.cuda.current_device() if device.index is None else device.index


def device_of_address(address: int) -> int:
    """Ordinal of the GPU on which the memory at an address lies, also memory mapped from another process.

    The calling thread has a context.

    Raises:
        Unsupported: the address is no GPU's.
    """
    key = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(checked("cuPointerGetAttribute(DEVICE_ORDINAL)", cu.cuPointerGetAttribute(key, address)))
