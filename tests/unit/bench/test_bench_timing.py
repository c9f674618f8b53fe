"""What a figure means, on stamps made by hand, and the order in which implementations run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from a2a.bench.implementation import Experts, Implementation, Received
from a2a.bench.timing import figures, time_rounds


def _stamps(*rounds: tuple[float, float, float]) -> np.ndarray:
    return np.array(rounds) * 1e-6


def test_the_slowest_rank_of_each_round_and_the_median_over_rounds() -> None:
    # Own times, one rank slow in the first round, the other in the others.
    fast = _stamps((0, 10, 30), (100, 110, 130), (200, 205, 210))
    slow = _stamps((0, 50, 60), (100, 101, 150), (200, 202, 204))
    got = figures([fast, slow], one_clock=False)
    assert got["dispatch"].us_p50 == pytest.approx(10)  # 50, 10, 5
    assert got["combine"].us_p50 == pytest.approx(20)  # 20, 49, 5
    assert got["pair"].us_p50 == pytest.approx(50)  # 60, 50, 10
    assert got["pair"].us_min == pytest.approx(10)
    assert got["pair"].us_p99 == pytest.approx(60, rel=0.01)


def test_on_one_clock_a_round_starts_with_its_first_rank() -> None:
    # The second rank got its core 40 us late: it is not the faster for it.
    first, second = _stamps((1000, 1010, 1030)), _stamps((1040, 1045, 1055))
    apart, together = figures([first, second], one_clock=False), figures([first, second], one_clock=True)
    assert apart["pair"].us_p50 == pytest.approx(30)
    assert together["pair"].us_p50 == pytest.approx(55)
    assert together["dispatch"].us_p50 == pytest.approx(45)
    assert together["combine"].us_p50 == pytest.approx(20)


class _Logged(Implementation):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name  # type: ignore[misc]
        self._log = log

    transport = "none"

    def load(self, rows: torch.Tensor) -> None: ...

    def dispatch(self) -> None:
        self._log.append(self.name)

    def received(self) -> Received:
        raise NotImplementedError

    def fill(self, experts: Experts) -> None: ...

    def combine(self) -> torch.Tensor:
        return torch.zeros(0)

    def close(self) -> None: ...


def test_the_order_is_rotated_and_every_round_has_its_barrier() -> None:
    log: list[str] = []
    counted: list[None] = []
    names = ["a", "b", "c"]
    got = time_rounds([_Logged(name, log) for name in names], 7, lambda: log.append("|"), lambda: counted.append(None))
    assert {name: stamps.shape for name, stamps in got.items()} == dict.fromkeys(names, (7, 3))
    assert len(counted) == 21
    assert log[0::2] == ["|"] * (len(log) // 2)
    runs = "".join(log[1::2])
    # Blocks of 3, 2 and 2 rounds, one uncounted round before each.
    assert runs == "aaaabbbbcccc" + "bbbcccaaa" + "cccaaabbb"


def test_fewer_rounds_than_implementations() -> None:
    got = time_rounds([_Logged(name, []) for name in "abc"], 1, lambda: None, lambda: None)
    assert all(stamps.shape == (1, 3) for stamps in got.values())
