"""Which verb is legal when, two objects and two contexts at once, growth, closing."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from exchange_case import Case, draw, play
from ranks import Ranks

import a2a
from a2a.comm import Comm
from a2a.env import MAX_TIMEOUT_S
from a2a.errors import ConfigError, ShapeError, StateError


def states(comm: Comm, transport: str) -> None:
    case = Case(ep_size=comm.Get_size())
    moe = a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport)
    device, rank = moe.workspace.device, comm.Get_rank()
    ids = torch.zeros((1, 4), dtype=torch.int32, device=device)
    rows = torch.ones((1, 64), dtype=torch.bfloat16, device=device)
    payload = torch.ones((case.ep_size, 2, 64), dtype=torch.bfloat16, device=device)
    assert moe.state == "idle"
    for early in (
        lambda: moe.combine(payload, 2),
        lambda: moe.get_combine_payload_tensor_in_workspace(2, 64, torch.bfloat16),
        lambda: moe.recv_counts,
        lambda: moe.topk_target_ranks,
    ):
        with pytest.raises(StateError, match=f"rank {rank}: .*'idle'"):
            early()
    moe.dispatch(ids, [rows], 2)
    assert moe.state == "dispatched"
    with pytest.raises(StateError, match=f"rank {rank}: dispatch .*'dispatched'"):
        moe.dispatch(ids, [rows], 2)
    with pytest.raises(StateError, match="'dispatched'"):
        moe.ensure(hidden_size=128)
    with pytest.raises(ShapeError, match="that of the dispatch"):
        moe.get_combine_payload_tensor_in_workspace(3, 64, torch.bfloat16)
    with pytest.raises(ShapeError, match="at most the 128 bytes"):
        moe.get_combine_payload_tensor_in_workspace(2, 65, torch.bfloat16)
    for columns, dtype in (
        *((strange, torch.bfloat16) for strange in ("64", None, 64.0, [64], {}, True, -1, 2**70, torch.zeros(2))),
        *((64, strange) for strange in ("bfloat16", None, 16, [], torch.zeros(2))),
    ):
        with pytest.raises(ShapeError):
            moe.get_combine_payload_tensor_in_workspace(2, columns, dtype)
    # Nothing was lost by any of these.
    assert torch.equal(moe.combine(payload, 2).cpu(), torch.ones(1, 64, dtype=torch.bfloat16))
    with pytest.raises(StateError):
        moe.combine(payload, 2)
    with pytest.raises(ConfigError, match="enable_rank_mask"):
        moe.rank_mask.sum()
    with pytest.raises(ConfigError, match="wire_format"):
        moe.dispatch_tokens(rows, ids, torch.ones(1, 4, device=device), runtime_max_tokens_per_rank=2)
    # The verb that was refused told every rank: all are at the same round again.
    play(moe, draw(case, 1))
    moe.dispatch(ids, [rows], 2)
    moe.reset()
    assert moe.state == "idle"
    play(moe, draw(case, 2))
    moe.close()
    moe.close()
    assert moe.state == "closed"
    for late in (
        lambda: moe.dispatch(ids, [rows], 2),
        lambda: moe.combine(payload, 2),
        moe.reset,
        moe.check,
        lambda: moe.ensure(top_k=5),
        lambda: moe.recv_counts,
    ):
        with pytest.raises(StateError, match="closed"):
            late()


def test_states(run_ranks: Ranks, transport: str) -> None:
    run_ranks(states, None, transport)


def timeouts_can_be_set(comm: Comm, transport: str) -> None:
    with a2a.MoeAlltoAll(**Case(ep_size=comm.Get_size()).constructor(), comm=comm, transport=transport) as moe:
        assert (moe.startup_timeout_s, moe.timeout_s) == (300, 30)
        moe.startup_timeout_s, moe.timeout_s = 7, 0.5
        assert (moe.startup_timeout_s, moe.timeout_s) == (7, 0.5)
        for bad in (0, -1, float("inf"), float("nan"), "3", None, True, 2 * MAX_TIMEOUT_S, 10**400):
            with pytest.raises(ConfigError):
                moe.timeout_s = bad  # type: ignore[assignment]
            with pytest.raises(ConfigError):
                moe.startup_timeout_s = bad  # type: ignore[assignment]
            if bad is not None:
                with pytest.raises(ConfigError):
                    moe.reset(timeout_s=bad)  # type: ignore[arg-type]
        # The longest that is allowed is one that every wait can bear.
        moe.startup_timeout_s = moe.timeout_s = MAX_TIMEOUT_S
        play(moe, draw(Case(ep_size=comm.Get_size()), 1))
        play(moe, draw(Case(ep_size=comm.Get_size()), 2))
        moe.reset()
        moe.release()
        moe.restore()
        moe.ensure(num_contexts=2)


def test_timeouts_can_be_set(run_ranks: Ranks, transport: str) -> None:
    run_ranks(timeouts_can_be_set, 2, transport)


def interleaved(comm: Comm, transport: str) -> None:
    """Two objects with equal arguments, of which one has two contexts, in an order that differs by step."""
    case = Case(ep_size=comm.Get_size(), num_experts=9)
    arguments = {**case.constructor(), "comm": comm, "transport": transport}
    with (
        a2a.MoeAlltoAll(**arguments, num_contexts=2) as one,
        a2a.MoeAlltoAll(**arguments) as two,
    ):
        lanes = [*one.contexts, two]
        assert lanes[0] is one
        for step in range(12):
            order = torch.randperm(3, generator=torch.Generator().manual_seed(step)).tolist()
            held = {}
            for index in order:
                drawn = draw(case, 100 * step + index)
                mine = drawn.inputs[comm.Get_rank()]
                held[index] = (drawn, lanes[index].dispatch(mine.topk_ids, list(mine.payloads), _most(drawn), None, 1))
            for index in reversed(order):
                drawn, views = held[index]
                receipts = drawn.receipts()
                valid = receipts[comm.Get_rank()].valid
                wanted = receipts[comm.Get_rank()].payloads[0]
                assert torch.equal(views[0].cpu()[valid], wanted[valid]), (step, index)
                rows = drawn.expert_rows(comm.Get_rank(), receipts)
                view = lanes[index].get_combine_payload_tensor_in_workspace(_most(drawn), 64, torch.bfloat16)
                view.copy_(rows)
                combined = lanes[index].combine(view, _most(drawn), payload_in_workspace=True)
                assert torch.equal(combined.cpu(), drawn.sums(receipts)[comm.Get_rank()]), (step, index)


def _most(drawn: Any) -> int:
    return int(drawn.runtime_max_tokens_per_rank)


def test_two_objects_and_two_contexts_do_not_meet(run_ranks: Ranks) -> None:
    run_ranks(interleaved, None, "host")


def in_two_threads(comm: Comm) -> None:
    """A thread per context, as two micro-batches have: both wait for the same peers at the same time."""
    case = Case(ep_size=comm.Get_size(), num_experts=9)
    with a2a.MoeAlltoAll(**case.constructor(), num_contexts=2, comm=comm, transport="host") as moe:

        def rounds(index: int) -> None:
            for number in range(60):
                play(moe.contexts[index], draw(case, 100 * number + index), poison=False)

        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(rounds, index) for index in range(2)]:
                each.result()


def test_contexts_in_threads_of_their_own(run_ranks: Ranks) -> None:
    run_ranks(in_two_threads, 3)


def subgroups(comm: Comm, transport: str) -> None:
    rank = comm.Get_rank()
    half = comm.Split(rank % 2, rank)
    case, half_case = Case(ep_size=comm.Get_size()), Case(ep_size=half.Get_size())
    with (
        a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as whole,
        a2a.MoeAlltoAll(**half_case.constructor(), comm=half, transport=transport) as part,
    ):
        for number in range(4):
            play(part, draw(half_case, 10 * number + rank % 2))
            play(whole, draw(case, number))


def test_a_subgroup_beside_the_whole(run_ranks: Ranks, transport: str) -> None:
    run_ranks(subgroups, 4, transport)


def growing(comm: Comm, transport: str) -> None:
    ep, rank = comm.Get_size(), comm.Get_rank()
    small = Case(ep_size=ep, max_num_tokens=4, hidden_size=16)
    with a2a.MoeAlltoAll(**small.constructor(), comm=comm, transport=transport) as moe:
        play(moe, draw(small, 0))
        before = moe.workspace_size_per_rank
        assert not moe.ensure(max_num_tokens=3, hidden_size=16)
        # Each rank asks for something else: all get the union.
        assert moe.ensure(**({"max_num_tokens": 16} if rank == 0 else {"hidden_size": 64, "top_k": 5}))
        assert (moe.max_num_tokens, moe.hidden_size, moe.top_k) == (16, 64, 5)
        assert moe.workspace_size_per_rank > before
        large = Case(ep_size=ep)
        for number in range(3):
            play(moe, draw(large, number))
            play(moe, draw(small, number))
        assert not moe.ensure(max_num_tokens=2)
        assert moe.ensure(num_contexts=2) and len(moe.contexts) == 2
        second = moe.contexts[1]
        play(second, draw(large, 9))
        # A context that the caller holds goes on in the larger workspace.
        assert moe.ensure(max_num_tokens=17) and moe.contexts[1] is second and second.max_num_tokens == 17
        play(second, draw(large, 19))
        for bad in ({"hidden": 3}, {"num_experts": 17}, {"row_order": "token"}, {"top_k": 65}, {"max_num_tokens": 0}):
            with pytest.raises(ConfigError) as caught:
                moe.ensure(**(bad if rank == ep - 1 else {}))
            assert caught.value.reporter == (None if rank == ep - 1 else ep - 1)
        play(moe, draw(large, 10))


def test_ensure_grows_to_the_union(run_ranks: Ranks, transport: str) -> None:
    run_ranks(growing, 3, transport)


def alone() -> Comm:
    from a2a.comm.protocol import SingleComm

    return SingleComm()


def test_views_outlive_the_object_and_memory_does_not() -> None:
    """Build and close many times: descriptors, mappings and resident memory stay flat; live views stay readable."""
    process = psutil.Process(os.getpid())
    arguments = Case(ep_size=1, max_num_tokens=512, hidden_size=4096, num_experts=4).constructor()
    views, figures = [], []
    for number in range(12):
        moe = a2a.MoeAlltoAll(**arguments, comm=alone(), transport="host")
        ids = torch.zeros((1, 4), dtype=torch.int32)
        (view,) = moe.dispatch(ids, [torch.full((1, 4096), number, dtype=torch.bfloat16)], 512)
        moe.workspace.fill_(number)
        views = [*views[-1:], view]
        if number % 2:
            moe.close()
        del moe, view
        gc.collect()
        figures.append((process.num_fds(), len(process.memory_maps(grouped=False)), process.memory_info().rss))
    assert views[-1].view(torch.uint8).eq(11).all() and views[0].view(torch.uint8).eq(10).all()
    (fds, maps, rss), (last_fds, last_maps, last_rss) = figures[3], figures[-1]
    assert last_fds <= fds and last_maps <= maps + 2, figures
    assert last_rss <= rss + 32 * 2**20, figures


def under_a_model_loader(comm: Comm, transport: str) -> int:
    case = Case(ep_size=comm.Get_size())
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            moe = a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport)
            moe.ensure(hidden_size=2 * case.hidden_size)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    play(moe, draw(case, 1))
    moe.close()
    return comm.Get_rank()


def test_defaults_of_a_model_loader_change_nothing(run_ranks: Ranks, transport: str) -> None:
    assert run_ranks(under_a_model_loader, 2, transport) == [0, 1]
