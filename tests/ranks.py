"""How tests run on ranks, however the ranks were started.

A test takes the fixture `run_ranks` and gives it a module-level function, the body, which every rank calls:

    def body(comm, num_rounds):                     # comm: who the ranks are (a2a.comm.Comm)
        with a2a.MoeAlltoAll(..., comm=comm) as moe:
            ...
        return plain_facts                          # picklable

    def test_rounds(run_ranks):
        results = run_ranks(body, 4, 100)           # results of all ranks in rank order; 4 ranks, num_rounds=100
        assert ...

* `pytest`: each call starts its ranks as processes of this machine. `run_ranks(body)` and `run_ranks(body, None, ...)`
  take DEFAULT_RANKS of them. The error of the rank that failed first is raised in the test, its traceback as a note.
* `mpirun -n N python -m pytest --with-mpi`, `torchrun --nproc-per-node N -m pytest`: each process is a rank and calls
  the body itself. A call for another number of ranks than N (None fits every N) skips its test; tests without
  `run_ranks` are left out. A rank whose test fails prints its traceback and ends the whole job.
* `run_ranks.outcomes(body, num_ranks, *args, on_start=..., grace_s=...)` tells how each rank ended instead of raising,
  for tests that kill or stop ranks; under a launcher such a test is skipped, since it is not the test that starts them.

Everything a body uses must be importable by name; `assert` in it shows the line, not the values, so put what matters
into the message. Whether to skip is for the test to decide, not for a body. A test that draws at random must draw the
same on every rank of a job: hypothesis is made to here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from a2a import env
from a2a.comm import Comm, launcher, resolve, spawn

DEFAULT_RANKS = 4
TIMEOUT_S = 120.0
PRELOAD = ("pytest", "hypothesis")


class Ranks:
    """What the fixture `run_ranks` gives."""

    def __init__(self) -> None:
        self.launcher = launcher.detect(env.snapshot())
        self._comm: Comm | None = None

    @property
    def in_job(self) -> bool:
        """Whether this process is itself one rank of a launcher's job."""
        return self.launcher.kind != launcher.NONE and self.launcher.size != 1

    @property
    def num_job_ranks(self) -> int:
        return self._job().Get_size()

    def __call__(
        self, body: Callable[..., Any], num_ranks: int | None = None, *args: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        if not self.in_job:
            return spawn.run(
                _with_comm, num_ranks or DEFAULT_RANKS, (body, args, timeout_s), timeout_s=timeout_s, preload=PRELOAD
            )
        job = self._job()
        if num_ranks not in (None, job.Get_size()):
            pytest.skip(f"needs {num_ranks} ranks and the job has {job.Get_size()}")
        job.barrier()
        return job.allgather(body(job, *args))

    def outcomes(
        self,
        body: Callable[..., Any],
        num_ranks: int | None = None,
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        grace_s: float = spawn.GRACE_S,
        on_start: Callable[[list[int]], None] | None = None,
        on_line: Callable[[int, str], None] | None = None,
    ) -> list[spawn.Outcome]:
        """Outcomes in the order in which the ranks ended."""
        if self.in_job:
            pytest.skip("starts and ends its own ranks: runs under plain pytest")
        return spawn.outcomes(
            _with_comm,
            num_ranks or DEFAULT_RANKS,
            (body, args, timeout_s),
            timeout_s=timeout_s,
            grace_s=grace_s,
            on_start=on_start,
            on_line=on_line,
            preload=PRELOAD,
        )

    def _job(self) -> Comm:
        if self._comm is None:
            self._comm = resolve(None, timeout_s=TIMEOUT_S)
            _take_a_gpu(self._comm)
        return self._comm


def _with_comm(body: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
    comm = resolve(None, timeout_s=timeout_s)
    _take_a_gpu(comm)
    return body(comm, *args)


def _take_a_gpu(comm: Comm) -> None:
    """Ranks take this machine's GPUs in turn, so that any number of ranks runs on any number of GPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(comm.Get_rank() % torch.cuda.device_count())
