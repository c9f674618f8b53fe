"""Every example, run as its docstring says: it checks itself, tells something and ends with 0."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from a2a import env
from a2a.comm.launcher import without_launchers

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60

TELLS = {
    "01_two_ranks": "combined on rank 0           [0.0, 4.0, 4.0]",
    "02_quantised_dispatch": "nvfp4       128 bytes of data,  16 of scales",
    "03_two_contexts": "dispatch 0, dispatch 1, combine 0, dispatch 2",
    "04_payloads_and_ids": "target ranks         [[0, 1, 3], [0, -1, 3], [-1, 1, -1], [-1, -1, -1]]",
    "05_moe_layer": "output equals the dense layer",
    "06_errors_and_reset": "rank 2 is gone; its signal",
    "07_mxfp8_layer": "16 tokens: compiled equals eager",
    "08_vllm": "each token is the sum of what its experts made of it",
    "09_sglang": "rank 1 brought 0 tokens and has them back",
    "10_tensorrt_llm": "picks of each slot by rank: [[3, 0, 0, 0, 3], [5, 0, 0, 0, 5]]",
}


def told(*command: str) -> str:
    """What a command writes to stdout, without this run's own launcher; the checkout is importable in it."""
    variables = without_launchers(env.snapshot())
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_examples_are_numbered_short_and_known() -> None:
    assert [each.stem for each in EXAMPLES] == list(TELLS)
    for number, example in enumerate(EXAMPLES, start=1):
        text = example.read_text()
        assert example.name.startswith(f"{number:02}_")
        assert len(text.splitlines()) <= MAX_LINES, example
        assert f"python examples/{example.name}" in text, "the docstring says how to run it"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example(example: Path) -> None:
    assert TELLS[example.stem] in told(sys.executable, str(example))


def test_an_example_whose_check_fails_ends_with_an_error(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "01_two_ranks.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("torch.mul(received, 2,", "torch.mul(received, 3,"))
    assert broken.read_text() != text
    with pytest.raises(AssertionError, match=r"(?s)exit 1.*torch\.equal\(combined"):
        told(sys.executable, str(broken))


def test_example_under_mpiexec() -> None:
    pytest.importorskip("mpi4py")
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python: the extra `mpi` is not installed")
    example = "examples/01_two_ranks.py"
    assert TELLS["01_two_ranks"] in told(str(mpiexec), "-n", "2", sys.executable, example)


def test_example_under_torchrun() -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert TELLS["05_moe_layer"] in told(*launch, "examples/05_moe_layer.py", "gpt-oss-120b")
