"""Names, places and words: what lies where, what it is called, what it says of itself."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest
from house_tree import Rule, Tree, bases, decorators, project

TOP_LEVEL = frozenset({"pyproject.toml", "a2a", "launch", "tests", "examples", "configs", "README.md", "LICENSE"})
"""Beside these, names that start with a dot."""

NO_NOUNS = frozenset(["util", "utils", "common", "core", "helper", "helpers", "misc", "legacy"])

MAX_PUBLIC_NAMES = 12

MAX_EXAMPLE_LINES = 60

ONE_SPELLING = {
    r"(my_?)?pe(_?rank|_?id|_?size)?|num_pes|n_?pes|(my_?)?node_rank|world_rank|rank_id": "ep_rank, ep_size",
    r"n_?ranks|rank_count": "num_ranks",
    r"(source|src_r|sender)_?rank|(dest|destination|target|receiver)_rank": "src_rank, dst_rank",
    r"expert_(idx|index)|eid": "expert_id",
    r"local_expert_(id|idx|index)": "local_expert",
    r"topk": "top_k",
    r"(topk_)?(indices|idx)_topk|topk_(idx|indices|weight)": "topk_ids, topk_weights",
    r"\w*quantis\w*": "quantize",
    r"sanitize\w*": "scrub",
    r"n_?tokens|token_count|num_toks": "num_tokens",
    r"n_?experts|expert_count": "num_experts",
    r"hidden_dim|dim_hidden": "hidden_size",
    r"bytes_per_\w+|\w+_(nbytes|microseconds|usec|usecs|secs|seconds)": "units last: _bytes, _us, _s",
}
"""Identifiers that say another word for what has one already. Launchers' and engines' own names stay in their rooms."""

FOREIGN_NAMES = ("a2a/integrations/", "a2a/comm/launcher.py")

UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")

MACHINE = re.compile(r"(?<![\w.\-/])/(work|opt|home|root|mnt|nfs|data|Users|scratch)/\w|\$HOME/\w")
TEMPORARY = re.compile(r"(?<![\w.\-/])/(var/)?tmp/\w")
REGISTRY = re.compile(
    r"--(extra-)?index-url|--find-links|--trusted-host|PIP_(INDEX|EXTRA|FIND|TRUSTED|PROXY)[A-Z_]*|UV_[A-Z]*INDEX[A-Z_]*|GOPROXY|pypi\.org|"
    r"https?://[^/\s\"']*(artifact|nexus|devpi|mirror|pypi)[^\s\"']*|https?://[\w.-]+\.(internal|local|corp|lan)\b",
    re.IGNORECASE,
)


def strangers_at_the_top(tree: Tree) -> list[str]:
    names = {path.partition("/")[0] for path in tree.files}
    return [f"{name}: no room of the project" for name in sorted(names - TOP_LEVEL) if not name.startswith(".")]


def files_without_a_noun(tree: Tree) -> list[str]:
    faults = []
    for path in tree.files:
        for part in path.split("/"):
            words = re.split(r"[_\-.]", part.partition(".")[0].lower())
            if path.startswith("tests/unit/core/") and part == "core":
                # The room of tests of the files that lie directly in a2a/; a test is found by what it tests.
                continue
            if NO_NOUNS & {part.partition(".")[0].lower(), words[-1]}:
                faults.append(f"{path}: {part} says nothing")
    return faults


def alike_names_of_tests(tree: Tree) -> list[str]:
    """Tests are no packages: pytest imports them by their file name alone, which must be one of its own."""
    seen: dict[str, str] = {}
    faults = []
    for path, _ in tree.texts(".py", under="tests/"):
        name = path.rpartition("/")[2]
        if name != "conftest.py" and seen.setdefault(name, path) != path:
            faults.append(f"{path}: named like {seen[name]}")
    return faults


def too_many_public_names(tree: Tree) -> list[str]:
    for path, syntax in tree.modules():
        if path == "a2a/__init__.py":
            for node in syntax.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names = ast.literal_eval(node.value)
                    return [] if len(names) <= MAX_PUBLIC_NAMES else [f"{path}: {len(names)} public names"]
    return ["a2a/__init__.py: no __all__"]


def modules_without_their_line(tree: Tree) -> list[str]:
    """The docstring starts with the file's name as the rooms' tree has it, alone or behind its room's."""
    faults = []
    for path, syntax in tree.modules():
        room = path.removeprefix("a2a/").removesuffix(".py").removesuffix("/__init__")
        names = {"a2a"} if path == "a2a/__init__.py" else {room, room.rpartition("/")[2]}
        first = (ast.get_docstring(syntax) or "").partition("\n")[0]
        name, colon, rest = first.partition(": ")
        if not (colon and rest and name in names):
            faults.append(f"{path}: its docstring does not start with '{min(names)}: '")
    for path, text in tree.texts(".cu", ".cuh", under="a2a/"):
        room = path.removeprefix("a2a/").rpartition(".")[0]
        if not re.match(rf"// {re.escape(room)}: \S", text):
            faults.append(f"{path}: does not start with '// {room}: '")
    return faults


def modules_that_own_nothing(tree: Tree) -> list[str]:
    """The docstring goes on with what the file owns and what it refuses to know; a package's or script's need not."""
    return [
        f"{path}: its docstring does not say what it owns and refuses"
        for path, syntax in tree.modules()
        for text in [ast.get_docstring(syntax) or ""]
        if not path.endswith(("__init__.py", "__main__.py"))
        and not re.search(r"\bOwns\b.*\bRefuses\b", text, re.DOTALL)
        and not re.search(r"\bOwns no(thing| state)\b|\bRefuses to\b", text)
    ]


def public_things_without_docstring(tree: Tree) -> list[str]:
    """Verbs that a base class or a protocol has described need not be described again."""
    described, inherited = _described_verbs(tree), _bases_of_classes(tree)
    faults = []
    for path, syntax in tree.modules():
        for owner, node in _public(syntax):
            if ast.get_docstring(node) is not None:
                continue
            if owner is not None and any(node.name in described.get(base, ()) for base in _all_bases(owner, inherited)):
                continue
            name = node.name if owner is None else f"{owner.name}.{node.name}"
            faults.append(f"{path}:{node.lineno}: {name} has no docstring")
    return faults


def _public(
    syntax: ast.Module,
) -> Iterator[tuple[ast.ClassDef | None, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in syntax.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield None, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for each in node.body:
                is_verb = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_verb and not each.name.startswith("_") and not decorators(each) & {"setter", "overload"}:
                    yield node, each


def _described_verbs(tree: Tree) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, syntax in tree.modules():
        for node in ast.walk(syntax):
            if isinstance(node, ast.ClassDef):
                verbs = {
                    each.name for each in node.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)
                }
                found.setdefault(node.name, set()).update(verbs)
                if "Protocol" in bases(node):
                    # A class need not name the protocol that it keeps.
                    found.setdefault("*", set()).update(verbs)
    return found


def _bases_of_classes(tree: Tree) -> dict[str, set[str]]:
    nodes = (node for _, syntax in tree.modules() for node in ast.walk(syntax))
    return {node.name: bases(node) for node in nodes if isinstance(node, ast.ClassDef)}


def _all_bases(owner: ast.ClassDef, inherited: dict[str, set[str]]) -> set[str]:
    found, todo = {"*"}, bases(owner)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo |= inherited.get(name, set())
    return found


def other_words(tree: Tree) -> list[str]:
    faults = []
    for path, syntax in tree.modules():
        if path.startswith(FOREIGN_NAMES):
            continue
        for name, line in _identifiers(syntax):
            faults += [f"{path}:{line}: {name}: write {word}" for word in _better(name)]
    for path, text in tree.texts(".cu", ".cuh", under="a2a/"):
        code = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", "", text, flags=re.DOTALL)
        for name in sorted(set(re.findall(r"[A-Za-z_]\w*", code))):
            faults += [f"{path}: {name}: write {word}" for word in _better(name)]
    for path, text in tree.texts(".toml", under="configs/"):
        for name in tomllib.loads(text):
            faults += [f"{path}: {name}: write {word}" for word in _better(name)]
    return list(dict.fromkeys(faults))


def _better(name: str) -> list[str]:
    return [word for pattern, word in ONE_SPELLING.items() if re.fullmatch(pattern, name.strip("_").lower())]


def _identifiers(syntax: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that this file itself gives: to variables, arguments, attributes, functions and classes."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def unfinished_work(tree: Tree) -> list[str]:
    return [
        f"{path}:{number}: {found.group()}"
        for path, text in tree.texts()
        for number, line in enumerate(text.splitlines(), 1)
        for found in [UNFINISHED.search(line)]
        if found
    ]


def traces_of_one_machine(tree: Tree) -> list[str]:
    """Paths of the machine it was written on, and hosts that packages came from."""
    faults = []
    for path, text in tree.texts():
        if path.startswith("tests/house/"):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            patterns = [MACHINE, REGISTRY] if path.startswith("tests/") else [MACHINE, REGISTRY, TEMPORARY]
            faults += [f"{path}:{number}: {found.group()}" for each in patterns if (found := each.search(line))]
    return faults


def examples_that_are_long_or_untried(tree: Tree) -> list[str]:
    faults = []
    tried = "\n".join(text for path, text in tree.texts(".py", under="tests/") if not path.startswith("tests/house/"))
    for path, text in tree.texts(".py", under="examples/"):
        name = path.rpartition("/")[2]
        if len(text.splitlines()) > MAX_EXAMPLE_LINES:
            faults.append(f"{path}: {len(text.splitlines())} lines")
        if not re.match(r"\d\d?_", name):
            faults.append(f"{path}: has no number")
        if name not in tried and name.removesuffix(".py") not in tried:
            faults.append(f"{path}: no test runs it")
    return faults


def configs_without_source(tree: Tree) -> list[str]:
    faults = []
    for path, text in tree.texts(".toml", under="configs/"):
        kind, source = path.split("/")[1], tomllib.loads(text).get("source", "")
        if kind == "models" and not str(source).startswith("https://"):
            faults.append(f"{path}: cites no address as its source")
        if kind == "clusters" and not source:
            faults.append(f"{path}: does not say where its figures come from")
    if any(path.startswith("configs/routing/") for path in tree.files):
        about = tree.files.get("configs/routing/README.md") or ""
        for path in tree.files:
            name = path.rpartition("/")[2]
            if path.startswith("configs/routing/") and name != "README.md" and name not in about:
                faults.append(f"{path}: its source is not in configs/routing/README.md")
    return faults


SHORT = '"""thing: does it.\n\nOwns it. Refuses to know more.\n"""\n'

BROKEN: list[tuple[Rule, dict[str, str]]] = [
    (strangers_at_the_top, {"notes.md": ""}),
    (strangers_at_the_top, {"src/a2a/errors.py": ""}),
    (files_without_a_noun, {"a2a/utils.py": ""}),
    (files_without_a_noun, {"a2a/common/offsets.py": ""}),
    (files_without_a_noun, {"a2a/host/numa_helpers.py": ""}),
    (files_without_a_noun, {"a2a/nvlink/kernels/core.cuh": ""}),
    (too_many_public_names, {"a2a/__init__.py": f"__all__ = {[str(number) for number in range(13)]}"}),
    (too_many_public_names, {"a2a/__init__.py": ""}),
    (alike_names_of_tests, {"tests/unit/comm/test_mesh.py": "", "tests/unit/host/test_mesh.py": ""}),
    (modules_without_their_line, {"a2a/layout.py": '"""Where bytes live."""'}),
    (modules_without_their_line, {"a2a/layout.py": '"""placement: where bytes live."""'}),
    (modules_without_their_line, {"a2a/layout.py": ""}),
    (modules_without_their_line, {"a2a/nvlink/kernels/sync.cuh": "#pragma once\n"}),
    (modules_that_own_nothing, {"a2a/thing.py": '"""thing: does it."""'}),
    (public_things_without_docstring, {"a2a/thing.py": SHORT + "def f():\n    return 1"}),
    (
        public_things_without_docstring,
        {"a2a/thing.py": SHORT + "class A:\n    '''A.'''\n    def f(self):\n        return 1"},
    ),
    (other_words, {"a2a/thing.py": "def f(world_rank):\n    return 1"}),
    (other_words, {"a2a/thing.py": "def f():\n    num_pes = 1"}),
    (other_words, {"a2a/thing.py": "def quantise_rows(x):\n    return 1"}),
    (other_words, {"a2a/thing.py": "class A:\n    def f(self):\n        self.wait_seconds = 1"}),
    (other_words, {"a2a/thing.py": "bytes_per_token = 1"}),
    (other_words, {"a2a/nvlink/kernels/sync.cuh": "int my_pe = 0; // fine in prose: node_rank\n"}),
    (other_words, {"configs/models/m.toml": "hidden_dim = 1"}),
    (unfinished_work, {"a2a/thing.py": "# TO" + "DO: later"}),
    (traces_of_one_machine, {"README.md": "see /wo" + "rk/main/README.md"}),
    (traces_of_one_machine, {".ci/run": "/op" + "t/venv/bin/python -m pytest"}),
    (traces_of_one_machine, {"a2a/thing.py": "open('/tm" + "p/x')"}),
    (traces_of_one_machine, {"README.md": "pip install --extra-" + "index-url https://example.com/simple a2a"}),
    (examples_that_are_long_or_untried, {"examples/01_pair.py": "x = 1\n"}),
    (examples_that_are_long_or_untried, {"examples/pair.py": "", "tests/test_examples.py": "pair.py"}),
    (examples_that_are_long_or_untried, {"examples/01_pair.py": "\n" * 61, "tests/test_examples.py": "01_pair.py"}),
    (configs_without_source, {"configs/models/m.toml": "hidden_size = 1"}),
    (configs_without_source, {"configs/clusters/m.toml": "dispatch_gbps = 1.0"}),
    (configs_without_source, {"configs/routing/m.jsonl": ""}),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in BROKEN), ids=lambda rule: rule.__name__)
def test_the_project_keeps_to(rule: Rule) -> None:
    assert rule(project()) == []


@pytest.mark.parametrize(("rule", "files"), BROKEN)
def test_a_broken_tree_is_shown_by(rule: Rule, files: dict[str, str]) -> None:
    assert rule(Tree(files))


def test_what_the_house_allows() -> None:
    fine = {
        ".ci/run": "python -m venv .venv",
        "pyproject.toml": "",
        "a2a/__init__.py": '"""a2a: all."""\n__all__ = ["f"]',
        "a2a/thing.py": SHORT
        + "class A(Protocol):\n    '''A.'''\n    def f(self):\n        '''Does.'''\n        ...\n",
        "a2a/quant/b.py": SHORT.replace("thing", "b") + "class B:\n    '''B.'''\n    def f(self):\n        return 1\n",
        "a2a/host/c.py": SHORT.replace("thing", "host/c") + "def _f(src_rank, num_bytes, timeout_s):\n    return 1\n",
        "a2a/nvlink/kernels/sync.cuh": "// nvlink/kernels/sync: waits.\n// The node_rank of old.\n",
        "examples/01_pair.py": "x = 1\n",
        "tests/test_examples.py": "run('01_pair.py', '/tmp/x')",
        "configs/models/m.toml": 'source = "https://example.com/config.json"',
        "configs/bench/b.toml": "rounds = 1",
    }
    for rule in dict.fromkeys(rule for rule, _ in BROKEN):
        assert rule(Tree(fine)) == [], rule
