"""integrations/flashinfer_install: where code that was written for FlashInfer finds this package instead.

Owns what `sys.modules` and `sys.meta_path` hold of it. Refuses to know what the modules do.

Without FlashInfer, stand-ins answer for `flashinfer`, `flashinfer.comm` (with `mapping`, `mnnvl` and
`trtllm_moe_alltoall`) and `flashinfer.moe_ep`; every other submodule stays what it was, absent, so that an engine that
looks for FlashInfer's other kernels finds none. SGLang does not look: it takes all of them where it finds `flashinfer`
itself, so where that is a stand-in it must be told with SGLANG_IS_FLASHINFER_AVAILABLE=false.

With FlashInfer, its own modules stay and get these names put in:

* `flashinfer.comm.trtllm_moe_alltoall` is `a2a.integrations.flashinfer`, in releases that have none of their own too;
* `flashinfer.comm` has the historical class and functions from there;
* `flashinfer.moe_ep` has the communication "nvlink_one_sided" from here, registered as FlashInfer's own register, and
  an instance of its own class for those who ask.

Nothing of FlashInfer is imported before its user does: importing it may touch the GPU.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from a2a.env import Env

ROOT: Final = "flashinfer"
COMM: Final = "flashinfer.comm"
MOE_EP: Final = "flashinfer.moe_ep"
HISTORICAL: Final = "flashinfer.comm.trtllm_moe_alltoall"
STAND_INS: Final = (ROOT, COMM, "flashinfer.comm.mapping", "flashinfer.comm.mnnvl", HISTORICAL, MOE_EP)
_PACKAGES: Final = (ROOT, COMM, MOE_EP)

_HISTORICAL_NAMES: Final = (
    "MOE_A2A_RANK_MASK_WORDS",
    "MoeAlltoAll",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
)
_MAPPING_NAMES: Final = ("CommBackend", "Mapping", "MnnvlConfig")


def install(*, share_workspaces: bool = False) -> None:
    """Let imports of FlashInfer's exchange find this package's, in this process. Idempotent.

    Args:
        share_workspaces: objects of the historical class with equal arguments share one workspace, as FlashInfer's do:
            for engines that build an object per layer. By default each has its own.

    Without FlashInfer the stand-ins are in `sys.modules` afterwards. With FlashInfer, what of it is imported already is
    put right now, and what is not when it is imported. Names that somebody has taken out of FlashInfer's modules before
    stay FlashInfer's.
    """
    hook()
    if share_workspaces:
        _share_workspaces()
    if _finder().stands_in:
        import flashinfer.comm.mapping
        import flashinfer.comm.mnnvl
        import flashinfer.comm.trtllm_moe_alltoall
        import flashinfer.moe_ep  # noqa: F401

        return
    if COMM in sys.modules:
        from a2a.integrations import flashinfer as ours

        sys.modules[HISTORICAL] = ours
        sys.modules[COMM].trtllm_moe_alltoall = ours  # type: ignore[attr-defined]
    for name in (COMM, MOE_EP):
        if name in sys.modules:
            _put_into(sys.modules[name])


def install_at_start() -> None:
    """As `install`, but that nothing is imported before somebody asks; if A2A_INSTALL_FLASHINFER says so.

    Called when FlashInfer is first looked for in a process that was started with the variable set.
    """
    wanted = Env.read().install_flashinfer
    if wanted is not None:
        hook()
    if wanted == "shared":
        _share_workspaces()


def hook() -> None:
    """Answer for the modules of this file in all imports from now on. Idempotent."""
    if any(isinstance(each, Finder) for each in sys.meta_path):
        return
    installed = ROOT in sys.modules or importlib.machinery.PathFinder.find_spec(ROOT) is not None
    sys.meta_path.insert(0, Finder(stands_in=not installed))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins where FlashInfer is absent, and puts names into its modules as they are loaded where it is not.

    Args:
        stands_in: FlashInfer is absent.
    """

    def __init__(self, *, stands_in: bool) -> None:
        self.stands_in = stands_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of this file; None for every other."""
        if fullname == HISTORICAL or (self.stands_in and fullname in STAND_INS):
            return importlib.machinery.ModuleSpec(
                fullname, self, origin="a2a.integrations", is_package=fullname in _PACKAGES
            )
        if self.stands_in or fullname not in (COMM, MOE_EP):
            return None
        for other in sys.meta_path:
            spec = None if other is self else other.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderThatPutsIn(spec.loader)
                return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module of the historical name is this package's own; others are new."""
        if spec.name != HISTORICAL:
            return None
        from a2a.integrations import flashinfer

        # The import system writes its spec over the module's own, which is wanted back.
        self._own_spec = flashinfer.__spec__
        return flashinfer

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stand-in."""
        spec = module.__spec__
        name = module.__name__ if spec is None else spec.name
        if name == HISTORICAL:
            module.__spec__ = self._own_spec
            return
        module.__dict__.update(_names_of(name))


class _LoaderThatPutsIn(importlib.abc.Loader):
    """Loads one of FlashInfer's modules with its own loader, then puts names in."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, which sees its own loader, then put names in."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _put_into(module)


def _share_workspaces() -> None:
    from a2a.integrations.flashinfer_moe_alltoall import MoeAlltoAll, SharedRounds

    if MoeAlltoAll.shared is None:
        MoeAlltoAll.shared = SharedRounds()


def _finder() -> Finder:
    return next(each for each in sys.meta_path if isinstance(each, Finder))


def _names_of(name: str) -> dict[str, Any]:
    """What a stand-in holds."""
    from a2a.integrations import flashinfer, flashinfer_formats, flashinfer_mapping, flashinfer_moe_ep

    mapping = {each: getattr(flashinfer_mapping, each) for each in _MAPPING_NAMES}
    historical = {each: getattr(flashinfer, each) for each in _HISTORICAL_NAMES}
    formats = ("mxfp8_quantize", "nvfp4_block_scale_interleave")
    held: dict[str, dict[str, Any]] = {
        ROOT: {each: getattr(flashinfer_formats, each) for each in formats},
        COMM: {**historical, **mapping},
        "flashinfer.comm.mapping": {"Mapping": mapping["Mapping"]},
        "flashinfer.comm.mnnvl": {each: mapping[each] for each in ("CommBackend", "MnnvlConfig")},
        MOE_EP: {each: getattr(flashinfer_moe_ep, each) for each in flashinfer_moe_ep.__all__},
    }
    names = held[name]
    return names if name == ROOT else {**names, "__all__": sorted(names)}


def _put_into(module: ModuleType) -> None:
    """Give a module of FlashInfer's the names that are this package's."""
    if module.__name__ == COMM:
        from flashinfer.comm import trtllm_moe_alltoall as historical

        for name in _HISTORICAL_NAMES:
            setattr(module, name, getattr(historical, name))
        return
    from a2a.integrations.flashinfer_moe_ep import BACKEND_NAME, NVLinkOneSidedAlltoAll

    theirs = module.NVLinkOneSidedAlltoAll
    if issubclass(theirs, NVLinkOneSidedAlltoAll):
        return
    # Of both kinds, so that whoever asks for either finds it; of theirs only the kind: every verb is this package's.
    both = types.new_class("NVLinkOneSidedAlltoAll", (NVLinkOneSidedAlltoAll, theirs))
    both.__module__, both.__doc__ = MOE_EP, NVLinkOneSidedAlltoAll.__doc__
    module.register_communication(BACKEND_NAME)(both)
    module.__dict__["NVLinkOneSidedAlltoAll"] = both
