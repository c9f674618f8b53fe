"""host/bells: doorbells: what ranks tell each other at the three signals of a round, and waiting to be told.

Owns the signals, what is said with them, and the choice of what carries them: shared memory where every rank has numba,
which makes the atomic instructions, else the mesh's streams. Refuses to know what a round does between two bells.
"""

from __future__ import annotations

import abc
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.config import MAX_EP_SIZE, MAX_PAYLOADS
from a2a.host.loops import have_numba
from a2a.layout import WorkspaceLayout

PHASES: Final = ("dispatch.enter", "dispatch.done", "combine.ready")
ENTER: Final = 0
DONE: Final = 1
READY: Final = 2

MASK_WORDS: Final = MAX_EP_SIZE // 64
MAX_WORDS: Final = 3 + MAX_PAYLOADS + MASK_WORDS
"""Most that is said with a bell: two counts, a width for each payload, a switch, a mask."""

DECLINED: Final = bytes(8)
"""What a rank that refused its own arguments says before the facts, in JSON; others start with a positive number."""


class Active:
    """The ranks that take part in a round.

    Attributes:
        ranks: ascending, this one among them.
        peers: the others.
        takes_part: uint8 `[ep]`, 1 for the ranks.
        mask: `MASK_WORDS` int64, bit `r` of the whole set for rank `r`.
        peers_at: address of the peers as int64, for compiled code.
    """

    def __init__(self, ranks: Sequence[int], rank: int, ep_size: int) -> None:
        self.ranks = tuple(ranks)
        self.takes_part = torch.zeros(ep_size, dtype=torch.uint8, device="cpu")
        self.takes_part[list(ranks)] = 1
        self.peers = tuple(each for each in ranks if each != rank)
        bits = sum(1 << each for each in ranks)
        self.mask = struct.unpack(f"<{MASK_WORDS}q", bits.to_bytes(8 * MASK_WORDS, "little"))
        self._table = torch.tensor(self.peers, dtype=torch.int64, device="cpu")
        self.peers_at = self._table.data_ptr()

    @staticmethod
    def ranks_of(mask: Sequence[int]) -> list[int]:
        """The ranks in a `mask`."""
        return [64 * index + bit for index, word in enumerate(mask) for bit in range(64) if word >> bit & 1]


class Said:
    """What is said with a bell: up to `MAX_WORDS` int64 of which the first is positive, equal on ranks that agree.

    Attributes:
        body: as bytes.
        num_words: 8 bytes each.
        words_at: address of the same for compiled code.
    """

    def __init__(self, words: Sequence[int]) -> None:
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.body = self._words.numpy().tobytes()
        self.num_words = len(words)
        self.words_at = self._words.data_ptr()


def words(body: bytes) -> tuple[int, ...]:
    """What was said, as numbers."""
    return struct.unpack(f"{len(body) // 8}q", body)


class Signal(NamedTuple):
    """Which bell, equal on all ranks.

    Attributes:
        phase: index into `PHASES`.
        context: of the round.
        round: from 1.
        attempt: number of the combine within the round, 0 for the bells of a dispatch.
    """

    phase: int
    context: int
    round: int
    attempt: int


class Bells(abc.ABC):
    """Bells between all ranks of a transport. What a rank did before it rang is seen by who has waited for the bell.

    A rank waits for every bell that it has rung, and rings every bell of its rounds or declines. Contexts are
    independent of each other and may be used by a thread each.
    """

    @abc.abstractmethod
    def ring(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> None:
        """Ring at every active peer; waits for nobody.

        Raises:
            PeerTimeout: a peer takes nothing in any more for `timeout_s`.
        """

    @abc.abstractmethod
    def wait(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> Mapping[int, bytes]:
        """Sleep until every active peer has rung or declined.

        Returns:
            What each of them said if anyone said something else than `said`, else nothing.

        Raises:
            PeerLost: a peer is gone and had not rung.
            PeerTimeout: a peer is silent for `timeout_s`.
            A2AError: the error that another rank has recorded.
            StateError: a peer has called reset().
        """

    @abc.abstractmethod
    def decline(self, signal: Signal, facts: Mapping[str, Any]) -> None:
        """Say, in place of a bell, that this rank refused its arguments with the error `facts`; it does not wait."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Before a reset: nothing that was rung so far will be waited for."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the memory."""


class StreamBells(Bells):
    """Bells as frames on the mesh, which keeps them in order and for as long as nobody asks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def ring(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> None:
        phase, context, round, attempt = signal
        self._mesh.signal(
            PHASES[phase], context, round, said.body, attempt=attempt, peers=active.peers, timeout_s=timeout_s
        )

    def wait(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> Mapping[int, bytes]:
        phase, context, round, attempt = signal
        heard = self._mesh.wait(PHASES[phase], context, round, attempt=attempt, peers=active.peers, timeout_s=timeout_s)
        return {} if all(body == said.body for body in heard.values()) else heard

    def decline(self, signal: Signal, facts: Mapping[str, Any]) -> None:
        phase, context, round, attempt = signal
        self._mesh.forget(PHASES[phase], context, round)
        self._mesh.signal(PHASES[phase], context, round, DECLINED + json.dumps(facts).encode(), attempt=attempt)

    def forget(self) -> None:
        """The mesh forgets by itself."""

    def close(self) -> None:
        """The mesh has an owner of its own."""


PARITIES: Final = 2
"""Places of a phase's bells in shared memory, taken in turn. Who rings has heard all peers' bells of the signal before,
which each of them rang when it was done with the one before that, whose place this bell takes."""


def control_regions(ep_size: int) -> list[tuple[str, int]]:
    """(name, bytes) of what a context's bells take in each workspace, on whatever they travel.

    bell_gate: int32 of rank 0's, the word on which all ranks sleep. bell_sleeper: int32, nonzero while the rank sleeps
    and nobody has begun to wake it. bell_tickets: int64 `[phase, parity, ep]`, which signal each
    rank rang last. bell_words: int64 `[phase, parity, ep, MAX_WORDS]`, what it said.
    """
    places = len(PHASES) * PARITIES * ep_size
    return [("bell_gate", 4), ("bell_sleeper", 4), ("bell_tickets", 8 * places), ("bell_words", 8 * MAX_WORDS * places)]


def connect(workspace: Tensor, layout: WorkspaceLayout, mesh: Mesh, comm: Comm) -> Bells:
    """The quickest bells that every rank has. Collective."""
    if all(comm.allgather(_have_atomics())):
        from a2a.host.numba_bells import SharedBells

        return SharedBells(workspace, layout, mesh)
    return StreamBells(mesh)


def _have_atomics() -> bool:
    if not have_numba():
        return False
    from a2a.host.numba_atomics import FUTEX_CALL

    return FUTEX_CALL is not None
