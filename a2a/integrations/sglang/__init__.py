"""integrations/sglang: `--moe-a2a-backend flashinfer` of SGLang on this package's exchange.

Installing this package is enough: SGLang calls `register` through the entry point `a2a` in `sglang.srt.plugins`. With
`SGLANG_PLUGINS` set, the name `a2a` must be in it. The engine's own dispatcher then runs unchanged on the class and the
functions of `a2a.integrations.flashinfer`; `Dispatcher` is one to put in its place.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from a2a.alltoall import plain_tensors
from a2a.integrations.after_import import after_import
from a2a.integrations.sglang.arguments import Resolved, resolve_config
from a2a.integrations.sglang.dispatcher import Dispatcher, dispatcher_class
from a2a.integrations.sglang.engine import Engine, installed_engine
from a2a.integrations.shared_exchange import Exchanges

__all__ = [
    "Dispatcher",
    "Engine",
    "Exchanges",
    "Resolved",
    "dispatcher_class",
    "installed_engine",
    "register",
    "resolve_config",
]

DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher.flashinfer"


def register() -> None:
    """Make SGLang's dispatcher find this package where it looks for FlashInfer's exchange. May be called again.

    Every layer of SGLang builds a dispatcher and every dispatcher an exchange, of equal arguments unless their rounds
    may be in flight side by side: exchanges of equal arguments share a workspace.
    """
    from a2a.integrations.flashinfer import install

    install(share_workspaces=True)
    after_import(DISPATCHERS, _build_plainly)


def _build_plainly(module: ModuleType) -> None:
    theirs = getattr(module, "MoeAlltoAll", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def build(*arguments: Any, **keywords: Any) -> Any:
        with plain_tensors():
            return theirs(*arguments, **keywords)

    module.__dict__["MoeAlltoAll"] = build
