"""Lets engines find a2a where they look for FlashInfer's exchange, from the start of a process on.

`a2a_at_start.pth`, which lies beside this file in an installation, imports it when the interpreter starts and
A2A_INSTALL_FLASHINFER is set. Nothing else is imported before somebody looks for `flashinfer`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class Watch(importlib.abc.MetaPathFinder):
    """Waits for the first look at `flashinfer` and then lets a2a answer."""

    def __init__(self) -> None:
        self._seen = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the finders say once a2a is among them; None for other modules and later looks."""
        if fullname != "flashinfer" or self._seen:
            return None
        self._seen = True
        from a2a.integrations.flashinfer_install import install_at_start

        install_at_start()
        # The import system is already past the place at which a2a's finder has been put.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


sys.meta_path.insert(0, Watch())
