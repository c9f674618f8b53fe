"""The public object on GPUs: rounds against the oracle, under graphs, streams and delays."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, assert_receipt, draw
from test_memory import device_of

import a2a
from a2a.comm import Comm

pytestmark = pytest.mark.gpu(1)
ROUNDS = int(os.environ.get("A2A_GPU_TEST_ROUNDS", "12"))
MANY_ROUNDS = int(os.environ.get("A2A_GPU_TEST_MANY_ROUNDS", "400"))


def _build(comm: Comm, case: Case, **more: Any) -> a2a.MoeAlltoAll:
    torch.cuda.set_device(device_of(comm))
    budgets = {"startup_timeout_s": 60.0, "timeout_s": 60.0, **more}
    return a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="nvlink", **budgets)  # type: ignore[arg-type]


def _compare_with_the_oracle(comm: Comm, case: Case, seeds: int, in_workspace: bool) -> int:
    rank = comm.Get_rank()
    with _build(comm, case) as moe:
        for context in moe.contexts:
            assert not context.recv_counts.any() if context.state == "dispatched" else True
        for seed in range(seeds):
            round = draw(case, seed)
            receipts, mine = round.receipts(), round.inputs[rank]
            payloads = [rows.cuda() for rows in mine.payloads]
            before = [rows.clone() for rows in payloads]
            most = round.runtime_max_tokens_per_rank
            stats = None if mine.eplb_local_stats is None else mine.eplb_local_stats.cuda()
            views = moe.dispatch(payloads[1], payloads, most, eplb_local_stats=stats)
            # In stream order behind the dispatch, and before combine, after which peers may overwrite the views.
            got = [view.clone() for view in views]
            counts, sent = moe.recv_counts.clone(), moe.send_counts.clone()
            targets, slots = moe.topk_target_ranks.clone(), moe.topk_send_indices.clone()
            rows = round.expert_rows(rank, receipts).cuda()
            if in_workspace:
                area = moe.get_combine_payload_tensor_in_workspace(most, case.hidden_size, case.dtype)
                area.copy_(rows)
                rows = area
            output = moe.combine(rows, most, payload_in_workspace=in_workspace)
            torch.cuda.synchronize()
            moe.check()
            where = f"seed {seed}, rank {rank}"
            assert_receipt(receipts[rank], got)
            assert_equal(f"{where}: recv_counts", counts, receipts[rank].recv_counts)
            assert_equal(f"{where}: send_counts", sent, receipts[rank].send_counts)
            assert_equal(f"{where}: topk_target_ranks", targets, receipts[rank].topk_target_ranks)
            assert_equal(f"{where}: topk_send_indices", slots, receipts[rank].topk_send_indices)
            assert_equal(f"{where}: output", output, round.sums(receipts)[rank])
            for old, new in zip(before, payloads, strict=True):
                assert_equal(f"{where}: an input", new, old.cpu())
    return seeds


CASES = {
    "compact": Case(ep_size=2),
    "token": Case(ep_size=2, row_order="token", scrub="all"),
    "wide": Case(ep_size=2, hidden_size=7168, top_k=8, num_experts=256, max_num_tokens=600),
    "odd": Case(ep_size=2, hidden_size=7, more_row_bytes=(1, 3, 18, 36), top_k=5, id_dtype=torch.int64),
    "statistics": Case(ep_size=2, eplb=16),
}


@pytest.mark.parametrize("in_workspace", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_oracle(run_ranks: Any, name: str, in_workspace: bool) -> None:
    assert run_ranks(_compare_with_the_oracle, 2, CASES[name], ROUNDS, in_workspace) == [ROUNDS] * 2


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_other_numbers_of_ranks(run_ranks: Any, num_ranks: int) -> None:
    case = Case(ep_size=num_ranks, num_experts=60, top_k=6)
    assert run_ranks(_compare_with_the_oracle, num_ranks, case, 6, True) == [6] * num_ranks


# ---- graphs --------------------------------------------------------------------------------------------------------


class _Pair:
    """Dispatch, an expert stage and combine on tensors that stay where they are."""

    def __init__(self, moe: a2a.MoeAlltoAll, case: Case, num_tokens: int) -> None:
        self.moe, self.most, self.case = moe, case.max_num_tokens, case
        self.hidden = torch.zeros((num_tokens, case.hidden_size), dtype=case.dtype, device="cuda")
        self.ids = torch.zeros((num_tokens, case.top_k), dtype=torch.int32, device="cuda")
        self.output = torch.zeros_like(self.hidden)
        self.seen = torch.zeros(case.ep_size, dtype=torch.int32, device="cuda")

    def play(self) -> None:
        hidden, ids = self.moe.dispatch(self.ids, [self.hidden, self.ids], self.most)
        self.seen.copy_(self.moe.recv_counts)
        area = self.moe.get_combine_payload_tensor_in_workspace(self.most, self.case.hidden_size, self.case.dtype)
        torch.mul(hidden, (ids[..., :1] + 2).to(hidden.dtype), out=area)
        self.moe.combine(area, self.most, payload_in_workspace=True, output=self.output)


def _replay(comm: Comm, case: Case, replays: int) -> int:
    rank = comm.Get_rank()
    torch.cuda.set_device(device_of(comm))
    with _build(comm, case) as eager, _build(comm, case, name="captured") as captured:
        n = case.max_num_tokens
        wanted, got = _Pair(eager, case, n), _Pair(captured, case, n)
        graph = torch.cuda.CUDAGraph()
        # Captured with no round before: nothing may need a warm-up. Objects that are gone must not disturb it.
        _build(comm, case, name="gone").close()
        with torch.cuda.graph(graph):
            gc.collect()
            got.play()
        generator = torch.Generator(device="cuda").manual_seed(100 + rank)
        for turn in range(replays):
            ids = torch.randint(0, case.num_experts, (n, case.top_k), generator=generator, device="cuda").int()
            if rank == comm.Get_size() - 1 and turn % 3 == 1:
                ids.fill_(-1)  # A rank without tokens, and back.
            hidden = torch.randn((n, case.hidden_size), generator=generator, device="cuda").to(case.dtype)
            for pair in (wanted, got):
                pair.ids.copy_(ids)
                pair.hidden.copy_(hidden)
                pair.output.fill_(float("nan"))
            wanted.play()
            graph.replay()
            if turn % 50 == 0 or turn == replays - 1:
                torch.cuda.synchronize()
                captured.check()
            assert_equal(f"turn {turn}: output", got.output, wanted.output.cpu())
            assert_equal(f"turn {turn}: recv_counts", got.seen, wanted.seen.cpu())
    return replays


@pytest.mark.parametrize("max_num_tokens", [8, 600])
def test_replays_with_new_inputs_equal_eager_rounds(run_ranks: Any, max_num_tokens: int) -> None:
    case = Case(ep_size=2, hidden_size=256, max_num_tokens=max_num_tokens)
    assert run_ranks(_replay, 2, case, MANY_ROUNDS, timeout_s=280.0) == [MANY_ROUNDS] * 2


# ---- order and delays ----------------------------------------------------------------------------------------------


def _overtake(comm: Comm, case: Case, rounds: int) -> int:
    """Rounds without any outside barrier, each rank delayed at random on the device; checked on the device."""
    rank = comm.Get_rank()
    together = torch.Generator().manual_seed(7)
    alone = torch.Generator().manual_seed(1000 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device_of(comm))
    with _build(comm, case) as moe:
        owners = moe.placement.table.cuda()
        for _ in range(rounds):
            most = int(torch.randint(1, case.max_num_tokens + 1, (1,), generator=together))
            n = int(torch.randint(0, most + 1, (1,), generator=alone))
            ids = torch.randint(0, case.num_experts, (n, case.top_k), generator=alone).int().cuda()
            hidden = torch.randint(0, 64, (n, case.hidden_size), generator=alone).to(case.dtype).cuda()
            if int(torch.randint(0, 4, (1,), generator=alone)) == 0:
                torch.cuda._sleep(int(torch.randint(0, 100_000, (1,), generator=alone)))
            (rows,) = moe.dispatch(ids, [hidden], most)
            area = moe.get_combine_payload_tensor_in_workspace(most, case.hidden_size, case.dtype)
            area.copy_(rows)
            output = moe.combine(area, most, payload_in_workspace=True)
            hits = torch.zeros((n, case.ep_size), device="cuda")
            hits.scatter_(1, owners[ids.long()].long(), 1.0)
            wrong += (output != hidden * hits.sum(1, keepdim=True).to(case.dtype)).sum()
        torch.cuda.synchronize()
        moe.check()
    return int(wrong)


@pytest.mark.parametrize("max_num_tokens", [16, 700])
def test_no_round_overtakes_another(run_ranks: Any, max_num_tokens: int) -> None:
    case = Case(ep_size=2, hidden_size=512, max_num_tokens=max_num_tokens)
    assert run_ranks(_overtake, 2, case, MANY_ROUNDS, timeout_s=280.0) == [0, 0]


def _two_contexts(comm: Comm) -> int:
    case = Case(ep_size=comm.Get_size(), hidden_size=128)
    torch.cuda.set_device(device_of(comm))
    rank = comm.Get_rank()
    with _build(comm, case, num_contexts=2) as moe:
        for seed in range(10):
            rounds = [draw(case, 2 * seed + index) for index in range(2)]
            receipts = [round.receipts() for round in rounds]
            for context, round in zip(moe.contexts, rounds, strict=True):
                rows = [each.cuda() for each in round.inputs[rank].payloads]
                context.dispatch(rows[1], rows, round.runtime_max_tokens_per_rank)
            for context, round, receipt in reversed(list(zip(moe.contexts, rounds, receipts, strict=True))):
                rows = round.expert_rows(rank, receipt).cuda()
                output = context.combine(rows, round.runtime_max_tokens_per_rank)
                assert_equal(f"seed {seed}", output, round.sums(receipt)[rank])
        moe.check()
    return rank


def test_two_rounds_in_flight(run_ranks: Any) -> None:
    assert run_ranks(_two_contexts, 2) == [0, 1]


def _another_stream(comm: Comm) -> int:
    case = Case(ep_size=comm.Get_size(), hidden_size=2048)
    torch.cuda.set_device(device_of(comm))
    rank = comm.Get_rank()
    with _build(comm, case) as moe:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for seed in range(10):
            round = draw(case, seed)
            receipts = round.receipts()
            with torch.cuda.stream(streams[seed % 2]):
                rows = [each.cuda() for each in round.inputs[rank].payloads]
                moe.dispatch(rows[1], rows, round.runtime_max_tokens_per_rank)
                del rows
                expert = round.expert_rows(rank, receipts).cuda()
            streams[1 - seed % 2].wait_stream(streams[seed % 2])
            output = moe.combine(expert, round.runtime_max_tokens_per_rank, stream=streams[1 - seed % 2])
            streams[1 - seed % 2].synchronize()
            assert_equal(f"seed {seed}", output, round.sums(receipts)[rank])
        moe.check()
    return rank


def test_streams_may_change_between_calls(run_ranks: Any) -> None:
    assert run_ranks(_another_stream, 2) == [0, 1]
