"""integrations/after_import: run a function on a module as soon as something has imported it.

Owns one finder in `sys.meta_path`. Refuses to import the module itself: an engine's plugins run in processes that will
fork and must not touch a GPU, which an early import of its MoE modules might.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]

_log = logging.getLogger(__name__)


def after_import(name: str, patch: Patch) -> None:
    """Call `patch(module)` once the module `name` has been executed; at once if it has been already.

    Asking twice for the same thing does nothing. An error of `patch` is the importer's.
    """
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
        return
    waiting = _Finder(name, patch)
    if waiting not in sys.meta_path:
        sys.meta_path.insert(0, waiting)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module where the others find it, and has it patched after its execution."""

    def __init__(self, name: str, patch: Patch) -> None:
        self._name = name
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        # Several things may wait for one module: each asks the finders behind it, those of this kind too.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._patch)
                return spec
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finder) and (self._name, self._patch) == (other._name, other._patch)

    def __hash__(self) -> int:
        return hash((self._name, self._patch))


class _Loader(importlib.abc.Loader):
    """Another loader, and what follows its work."""

    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its source or its data means the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)
        _log.debug("patched %s", module.__name__)
