"""timing: rounds on a clock: a barrier before each, the slowest rank of each, the median over them.

Owns what a figure means. Refuses to know what is timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from a2a.bench.implementation import Implementation

PHASES: Final = ("dispatch", "combine", "pair")
Seconds = NDArray[np.float64]
"""`[rounds, 3]`: seconds of one rank in each phase of each round; pair is from dispatch's start to combine's end."""


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
) -> Mapping[str, Seconds]:
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


def figures(by_rank: Sequence[Seconds]) -> Mapping[str, Figures]:
    """Median, 99th percentile and minimum over rounds of the slowest rank of each round.

    Args:
        by_rank: of every rank, `[rounds, 3]` in the order of `PHASES`.
    """
    slowest = np.stack(by_rank).max(axis=0) * 1e6
    return {
        phase: Figures(
            float(np.median(slowest[:, column])),
            float(np.quantile(slowest[:, column], 0.99)),
            float(slowest[:, column].min()),
        )
        for column, phase in enumerate(PHASES)
    }


def _round(each: Implementation) -> tuple[float, float, float]:
    start = time.perf_counter()
    each.dispatch()
    middle = time.perf_counter()
    each.combine()
    end = time.perf_counter()
    return middle - start, end - middle, end - start
