"""Floors: who may import whom; guests: which library may be seen in which room."""

from __future__ import annotations

import posixpath
import re
import sys

import pytest
from house_tree import Rule, Tree, dotted, imports, project

FLOORS = (
    ("errors",),
    ("env",),
    ("quant", "comm"),
    ("config",),
    ("layout", "placement"),
    ("transport", "reference"),
    ("host", "nvlink"),
    ("nvshmem",),
    ("alltoall",),
    ("ops",),
    ("bench", "integrations", "experts"),
    ("cli",),
)
"""Lowest first. Rooms of one floor do not know each other."""

ROOM_OF = {"arguments": "alltoall", "agreement": "alltoall", "": "alltoall", "__main__": "cli"}
"""Files that belong to another file's room; "" is the package's own `__init__`."""

ANYWHERE = frozenset({"torch", "numpy", "a2a", "__future__"})

GUESTS = {
    "cuda": ("a2a/nvlink/",),
    "nvidia": ("a2a/nvlink/",),
    "triton": ("a2a/nvlink/",),
    "mpi4py": ("a2a/comm/mpi.py", "a2a/bench/peers/mpi.py", "a2a/bench/doctor.py"),
    "rich": ("a2a/bench/", "a2a/cli.py"),
    "matplotlib": ("a2a/bench/", "a2a/cli.py"),
    "numba": ("a2a/host/",),
    "llvmlite": ("a2a/host/",),
    "flashinfer": ("a2a/integrations/", "a2a/experts/", "a2a/bench/peers/"),
    "vllm": ("a2a/integrations/",),
    "sglang": ("a2a/integrations/",),
    "tensorrt_llm": ("a2a/integrations/",),
}
"""Libraries that only some rooms may import, wherever in a file."""

FOUND_BY_NAME = ("a2a/transport.py", "a2a/bench/peers/__init__.py")
"""Where a module is imported by a name made at run time: the seam, at which transports are found, and the peers'."""


def room(module: str) -> str:
    """The room of a dotted name of the package."""
    first = module.removeprefix("a2a").removeprefix(".").partition(".")[0]
    return ROOM_OF.get(first, first)


def floor(name: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if name in rooms)


def unknown_rooms(tree: Tree) -> list[str]:
    """A room without a floor would be free to import anything."""
    known = {name for rooms in FLOORS for name in rooms}
    return [
        f"{path}: room {room(dotted(path))!r} has no floor"
        for path, _ in tree.modules()
        if room(dotted(path)) not in known
    ]


def upward_imports(tree: Tree) -> list[str]:
    names = frozenset(tree.module_names().values())
    faults = []
    for path, syntax in tree.modules():
        here = room(dotted(path))
        for each in imports(path, syntax, names):
            if each.module.partition(".")[0] != "a2a":
                continue
            there = room(each.module)
            if there != here and floor(there) >= floor(here):
                faults.append(f"{path}:{each.line}: {here} imports {there}, which is not below it")
    return faults


def bench_imported_elsewhere(tree: Tree) -> list[str]:
    names = frozenset(tree.module_names().values())
    return [
        f"{path}:{each.line}: bench is imported by the command line alone"
        for path, syntax in tree.modules()
        for each in imports(path, syntax, names)
        if room(each.module) == "bench"
        and each.module.startswith("a2a.")
        and room(dotted(path)) not in ("cli", "bench")
    ]


def imports_by_made_names(tree: Tree) -> list[str]:
    return [
        f"{path}:{each.line}: imports a name made at run time"
        for path, syntax in tree.modules()
        for each in imports(path, syntax, frozenset())
        if each.module == "?" and path not in FOUND_BY_NAME
    ]


def guests_outside_their_rooms(tree: Tree) -> list[str]:
    faults = []
    for path, syntax in tree.modules():
        for each in imports(path, syntax, frozenset()):
            library = each.module.partition(".")[0]
            if library in ANYWHERE or library in sys.stdlib_module_names or library == "?":
                continue
            rooms = GUESTS.get(library)
            if rooms is None:
                faults.append(f"{path}:{each.line}: {library} is no dependency of this package")
            elif not path.startswith(rooms):
                faults.append(f"{path}:{each.line}: {library} outside {', '.join(rooms)}")
    return faults


def rooms_known_by_kernels(tree: Tree) -> list[str]:
    """Device code includes nothing but files of its own room, quant's twins and what the compiler has built in."""
    faults = []
    for path, text in tree.texts(".cu", ".cuh"):
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            found = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
            if found not in tree.files or room(dotted(found)) not in (room(dotted(path)), "quant"):
                faults.append(f"{path}: includes {name}")
    return faults


BROKEN: list[tuple[Rule, dict[str, str]]] = [
    (unknown_rooms, {"a2a/telepathy/transport.py": ""}),
    (upward_imports, {"a2a/errors.py": "from a2a import env", "a2a/env.py": ""}),
    (upward_imports, {"a2a/layout.py": "def f():\n    from a2a.alltoall import MoeAlltoAll", "a2a/alltoall.py": ""}),
    (upward_imports, {"a2a/config.py": "if TYPE_CHECKING:\n    import a2a.layout", "a2a/layout.py": ""}),
    (upward_imports, {"a2a/nvlink/launch.py": "from a2a.host.loops import Loops"}),
    (upward_imports, {"a2a/quant/mxfp8.py": "from a2a.comm import resolve"}),
    (upward_imports, {"a2a/comm/mesh.py": "from ..placement import Placement"}),
    (upward_imports, {"a2a/host/memory.py": "import a2a"}),
    (upward_imports, {"a2a/host/memory.py": 'importlib.import_module("a2a.alltoall")'}),
    (upward_imports, {"a2a/experts/layer.py": "from a2a.bench import timing"}),
    (bench_imported_elsewhere, {"a2a/experts/layer.py": "from a2a.bench import timing"}),
    (imports_by_made_names, {"a2a/host/loops.py": 'importlib.import_module("num" + "ba")'}),
    (guests_outside_their_rooms, {"a2a/comm/mesh.py": "import numba"}),
    (guests_outside_their_rooms, {"a2a/comm/launcher.py": "def f():\n    from mpi4py import MPI"}),
    (guests_outside_their_rooms, {"a2a/host/transport.py": "from cuda.bindings import driver"}),
    (guests_outside_their_rooms, {"a2a/alltoall.py": "import rich.table"}),
    (guests_outside_their_rooms, {"a2a/alltoall.py": "import requests"}),
    (rooms_known_by_kernels, {"a2a/nvlink/kernels/a.cu": "#include <cuda_bf16.h>\n"}),
    (rooms_known_by_kernels, {"a2a/quant/e4m3.cuh": '#include "../nvlink/a.cuh"\n', "a2a/nvlink/a.cuh": ""}),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in BROKEN), ids=lambda rule: rule.__name__)
def test_the_project_keeps(rule: Rule) -> None:
    assert rule(project()) == []


@pytest.mark.parametrize(("rule", "files"), BROKEN)
def test_a_broken_tree_is_seen_by(rule: Rule, files: dict[str, str]) -> None:
    assert rule(Tree(files))


def test_what_the_floors_allow() -> None:
    fine = {
        "a2a/cli.py": "from a2a.bench import sweep\nimport rich",
        "a2a/bench/sweep.py": "import a2a\nfrom a2a.bench.timing import clock\nfrom a2a.host.loops import Loops",
        "a2a/bench/timing.py": "",
        "a2a/alltoall.py": "from a2a.arguments import Arguments\nfrom a2a import env",
        "a2a/arguments.py": "",
        "a2a/host/transport.py": "from a2a.comm.mesh import Mesh\nfrom a2a.transport import Transport\nimport numba",
        "a2a/__init__.py": "from a2a.alltoall import MoeAlltoAll",
        "a2a/env.py": "from a2a.errors import ConfigError\nimport os",
        "a2a/errors.py": "",
    }
    for rule in (
        unknown_rooms,
        upward_imports,
        bench_imported_elsewhere,
        imports_by_made_names,
        guests_outside_their_rooms,
    ):
        assert rule(Tree(fine)) == []
