"""The project as texts by path, and what its Python says: what the house rules are checked on.

A rule is a function from a `Tree` to the faults that it finds, so that it can be shown a small broken tree too.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Tree:
    """Texts by path relative to the project's root, with `/`; paths of files that are no text have None."""

    files: Mapping[str, str | None]

    def texts(self, *suffixes: str, under: str = "") -> Iterator[tuple[str, str]]:
        """(path, text) of files whose name ends with one of `suffixes`, or of all."""
        for path, text in self.files.items():
            if text is not None and path.startswith(under) and (not suffixes or path.endswith(suffixes)):
                yield path, text

    def modules(self, under: str = "a2a/") -> Iterator[tuple[str, ast.Module]]:
        """(path, syntax) of the Python files."""
        for path, text in self.texts(".py", under=under):
            yield path, _parsed(text)

    def module_names(self) -> dict[str, str]:
        """Dotted name of every module of the package, by path."""
        return {path: dotted(path) for path, _ in self.modules()}


Rule = Callable[[Tree], list[str]]


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def project() -> Tree:
    """What git tracks or would track; every file, where the tree is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        paths = sorted({each for each in listed.stdout.split("\0") if each})
    else:
        hidden = {"__pycache__", "build", "dist"}
        paths = sorted(
            found.relative_to(ROOT).as_posix()
            for found in ROOT.rglob("*")
            if found.is_file()
            and not any(part in hidden or part.startswith(".") for part in found.relative_to(ROOT).parts)
        )
    return Tree({path: _text(ROOT / path) for path in paths if (ROOT / path).is_file()})


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


@dataclasses.dataclass(frozen=True)
class Import:
    """One import wherever it stands, also in a function or under TYPE_CHECKING."""

    module: str
    """Dotted name; a module of the package where the name stands for one."""
    line: int


def imports(path: str, syntax: ast.Module, known: frozenset[str]) -> Iterator[Import]:
    """Every import of a file. `known`: dotted names of the package's modules."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = dotted(path).split(".")
                package = parts if path.endswith("__init__.py") else parts[:-1]
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in known else base, node.lineno)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno)
            else:
                # A name made at run time can be anything.
                yield Import("?", node.lineno)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Last names of the decorators."""
    found = set()
    for each in node.decorator_list:
        target = each.func if isinstance(each, ast.Call) else each
        found.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def bases(node: ast.ClassDef) -> set[str]:
    """Last names of the bases, subscripts apart."""
    found = set()
    for each in node.bases:
        target = each.value if isinstance(each, ast.Subscript) else each
        found.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def body_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    body = node.body
    if ast.get_docstring(node) is not None:
        return body[1:]
    return body


def functions(syntax: ast.Module) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with the class it stands in directly, functions inside functions too."""

    def visit(
        node: ast.AST, owner: ast.ClassDef | None
    ) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, child
                yield from visit(child, None)
            else:
                yield from visit(child, child if isinstance(child, ast.ClassDef) else owner)

    return visit(syntax, None)
