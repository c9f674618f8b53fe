"""The contract suite runs on every transport that this machine has; `transport` names the one at hand."""

from __future__ import annotations

import pytest
import torch

from a2a.transport import TRANSPORTS


def _found() -> list[str]:
    # One GPU is enough: ranks share it.
    return [name for name in TRANSPORTS if name == "host" or torch.cuda.is_available()]


@pytest.fixture(params=_found())
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
