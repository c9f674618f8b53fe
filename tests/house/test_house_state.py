"""What code of the package may do: one reader of the environment, no state outside objects, no stub, no silence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from house_tree import Rule, Tree, bases, body_without_docstring, decorators, functions, project

ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})

MUTABLE_CALLS = frozenset({"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "bytearray"})

MUTATORS = frozenset(
    [
        "append",
        "extend",
        "insert",
        "remove",
        "pop",
        "popitem",
        "clear",
        "update",
        "setdefault",
        "add",
        "discard",
        "appendleft",
        "popleft",
        "sort",
        "reverse",
        "__setitem__",
    ]
)

CACHES = frozenset({"cache", "lru_cache"})

KEPT_STATE = {
    "a2a/ops.py: _BOUND": "operators take tensors, not objects: weak, and close() takes the object out",
    "a2a/ops.py: _TURNS": "as _BOUND",
    "a2a/nvlink/quantize_rows.py: row_quantizer": "code of an operator, which no exchange holds; no memory but its own",
    "a2a/nvlink/scrub_ids.py: id_scrubber": "as row_quantizer; initialised ranks need it before any of them launches",
    "a2a/nvlink/launch.py: _LOADED": "code that ranks of a process share, as loading may wait for kernels; weak",
    "a2a/nvlink/launch.py: _LEFT": "code that is unloaded at the next load, as unloading may wait for kernels",
    "a2a/bench/workload.py: read_recording": "files that the command line reads once per run; no exchange holds them",
    "a2a/bench/process_group.py: _nccl_group": "the bench's peers share a process group, and a process is one bench",
}
"""`path: name` of a cache or container that outlives objects -> why it may."""


def environment_read_outside_env(tree: Tree) -> list[str]:
    faults = []
    for path, syntax in tree.modules():
        if path == "a2a/env.py":
            continue
        for node in ast.walk(syntax):
            reads = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and _name(node.value) == "os"
            takes = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in ENVIRONMENT for alias in node.names)
            )
            if reads or takes:
                faults.append(f"{path}:{node.lineno}: the environment is read in env.py alone")
    return faults


def containers_outside_objects(tree: Tree) -> list[str]:
    """Containers of a module or a class must be declared Final (or ClassVar of an immutable kind of container)."""
    faults = []
    for path, syntax in tree.modules():
        for owner in [syntax, *(node for node in ast.walk(syntax) if isinstance(node, ast.ClassDef))]:
            if isinstance(owner, ast.ClassDef) and bases(owner) & {"Enum", "IntEnum", "StrEnum"}:
                continue
            for node in owner.body:
                name, value, annotation = _assigned(node)
                if value is None or name == "__all__" or not _is_container(value):
                    continue
                if "Final" not in annotation and not annotation.startswith(("Mapping[", "frozenset[", "Sequence[")):
                    faults.append(f"{path}:{node.lineno}: {name} is a container that outlives every object")
    return [fault for fault in faults if not _is_kept(fault)]


def changed_globals(tree: Tree) -> list[str]:
    """No `global`, and no function that changes a container of its module, Final or not."""
    faults = []
    for path, syntax in tree.modules():
        of_module = {name for node in syntax.body for name in [_assigned(node)[0]] if name}
        for _, function in functions(syntax):
            local = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            local |= {
                node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            for node in ast.walk(function):
                changed: str | None = None
                if isinstance(node, ast.Global):
                    changed = ", ".join(node.names)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                    changed = _name(node.func.value)
                elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                    changed = _name(node.value)
                if changed and (isinstance(node, ast.Global) or (changed in of_module and changed not in local)):
                    faults.append(f"{path}:{node.lineno}: changes {changed} of the module")
    return [fault for fault in dict.fromkeys(faults) if not _is_kept(fault)]


def caches_outside_objects(tree: Tree) -> list[str]:
    return [
        fault
        for path, syntax in tree.modules()
        for _, function in functions(syntax)
        if decorators(function) & CACHES
        for fault in [f"{path}:{function.lineno}: {function.name} is a cache that outlives every object"]
        if not _is_kept(fault)
    ]


def assertions(tree: Tree) -> list[str]:
    return [
        f"{path}:{node.lineno}: assert"
        for path, syntax in tree.modules()
        for node in ast.walk(syntax)
        if isinstance(node, ast.Assert)
    ]


def swallowed_errors(tree: Tree) -> list[str]:
    """No bare except, and no handler of everything that does nothing."""
    faults = []
    for path, syntax in tree.modules():
        for node in ast.walk(syntax):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is not None and _names_in(node.type) & {"Exception", "BaseException"}
                idle = all(isinstance(each, ast.Pass | ast.Continue) or _is_ellipsis(each) for each in node.body)
                if node.type is None or (broad and idle):
                    faults.append(f"{path}:{node.lineno}: swallows every error")
            elif isinstance(node, ast.Call) and _last(node.func) == "suppress":
                caught = set().union(*map(_names_in, node.args)) if node.args else set()
                if caught & {"Exception", "BaseException"}:
                    faults.append(f"{path}:{node.lineno}: suppresses every error")
    return faults


def stubs(tree: Tree) -> list[str]:
    """A body that does nothing, except where others must give one, or where it answers an abstract verb in words."""
    asked = {
        function.name
        for _, syntax in tree.modules()
        for _, function in functions(syntax)
        if "abstractmethod" in decorators(function)
    }
    faults = []
    for path, syntax in tree.modules():
        for owner, function in functions(syntax):
            if decorators(function) & {"abstractmethod", "overload"}:
                continue
            if owner is not None and "Protocol" in bases(owner):
                continue
            body = body_without_docstring(function)
            raises = (
                len(body) == 1
                and isinstance(body[0], ast.Raise)
                and body[0].exc is not None
                and "NotImplementedError" in _names_in(body[0].exc)
            )
            if owner is not None and function.name in asked and bases(owner) and not body:
                continue
            if raises or all(isinstance(each, ast.Pass) or _is_ellipsis(each) for each in body):
                faults.append(f"{path}:{function.lineno}: {function.name} does nothing")
    return faults


def forwarders(tree: Tree) -> list[str]:
    """A function whose body only calls another one with its own arguments.

    Giving a held object's verb a name in one's own interface (`self._part.verb(x)`) is not meant, nor a method that
    answers what a base class asks, nor an operator registered with the framework.
    """
    asked = {
        node.name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        for _, syntax in tree.modules()
        for node in ast.walk(syntax)
        if isinstance(node, ast.ClassDef)
    }
    faults = []
    for path, syntax in tree.modules():
        for owner, function in functions(syntax):
            body = body_without_docstring(function)
            if len(body) != 1 or decorators(function) - {"staticmethod", "classmethod"}:
                continue
            call = body[0].value if isinstance(body[0], ast.Return | ast.Expr) else None
            if not isinstance(call, ast.Call) or _is_held(call.func):
                continue
            if owner is not None and any(function.name in asked.get(base, ()) for base in bases(owner)):
                continue
            parameters = [
                each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            ]
            parameters += [each.arg for each in (function.args.vararg, function.args.kwarg) if each is not None]
            if owner is not None and "staticmethod" not in decorators(function):
                parameters = parameters[1:]
            given = [_name(each.value if isinstance(each, ast.Starred) else each) for each in call.args]
            given += [_name(each.value) if each.arg in (None, _name(each.value)) else None for each in call.keywords]
            if parameters and given == parameters:
                faults.append(f"{path}:{function.lineno}: {function.name} only calls {ast.unparse(call.func)}")
    return faults


def _is_kept(fault: str) -> bool:
    path, _, rest = fault.partition(":")
    return any(f"{path}: {word}" in KEPT_STATE for word in rest.split())


def _assigned(node: ast.stmt) -> tuple[str, ast.expr | None, str]:
    """(name, value, annotation) of an assignment to one name."""
    if isinstance(node, ast.AnnAssign):
        return _name(node.target) or "", node.value, ast.unparse(node.annotation)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return _name(node.targets[0]) or "", node.value, ""
    return "", None, ""


def _is_container(value: ast.expr) -> bool:
    kinds = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, kinds) or (isinstance(value, ast.Call) and _last(value.func) in MUTABLE_CALLS)


def _is_held(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Attribute)


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else _name(node) or ""


def _names_in(node: ast.expr) -> set[str]:
    return {each for part in ast.walk(node) for each in _identifiers(part)}


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


BROKEN: list[tuple[Rule, str]] = [
    (environment_read_outside_env, "import os\nx = os.environ['A2A_TIMEOUT_S']"),
    (environment_read_outside_env, "def f():\n    return os.getenv('RANK')"),
    (environment_read_outside_env, "from os import environ"),
    (containers_outside_objects, "cache = {}"),
    (containers_outside_objects, "_OBJECTS: dict[int, object] = dict()"),
    (containers_outside_objects, "class Thing:\n    pool = []"),
    (containers_outside_objects, "import collections\nWAITING = collections.deque()"),
    (changed_globals, "x = None\ndef f():\n    global x\n    x = 1"),
    (changed_globals, "POOL: Final = []\ndef f(a):\n    POOL.append(a)"),
    (changed_globals, "POOL: Final = {}\nclass A:\n    def f(self, a):\n        POOL[a] = 1"),
    (caches_outside_objects, "@functools.lru_cache(maxsize=None)\ndef f(a):\n    return a + 1"),
    (caches_outside_objects, "class A:\n    @functools.cache\n    def f(self):\n        return 1"),
    (assertions, "def f(a):\n    assert a > 0"),
    (swallowed_errors, "try:\n    f()\nexcept:\n    raise"),
    (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass"),
    (swallowed_errors, "for x in y:\n    try:\n        f()\n    except (ValueError, BaseException):\n        continue"),
    (swallowed_errors, "with contextlib.suppress(Exception):\n    f()"),
    (stubs, "def f():\n    '''Does it.'''"),
    (stubs, "class A:\n    def f(self):\n        raise NotImplementedError('later')"),
    (stubs, "class A(B):\n    def close(self):\n        '''Closes.'''"),
    (stubs, "def f():\n    pass"),
    (stubs, "def f():\n    ..."),
    (forwarders, "def f(a, b):\n    '''Adds.'''\n    return g(a, b)"),
    (forwarders, "def f(a, *, b):\n    module.g(a, b=b)"),
    (forwarders, "class A:\n    def f(self, *a, **k):\n        return self.g(*a, **k)"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in BROKEN), ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    assert rule(project()) == []


@pytest.mark.parametrize(("rule", "text"), BROKEN)
def test_a_broken_file_is_seen_by(rule: Rule, text: str) -> None:
    assert rule(Tree({"a2a/thing.py": text}))


def test_what_the_rules_allow() -> None:
    fine = '''
import abc, contextlib, enum
from typing import Final, Protocol
NAMES: Final = {"a": 1}
KINDS: Mapping[str, int] = {"b": 2}
__all__ = ["f"]
class Colour(enum.Enum):
    RED = []
class Base(abc.ABC):
    @abc.abstractmethod
    def g(self, x): ...
    @abc.abstractmethod
    def close(self): ...
class Verbs(Protocol):
    def h(self): ...
class Thing(Base):
    def __init__(self):
        self.pool = []
    def g(self, x):
        return self._part.g(x)
    def close(self):
        """Nothing was taken."""
    def k(self, pool, x):
        NAMES = {}
        NAMES[x] = 1
        pool.append(x)
        with contextlib.suppress(OSError):
            g(x)
        return g(x, 2)
def f(a, b):
    try:
        return g(b, a)
    except OSError:
        pass
    except Exception:
        raise
'''
    for rule in dict.fromkeys(rule for rule, _ in BROKEN):
        assert rule(Tree({"a2a/thing.py": fine})) == [], rule


def test_kept_state_is_still_there() -> None:
    for key in KEPT_STATE:
        path, _, name = key.partition(": ")
        text = project().files.get(path)
        assert text is not None and name in text, f"{key} is gone: take it off the list"
