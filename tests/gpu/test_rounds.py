"""The public object on GPUs: rounds against the oracle, under graphs, streams and delays."""

from __future__ import annotations

import gc
import os
import random
import time
from typing import Any

import pytest
import torch
from device_ranks import with_pushes
from exchange_case import Case, Round, assert_equal, assert_receipt, draw
from test_memory import device_of

import a2a
from a2a import reference
from a2a.bench.workload import workload
from a2a.comm import Comm
from a2a.config import model_preset
from a2a.errors import ConfigError
from a2a.quant import wire_format
from a2a.reference import RankInput

pytestmark = pytest.mark.gpu(1)
ROUNDS = int(os.environ.get("GPU_TEST_ROUNDS", "6"))
REPLAYS = int(os.environ.get("GPU_TEST_REPLAYS", "1000"))
MANY_ROUNDS = int(os.environ.get("GPU_TEST_MANY_ROUNDS", "10000"))


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


def _cases(comm: Comm, seeds: int) -> int:
    return sum(
        _compare_with_the_oracle(comm, case, seeds, in_workspace)
        for case in CASES.values()
        for in_workspace in (True, False)
    )


def test_rounds_equal_the_oracle(run_ranks: Any) -> None:
    assert run_ranks(_cases, 2, ROUNDS) == [ROUNDS * len(CASES) * 2] * 2


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_other_numbers_of_ranks(run_ranks: Any, num_ranks: int) -> None:
    case = Case(ep_size=num_ranks, num_experts=60, top_k=6)
    assert run_ranks(_compare_with_the_oracle, num_ranks, case, 6, True) == [6] * num_ranks


# ---- eight ranks, on however many GPUs there are -------------------------------------------------------------------


def _eight(comm: Comm) -> int:
    """Orders, shapes, recorded routings and formats, in one job."""
    rounds = 0
    for case in (
        Case(ep_size=8, num_experts=60, top_k=6),
        Case(ep_size=8, row_order="token", scrub="all", hidden_size=2880, more_row_bytes=(3, 18)),
        Case(ep_size=8, hidden_size=7168, top_k=8, num_experts=256, max_num_tokens=400),
    ):
        rounds += _compare_with_the_oracle(comm, case, 4, rounds % 2 == 0)
    for name in ("olmoe-1b-7b", "qwen1.5-moe-a2.7b"):
        _recorded(comm, name)
    for wire in ("fp8_block", "mxfp8", "nvfp4", "mxfp4"):
        _format(comm, wire)
    return rounds


def _recorded(comm: Comm, name: str) -> None:
    preset, rank, most = model_preset(name), comm.Get_rank(), 64
    case = Case(
        ep_size=8,
        max_num_tokens=most,
        top_k=preset.top_k,
        num_experts=preset.num_experts,
        hidden_size=preset.hidden_size,
    )
    routed = workload(name, ep_size=8, tokens=most, num_experts=preset.num_experts, top_k=preset.top_k)
    rows = draw(case, 1, [most] * 8).inputs
    inputs = [
        RankInput(ids, [each.payloads[0], ids, weights])
        for ids, weights, each in zip(routed.topk_ids, routed.topk_weights, rows, strict=True)
    ]
    drawn = Round(case, most, inputs)
    receipts = drawn.receipts()
    with _build(comm, case) as moe:
        mine = [each.cuda() for each in inputs[rank].payloads]
        views = moe.dispatch(mine[1], mine, most)
        assert_receipt(receipts[rank], views)
        output = moe.combine(drawn.expert_rows(rank, receipts).cuda(), most)
        assert_equal(f"{name}, rank {rank}", output, drawn.sums(receipts)[rank])
        moe.check()


def _format(comm: Comm, wire: str) -> None:
    rank, most, form = comm.Get_rank(), 40, wire_format(wire)
    case = Case(ep_size=8, max_num_tokens=most, hidden_size=512)
    drawn = draw(case, 3, [most, 0, 7, 1, most, 3, 5, 2])
    quantized = [form.quantize(each.payloads[0]) for each in drawn.inputs]
    inputs = [
        RankInput(each.topk_ids, [data, scales, *each.payloads[1:]])
        for each, (data, scales) in zip(drawn.inputs, quantized, strict=True)
    ]
    wanted = reference.dispatch(inputs, case.placed(), most, ids_payload=2)[rank]
    sizes = {"max_num_tokens": most, "top_k": case.top_k, "num_experts": case.num_experts, "hidden_size": 512}
    with a2a.MoeAlltoAll(**sizes, wire_format=wire, comm=comm, transport="nvlink", name=wire) as moe:
        hidden, ids, weights = (each.cuda() for each in drawn.inputs[rank].payloads)
        got = moe.dispatch_tokens(hidden, ids, weights, runtime_max_tokens_per_rank=most)
        assert_receipt(wanted, [got.hidden_states, got.scales, got.topk_ids, got.topk_weights])
        moe.combine(torch.zeros((8, most, 512), dtype=torch.bfloat16, device="cuda"), most)
        torch.cuda.synchronize()
        moe.check()


def test_eight_ranks(run_ranks: Any) -> None:
    assert run_ranks(_eight, 8, timeout_s=280.0) == [12] * 8


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


@pytest.mark.alone
@pytest.mark.parametrize("max_num_tokens", [8, 600])
def test_replays_with_new_inputs_equal_eager_rounds(run_ranks: Any, max_num_tokens: int) -> None:
    case = Case(ep_size=2, hidden_size=256, max_num_tokens=max_num_tokens)
    assert run_ranks(_replay, 2, case, REPLAYS, timeout_s=280.0) == [REPLAYS] * 2


# ---- order and delays ----------------------------------------------------------------------------------------------


def _overtake(comm: Comm, case: Case, rounds: int, pushes: bool) -> int:
    """Rounds without any outside barrier, each rank delayed at random on the device; checked on the device.

    Now and then the rows that came are given back from where they lie.
    """
    rank = comm.Get_rank()
    together = random.Random(7)
    alone = random.Random(1000 + rank)
    on_device = torch.Generator(device="cuda").manual_seed(1000 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with _build(comm, case) as moe:
        transport = moe._shared.transport
        transport.tune(with_pushes(transport.tuning, case.ep_size, pushes))
        comm.barrier()
        owners = moe.placement.table.cuda().long()
        for _ in range(rounds):
            most = together.randint(1, case.max_num_tokens)
            n = alone.randint(0, most)
            ids = torch.randint(
                0, case.num_experts, (n, case.top_k), generator=on_device, dtype=torch.int32, device="cuda"
            )
            hidden = torch.randint(0, 64, (n, case.hidden_size), generator=on_device, device="cuda").to(case.dtype)
            _linger(alone)
            (rows,) = moe.dispatch(ids, [hidden], most)
            in_place = alone.random() < 0.8
            if in_place:
                rows = moe.get_combine_payload_tensor_in_workspace(most, case.hidden_size, case.dtype).copy_(rows)
            _linger(alone)
            output = moe.combine(rows, most, payload_in_workspace=in_place)
            hits = torch.zeros((n, case.ep_size), device="cuda").scatter_(1, owners[ids.long()], 1.0)
            wrong += (output != hidden * hits.sum(1, keepdim=True).to(case.dtype)).sum()
        torch.cuda.synchronize()
        moe.check()
    return int(wrong)


def _linger(alone: random.Random) -> None:
    """Now and then: the device up to about 50 us, or the host up to 1 ms."""
    which = alone.randint(0, 19)
    if which < 4:
        torch.cuda._sleep(alone.randint(0, 100_000))
    elif which == 4:
        time.sleep(alone.random() * 1e-3)


@pytest.mark.alone
@pytest.mark.parametrize(("max_num_tokens", "pushes"), [(16, False), (700, False), (700, True)])
def test_no_round_overtakes_another(run_ranks: Any, max_num_tokens: int, pushes: bool) -> None:
    case = Case(ep_size=2, hidden_size=512, max_num_tokens=max_num_tokens)
    assert run_ranks(_overtake, 2, case, MANY_ROUNDS, pushes, timeout_s=280.0) == [0, 0]


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


def _late_ids(comm: Comm) -> bool:
    """int64 ids that a busy stream makes, given with that stream while another one is current."""
    case = Case(ep_size=comm.Get_size(), hidden_size=128, row_order="token")
    torch.cuda.set_device(device_of(comm))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with _build(comm, case, wire_format="bf16") as moe:
        stream, weights = torch.cuda.Stream(), torch.ones((4, case.top_k), device="cuda")
        rows = torch.ones((4, case.hidden_size), dtype=case.dtype, device="cuda")
        wanted = torch.arange(4 * case.top_k, device="cuda").view(4, -1) % case.num_experts
        ids = torch.full_like(wanted, -1)
        torch.cuda.synchronize()
        for _ in range(3):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                ids.copy_(wanted)
            got = moe.dispatch_tokens(rows, ids, weights, runtime_max_tokens_per_rank=4, stream=stream)
            stream.synchronize()
            mine = moe.placement.table.cuda()[wanted] == moe.ep_rank
            wrong += (got.topk_ids[moe.ep_rank][mine.any(1)] != wanted[mine.any(1)]).sum()
            area = moe.get_combine_payload_tensor_in_workspace(4, case.hidden_size, case.dtype)
            moe.combine(area, 4, payload_in_workspace=True, stream=stream)
            stream.synchronize()
            ids.fill_(-1)
            torch.cuda.synchronize()
        moe.check()
    return not int(wrong)


def _mask_in_a_capture(comm: Comm) -> bool:
    """Refused with the facts, not by a copy that a capture cannot have."""
    case = Case(ep_size=comm.Get_size(), hidden_size=128)
    torch.cuda.set_device(device_of(comm))
    with _build(comm, case, enable_rank_mask=True) as moe:
        ids = torch.zeros((4, case.top_k), dtype=torch.int32, device="cuda")
        mask = torch.tensor([3], dtype=torch.uint64)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Something to capture.
            ids.add_(0)
            with pytest.raises(ConfigError, match="active_rank_mask"):
                moe.dispatch(ids, [ids], 4, active_rank_mask=mask)
        moe.reset()
        moe.dispatch(ids, [ids], 4, active_rank_mask=mask)
        area = moe.get_combine_payload_tensor_in_workspace(4, 128, torch.bfloat16)
        moe.combine(area, 4, payload_in_workspace=True)
        torch.cuda.synchronize()
        moe.check()
    return True


def test_a_mask_from_the_host_is_refused_in_a_capture(run_ranks: Any) -> None:
    assert run_ranks(_mask_in_a_capture, 2) == [True, True]


def test_what_a_call_prepares_goes_to_its_stream(run_ranks: Any) -> None:
    assert run_ranks(_late_ids, 2) == [True, True]


def test_streams_may_change_between_calls(run_ranks: Any) -> None:
    assert run_ranks(_another_stream, 2) == [0, 1]
