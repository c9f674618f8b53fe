"""Late, dead, leaving and racing ranks: every wait ends, with the right story, and nothing is left behind.

The named points are those of the host transport; its protocol is the one the others are held to.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from exchange_case import Case, draw, play
from ranks import Ranks

import a2a
from a2a.comm import Comm
from a2a.errors import A2AError, PeerLost, PeerTimeout, StateError, Unsupported
from a2a.host.transport import HostTransport

POINTS = HostTransport.POINTS

MISSED = {
    "dispatch.enter": ("dispatch.enter", 2),
    "dispatch.write": ("dispatch.done", 2),
    "dispatch.signal": ("dispatch.done", 2),
    "dispatch.wait": ("combine.ready", 2),
    "combine.stage": ("combine.ready", 2),
    "combine.signal": ("combine.ready", 2),
    "combine.wait": ("dispatch.enter", 3),
    "combine.sum": ("dispatch.enter", 3),
}
"""The first signal that does not come from a rank that stops at a point of round 2."""


def delayed(comm: Comm, seed: int, row_order: str) -> None:
    """Rounds stamped by their data while every rank sleeps at random points: nobody sees another round's rows."""
    case = Case(ep_size=comm.Get_size(), num_experts=9, row_order=row_order)
    chooser = random.Random(100 * seed + comm.Get_rank())
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        moe.on_point(lambda point, number: time.sleep(chooser.choice((0, 0, 0, 0.001, 0.01))))
        for number in range(40):
            play(moe, draw(case, 1000 * seed + number), poison=number % 2 == 0)


@pytest.mark.parametrize(("seed", "row_order"), [(1, "compact"), (2, "token")])
def test_no_rank_overtakes_another(run_ranks: Ranks, seed: int, row_order: str) -> None:
    run_ranks(delayed, 4, seed, row_order)


def slow(comm: Comm, point: str) -> str:
    """Rank 1 sleeps past the deadline: the others name it; then all reset and go on."""
    rank, case = comm.Get_rank(), Case(ep_size=comm.Get_size())
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        play(moe, draw(case, 0))
        moe.timeout_s = 1.0
        if rank == 1:
            moe.on_point(lambda at, number: time.sleep(3 if (at, number) == (point, 2) else 0))
        with pytest.raises(A2AError) as caught:
            for number in range(1, 3):
                play(moe, draw(case, number))
        with pytest.raises(type(caught.value)):
            # The error stays until all have reset.
            moe.check()
        moe.on_point(None)
        moe.reset(timeout_s=10)
        for number in range(3):
            play(moe, draw(case, 10 + number))
        if rank != 1:
            error = caught.value
            assert isinstance(error, PeerTimeout) and error.peer == 1 and error.waited_s == 1.0, error
            assert (error.phase, error.round) == MISSED[point], error
        return str(caught.value)


@pytest.mark.parametrize("point", POINTS)
def test_a_slow_peer_is_named_and_forgiven(run_ranks: Ranks, point: str) -> None:
    run_ranks(slow, 3, point)


def killed(comm: Comm, point: str) -> str:
    rank, case = comm.Get_rank(), Case(ep_size=comm.Get_size())
    moe = a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host")
    if rank == 2:
        moe.on_point(lambda at, number: os.kill(os.getpid(), signal.SIGKILL) if (at, number) == (point, 2) else None)
    play(moe, draw(case, 0))
    # Long before its deadline, which would be a PeerTimeout.
    with pytest.raises(PeerLost) as caught:
        for number in range(1, 3):
            # The round in which the rank died may still end where all its signals had been sent.
            play(moe, draw(case, number))
    error = caught.value
    assert error.peer == 2 and (error.phase, error.round) == MISSED[point], error
    with pytest.raises(PeerLost):
        moe.reset(timeout_s=3)
    moe.close()
    return str(error)


@pytest.mark.parametrize("point", POINTS)
def test_a_dead_peer_is_named_at_once(run_ranks: Ranks, point: str) -> None:
    outcomes = {each.rank: each for each in run_ranks.outcomes(killed, 4, point)}
    assert outcomes.pop(2).exit_status == -signal.SIGKILL
    for rank, outcome in outcomes.items():
        assert outcome.ok, outcome.error
        assert "rank 2" in outcome.result and "round" in outcome.result and "phase" in outcome.result
        assert f"rank {rank}" in outcome.result or "reported by" in outcome.result


def leaving(comm: Comm) -> None:
    """Rank 0 leaves right after its last round while the others are still in it: no error to anyone."""
    rank, case = comm.Get_rank(), Case(ep_size=comm.Get_size())
    moe = a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host")
    if rank:
        # All that rank 0 needs has been sent there; it is gone when the others go on.
        moe.on_point(lambda at, number: comm.barrier() if (at, number) == ("combine.wait", 3) else None)
    for number in range(3):
        play(moe, draw(case, number))
    if rank == 0:
        moe.close()
        comm.barrier()
        comm.barrier()
        return
    moe.check()
    # What rank 1 is about to record is announced to all: rank 2 looks before that.
    comm.barrier()
    if rank == 1:
        # Only who needs a signal beyond a goodbye is told.
        with pytest.raises(PeerLost) as caught:
            play(moe, draw(case, 4))
        assert caught.value.peer == 0 and caught.value.round == 4


def test_a_rank_that_leaves_after_its_last_round_is_no_error(run_ranks: Ranks) -> None:
    run_ranks(leaving, 3)


def failing_expert(comm: Comm) -> None:
    """An exception between dispatch and combine on one rank: the others learn of its reset and all go on."""
    rank, case = comm.Get_rank(), Case(ep_size=comm.Get_size())
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        for number in range(3):
            drawn = draw(case, number)
            mine, most = drawn.inputs[rank], drawn.runtime_max_tokens_per_rank
            moe.dispatch(mine.topk_ids, list(mine.payloads), most)
            if rank == 1:
                moe.reset()
            else:
                payload = torch.zeros(case.ep_size, most, 64, dtype=torch.bfloat16)
                with pytest.raises(StateError, match="reset by rank 1"):
                    moe.combine(payload, most)
                moe.reset()
            assert moe.state == "idle"
            play(moe, draw(case, 50 + number))


def test_an_exception_of_one_expert_is_left_by_reset(run_ranks: Ranks) -> None:
    run_ranks(failing_expert, 3)


def missing(comm: Comm) -> str:
    """A rank that never builds: the others' building ends by its deadline."""
    if comm.Get_rank() == 1:
        time.sleep(3)
        return "slept"
    with pytest.raises((PeerTimeout, PeerLost)) as caught:
        a2a.MoeAlltoAll(**Case(ep_size=3).constructor(), comm=None, transport="host", startup_timeout_s=1)
    return str(caught.value)


def test_building_has_a_deadline(run_ranks: Ranks) -> None:
    results = {each.rank: each for each in run_ranks.outcomes(missing, 3)}
    for rank in (0, 2):
        assert results[rank].ok, results[rank].error
        assert "startup" in results[rank].result


ALONE = """
import os, sys, time
import torch
import a2a
from a2a.errors import A2AError
moe = a2a.MoeAlltoAll(max_num_tokens=4, top_k=2, num_experts=8, hidden_size=64, transport="host")
ids = torch.tensor([[0, 7]], dtype=torch.int32)
rows = torch.ones((1, 64), dtype=torch.bfloat16)
number = 0
try:
    while True:
        views = moe.dispatch(ids, [rows, ids], 4)
        moe.combine(views[0].clone(), 4)
        number += 1
        if number == 20:
            print("ready", flush=True)
except A2AError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


def _start_four(port: int) -> list[subprocess.Popen[str]]:
    started = []
    for rank in range(4):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen([sys.executable, "-c", ALONE], env=variables, stdout=subprocess.PIPE, text=True)
        )
    return started


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_plain_processes_of_which_one_is_killed_leave_nothing_behind() -> None:
    """`kill -9` of one of four plain processes: the rest end non-zero, each with the story; no trace in /dev/shm."""
    before = sorted(os.listdir("/dev/shm"))
    for victim in (3, 0):
        ranks = _start_four(_free_port())
        try:
            for each in ranks:
                assert each.stdout is not None and each.stdout.readline().strip() == "ready"
            ranks[victim].kill()
            for rank, each in enumerate(ranks):
                said, _ = each.communicate(timeout=20)
                if rank == victim:
                    assert each.returncode == -signal.SIGKILL
                    continue
                assert each.returncode == 3 and said.startswith("PeerLost") and f"rank {victim}" in said, said
                assert "phase" in said and "round" in said, said
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
                    each.wait()
    assert sorted(os.listdir("/dev/shm")) == before
    assert not [each for each in psutil.Process().children(recursive=True) if "MoeAlltoAll(max" in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def many_on_two_cores(comm: Comm) -> None:
    case = Case(ep_size=comm.Get_size(), num_experts=64, top_k=8, hidden_size=256, max_num_tokens=4)
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        for number in range(5):
            play(moe, draw(case, number))


def test_sixteen_ranks_share_few_cores(run_ranks: Ranks) -> None:
    run_ranks(many_on_two_cores, 16)


def refused_memory(comm: Comm) -> str:
    """The kernel refuses one rank its memory: every rank raises, and the group can build again."""
    case = Case(ep_size=comm.Get_size())
    with pytest.MonkeyPatch.context() as patch:
        if comm.Get_rank() == 1:

            def refuse(*_: object) -> int:
                raise OSError(errno.ENOMEM, "planted")

            patch.setattr(os, "memfd_create", refuse)
        with pytest.raises((Unsupported, PeerLost)) as caught:
            a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host")
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
        play(moe, draw(case, 1))
    return type(caught.value).__name__


def test_memory_refused_to_one_rank_is_an_error_on_all(run_ranks: Ranks) -> None:
    assert run_ranks(refused_memory, 3)[1] == "Unsupported"
