"""What the nvlink transport does around memory that goes and comes back, without a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_nvlink_failures import call, record, transport_of

from a2a.comm import Comm
from a2a.errors import PeerTimeout, Unsupported


class Memory:
    """Remembers what was asked of it, with how many rounds started before."""

    def __init__(self, refuses: bool = False) -> None:
        self.told: list[str] = []
        self._refuses = refuses

    def release(self) -> None:
        self.told.append("release")
        if self._refuses:
            raise Unsupported(transport="nvlink", reasons=("no",))

    def restore(self, comm: Comm, mesh: Any, *, timeout_s: float) -> None:
        self.told.append("restore")
        if self._refuses:
            raise Unsupported(transport="nvlink", reasons=("no memory",))


def _without_a_gpu() -> None:
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


def _the_listener_rests(comm: Comm) -> list[Any]:
    _without_a_gpu()
    made = transport_of(comm)
    memory = made._memory = Memory()  # type: ignore[assignment]
    made.dispatch(call(1))
    made._base = [7, 7]
    made.release(comm)
    # What a kernel had recorded just before is not looked at: masks are memory that is gone.
    record(made, 1, peer=1 - comm.Get_rank())
    time.sleep(0.3)
    quiet = made._mesh.error is None
    made.restore(comm, timeout_s=30.0)
    words = made._exchange.words[0]
    facts = [quiet, memory.told, made._base, int(words.recorded), made._starting_over, made._launched]
    # It listens again.
    record(made, 1, peer=1 - comm.Get_rank())
    with pytest.raises(PeerTimeout):
        made.check()
    comm.barrier()
    made.close()
    return facts


def test_the_listener_rests_while_memory_is_gone_and_rounds_start_over(run_ranks: Any) -> None:
    wanted = [True, ["release", "restore"], [0, 0], 0, False, {}]
    assert run_ranks(_the_listener_rests, 2) == [wanted] * 2


def _one_refuses(comm: Comm) -> list[Any]:
    _without_a_gpu()
    made = transport_of(comm)
    made._memory = Memory(refuses=comm.Get_rank() == 1)  # type: ignore[assignment]
    with pytest.raises(Unsupported) as caught:
        made.release(comm)
    listens = not made._starting_over
    comm.barrier()
    made.close()
    return [list(caught.value.reasons), caught.value.reporter, listens]


def test_memory_that_cannot_go_is_told_on_every_rank(run_ranks: Any) -> None:
    assert run_ranks(_one_refuses, 2) == [[["no"], 1, True], [["no"], None, True]]
