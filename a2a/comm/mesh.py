"""comm/mesh: the local mesh (unix sockets: handle passing, doorbells, who has died).

Owns one stream between every two ranks of an object: how they find each other, the frames on it, descriptors, recorded
errors, departures. A signal is a frame: the kernel's socket lock orders every store before the send ahead of every
load after the receive, on any architecture. Refuses to know what a phase means.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, Final

from a2a.comm.protocol import Comm
from a2a.errors import A2AError, PeerLost, PeerTimeout, StateError, Unsupported, from_facts

_HEADER: Final = struct.Struct("<IBBHIQ")
"""body bytes, phase, context, attempt, epoch, round."""

_HELLO: Final = struct.Struct("<I16s")
_READ_BYTES: Final = 1 << 12
_MAX_DESCRIPTORS: Final = 16
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)

_ERROR: Final = 0
_GOODBYE: Final = 1
_RESET: Final = 2
_DESCRIPTORS: Final = 3
_FIRST_PHASE: Final = 4

_RETRY_S: Final = 0.005
_SHARED_GLANCE_S: Final = 0.001
_GLANCE_S: Final = 0.05
"""Longest sleep on one peer's stream before the others' are looked at for an announced error."""


class Mesh:
    """Streams between all ranks of a group.

    Signals are keyed by (phase, context, round, attempt); a rank may be ahead of another, early signals are kept. Safe
    to use from several threads.

    Args:
        comm: the group; used during construction alone.
        phases: names of the signals that will be exchanged, equal on all ranks.
        timeout_s: budget for finding all peers.
        family: "unix", "tcp", or None for unix where all ranks share a network namespace of one host, TCP elsewhere.

    Attributes:
        rank, size: within the group.
        peers: all other ranks, ascending.
        family: "unix" or "tcp"; descriptors need "unix".
        error: the error that this rank or a peer recorded since the last reset, or None.
        departed: peers that said goodbye.
        lost: peers whose connection closed, departed ones among them.
        epoch: number of resets so far, equal on all ranks between two resets.

    Raises:
        PeerTimeout: a rank did not connect in time.
        PeerLost: a rank went away meanwhile.
    """

    def __init__(self, comm: Comm, phases: Sequence[str], *, timeout_s: float, family: str | None = None) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.peers = tuple(rank for rank in range(self.size) if rank != self.rank)
        self.phases = tuple(phases)
        self.error: A2AError | None = None
        self.departed: set[int] = set()
        self.lost: set[int] = set()
        self._numbers = {name: _FIRST_PHASE + index for index, name in enumerate(self.phases)}
        self._names = {_RESET: "reset", _DESCRIPTORS: "startup"} | {n: name for name, n in self._numbers.items()}
        self.epoch = 0
        self._lock = threading.RLock()
        self._inbox: dict[tuple[int, int, int, int, int], dict[int, bytes]] = {}
        self._newest_reset: dict[int, int] = {}
        self._later_errors: dict[int, A2AError] = {}
        self._descriptors: dict[int, list[int]] = {rank: [] for rank in self.peers}
        self._partial: dict[int, bytes] = dict.fromkeys(self.peers, b"")
        self._unwritable: set[int] = set()
        # Until there are streams there is nothing to close.
        self._closed = True
        self.family, self._sockets = _connect(comm, time.monotonic() + timeout_s, timeout_s, family)
        self._ranks_by_fd = {sock.fileno(): rank for rank, sock in self._sockets.items()}
        self._epoll = select.epoll()
        self._closed = False
        for sock in self._sockets.values():
            sock.setblocking(False)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        # One poll set per peer: woken by that peer's frames and by anyone's end. Waiting for peers one after the other
        # wakes a rank about once per phase where one set for all would wake it for every frame.
        self._polls: dict[int, select.poll] = {}
        for peer in self.peers:
            self._polls[peer] = select.poll()
            for rank, sock in self._sockets.items():
                self._polls[peer].register(sock.fileno(), select.POLLIN if rank == peer else select.POLLRDHUP)

    def signal(
        self,
        phase: str,
        context: int,
        round: int,
        bodies: bytes | Mapping[int, bytes] = b"",
        *,
        attempt: int = 0,
        peers: Iterable[int] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Ring every peer's doorbell; returns without waiting for anyone to hear it.

        Args:
            phase, context, round, attempt: which signal.
            bodies: what it says, one for all or one per peer.
            peers: who hears it; None for all.
            timeout_s: budget for a peer that does not empty its queue.
        """
        key = (self._numbers[phase], context, attempt, self.epoch, round)
        if isinstance(bodies, bytes):
            frame = _HEADER.pack(len(bodies), *key) + bodies
            for peer in self.peers if peers is None else peers:
                self._send(peer, frame, key, timeout_s)
        else:
            for peer in self.peers if peers is None else peers:
                body = bodies[peer]
                self._send(peer, _HEADER.pack(len(body), *key) + body, key, timeout_s)

    def wait(
        self,
        phase: str,
        context: int,
        round: int,
        *,
        attempt: int = 0,
        peers: Iterable[int] | None = None,
        timeout_s: float,
    ) -> dict[int, bytes]:
        """Sleep until every peer has sent the signal; its bodies by peer.

        Everything a peer did before it signalled is visible afterwards.

        Raises:
            PeerLost: a peer is gone and its signal had not been sent.
            PeerTimeout: a peer is silent for `timeout_s`.
            A2AError: the error that another rank has recorded.
            StateError: a peer has called reset().
        """
        return self._wait((self._numbers[phase], context, attempt, self.epoch, round), peers, timeout_s)

    def arrived(self, phase: str, context: int, round: int, *, attempt: int = 0) -> Mapping[int, bytes]:
        """Bodies of the signal that have been taken in so far, by peer. Waits for nothing and consumes nothing."""
        return self._inbox.get((self._numbers[phase], context, attempt, self.epoch, round), {})

    @property
    def has_heard(self) -> bool:
        """Whether any signal has been taken in that nobody waited for: hardly ever, where signals travel elsewhere."""
        return bool(self._inbox)

    def forget(self, phase: str, context: int, round: int) -> None:
        """Drop signals of earlier rounds of the phase and context that nobody waits for any more."""
        with self._lock:
            self._forget_older((self._numbers[phase], context, 0, self.epoch, round))

    def exchange_descriptors(self, descriptors: Sequence[int], *, timeout_s: float) -> dict[int, list[int]]:
        """Collective: give every peer copies of `descriptors` (at most 16), get theirs; the caller closes them.

        Raises:
            Unsupported: the streams are TCP, which drops descriptors without a word.
            PeerTimeout, PeerLost: a peer does not send its own.
        """
        if self.peers and self.family != "unix":
            reason = "descriptors travel over unix sockets alone, between ranks of one network namespace"
            raise Unsupported(transport=f"mesh over {self.family}", reasons=(reason,), rank=self.rank)
        frame = _HEADER.pack(0, _DESCRIPTORS, 0, 0, self.epoch, 0)
        for peer in self.peers:
            # A closed peer is found by the wait below, with the phase it was needed for.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._sockets[peer], [frame], list(descriptors))
        self._wait((_DESCRIPTORS, 0, 0, self.epoch, 0), None, timeout_s)
        with self._lock:
            received, self._descriptors = self._descriptors, {rank: [] for rank in self.peers}
        return received

    def record(self, error: A2AError) -> A2AError:
        """Keep `error` as this group's error until reset, tell every peer, and give back the one that counts.

        The first error stays: later ones are usually its consequences.
        """
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
            body = json.dumps(error.to_facts()).encode()
            key = (_ERROR, 0, 0, self.epoch, 0)
            for peer in self.peers:
                self._send(peer, _HEADER.pack(len(body), *key) + body, key, timeout_s=1.0)
        return error

    def check(self) -> None:
        """Raise the recorded error, if any, after a look at what has arrived."""
        self.pump(0)
        if self.error is not None:
            raise self.error

    def expect(self, missing: Sequence[int], phase: str, round: int, remaining_s: float, timeout_s: float) -> None:
        """Raise what ends a wait for signals that travel elsewhere, if anything does; to be called after `pump`.

        Args:
            missing: peers whose signal has not come, looked up after the `pump` that may have found them lost.
            phase, round: of the signal, for the story.
            remaining_s: what is left of the wait's budget.
            timeout_s: the budget.

        Raises:
            As `wait`.
        """
        if self.error is not None:
            raise self.error
        self._expect(missing, phase, round, remaining_s, timeout_s)

    def pump(self, timeout_s: float) -> None:
        """Take in what has arrived, sleeping up to `timeout_s` for something to arrive."""
        for fd, _ in self._epoll.poll(timeout_s):
            self._read(self._ranks_by_fd[fd])

    def reset(self, *, timeout_s: float, absent: Iterable[int] = ()) -> None:
        """Collective: forget the recorded error and every signal that is not yet consumed.

        Args:
            timeout_s: budget for all peers to call it too.
            absent: peers that do not take part if they are gone, or go meanwhile.
        """
        with self._lock:
            self.epoch += 1
            self.error = self._later_errors.pop(self.epoch, None)
            self._inbox = {key: got for key, got in self._inbox.items() if key[3] >= self.epoch}
        key = (_RESET, 0, 0, self.epoch, 0)
        for peer in self.peers:
            self._send(peer, _HEADER.pack(0, *key), key, timeout_s)
        self._wait(key, None, timeout_s, excused=frozenset(absent))

    def close(self) -> None:
        """Say goodbye to everyone and close all streams; idempotent, waits for nobody."""
        if self._closed:
            return
        self._closed = True
        key = (_GOODBYE, 0, 0, self.epoch, 0)
        for peer in self.peers:
            self._send(peer, _HEADER.pack(0, *key), key, timeout_s=0.0)
        self._release()

    def _release(self) -> None:
        self._epoll.close()
        for sock in self._sockets.values():
            sock.close()
        for left in self._descriptors.values():
            for descriptor in left:
                os.close(descriptor)
            left.clear()

    def __del__(self) -> None:
        # An object that was never closed frees its streams and tells nobody: peers see a closed connection.
        if not getattr(self, "_closed", True):
            self._closed = True
            self._release()

    def _wait(
        self,
        key: tuple[int, int, int, int, int],
        peers: Iterable[int] | None,
        timeout_s: float,
        excused: frozenset[int] = frozenset(),
    ) -> dict[int, bytes]:
        wanted = self.peers if peers is None else tuple(peers)
        deadline = time.monotonic() + timeout_s
        while True:
            if self.error is not None:
                raise self.error
            missing = self._missing(key, wanted)
            if missing:
                for peer in missing:
                    self._read(peer)
                missing = self._missing(key, missing)
                if excused:
                    missing = [peer for peer in missing if peer not in excused or peer not in self.lost]
            if self.error is not None:
                raise self.error
            if not missing:
                with self._lock:
                    got = self._inbox.pop(key, {})
                    self._forget_older(key)
                return got
            remaining = deadline - time.monotonic()
            self._expect(missing, self._names[key[0]], key[4], remaining, timeout_s)
            try:
                events = self._polls[missing[-1]].poll(1000 * min(remaining, _GLANCE_S))
            except RuntimeError:
                # A poll set serves one thread at a time, and another waits for the same peer: look at all, briefly,
                # since it may be that thread that takes in this one's signal.
                events = self._epoll.poll(min(remaining, _SHARED_GLANCE_S))
            for fd, _ in events or self._epoll.poll(0):
                self._read(self._ranks_by_fd[fd])

    def _expect(self, missing: Sequence[int], phase: str, round: int, remaining_s: float, timeout_s: float) -> None:
        for peer in missing:
            if peer in self.lost:
                # What arrived before the connection closed has been read: _read empties a stream before it ends.
                raise self.record(PeerLost(rank=self.rank, peer=peer, phase=phase, round=round))
            if self._newest_reset.get(peer, 0) > self.epoch:
                raise StateError(
                    rank=self.rank,
                    call=phase,
                    state=f"reset by rank {peer}",
                    change="call reset() on every rank",
                )
        if remaining_s <= 0:
            late = PeerTimeout(rank=self.rank, peer=missing[0], phase=phase, round=round, waited_s=timeout_s)
            raise self.record(late)

    def _missing(self, key: tuple[int, int, int, int, int], wanted: Sequence[int]) -> Sequence[int]:
        got = self._inbox.get(key)
        return [peer for peer in wanted if peer not in got] if got else wanted

    def _forget_older(self, key: tuple[int, int, int, int, int]) -> None:
        # Signals of rounds that this rank gave up are never waited for: the inbox holds the rounds in flight alone.
        phase, context, _, epoch, round = key
        stale = [k for k in self._inbox if k[0] == phase and k[1] == context and k[3] <= epoch and k[4] < round]
        for old in stale:
            del self._inbox[old]

    def _send(self, peer: int, frame: bytes, key: tuple[int, int, int, int, int], timeout_s: float) -> None:
        # A peer that is gone needs no signal; whether that matters is decided where its own signal is needed.
        if peer in self._unwritable or peer in self.lost:
            return
        sock = self._sockets[peer]
        deadline: float | None = None
        view = memoryview(frame)
        with self._lock:
            while view:
                try:
                    view = view[sock.send(view, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    now = time.monotonic()
                    deadline = now + timeout_s if deadline is None else deadline
                    if now >= deadline:
                        if len(view) < len(frame):
                            # Half a frame would garble the stream for good: this peer can hear nothing more.
                            self._unwritable.add(peer)
                        if key[0] < _FIRST_PHASE:
                            return
                        raise self.record(
                            PeerTimeout(
                                rank=self.rank,
                                peer=peer,
                                phase=self._names[key[0]],
                                round=key[4],
                                waited_s=timeout_s,
                            )
                        ) from None
                    select.select([], [sock], [], deadline - now)
                except OSError:
                    self._unwritable.add(peer)
                    return

    def _read(self, peer: int) -> None:
        with self._lock:
            if peer in self.lost:
                return
            sock = self._sockets[peer]
            while True:
                try:
                    data, ancillary, _, _ = sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    return
                except OSError:
                    data, ancillary = b"", []
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        count = len(payload) // 4
                        self._descriptors[peer] += struct.unpack(f"{count}i", payload[: 4 * count])
                if not data:
                    self.lost.add(peer)
                    self._epoll.unregister(sock.fileno())
                    for poll in self._polls.values():
                        poll.unregister(sock.fileno())
                    return
                self._take(peer, data)
                if len(data) < _READ_BYTES:
                    return

    def _take(self, peer: int, data: bytes) -> None:
        buffer = self._partial[peer] + data if self._partial[peer] else data
        at = 0
        while len(buffer) - at >= _HEADER.size:
            num_bytes, phase, context, attempt, epoch, round = _HEADER.unpack_from(buffer, at)
            end = at + _HEADER.size + num_bytes
            if len(buffer) < end:
                break
            body = buffer[at + _HEADER.size : end]
            at = end
            if phase == _GOODBYE:
                self.departed.add(peer)
            elif epoch < self.epoch:
                continue
            elif phase == _ERROR:
                told = from_facts(json.loads(body), reporter=peer)
                if epoch > self.epoch:
                    # Of a reset that has failed elsewhere: this rank's own will have failed too.
                    self._later_errors.setdefault(epoch, told)
                elif self.error is None:
                    self.error = told
            else:
                if phase == _RESET:
                    self._newest_reset[peer] = epoch
                self._inbox.setdefault((phase, context, attempt, epoch, round), {})[peer] = body
        self._partial[peer] = buffer[at:]


def host_identity() -> str:
    """Names the network namespace of the running kernel: ranks with equal names can meet on abstract unix sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _connect(comm: Comm, deadline: float, timeout_s: float, family: str | None) -> tuple[str, dict[int, socket.socket]]:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return family or "unix", {}
    hosts = comm.allgather(host_identity())
    if family is None:
        family = "unix" if len(set(hosts)) == 1 else "tcp"
    token = comm.bcast(secrets.token_bytes(16) if rank == 0 else None, 0)
    with _listen(family, size) as listener:
        addresses: list[Any] = comm.allgather(_address(family, listener))
        sockets: dict[int, socket.socket] = {}
        try:
            # Every listener exists before any address is known, so a connection is queued even if nobody accepts yet.
            for peer in range(rank):
                sockets[peer] = _call(family, addresses[peer], rank, peer, token, deadline, timeout_s)
            _answer(listener, rank, size, token, deadline, timeout_s, sockets)
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
    return family, sockets


def _listen(family: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET, socket.SOCK_STREAM)
    # An abstract name lives in the kernel alone and ends with the socket: no file to leave behind.
    listener.bind(f"\0a2a-{secrets.token_hex(16)}" if family == "unix" else ("", 0))
    listener.listen(size)
    return listener


def _address(family: str, listener: socket.socket) -> Any:
    if family == "unix":
        return listener.getsockname()
    return socket.gethostbyname(socket.gethostname()), listener.getsockname()[1]


def _call(
    family: str, address: Any, rank: int, peer: int, token: bytes, deadline: float, timeout_s: float
) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock.connect(address if family == "unix" else tuple(address))
            except BlockingIOError:
                # A unix socket does not queue behind a full backlog; strangers may have filled it.
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_RETRY_S)
            else:
                break
        _without_delay(family, sock)
        sock.sendall(_HELLO.pack(rank, token))
    except TimeoutError:
        sock.close()
        raise PeerTimeout(rank=rank, peer=peer, phase="startup", round=0, waited_s=timeout_s) from None
    except OSError:
        sock.close()
        raise PeerLost(rank=rank, peer=peer, phase="startup", round=0) from None
    return sock


def _answer(
    listener: socket.socket,
    rank: int,
    size: int,
    token: bytes,
    deadline: float,
    timeout_s: float,
    sockets: dict[int, socket.socket],
) -> None:
    """Add the streams of all higher ranks to `sockets`. All callers are heard at once: a stranger that says nothing
    keeps no rank waiting.
    """
    missing = set(range(rank + 1, size))
    listener.setblocking(False)
    said: dict[socket.socket, bytes] = {}
    try:
        while missing:
            ready = connection.wait([listener, *said], max(deadline - time.monotonic(), 0))
            if not ready:
                raise PeerTimeout(rank=rank, peer=min(missing), phase="startup", round=0, waited_s=timeout_s)
            for each in ready:
                if each is listener:
                    with contextlib.suppress(OSError):
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        said[sock] = b""
                elif isinstance(each, socket.socket):
                    part = b""
                    with contextlib.suppress(OSError):
                        part = each.recv(_HELLO.size - len(said[each]))
                    said[each] += part
                    if part and len(said[each]) < _HELLO.size:
                        continue
                    caller = _caller(said.pop(each), token)
                    if caller in missing:
                        missing.remove(caller)
                        _without_delay("tcp" if each.family == socket.AF_INET else "unix", each)
                        sockets[caller] = each
                    else:
                        each.close()
    finally:
        for stranger in said:
            stranger.close()


def _caller(hello: bytes, token: bytes) -> int:
    """The rank that a greeting names, -1 for a stranger."""
    if len(hello) < _HELLO.size:
        return -1
    caller, shown = _HELLO.unpack(hello)
    return caller if secrets.compare_digest(shown, token) else -1


def _without_delay(family: str, sock: socket.socket) -> None:
    if family == "tcp":
        # A doorbell is one small segment that must leave at once.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
