"""The GPU tests and the contract suite on GPUs, several pytest processes at a time: python tests/gpu/suite.py.

Most of what these tests take is compiling, starting processes and the oracle on the CPU, so they share the GPUs well;
those marked `alone` time something or run long on the device, and come after the others, one by one.

    --shards N      pytest processes at a time (default: a fourth of the cores, at most 8)
    --logs DIR      one log per process (default: a temporary directory)
    --limit-s S     of either part (default 480)
    -k EXPRESSION   as pytest's
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("tests/gpu", "tests/contract")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="suite", description="GPU tests and the contract suite on GPUs.")
    parser.add_argument("--shards", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 4)))
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("-k", default="")
    options = parser.parse_args(arguments)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="a2a-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    together, alone = _collect("not alone", options.k), _collect("alone", options.k)
    if not together + alone:
        print("no test was found")
        return 1
    start = time.monotonic()
    shards = [together[number :: options.shards] for number in range(options.shards)]
    named = {f"shard-{number}": ids for number, ids in enumerate(shards) if ids}
    codes = _run(named, logs, options.limit_s)
    print(f"{len(together)} tests in {len(named)} processes: {time.monotonic() - start:.0f} s", flush=True)
    if alone:
        start = time.monotonic()
        codes += _run({"alone": alone}, logs, options.limit_s)
        print(f"{len(alone)} tests alone: {time.monotonic() - start:.0f} s", flush=True)
    for log in sorted(logs.glob("*.log")):
        _tell(log)
    return 0 if not any(codes) else 1


def _collect(marker: str, expression: str) -> list[str]:
    """Names of the tests for GPUs: all of tests/gpu, and those of the contract suite on a GPU transport."""
    command = [*_PYTEST, "--collect-only", "-m", marker, "-k", expression, *PATHS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # 5: nothing matches.
    if done.returncode not in (0, 5):
        raise SystemExit(done.stdout + done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith(PATHS) and "::" in line]
    return [name for name in found if name.startswith("tests/gpu/") or "nvlink" in name]


def _run(shards: dict[str, list[str]], logs: Path, limit_s: float) -> list[int]:
    started = []
    for name, ids in shards.items():
        with (logs / f"{name}.log").open("w") as log:
            command = [*_PYTEST, "--durations=10", "-rfE", *ids]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + limit_s
    codes = []
    for each in started:
        try:
            codes.append(each.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            each.terminate()
            codes.append(each.wait(30))
            print(f"ended after {limit_s:.0f} s: see its log", flush=True)
    return codes


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
