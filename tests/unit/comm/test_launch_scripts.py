"""The files under launch/: what they start, with which variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from a2a import env
from a2a.comm import detect
from a2a.comm.launcher import VARIABLES, without_launchers

LAUNCH = Path(__file__).parents[3] / "launch"

TELL_COMMAND = '#!/bin/sh\necho "python $@"\n'
"""Stands for the interpreter: says what it was asked to run."""

SRUN = """#!/bin/sh
shift
for rank in 0 1 2; do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=3 "$@" &
done
wait
"""
SCONTROL = '#!/bin/sh\ntest "$1 $2 $3" = "show hostnames node[7-8]" && printf "localhost\\nnode8\\n"\n'

MEETS = """#!{python}
import sys
assert sys.argv[1:4] == ["-m", "a2a", "check"], sys.argv
from a2a.comm import resolve
comm = resolve(None, timeout_s=60)
print(f"rank {{comm.Get_rank()}} of {{comm.allgather(comm.Get_rank())}}\\n", end="", flush=True)
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def start(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**without_launchers(env.snapshot()), "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )


@pytest.mark.parametrize("script", ["torchrun.sh", "mpirun.sh", "slurm.sbatch"])
def test_scripts_are_sound_and_say_how_they_are_used(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)
    done = start(script)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_torchrun(tmp_path):
    python = str(executable(tmp_path / "python", TELL_COMMAND))
    run = "python -m torch.distributed.run "
    done = start("torchrun.sh", "3", "check", "--seed", "1 2", PYTHON=python)
    assert done.stdout == run + "--standalone --nproc-per-node 3 -m a2a check --seed 1 2\n"
    done = start("torchrun.sh", "3", "check", PYTHON=python, NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    assert done.stdout == (
        run + "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 --nproc-per-node 3 -m a2a check\n"
    )
    done = start("torchrun.sh", "3", "check", PYTHON=python, NNODES="2", NODE_RANK="1")
    assert done.returncode != 0
    assert "set MASTER_ADDR" in done.stderr


def test_mpirun(tmp_path):
    python = str(executable(tmp_path / "python", MEETS.format(python=sys.executable)))
    executable(tmp_path / "mpiexec", '#!/bin/sh\necho "mpiexec $@"\n')
    done = start("mpirun.sh", "3", "check", "--rounds", "2", PYTHON=python, MPIEXEC_OPTIONS="-l -v")
    assert done.stdout == f"mpiexec -n 3 -l -v {python} -m a2a check --rounds 2\n"
    (tmp_path / "mpiexec").unlink()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    done = start("mpirun.sh", "3", "check", PYTHON=python, PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert "pip install 'a2a[mpi]'" in done.stderr


def test_slurm(tmp_path):
    executable(tmp_path / "srun", SRUN)
    executable(tmp_path / "scontrol", SCONTROL)
    python = str(executable(tmp_path / "python", MEETS.format(python=sys.executable)))
    done = start(
        "slurm.sbatch",
        "check",
        PYTHON=python,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_PROCID="0",
        SLURM_NTASKS="3",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {rank} of [0, 1, 2]" for rank in range(3)], done.stderr


def test_kubernetes():
    text = (LAUNCH / "kubernetes.yaml").read_text()
    settings = dict(re.findall(r'- name: ([A-Z_]+)\n\s+value: "?([^"\s]+)"?', text))
    numbers = dict(re.findall(r"^  (\w+): (\d+)", text, flags=re.MULTILINE))
    assert numbers["completions"] == numbers["parallelism"] == settings["WORLD_SIZE"]
    for index in range(int(numbers["completions"])):
        found = detect({"JOB_COMPLETION_INDEX": str(index), **settings})
        assert (found.kind, found.rank, found.size) == ("kubernetes", index, int(settings["WORLD_SIZE"]))
        assert (found.master_address, found.master_port) == ("a2a-0.a2a", 29500)
    assert f"port: {settings['MASTER_PORT']}" in text


def test_readme_names_every_variable_that_is_read():
    told = (LAUNCH / "README.md").read_text()
    missing = [name for name in VARIABLES if f"`{name}" not in told]
    # The address and port are written as one word.
    assert missing == [] or missing == ["MASTER_PORT"], missing
