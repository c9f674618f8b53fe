"""comm/protocol: what is asked of the object that says who the ranks are.

Owns the six verbs, in mpi4py's spelling, the checks on a caller's own object, and the group of one rank. Refuses to
know any library that carries them.
"""

from __future__ import annotations

import operator
import pickle
import time
from typing import Any, Protocol, runtime_checkable

from a2a.errors import ConfigError, PeerTimeout

PHASE = "startup"
"""Phase named by every error of a wait in this room; its round is 0."""

UNKNOWN_PEER = -1
"""`peer` of an error where a collective of a foreign library cannot tell which rank is absent."""

VERBS = ("Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split")


@runtime_checkable
class Comm(Protocol):
    """Who the ranks are, and small picklable objects between them at start-up.

    All verbs but `Get_rank` and `Get_size` are collective: every rank of the group calls the same verbs in the same
    order. The implementations of this package put a deadline on every wait (`PeerTimeout`, phase "startup", round 0)
    and raise `PeerLost` where a closed connection is seen.
    """

    def Get_rank(self) -> int:
        """This process's rank in the group, 0 .. size-1."""
        ...

    def Get_size(self) -> int:
        """Number of ranks in the group."""
        ...

    def allgather(self, obj: Any) -> list[Any]:
        """The objects of all ranks, in rank order, on every rank."""
        ...

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, which counts inside the group, on every rank; the others' `obj` is ignored."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        ...

    def Split(self, color: int, key: int = 0) -> Comm:
        """A new group of the ranks that gave this `color` (>= 0), ordered by (key, old rank); the old one stays."""
        ...


class SingleComm:
    """The group of one rank: nobody to wait for."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, obj: Any) -> list[Any]:
        return [carried(obj)]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        check_root(root, 1, 0)
        return carried(obj)

    def barrier(self) -> None:
        return None

    def Split(self, color: int, key: int = 0) -> Comm:
        check_color(color, 0)
        return SingleComm()


class CheckedComm:
    """A caller's own object with the six verbs, its answers checked. Its waits are its own: no deadline can be added.

    Raises:
        ConfigError: methods that are missing (all are listed), or an answer that cannot be.
    """

    def __init__(self, comm: Any) -> None:
        missing = [verb for verb in VERBS if not callable(getattr(comm, verb, None))]
        if missing:
            raise ConfigError(
                what="comm",
                got=f"{type(comm).__module__}.{type(comm).__qualname__} without {', '.join(missing)}",
                wanted="a torch ProcessGroup, an mpi4py communicator, an object with " + " ".join(VERBS) + ", or None",
            )
        self._comm = comm
        self._size = _index("Get_size()", comm.Get_size(), 1, None)
        self._rank = _index("Get_rank()", comm.Get_rank(), 0, self._size - 1)

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        gathered = self._comm.allgather(obj)
        try:
            objects = list(gathered)
        except TypeError:
            objects = []
        if len(objects) != self._size:
            raise ConfigError(
                what="comm.allgather()", got=gathered, wanted=f"a sequence of {self._size} objects", rank=self._rank
            )
        return objects

    def bcast(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self._size, self._rank)
        return self._comm.bcast(obj, root=root)

    def barrier(self) -> None:
        self._comm.barrier()

    def Split(self, color: int, key: int = 0) -> Comm:
        check_color(color, self._rank)
        part = self._comm.Split(color, key)
        if part is self._comm:
            raise ConfigError(what="comm.Split()", got="the same object", wanted="a new object", rank=self._rank)
        return CheckedComm(part)


def carried(obj: Any) -> Any:
    """`obj` as another rank would get it, so that a group of one refuses and copies what a larger one would."""
    return pickle.loads(pickle.dumps(obj))


def check_root(root: int, size: int, rank: int) -> None:
    """Raises ConfigError unless `root` is a rank of the group."""
    if not 0 <= root < size:
        raise ConfigError(what="bcast root", got=root, wanted=f"a rank inside the group, 0..{size - 1}", rank=rank)


def check_color(color: int, rank: int) -> None:
    """Raises ConfigError unless `color` names a group."""
    if color < 0:
        raise ConfigError(what="Split color", got=color, wanted="an integer >= 0", rank=rank)


class Deadline:
    """The end of a wait: sleeps between looks, ever longer, so that a waiting rank leaves the cores to the others."""

    _FIRST_SLEEP_S = 0.0002
    _LAST_SLEEP_S = 0.02

    def __init__(self, timeout_s: float, rank: int) -> None:
        self._rank = rank
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._sleep_s = self._FIRST_SLEEP_S

    def left_s(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self._start + self._timeout_s - time.monotonic()

    def pause(self) -> bool:
        """Sleeps once; False when the deadline has passed."""
        left = self.left_s()
        if left <= 0:
            return False
        time.sleep(min(self._sleep_s, left))
        self._sleep_s = min(self._sleep_s * 1.5, self._LAST_SLEEP_S)
        return True

    def expired(self, peer: int, change: str) -> PeerTimeout:
        """The error of this wait, to be raised by the caller."""
        return PeerTimeout(
            rank=self._rank,
            peer=peer,
            phase=PHASE,
            round=0,
            waited_s=time.monotonic() - self._start,
            change=change,
        )


def _index(what: str, value: Any, low: int, high: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        raise ConfigError(what=f"comm.{what}", got=value, wanted=f"an integer {bound}")
    return number
