"""comm/spawn: N ranks as processes of this machine, for the command line and the tests.

Owns their start, their environment (torchrun's variables, and a store of the parent at which they meet), their
outcomes and their end. Refuses to know what they run.

Ranks are forked from one server process that has imported torch already, so a rank starts in milliseconds. They end
with their parent however it ends: each watches a pipe that closes with it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, process
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from a2a import env
from a2a.comm.launcher import without_launchers
from a2a.comm.local_store import LocalStoreServer
from a2a.errors import A2AError, ConfigError, PeerLost, PeerTimeout

GRACE_S: Final = 5.0
"""Seconds that the other ranks have, once one has failed, to end by themselves with errors of their own."""

_PHASE: Final = "run"
_PRELOAD: Final = ("torch", "torch.distributed", "a2a", "a2a.comm.store", "numba")
_TERMINATION_S: Final = 2.0
_NAMES_MAIN: Final = b"__main__"
"""In a pickle of something that the main script defines, which a rank then has to run to find it."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """How one rank ended: exactly one of `result` (then `ok`), `error` or neither (it died without a word).

    Attributes:
        rank: its rank.
        ok: it returned from the target.
        result: what the target returned.
        error: what the target raised, with its traceback as a note.
        exit_status: of the process; negative is the number of the signal that ended it; None while it runs.
        stopped: it was still running at the deadline or after the grace, and was ended by the parent.
        lines: number of lines it wrote, where they were read.
    """

    rank: int
    ok: bool = False
    result: Any = None
    error: BaseException | None = None
    exit_status: int | None = None
    stopped: bool = False
    lines: int = 0

    def signal_name(self) -> str | None:
        """Name of the signal that ended it, None if none did."""
        status = self.exit_status
        return signal.Signals(-status).name if status is not None and status < 0 else None


def run(
    target: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float,
    grace_s: float = GRACE_S,
    on_line: Callable[[int, str], None] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Calls `target(*args)` on `num_ranks` ranks of this machine; returns their results in rank order.

    Args:
        target: a function that can be imported by name; it and `args` are pickled. In it `comm=None` works.
        num_ranks: how many.
        args: equal for all ranks.
        timeout_s: deadline for all of it, start included.
        grace_s: see `GRACE_S`.
        on_line: called with (rank, line) for each line a rank writes to stdout or stderr, which otherwise are the
            parent's own.
        preload: further modules with which ranks are forked; counts for the first run of this process.

    Raises:
        The error of the rank that failed first, an error that tells of another rank's failure counting as later; its
        traceback is added as a note.
        PeerLost: a rank ended by a signal or by leaving without a result; a note says how.
        PeerTimeout: ranks that were still running at the deadline.
    """
    ended = outcomes(target, num_ranks, args, timeout_s=timeout_s, grace_s=grace_s, on_line=on_line, preload=preload)
    failed = [outcome for outcome in ended if not outcome.ok]
    if failed:
        raise _first_failure(failed, timeout_s)
    return [outcome.result for outcome in sorted(ended, key=lambda outcome: outcome.rank)]


def outcomes(
    target: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float,
    grace_s: float = GRACE_S,
    on_line: Callable[[int, str], None] | None = None,
    on_start: Callable[[list[int]], None] | None = None,
    preload: Sequence[str] = (),
) -> list[Outcome]:
    """Like `run`, and tells how every rank ended, in the order in which they did, instead of raising.

    Args:
        on_start: called with the process ids, by rank, once all ranks are started: for tests that kill one.
    """
    if num_ranks < 1:
        raise ConfigError(what="num_ranks", got=num_ranks, wanted="an integer >= 1")
    job = _Job(target, tuple(args), num_ranks, on_line)
    try:
        job.start(preload)
        if on_start is not None:
            on_start(job.process_ids())
        job.follow(time.monotonic() + timeout_s, grace_s)
    finally:
        job.end()
    return job.ended


class _Job:
    """The processes of one run."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        num_ranks: int,
        on_line: Callable[[int, str], None] | None,
    ) -> None:
        self._call = bytes(ForkingPickler.dumps((target, args)))
        self._num_ranks = num_ranks
        self._on_line = on_line
        self._processes: list[ForkServerProcess] = []
        self._results: dict[int, connection.Connection] = {}
        self._outputs: dict[int, _Lines] = {}
        self._running: dict[int, Outcome] = {}
        self._store: LocalStoreServer | None = None
        # Bound and never listening: keeps the port free for a rank 0 that makes a process group of torch's there.
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.ended: list[Outcome] = []

    def start(self, preload: Sequence[str]) -> None:
        context = _context(preload)
        self._store = LocalStoreServer()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        port = self._reserved.getsockname()[1]
        inherited = without_launchers(env.snapshot())
        for rank in range(self._num_ranks):
            receiving, sending = context.Pipe(duplex=False)
            output: connection.Connection | None = None
            if self._on_line is not None:
                lines, output = context.Pipe(duplex=False)
                self._outputs[rank] = _Lines(lines)
            variables = {**inherited, **_variables(rank, self._num_ranks, port, self._store)}
            child = context.Process(
                target=_rank_main, args=(self._call, variables, sending, output, self._num_ranks), name=f"rank {rank}"
            )
            if _NAMES_MAIN in self._call:
                child.start()
            else:
                with _hidden_main():
                    child.start()
            # The parent's copies must close, or the end of the rank would not show as the end of its pipes.
            sending.close()
            if output is not None:
                output.close()
            self._processes.append(child)
            self._results[rank] = receiving
            self._running[rank] = Outcome(rank=rank)

    def process_ids(self) -> list[int]:
        return [child.pid for child in self._processes if child.pid is not None]

    def follow(self, deadline: float, grace_s: float) -> None:
        """Until every rank has ended, or the deadline, or `grace_s` after the first failure."""
        while self._running:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            watched: dict[Any, int] = {self._processes[rank].sentinel: rank for rank in self._running}
            watched.update({self._results[rank]: rank for rank in self._running if not self._results[rank].closed})
            watched.update({lines.pipe: rank for rank, lines in self._outputs.items() if not lines.pipe.closed})
            for ready in connection.wait(list(watched), timeout=left):
                rank = watched[ready]
                if isinstance(ready, int):
                    continue
                if rank in self._outputs and ready is self._outputs[rank].pipe:
                    self._read_lines(rank)
                else:
                    self._read_result(rank)
            for rank in [rank for rank in self._running if self._processes[rank].exitcode is not None]:
                self._finish(rank)
                if not self.ended[-1].ok:
                    deadline = min(deadline, time.monotonic() + grace_s)

    def end(self) -> None:
        """Ends what still runs, by process id, and reaps it."""
        for rank in list(self._running):
            self._processes[rank].terminate()
        deadline = time.monotonic() + _TERMINATION_S
        for rank in list(self._running):
            child = self._processes[rank]
            child.join(max(0.0, deadline - time.monotonic()))
            if child.exitcode is None:
                child.kill()
                child.join()
            self._running[rank].stopped = True
            self._finish(rank)
        for child in self._processes:
            child.close()
        for receiving in self._results.values():
            receiving.close()
        for lines in self._outputs.values():
            lines.pipe.close()
        if self._store is not None:
            self._store.close()
        self._reserved.close()

    def _finish(self, rank: int) -> None:
        self._read_result(rank)
        if rank in self._outputs:
            self._read_lines(rank)
        outcome = self._running.pop(rank)
        outcome.exit_status = self._processes[rank].exitcode
        if outcome.exit_status and outcome.ok:
            outcome.ok = False
        self.ended.append(outcome)

    def _read_result(self, rank: int) -> None:
        receiving, outcome = self._results[rank], self._running[rank]
        if receiving.closed or not receiving.poll():
            return
        try:
            ok, content, notes = receiving.recv()
        except EOFError:
            receiving.close()
            return
        outcome.ok = ok
        if ok:
            outcome.result = content
        else:
            # Not every error's own pickle carries its notes.
            content.__notes__ = notes
            outcome.error = content

    def _read_lines(self, rank: int) -> None:
        lines = self._outputs[rank]
        for line in lines.read():
            if rank in self._running:
                self._running[rank].lines += 1
            if self._on_line is not None:
                self._on_line(rank, line)


class _Lines:
    """Whole lines out of a pipe to which a process writes bytes."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.pipe = pipe
        self._partial = b""

    def read(self) -> list[str]:
        """What has arrived; at the end of the stream also an unfinished last line."""
        while not self.pipe.closed and self.pipe.poll():
            chunk = os.read(self.pipe.fileno(), 65536)
            self._partial += chunk
            if not chunk:
                self.pipe.close()
                rest, self._partial = self._partial, b""
                return [line.decode(errors="replace") for line in rest.split(b"\n") if line]
        *whole, self._partial = self._partial.split(b"\n")
        return [line.decode(errors="replace") for line in whole]


class _hidden_main:
    """While a rank is started: hides the parent's main script, which a rank would otherwise run again for nothing."""

    def __enter__(self) -> None:
        main = sys.modules["__main__"]
        self._kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
        for name in self._kept:
            setattr(main, name, None)

    def __exit__(self, *exc_info: object) -> None:
        for name, value in self._kept.items():
            setattr(sys.modules["__main__"], name, value)


def _context(preload: Sequence[str]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Takes effect with the first rank of this process. What of this package the parent has loaded, ranks will need too.
    loaded = [name for name in sys.modules if name.startswith("a2a.") and not name.endswith("__main__")]
    present = [name for name in (*_PRELOAD, *preload) if importlib.util.find_spec(name) is not None]
    context.set_forkserver_preload([*present, *loaded])
    return context


def _variables(rank: int, num_ranks: int, port: int, store: LocalStoreServer) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "A2A_LOCAL_STORE": store.address,
    }


def _rank_main(
    call: bytes,
    variables: dict[str, str],
    sending: connection.Connection,
    output: connection.Connection | None,
    num_ranks: int,
) -> None:
    _end_with_parent()
    env.replace(variables)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        output.close()
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        target, args = pickle.loads(call)
        message = _packed(True, target(*args))
    except BaseException as error:
        sending.send_bytes(_packed_error(error))
        if isinstance(error, SystemExit):
            raise
        sys.exit(1)
    sending.send_bytes(message)


def _end_with_parent() -> None:
    parent = process.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _packed(ok: bool, content: Any, notes: Sequence[str] = ()) -> bytes:
    return pickle.dumps((ok, content, list(notes)))


def _packed_error(error: BaseException) -> bytes:
    notes = [*getattr(error, "__notes__", []), "".join(traceback.format_exception(error)).rstrip()]
    try:
        message = _packed(False, error, notes)
        pickle.loads(message)
    except Exception:
        # An error that does not survive pickling is told by its text.
        stand_in = RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        message = _packed(False, stand_in, notes)
    return message


def _first_failure(failed: list[Outcome], timeout_s: float) -> BaseException:
    own = [outcome for outcome in failed if not outcome.stopped and not _tells_of_another(outcome.error)]
    first = (own or [outcome for outcome in failed if not outcome.stopped] or failed)[0]
    if first.error is not None:
        first.error.add_note(f"raised on rank {first.rank}")
        return first.error
    if first.stopped:
        late = ", ".join(str(outcome.rank) for outcome in failed if outcome.stopped)
        return PeerTimeout(
            rank=first.rank,
            peer=first.rank,
            phase=_PHASE,
            round=0,
            waited_s=timeout_s,
            change=f"ranks that had not ended: {late}; look at what they do, or raise timeout_s",
        )
    lost = PeerLost(rank=first.rank, peer=first.rank, phase=_PHASE, round=0)
    how = first.signal_name() or f"exit status {first.exit_status}"
    lost.add_note(f"rank {first.rank} ended without a result: {how}")
    return lost


def _tells_of_another(error: BaseException | None) -> bool:
    return isinstance(error, (PeerLost, PeerTimeout)) or (isinstance(error, A2AError) and error.reporter is not None)
