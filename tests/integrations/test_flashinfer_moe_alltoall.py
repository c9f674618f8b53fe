"""The historical class on ranks, through its own names alone: rows, ids, counters, tables and sums are the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, assert_receipt, draw

from a2a.comm import Comm
from a2a.errors import ConfigError, MismatchError, ShapeError, StateError
from a2a.integrations.flashinfer import (
    Mapping,
    MnnvlConfig,
    MoeAlltoAll,
    SfLayout,
    install,
    moe_a2a_active_rank_mask,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from a2a.integrations.flashinfer_moe_alltoall import Rounds
from a2a.layout import align

INDEX = MoeAlltoAll._METAINFO_INDEX


class Engine:
    """An engine's communicator: its bcast counts roots elsewhere and its Split gives itself."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def Get_rank(self) -> int:
        return self._comm.Get_rank()

    def Get_size(self) -> int:
        return self._comm.Get_size()

    def allgather(self, data: Any) -> list[Any]:
        return self._comm.allgather(data)

    def bcast(self, data: Any, root: int) -> Any:
        raise ValueError(f"root {root} is not in this group")

    def barrier(self) -> None:
        self._comm.barrier()

    def Split(self, color: int, key: int) -> Engine:
        return self


def build(comm: Comm, case: Case, *, by_size: bool, more_bytes: int = 0, **more: Any) -> MoeAlltoAll:
    ep = comm.Get_size()
    mapping = Mapping(world_size=ep, rank=comm.Get_rank(), gpus_per_node=ep, tp_size=ep, moe_ep_size=ep)
    size = None
    if by_size:
        row = case.hidden_size * case.dtype.itemsize
        size = moe_a2a_get_workspace_size_per_rank(
            ep, case.max_num_tokens, row + 8 * case.top_k + sum(case.more_row_bytes), row, case.eplb
        )
    return MoeAlltoAll(
        mapping,
        case.max_num_tokens,
        case.top_k,
        case.num_experts,
        workspace_size_per_rank=None if size is None else size + more_bytes,
        hidden_size=None if by_size else case.hidden_size,
        mnnvl_config=MnnvlConfig(comm_backend=Engine(comm)),
        eplb_stats_num_experts=case.eplb,
        **more,
    )


def read(moe: MoeAlltoAll, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """int32 at an offset of metainfo in this rank's row."""
    start = int(moe.metainfo[INDEX[f"{name}_OFFSET_INDEX"]])
    num_bytes = 4 * int(torch.tensor(shape).prod())
    return moe.workspace[moe.ep_rank, start : start + num_bytes].view(torch.int32).view(shape)


def _rounds_equal_the_oracle(comm: Comm, case: Case, by_size: bool, scrub: bool, num_rounds: int) -> int:
    rank, ep = comm.Get_rank(), case.ep_size
    moe = build(comm, case, by_size=by_size, more_bytes=128)
    device = moe.workspace.device
    assert moe.metainfo.shape == (10,) and moe.metainfo.dtype == torch.int64 and not moe.metainfo.is_cuda
    assert moe.workspace.shape[0] == ep and moe.workspace.shape[1] >= moe.workspace_size_per_rank
    assert (moe.ep_rank, moe.ep_size, moe.top_k, moe.num_experts) == (rank, ep, case.top_k, case.num_experts)
    for seed in range(num_rounds):
        round = draw(case, seed)
        most, mine, receipts = round.runtime_max_tokens_per_rank, round.inputs[rank], round.receipts(invalid_id=77)
        rows = [each.to(device) for each in mine.payloads]
        stats = None if mine.eplb_local_stats is None else mine.eplb_local_stats.to(device)
        which = {"invalid_token_expert_id": 77, "expert_id_payload_index": 1} if scrub else {}
        assert moe.eplb_gathered_stats is None
        views = moe.dispatch(rows[1], rows, most, eplb_local_stats=stats, **which)
        assert type(views) is list
        assert_receipt(receipts[rank], views)
        n = mine.topk_ids.shape[0]
        assert_equal("recv", read(moe, "RECV_COUNTERS", (ep,)), receipts[rank].recv_counts)
        assert_equal("send", read(moe, "SEND_COUNTERS", (ep,)), receipts[rank].send_counts)
        for name in ("topk_target_ranks", "topk_send_indices"):
            table = read(moe, name.upper(), (case.max_num_tokens, case.top_k))
            assert_equal(name, table[:n], getattr(receipts[rank], name))
        if receipts[rank].eplb_gathered_stats is not None:
            assert moe.eplb_gathered_stats is not None
            assert_equal("statistics", moe.eplb_gathered_stats, receipts[rank].eplb_gathered_stats)
        payload = round.expert_rows(rank, receipts).to(device)
        in_workspace = seed % 2 == 0
        if in_workspace:
            view = moe.get_combine_payload_tensor_in_workspace(most, case.hidden_size, case.dtype)
            payload = view.copy_(payload)
        output = torch.empty((n, case.hidden_size), dtype=case.dtype, device=device) if seed % 3 == 0 else None
        combined = moe.combine(payload, most, payload_in_workspace=in_workspace, output=output)
        assert output is None or combined is output
        assert_equal("combined", combined, round.sums(receipts)[rank])
    moe.close()
    return num_rounds


CASES = {
    "plain": Case(ep_size=3, num_experts=7),
    "no scrub": Case(ep_size=3, scrub=None),
    "more payloads": Case(ep_size=2, more_row_bytes=(1, 3, 18), hidden_size=7, max_num_tokens=5),
    "statistics": Case(ep_size=2, eplb=5),
}


BUILDS = [(name, by_size) for name, case in CASES.items() for by_size in (True, False)[: 2 - bool(case.more_row_bytes)]]
"""hidden_size alone makes no room for further payloads."""


@pytest.mark.parametrize(("name", "by_size"), BUILDS)
def test_rounds_equal_the_oracle(run_ranks: Any, name: str, by_size: bool) -> None:
    case = CASES[name]
    results = run_ranks(_rounds_equal_the_oracle, case.ep_size, case, by_size, case.scrub is not None, 8)
    assert results == [8] * case.ep_size


def _widths_change(comm: Comm) -> list[str]:
    """Rounds of many widths in one workspace of a total size: a narrow dispatch with a wide combine and the reverse."""
    rank, ep, tokens = comm.Get_rank(), 2, 60
    mapping = Mapping(world_size=ep, rank=rank, tp_size=ep, moe_ep_size=ep)
    size = moe_a2a_get_workspace_size_per_rank(ep, tokens, 64 + 8, 64)
    moe = MoeAlltoAll(mapping, tokens, 1, 4, size, mnnvl_config=MnnvlConfig(comm_backend=comm))
    device, told = moe.workspace.device, []
    ids = torch.arange(4, dtype=torch.int32, device=device).unsqueeze(1)
    for width in (16, 64, 1, 33, 64):
        rows = torch.randint(0, 200, (4, width), dtype=torch.uint8, device=device)
        for combine_width in (32, 1, 16):
            got, got_ids = moe.dispatch(ids, [rows, ids], tokens)
            # An untouched payload: its ids came through beside the rows.
            assert got_ids[0, :2, 0].tolist() == [2 * rank, 2 * rank + 1]
            sent = moe.rounds._comm.allgather(rows.cpu())
            for src in range(ep):
                assert_equal("rows", got[src, :2], sent[src][2 * rank : 2 * rank + 2])
            view = moe.get_combine_payload_tensor_in_workspace(tokens, combine_width, torch.bfloat16)
            assert_equal("dispatched rows under the combine view", got[0, :2], sent[0][2 * rank : 2 * rank + 2])
            view.fill_(rank + 1)
            out = moe.combine(view, tokens, payload_in_workspace=True)
            assert out[:, 0].tolist() == [1, 1, 2, 2]
    wide = torch.zeros((4, 120), dtype=torch.uint8, device=device)
    with pytest.raises(ShapeError) as caught:
        moe.dispatch(ids, [wide, ids], tokens)
    told.append(caught.value.what)
    moe.dispatch(ids, [rows, ids], tokens)
    with pytest.raises(ShapeError) as caught:
        moe.get_combine_payload_tensor_in_workspace(tokens, 66, torch.bfloat16)
    told.append(caught.value.what)
    moe.combine(torch.ones((ep, tokens, 32), dtype=torch.bfloat16, device=device), tokens)
    moe.close()
    return told


def test_dispatch_and_combine_share_a_total_size(run_ranks: Any) -> None:
    assert run_ranks(_widths_change, 2) == [["input_payloads", "combine payload"]] * 2


def _refused_widths(comm: Comm) -> list[str]:
    """Rounds that are refused, by this rank or another, take no room from those that come after."""
    rank, ep, tokens = comm.Get_rank(), comm.Get_size(), 8
    rounds = Rounds(
        align(ep * tokens * 32) + align(ep * tokens * 64), 0, max_num_tokens=tokens, top_k=1, num_experts=4,
        hidden_size=64, comm=comm, transport="host",
    )  # fmt: skip
    ids, told = torch.zeros((1, 1), dtype=torch.int32), []
    narrow, wide = torch.ones((1, 32), dtype=torch.uint8), torch.ones((1, 90), dtype=torch.uint8)
    rows = torch.ones((ep, tokens, 32), dtype=torch.bfloat16)
    wider = torch.ones((ep, tokens, 40), dtype=torch.bfloat16)

    def refuse(call: Callable[[], Any]) -> None:
        with pytest.raises((ShapeError, MismatchError, ConfigError)) as caught:
            call()
        told.append(type(caught.value).__name__)

    refuse(lambda: rounds.dispatch(ids, [wide], tokens if rank else tokens + 1))
    refuse(lambda: rounds.dispatch(ids, [narrow if rank else wide], tokens))
    for _ in range(2):
        rounds.dispatch(ids, [narrow], tokens)
        refuse(lambda: rounds.combine(rows if rank else wider, tokens))
        refuse(lambda: rounds.combine(wider, tokens, output_dtype=torch.int8))
        assert rounds.combine(rows, tokens).eq(1).all()
        # The widest that there is room for beside the widest combine, and no more.
        rounds.dispatch(ids, [narrow], tokens)
        refuse(lambda: rounds.combine(torch.ones((ep, tokens, 240), dtype=torch.bfloat16), tokens))
        rounds.combine(rows, tokens)
    rounds.close()
    return told


def test_refused_rounds_take_no_room(run_ranks: Any) -> None:
    mine, other = run_ranks(_refused_widths, 2)
    assert mine == other and mine[:2] == ["ShapeError", "MismatchError"]


def _rows_of_no_token_stay_zero(comm: Comm, by_size: bool) -> int:
    case = Case(ep_size=2, max_num_tokens=8)
    moe = build(comm, case, by_size=by_size)
    # GPUs push combine rows into an area for dispatch, where there is one.
    assert "dispatch" not in {region.name for region in moe.rounds.layout.regions}
    device, rank = moe.workspace.device, comm.Get_rank()
    comm.barrier()
    start = int(moe.metainfo[INDEX["PAYLOAD_DATA_OFFSET_INDEX"]])
    assert not moe.workspace[rank, start:].any()
    comm.barrier()
    most = 8
    written = [torch.zeros((2, most), dtype=torch.bool) for _ in range(3)]
    views: list[torch.Tensor] = []
    for seed in range(10):
        round = draw(case, seed, most=most)
        receipts = round.receipts()
        rows = [each.to(device) for each in round.inputs[rank].payloads]
        views = moe.dispatch(rows[1], rows, most)
        for each, view in zip(written, views, strict=True):
            each |= receipts[rank].valid
            assert not view.cpu()[~each].view(torch.uint8).any(), "a row that no token was written to"
        moe.combine(round.expert_rows(rank, receipts).to(device), most)
    assert not written[0].all(), "the draw has padded slots"
    moe.close()
    return len(views)


@pytest.mark.parametrize("by_size", [True, False])
def test_rows_that_no_token_was_written_to_are_zero(run_ranks: Any, by_size: bool) -> None:
    assert run_ranks(_rows_of_no_token_stay_zero, 2, by_size) == [3, 3]


def _functions_of_metainfo(comm: Comm) -> None:
    case = Case(ep_size=2, max_num_tokens=4, num_experts=4, top_k=1)
    moe = build(comm, case, by_size=True)
    device, rank = moe.workspace.device, comm.Get_rank()
    ids = torch.tensor([[0], [3], [3]], dtype=torch.int32, device=device)
    (view,) = moe.dispatch(ids, [ids], 4)
    assert view[:, :, 0].tolist() == ([[0, 0, 0, 0]] * 2 if rank == 0 else [[3, 3, 0, 0]] * 2)
    moe_a2a_sanitize_expert_ids(view, moe.workspace, moe.metainfo, rank, -5)
    assert view[:, :, 0].tolist() == ([[0, -5, -5, -5]] * 2 if rank == 0 else [[3, 3, -5, -5]] * 2)
    moe_a2a_sanitize_expert_ids(view.flatten(0, 1), moe.workspace, moe.metainfo, rank, -6)
    assert view[0, 3, 0] == -6
    start = int(moe.metainfo[INDEX["SEND_COUNTERS_OFFSET_INDEX"]])
    there = rank * moe.workspace.stride(0) + start
    counts = moe_a2a_wrap_payload_tensor_in_workspace(moe.workspace, [2], there, there + 8, torch.int32)
    assert counts.tolist() == [[1], [2]]
    mine = moe_a2a_wrap_payload_tensor_in_workspace(moe.workspace[rank], [2], start, start + 8, torch.int32)
    assert mine.data_ptr() == counts.data_ptr()
    with pytest.raises(ValueError, match="slice"):
        moe_a2a_wrap_payload_tensor_in_workspace(moe.workspace[rank], [1], start, 1 << 40, torch.uint8)
    moe.combine(torch.zeros((2, 4, 8), dtype=torch.bfloat16, device=device), 4)
    moe.close()


def test_functions_read_a_class_s_workspace(run_ranks: Any) -> None:
    run_ranks(_functions_of_metainfo, 2)


def _states_and_refusals(comm: Comm) -> None:
    case = Case(ep_size=2, max_num_tokens=4, num_experts=4, top_k=1)
    moe = build(comm, case, by_size=True)
    device = moe.workspace.device
    ids = torch.zeros((2, 1), dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="dispatch first"):
        moe.combine(torch.zeros((2, 4, 8), dtype=torch.bfloat16, device=device), 4)
    with pytest.raises(StateError):
        moe.get_combine_payload_tensor_in_workspace(4, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="expert_id_payload_index"):
        moe.dispatch(ids, [ids], 4, invalid_token_expert_id=-1)
    with pytest.raises(ConfigError, match="enable_rank_mask"):
        moe.dispatch(ids, [ids], 4, active_rank_mask=moe_a2a_active_rank_mask([0, 1], 2))
    # Refused on all ranks alike, so the next round is a round for all.
    comm.barrier()
    moe.dispatch(ids, [ids], 4)
    with pytest.raises(StateError, match="combine first"):
        moe.dispatch(ids, [ids], 4)
    payload = torch.ones((2, 4, 8), dtype=torch.bfloat16, device=device)
    bad = torch.empty((3, 8), dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="output"):
        moe.combine(payload, 4, output=bad)
    comm.barrier()
    scales = torch.empty((2, 1), dtype=torch.uint8, device=device)
    wide = torch.ones((2, 4, 32), dtype=torch.bfloat16, device=device)
    data = moe.combine(
        wide, 4, output_dtype=torch.float8_e4m3fn, output_scales=scales, output_scalar_scale=3.0,
        sf_layout=SfLayout.layout_linear,
    )  # fmt: skip
    assert data.dtype == torch.float8_e4m3fn and data.shape == (2, 32)
    moe.close()
    moe.close()
    with pytest.raises(StateError, match="closed"):
        moe.dispatch(ids, [ids], 4)


def test_states_and_refusals(run_ranks: Any) -> None:
    run_ranks(_states_and_refusals, 2)


def _two_groups(comm: Comm) -> list[int]:
    """Four ranks of which two and two exchange tokens."""
    rank = comm.Get_rank()
    mapping = Mapping(world_size=4, rank=rank, tp_size=4, moe_ep_size=2, moe_tp_size=2)
    moe = MoeAlltoAll(mapping, 4, 1, 2, hidden_size=8, mnnvl_config=MnnvlConfig(comm_backend=comm))
    assert (moe.ep_rank, moe.ep_size) == (rank % 2, 2)
    ids = torch.tensor([[0], [1]], dtype=torch.int32, device=moe.workspace.device)
    rows = torch.full((2, 8), rank, dtype=torch.bfloat16, device=moe.workspace.device)
    (view,) = moe.dispatch(ids, [rows], 4)
    seen = [int(each) for each in view[:, 0, 0]]
    moe.combine(view.clone(), 4)
    moe.close()
    return seen


def test_a_mapping_splits_the_ranks_it_is_given(run_ranks: Any) -> None:
    assert run_ranks(_two_groups, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _disagreement(comm: Comm) -> str:
    case = Case(ep_size=2)
    with pytest.raises(MismatchError) as caught:
        build(comm, case, by_size=True, more_bytes=128 * comm.Get_rank())
    return str(caught.value)


def test_sizes_that_differ_are_told_on_every_rank(run_ranks: Any) -> None:
    first, second = run_ranks(_disagreement, 2)
    assert first == second and "bytes for rows" in first


def _masked(comm: Comm) -> list[int]:
    case = Case(ep_size=2, max_num_tokens=4, num_experts=2, top_k=2)
    moe = build(comm, case, by_size=True, enable_rank_mask=True)
    rank, device = comm.Get_rank(), moe.workspace.device
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    counts = []
    for active in ([0, 1], [rank]):
        mask = moe_a2a_active_rank_mask(active, 2)
        moe.dispatch(ids, [ids], 2, active_rank_mask=mask)
        counts += read(moe, "SEND_COUNTERS", (2,)).tolist()
        moe.combine(torch.ones((2, 2, 8), dtype=torch.bfloat16, device=device), 2, active_rank_mask=mask)
    moe.close()
    return counts


def test_a_rank_mask(run_ranks: Any) -> None:
    assert run_ranks(_masked, 2) == [[1, 1, 1, 0], [1, 1, 0, 1]]


def _checkpoint(comm: Comm) -> list[bool]:
    case = Case(ep_size=2, max_num_tokens=8)
    moe = build(comm, case, by_size=True)
    rank, device = comm.Get_rank(), moe.workspace.device
    address, metainfo = moe.workspace.data_ptr(), moe.metainfo.clone()
    ids = torch.zeros((1, case.top_k), dtype=torch.int32, device=device)
    facts = []
    for cycle in range(2):
        round = draw(case, cycle, most=8)
        rows = [each.to(device) for each in round.inputs[rank].payloads]
        views = moe.dispatch(rows[1], rows, 8)
        with pytest.raises(RuntimeError, match="combine first"):
            moe.checkpoint_prepare()
        receipts = round.receipts()
        for view, block in zip(views, receipts[rank].payloads, strict=True):
            assert_equal("rows", view.cpu()[receipts[rank].valid], block[receipts[rank].valid])
        out = moe.combine(round.expert_rows(rank, receipts).to(device), 8)
        assert_equal("combined", out, round.sums(receipts)[rank])
        moe.checkpoint_prepare()
        moe.checkpoint_prepare()
        for call in (
            lambda: moe.dispatch(ids, [ids], 8),
            lambda: moe.combine(ids, 8),
            lambda: moe.get_combine_payload_tensor_in_workspace(8, 8, torch.bfloat16),
        ):
            with pytest.raises(RuntimeError, match="restore"):
                call()
        facts.append(moe.eplb_gathered_stats is None)
        moe.checkpoint_restore(Engine(comm))
        moe.checkpoint_restore(Engine(comm))
        facts.append(moe.workspace.data_ptr() == address and torch.equal(moe.metainfo, metainfo))
        comm.barrier()
        facts.append(not moe.workspace[rank].any())
        comm.barrier()
    moe.close()
    return facts


def test_checkpoints(run_ranks: Any) -> None:
    for facts in run_ranks(_checkpoint, 2):
        assert all(facts), facts


def _low_precision(comm: Comm) -> list[list[float]]:
    """Rows become e4m3 in the area in which they lie, at another pitch and, with a total size, at another place."""
    case = Case(ep_size=2, hidden_size=320, max_num_tokens=12)
    rank, told = comm.Get_rank(), []
    for by_size in (True, False):
        moe = build(comm, case, by_size=by_size)
        device = moe.workspace.device
        for in_workspace in (True, False):
            round = draw(case, 3, [12, 7])
            rows = [each.to(device) for each in round.inputs[rank].payloads]
            moe.dispatch(rows[1], rows, 12)
            payload = round.expert_rows(rank, round.receipts()).to(device)
            if in_workspace:
                payload = moe.get_combine_payload_tensor_in_workspace(12, 320, case.dtype).copy_(payload)
            out = moe.combine(payload, 12, payload_in_workspace=in_workspace, use_low_precision=True)
            wanted = round.sums(round.receipts())[rank].float()
            assert (out.cpu().float() - wanted).abs().max() <= wanted.abs().max() / 8
            told.append(out.float().flatten().tolist())
        moe.close()
    return told


def test_low_precision_is_the_same_wherever_rows_lie(run_ranks: Any) -> None:
    for told in run_ranks(_low_precision, 2):
        assert all(each == told[0] for each in told) and any(told[0])


def _layers(comm: Comm, share: bool) -> list[Any]:
    """An engine's layers, each with an object of its own, one round after another; then two at once."""
    if share:
        install(share_workspaces=True)
    case = Case(ep_size=2, max_num_tokens=8)
    layers = [build(comm, case, by_size=True) for _ in range(3)]
    other = build(comm, case, by_size=True, more_bytes=128)
    device, rank = layers[0].workspace.device, comm.Get_rank()
    for seed in range(6):
        round, moe = draw(case, seed), layers[seed % 3]
        receipts, most = round.receipts(), round.runtime_max_tokens_per_rank
        rows = [each.to(device) for each in round.inputs[rank].payloads]
        other.dispatch(rows[1], [rows[1]], most)
        assert_receipt(receipts[rank], moe.dispatch(rows[1], rows, most, -1, 1))
        out = moe.combine(round.expert_rows(rank, receipts).to(device), most)
        assert_equal("combined", out, round.sums(receipts)[rank])
        other.combine(torch.ones((2, most, 8), dtype=case.dtype, device=device), most)
    layers[0].dispatch(rows[1], rows, most)
    told = ""
    try:
        layers[1].dispatch(rows[1], rows, most)
        layers[1].combine(torch.ones((2, most, 8), dtype=case.dtype, device=device), most)
    except StateError as error:
        told = error.change
    layers[0].combine(torch.ones((2, most, 8), dtype=case.dtype, device=device), most)
    places = len({each.workspace.data_ptr() for each in [*layers, other]})
    for each in layers[:2]:
        each.close()
        each.close()
    layers[2].dispatch(rows[1], rows, most)
    layers[2].combine(torch.ones((2, most, 8), dtype=case.dtype, device=device), most)
    layers[2].close()
    other.close()
    again = build(comm, case, by_size=True)
    again.close()
    return [places, told.partition(",")[0]]


@pytest.mark.parametrize(("share", "wanted"), [(False, [4, ""]), (True, [2, "call combine first"])])
def test_layers_share_a_workspace_only_if_asked_to(run_ranks: Any, share: bool, wanted: list[Any]) -> None:
    assert run_ranks(_layers, 2, share) == [wanted] * 2
