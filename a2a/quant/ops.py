"""ops: the a2a namespace of torch.library, one registration call for every operator of the package.

Owns how an operator is declared: its schema, the kernel that runs on any device, and the fake that gives shapes to
torch.compile. Refuses to know what any operator computes.

`torch.library.custom_op` is not used: its wrappers import torch._dynamo on the first call, which costs more than a
round of the exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

NAMESPACE: Final = "a2a"

# torch.library is only partly annotated.
_torch_library: Any = torch.library
# Registrations live as long as the Library object; torch knows an operator by its name, so there is one per process.
_LIBRARY: Final = _torch_library.Library(NAMESPACE, "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declares an operator `a2a::<name>` and returns the callable `torch.ops.a2a.<name>.default`.

    Args:
        schema: name, arguments and returns in torch's operator schema language. No output shares memory with an input,
            and no input is changed but those that the schema says are.
        kernel: runs it with ordinary torch operators on whatever device the tensors are. Gradients are not recorded.
        fake: returns empty tensors of the shapes, dtypes and devices that `kernel` would return; sizes may be symbolic.

    Source: https://docs.pytorch.org/docs/stable/library.html
    """
    name = schema.split("(", 1)[0]

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return kernel(*args, **kwargs)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    # Without this torch marks results of inputs that require gradients, and warns in backward.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _torch_library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
