"""comm/process_group: the group of a torch ProcessGroup.

Owns object collectives over tensors of the group's own backend. Refuses to touch the default group, the registry of
groups or the current CUDA device.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from a2a.comm.protocol import UNKNOWN_PEER, Comm, Deadline, check_root
from a2a.comm.store import split
from a2a.errors import ConfigError, PeerLost

_ABSENT = (
    "a collective of the process group cannot tell which rank is absent: look for the rank that did not get here, or "
    "raise startup_timeout_s"
)


class GroupComm:
    """The ranks of `group`, registered with torch.distributed or not, of any backend; it stays the caller's.

    Ranks and roots count inside the group. Every wait has `timeout_s`.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._rank = group.rank()
        self._size = group.size()
        if not 0 <= self._rank < self._size:
            raise ConfigError(
                what="comm",
                got=f"a process group in which this process is rank {self._rank}",
                wanted="a process group this process belongs to",
            )
        self._device = _device(group)

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        mine = _bytes(obj)
        lengths = self._gather(torch.tensor([mine.numel()], dtype=torch.int64))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = self._gather(padded)
        return [_object(row[: int(length)]) for row, length in zip(rows, lengths, strict=True)]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self._size, self._rank)
        content = _bytes(obj) if self._rank == root else torch.empty(0, dtype=torch.uint8)
        length = self._broadcast(torch.tensor([content.numel()], dtype=torch.int64), root)
        if self._rank != root:
            content = torch.empty(int(length), dtype=torch.uint8)
        return _object(self._broadcast(content, root))

    def barrier(self) -> None:
        # Not the group's own barrier: over NCCL it picks a device by rank.
        self._gather(torch.zeros(1, dtype=torch.int64))

    def Split(self, color: int, key: int = 0) -> Comm:
        return split(self, color, key, timeout_s=self._timeout_s)

    def _gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        sent = row.to(self._device)
        rows = [torch.empty_like(sent) for _ in range(self._size)]
        self._finish(lambda: self._group.allgather([rows], [sent]))
        return [gathered.cpu() for gathered in rows]

    def _broadcast(self, row: torch.Tensor, root: int) -> torch.Tensor:
        shared = row.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._finish(lambda: self._group.broadcast([shared], options))
        return shared.cpu()

    def _finish(self, start: Any) -> None:
        deadline = Deadline(self._timeout_s, self._rank)
        peer = 1 - self._rank if self._size == 2 else UNKNOWN_PEER
        try:
            work = start()
            while not work.is_completed():
                if not deadline.pause():
                    raise deadline.expired(peer, _ABSENT)
            work.wait()
        except RuntimeError as error:
            # The backends say "connection closed" and their own, shorter timeouts with the same type.
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise deadline.expired(peer, _ABSENT) from error
            raise PeerLost(rank=self._rank, peer=peer, phase="startup", round=0) from error


def _device(group: dist.ProcessGroup) -> torch.device:
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    bound = group.bound_device_id
    if bound is not None:
        return torch.device(bound)
    kind = sorted(kinds)[0]
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _object(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
