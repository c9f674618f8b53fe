"""host/memory: the workspaces of all ranks as one contiguous mapping of anonymous memory files.

Owns allocation, mapping and how long a mapping lives. Refuses to know what the bytes mean.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

import torch
from torch import Tensor

from a2a.comm.mesh import Mesh
from a2a.errors import Unsupported
from a2a.layout import align

PAGE_BYTES: Final = mmap.PAGESIZE

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Of the kernel's interface; the mmap module does not name them all.
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def shared_workspaces(num_bytes: int, mesh: Mesh, *, timeout_s: float) -> Tensor:
    """Allocate this rank's workspace and map those of all ranks side by side. Collective.

    The memory is zero and takes pages only where it is touched. It has no name anywhere and ends with the last mapping,
    also after `kill -9`. The tensor and its views keep the mapping alive; nothing else does.

    Args:
        num_bytes: bytes of one workspace, equal on all ranks.
        mesh: carries the descriptors.
        timeout_s: budget for the peers' descriptors.

    Returns:
        uint8 `[ep, num_bytes]`; row `r` is rank `r`'s workspace.

    Raises:
        Unsupported: the kernel refuses the memory or the mapping.
        PeerTimeout, PeerLost: a peer does not send its descriptor.
    """
    stride = align(num_bytes, PAGE_BYTES)
    mine = _memory_file(stride)
    descriptors = {mesh.rank: mine}
    try:
        received = mesh.exchange_descriptors([mine], timeout_s=timeout_s)
        descriptors |= {peer: sent[0] for peer, sent in received.items()}
        total = stride * mesh.size
        # One reservation first: the ranks' memory then lies at fixed distances inside it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _map(None, total, _PROT_NONE, flags, -1)
        buffer = (ctypes.c_uint8 * total).from_address(base)
        # torch keeps `buffer` for as long as any view lives.
        weakref.finalize(buffer, _LIBC.munmap, base, total).atexit = False
        for rank, descriptor in descriptors.items():
            _map(
                base + rank * stride,
                stride,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptor,
            )
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(mesh.size, stride)[:, :num_bytes]


def drop_pages(workspaces: Tensor, rank: int) -> None:
    """Give the pages of one rank's workspace back to the kernel; it reads as zeros, at the same addresses, from now on.

    Args:
        workspaces: of `shared_workspaces`.
        rank: whose. The pages go for every process that maps them.

    Raises:
        Unsupported: the kernel refuses.
    """
    num_bytes = workspaces.stride(0)
    if _LIBC.madvise(workspaces[rank].data_ptr(), num_bytes, mmap.MADV_REMOVE):
        reason = os.strerror(ctypes.get_errno())
        raise Unsupported(transport="host", reasons=(f"giving back {num_bytes} bytes is refused: {reason}",))


def _memory_file(num_bytes: int) -> int:
    descriptor = -1
    try:
        descriptor = os.memfd_create("a2a", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, num_bytes)
        # A file that cannot shrink cannot take a page from under a peer that reads it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        # More bytes than an integer of the kernel's can hold have no error number.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Unsupported(
            transport="host", reasons=(f"a memory file of {num_bytes} bytes is refused: {reason}",)
        ) from None
    return descriptor


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _LIBC.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise Unsupported(transport="host", reasons=(f"a mapping of {num_bytes} bytes is refused: {reason}",))
    return mapped
