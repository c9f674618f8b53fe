"""nvlink/memory: symmetric memory: one range of addresses in which every rank's physical memory is mapped.

Owns allocation through the driver's virtual memory calls, the exchange of handles, the proof that every pair of ranks
can reach each other, and the life of the mapping. Refuses to know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import secrets
from collections.abc import Sequence
from typing import Any, Final

import torch
from cuda.bindings import driver as cu
from torch import Tensor

from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.errors import Unsupported
from a2a.nvlink.driver import attribute, checked, device_uuid, on_device, ordinal

_POSIX: Final = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC: Final = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_FABRIC_HANDLE_BYTES: Final = 64


class SymmetricMemory:
    """The workspaces of all ranks side by side: row `r` of `tensor` is rank `r`'s memory, on rank `r`'s GPU.

    Construction is collective. When it returns the memory is zero, mapped by all and proved: every rank has written to
    and read from every other. Addresses stay the same for the life of the object; `tensor` and every view of it keep
    the mapping alive, whatever happens to this object. The current device and its stream are left as they were.

    Args:
        num_bytes: of one rank's row, at least; equal on all ranks.
        device: this rank's GPU. Several ranks may share one.
        comm: the group.
        mesh: unix streams of the same group, over which descriptors travel.
        timeout_s: budget of the exchange of descriptors.

    Attributes:
        tensor: uint8 `[ep, stride]`, zero at first.
        stride_bytes: bytes from one rank's row to the next, a multiple of the allocation granularity.
        address: of row 0.
        handle_type: "fabric" or "posix", what the memory was shared with.
        device_uuids: identity of every rank's GPU.

    Raises:
        Unsupported: on every rank, with every reason of every rank: no memory, a handle that cannot be imported, a
            pair of ranks whose writes do not arrive.
    """

    def __init__(self, num_bytes: int, device: torch.device, comm: Comm, mesh: Mesh, *, timeout_s: float) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.device = device
        self.device_uuids: tuple[str, ...] = tuple(comm.allgather(device_uuid(device)))
        with on_device(device):
            self.handle_type = "fabric" if _all_share_fabric(device, comm) else "posix"
            kind = _FABRIC if self.handle_type == "fabric" else _POSIX
            self.stride_bytes = 0
            reason = None
            try:
                granularity = _granularity(device, kind)
                self.stride_bytes = -(-num_bytes // granularity) * granularity
            except Unsupported as error:
                reason = error.reasons[0]
            _agree(comm, reason)
            mapping = _Mapping(device, self.stride_bytes, self.size)
            self._obtain(mapping, comm, mesh, timeout_s)
            _agree(comm, _reason_of(mapping.map))
            self.address = mapping.address
            self.tensor = _tensor(mapping)
            self._mapping = mapping
            self._zero_and_prove(comm)

    def release(self) -> None:
        """Unmap all ranks' memory and give this rank's part of it back; the addresses stay reserved. Idempotent.

        The memory is free once every rank has done so. The caller sees to it that no work uses it.
        """
        with on_device(self.device):
            self._mapping.unmap()

    def restore(self, comm: Comm, mesh: Mesh, *, timeout_s: float) -> None:
        """New memory, zero and proved, at the same addresses on every rank. Collective, after `release` on every rank.

        Raises:
            Unsupported: as the constructor; nothing is mapped then.
        """
        with on_device(self.device):
            try:
                self._obtain(self._mapping, comm, mesh, timeout_s)
                _agree(comm, _reason_of(self._mapping.map))
                self._zero_and_prove(comm)
            except BaseException:
                self._mapping.unmap()
                raise

    def _obtain(self, mapping: _Mapping, comm: Comm, mesh: Mesh, timeout_s: float) -> None:
        """Create this rank's memory and import everyone else's into the mapping's handles. Collective."""
        kind = _FABRIC if self.handle_type == "fabric" else _POSIX
        exported: Any = None
        reason = None
        try:
            own = mapping.handles[self.rank] = _create(self.device, kind, self.stride_bytes)
            exported = checked("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(own, kind, 0))
        except Unsupported as error:
            reason = error.reasons[0]
        with contextlib.ExitStack() as opened:
            if kind == _POSIX and exported is not None:
                opened.callback(os.close, exported)
            _agree(comm, reason)
            if kind == _FABRIC:
                self._import_fabric(mapping, bytes(exported.data), comm)
            else:
                self._import_posix(mapping, exported, comm, mesh, timeout_s)

    def _import_fabric(self, mapping: _Mapping, exported: bytes, comm: Comm) -> None:
        reasons = []
        for peer, data in enumerate(comm.allgather(exported)):
            if peer != self.rank:
                try:
                    mapping.handles[peer] = _import_fabric_handle(data)
                except Unsupported as error:
                    reasons.append(f"memory of rank {peer}: {error.reasons[0]}")
        _agree(comm, "; ".join(reasons) or None)

    def _import_posix(self, mapping: _Mapping, descriptor: int, comm: Comm, mesh: Mesh, timeout_s: float) -> None:
        received = mesh.exchange_descriptors([descriptor], timeout_s=timeout_s)
        reasons = []
        try:
            for peer, descriptors in sorted(received.items()):
                try:
                    if len(descriptors) != 1:
                        raise Unsupported(transport="nvlink", reasons=(f"{len(descriptors)} descriptors came",))
                    mapping.handles[peer] = checked(
                        "cuMemImportFromShareableHandle", cu.cuMemImportFromShareableHandle(descriptors[0], _POSIX)
                    )
                except Unsupported as error:
                    reasons.append(f"memory of rank {peer}: {error.reasons[0]}")
        finally:
            # The import holds its own reference; an open descriptor would only count against the process's limit.
            for descriptors in received.values():
                for other in descriptors:
                    os.close(other)
        _agree(comm, "; ".join(reasons) or None)

    def _zero_and_prove(self, comm: Comm) -> None:
        # On a stream of its own: the caller's may hold work that waits for another rank.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self.tensor[self.rank].zero_()
            stream.synchronize()
            words = self.tensor.view(torch.int64)[:, : self.size]
            nonces: list[int] = comm.allgather(secrets.randbits(62))
            # Zeroed everywhere once the nonces are known, hence every word may be written.
            for peer in range(self.size):
                words[peer, self.rank] = nonces[self.rank] ^ peer
            stream.synchronize()
            comm.barrier()
            came = words[self.rank].tolist()
            # One by one: a copy of a column would leave a block in torch's cache for this stream.
            seen = [int(words[peer, self.rank]) for peer in range(self.size)]
            reasons = [
                f"what rank {peer} wrote to the memory of rank {self.rank} is not there"
                for peer in range(self.size)
                if came[peer] != nonces[peer] ^ self.rank
            ] + [
                f"what rank {self.rank} reads from the memory of rank {peer} is not what it wrote there"
                for peer in range(self.size)
                if seen[peer] != nonces[self.rank] ^ peer
            ]
            _agree(comm, "; ".join(reasons) or None)
            words[self.rank].zero_()
            stream.synchronize()
            comm.barrier()


class _Mapping:
    """Addresses and handles of one symmetric memory; freed when nothing refers to it any more."""

    def __init__(self, device: torch.device, stride_bytes: int, size: int) -> None:
        self.device = device
        self.stride_bytes = stride_bytes
        self.num_bytes = stride_bytes * size
        self.shape = (size, stride_bytes)
        self.handles: list[Any] = [None] * size
        self.address = 0
        self._mapped: list[int] = []

    def map(self) -> None:
        """Map every handle at its place, readable and writable from this rank's GPU."""
        alignment = 0
        if not self.address:
            reserved = cu.cuMemAddressReserve(self.num_bytes, alignment, 0, 0)
            self.address = int(checked(f"cuMemAddressReserve({self.num_bytes} bytes)", reserved))
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal(self.device)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for rank, handle in enumerate(self.handles):
            place = self.address + rank * self.stride_bytes
            checked(f"cuMemMap(memory of rank {rank})", cu.cuMemMap(place, self.stride_bytes, 0, handle, 0))
            self._mapped.append(place)
            checked(f"cuMemSetAccess(memory of rank {rank})", cu.cuMemSetAccess(place, self.stride_bytes, [access], 1))

    def unmap(self) -> None:
        """Give up all memory, keep the addresses. Nothing uses them any more, says the caller."""
        while self._mapped:
            checked("cuMemUnmap", cu.cuMemUnmap(self._mapped[-1], self.stride_bytes))
            self._mapped.pop()
        for rank, handle in enumerate(self.handles):
            if handle is not None:
                self.handles[rank] = None
                checked("cuMemRelease", cu.cuMemRelease(handle))

    def __del__(self) -> None:
        if not self.address and not any(handle is not None for handle in self.handles):
            return
        try:
            with on_device(self.device):
                # Unmapping does not wait for kernels that still use the addresses. Where waiting is refused (the
                # context is broken) or would void a capture into which the collector has come, the memory stays until
                # the process ends.
                if torch.cuda.is_current_stream_capturing() or int(cu.cuCtxSynchronize()[0]) != 0:
                    return
                for place in self._mapped:
                    cu.cuMemUnmap(place, self.stride_bytes)
                for handle in self.handles:
                    if handle is not None:
                        cu.cuMemRelease(handle)
                if self.address:
                    cu.cuMemAddressFree(self.address, self.num_bytes)
        except (RuntimeError, AttributeError, TypeError):
            # The interpreter or the driver is shutting down, which frees all of it.
            return


def handle_reasons(device: torch.device) -> dict[str, str | None]:
    """Why memory of a GPU cannot be shared by each type of handle; None where it was created and exported just now."""
    found: dict[str, str | None] = {}
    for name, kind in (("posix", _POSIX), ("fabric", _FABRIC)):
        handle: Any = None
        try:
            with on_device(device):
                handle = _create(device, kind, _granularity(device, kind))
                exported = checked("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(handle, kind, 0))
            if kind == _POSIX:
                os.close(int(exported))
            found[name] = None
        except Unsupported as error:
            found[name] = error.reasons[0]
        finally:
            if handle is not None:
                cu.cuMemRelease(handle)
    return found


def _reason_of(action: Any) -> str | None:
    try:
        action()
    except Unsupported as error:
        return error.reasons[0]
    return None


def _agree(comm: Comm, reason: str | None) -> None:
    """Go on if no rank has a reason against it; otherwise raise all reasons on all ranks."""
    reasons: Sequence[str | None] = comm.allgather(reason)
    told = tuple(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None)
    if told:
        raise Unsupported(transport="nvlink", reasons=told)


def _properties(device: torch.device, kind: Any) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal(device)
    properties.requestedHandleTypes = kind
    return properties


def _granularity(device: torch.device, kind: Any) -> int:
    flag = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(
        checked("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(_properties(device, kind), flag))
    )


def _create(device: torch.device, kind: Any, num_bytes: int) -> Any:
    return checked(f"cuMemCreate({num_bytes} bytes)", cu.cuMemCreate(num_bytes, _properties(device, kind), 0))


def _import_fabric_handle(data: bytes) -> Any:
    raw = ctypes.create_string_buffer(data, _FABRIC_HANDLE_BYTES)
    return checked("cuMemImportFromShareableHandle", cu.cuMemImportFromShareableHandle(ctypes.addressof(raw), _FABRIC))


def _all_share_fabric(device: torch.device, comm: Comm) -> bool:
    """Whether every rank can make a fabric handle and import everyone's. Found by doing: the attribute alone lies."""
    handle = None
    exported: bytes | None = None
    imported: list[Any] = []
    try:
        try:
            if attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED"):
                handle = _create(device, _FABRIC, _granularity(device, _FABRIC))
                made = checked("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(handle, _FABRIC, 0))
                exported = bytes(made.data)
        except Unsupported:
            exported = None
        offers: list[bytes | None] = comm.allgather(exported)
        able = all(offer is not None for offer in offers)
        if able:
            try:
                imported = [
                    _import_fabric_handle(offer)
                    for rank, offer in enumerate(offers)
                    if offer is not None and rank != comm.Get_rank()
                ]
            except Unsupported:
                able = False
        return all(comm.allgather(able))
    finally:
        for other in imported:
            cu.cuMemRelease(other)
        if handle is not None:
            cu.cuMemRelease(handle)


# torch finds the device of a bare pointer by asking the driver where its memory lies, and row 0 lies on rank 0's GPU.
# A DLPack capsule names the device instead. Layout: https://dmlc.github.io/dlpack/latest/c_api.html
class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_DL_CPU: Final = 1
_DL_CUDA: Final = 2
_DL_UINT: Final = 1


def _forget(address: int) -> None:
    managed = _DLManagedTensor.from_address(address)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(ctypes.cast(managed.manager_ctx, ctypes.py_object).value))


_DELETER: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


def _tensor(mapping: Any) -> Tensor:
    """uint8 tensor of `mapping.shape` at `mapping.address` on `mapping.device`, which keeps `mapping` alive."""
    shape = (ctypes.c_int64 * 2)(*mapping.shape)
    managed = _DLManagedTensor()
    managed.dl_tensor.data = mapping.address
    on_gpu = mapping.device.type == "cuda"
    managed.dl_tensor.device_type = _DL_CUDA if on_gpu else _DL_CPU
    managed.dl_tensor.device_id = ordinal(mapping.device) if on_gpu else 0
    managed.dl_tensor.ndim = 2
    managed.dl_tensor.dtype_code, managed.dl_tensor.dtype_bits, managed.dl_tensor.dtype_lanes = _DL_UINT, 8, 1
    managed.dl_tensor.shape = shape
    # One reference, given back by the deleter, holds all that the tensor needs.
    held = (mapping, shape, managed)
    managed.manager_ctx = id(held)
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(ctypes.addressof(managed), b"dltensor", None)
    tensor: Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return tensor


@dataclasses.dataclass(frozen=True)
class _Place:
    """Memory that somebody else owns."""

    address: int
    shape: tuple[int, int]
    device: torch.device


def tensor_at(address: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """uint8 tensor of `shape` at an address, which does not keep the memory alive."""
    return _tensor(_Place(address, shape, device))
