"""experts/flashinfer_kernels: what an installed flashinfer offers, found without needing it.

Owns the import, which happens when asked for and not before, and the look at a function's parameters. Refuses to know
what a function computes: whoever uses one compares it with torch first.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

MIN_CAPABILITY: Final = (10, 0)
"""The mxfp8 kernels are made for Blackwell, compute capability 10.0, and later."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        function: the function, or None.
        why: one line: its version, or what is missing.
    """

    function: Callable[..., Any] | None
    why: str


def find(name: str, parameters: Sequence[str], device: torch.device) -> Found:
    """A function of flashinfer that takes these parameters, for tensors of a device.

    Args:
        name: of the function, at the top of the package.
        parameters: names that it must have; further ones do not matter.
        device: flashinfer is imported only where it could serve.
    """
    if device.type != "cuda":
        return Found(None, f"tensors on {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return Found(None, f"compute capability {capability[0]}.{capability[1]} is below {needed}")
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:
        return Found(None, f"flashinfer cannot be imported: {error}")
    return _with_parameters(flashinfer, name, parameters)


def _with_parameters(package: Any, name: str, parameters: Sequence[str]) -> Found:
    version = f"flashinfer {getattr(package, '__version__', 'of unknown version')}"
    function = getattr(package, name, None)
    if function is None:
        return Found(None, f"{version} has no {name}")
    missing = sorted(set(parameters) - set(inspect.signature(function).parameters))
    if missing:
        return Found(None, f"{name} of {version} takes no {', '.join(missing)}")
    return Found(function, version)
