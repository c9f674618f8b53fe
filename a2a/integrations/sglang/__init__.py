"""integrations/sglang: `--moe-a2a-backend flashinfer` of SGLang on this package's exchange.

Installing this package is enough: SGLang calls `register` through the entry point `a2a` in `sglang.srt.plugins`. With
`SGLANG_PLUGINS` set, the name `a2a` must be in it. The engine's own dispatcher then runs unchanged on the class and the
functions of `a2a.integrations.flashinfer`; `Dispatcher` is one to put in its place.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from a2a.integrations.after_import import after_import
from a2a.integrations.sglang.arguments import Resolved, resolve_config
from a2a.integrations.sglang.dispatcher import Dispatcher, dispatcher_class
from a2a.integrations.sglang.engine import Engine, installed_engine
from a2a.integrations.shared_exchange import Exchanges, plain_tensors

__all__ = [
    "Dispatcher",
    "Engine",
    "Exchanges",
    "OneForAllLayers",
    "Resolved",
    "dispatcher_class",
    "installed_engine",
    "register",
    "resolve_config",
]

DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher.flashinfer"


def register() -> None:
    """Make SGLang's dispatcher find this package where it looks for FlashInfer's exchange. May be called again."""
    from a2a.integrations.flashinfer import install

    install()
    after_import(DISPATCHERS, _share)


class OneForAllLayers:
    """The historical class, as the dispatchers of one process build it: equal arguments give one and the same object.

    Every layer of SGLang builds a dispatcher and every dispatcher an exchange, of equal arguments unless their rounds
    may be in flight side by side; a workspace for each layer would take the memory of the cache of keys and values.

    Args:
        build: the class.
    """

    def __init__(self, build: Any) -> None:
        self._build = build
        self._signature = inspect.signature(build)
        self._held: list[tuple[object, dict[str, Any], Any]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The exchange of these arguments; collective when it is the first of them."""
        sizes = dict(self._signature.bind(*arguments, **keywords).arguments)
        # Each layer makes a mapping and a configuration of its own: what they stand for is the group.
        comm = getattr(sizes.pop("mnnvl_config", None), "comm_backend", None)
        group = getattr(comm, "_group", comm)
        sizes.pop("mapping", None)
        for each, known, exchange in self._held:
            if each is group and known == sizes:
                return exchange
        with plain_tensors():
            made = self._build(*arguments, **keywords)
        self._held.append((group, sizes, made))
        return made


def _share(module: ModuleType) -> None:
    theirs = getattr(module, "MoeAlltoAll", None)
    if theirs is not None and not isinstance(theirs, OneForAllLayers):
        module.__dict__["MoeAlltoAll"] = OneForAllLayers(theirs)
