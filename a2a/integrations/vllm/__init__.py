"""integrations/vllm: `--all2all-backend flashinfer_nvlink_one_sided` of vLLM on this package's exchange.

Installing this package is enough: vLLM calls `register` through the entry point `a2a` in `vllm.general_plugins`. With
`VLLM_PLUGINS` set, the name `a2a` must be in it. Releases that size a row in bytes (up to 0.32) and those that name its
format (0.33) are served alike. Nothing here imports vLLM before vLLM imports the modules concerned.
"""

from __future__ import annotations

import logging
from types import ModuleType

from a2a.integrations.after_import import after_import
from a2a.integrations.vllm.engine import Engine, installed_engine
from a2a.integrations.vllm.manager import Manager, manager_class
from a2a.integrations.vllm.payload import DispatchLayout, dispatch_layout, row_format
from a2a.integrations.vllm.prepare_finalize import PrepareAndFinalize, prepare_finalize_class

__all__ = [
    "DispatchLayout",
    "Engine",
    "Manager",
    "PrepareAndFinalize",
    "dispatch_layout",
    "installed_engine",
    "manager_class",
    "prepare_finalize_class",
    "register",
    "row_format",
]

MANAGERS = "vllm.distributed.device_communicators.all2all"
LAYERS = "vllm.model_executor.layers.fused_moe.all2all_utils"

_MANAGER = "FlashInferNVLinkOneSidedManager"
_PREPARE_FINALIZE = "FlashInferNVLinkOneSidedPrepareAndFinalize"
_LAYER_BASE = "FusedMoEPrepareAndFinalizeModular"
_LAYOUT = "flashinfer_one_sided_dispatch_layout"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the one-sided back end of vLLM run on this package, once vLLM imports it. May be called again."""
    after_import(MANAGERS, _replace_manager)
    after_import(LAYERS, _replace_layer)


def _replace_manager(module: ModuleType) -> None:
    theirs = getattr(module, _MANAGER, None)
    if theirs is None:
        _log.warning("a2a: this vLLM has no %s.%s: its back ends are left alone", MANAGERS, _MANAGER)
    elif not issubclass(theirs, Manager):
        setattr(module, _MANAGER, manager_class(module.All2AllManagerBase, installed_engine))
        _log.info("a2a: flashinfer_nvlink_one_sided runs on a2a")


def _replace_layer(module: ModuleType) -> None:
    theirs = getattr(module, _PREPARE_FINALIZE, None)
    bases = [each for each in getattr(theirs, "__mro__", ()) if each.__name__ == _LAYER_BASE]
    if theirs is None or not bases:
        _log.warning(
            "a2a: this vLLM has no %s.%s of the modular kernel: its layers are left alone", LAYERS, _PREPARE_FINALIZE
        )
    elif not issubclass(theirs, PrepareAndFinalize):
        setattr(module, _PREPARE_FINALIZE, prepare_finalize_class(bases[0], installed_engine))
        if hasattr(module, _LAYOUT):
            # Theirs asks flashinfer for its enumeration of formats, and counts the scales of padding but not padding.
            setattr(module, _LAYOUT, dispatch_layout)
