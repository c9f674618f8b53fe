"""Where code finds this package when it looks for FlashInfer: absent, or as small stand-ins of its two generations."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from a2a import env

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"

ABSENT = """
import sys

class Absent:
    '''A machine without FlashInfer, wherever these tests run.'''
    def find_spec(self, name, path=None, target=None):
        return None

import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name == "flashinfer" else found(name, path, target)
)
"""

PROBES = """
import importlib, importlib.util, json

def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

def holds(module, *names):
    try:
        held = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(held, name) for name in names)

def probes():
    '''What engines ask before they take one of FlashInfer's parts.'''
    return {
        "comm": has("flashinfer") and has("flashinfer.comm"),
        "one_sided": holds("flashinfer.moe_ep", "BootstrapConfig", "MoEEpCommParams", "NVLinkOneSidedAlltoAll",
                           "NVLinkOneSidedConfig", "create_communication")
        and hasattr(importlib.import_module("flashinfer.moe_ep").MoEEpCommParams, "dispatch_format"),
        "historical": holds("flashinfer.comm", "MoeAlltoAll", "moe_a2a_get_workspace_size_per_rank"),
        "two_sided": holds("flashinfer.comm", "Mapping") and holds("flashinfer.comm.mnnvl", "MnnvlMemory")
        and holds("flashinfer.comm.trtllm_alltoall", "MnnvlMoe", "MoEAlltoallInfo"),
        "fused_moe": has("flashinfer.fused_moe"),
        "cute_dsl": has("flashinfer.cute_dsl"),
        "gemm": has("flashinfer.gemm") or holds("flashinfer.gemm", "mm_bf16_fp4"),
        "bf16_gemm": holds("flashinfer", "mm_bf16"),
        "autotune": holds("flashinfer", "autotune_v2") or has("flashinfer.autotuner"),
        "attention": any(has(f"flashinfer.{name}") for name in ("decode", "prefill", "mla", "kda")),
        "allreduce": holds("flashinfer.comm", "allreduce_fusion") or has("flashinfer.comm.trtllm_ar"),
        "norm": holds("flashinfer", "rmsnorm") or has("flashinfer.norm"),
        "cubin": has("flashinfer_cubin"),
    }
"""


def run(code: str, *paths: Path, **variables: str) -> str:
    """What a fresh interpreter says to the code."""
    environ = {key: value for key, value in env.snapshot().items() if not key.startswith("A2A_")}
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), str(ROOT), environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={**environ, **variables}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


INSTALL = "from a2a.integrations.flashinfer import install\ninstall(); install()\n"


def test_without_the_library_only_the_exchange_is_found() -> None:
    code = ABSENT + PROBES + "assert not any(probes().values()), probes()\n" + INSTALL + "print(json.dumps(probes()))"
    found = {name for name, there in __import__("json").loads(run(code)).items() if there}
    assert found == {"comm", "one_sided", "historical"}


def test_stand_ins_are_modules_like_others() -> None:
    code = (
        ABSENT
        + INSTALL
        + """
import importlib, sys
import a2a.integrations.flashinfer as ours
import flashinfer, flashinfer.comm, flashinfer.moe_ep
import flashinfer.comm.trtllm_moe_alltoall as historical
from flashinfer.comm import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import CommBackend, MnnvlConfig
from flashinfer import mxfp8_quantize, nvfp4_block_scale_interleave
assert historical is ours is sys.modules["flashinfer.comm.trtllm_moe_alltoall"]
assert ours.__spec__.name == ours.__name__ == "a2a.integrations.flashinfer"
assert MoeAlltoAll is ours.MoeAlltoAll and Mapping is ours.Mapping and MnnvlConfig is ours.MnnvlConfig
for module in (flashinfer, flashinfer.comm, flashinfer.moe_ep):
    assert module.__path__ == [] and module.__spec__.name == module.__name__, module
    assert module.__spec__.loader is module.__loader__ and module.__spec__.submodule_search_locations == []
    assert importlib.util.find_spec(module.__name__) is module.__spec__
    assert importlib.reload(module) is module
assert flashinfer.comm.MoeAlltoAll is ours.MoeAlltoAll
for name in ("gemm", "fused_moe", "comm.trtllm_alltoall", "comm.allreduce", "moe_ep.config", "jit", "a2a"):
    try:
        importlib.import_module(f"flashinfer.{name}")
    except ImportError as error:
        assert error.name == f"flashinfer.{name}", error
    else:
        raise AssertionError(name)
try:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper
except ImportError:
    print("ok")
"""
    )
    assert run(code) == "ok\n"


GENERATIONS = {
    "0.7.2": {
        "__init__.py": "from . import comm\n",
        "comm/__init__.py": "from .trtllm_moe_alltoall import MoeAlltoAll as MoeAlltoAll\n"
        "from .trtllm_moe_alltoall import moe_a2a_initialize as moe_a2a_initialize\nallreduce_fusion = 'theirs'\n",
        "comm/trtllm_moe_alltoall.py": "class MoeAlltoAll: pass\nmoe_a2a_initialize = None\n",
    },
    "0.7.4": {"__init__.py": "", "comm/__init__.py": "allreduce_fusion = 'theirs'\n"},
}
MOE_EP = {
    "moe_ep/__init__.py": """
import abc
REGISTERED = {}
def register_communication(name):
    def register(kind):
        kind.backend_name = name
        REGISTERED[name] = kind
        return kind
    return register
class MoEEpCommunication(abc.ABC):
    @abc.abstractmethod
    def dispatch(self, *a): ...
@register_communication("nvlink_one_sided")
class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    def __init__(self, *a): raise RuntimeError("theirs")
    def dispatch(self, *a): raise RuntimeError("theirs")
class Cake(NVLinkOneSidedAlltoAll):
    pass
THEIRS = NVLinkOneSidedAlltoAll
"""
}


def library(generation: str, directory: Path) -> Path:
    """A package of the shape that a release of the library has."""
    for name, text in {**GENERATIONS[generation], **MOE_EP}.items():
        path = directory / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


CHECK = """
import sys
import a2a.integrations.flashinfer as ours
import flashinfer.comm, flashinfer.moe_ep as ep
import flashinfer.comm.trtllm_moe_alltoall as historical
from flashinfer.comm import MoeAlltoAll, moe_a2a_combine
assert historical is ours and MoeAlltoAll is ours.MoeAlltoAll is flashinfer.comm.MoeAlltoAll
assert moe_a2a_combine is ours.moe_a2a_combine and flashinfer.comm.trtllm_moe_alltoall is ours
assert flashinfer.comm.allreduce_fusion == "theirs" and flashinfer.comm.__file__.endswith("comm/__init__.py")
assert type(flashinfer.comm.__spec__.loader).__name__ == "SourceFileLoader"
mine = ep.NVLinkOneSidedAlltoAll
assert ep.REGISTERED == {"nvlink_one_sided": mine} and mine.backend_name == "nvlink_one_sided"
assert issubclass(mine, ep.THEIRS) and issubclass(mine, ours.NVLinkOneSidedAlltoAll)
assert ep.Cake.__mro__[1] is ep.THEIRS
made = mine(ours.BootstrapConfig(1, 0), ours.MoEEpCommParams(4, 2, 8, 16))
assert isinstance(made, ep.MoEEpCommunication) and made.alltoall.ep_size == 1
made.destroy()
try:
    import flashinfer.gemm
except ImportError:
    print("ok")
"""


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("before", [True, False])
def test_with_the_library_its_modules_get_the_names(tmp_path: Path, generation: str, before: bool) -> None:
    """Whether the library was imported already, or is imported later."""
    first = "import flashinfer.comm, flashinfer.moe_ep\n" if before else ""
    assert run(first + INSTALL + CHECK, library(generation, tmp_path)) == "ok\n"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_installing_imports_nothing_of_the_library(tmp_path: Path, generation: str) -> None:
    code = INSTALL + "import sys; print([name for name in sys.modules if name.partition('.')[0] == 'flashinfer'])"
    assert run(code, library(generation, tmp_path)) == "[]\n"


AT_START = f"import site, sys; site.addsitedir({str(LAUNCH)!r})\n"


def test_the_switch_is_off_unless_set(tmp_path: Path) -> None:
    code = ABSENT + AT_START + PROBES + "print('a2a_at_start' in sys.modules, any(probes().values()))"
    for value in ("", "0"):
        assert run(code, A2A_INSTALL_FLASHINFER=value) == "False False\n"


def test_the_switch_installs_at_the_first_look() -> None:
    code = (
        ABSENT
        + AT_START
        + PROBES
        + """
early = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "a2a", "flashinfer"})
assert has("flashinfer") and has("flashinfer.comm") and not has("flashinfer.gemm")
from flashinfer.comm import MoeAlltoAll
import flashinfer.comm.trtllm_moe_alltoall as historical, a2a.integrations.flashinfer as ours
assert historical is ours and MoeAlltoAll is ours.MoeAlltoAll
print(early, sorted(name for name, there in probes().items() if there))
"""
    )
    assert run(code, A2A_INSTALL_FLASHINFER="1") == "[] ['comm', 'historical', 'one_sided']\n"


def test_the_switch_can_share_workspaces() -> None:
    code = ABSENT + AT_START + "from flashinfer.comm import MoeAlltoAll\nprint(MoeAlltoAll.shared is None)"
    assert [run(code, A2A_INSTALL_FLASHINFER=value) for value in ("1", "shared")] == ["True\n", "False\n"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_switch_with_the_library(tmp_path: Path, generation: str) -> None:
    assert run(AT_START + CHECK, library(generation, tmp_path), A2A_INSTALL_FLASHINFER="1") == "ok\n"


def test_a_bad_switch_is_told_to_whoever_looks() -> None:
    code = (
        AT_START
        + """
try:
    import flashinfer
except ValueError as error:
    print(error)
"""
    )
    assert "A2A_INSTALL_FLASHINFER" in run(code, A2A_INSTALL_FLASHINFER="yes")


def test_a_wheel_has_the_files_beside_the_package() -> None:
    """The interpreter reads them only from where packages lie, and the name in the one must be that of the other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for name in ("a2a_at_start.pth", "a2a_at_start.py"):
        assert included[f"launch/{name}"] == name and (LAUNCH / name).is_file()
    line = (LAUNCH / "a2a_at_start.pth").read_text()
    assert line.startswith("import ") and line.count("\n") == 1 and "'a2a_at_start'" in line
