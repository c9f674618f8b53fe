"""The local spawn: results, the first failure, and nothing left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from descriptors import open_descriptors

from a2a import env
from a2a.comm import detect, resolve, spawn
from a2a.errors import ConfigError, PeerLost, PeerTimeout


@pytest.fixture(autouse=True)
def no_rank_left():
    yield
    assert not [child for child in psutil.Process().children(recursive=True) if is_rank(child)]


def is_rank(child: psutil.Process) -> bool:
    # Ranks are children of the fork server, which stays; itself and the resource tracker are children of this process.
    try:
        return child.status() != psutil.STATUS_ZOMBIE and child.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return False


def facts(word: str) -> object:
    found = detect(env.snapshot())
    comm = resolve(None, timeout_s=60)
    return word, found.rank, found.size, found.local_rank, found.local_size, torch.get_num_threads(), comm.Get_rank()


@pytest.mark.parametrize("num_ranks", [1, 3, 16])
def test_results_in_rank_order(num_ranks, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")  # of a launcher of the parent: none of the ranks' business
    monkeypatch.setenv("PMI_SIZE", "7")
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    assert spawn.run(facts, num_ranks, ("word",), timeout_s=120) == [
        ("word", rank, num_ranks, rank, num_ranks, threads, rank) for rank in range(num_ranks)
    ]


def first_fails() -> None:
    comm = resolve(None, timeout_s=60)
    if comm.Get_rank() == 1:
        raise ConfigError(what="hidden_size", got=7, wanted="8", rank=1)
    comm.Split(0).barrier()


def test_first_failure_is_raised_with_its_traceback():
    with pytest.raises(ConfigError) as error:
        spawn.run(first_fails, 3, timeout_s=60, grace_s=0.2)
    assert (error.value.what, error.value.got, error.value.rank) == ("hidden_size", 7, 1)
    notes = "\n".join(error.value.__notes__)
    assert "in first_fails" in notes
    assert "raised on rank 1" in notes


def consequence_first() -> None:
    rank = resolve(None, timeout_s=60).Get_rank()
    if rank == 0:
        raise PeerLost(rank=0, peer=1, phase="dispatch.wait", round=3)
    time.sleep(0.5)
    raise ValueError("the cause")


def test_errors_that_tell_of_another_rank_count_as_later():
    with pytest.raises(ValueError, match="the cause"):
        spawn.run(consequence_first, 2, timeout_s=60)


class Unpicklable(Exception):
    def __init__(self, a: int, b: int):
        super().__init__(f"{a} and {b}")


def unpicklable() -> None:
    raise Unpicklable(1, 2)


def test_error_that_cannot_be_pickled_is_told_by_its_text():
    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2") as error:
        spawn.run(unpicklable, 1, timeout_s=60)
    assert any("in unpicklable" in note for note in error.value.__notes__)


def killed(sig: int) -> str:
    comm = resolve(None, timeout_s=60)
    if comm.Get_rank() == 1:
        os.kill(os.getpid(), sig)
    return "survived"


def test_rank_that_dies_by_a_signal():
    with pytest.raises(PeerLost) as error:
        spawn.run(killed, 3, (signal.SIGKILL,), timeout_s=60)
    assert error.value.peer == 1
    assert error.value.__notes__ == ["rank 1 ended without a result: SIGKILL"]
    ended = {outcome.rank: outcome for outcome in spawn.outcomes(killed, 3, (signal.SIGSEGV,), timeout_s=60)}
    assert (ended[1].ok, ended[1].exit_status, ended[1].signal_name()) == (False, -signal.SIGSEGV, "SIGSEGV")
    assert [(ended[rank].ok, ended[rank].result, ended[rank].exit_status) for rank in (0, 2)] == [
        (True, "survived", 0)
    ] * 2


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def test_killed_from_outside_and_the_others_stopped_after_the_grace():
    def kill_rank_2(process_ids: list[int]) -> None:
        os.kill(process_ids[2], signal.SIGKILL)

    ended = spawn.outcomes(sleeps, 3, (600.0,), timeout_s=60, grace_s=0.2, on_start=kill_rank_2)
    assert ended[0].rank == 2
    assert (ended[0].stopped, ended[0].signal_name()) == (False, "SIGKILL")
    assert [(outcome.ok, outcome.stopped, outcome.signal_name()) for outcome in ended[1:]] == [
        (False, True, "SIGTERM")
    ] * 2


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def test_deadline(monkeypatch):
    monkeypatch.setattr(spawn, "_TERMINATION_S", 0.2)
    with pytest.raises(PeerTimeout, match="ranks that had not ended: 0, 1"):
        spawn.run(ignores_sigterm, 2, timeout_s=0.5)


def leaves(status: int) -> None:
    sys.exit(status)


def test_exit_without_a_result():
    (outcome,) = spawn.outcomes(leaves, 1, (3,), timeout_s=60)
    assert (outcome.ok, outcome.exit_status) == (False, 3)
    with pytest.raises(SystemExit):
        spawn.run(leaves, 1, (3,), timeout_s=60)


def hard_exit() -> None:
    os._exit(0)


def test_silent_exit_is_no_success():
    (outcome,) = spawn.outcomes(hard_exit, 1, timeout_s=60)
    assert (outcome.ok, outcome.error, outcome.exit_status) == (False, None, 0)


def writes() -> None:
    rank = env.snapshot()["RANK"]
    os.write(1, b"to stdout of " + rank.encode() + b"\n")
    print("to stderr", file=sys.stderr)
    print("\xe9" * 70000)
    print("unfinished", end="", flush=True)


def test_lines():
    seen: list[tuple[int, str]] = []
    spawn.run(writes, 2, timeout_s=60, on_line=lambda rank, line: seen.append((rank, line)))
    for rank in (0, 1):
        lines = [line for of, line in seen if of == rank]
        assert sorted(lines) == sorted([f"to stdout of {rank}", "to stderr", "\xe9" * 70000, "unfinished"])


def test_number_of_ranks():
    with pytest.raises(ConfigError, match="num_ranks"):
        spawn.run(sleeps, 0, (0.0,), timeout_s=1)


def test_descriptors_stay_flat():
    spawn.run(sleeps, 2, (0.0,), timeout_s=60)
    before = open_descriptors()
    for _ in range(5):
        spawn.run(sleeps, 2, (0.0,), timeout_s=60, on_line=lambda rank, line: None)
    assert open_descriptors() == before


PARENT = """
import os, signal, sys, time
from a2a.comm import spawn
# What a shell starts in the background has inherited to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
def tell(process_ids):
    print(*process_ids, flush=True)
if __name__ == "__main__":
    spawn.outcomes(time.sleep, 3, (600.0,), timeout_s=600, on_start=tell)
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, sig: int):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    try:
        ranks = [int(word) for word in parent.stdout.readline().split()]
        assert len(ranks) == 3
        family = psutil.Process(parent.pid).children(recursive=True)
        assert {child.pid for child in family} >= set(ranks)
        parent.send_signal(sig)
        assert parent.wait(timeout=30) != 0
    finally:
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    parent.stdout.close()


def test_target_of_the_main_script(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from a2a.comm import spawn\ndef here(x): return x + 1\n"
        "if __name__ == '__main__': print(spawn.run(here, 2, (1,), timeout_s=60))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[2, 2]"), done.stderr


def test_main_script_is_not_run_again_for_nothing(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nprint('started')\nfrom a2a.comm import spawn\n"
        "if __name__ == '__main__': spawn.run(time.sleep, 2, (0,), timeout_s=60)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
