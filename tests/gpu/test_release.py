"""Physical memory that goes and comes back under the same addresses, and a graph captured before that replays after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, draw
from test_memory import device_of

import a2a
from a2a.comm import Comm
from a2a.errors import StateError

pytestmark = pytest.mark.gpu(1)
CASE = Case(ep_size=2, max_num_tokens=512, hidden_size=4096)


def _build(comm: Comm, **more: Any) -> a2a.MoeAlltoAll:
    torch.cuda.set_device(device_of(comm))
    return a2a.MoeAlltoAll(
        **CASE.constructor(), comm=comm, transport="nvlink", startup_timeout_s=60.0, timeout_s=60.0, **more
    )


def _used_bytes(comm: Comm) -> int:
    """Of this rank's GPU, while no rank allocates."""
    torch.cuda.synchronize()
    comm.barrier()
    free, total = torch.cuda.mem_get_info()
    comm.barrier()
    return total - free


def _memory_is_given_back(comm: Comm) -> list[bool]:
    moe = _build(comm)
    address, facts = moe.workspace.data_ptr(), []
    for cycle in range(3):
        rank, round = comm.Get_rank(), draw(CASE, cycle)
        receipts, most = round.receipts(), round.runtime_max_tokens_per_rank
        rows = [each.cuda() for each in round.inputs[rank].payloads]
        moe.dispatch(rows[1], rows, most)
        out = moe.combine(round.expert_rows(rank, receipts).cuda(), most)
        torch.cuda.synchronize()
        moe.check()
        assert_equal("combined", out, round.sums(receipts)[rank])
        full = _used_bytes(comm)
        moe.release()
        # Ranks may share the GPU: all of them have let go.
        facts.append(_used_bytes(comm) <= full - moe.workspace_size_per_rank)
        with pytest.raises(StateError, match="restore"):
            moe.dispatch(rows[1], rows, most)
        with pytest.raises(StateError, match="restore"):
            moe.check()
        comm.barrier()
        moe.restore()
        facts.append(moe.workspace.data_ptr() == address)
        facts.append(abs(_used_bytes(comm) - full) <= 8 << 20)
        facts.append(not bool(moe.workspace[rank].any()))
        comm.barrier()
    moe.release()
    moe.close()
    return facts


@pytest.mark.alone
def test_memory_is_given_back_and_comes_again(run_ranks: Any) -> None:
    for facts in run_ranks(_memory_is_given_back, 2):
        assert all(facts), facts


def _graphs_replay(comm: Comm, most: int) -> int:
    """Rounds captured before; replayed, released, restored, replayed, with other inputs each time."""
    moe = _build(comm)
    rank = comm.Get_rank()
    counts = [most, max(1, most // 3)]
    first = draw(CASE, 0, counts, most)
    rows = [each.cuda() for each in first.inputs[rank].payloads]
    made = first.expert_rows(rank, first.receipts()).cuda()

    def play() -> torch.Tensor:
        moe.dispatch(rows[1], rows, most)
        view = moe.get_combine_payload_tensor_in_workspace(most, CASE.hidden_size, CASE.dtype)
        view.copy_(made)
        return moe.combine(view, most, payload_in_workspace=True)

    play()
    torch.cuda.synchronize()
    moe.check()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = play()
    seed = 0
    for cycle in range(3):
        for _ in range(3):
            seed += 1
            round = draw(CASE, seed, counts, most)
            receipts = round.receipts()
            for held, each in zip(rows, round.inputs[rank].payloads, strict=True):
                held.copy_(each)
            made.copy_(round.expert_rows(rank, receipts))
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            moe.check()
            assert_equal(f"cycle {cycle}, seed {seed}", out, round.sums(receipts)[rank])
        moe.release()
        comm.barrier()
        moe.restore()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    moe.check()
    assert_equal("after the last restore", out, round.sums(receipts)[rank])
    moe.close()
    return seed


@pytest.mark.parametrize("most", [8, 400])
def test_a_graph_captured_before_replays_after(run_ranks: Any, most: int) -> None:
    assert run_ranks(_graphs_replay, 2, most) == [9, 9]
