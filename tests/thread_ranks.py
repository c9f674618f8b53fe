"""Ranks as threads of one process, for tests that look at both ends of a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from a2a.comm import Comm

ENOUGH_S = 30.0
"""Reached only by a test that fails."""


class Group:
    """What the ranks of a group of threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=ENOUGH_S)
        self.slots: list[Any] = [None] * size


class ThreadComm:
    """One thread's rank. `on_gathered` sees every list that is gathered, before the caller does."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.on_gathered: Callable[[list[Any]], None] = lambda gathered: None

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.group.size

    def allgather(self, obj: Any) -> list[Any]:
        self.group.slots[self.rank] = obj
        self.group.barrier.wait()
        gathered = list(self.group.slots)
        self.on_gathered(gathered)
        self.group.barrier.wait()
        return gathered

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj)[root]

    def barrier(self) -> None:
        self.group.barrier.wait()

    def Split(self, color: int, key: int = 0) -> Comm:
        raise NotImplementedError


def in_threads(size: int, body: Callable[[ThreadComm], Any]) -> list[Any]:
    """What `body` returns on each rank; the first error of any. A rank that fails lets no other wait for long."""
    group = Group(size)

    def guarded(rank: int) -> Any:
        try:
            return body(ThreadComm(group, rank))
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [error for each in running if (error := each.exception()) is not None]
        # A broken barrier is what the others see of the rank that failed.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in running]
