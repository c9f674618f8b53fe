"""The mesh: signals and their bodies, early ones, descriptors, errors, departures, reset, strangers, deadlines.

Ranks are threads here, over a group that lives in this process; one test waits in processes of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from descriptors import open_descriptors
from ranks import Ranks
from thread_ranks import ENOUGH_S, Group, ThreadComm, in_threads

import a2a.comm.mesh as mesh_module
from a2a.comm import Comm
from a2a.comm.mesh import Mesh, host_identity
from a2a.errors import A2AError, ConfigError, PeerLost, PeerTimeout, StateError, Unsupported

PHASES = ("one", "two")
both_families = pytest.mark.parametrize("family", ["unix", "tcp"])


@contextlib.contextmanager
def opened(comm: Comm, **keywords: Any) -> Iterator[Mesh]:
    mesh = Mesh(comm, PHASES, **{"timeout_s": ENOUGH_S, **keywords})
    try:
        yield mesh
    finally:
        mesh.close()


@both_families
def test_signals_carry_a_body_for_each_peer(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm, family=family) as mesh:
            assert (mesh.rank, mesh.size, mesh.family) == (comm.rank, 4, family)
            assert mesh.peers == tuple(rank for rank in range(4) if rank != comm.rank)
            for number in (1, 2, 3):
                mesh.signal("one", 0, number, {peer: f"{comm.rank}>{peer} {number}".encode() for peer in mesh.peers})
                heard = mesh.wait("one", 0, number, timeout_s=ENOUGH_S)
                assert heard == {peer: f"{peer}>{comm.rank} {number}".encode() for peer in mesh.peers}
                mesh.signal("two", 0, number, b"all")
                assert mesh.wait("two", 0, number, timeout_s=ENOUGH_S) == dict.fromkeys(mesh.peers, b"all")
            comm.barrier()

    in_threads(4, body)


def test_unix_sockets_are_chosen_on_one_host_and_tcp_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def family(comm: ThreadComm) -> str:
        with opened(comm) as mesh:
            mesh.signal("one", 0, 1)
            mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
            comm.barrier()
            return mesh.family

    assert in_threads(2, family) == ["unix", "unix"]
    lock, names = threading.Lock(), iter(["a", "b", "c"])

    def another_host() -> str:
        with lock:
            return next(names)

    assert len(host_identity()) > 30 and host_identity() == host_identity()
    monkeypatch.setattr(mesh_module, "host_identity", another_host)
    assert in_threads(3, family) == ["tcp"] * 3


@both_families
def test_early_signals_are_kept_for_their_round_phase_context_and_attempt(family: str) -> None:
    sent = [
        (phase, context, number, attempt)
        for number in (1, 2, 3)
        for phase in PHASES
        for context in (0, 1)
        for attempt in (1, 2)
    ]

    def body(comm: ThreadComm) -> None:
        with opened(comm, family=family) as mesh:
            if comm.rank == 0:
                for phase, context, number, attempt in sent:
                    text = f"{phase} {context} {number} {attempt}".encode()
                    mesh.signal(phase, context, number, text, attempt=attempt)
            comm.barrier()
            if comm.rank:
                # Contexts go on at their own pace, and within a round the second attempt may be asked for first.
                for phase, context, number, attempt in sorted(sent, key=lambda key: (-key[1], key[2], key[0], -key[3])):
                    heard = mesh.wait(phase, context, number, attempt=attempt, peers=[0], timeout_s=ENOUGH_S)
                    assert heard == {0: f"{phase} {context} {number} {attempt}".encode()}
                # Each is heard once.
                with pytest.raises(PeerTimeout):
                    mesh.wait("one", 0, 3, attempt=1, peers=[0], timeout_s=0.05)
            comm.barrier()

    in_threads(2, body)


def test_only_the_peers_asked_for_are_signalled_and_awaited() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank != 2:
                other = 1 - comm.rank
                mesh.signal("one", 0, 1, b"pair", peers=[other])
                assert mesh.wait("one", 0, 1, peers=[other], timeout_s=ENOUGH_S) == {other: b"pair"}
            comm.barrier()
            mesh.check()
            assert mesh.arrived("one", 0, 1) == {}
            comm.barrier()
            if comm.rank == 0:
                mesh.signal("two", 0, 1, b"seen")
            else:
                mesh.pump(ENOUGH_S)
                # To look is not to take.
                for _ in range(2):
                    assert mesh.arrived("two", 0, 1) == {0: b"seen"}
                assert mesh.wait("two", 0, 1, peers=[0], timeout_s=ENOUGH_S) == {0: b"seen"}
            comm.barrier()

    in_threads(3, body)


def test_a_group_of_one_waits_for_nobody() -> None:
    with opened(ThreadComm(Group(1), 0)) as mesh:
        mesh.signal("one", 0, 1, b"")
        assert mesh.wait("one", 0, 1, timeout_s=0) == {}
        assert mesh.exchange_descriptors([], timeout_s=0) == {}
        mesh.reset(timeout_s=0)
        mesh.check()
    mesh.close()


def test_two_meshes_do_not_hear_each_other() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as first, opened(comm) as second:
            second.signal("one", 0, 1, b"second")
            first.signal("one", 0, 1, b"first")
            other = 1 - comm.rank
            assert first.wait("one", 0, 1, timeout_s=ENOUGH_S) == {other: b"first"}
            comm.barrier()
            first.record(ConfigError(what="first", got=comm.rank, wanted="nothing"))
            assert second.wait("one", 0, 1, timeout_s=ENOUGH_S) == {other: b"second"}
            second.check()
            comm.barrier()

    in_threads(2, body)


def test_descriptors_reach_every_peer_in_order_and_open() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            mine = [os.memfd_create(f"{comm.rank} {index}") for index in range(2)]
            for index, descriptor in enumerate(mine):
                os.write(descriptor, f"{comm.rank}/{index}".encode())
            # Signals before and after do not mix with them.
            mesh.signal("one", 0, 1, b"before")
            received = mesh.exchange_descriptors(mine, timeout_s=ENOUGH_S)
            mesh.signal("one", 0, 2, b"after")
            for descriptor in mine:
                os.close(descriptor)
            assert set(received) == set(mesh.peers)
            for peer, descriptors in received.items():
                texts = [os.pread(descriptor, 9, 0).decode() for descriptor in descriptors]
                assert texts == [f"{peer}/0", f"{peer}/1"]
                assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            assert set(mesh.wait("one", 0, 1, timeout_s=ENOUGH_S).values()) == {b"before"}
            assert set(mesh.wait("one", 0, 2, timeout_s=ENOUGH_S).values()) == {b"after"}
            comm.barrier()

    in_threads(3, body)


def test_descriptors_over_tcp_are_refused() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm, family="tcp") as mesh:
            with pytest.raises(Unsupported, match="unix sockets"):
                mesh.exchange_descriptors([0], timeout_s=ENOUGH_S)
            comm.barrier()

    in_threads(2, body)


def test_a_mesh_keeps_no_descriptor() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            received = mesh.exchange_descriptors([0], timeout_s=ENOUGH_S)
            for descriptors in received.values():
                for descriptor in descriptors:
                    os.close(descriptor)
            # A second exchange that nobody takes ends with the mesh.
            mesh.signal("one", 0, 1)
            mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
            frame = mesh_module._HEADER.pack(0, mesh_module._DESCRIPTORS, 0, 0, 0, 1)
            comm.barrier()
            socket.send_fds(mesh._sockets[mesh.peers[0]], [frame], [0, 0])
            mesh.pump(ENOUGH_S)
            assert len(mesh._descriptors[mesh.peers[0]]) == 2
            comm.barrier()

    before = open_descriptors()
    for _ in range(3):
        in_threads(2, body)
    assert open_descriptors() == before


@both_families
def test_a_recorded_error_is_raised_on_every_rank_and_the_first_one_stays(family: str) -> None:
    def body(comm: ThreadComm) -> str:
        with opened(comm, family=family) as mesh:
            if comm.rank == 1:
                mine = ConfigError(what="top_k", got=65, wanted="less", rank=1)
                assert mesh.record(mine) is mine
                assert mesh.record(StateError(rank=1, call="combine", state="idle")) is mine
                raised: A2AError = mine
            else:
                with pytest.raises(ConfigError, match="top_k") as caught:
                    mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
                raised = caught.value
                assert raised.reporter == 1
            for attempt in (mesh.check, lambda: mesh.wait("two", 0, 9, timeout_s=ENOUGH_S)):
                with pytest.raises(ConfigError) as again:
                    attempt()
                assert again.value is raised
            comm.barrier()
            return raised.story()

    assert len(set(in_threads(3, body))) == 1


def test_check_sees_an_error_without_waiting() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            mesh.check()
            comm.barrier()
            if comm.rank == 0:
                mesh.record(ConfigError(what="x", got=1, wanted="2"))
            comm.barrier()
            with pytest.raises(ConfigError):
                mesh.check()
            comm.barrier()

    in_threads(2, body)


@both_families
def test_who_says_goodbye_is_missed_only_beyond_his_last_round(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        mesh = Mesh(comm, PHASES, timeout_s=ENOUGH_S, family=family)
        if comm.rank == 0:
            mesh.signal("one", 0, 1, b"last")
            mesh.close()
            mesh.close()
        comm.barrier()
        if comm.rank:
            mesh.check()
            assert mesh.wait("one", 0, 1, peers=[0], timeout_s=ENOUGH_S) == {0: b"last"}
            # To tell him something is no error either.
            mesh.signal("two", 0, 1, b"anyone?")
            assert mesh.wait("two", 0, 1, peers=[3 - comm.rank], timeout_s=ENOUGH_S) == {3 - comm.rank: b"anyone?"}
            mesh.check()
            assert mesh.departed == {0}
            comm.group.barrier.wait()
            with pytest.raises(PeerLost) as caught:
                mesh.wait("two", 0, 1, peers=[0], timeout_s=ENOUGH_S)
            error = caught.value
            assert (error.peer, error.phase, error.round) == (0, "two", 1)
            assert mesh.lost == {0} or error.reporter is not None
            comm.group.barrier.wait()
            mesh.close()
        else:
            comm.group.barrier.wait()
            comm.group.barrier.wait()

    in_threads(3, body)


@both_families
def test_who_dies_is_lost_and_his_last_signals_count(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        mesh = Mesh(comm, PHASES, timeout_s=ENOUGH_S, family=family)
        if comm.rank == 0:
            mesh.signal("one", 0, 1, b"last words")
            # As the kernel closes what a killed process had open.
            for sock in mesh._sockets.values():
                sock.close()
            mesh._closed = True
            comm.barrier()
            return
        comm.barrier()
        assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == {0: b"last words"}
        with pytest.raises(PeerLost, match="rank 0 is gone") as caught:
            mesh.wait("one", 0, 2, timeout_s=ENOUGH_S)
        assert (caught.value.rank, caught.value.peer, caught.value.round) == (1, 0, 2)
        assert mesh.departed == set() and mesh.lost == {0}
        with pytest.raises(PeerLost):
            mesh.check()
        with pytest.raises(PeerLost, match="reset"):
            mesh.reset(timeout_s=ENOUGH_S)
        # One who is masked out need not come.
        mesh.reset(timeout_s=ENOUGH_S, absent=[0])
        mesh.check()
        mesh.close()

    in_threads(2, body)


def test_an_object_that_is_dropped_tells_nobody_and_frees_its_streams() -> None:
    def body(comm: ThreadComm) -> None:
        mesh = Mesh(comm, PHASES, timeout_s=ENOUGH_S)
        comm.barrier()
        if comm.rank == 0:
            del mesh
            gc.collect()
        else:
            with pytest.raises(PeerLost):
                mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
            assert mesh.departed == set()
            mesh.close()

    in_threads(2, body)


@both_families
def test_a_silent_peer_is_named_at_the_deadline_to_everyone(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm, family=family) as mesh:
            if comm.rank == 1:
                mesh.signal("two", 1, 5, b"here")
            elif comm.rank == 0:
                with pytest.raises(PeerTimeout) as caught:
                    mesh.wait("two", 1, 5, timeout_s=0.1)
                error = caught.value
                assert (error.rank, error.peer, error.phase, error.round, error.waited_s) == (0, 2, "two", 5, 0.1)
            comm.barrier()
            with pytest.raises(PeerTimeout) as told:
                mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
            assert told.value.peer == 2 and told.value.reporter == (None if comm.rank == 0 else 0)
            comm.barrier()

    in_threads(3, body)


def test_reset_forgets_errors_and_signals_of_before() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            other = 1 - comm.rank
            if comm.rank == 0:
                mesh.signal("one", 0, 1, b"stale")
                mesh.signal("two", 0, 1, b"taken in, then stale")
                mesh.record(ConfigError(what="x", got=1, wanted="2"))
            comm.barrier()
            with pytest.raises(ConfigError):
                mesh.check()
            mesh.reset(timeout_s=ENOUGH_S)
            mesh.check()
            assert not mesh.arrived("two", 0, 1)
            mesh.signal("one", 0, 1, f"fresh {comm.rank}".encode())
            assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == {other: f"fresh {other}".encode()}
            mesh.reset(timeout_s=ENOUGH_S)
            comm.barrier()

    in_threads(2, body)


def test_a_fast_ranks_reset_and_signals_wait_for_the_slow() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank == 0:
                # What a fast rank sends in its next epoch may be here before this one resets.
                comm.barrier()
                mesh.pump(ENOUGH_S)
                assert mesh.arrived("one", 0, 1) == {}
                mesh.reset(timeout_s=ENOUGH_S)
                assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == {1: b"new"}
            else:
                frames = b""
                for phase, text in ((mesh_module._RESET, b""), (mesh._numbers["one"], b"new")):
                    frames += mesh_module._HEADER.pack(len(text), phase, 0, 0, 1, 1 if text else 0) + text
                mesh._sockets[0].send(frames)
                comm.barrier()
            comm.barrier()

    in_threads(2, body)


def test_what_was_under_way_during_a_reset_is_dropped() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            mesh.reset(timeout_s=ENOUGH_S)
            comm.barrier()
            if comm.rank == 0:
                text = json.dumps(ConfigError(what="x", got=1, wanted="2").to_facts()).encode()
                for phase in (mesh._numbers["one"], mesh_module._ERROR):
                    mesh._sockets[1].send(mesh_module._HEADER.pack(len(text), phase, 0, 0, 0, 1) + text)
                mesh.signal("two", 0, 1, b"after")
            else:
                assert mesh.wait("two", 0, 1, timeout_s=ENOUGH_S) == {0: b"after"}
                mesh.check()
                assert not mesh._inbox, "signals that nobody can wait for any more stay for ever"
            comm.barrier()

    in_threads(2, body)


def test_rounds_that_were_given_up_leave_nothing_behind() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            for number in range(1, 6):
                mesh.signal("one", 0, number, b"")
                mesh.signal("one", 1, number, b"other context")
            comm.barrier()
            mesh.wait("one", 0, 5, timeout_s=ENOUGH_S)
            for number in range(1, 5):
                assert not mesh.arrived("one", 0, number)
                assert mesh.arrived("one", 1, number)
            comm.barrier()

    in_threads(2, body)


def test_a_rank_that_waits_while_another_resets_is_told_so() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank == 0:
                mesh.reset(timeout_s=ENOUGH_S)
            else:
                with pytest.raises(StateError, match="reset by rank 0") as caught:
                    mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
                assert "reset() on every rank" in str(caught.value)
                # It is no error of the group.
                mesh.check()
                mesh.reset(timeout_s=ENOUGH_S)
            comm.barrier()

    in_threads(2, body)


def test_a_reset_that_failed_elsewhere_has_failed_for_the_late_too() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank == 0:
                with pytest.raises(PeerTimeout):
                    mesh.reset(timeout_s=0.1)
            comm.barrier()
            if comm.rank == 1:
                mesh.check()
                with pytest.raises(PeerTimeout) as told:
                    mesh.reset(timeout_s=ENOUGH_S)
                assert told.value.reporter == 0
            comm.barrier()
            # Both stand where the next reset starts.
            mesh.reset(timeout_s=ENOUGH_S)
            mesh.signal("one", 0, 1, b"well")
            assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == {1 - comm.rank: b"well"}
            comm.barrier()

    in_threads(2, body)


def test_reset_has_a_deadline() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank == 0:
                with pytest.raises(PeerTimeout) as caught:
                    mesh.reset(timeout_s=0.1)
                assert (caught.value.peer, caught.value.phase) == (1, "reset")
            comm.barrier()

    in_threads(2, body)


@both_families
def test_frames_may_come_in_pieces(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm, family=family) as mesh:
            if comm.rank == 0:
                frames = b""
                for number in (1, 2):
                    text = f"round {number}".encode()
                    frames += mesh_module._HEADER.pack(len(text), mesh._numbers["one"], 0, 0, 0, number) + text
                sock = mesh._sockets[1]
                for cut in range(len(frames)):
                    sock.send(frames[cut : cut + 1])
                    comm.barrier()
                    comm.barrier()
            else:
                arrived = []
                for _ in range(2 * (mesh_module._HEADER.size + 7)):
                    comm.barrier()
                    mesh.pump(ENOUGH_S)
                    arrived.append([bytes(mesh.arrived("one", 0, number).get(0, b"-")) for number in (1, 2)])
                    comm.barrier()
                half = mesh_module._HEADER.size + 7
                assert arrived[half - 2] == [b"-", b"-"]
                assert arrived[half - 1] == [b"round 1", b"-"] == arrived[2 * half - 2]
                assert arrived[-1] == [b"round 1", b"round 2"]
            comm.barrier()

    in_threads(2, body)


@both_families
def test_a_body_longer_than_any_buffer_arrives_whole(family: str) -> None:
    long = os.urandom(3_000_000)

    def body(comm: ThreadComm) -> None:
        with opened(comm, family=family) as mesh:
            if comm.rank == 0:
                mesh.signal("one", 0, 1, long, timeout_s=ENOUGH_S)
                mesh.signal("one", 0, 2, b"next")
            else:
                assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == {0: long}
                assert mesh.wait("one", 0, 2, timeout_s=ENOUGH_S) == {0: b"next"}
            comm.barrier()

    in_threads(2, body)


def test_a_peer_that_never_reads_ends_a_send_at_its_deadline() -> None:
    def body(comm: ThreadComm) -> None:
        with opened(comm) as mesh:
            if comm.rank == 0:
                with pytest.raises(PeerTimeout) as caught:
                    mesh.signal("one", 0, 3, bytes(8_000_000), timeout_s=0.1)
                assert (caught.value.peer, caught.value.phase, caught.value.round) == (1, "one", 3)
            comm.barrier()

    in_threads(2, body)


def gathers_addresses(gathered: list[Any], family: str) -> bool:
    return all(isinstance(each, bytes if family == "unix" else tuple) and len(each) != 16 for each in gathered)


def call_at(family: str, address: Any) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(ENOUGH_S)
    sock.connect(address)
    return sock


@both_families
def test_strangers_at_the_door_are_ignored(family: str) -> None:
    """Callers with a wrong token, with half a greeting, and with none at all, all before the first peer."""
    kept: list[socket.socket] = []

    def knock(gathered: list[Any]) -> None:
        if not gathers_addresses(gathered, family):
            return
        for hello in (mesh_module._HELLO.pack(1, bytes(16)), mesh_module._HELLO.pack(1, bytes(16))[:5], b""):
            stranger = call_at(family, gathered[0])
            stranger.sendall(hello)
            kept.append(stranger)
            if len(hello) == 5:
                stranger.close()

    def body(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.on_gathered = knock
        with opened(comm, family=family) as mesh:
            mesh.signal("one", 0, 1, b"friend")
            assert mesh.wait("one", 0, 1, timeout_s=ENOUGH_S) == dict.fromkeys(mesh.peers, b"friend")
            comm.barrier()

    try:
        in_threads(3, body)
        assert len(kept) == 3
    finally:
        for sock in kept:
            sock.close()


@both_families
def test_a_peer_that_never_calls_is_named(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 2:
            # It takes part in all that is gathered, and then does nothing.
            comm.allgather(host_identity())
            comm.bcast(None)
            comm.allgather(b"nowhere" if family == "unix" else ("127.0.0.1", 1))
            comm.barrier()
            return
        with pytest.raises(PeerTimeout) as caught:
            Mesh(comm, PHASES, timeout_s=0.3, family=family)
        assert (caught.value.rank, caught.value.peer) == (comm.rank, 2)
        assert (caught.value.phase, caught.value.round, caught.value.waited_s) == ("startup", 0, 0.3)
        comm.barrier()

    before = open_descriptors()
    in_threads(3, body)
    assert open_descriptors() == before


@both_families
def test_a_peer_whose_door_is_gone_is_lost(family: str) -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 0:
            comm.allgather(host_identity())
            comm.bcast(bytes(16))
            # Nobody listens there.
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            comm.allgather(b"\0a2a-nobody" if family == "unix" else ("127.0.0.1", port))
            return
        with pytest.raises(PeerLost) as caught:
            Mesh(comm, PHASES, timeout_s=ENOUGH_S, family=family)
        assert (caught.value.rank, caught.value.peer, caught.value.phase) == (1, 0, "startup")

    in_threads(2, body)


def test_an_unknown_phase_is_a_mistake_of_the_code() -> None:
    with opened(ThreadComm(Group(1), 0)) as mesh, pytest.raises(KeyError):
        mesh.signal("three", 0, 1)


def sleeper(comm: Comm) -> tuple[float, float]:
    """Rank 1 signals after a second; the others' processor time meanwhile."""
    with contextlib.closing(Mesh(comm, PHASES, timeout_s=ENOUGH_S)) as mesh:
        comm.barrier()
        if comm.Get_rank() == 1:
            time.sleep(1.0)
        started, spent = time.monotonic(), time.process_time()
        mesh.signal("one", 0, 1, b"")
        mesh.wait("one", 0, 1, timeout_s=ENOUGH_S)
        waited, spent = time.monotonic() - started, time.process_time() - spent
        comm.barrier()
        return waited, spent


def test_waiting_sleeps(run_ranks: Ranks) -> None:
    results = run_ranks(sleeper)
    for rank, (waited, spent) in enumerate(results):
        if rank != 1:
            assert waited > 0.5 and spent < 0.2 * waited, f"rank {rank} spent {spent} s in a wait of {waited} s"


def test_who_is_masked_out_may_go_while_the_others_reset() -> None:
    """The end of a killed process shows late: its connections close after its memory is taken down."""

    def body(comm: ThreadComm) -> None:
        mesh = Mesh(comm, PHASES, timeout_s=ENOUGH_S)
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.2)
            for sock in mesh._sockets.values():
                sock.close()
            mesh._closed = True
            return
        mesh.reset(timeout_s=ENOUGH_S, absent=[0])
        assert mesh.lost == {0}
        mesh.check()
        mesh.close()

    in_threads(3, body)
