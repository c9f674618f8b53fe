"""Importing and `--help` with the base dependencies alone, and the checkers of types and style."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house_tree import ROOT

EXTRAS = ("numba", "llvmlite", "mpi4py", "rich", "cuda", "flashinfer", "matplotlib", "pytest", "hypothesis", "psutil")
"""What only extras of the package bring."""

BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

IMPORT = """
import json, os, sys
import torch, numpy
from collections.abc import MutableMapping

class Watched(MutableMapping):
    '''The environment, which remembers who asked.'''

    def __init__(self, held):
        self.held, self.asked = held, set()

    def __getitem__(self, name):
        self.note(name)
        return self.held[name]

    def __iter__(self):
        self.note("*")
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def __setitem__(self, name, value):
        self.note(name)
        self.held[name] = value

    def __delitem__(self, name):
        self.note(name)
        del self.held[name]

    def note(self, name):
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith("<frozen") or frame.f_globals.get("__name__") in ("os",):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] == "a2a":
            self.asked.add(name)

before = set(sys.modules)
os.environ = Watched(os.environ)
EXTRA
import a2a
print(json.dumps({
    "asked": sorted(os.environ.asked),
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "threads": __import__("threading").active_count(),
}))
"""


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT / "tests", env=environ
    )


def imported(extra: str = "") -> dict[str, object]:
    import json

    ended = run(IMPORT.replace("EXTRA", extra), A2A_TIMEOUT_S="nonsense", A2A_UNHEARD_OF="1")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def test_importing_starts_nothing_and_reads_no_environment() -> None:
    found = imported()
    assert found["asked"] == []
    modules = found["modules"]
    assert isinstance(modules, list) and "a2a.alltoall" in modules
    heavy = {"torch._dynamo", "torch._inductor", *EXTRAS}
    assert not heavy & {*modules, *(name.partition(".")[0] for name in modules)}
    assert not [name for name in modules if name.startswith(("a2a.nvlink", "a2a.host", "a2a.bench", "a2a.cli"))]
    assert found["cuda"] is False and found["group"] is False and found["threads"] == 1


def test_a_module_that_reads_the_environment_is_seen() -> None:
    spy = "exec(compile('import os; os.environ.get(\"PATH\"); dict(os.environ)', 'x', 'exec'), {'__name__': 'a2a.spy'})"
    asked = imported(spy)["asked"]
    assert isinstance(asked, list) and {"PATH", "*"} <= set(asked)


def test_import_and_help_work_with_the_base_dependencies_alone() -> None:
    help_of = BLOCKED + "import runpy\nsys.argv = ['a2a', *sys.argv[1:]]\nrunpy.run_module('a2a', run_name='__main__')"
    for arguments in (["--help"], ["bench", "--help"]):
        ended = run(help_of, *arguments)
        assert ended.returncode == 0, ended.stderr
        assert "usage" in ended.stdout.lower()


def test_the_block_is_one() -> None:
    for name in ("numba", "rich.table"):
        ended = run(BLOCKED + f"import {name}")
        assert ended.returncode == 1 and "No module named" in ended.stderr


def test_every_module_of_the_core_imports_without_extras() -> None:
    modules = sorted(
        path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
        for room in ("", "quant", "host", "comm")
        for path in (ROOT / "a2a" / room).glob("*.py")
        if path.name not in ("__init__.py", "__main__.py", "mpi.py") and not path.name.startswith("numba_")
    )
    assert len(modules) > 20
    ended = run(BLOCKED + "import importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)", *modules)
    assert ended.returncode == 0, ended.stderr


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ruff", *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.timeout(600)
def test_types() -> None:
    ended = mypy()
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_style() -> None:
    for command in (("check",), ("format", "--check")):
        ended = ruff(*command, "--no-cache", ".")
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_checkers_find_something(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import os\n\n\ndef f(a):\n    return a + 1\n")
    found = mypy("--cache-dir", str(tmp_path / "cache"), str(wrong))
    assert found.returncode == 1 and "missing a type annotation" in found.stdout, found.stdout
    config = ("--no-cache", "--config", str(ROOT / "pyproject.toml"), str(wrong))
    found = ruff("check", *config)
    assert found.returncode == 1 and "F401" in found.stdout, found.stdout
    wrong.write_text("x  = 1\n")
    found = ruff("format", "--check", *config)
    assert found.returncode == 1 and "wrong.py" in found.stdout, found.stdout
