"""An mpi4py communicator, in jobs of three ranks under the mpiexec that is installed beside this Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from a2a import env
from a2a.comm.launcher import without_launchers

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'a2a[mpi]'")

MPIEXEC = Path(sys.executable).parent / "mpiexec"
HERE = Path(__file__).parent


def mpirun(num_ranks: int, code: str) -> subprocess.CompletedProcess[str]:
    if not MPIEXEC.exists():
        pytest.skip(f"no mpiexec beside {sys.executable}: pip install 'a2a[mpi]'")
    return subprocess.run(
        [str(MPIEXEC), "-n", str(num_ranks), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**without_launchers(env.snapshot()), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )


def test_verbs_and_parts():
    done = mpirun(
        3,
        """
from mpi4py import MPI
from a2a.comm import resolve
from a2a.comm.mpi import MpiComm
from test_comm_protocol import verbs
given = resolve(MPI.COMM_WORLD, timeout_s=60)
found = resolve(None, timeout_s=60)
assert isinstance(given, MpiComm) and isinstance(found, MpiComm)
for comm in (given, found):
    seen = verbs(comm)
    assert seen[2] == [0, 1, 2], seen
part = resolve(MPI.COMM_WORLD.Split(int(MPI.COMM_WORLD.Get_rank() == 0), 0), timeout_s=60)
size = part.Get_size()
assert part.bcast(MPI.COMM_WORLD.Get_rank(), root=size - 1) == (0 if size == 1 else 2)
big = found.allgather(bytes([found.Get_rank()]) * 3_000_000)
assert [len(x) for x in big] == [3_000_000] * 3 and [x[-1] for x in big] == [0, 1, 2]
print(f"fine {found.Get_rank()}\\n", end="", flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["fine 0", "fine 1", "fine 2"]


def test_absent_rank_ends_the_wait_and_abort_ends_the_job():
    done = mpirun(
        3,
        """
import time
from a2a.comm import mpi, resolve
from a2a.errors import PeerTimeout
comm = resolve(None, timeout_s=0.5)
comm.barrier()
if comm.Get_rank() == 2:
    time.sleep(100)
try:
    comm.allgather(1)
except PeerTimeout as error:
    print(f"{error.rank} {error.phase} {error.round}\\n", end="", flush=True)
    time.sleep(0.5)  # for the other to print as well
    mpi.abort(7)
""",
    )
    assert done.returncode == 7, (done.returncode, done.stderr)
    assert sorted(line for line in done.stdout.split("\n") if "startup" in line) == ["0 startup 0", "1 startup 0"]


def test_launcher_of_another_mpi_is_refused():
    # The ranks are told of four by the variables, and MPI itself knows of one.
    code = """
from a2a.comm import resolve
environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
try:
    resolve(None, timeout_s=10, environ=environ)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**without_launchers(env.snapshot()), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "ConfigError" in done.stdout
    assert "got 1, wanted 4" in done.stdout


def test_failing_rank_ends_the_job_of_tests(tmp_path):
    (tmp_path / "test_fails.py").write_text("""
import time
def body(comm):
    if comm.Get_rank() == 1:
        raise ValueError("first traceback")
    time.sleep(100)
def test_body(run_ranks):
    run_ranks(body)
""")
    (tmp_path / "conftest.py").write_text("from tests_conftest import *\n")
    tests = HERE.parents[1]
    path = os.pathsep.join([str(tests), *sys.path])
    (tmp_path / "tests_conftest.py").write_text((tests / "conftest.py").read_text())
    for start, status in (
        ([str(MPIEXEC), "-n", "2", sys.executable, "-m", "pytest", "--with-mpi"], 1),
        ([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest"], 1),
    ):
        done = subprocess.run(
            [*start, "-p", "no:cacheprovider", "-q", "test_fails.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            env={**without_launchers(env.snapshot()), "PYTHONPATH": path},
        )
        assert done.returncode == status, done.stderr
        assert "ValueError: first traceback" in done.stderr, done.stderr
        assert "rank 1: test_fails.py::test_body (call) failed" in done.stderr
