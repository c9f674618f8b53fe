"""The two scripts, started as their docstrings say: they check themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from a2a import env
from a2a.comm.launcher import without_launchers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def told(*command: str) -> str:
    variables = without_launchers(env.snapshot())
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    variables["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_historical_api_under_mpirun() -> None:
    pytest.importorskip("mpi4py")
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python: the extra `mpi` is not installed")
    text = told(str(mpiexec), "-n", "2", sys.executable, str(HERE / "historical_two_ranks.py"))
    # mpiexec may put one rank's line into another's.
    assert text.count("rank 0: exact") == text.count("rank 1: exact") == 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moe_ep_under_torchrun(num_ranks: int) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    text = told(*launch, str(HERE / "moe_ep_two_ranks.py"))
    assert text.count(": exact with FlashInfer") == num_ranks
