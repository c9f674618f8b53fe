"""nvlink/nvshmem: symmetric memory out of NVSHMEM's heap, mapped once more the way the kernels want it.

Owns the few calls of NVSHMEM's host library and how a buffer of its heap becomes rows in one range of addresses.
Refuses to use anything of NVSHMEM beside its memory: no collective, no signal, no multicast.

NVSHMEM maps every rank's heap, but in an order of each rank's own. The physical memory behind the buffer is the same
everywhere, so its handles are taken from NVSHMEM's mappings and mapped again side by side, rank by rank.

NVSHMEM belongs to the process: the first object that asks for it decides its ranks, nothing here ever ends it, and
since giving a buffer back takes all ranks at once, which a rank that closes cannot wait for, the heap keeps what an
object has used until the process ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
from cuda.bindings import driver as cu

from a2a import env
from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.errors import Unsupported
from a2a.nvlink.driver import checked, device_uuid, on_device, ordinal
from a2a.nvlink.memory import SymmetricMemory, _agree, _tensor

LIBRARY: Final = "libnvshmem_host.so.3"
SETTINGS: Final = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NCCL": "1"}
"""Set where they are not: multicast stays off, and what is not used is not started."""
_WITH_UNIQUE_ID: Final = 1 << 3
_INITIALIZED: Final = 2
_PIECE_BYTES: Final = 2 << 20


# Layouts as NVSHMEM 3 declares them (nvshmem_uniqueid.h, nvshmem_types.h); a version is 1 << 16 plus the size.
class _UniqueId(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("internal", ctypes.c_char * 124))


class _UniqueIdArgs(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.POINTER(_UniqueId)),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    )


class _InitArgs(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArgs), ("content", ctypes.c_char * 96))


class _InitAttributes(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("args", _InitArgs))


def library_reason() -> str | None:
    """Why NVSHMEM's host library cannot be loaded, or None."""
    try:
        _load()
    except OSError as error:
        return f"{LIBRARY} cannot be loaded ({error}): install nvidia-nvshmem-cu12 or nvidia-nvshmem-cu13"
    return None


def _load() -> Any:
    """The library, from its wheel or from where the loader finds it."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    places = [] if spec is None else [Path(place) / "lib" / LIBRARY for place in spec.submodule_search_locations or ()]
    library: Any = ctypes.CDLL(str(next((place for place in places if place.is_file()), LIBRARY)))
    for name in ("nvshmem_malloc", "nvshmem_ptr"):
        getattr(library, name).restype = ctypes.c_void_p
    library.nvshmem_malloc.argtypes = (ctypes.c_size_t,)
    library.nvshmem_ptr.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return library


class NvshmemMemory(SymmetricMemory):
    """As `SymmetricMemory`, from NVSHMEM's heap.

    Args:
        num_bytes, device, comm, mesh, timeout_s: as there.

    Attributes:
        handle_type: "nvshmem".

    Raises:
        Unsupported: on every rank: no library, NVSHMEM is up already for other ranks than these, its heap is full, a
            peer's heap is not mapped here, or its memory cannot be mapped again.
    """

    def __init__(self, num_bytes: int, device: torch.device, comm: Comm, mesh: Mesh, *, timeout_s: float) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.device = device
        self.handle_type = "nvshmem"
        self.device_uuids = tuple(comm.allgather(device_uuid(device)))
        with on_device(device):
            _agree(comm, library_reason())
            library = _load()
            places = _join(library, comm)
            wanted = -(-num_bytes // _PIECE_BYTES) * _PIECE_BYTES
            buffer = library.nvshmem_malloc(wanted)
            _agree(comm, None if buffer else f"nvshmem_malloc({wanted} bytes) failed: see NVSHMEM_MAX_MEMORY_PER_GPU")
            mapping, offset, reason = self._mapped_again(library, buffer, wanted, places)
            _agree(comm, reason)
            offsets: list[tuple[int, int]] = comm.allgather((offset, mapping.stride_bytes))
            differ = len(set(offsets)) > 1
            _agree(comm, f"the buffer lies at {offsets[self.rank]} of its piece of the heap" if differ else None)
            self.stride_bytes = mapping.stride_bytes
            self.address = mapping.address + offset
            self.tensor = _tensor(mapping)[:, offset : offset + wanted]
            self._zero_and_prove(comm)

    def release(self) -> None:
        """Refused: the heap is NVSHMEM's.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(transport="nvshmem", reasons=("memory of NVSHMEM's heap cannot be given back and restored",))

    def _mapped_again(
        self, library: Any, buffer: int, num_bytes: int, places: list[int]
    ) -> tuple[_Rows, int, str | None]:
        """Rows that hold every rank's buffer, where in a row it starts, and why this could not be done."""
        offset = 0
        mapping = _Rows(self.device)
        try:
            for rank, place in enumerate(places):
                there = library.nvshmem_ptr(buffer, place)
                if not there:
                    raise Unsupported(transport="nvshmem", reasons=(f"the heap of rank {rank} is not mapped here",))
                pieces, starts_at = _pieces(there, num_bytes)
                mapping.pieces.append(pieces)
                offset = starts_at if rank == self.rank else offset
            mapping.map()
        except Unsupported as error:
            return mapping, offset, error.reasons[0]
        return mapping, offset, None


class _Rows:
    """Pieces of memory of every rank, mapped side by side; unmapped when nothing refers to it any more.

    Attributes:
        pieces: by rank, handles of its physical memory in order, and their sizes; as much for each rank.
        address, stride_bytes, shape: of the rows, once mapped.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[list[tuple[Any, int]]] = []
        self.address = self.stride_bytes = 0
        self.shape = (0, 0)
        self._mapped: list[tuple[int, int]] = []

    def map(self) -> None:
        """Map every piece at its place, readable and writable from this rank's GPU."""
        lengths = {sum(size for _, size in pieces) for pieces in self.pieces}
        if len(lengths) != 1:
            reason = f"pieces of the heap differ in size: {sorted(lengths)}"
            raise Unsupported(transport="nvshmem", reasons=(reason,))
        self.stride_bytes = lengths.pop()
        self.shape = (len(self.pieces), self.stride_bytes)
        total = self.shape[0] * self.stride_bytes
        reserved = cu.cuMemAddressReserve(total, 0, 0, 0)
        self.address = int(checked(f"cuMemAddressReserve({total} bytes)", reserved))
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal(self.device)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        place = self.address
        for rank, pieces in enumerate(self.pieces):
            for handle, size in pieces:
                checked(f"cuMemMap(memory of rank {rank})", cu.cuMemMap(place, size, 0, handle, 0))
                self._mapped.append((place, size))
                checked(f"cuMemSetAccess(memory of rank {rank})", cu.cuMemSetAccess(place, size, [access], 1))
                place += size

    def __del__(self) -> None:
        if not any(self.pieces):
            return
        try:
            with on_device(self.device):
                # As for nvlink's own mapping: what kernels may still use, or a capture would be voided by, stays.
                if torch.cuda.is_current_stream_capturing() or int(cu.cuCtxSynchronize()[0]) != 0:
                    return
                for place, size in self._mapped:
                    cu.cuMemUnmap(place, size)
                for pieces in self.pieces:
                    for handle, _ in pieces:
                        cu.cuMemRelease(handle)
                if self.address:
                    cu.cuMemAddressFree(self.address, self.shape[0] * self.stride_bytes)
        except (RuntimeError, AttributeError, TypeError):
            # The interpreter or the driver is shutting down, which frees all of it.
            return


def _join(library: Any, comm: Comm) -> list[int]:
    """NVSHMEM's number of every rank, once NVSHMEM is up; collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    up = library.nvshmemx_init_status() >= _INITIALIZED
    if not any(comm.allgather(up)):
        env.default(SETTINGS)
        unique = _UniqueId(version=(1 << 16) + ctypes.sizeof(_UniqueId))
        status = library.nvshmemx_get_uniqueid(ctypes.byref(unique)) if rank == 0 else 0
        _agree(comm, f"nvshmemx_get_uniqueid: {status}" if status else None)
        unique = _UniqueId.from_buffer_copy(comm.bcast(bytes(unique)))
        attributes = _InitAttributes(version=(1 << 16) + ctypes.sizeof(_InitAttributes))
        attributes.args.version = (1 << 16) + ctypes.sizeof(_InitArgs)
        attributes.args.unique_id = _UniqueIdArgs(
            (1 << 16) + ctypes.sizeof(_UniqueIdArgs), ctypes.pointer(unique), rank, size
        )
        status = library.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, ctypes.byref(attributes))
        _agree(comm, f"nvshmemx_hostlib_init_attr: {status}" if status else None)
        up = True
    numbers: list[tuple[bool, int, int]] = comm.allgather(
        (up, library.nvshmem_my_pe() if up else -1, library.nvshmem_n_pes() if up else -1)
    )
    places = [place for _, place, _ in numbers]
    # Its heap grows by all of its ranks together.
    fits = all(each for each, _, _ in numbers) and {total for _, _, total in numbers} == {size}
    _agree(comm, None if fits and len(set(places)) == size else f"NVSHMEM is up for other ranks: {numbers[rank]}")
    return places


def _pieces(address: int, num_bytes: int) -> tuple[list[tuple[Any, int]], int]:
    """Handles and sizes of the physical memory behind a stretch of addresses, in whole pieces, and where it starts."""
    pieces: list[tuple[Any, int]] = []
    at, start = address, 0
    while at < address + num_bytes:
        base, size = checked("cuMemGetAddressRange", cu.cuMemGetAddressRange(at))
        if not pieces:
            start = address - int(base)
        handle = checked("cuMemRetainAllocationHandle", cu.cuMemRetainAllocationHandle(at))
        pieces.append((handle, int(size)))
        at = int(base) + int(size)
    return pieces, start
