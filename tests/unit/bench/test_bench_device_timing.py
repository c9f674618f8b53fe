"""Dispatches by themselves: what is captured, what is counted, and that what they brought is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from a2a.bench import device_timing
from a2a.bench.exchange import Exchange
from a2a.bench.implementation import Case, random_rows
from a2a.bench.workload import workload
from a2a.comm.protocol import SingleComm


class Device:
    """In place of torch.cuda: a graph does again what was done while it was captured, and time is counted in calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._capturing: list[Any] | None = None

    def do(self, word: str, action: Any = lambda: None) -> None:
        def it() -> None:
            self.log.append(word)
            action()

        if self._capturing is not None:
            self._capturing.append(it)
        # The verbs' own checks want a round's calls in their order, captured or not.
        it()

    def CUDAGraph(self) -> Any:
        device = self

        class Graph:
            def __init__(self) -> None:
                self.actions: list[Any] = []

            def replay(self) -> None:
                device.log.append("replay")
                for action in self.actions:
                    action()

        return Graph()

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self._capturing = graph.actions
        yield
        self._capturing = None

    def Event(self, enable_timing: bool, external: bool = False) -> Any:
        device = self

        class Event:
            def __init__(self) -> None:
                self.at = -1

            def record(self) -> None:
                def note() -> None:
                    self.at = device.log.count("dispatch")

                device.do("event", note)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.log.append("pause")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("CUDAGraph", "graph", "Event", "synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


class Watched(Exchange):
    """a2a itself, whose rounds are part of a graph where one is being captured."""

    def __init__(self, case: Case, device: Device) -> None:
        super().__init__(case, SingleComm())
        self._device = device

    def dispatch(self) -> None:
        self._device.do("dispatch", super().dispatch)

    def combine(self) -> torch.Tensor:
        self._device.do("combine", super().combine)
        return self._output

    @contextlib.contextmanager
    def dispatches(self, count: int) -> Iterator[Any]:
        with super().dispatches(count) as made:
            if made is not None:
                send, end, device = made.dispatch, made.combine, self._device
                made.dispatch = lambda index: device.do("dispatch", lambda: send(index))  # type: ignore[method-assign]
                made.combine = lambda index: device.do("combine", lambda: end(index))  # type: ignore[method-assign]
            yield made


def case_of(row_order: str, format_name: str, num_tokens: int) -> Case:
    return Case(
        ep_rank=0,
        ep_size=1,
        hidden_size=256,
        num_experts=8,
        top_k=2,
        format_name=format_name,
        mx_alignment=0,
        row_order=row_order,
        payload_in_workspace=True,
        tokens_per_rank=num_tokens,
        workload=workload("uniform", ep_size=1, tokens=num_tokens, num_experts=8, top_k=2, seed=1),
        transport="host",
    )


@pytest.mark.parametrize(
    ("row_order", "format_name", "num_tokens"), [("token", "bf16", 5), ("compact", "mxfp8", 3), ("compact", "bf16", 0)]
)
def test_replays_of_rounds_and_of_dispatches(device: Device, row_order: str, format_name: str, num_tokens: int) -> None:
    each = Watched(case_of(row_order, format_name, num_tokens), device)
    try:
        each.load(random_rows(each._case, 0, 1))
        each.dispatch()
        each.fill(lambda rows, rank: rows)
        each.combine()
        counted: list[None] = []
        got = device_timing.time_replays(
            [each], 3, 2, lambda: device.log.append("barrier"), lambda: counted.append(None)
        )
    finally:
        each.close()
    assert got.wrong == {"a2a": ""} and len(counted) == 3
    assert got.rounds["a2a"].shape == (3, 3)
    # Time is counted in dispatches: a round and a mean dispatch are one each.
    assert np.allclose(got.rounds["a2a"][:, 2] * 1e3, 1.0)
    # The device pauses while a round that is not counted and the replay behind it are handed over.
    pauses = [at for at, word in enumerate(device.log) if word == "pause"]
    wanted = ["barrier", "pause", "dispatch", "combine", "event", "replay", *["dispatch", "combine"] * 2, "event"]
    assert [device.log[at - 1 : at + 10] for at in pauses] == [wanted] * 3
    assert np.allclose(np.array(got.dispatches["a2a"]) * 1e3, 1.0) and len(got.dispatches["a2a"]) == 3
    # Every replay of dispatches is met by one of their combines, and begins behind a barrier.
    last = device.log[-device.log[::-1].index("synchronize") - 1 :]
    assert last.count("combine") == device_timing._DISPATCHES and last.count("dispatch") == 0


def test_eager_rounds_have_events_of_their_own_and_a_wall(device: Device) -> None:
    each = Watched(case_of("token", "bf16", 5), device)
    counted: list[None] = []
    try:
        each.load(random_rows(each._case, 0, 1))
        stamps, wall = device_timing.time_eager_rounds(
            [each], 6, lambda: device.log.append("barrier"), lambda: counted.append(None)
        )
    finally:
        each.close()
    assert stamps["a2a"].shape == (6, 3) and len(counted) == 6 and wall["a2a"] > 0
    # In dispatches: one lies between the first two events of a round, and each round is behind the one before.
    assert np.allclose(np.diff(stamps["a2a"], axis=1) * 1e3, [1.0, 0.0])
    assert np.allclose(stamps["a2a"][:, 0] * 1e3, np.arange(6))
    # What the wall counts has no events in it.
    behind = device.log[len(device.log) - device.log[::-1].index("barrier") :]
    assert behind == ["dispatch", "combine"] * 6 + ["synchronize"]


def test_dispatches_that_bring_something_else_are_told(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    each = Watched(case_of("compact", "bf16", 4), device)
    try:
        each.load(random_rows(each._case, 0, 1))
        dispatches = each.dispatches

        @contextlib.contextmanager
        def other_rows(count: int) -> Iterator[Any]:
            with dispatches(count) as made:
                made._rows = made._rows + 1
                yield made

        monkeypatch.setattr(each, "dispatches", other_rows)
        found, reason = device_timing._time_dispatches(each, 2, lambda: None)
    finally:
        each.close()
    assert len(found) == 2 and reason.startswith("dispatches alone: data: row")


def test_dispatches_that_would_go_another_way_are_not_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    each = Watched(case_of("compact", "bf16", 4), device)
    try:
        monkeypatch.setattr(Watched, "regime", "small")
        each.load(random_rows(each._case, 0, 1))
        assert device_timing._time_dispatches(each, 2, lambda: None) == ([], "")
    finally:
        each.close()
