"""Tests that need GPUs. Each says how many with `@pytest.mark.gpu(n)`; without them it is skipped, and says so."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(n): needs n CUDA GPUs")
    config.addinivalue_line("markers", "alone: times or measures the device, or runs long on it; tests/gpu/suite.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and have < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, torch sees {have}"))
