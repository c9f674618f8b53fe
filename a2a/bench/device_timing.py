"""device_timing: rounds on GPUs: events on the stream, one by one or many in a captured graph.

Owns what a figure of a GPU means. Refuses to know what is timed.

Eager: rounds follow each other without a host barrier, as layers do; events before dispatch, between dispatch and
combine and behind combine. Graph: `rounds_per_graph` rounds in one graph, events around its replay, the figure being
one round's share; outputs are poisoned before every replay and compared after it. A replay is handed over while the
device still pauses, and comes behind a round that is not counted, so that neither the host's time to launch a graph nor
how far apart hosts do so is part of the figure. The phases of a round in a graph have
a graph of their own, with events between them, which keep kernels apart that otherwise overlap: dispatch and combine
together are slower there than the pair. Dispatch is timed a third time in a graph of dispatches alone, between events
behind the first and the last: its share of that is what it adds to a stream of kernels. Either way a round is as slow
as its slowest rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from a2a.bench.implementation import Dispatches, Implementation, Received, difference, tensor_difference
from a2a.bench.timing import Stamps

_EVENTS = 3
_DISPATCHES = 4
"""Of a graph of dispatches alone; the first is not counted. Each is a round in flight, and takes memory of its own."""
_PAUSE_CYCLES = 2_000_000
"""About a millisecond. A host that takes longer to hand over a round and a graph is seen in the figure again."""
_PHASED_ROUNDS = 8
"""Of a graph with events between phases; its first round, to which ranks come apart, is not counted."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What replays of this rank's graphs took; by name of the implementation.

    Attributes:
        rounds: stamps per replay, of a mean round, dispatch and combine not told apart.
        phases: stamps of rounds with events between phases.
        dispatches: seconds per replay, of a mean dispatch in a graph of dispatches alone; of those that have one.
        wrong: what a replay got wrong, or an empty string.
    """

    rounds: Mapping[str, Stamps]
    phases: Mapping[str, Stamps]
    dispatches: Mapping[str, Sequence[float]]
    wrong: Mapping[str, str]


def time_eager_rounds(
    implementations: Sequence[Implementation],
    rounds: int,
    barrier: Callable[[], None],
    on_round: Callable[[], None],
) -> tuple[Mapping[str, Stamps], Mapping[str, float]]:
    """Time `rounds` rounds of every implementation on this rank, in as many blocks as there are implementations.

    Args:
        implementations: with rows loaded and buffers allocated; the order rotates from block to block.
        rounds: counted rounds of each.
        barrier: of hosts and devices, called before every block.
        on_round: called after every counted round.

    Returns:
        Stamps of each implementation, on this device's clock; and seconds of host time a round, from the first launch
        of a block without events to the end of its last round.
    """
    count = len(implementations)
    blocks = min(count, rounds)
    share = [rounds // blocks + (1 if block < rounds % blocks else 0) for block in range(blocks)]
    stamps: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in implementations}
    wall: dict[str, list[float]] = {each.name: [] for each in implementations}
    for block in range(blocks):
        for position in range(count):
            each = implementations[(block + position) % count]
            for _ in range(3):
                each.dispatch()
                each.combine()
            events = [[_event() for _ in range(_EVENTS)] for _ in range(share[block])]
            barrier()
            for before, between, after in events:
                before.record()
                each.dispatch()
                between.record()
                each.combine()
                after.record()
            torch.cuda.synchronize()
            # Events take the host as long as a launch.
            barrier()
            began = time.perf_counter()
            for _ in range(share[block]):
                each.dispatch()
                each.combine()
            torch.cuda.synchronize()
            wall[each.name].append((time.perf_counter() - began) / share[block])
            for of_round in events:
                at = [events[0][0].elapsed_time(event) * 1e-3 for event in of_round]
                stamps[each.name].append((at[0], at[1], at[2]))
                on_round()
    return {name: np.array(rows) for name, rows in stamps.items()}, {name: max(each) for name, each in wall.items()}


def time_replays(
    implementations: Sequence[Implementation],
    replays: int,
    rounds_per_graph: int,
    barrier: Callable[[], None],
    on_round: Callable[[], None],
) -> Replayed:
    """Time `replays` replays of a graph of `rounds_per_graph` rounds of every implementation on this rank.

    Args:
        implementations: as for `time_eager_rounds`, after a checked round whose expert rows still lie where combine
            takes them; the order rotates from replay to replay.
        barrier: of hosts and devices, called before every replay.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for each in implementations:
        each.settle()
        barrier()
        each.dispatch()
        wanted = each.combine().clone()
        barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds_per_graph):
                each.dispatch()
                output = each.combine()
        graphs[each.name] = graph
        outputs[each.name] = (output, wanted)
        barrier()
        graph.replay()
    stamps: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in implementations}
    wrong = dict.fromkeys(stamps, "")
    count = len(implementations)
    for number in range(replays):
        for position in range(count):
            each = implementations[(number + position) % count]
            name = each.name
            output, wanted = outputs[name]
            took = replay_s(graphs[name], each, output, barrier)
            stamps[name].append((0.0, 0.0, took / rounds_per_graph))
            wrong[name] = wrong[name] or tensor_difference(f"replay {number}: sums", output, wanted)
            on_round()
    phases = {each.name: _time_phases(each, replays, barrier) for each in implementations}
    dispatches: dict[str, list[float]] = {}
    for each in implementations:
        found, reason = _time_dispatches(each, replays, barrier)
        if found:
            dispatches[each.name] = found
        wrong[each.name] = wrong[each.name] or reason
    return Replayed({name: np.array(rows) for name, rows in stamps.items()}, phases, dispatches, wrong)


def _time_dispatches(each: Implementation, replays: int, barrier: Callable[[], None]) -> tuple[list[float], str]:
    """Seconds of a mean dispatch per replay, none where it cannot be had; and what the last replay got wrong."""
    barrier()
    each.dispatch()
    # A limit signals nothing: its peers may still be writing.
    barrier()
    wanted = each.received()
    each.combine()
    with each.dispatches(_DISPATCHES) as alone:
        if alone is None:
            return [], ""
        took, reason = _replay_dispatches(alone, replays, barrier, wanted)
        barrier()
    return took, reason and f"dispatches alone: {reason}"


def _replay_dispatches(
    alone: Dispatches, replays: int, barrier: Callable[[], None], wanted: Received
) -> tuple[list[float], str]:
    sends, ends = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    behind_first, behind_last = _event(external=True), _event(external=True)
    barrier()
    with torch.cuda.graph(sends):
        alone.dispatch(0)
        behind_first.record()
        for index in range(1, _DISPATCHES):
            alone.dispatch(index)
        behind_last.record()
    with torch.cuda.graph(ends):
        for index in range(_DISPATCHES):
            alone.combine(index)
    took, reason = [], ""
    # Once more than is counted: the first round of an object is cold.
    for number in range(replays + 1):
        barrier()
        sends.replay()
        torch.cuda.synchronize()
        if number:
            took.append(float(behind_first.elapsed_time(behind_last)) * 1e-3 / (_DISPATCHES - 1))
        if number == replays:
            barrier()
            reason = difference(alone.received(), wanted)
        ends.replay()
    return took, reason


def replay_s(graph: torch.cuda.CUDAGraph, each: Implementation, output: Tensor, barrier: Callable[[], None]) -> float:
    """Seconds of one replay of `each`'s rounds on this rank's device; waits for it.

    Args:
        output: of its last round, poisoned before.
        barrier: of hosts and devices.
    """
    before, after = _event(), _event()
    barrier()
    torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]
    each.dispatch()
    each.combine()
    output.view(torch.uint8).fill_(0xFF)
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) * 1e-3


def _time_phases(each: Implementation, replays: int, barrier: Callable[[], None]) -> Stamps:
    graph = torch.cuda.CUDAGraph()
    events = [[_event(external=True) for _ in range(_EVENTS)] for _ in range(_PHASED_ROUNDS)]
    barrier()
    with torch.cuda.graph(graph):
        for before, between, after in events:
            before.record()
            each.dispatch()
            between.record()
            each.combine()
            after.record()
    stamps = []
    for _ in range(replays):
        barrier()
        graph.replay()
        torch.cuda.synchronize()
        first = events[0][0]
        stamps += [[first.elapsed_time(event) * 1e-3 for event in of_round] for of_round in events[1:]]
    return np.array(stamps)


def _event(external: bool = False) -> torch.cuda.Event:
    # One that is recorded in a capture and read by the host must be external to it.
    return torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
