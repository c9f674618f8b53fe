"""The GPU tests and the contract suite on GPUs, several pytest processes at a time: python tests/gpu/suite.py.

Most of what these tests take is compiling, starting processes and the oracle on the CPU, so they share the GPUs well;
those marked `alone` time or measure the device or run long on it, and come after the others, one by one.

    --shards N      pytest processes at a time (default: a fourth of the cores, at most 8)
    --logs DIR      one log per process (default: a temporary directory)
    --limit-s S     of either part (default 480)
    -k EXPRESSION   as pytest's
    --launchers L,L torchrun, mpirun: last, the contract suite once more, a rank per GPU under each
    PATH ...        of tests (default: tests/gpu tests/contract)

Processes share the cores and take turns at which GPU comes first.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("tests/gpu", "tests/contract")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_TIMED = (*_PYTEST, "--durations=15", "-rfE")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="suite", description="GPU tests and the contract suite on GPUs.")
    parser.add_argument("--shards", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 4)))
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("-k", default="")
    parser.add_argument("--launchers", type=lambda text: text.split(","), default=[])
    parser.add_argument("paths", nargs="*", default=PATHS)
    options = parser.parse_args(arguments)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="a2a-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    together, alone = (_collect(marker, options.k, options.paths) for marker in ("not alone", "alone"))
    if not together + alone:
        print("no test was found")
        return 1
    start = time.monotonic()
    shards = [together[number :: options.shards] for number in range(options.shards)]
    named = {f"shard-{number}": [*_TIMED, *ids] for number, ids in enumerate(shards) if ids}
    codes = _run(named, logs, options.limit_s)
    print(f"{len(together)} tests in {len(named)} processes: {time.monotonic() - start:.0f} s", flush=True)
    if alone:
        start = time.monotonic()
        codes += _run({"alone": [*_TIMED, *alone]}, logs, options.limit_s)
        print(f"{len(alone)} tests alone: {time.monotonic() - start:.0f} s", flush=True)
    for launcher in options.launchers:
        start = time.monotonic()
        command = _launched(launcher, max(2, torch.cuda.device_count()))
        codes += _run({launcher: command}, logs, options.limit_s)
        print(f"the contract under {launcher}: {time.monotonic() - start:.0f} s", flush=True)
    for log in sorted(logs.glob("*.log")):
        _tell(log)
    return 0 if not any(codes) else 1


def _collect(marker: str, expression: str, paths: Sequence[str]) -> list[str]:
    """Names of the tests for GPUs: all of tests/gpu, and those of the contract suite on a GPU transport."""
    command = [*_PYTEST, "--collect-only", "-m", marker, "-k", expression, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # 5: nothing matches.
    if done.returncode not in (0, 5):
        raise SystemExit(done.stdout + done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith(PATHS) and "::" in line]
    return [name for name in found if name.startswith("tests/gpu/") or "nvlink" in name]


def _run(commands: dict[str, list[str]], logs: Path, limit_s: float) -> list[int]:
    """Exit statuses of commands that run at the same time, each with a log of its name."""
    started = []
    for number, (name, command) in enumerate(commands.items()):
        with (logs / f"{name}.log").open("w") as log:
            environment = _share(number, len(commands))
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + limit_s
    codes = []
    for each in started:
        try:
            codes.append(each.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            # As from a keyboard: pytest then says what failed so far.
            each.send_signal(signal.SIGINT)
            codes.append(_end(each))
            print(f"ended after {limit_s:.0f} s: see its log", flush=True)
    return codes


def _launched(launcher: str, ranks: int) -> list[str]:
    """The command of the contract suite on GPUs with every rank a process of a launcher's job."""
    python, *pytest = [*_PYTEST, "-k", "nvlink", "tests/contract"]
    if launcher == "torchrun":
        return [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *pytest]
    if launcher == "mpirun":
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        # Open MPI alone minds who starts it.
        root = ["--allow-run-as-root"] if "Open MPI" in version and os.geteuid() == 0 else []
        return ["mpirun", *root, "-n", str(ranks), python, *pytest, "--with-mpi"]
    raise SystemExit(f"--launchers: {launcher!r} is neither torchrun nor mpirun")


def _share(number: int, count: int) -> dict[str, str]:
    """Environment of one process of several: its part of the cores, and the GPUs in an order of its own."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not gpus[0]:
        gpus = [str(index) for index in range(torch.cuda.device_count())]
    first = number % max(1, len(gpus))
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first]),
    }


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _tell(log: Path) -> None:
    """The last line, and what failed."""
    text = log.read_text(errors="replace")
    lines = text.rstrip().splitlines()
    print(f"{log.stem}: {lines[-1] if lines else 'no word'}")
    fine = (
        lines and re.fullmatch(r"[\d ,a-z]*(passed|skipped)[\d ,a-z.()]*s.*", lines[-1]) and "failed" not in lines[-1]
    )
    if not fine:
        print("\n".join(lines[-80:]))


if __name__ == "__main__":
    sys.exit(main())
