"""The sanitizers find nothing in rounds of both regimes. They see one GPU: the order between two has its own test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest

PROGRAM: Final = Path(__file__).with_name("sanitized_rounds.py")
ROUNDS: Final = 50
SUMMARIES: Final = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: \d+ hazards? displayed \(0 errors, \d+ warnings?\)",
    "synccheck": r"ERROR SUMMARY: 0 errors",
}
_LIMIT_S: Final = 280


def _tool() -> str | None:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        wheels = Path(sysconfig.get_path("purelib")).glob("nvidia/**/compute-sanitizer")
        found = next((str(path) for path in sorted(wheels) if path.is_file()), None)
    return found


pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(2 * _LIMIT_S + 20),
    pytest.mark.skipif(_tool() is None, reason="no compute-sanitizer on PATH, in the CUDA toolkit or among the wheels"),
]


def _run(tool: str, mode: str) -> str:
    sanitizer = _tool()
    assert sanitizer is not None
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    if tool == "memcheck":
        # Driver bindings look up functions that an older driver lacks, and take the answer as that.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, str(PROGRAM), mode, str(ROUNDS)]
    done = subprocess.run(
        command, cwd=PROGRAM.parents[2], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    return f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("tool", SUMMARIES)
def test_nothing_is_found(tool: str) -> None:
    told = _run(tool, "streams")
    if re.search(r"'kind': [12]\b", told):
        # A wait ended by its deadline: this tool lets one kernel run at a time. Processes take turns all the same.
        told = _run(tool, "processes")
    summaries = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: .*", told)
    assert f"rounds played: {ROUNDS}" in told, told[-4000:]
    assert "exit status 0" in told and summaries, told[-4000:]
    assert all(re.search(SUMMARIES[tool], line) for line in summaries), summaries
