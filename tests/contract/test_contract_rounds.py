"""Whole rounds against the oracle: every shape, order and scrub mode, from poisoned memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from exchange_case import Case, assert_receipt, draw, play
from ranks import Ranks

import a2a
from a2a.comm import Comm

CASES = {
    "plain": Case(ep_size=4),
    "uneven experts, odd rows": Case(
        ep_size=4, num_experts=10, hidden_size=7, more_row_bytes=(1, 3, 36, 129), top_k=3, max_num_tokens=13
    ),
    "token order": Case(ep_size=4, row_order="token", num_experts=6, more_row_bytes=(5,)),
    "token order, all scrubbed": Case(ep_size=4, row_order="token", scrub="all", num_experts=9),
    "compact, all scrubbed": Case(ep_size=4, scrub="all", num_experts=9, more_row_bytes=(3,)),
    "nothing scrubbed": Case(ep_size=4, scrub=None),
    "int64 ids, one pick": Case(ep_size=4, id_dtype=torch.int64, top_k=1, num_experts=60),
    "fp32, many picks": Case(ep_size=4, dtype=torch.float32, top_k=40, num_experts=64, hidden_size=33),
    "fp16, statistics": Case(ep_size=4, dtype=torch.float16, eplb=17, top_k=9),
    "moved experts": Case(ep_size=4, num_experts=8, placement=(3, 3, 0, 0, 0, 1, 2, 3)),
    "top_k 64, one column": Case(ep_size=4, top_k=64, num_experts=64, hidden_size=1, max_num_tokens=3),
    "one rank": Case(ep_size=1, num_experts=3, more_row_bytes=(2,)),
    "five ranks": Case(ep_size=5, num_experts=7, top_k=2, hidden_size=2880),
}


def rounds(comm: Comm, transport: str, case: Case, num_rounds: int) -> None:
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as moe:
        for number in range(num_rounds):
            play(moe, draw(case, seed=1000 + number), in_workspace=number % 2 == 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_random_rounds_equal_the_oracle(run_ranks: Ranks, transport: str, case: Case) -> None:
    run_ranks(rounds, case.ep_size, transport, case, 8)


def count_vectors(comm: Comm, transport: str) -> None:
    case = Case(ep_size=comm.Get_size(), max_num_tokens=5, num_experts=6, top_k=2, hidden_size=20)
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as moe:
        for seed, counts in enumerate(itertools.product((0, 1, 5), repeat=case.ep_size)):
            play(moe, draw(case, seed, counts, most=5))


def test_any_rank_may_be_empty_or_full(run_ranks: Ranks, transport: str) -> None:
    run_ranks(count_vectors, 3, transport)


def strange_ids(comm: Comm, transport: str) -> None:
    case = Case(ep_size=comm.Get_size(), num_experts=6, top_k=3, id_dtype=torch.int64, max_num_tokens=8)
    far = 2**40
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as moe:
        for number, values in enumerate(([-1], [6, 7], [far, -far, 2**31, -(2**31)], [-1, 0, 6], [5], [2**32])):
            drawn = draw(case, number, counts=[8] * case.ep_size)
            for each in drawn.inputs:
                each.topk_ids.copy_(torch.tensor(values).repeat(24)[:24].view(8, 3))
            play(moe, drawn)
        nowhere = torch.full((8, 3), -1)
        moe.dispatch(nowhere.to(moe.workspace.device), [nowhere.to(moe.workspace.device)], 8)
        view = moe.get_combine_payload_tensor_in_workspace(8, 64, torch.bfloat16).fill_(float("nan"))
        assert moe.combine(view, 8, payload_in_workspace=True).eq(0).all()


def test_strange_ids_go_nowhere(run_ranks: Ranks, transport: str) -> None:
    run_ranks(strange_ids, 3, transport)


def arguments(comm: Comm, transport: str) -> None:
    case = Case(ep_size=comm.Get_size(), top_k=6, more_row_bytes=(4, 8), max_num_tokens=8)
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        # Fewer picks than the object allows, another invalid id, and eight payloads of which a copy holds the ids.
        ids = torch.tensor([[0, 5], [9, 15]], dtype=torch.int32, device=device)
        payloads = [torch.full((2, 3), i, dtype=torch.uint8, device=device) for i in range(7)] + [ids.clone()]
        views = moe.dispatch(ids, payloads, 4, 77, 7)
        counts = moe.recv_counts.tolist()
        for source in range(case.ep_size):
            assert views[7][source, counts[source] :].eq(77).all(), views[7][source]
            assert [int(view[source, 0, 0]) for view in views[:7]] == list(range(7)) or not counts[source]
        rows = torch.ones(case.ep_size * 4, 10, dtype=torch.float16, device=device)
        output = torch.full((2, 10), 9.0, dtype=torch.float32, device=device)
        result = moe.combine(rows, 4, output=output, output_dtype=torch.float32)
        assert result is output
        owners = case.placed().owners(ids.cpu())
        wanted = torch.tensor([len(set(row.tolist())) for row in owners], dtype=torch.float32)
        assert torch.equal(result.cpu(), wanted[:, None].expand(2, 10)), result
        for name in ("max_num_tokens", "top_k", "num_experts", "hidden_size"):
            assert getattr(moe, name) == getattr(case, name)
        assert moe.workspace.shape == (case.ep_size, moe.workspace_size_per_rank)
        assert moe.transport == transport and moe.ep_rank == comm.Get_rank() and moe.ep_size == comm.Get_size()


def test_arguments_mean_what_they_say(run_ranks: Ranks, transport: str) -> None:
    run_ranks(arguments, 4, transport)


def exact_sums(comm: Comm, transport: str) -> None:
    """Identity experts on small integers: the sum is the row times its number of destination ranks, exactly."""
    ep, n, hidden = comm.Get_size(), 32, 48
    with a2a.MoeAlltoAll(
        max_num_tokens=n, top_k=4, num_experts=13, hidden_size=hidden, comm=comm, transport=transport
    ) as moe:
        device = moe.workspace.device
        for number in range(4):
            generator = torch.Generator().manual_seed(100 * number + comm.Get_rank())
            ids = torch.randint(0, 13, (n, 4), generator=generator, dtype=torch.int32).to(device)
            rows = torch.randint(-8, 9, (n, hidden), generator=generator).bfloat16().to(device)
            views = moe.dispatch(ids, [rows, ids], n)
            combined = moe.combine(views[0].clone(), n)
            owners = moe.placement.owners(ids.cpu())
            ranks = torch.tensor([len(set(row.tolist())) for row in owners])
            assert torch.equal(combined.cpu(), rows.cpu() * ranks[:, None].bfloat16())
            assert ep >= int(ranks.max())


def payload_without_bytes(comm: Comm, transport: str) -> None:
    """Any payload may have rows of no bytes, and so no address; the others come as ever."""
    case = Case(ep_size=comm.Get_size(), max_num_tokens=8)
    with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport=transport) as moe:
        drawn = draw(case, 4)
        rank, device, most = comm.Get_rank(), moe.workspace.device, drawn.runtime_max_tokens_per_rank
        rows = [each.to(device) for each in drawn.inputs[rank].payloads]
        wanted = drawn.receipts()[rank]
        for place in (0, 1, len(rows)):
            given = [*rows[:place], torch.empty((len(rows[0]), 0), dtype=torch.uint8, device=device), *rows[place:]]
            views = moe.dispatch(rows[1], given, most)
            assert views.pop(place).shape == (case.ep_size, most, 0)
            assert_receipt(wanted, views)
            moe.combine(views[0].clone(), most)


def test_a_payload_may_have_no_bytes(run_ranks: Ranks, transport: str) -> None:
    run_ranks(payload_without_bytes, 2, transport)


def test_identity_experts_sum_exactly(run_ranks: Ranks, transport: str) -> None:
    run_ranks(exact_sums, None, transport)
