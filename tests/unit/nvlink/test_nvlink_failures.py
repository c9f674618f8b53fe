"""How failures travel between ranks, with what kernels would write down put there by the test: no GPU is needed."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks

from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.config import ExchangeConfig
from a2a.errors import A2AError, MismatchError, PeerLost, PeerTimeout, ShapeError
from a2a.nvlink import transport as room
from a2a.nvlink.params import HostWords
from a2a.nvlink.transport import NvlinkTransport

CONFIG = {"max_num_tokens": 8, "top_k": 2, "num_experts": 8, "hidden_size": 64, "num_contexts": 2}
NO_RANK = 0xFFFFFFFF


class Launches:
    """In place of the kernels: words without a device, and what was launched."""

    def __init__(self, num_contexts: int) -> None:
        self.words = tuple(HostWords() for _ in range(num_contexts))
        self.played = [0] * num_contexts
        self.calls: list[Any] = []

    def dispatch(self, call: Any) -> None:
        self.calls.append(call)
        self.played[call.context] += 1

    combine = dispatch

    def abort(self, reason: int) -> None:
        for words in self.words:
            words.abort = words.abort or reason

    def retract(self, reason: int) -> None:
        for words in self.words:
            if words.abort == reason and not words.recorded:
                words.abort = 0

    def busy(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def rounds(self) -> list[int]:
        return self.played

    def start_over(self, rounds: Sequence[int]) -> None:
        self.played = list(rounds)
        for words in self.words:
            words.recorded = words.kind = words.abort = 0


def transport_of(comm: Comm) -> NvlinkTransport:
    """A transport as its constructor leaves it, but for the GPU."""
    made = NvlinkTransport.__new__(NvlinkTransport)
    made.rank = comm.Get_rank()
    made.workspace = torch.empty((comm.Get_size(), 0), dtype=torch.uint8)
    made._config = ExchangeConfig(ep_size=comm.Get_size(), **CONFIG)
    made._closed = made._starting_over = False
    made._looking = threading.Lock()
    made._base, made._launched, made._told = [0, 0], {}, {}
    phases = (*room._DECLINED.values(), *room._FACTS.values(), room._PLAYED, room._READY)
    made._mesh = Mesh(comm, phases, timeout_s=30.0)
    made._exchange = Launches(2)  # type: ignore[assignment]
    made._memory = SimpleNamespace()  # type: ignore[assignment]
    made._stop = threading.Event()
    made._thread = threading.Thread(target=room._listen, args=(made._mesh, made._stop, weakref.ref(made)), daemon=True)
    made._thread.start()
    return made


def call(round: int, *, context: int = 0, most: int = 4) -> Any:
    payload = SimpleNamespace(row_bytes=128)
    return SimpleNamespace(
        context=context,
        round=round,
        runtime_max_tokens_per_rank=most,
        payloads=(payload,),
        eplb_local_stats=None,
        quantize=None,
    )


def record(made: NvlinkTransport, kind: int, *, context: int = 0, peer: int = 0, round: int = 1, **more: int) -> None:
    """What a kernel does."""
    words = made._exchange.words[context]
    words.kind, words.phase, words.peer, words.round = kind, 1, peer, round
    for name, value in more.items():
        setattr(words, name, value)
    words.recorded = 1


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def error_of(made: NvlinkTransport) -> A2AError:
    caught: list[A2AError] = []

    def raises() -> bool:
        try:
            made.check()
        except A2AError as error:
            caught.append(error)
        return bool(caught)

    until(raises, "no error")
    return caught[0]


def late(comm: Comm) -> tuple[dict[str, Any], list[int], list[int]]:
    made = transport_of(comm)
    for context in range(2):
        made.dispatch(call(1, context=context))
    # One rank is a round ahead in its second context.
    if made.rank == 2:
        made.dispatch(call(2, context=1))
    comm.barrier()
    if made.rank == 1:
        record(made, 1, context=1, peer=2, round=1, waited_us=2_000_000)
    until(lambda: all(words.abort for words in made._exchange.words), "waits of all contexts end")
    error = error_of(made)
    with pytest.raises(PeerTimeout):
        made.check()
    made.reset(timeout_s=20)
    made.check()
    aborts = [int(words.abort) for words in made._exchange.words]
    base = list(made._base)
    # The rounds that a kernel counts go on; those that a user counts start again.
    comm.barrier()
    if made.rank == 0:
        record(made, 1, context=1, peer=1, round=base[1] + 1, waited_us=1)
    again = error_of(made)
    assert isinstance(again, PeerTimeout) and again.round == 1, again
    comm.barrier()
    made.close()
    return error.to_facts(), aborts, base


def test_a_timeout_reaches_all_and_reset_forgets_it(run_ranks: Ranks) -> None:
    for rank, (facts, aborts, base) in enumerate(run_ranks(late, 3)):
        told = (facts["kind"], facts["rank"], facts["peer"], facts["phase"], facts["round"], facts["waited_s"])
        assert told == ("PeerTimeout", 1, 2, "dispatch", 1, 2.0)
        assert facts["reporter"] == (None if rank == 1 else 1)
        assert aborts == [0, 0] and base == [2, 3]


def disagreeing(comm: Comm) -> tuple[str, dict[int, object]]:
    made = transport_of(comm)
    made.dispatch(call(1, most=4 + (made.rank == 2)))
    comm.barrier()
    if made.rank != 1:
        # Rank 1's kernel has seen nothing yet; it is asked all the same.
        record(made, 3, peer=2 - made.rank, seen=5, wanted=4)
    error = error_of(made)
    assert isinstance(error, MismatchError), error
    comm.barrier()
    made.close()
    return error.what, dict(error.values)


def test_a_disagreement_has_every_ranks_value(run_ranks: Ranks) -> None:
    for what, values in run_ranks(disagreeing, 3):
        assert what == "runtime_max_tokens_per_rank in dispatch"
        assert values == {0: 4, 1: 4, 2: 5}


def declining(comm: Comm) -> str:
    made = transport_of(comm)
    refusal = ShapeError(what="R", got=9, wanted="at most 8", rank=0)
    made.dispatch(call(1))
    comm.barrier()
    # Heard before the launch: refused without one, and nobody has to reset.
    if made.rank == 0:
        made.decline("dispatch", 0, 2, 0, refusal.to_facts())
    comm.barrier()
    if made.rank:
        until(lambda: made._mesh.arrived("dispatch.declined", 0, 2), "the refusal arrives")
        with pytest.raises(ShapeError) as caught:
            made.dispatch(call(2))
        assert caught.value.reporter == 0 and len(made._exchange.calls) == 1
    made.check()
    comm.barrier()
    # Heard after it: the kernels' waits end, and all learn it.
    if made.rank:
        made.dispatch(call(3))
    comm.barrier()
    if made.rank == 0:
        made.decline("dispatch", 0, 3, 0, refusal.to_facts())
    error = error_of(made)
    assert isinstance(error, ShapeError), error
    until(lambda: made._exchange.words[0].abort == NO_RANK, "waits end")
    comm.barrier()
    made.close()
    return error.story()


def test_a_refused_argument_ends_the_round_of_all(run_ranks: Ranks) -> None:
    assert len(set(run_ranks(declining, 3))) == 1


def leaving(comm: Comm) -> None:
    made = transport_of(comm)
    made.dispatch(call(1))
    comm.barrier()
    if made.rank == 2:
        made.close()
        return
    until(lambda: 2 in made._mesh.lost, "the goodbye arrives")
    time.sleep(3 * room._LOOK_S)
    # Its signals have all been given: nothing is wrong until one more is needed.
    made.check()
    assert not any(words.abort for words in made._exchange.words)
    if made.rank == 0:
        until(lambda: 1 in made._mesh.lost, "the other one leaves too")
        with pytest.raises(PeerLost) as caught:
            made.dispatch(call(2))
        assert caught.value.peer == 1 and caught.value.round == 2 and len(made._exchange.calls) == 1
    made.close()


def test_a_goodbye_is_no_failure(run_ranks: Ranks) -> None:
    run_ranks(leaving, 3)


def dying(comm: Comm) -> dict[str, Any]:
    made = transport_of(comm)
    made.dispatch(call(1))
    comm.barrier()
    if made.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if made.rank == 0:
        until(lambda: all(words.abort == 3 for words in made._exchange.words), "waits end, for the lost rank's sake")
        # A round whose signals had all come is none the worse.
        made.check()
        record(made, 2, peer=2)
    error = error_of(made)
    made.close()
    return error.to_facts()


def test_a_dead_rank_ends_waits(run_ranks: Ranks) -> None:
    outcomes = {each.rank: each for each in run_ranks.outcomes(dying, 3, grace_s=20.0)}
    assert outcomes.pop(2).exit_status == -signal.SIGKILL
    for outcome in outcomes.values():
        assert outcome.ok, outcome.error
        assert outcome.result["kind"] == "PeerLost" and outcome.result["peer"] == 2


def masking(comm: Comm) -> list[int]:
    made = transport_of(comm)
    made.dispatch(call(1))
    comm.barrier()
    if made.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: all(words.abort == 3 for words in made._exchange.words), "waits end, for the lost rank's sake")
    # Masked since: the survivors may wait for each other again.
    made._needed = lambda context: {0, 1}  # type: ignore[method-assign]
    made.dispatch(call(2))
    aborts = [int(words.abort) for words in made._exchange.words]
    time.sleep(0.3)
    made.check()
    aborts += [int(words.abort) for words in made._exchange.words]
    made.close()
    return aborts


def test_a_lost_rank_that_is_masked_ends_no_waits(run_ranks: Ranks) -> None:
    outcomes = {each.rank: each for each in run_ranks.outcomes(masking, 3, grace_s=20.0)}
    for rank in (0, 1):
        assert outcomes[rank].ok and outcomes[rank].result == [0, 0, 0, 0], outcomes[rank].error


def collected(comm: Comm) -> bool:
    made = transport_of(comm)
    thread, exchange = made._thread, made._exchange
    del made
    thread.join(10)
    # Nobody closed it: the thread has ended, and kernels that still wait are told to.
    return not thread.is_alive() and all(words.abort == NO_RANK for words in exchange.words)


def test_a_transport_that_is_dropped_ends_its_thread(run_ranks: Ranks) -> None:
    assert run_ranks(collected, 2) == [True, True]
