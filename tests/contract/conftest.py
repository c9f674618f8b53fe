"""The contract suite runs on every transport that this machine has; `transport` names the one at hand."""

from __future__ import annotations

import pytest
import torch

from a2a.transport import AUTOMATIC


def _found() -> list[str]:
    # One GPU is enough: ranks share it.
    return [name for name in AUTOMATIC if name == "host" or torch.cuda.is_available()]


@pytest.fixture(params=[name for name in _found() if name == "host"])
def waiting_transport(request: pytest.FixtureRequest) -> str:
    """A transport whose verbs return when the round is over, so that they themselves raise what peers object to.

    The others raise it at the next call or check: tests/gpu/test_failures.py.
    """
    return str(request.param)


@pytest.fixture(params=_found())
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
