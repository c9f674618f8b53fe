"""How many descriptors this process holds, whatever earlier tests have left to the collector."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> int:
    """Collects first: what an earlier test has left would otherwise go between two counts, or stay after the second."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
