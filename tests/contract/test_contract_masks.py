"""Rank masks: a masked rank is neither sent to nor waited for, and comes back by reset()."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from exchange_case import Case, assert_equal, assert_receipt, draw
from ranks import Ranks

import a2a
from a2a.comm import Comm
from a2a.errors import ConfigError


def _mask(ranks: list[int], ep: int) -> torch.Tensor:
    words = [0] * -(-ep // 64)
    for rank in ranks:
        words[rank // 64] |= 1 << rank % 64
    return torch.tensor(words, dtype=torch.uint64)


def _masked_round(moe: a2a.MoeAlltoAll, case: Case, seed: int, active: list[int], by_argument: bool) -> None:
    rank = moe.ep_rank
    drawn = draw(case, seed, counts=[5] * case.ep_size)
    receipts = drawn.receipts(active_ranks=active)
    mine, most = drawn.inputs[rank], drawn.runtime_max_tokens_per_rank
    mask, device = _mask(active, case.ep_size), moe.workspace.device
    ids = mine.topk_ids.to(device)
    rows = [ids if each is mine.topk_ids else each.to(device) for each in mine.payloads]
    if not by_argument:
        moe.rank_mask.copy_(mask)
    views = moe.dispatch(ids, rows, most, None, 1, active_rank_mask=mask if by_argument else None)
    assert_receipt(receipts[rank], views)
    assert_equal("recv_counts", moe.recv_counts, receipts[rank].recv_counts)
    assert_equal("send_counts", moe.send_counts, receipts[rank].send_counts)
    assert_equal("topk_target_ranks", moe.topk_target_ranks, receipts[rank].topk_target_ranks)
    combined = moe.combine(drawn.expert_rows(rank, receipts).to(device), most)
    assert_equal("combined", combined, drawn.sums(receipts, active_ranks=active)[rank])


def masked(comm: Comm, transport: str, row_order: str) -> None:
    ep, rank = comm.Get_size(), comm.Get_rank()
    case = Case(ep_size=ep, num_experts=9, row_order=row_order, scrub="all")
    with a2a.MoeAlltoAll(**case.constructor(), enable_rank_mask=True, comm=comm, transport=transport) as moe:
        assert moe.rank_mask.tolist() == [2**ep - 1]
        _masked_round(moe, case, 1, list(range(ep)), True)
        active = [each for each in range(ep) if each != 1]
        if rank != 1:
            _masked_round(moe, case, 2, active, True)
            _masked_round(moe, case, 3, active, False)
        comm.barrier()
        # Rank 1 missed two rounds: it comes back only when all reset.
        moe.reset()
        assert moe.rank_mask.tolist() == [2**ep - 1]
        _masked_round(moe, case, 4, list(range(ep)), True)
        ids = torch.zeros((1, 4), dtype=torch.int32, device=moe.workspace.device)
        with pytest.raises(ConfigError, match="own"):
            moe.dispatch(ids, [ids], 1, active_rank_mask=_mask([each for each in range(ep) if each != rank], ep))
        _masked_round(moe, case, 5, list(range(ep)), True)


@pytest.mark.parametrize("row_order", ["compact", "token"])
def test_masked_ranks_take_no_part(run_ranks: Ranks, transport: str, row_order: str) -> None:
    run_ranks(masked, 4, transport, row_order)


def dead(comm: Comm, transport: str) -> str:
    ep, rank = comm.Get_size(), comm.Get_rank()
    case = Case(ep_size=ep, num_experts=9)
    moe = a2a.MoeAlltoAll(**case.constructor(), enable_rank_mask=True, comm=comm, transport=transport)
    _masked_round(moe, case, 1, list(range(ep)), True)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    active = [each for each in range(ep) if each != 2]
    for seed in range(2, 6):
        _masked_round(moe, case, seed, active, True)
    # The survivors can also start over; the dead rank stays out without being named again.
    moe.reset()
    assert moe.rank_mask.tolist() == _mask(active, ep).tolist()
    _masked_round(moe, case, 7, active, False)
    moe.close()
    return "done"


def test_survivors_mask_a_dead_rank_and_go_on(run_ranks: Ranks, transport: str) -> None:
    outcomes = run_ranks.outcomes(dead, 4, transport)
    by_rank = {each.rank: each for each in outcomes}
    assert by_rank[2].exit_status == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert by_rank[rank].ok and by_rank[rank].result == "done", by_rank[rank].error
