"""timing: rounds on a clock: a barrier before each, the slowest rank of each, the median over them.

Owns what a figure means. Refuses to know what is timed.

Where all ranks read one clock, dispatch and the pair last from the moment the first rank leaves the barrier to the
moment the last rank is done: with more ranks than cores a rank's own time would not show that it waited for a core, and
copies that wait for nobody would look faster than the machine is. Across machines a rank's own time is all there is.
Combine is always timed from where each rank's own dispatch ended.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from a2a.bench.implementation import Implementation

PHASES: Final = ("dispatch", "combine", "pair")
Stamps = NDArray[np.float64]
"""`[rounds, 3]`: seconds on this rank's clock at the start, between dispatch and combine, and at the end of rounds."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Figures:
    """Microseconds of a phase over the rounds, each round being as slow as its slowest rank."""

    us_p50: float
    us_p99: float
    us_min: float


def time_rounds(
    implementations: Sequence[Implementation],
    rounds: int,
    barrier: Callable[[], None],
    on_round: Callable[[], None],
) -> Mapping[str, Stamps]:
    """Time `rounds` rounds of every implementation on this rank.

    The rounds are split into as many blocks as there are implementations; in each block the implementations run one
    after the other, and every block starts with another one, so none is always first. The first round after a change of
    implementation is not counted. Collective: all ranks pass the same list in the same order.

    Args:
        implementations: with rows loaded and buffers allocated.
        rounds: counted rounds of each.
        barrier: called before every round, the same for all implementations.
        on_round: called after every counted round.
    """
    count = len(implementations)
    blocks = min(count, rounds)
    share = [rounds // blocks + (1 if block < rounds % blocks else 0) for block in range(blocks)]
    times: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in implementations}
    for block in range(blocks):
        for position in range(count):
            each = implementations[(block + position) % count]
            barrier()
            each.dispatch()
            each.combine()
            for _ in range(share[block]):
                barrier()
                times[each.name].append(_round(each))
                on_round()
    return {name: np.array(rows) for name, rows in times.items()}


def clock_name() -> str:
    """Equal on two ranks if they read the same monotonic clock: the boot that it counts from."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def figures(by_rank: Sequence[Stamps], one_clock: bool) -> Mapping[str, Figures]:
    """Median, 99th percentile and minimum over rounds of the slowest rank of each round.

    Args:
        by_rank: stamps of every rank.
        one_clock: whether the stamps of different ranks can be compared.
    """
    stamps = np.stack(by_rank)
    start, middle, end = (stamps[:, :, column] for column in range(3))
    first = start.min(axis=0) if one_clock else start
    slowest = {
        "dispatch": (middle - first).max(axis=0),
        "combine": (end - middle).max(axis=0),
        "pair": (end - first).max(axis=0),
    }
    return {
        phase: Figures(
            float(np.median(seconds) * 1e6), float(np.quantile(seconds, 0.99) * 1e6), float(seconds.min() * 1e6)
        )
        for phase, seconds in slowest.items()
    }


def _round(each: Implementation) -> tuple[float, float, float]:
    # Linux's CLOCK_MONOTONIC, which all processes of a machine share.
    start = time.monotonic()
    each.dispatch()
    middle = time.monotonic()
    each.combine()
    return start, middle, time.monotonic()
