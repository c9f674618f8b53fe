"""The barrier before a timed round: nobody passes before all have come, and who waits sleeps."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ranks import Ranks

from a2a.bench.barrier import meeting
from a2a.comm import Comm
from a2a.errors import PeerLost

ENOUGH_S = 30.0
"""Reached only by a test that fails."""


def passing(comm: Comm, num_rounds: int) -> list[tuple[float, float]]:
    """(come, passed) of every round, on the clock that all ranks read; ranks come late in turn."""
    times = []
    with meeting(comm, ENOUGH_S) as barrier:
        for number in range(num_rounds):
            if number % comm.Get_size() == comm.Get_rank():
                time.sleep(0.002)
            come = time.monotonic()
            barrier()
            times.append((come, time.monotonic()))
    return times


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_nobody_passes_before_all_have_come(run_ranks: Ranks, num_ranks: int) -> None:
    for number, of_ranks in enumerate(zip(*run_ranks(passing, num_ranks, 200), strict=True)):
        assert max(come for come, _ in of_ranks) <= min(passed for _, passed in of_ranks), f"round {number}"


def waiting(comm: Comm) -> tuple[float, float]:
    with meeting(comm, ENOUGH_S) as barrier:
        barrier()
        if comm.Get_rank() == 1:
            time.sleep(1.0)
        started, spent = time.monotonic(), time.process_time()
        barrier()
        return time.monotonic() - started, time.process_time() - spent


def test_who_waits_sleeps(run_ranks: Ranks) -> None:
    for rank, (waited, spent) in enumerate(run_ranks(waiting, 4)):
        if rank != 1:
            assert waited > 0.5 and spent < 0.2 * waited, f"rank {rank} spent {spent} s in a wait of {waited} s"


def dying(comm: Comm) -> str:
    with meeting(comm, ENOUGH_S) as barrier:
        barrier()
        if comm.Get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            barrier()
        return str(caught.value)


def test_who_dies_is_not_waited_for(run_ranks: Ranks) -> None:
    for outcome in run_ranks.outcomes(dying, 3):
        if outcome.rank == 2:
            assert outcome.exit_status == -signal.SIGKILL
        else:
            assert outcome.ok and "rank 2" in outcome.result, outcome.error
