"""What becomes of ranks that are late, gone or of another opinion: every wait ends, with the right story."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, draw
from test_rounds import _build

import a2a
from a2a.comm import Comm
from a2a.errors import A2AError, MismatchError, PeerLost, PeerTimeout, ShapeError

pytestmark = pytest.mark.gpu(1)
CASE = Case(ep_size=2, hidden_size=256)


def _exact_round(moe: a2a.MoeAlltoAll, rank: int, seed: int) -> None:
    round = draw(CASE, seed)
    receipts = round.receipts()
    rows = [each.cuda() for each in round.inputs[rank].payloads]
    moe.dispatch(rows[1], rows, round.runtime_max_tokens_per_rank)
    output = moe.combine(round.expert_rows(rank, receipts).cuda(), round.runtime_max_tokens_per_rank)
    torch.cuda.synchronize()
    moe.check()
    assert_equal(f"rank {rank}, seed {seed}", output, round.sums(receipts)[rank])


def _until_error(moe: a2a.MoeAlltoAll, within_s: float) -> A2AError:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            moe.check()
        except A2AError as error:
            return error
        time.sleep(0.01)
    raise AssertionError(f"no error within {within_s} s")


def _dispatch(moe: a2a.MoeAlltoAll, most: int = 8) -> None:
    ids = torch.zeros((4, CASE.top_k), dtype=torch.int32, device="cuda")
    moe.dispatch(ids, [torch.ones((4, CASE.hidden_size), dtype=CASE.dtype, device="cuda"), ids], most)


def _late(comm: Comm) -> tuple[str, dict[str, Any]]:
    rank = comm.Get_rank()
    with _build(comm, CASE, timeout_s=2.0) as moe:
        _exact_round(moe, rank, 0)
        if rank == 0:
            _dispatch(moe)
            error = _until_error(moe, 4.0)
        else:
            time.sleep(5.0)
            error = _until_error(moe, 1.0)
        alive = int(torch.arange(10, device="cuda").sum())
        assert alive == 45
        for again in range(2):
            try:
                moe.check()
            except A2AError as same:
                assert type(same) is type(error), again
        moe.reset(timeout_s=30.0)
        for seed in range(1, 5):
            _exact_round(moe, rank, seed)
    return type(error).__name__, error.to_facts()


@pytest.mark.alone
def test_a_late_rank_is_named_and_reset_goes_on(run_ranks: Any) -> None:
    first, second = run_ranks(_late, 2)
    for kind, facts in (first, second):
        assert kind == PeerTimeout.__name__
        assert (facts["rank"], facts["peer"], facts["phase"], facts["round"]) == (0, 1, "dispatch", 2)
        assert 2.0 <= facts["waited_s"] <= 2.5, facts
    assert first[1]["reporter"] is None and second[1]["reporter"] == 0


def _disagree_on_all(comm: Comm) -> list[tuple[str, dict[int, object], list[int]]]:
    return [_disagree(comm, what) for what in DISAGREEMENTS]


def _disagree(comm: Comm, what: str) -> tuple[str, dict[int, object], list[int]]:
    """The last rank says something else than the others."""
    rank = comm.Get_rank()
    odd = rank == comm.Get_size() - 1
    case = dataclasses.replace(CASE, ep_size=comm.Get_size(), eplb=3)
    with _build(comm, case) as moe:
        for _ in range(2):
            ids = torch.zeros((4, case.top_k), dtype=torch.int32, device="cuda")
            rows = torch.ones((4, case.hidden_size), dtype=case.dtype, device="cuda")
            payload = torch.ones((case.ep_size, 8, case.hidden_size), dtype=case.dtype, device="cuda")
            stats = torch.zeros(3, dtype=torch.int32, device="cuda") if odd and what == "statistics" else None
            most = 9 if odd and what == "rows" else 8
            payloads = [rows[:, :9].contiguous() if odd and what == "width" else rows, ids]
            moe.dispatch(ids, payloads[: 1 if odd and what == "payloads" else 2], most, eplb_local_stats=stats)
            if what.startswith("combine"):
                wrong = payload[..., :8].contiguous() if what == "combine columns" else payload.half()
                moe.combine(wrong if odd else payload, 8)
            error = _until_error(moe, 10.0)
            torch.cuda.synchronize()
            counts = moe.recv_counts.tolist()
            moe.reset(timeout_s=30.0)
        # The object is as good as new.
        moe.dispatch(ids, [rows, ids], 8)
        output = moe.combine(payload, 8)
        torch.cuda.synchronize()
        moe.check()
        assert output.eq(1).all()
    assert isinstance(error, MismatchError), error
    return error.what, dict(error.values), counts


DISAGREEMENTS: dict[str, tuple[str, list[object]]] = {
    "rows": ("runtime_max_tokens_per_rank in dispatch", [8, 8, 9]),
    "width": ("payload_row_bytes in dispatch", [[512, 16], [512, 16], [18, 16]]),
    "payloads": ("payload_row_bytes in dispatch", [[512, 16], [512, 16], [512]]),
    "statistics": ("eplb_local_stats in dispatch", [False, False, True]),
    "combine columns": ("payload_columns in combine", [256, 256, 8]),
    "combine dtype": ("payload_dtype in combine", ["bfloat16", "bfloat16", "float16"]),
}


def test_ranks_that_disagree_all_say_so(run_ranks: Any) -> None:
    for of_rank in run_ranks(_disagree_on_all, 3):
        for (what, (named, values)), (told, said, counts) in zip(DISAGREEMENTS.items(), of_rank, strict=True):
            assert told == named and said == dict(enumerate(values)), what
            if not what.startswith("combine"):
                assert counts == [0, 0, 0], what


def _refused(comm: Comm) -> tuple[str, dict[str, Any]]:
    rank = comm.Get_rank()
    with _build(comm, CASE) as moe:
        _exact_round(moe, rank, 0)
        if rank == 0:
            try:
                _dispatch(moe)
                error: A2AError = _until_error(moe, 10.0)
            except ShapeError as known:
                # Heard before the launch, which then was refused.
                error = known
        else:
            with pytest.raises(ShapeError) as caught:
                _dispatch(moe, CASE.max_num_tokens + 1)
            error = caught.value
        moe.reset(timeout_s=30.0)
        _exact_round(moe, rank, 1)
    return type(error).__name__, error.to_facts()


def test_an_argument_refused_on_one_rank_is_told_to_all(run_ranks: Any) -> None:
    first, second = run_ranks(_refused, 2)
    assert first[0] == second[0] == ShapeError.__name__
    assert first[1]["what"] == second[1]["what"] == "runtime_max_tokens_per_rank"


def _killed(comm: Comm, in_a_graph: bool) -> tuple[str, dict[str, Any], float, float]:
    """The error, its facts, and seconds from before the launch to the error and to the end of all launched work."""
    rank = comm.Get_rank()
    moe = _build(comm, CASE)
    _exact_round(moe, rank, 0)
    ids = torch.zeros((4, CASE.top_k), dtype=torch.int32, device="cuda")
    rows = torch.ones((4, CASE.hidden_size), dtype=CASE.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    if in_a_graph:
        with torch.cuda.graph(graph):
            for _ in range(1000):
                (got,) = moe.dispatch(ids, [rows], 8)
                moe.combine(got.clone(), 8)
    comm.barrier()
    if rank == 1:
        if in_a_graph:
            # In the middle of the replay, which takes several times as long.
            graph.replay()
            time.sleep(2e-3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        if in_a_graph:
            for _ in range(3):
                graph.replay()
        else:
            _dispatch(moe)
        error = _until_error(moe, 20.0)
    except PeerLost as known:
        # The connection closed before the launch, which then was refused.
        error = known
    told = time.monotonic() - start
    torch.cuda.synchronize()
    ended = time.monotonic() - start
    # Whatever the state in which the loss found this rank, it is what every call says from now on.
    for again in (moe.check, lambda: _dispatch(moe)):
        with pytest.raises(PeerLost):
            again()
    moe.close()
    return type(error).__name__, error.to_facts(), told, ended


@pytest.mark.alone
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_a_killed_rank_is_found_by_its_closed_connection(run_ranks: Any, in_a_graph: bool) -> None:
    outcomes = {each.rank: each for each in run_ranks.outcomes(_killed, 2, in_a_graph, grace_s=30.0)}
    assert outcomes[1].exit_status == -signal.SIGKILL
    assert outcomes[0].ok, outcomes[0].error
    kind, facts, told, ended = outcomes[0].result
    assert kind == PeerLost.__name__ and facts["peer"] == 1
    # Deadlines are 60 s here. What is left of the replays, thousands of launches, ends without waiting.
    assert told < 1.0 and ended < 1.5, (told, ended)
