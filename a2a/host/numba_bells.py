"""host/numba_bells: doorbells in shared memory: stored where the receiver looks, and a word on which it sleeps.

Owns the places of the bells and the order in which they are stored, looked at and slept on. Refuses to know what is
said. Imported only where numba is installed.

A bell is a ticket in the receiver's workspace, one place for each (phase, parity, source rank), beside what is said.
Of the ranks that ring at a sleeper only the last one wakes it, and wakes all whose last it is by one call: a call for
each would let the first one woken take the core before the others are. So a round has three wake-ups a rank, however
many peers.

    ring   words, then store_release(ticket)     pairs with the waiter's load_acquire(ticket): rows and words are there
           fence                                 pairs with the waiter's: a waiter that missed this ticket, and so will
           who sleeps and has all tickets?       sleep, is seen sleeping here; and of two that ring at once, one sees
           take their flags                      both tickets
           advance the gate; wake                pairs with the waiter's load of the gate: one that missed the ticket
                                                 has seen the gate as it was before, and does not sleep on it now
    wait   all tickets there?
           look at the gate
           set the flag; fence; all there?       as above
           sleep while the gate is as seen

Who dies between ticket and wake leaves a sleeper behind; so do ranks that disagree on who takes part. Therefore nobody
sleeps for longer than `GLANCE_S` without a look at the tickets and at the streams, which tell of errors and ends.

A rank that declines hears nobody, so it may run ahead by any number of signals and takes no place: it tells its peers
through the streams, which queue, and so it rings its next bell, until it has heard the others again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray
from torch import Tensor

from a2a.comm.mesh import Mesh
from a2a.host.bells import MAX_WORDS, PARITIES, PHASES, Active, Bells, Said, Signal, StreamBells
from a2a.host.numba_atomics import (
    advance_word,
    fence,
    load_acquire,
    load_flag,
    load_word,
    pointer,
    sleep_while,
    store_flag,
    store_release,
    swap_flag,
    wake_all,
)
from a2a.layout import WorkspaceLayout

GLANCE_S: Final = 0.02

_WORDS_BYTES: Final = 8 * MAX_WORDS
_NOBODY: Final = -1
_MISSING: Final = 0
_AGREED: Final = 1


@njit(cache=True, nogil=True)
def _all_rung(tickets_at: int, peers: Any, except_peer: int, ticket: int) -> bool:
    for index in range(peers.shape[0]):
        peer = peers[index]
        if peer != except_peer and load_acquire(tickets_at + 8 * peer) != ticket:
            return False
    return True


@njit(cache=True, nogil=True)
def _ring(
    tickets_at: int,
    words_at: int,
    sleeper_at: int,
    gate_at: int,
    stride: int,
    rank: int,
    peers_at: int,
    num_peers: int,
    said_at: int,
    num_words: int,
    ticket: int,
) -> None:
    """Ring at all peers; the first four addresses are those in rank 0's workspace."""
    peers = carray(pointer(peers_at), num_peers, np.int64)
    said = carray(pointer(said_at), num_words, np.int64)
    for index in range(num_peers):
        there = peers[index] * stride
        words = carray(pointer(words_at + there + rank * _WORDS_BYTES), num_words, np.int64)
        for word in range(num_words):
            words[word] = said[word]
        store_release(tickets_at + there + 8 * rank, ticket)
    fence()
    anyone = False
    for index in range(num_peers):
        peer = peers[index]
        sleeper = sleeper_at + peer * stride
        if load_flag(sleeper) != 0 and _all_rung(tickets_at + peer * stride, peers, peer, ticket):
            anyone |= swap_flag(sleeper, 0) != 0
    if anyone:
        advance_word(gate_at)
        wake_all(gate_at)


@njit(cache=True, nogil=True)
def _wait(
    tickets_at: int,
    words_at: int,
    sleeper_at: int,
    gate_at: int,
    peers_at: int,
    num_peers: int,
    said_at: int,
    num_words: int,
    ticket: int,
    timespec_at: int,
) -> int:
    """Sleep once, for the time at `timespec_at` at most, unless all have rung.

    The addresses are this rank's own, but for the gate.

    Returns:
        0 while a bell is missing, 1 if all said the same as this rank, 2 if not.
    """
    peers = carray(pointer(peers_at), num_peers, np.int64)
    if not _all_rung(tickets_at, peers, _NOBODY, ticket):
        gate = load_word(gate_at)
        store_flag(sleeper_at, 1)
        fence()
        if not _all_rung(tickets_at, peers, _NOBODY, ticket):
            sleep_while(gate_at, gate, timespec_at)
        store_flag(sleeper_at, 0)
        if not _all_rung(tickets_at, peers, _NOBODY, ticket):
            return 0
    said = carray(pointer(said_at), num_words, np.int64)
    for index in range(num_peers):
        words = carray(pointer(words_at + peers[index] * _WORDS_BYTES), num_words, np.int64)
        for word in range(num_words):
            if words[word] != said[word]:
                return 2
    return 1


class _Place(NamedTuple):
    """Where the bells of one (context, phase, parity) lie: addresses in rank 0's workspace and in this rank's.

    Each of tickets, words and flag, and of the gate, which is rank 0's in both.
    """

    there: tuple[int, int, int, int]
    here: tuple[int, int, int, int]
    tickets: NDArray[np.int64]
    words: NDArray[np.int64]


class SharedBells(Bells):
    """See the module. Building one compiles the code, or loads it, so that no round has to.

    Args:
        workspace: uint8 `[ep, bytes]`, all ranks' workspaces.
        layout: with the regions of `control_regions`.
        mesh: carries what cannot be told in a place, and tells of errors and ends.
    """

    def __init__(self, workspace: Tensor, layout: WorkspaceLayout, mesh: Mesh) -> None:
        self._mesh = mesh
        self._streams = StreamBells(mesh)
        self._rank = mesh.rank
        self._stride = workspace.stride(0)
        self._places: dict[tuple[int, int, int], _Place] = {}
        for context in range(layout.config.num_contexts):
            self._add_places(workspace, layout, context)
        # (context, phase) whose last signal this rank has declined, so that it knows nothing of its peers' progress.
        self._unheard: set[tuple[int, int]] = set()
        self._glance = _timespec(GLANCE_S)
        self._glance_at = self._glance.data_ptr()
        nobody, nothing = Active([self._rank], self._rank, workspace.shape[0]), Said([])
        self.ring(Signal(0, 0, 0, 0), nothing, nobody, 0.0)
        self.wait(Signal(0, 0, 0, 0), nothing, nobody, GLANCE_S)

    def ring(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> None:
        phase, context, round, attempt = signal
        if self._unheard and (context, phase) in self._unheard:
            self._streams.ring(signal, said, active, timeout_s)
            return
        _ring(
            *self._places[context, phase, (round + attempt) & 1].there,
            self._stride,
            self._rank,
            active.peers_at,
            len(active.peers),
            said.words_at,
            said.num_words,
            self._ticket(round, attempt),
        )

    def wait(self, signal: Signal, said: Said, active: Active, timeout_s: float) -> Mapping[int, bytes]:
        phase, context, round, attempt = signal
        place = self._places[context, phase, (round + attempt) & 1]
        ticket = self._ticket(round, attempt)
        asked = (*place.here, active.peers_at, len(active.peers), said.words_at, said.num_words, ticket)
        # The common case needs no clock: one sleep that is shorter than the deadline.
        found = _wait(*asked, self._glance_at) if timeout_s >= GLANCE_S else _MISSING
        heard = {} if found == _AGREED else self._hear(signal, said, active, place, asked, found, timeout_s)
        if self._unheard:
            self._unheard.discard((context, phase))
        return heard

    def decline(self, signal: Signal, facts: Mapping[str, Any]) -> None:
        self._unheard.add((signal.context, signal.phase))
        self._streams.decline(signal, facts)

    def forget(self) -> None:
        self._unheard.clear()
        # Tickets count resets up to a bound: none may stay until the same number comes again.
        for place in self._places.values():
            place.tickets.fill(0)

    def close(self) -> None:
        self._places.clear()

    def _hear(
        self,
        signal: Signal,
        said: Said,
        active: Active,
        place: _Place,
        asked: tuple[int, ...],
        found: int,
        timeout_s: float,
    ) -> Mapping[int, bytes]:
        """The rest of a wait in which a bell is missing, has come through a stream, or says something else."""
        phase, context, round, attempt = signal
        deadline = time.monotonic() + timeout_s
        streamed: list[int] = []
        while found == _MISSING:
            # First the streams, then the tickets: what a peer rang before its end is there when its end is seen.
            self._mesh.pump(0)
            tickets = place.tickets.tolist()
            arrived = self._mesh.arrived(PHASES[phase], context, round, attempt=attempt)
            streamed = [peer for peer in active.peers if peer in arrived]
            missing = [peer for peer in active.peers if tickets[peer] != asked[-1] and peer not in streamed]
            left = deadline - time.monotonic()
            if missing:
                self._mesh.expect(missing, PHASES[phase], round, left, timeout_s)
            elif streamed:
                # The tickets of the others once more, this time in order with what they announce.
                rest = [rank for rank in active.ranks if rank not in streamed]
                active = Active(rest, self._rank, len(tickets))
                asked = (*place.here, active.peers_at, len(active.peers), *asked[-3:])
            sleep = _timespec(max(min(left, GLANCE_S), 0.0))
            found = _wait(*asked, sleep.data_ptr())
        if found == _AGREED and not streamed:
            return {}
        heard = {peer: place.words[peer, : said.num_words].tobytes() for peer in active.peers}
        if streamed:
            heard |= self._mesh.wait(
                PHASES[phase], context, round, attempt=attempt, peers=streamed, timeout_s=timeout_s
            )
        return {} if all(body == said.body for body in heard.values()) else heard

    def _ticket(self, round: int, attempt: int) -> int:
        """Names a signal among those of its place: 15 bits of the epoch, 32 of the round, 16 of the attempt.

        Wrapping does no harm, since a place holds one of the last few signals.
        """
        return (self._mesh.epoch & 0x7FFF) << 48 | (round & 0xFFFFFFFF) << 16 | attempt & 0xFFFF

    def _add_places(self, workspace: Tensor, layout: WorkspaceLayout, context: int) -> None:
        def region(name: str) -> Tensor:
            found = layout.region(name, context)
            return workspace[:, found.offset_bytes : found.end_bytes]

        ep = workspace.shape[0]
        sleeper, gate = region("bell_sleeper"), region("bell_gate")
        shape = (ep, len(PHASES), PARITIES, ep)
        tickets = region("bell_tickets").view(torch.int64).view(shape)
        words = region("bell_words").view(torch.int64).view(*shape, MAX_WORDS)
        for phase in range(len(PHASES)):
            for parity in range(PARITIES):
                there, here = (
                    (
                        tickets[rank, phase, parity].data_ptr(),
                        words[rank, phase, parity].data_ptr(),
                        sleeper[rank].data_ptr(),
                        gate.data_ptr(),
                    )
                    for rank in (0, self._rank)
                )
                self._places[context, phase, parity] = _Place(
                    there,
                    here,
                    tickets[self._rank, phase, parity].numpy(),
                    words[self._rank, phase, parity].numpy(),
                )


def _timespec(seconds: float) -> Tensor:
    """Seconds and nanoseconds, as the kernel takes them on 64-bit machines."""
    whole = int(seconds)
    return torch.tensor([whole, int((seconds - whole) * 1e9)], dtype=torch.int64, device="cpu")
