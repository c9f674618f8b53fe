"""Doorbells: who hears what, in which order things are stored, who is woken, and how every wait ends.

Ranks are threads over one piece of memory, on both kinds of bells; the last tests use processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from exchange_case import Case, draw, play
from numba import njit
from ranks import Ranks
from thread_ranks import ENOUGH_S, ThreadComm, in_threads

import a2a
from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.config import ExchangeConfig
from a2a.errors import A2AError, ConfigError, MismatchError, PeerLost, PeerTimeout, ShapeError, StateError
from a2a.host import numba_bells
from a2a.host.bells import (
    DECLINED,
    DONE,
    ENTER,
    PHASES,
    READY,
    Active,
    Bells,
    Said,
    Signal,
    StreamBells,
    connect,
    control_regions,
    words,
)
from a2a.host.memory import shared_workspaces
from a2a.host.numba_atomics import advance_word, load_word, sleep_while
from a2a.host.numba_bells import GLANCE_S, SharedBells
from a2a.layout import WorkspaceLayout

SAME = Said((16, 1, 2))


class Rank:
    """One thread's end: its bells, and what is around them."""

    def __init__(self, comm: ThreadComm, kind: str, memory: list[torch.Tensor], num_contexts: int) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        config = ExchangeConfig(
            ep_size=self.size,
            max_num_tokens=1,
            top_k=1,
            num_experts=self.size,
            hidden_size=1,
            num_contexts=num_contexts,
        )
        self.layout = WorkspaceLayout(config, control_regions(self.size))
        if self.rank == 0:
            memory.append(torch.zeros(self.size, self.layout.num_bytes, dtype=torch.uint8))
        comm.barrier()
        self.workspace = memory[0]
        self.mesh = Mesh(comm, PHASES, timeout_s=ENOUGH_S)
        self.bells: Bells = (
            SharedBells(self.workspace, self.layout, self.mesh) if kind == "shared" else StreamBells(self.mesh)
        )
        self.everyone = Active(range(self.size), self.rank, self.size)

    def active(self, *ranks: int) -> Active:
        return Active(ranks, self.rank, self.size)

    def ring(self, signal: Signal, said: Said = SAME, active: Active | None = None) -> None:
        self.bells.ring(signal, said, active or self.everyone, ENOUGH_S)

    def wait(
        self, signal: Signal, said: Said = SAME, active: Active | None = None, timeout_s: float = ENOUGH_S
    ) -> Mapping[int, bytes]:
        return self.bells.wait(signal, said, active or self.everyone, timeout_s)

    def meet(self, signal: Signal) -> None:
        self.ring(signal)
        assert self.wait(signal) == {}

    def region(self, name: str, rank: int, context: int = 0) -> torch.Tensor:
        found = self.layout.region(name, context)
        return self.workspace[rank, found.offset_bytes : found.end_bytes]

    def sleeper(self, rank: int, context: int = 0) -> torch.Tensor:
        """int32 scalar: whether a rank says that it sleeps."""
        return self.region("bell_sleeper", rank, context).view(torch.int32)[0]

    def tickets(self, rank: int) -> torch.Tensor:
        """int64 `[phase, parity, ep]` at a rank."""
        return self.region("bell_tickets", rank).view(torch.int64).view(len(PHASES), 2, self.size)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENOUGH_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def die(self) -> None:
        """As the kernel closes what a killed process had open."""
        for sock in self.mesh._sockets.values():
            sock.close()
        self.mesh._closed = True


def on_bells(size: int, kind: str, body: Callable[[Rank], Any], num_contexts: int = 1) -> list[Any]:
    memory: list[torch.Tensor] = []

    def with_bells(comm: ThreadComm) -> Any:
        rank = Rank(comm, kind, memory, num_contexts)
        with contextlib.closing(rank.mesh):
            result = body(rank)
            comm.barrier()
            return result

    return in_threads(size, with_bells)


both_kinds = pytest.mark.parametrize("kind", ["shared", "stream"])


@contextlib.contextmanager
def quick(limit_s: float = 5.0) -> Iterator[None]:
    """What takes far less than any deadline of the test."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s


@both_kinds
def test_ranks_that_agree_hear_nothing_else(kind: str) -> None:
    def body(rank: Rank) -> None:
        for number in range(1, 40):
            for phase, attempt in ((ENTER, 0), (DONE, 0), (READY, 1), (READY, 2)):
                rank.meet(Signal(phase, 0, number, attempt))

    on_bells(4, kind, body)


@both_kinds
def test_ranks_that_differ_hear_what_everyone_said(kind: str) -> None:
    def body(rank: Rank) -> None:
        said = [Said((5, number)) for number in (7, 7, 8)]
        signal = Signal(READY, 0, 1, 1)
        rank.ring(signal, said[rank.rank])
        heard = rank.wait(signal, said[rank.rank])
        assert {peer: words(body) for peer, body in heard.items()} == {
            peer: (5, 8 if peer == 2 else 7) for peer in rank.everyone.peers
        }
        # The next signal is one of its own.
        rank.meet(Signal(READY, 0, 1, 2))

    on_bells(3, kind, body)


@both_kinds
def test_only_who_takes_part_is_awaited(kind: str) -> None:
    def body(rank: Rank) -> None:
        pair = rank.active(0, 2)
        for number in (1, 2, 3):
            if rank.rank != 1:
                rank.ring(Signal(ENTER, 0, number, 0), SAME, pair)
                assert rank.wait(Signal(ENTER, 0, number, 0), SAME, pair) == {}
        rank.comm.barrier()
        if kind == "shared":
            assert not rank.tickets(1).any(), "a masked rank was rung at"

    on_bells(3, kind, body)


@both_kinds
def test_contexts_do_not_hear_each_other(kind: str) -> None:
    def body(rank: Rank) -> None:
        # Two rounds in flight, ended in the other order; numbers of the two are the same.
        for context in (0, 1):
            rank.ring(Signal(ENTER, context, 1, 0))
        for context in (1, 0):
            assert rank.wait(Signal(ENTER, context, 1, 0)) == {}
        if rank.rank == 0:
            rank.ring(Signal(DONE, 1, 1, 0))
        rank.comm.barrier()
        if rank.rank == 1:
            only = rank.active(0, 1)
            with pytest.raises(PeerTimeout):
                rank.wait(Signal(DONE, 0, 1, 0), SAME, only, timeout_s=0.1)
            assert rank.mesh.error is not None

    on_bells(3, kind, body, num_contexts=2)


def test_numbers_may_wrap() -> None:
    def body(rank: Rank) -> None:
        for number in range(2**32 - 3, 2**32 + 3):
            rank.meet(Signal(READY, 0, number, 1))
        rank.comm.barrier()
        for attempt in range(2**16 - 3, 2**16 + 3):
            rank.meet(Signal(READY, 0, 7, attempt))

    on_bells(3, "shared", body)


def test_epochs_may_wrap() -> None:
    def body(rank: Rank) -> None:
        for epoch in (2**15 - 1, 2**15, 2**15 + 1):
            rank.comm.barrier()
            rank.bells.forget()
            rank.mesh.epoch = epoch
            rank.comm.barrier()
            for number in (1, 2, 3):
                rank.meet(Signal(ENTER, 0, number, 0))

    on_bells(3, "shared", body)


def test_a_bell_of_before_a_reset_is_not_heard_after_it() -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.ring(Signal(ENTER, 0, 1, 0))
        rank.comm.barrier()
        rank.bells.forget()
        assert not rank.tickets(rank.rank).any()
        rank.mesh.reset(timeout_s=ENOUGH_S)
        if rank.rank == 1:
            with pytest.raises(PeerTimeout):
                rank.wait(Signal(ENTER, 0, 1, 0), timeout_s=0.1)
        rank.comm.barrier()

    on_bells(2, "shared", body)


def test_the_last_of_the_bells_takes_the_flag_and_no_other() -> None:
    """A waiter that has said it sleeps is left alone until nothing is missing; then its flag is gone."""

    def body(rank: Rank) -> None:
        signal = Signal(DONE, 0, 1, 0)
        if rank.rank == 3:
            # As one that is between its last look and its sleep.
            rank.sleeper(3).fill_(1)
        rank.comm.barrier()
        for turn in (1, 0, 2):
            if rank.rank == turn:
                rank.ring(signal)
            rank.comm.barrier()
            assert int(rank.sleeper(3)) == (0 if turn == 2 else 1)
            rank.comm.barrier()
        if rank.rank == 3:
            # The others were not asleep, and nobody said they were.
            assert [int(rank.sleeper(peer)) for peer in range(4)] == [0] * 4
            assert rank.wait(signal) == {}

    on_bells(4, "shared", body)


@njit(nogil=True)
def _sleep(word_at: int, value: int, timespec_at: int) -> None:
    sleep_while(word_at, np.int32(value), timespec_at)


@njit(nogil=True)
def _advance(word_at: int) -> int:
    advance_word(word_at)
    return load_word(word_at)


@pytest.mark.parametrize("start", [0, 2**31 - 1, -1])
def test_who_was_woken_before_it_slept_does_not_sleep(start: int) -> None:
    """The bell that comes between the last look and the sleep: the word has changed, and the kernel sees that."""
    word, long = ctypes.c_int32(start), (ctypes.c_int64 * 2)(30, 0)
    assert ctypes.c_int32(_advance(ctypes.addressof(word))).value == ctypes.c_int32(start + 1).value
    with quick():
        _sleep(ctypes.addressof(word), start, ctypes.addressof(long))
    # With the word as it was it does sleep.
    short = (ctypes.c_int64 * 2)(0, 50_000_000)
    began = time.monotonic()
    _sleep(ctypes.addressof(word), word.value, ctypes.addressof(short))
    assert time.monotonic() - began >= 0.04


@pytest.mark.parametrize("start", [0, 2**31 - 2, -2])
def test_the_gate_may_wrap(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sleeps too long to end by themselves."""
    monkeypatch.setattr(numba_bells, "GLANCE_S", 20.0)

    def body(rank: Rank) -> None:
        gate = rank.region("bell_gate", 0).view(torch.int32)[0]
        if rank.rank == 0:
            gate.fill_(start)
        rank.comm.barrier()
        with quick():
            for number in range(1, 6):
                if rank.rank == number % 3:
                    # Both others sleep.
                    rank.until(lambda: sum(int(rank.sleeper(peer)) for peer in rank.everyone.peers) == 2)
                rank.meet(Signal(ENTER, 0, number, 0))
        rank.comm.barrier()
        assert ctypes.c_int32(int(gate) - start).value == 5, "each round has one wake-up for all"
        rank.comm.barrier()

    on_bells(3, "shared", body)


def test_a_sleeper_is_woken_by_the_last_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sleeps too long to end by themselves."""
    monkeypatch.setattr(numba_bells, "GLANCE_S", 20.0)

    def body(rank: Rank) -> None:
        signal = Signal(ENTER, 0, 1, 0)
        if rank.rank == 0:
            rank.ring(signal)
            with quick():
                assert rank.wait(signal) == {}
            rank.comm.barrier()
            return
        rank.until(lambda: int(rank.sleeper(0)) == 1)
        if rank.rank == 2:
            time.sleep(0.2)
        rank.ring(signal)
        rank.comm.barrier()

    on_bells(3, "shared", body)


def test_a_ticket_whose_ringer_died_before_the_wake_is_found() -> None:
    def body(rank: Rank) -> None:
        signal = Signal(DONE, 0, 4, 0)
        if rank.rank == 0:
            with quick():
                assert rank.wait(signal, Said(())) == {}
            # What it had rung counts; what it has not is missed.
            with quick(), pytest.raises(PeerLost) as caught:
                rank.wait(Signal(READY, 0, 4, 1))
            error = caught.value
            assert (error.rank, error.peer, error.phase, error.round) == (0, 1, "combine.ready", 4)
            return
        rank.until(lambda: int(rank.sleeper(0)) == 1)
        rank.tickets(0)[DONE, 0, 1] = 4 << 16
        rank.die()

    on_bells(2, "shared", body)


@both_kinds
def test_a_peer_that_dies_while_others_sleep_is_lost_at_once(kind: str) -> None:
    def body(rank: Rank) -> None:
        signal = Signal(ENTER, 0, 2, 0)
        if rank.rank == 2:
            time.sleep(0.2)
            rank.die()
            return
        rank.ring(signal)
        with quick(), pytest.raises(PeerLost) as caught:
            rank.wait(signal)
        error = caught.value
        assert (error.peer, error.phase, error.round) == (2, "dispatch.enter", 2)

    on_bells(3, kind, body)


@both_kinds
@pytest.mark.parametrize("timeout_s", [GLANCE_S / 4, 0.1])
def test_a_silent_peer_is_named_at_the_deadline(kind: str, timeout_s: float) -> None:
    def body(rank: Rank) -> None:
        signal = Signal(READY, 0, 3, 1)
        if rank.rank == 1:
            rank.ring(signal)
        rank.comm.barrier()
        if rank.rank == 0:
            with quick(), pytest.raises(PeerTimeout) as caught:
                rank.wait(signal, timeout_s=timeout_s)
            error = caught.value
            assert (error.rank, error.peer, error.phase) == (0, 2, "combine.ready")
            assert (error.round, error.waited_s) == (3, timeout_s)

    on_bells(3, kind, body)


@both_kinds
def test_an_error_of_another_rank_ends_a_sleep(kind: str) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            time.sleep(0.1)
            rank.mesh.record(ConfigError(what="x", got=1, wanted="2", rank=1))
            return
        with quick(), pytest.raises(ConfigError) as caught:
            rank.wait(Signal(ENTER, 0, 1, 0))
        assert caught.value.reporter == 1

    on_bells(3, kind, body)


@both_kinds
def test_a_reset_of_another_rank_ends_a_sleep(kind: str) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.bells.forget()
            rank.mesh.reset(timeout_s=ENOUGH_S)
        else:
            with quick(), pytest.raises(StateError, match="reset by rank 0"):
                rank.wait(Signal(ENTER, 0, 1, 0))
            rank.bells.forget()
            rank.mesh.reset(timeout_s=ENOUGH_S)
        rank.meet(Signal(ENTER, 0, 1, 0))

    on_bells(2, kind, body)


def facts(number: int) -> dict[str, Any]:
    return ConfigError(what="x", got=number, wanted="less").to_facts()


@both_kinds
def test_a_rank_that_declines_may_be_far_ahead(kind: str) -> None:
    """It waits for nobody, so all that it says must be there when the others come to it, one after the other."""
    num_declined = 7

    def body(rank: Rank) -> None:
        rank.meet(Signal(ENTER, 0, 1, 0))
        if rank.rank == 0:
            for number in range(2, 2 + num_declined):
                rank.bells.decline(Signal(ENTER, 0, number, 0), facts(number))
            rank.ring(Signal(ENTER, 0, 2 + num_declined, 0))
            rank.comm.barrier()
        else:
            rank.comm.barrier()
            for number in range(2, 2 + num_declined):
                signal = Signal(ENTER, 0, number, 0)
                rank.ring(signal)
                with quick():
                    heard = rank.wait(signal)
                assert heard[0] == DECLINED + json.dumps(facts(number)).encode()
                assert heard[3 - rank.rank] == SAME.body
            rank.ring(Signal(ENTER, 0, 2 + num_declined, 0))
        with quick():
            assert rank.wait(Signal(ENTER, 0, 2 + num_declined, 0)) == {}
        for number in range(3 + num_declined, 9 + num_declined):
            rank.meet(Signal(ENTER, 0, number, 0))
        assert not rank.mesh._inbox, "a decline that nobody asks for any more is kept"

    on_bells(3, kind, body)


@both_kinds
def test_what_a_slow_rank_has_not_heard_yet_stays(kind: str) -> None:
    """Ranks differ; one goes on, declines, and rings again while the slowest has not heard the first."""

    def body(rank: Rank) -> None:
        said = Said((rank.rank + 1,))
        rank.ring(Signal(ENTER, 0, 1, 0), said)
        rank.comm.barrier()
        if rank.rank == 0:
            assert len(rank.wait(Signal(ENTER, 0, 1, 0), said)) == 2
            rank.bells.decline(Signal(ENTER, 0, 2, 0), facts(2))
            rank.ring(Signal(ENTER, 0, 3, 0))
        rank.comm.barrier()
        if rank.rank:
            heard = rank.wait(Signal(ENTER, 0, 1, 0), said)
            assert words(heard[0]) == (1,) and words(heard[3 - rank.rank]) == (4 - rank.rank,)
            rank.ring(Signal(ENTER, 0, 2, 0))
            assert rank.wait(Signal(ENTER, 0, 2, 0))[0].startswith(DECLINED)
            rank.ring(Signal(ENTER, 0, 3, 0))
        assert rank.wait(Signal(ENTER, 0, 3, 0)) == {}

    on_bells(3, kind, body)


def test_two_that_decline_at_once_keep_nothing() -> None:
    def body(rank: Rank) -> None:
        for number in range(1, 200):
            rank.bells.decline(Signal(ENTER, 0, number, 0), facts(number))
            rank.comm.barrier()
            rank.mesh.pump(0)
            rank.comm.barrier()
        assert len(rank.mesh._inbox) <= 2

    on_bells(2, "shared", body)


def stamped(comm: Comm, num_rounds: int) -> None:
    """Every rank stamps a word at each peer before it rings: whoever has heard it sees the stamp of that round."""
    rank, size = comm.Get_rank(), comm.Get_size()
    config = ExchangeConfig(ep_size=size, max_num_tokens=1, top_k=1, num_experts=size, hidden_size=1)
    layout = WorkspaceLayout(config, control_regions(size))
    with contextlib.closing(Mesh(comm, PHASES, timeout_s=ENOUGH_S)) as mesh:
        workspace = shared_workspaces(layout.num_bytes + 8192, mesh, timeout_s=ENOUGH_S)
        bells = connect(workspace[:, : layout.num_bytes], layout, mesh, comm)
        assert isinstance(bells, SharedBells)
        stamps = workspace[:, layout.num_bytes + 128 : layout.num_bytes + 128 + 64 * size].view(torch.int64)
        stamps = stamps.view(size, size, 8).numpy()
        everyone, nothing = Active(range(size), rank, size), Said(())
        for number in range(1, num_rounds + 1):
            stamps[:, rank, :] = number
            bells.ring(Signal(DONE, 0, number, 0), nothing, everyone, ENOUGH_S)
            assert bells.wait(Signal(DONE, 0, number, 0), nothing, everyone, ENOUGH_S) == {}
            seen = stamps[rank]
            assert (seen == number).all(), f"round {number}: {seen.tolist()}"
            # Nobody stamps the next round before all have looked.
            bells.ring(Signal(ENTER, 0, number, 0), nothing, everyone, ENOUGH_S)
            assert bells.wait(Signal(ENTER, 0, number, 0), nothing, everyone, ENOUGH_S) == {}
        comm.barrier()


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_what_was_stored_before_a_bell_is_seen_after_it(run_ranks: Ranks, num_ranks: int) -> None:
    run_ranks(stamped, num_ranks, 2000)


def asleep(comm: Comm) -> tuple[float, float]:
    """Rank 1 comes a second late to a round; the others' processor time meanwhile."""
    case = Case(ep_size=comm.Get_size())
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        play(moe, draw(case, 1))
        if comm.Get_rank() == 1:
            moe.on_point(lambda point, number: time.sleep(point == "dispatch.signal"))
        started, spent = time.monotonic(), time.process_time()
        play(moe, draw(case, 2))
        return time.monotonic() - started, time.process_time() - spent


def test_waiting_in_a_round_sleeps(run_ranks: Ranks) -> None:
    for waited, spent in run_ranks(asleep, 4):
        assert waited >= 1 and spent < 0.4 * waited, f"{spent} s of processor time in {waited} s"


def retrying(comm: Comm) -> list[str]:
    """One rank's arguments are refused many times in a row, without a pause, while the others take their time."""
    case = Case(ep_size=comm.Get_size(), max_num_tokens=4)
    stories = []
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        ids = torch.zeros((1, case.top_k), dtype=torch.int32)
        for number in range(6):
            if comm.Get_rank() == 2:
                time.sleep(0.03)
            most = 99 if comm.Get_rank() == 0 and number != 3 else 4 if number != 3 else 1 + comm.Get_rank()
            with pytest.raises((ShapeError, MismatchError)) as caught:
                moe.dispatch(ids, [ids], most)
            error: A2AError = caught.value
            stories.append(error.story())
        play(moe, draw(case, 3))
    return stories


def test_refusals_in_a_row_are_told_to_everyone_in_turn(run_ranks: Ranks) -> None:
    told = run_ranks(retrying, 4)
    assert all(stories == told[0] for stories in told)
    assert len(set(told[0])) == 2 and "rank 3: 4" in told[0][3]


def test_threads_that_wait_on_one_memory_let_others_run() -> None:
    """A sleep holds no lock of the interpreter: contexts may have a thread each."""
    counted = threading.Event()

    def body(rank: Rank) -> None:
        signal = Signal(ENTER, 0, 1, 0)
        if rank.rank == 0:
            rank.ring(signal)
            assert rank.wait(signal) == {}
            assert counted.is_set()
        else:
            time.sleep(0.1)
            counted.set()
            rank.ring(signal)

    on_bells(2, "shared", body)
