"""Several ranks of one process on one GPU, a stream each, on an ordinary CUDA tensor: the kernels without the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from exchange_case import Case, Round, assert_equal, assert_receipt, draw
from torch import Tensor

from a2a.config import ExchangeConfig
from a2a.layout import WorkspaceLayout, align
from a2a.nvlink.params import control_regions
from a2a.quant import ScaleLayout
from a2a.reference import RankReceipt
from a2a.transport import CombineCall, DispatchCall, Payload

pytestmark = pytest.mark.gpu(1)
ROUNDS = int(os.environ.get("A2A_GPU_TEST_ROUNDS", "12"))


class Ranks:
    """`ep_size` ranks on one poisoned workspace tensor."""

    def __init__(self, case: Case, small_max_tokens: int) -> None:
        from a2a.nvlink.exchange import Exchange

        self.case = case
        self.config = ExchangeConfig(ep_size=case.ep_size, **case.constructor())  # type: ignore[arg-type]
        self.layout = WorkspaceLayout(self.config, control_regions(self.config))
        self.workspace = torch.zeros((case.ep_size, align(self.layout.num_bytes)), dtype=torch.uint8, device="cuda")
        for name in ("dispatch", "combine"):
            region = self.layout.region(name)
            self.workspace[:, region.offset_bytes : region.end_bytes] = 0xFF
        self.streams = [torch.cuda.Stream() for _ in range(case.ep_size)]
        self.ranks = [
            Exchange(
                self.workspace,
                rank,
                self.config,
                self.layout,
                case.placed(),
                small_max_tokens=small_max_tokens,
                sharers=case.ep_size,
            )
            for rank in range(case.ep_size)
        ]
        for rank in self.ranks:
            rank.set_budgets(20.0, 20.0)

    def region(self, rank: int, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        region = self.layout.region(name)
        return self.workspace[rank, region.offset_bytes : region.end_bytes].view(dtype)

    def play(self, round: Round, staged: bool, output_dtype: torch.dtype | None = None) -> None:
        case, most = self.case, round.runtime_max_tokens_per_rank
        inputs = [([rows.cuda() for rows in each.payloads], each.eplb_local_stats) for each in round.inputs]
        receipts = round.receipts()
        torch.cuda.synchronize()
        calls = []
        for rank, (rows, stats) in enumerate(inputs):
            widths = [each.shape[1] * each.dtype.itemsize for each in rows]
            fill = 0 if case.scrub == "all" else None
            offsets = self.layout.payload_offsets(widths)
            calls.append(
                DispatchCall(
                    context=0,
                    round=1,
                    topk_ids=rows[1],
                    payloads=tuple(Payload(*each, fill) for each in zip(rows, widths, offsets, strict=True)),
                    runtime_max_tokens_per_rank=most,
                    ids_payload=None if case.scrub is None else 1,
                    invalid_id=-1,
                    quantize=None,
                    eplb_local_stats=None if stats is None else stats.cuda(),
                    timeout_s=20.0,
                    stream=self.streams[rank],
                    num_sms=None,
                    enable_pdl=None,
                )
            )
        torch.cuda.synchronize()
        # Ranks launch in an order of their own each time; none may need another to have been launched first.
        for rank in torch.randperm(case.ep_size).tolist():
            self.ranks[rank].dispatch(calls[rank])
        torch.cuda.synchronize()
        self.assert_fine()
        for rank, receipt in enumerate(receipts):
            self.assert_dispatched(rank, round, calls[rank], receipt)
        self.combine(round, receipts, staged, output_dtype or case.dtype)

    def assert_fine(self) -> None:
        for rank, each in enumerate(self.ranks):
            words = each.words[0]
            facts = {name: getattr(words, name) for name, _ in words._fields_}
            assert not words.recorded, f"rank {rank}: {facts}"

    def assert_dispatched(self, rank: int, round: Round, call: DispatchCall, receipt: RankReceipt) -> None:
        ep, most = self.case.ep_size, round.runtime_max_tokens_per_rank
        views = []
        for payload in call.payloads:
            assert payload.rows is not None
            raw = self.workspace[rank, payload.offset_bytes : payload.offset_bytes + ep * most * payload.row_bytes]
            views.append(raw.view(payload.rows.dtype).view(ep, most, -1))
        assert_receipt(receipt, views)
        n, k = call.topk_ids.shape
        assert_equal("recv_counts", self.region(rank, "recv_counts")[:ep], receipt.recv_counts)
        assert_equal("send_counts", self.region(rank, "send_counts")[:ep], receipt.send_counts)
        for name in ("topk_target_ranks", "topk_send_indices"):
            assert_equal(name, self.region(rank, name)[: n * k].view(n, k), getattr(receipt, name))
        if receipt.eplb_gathered_stats is not None:
            got = self.region(rank, "eplb_gathered_stats")[: ep * self.case.eplb].view(ep, -1)
            assert_equal("eplb_gathered_stats", got, receipt.eplb_gathered_stats)

    def combine(self, round: Round, receipts: Sequence[RankReceipt], staged: bool, dtype: torch.dtype) -> None:
        case, most = self.case, round.runtime_max_tokens_per_rank
        sums = round.sums(receipts)
        calls = []
        for rank in range(case.ep_size):
            rows = round.expert_rows(rank, receipts).cuda()
            if not staged:
                area = self.region(rank, "combine", case.dtype)[: rows.numel()].view(rows.shape)
                area.copy_(rows)
                rows = area
            calls.append(
                CombineCall(
                    context=0,
                    round=1,
                    attempt=1,
                    payload=rows,
                    payload_in_workspace=not staged,
                    runtime_max_tokens_per_rank=most,
                    num_tokens=sums[rank].shape[0],
                    low_precision=False,
                    output=torch.full(sums[rank].shape, float("nan"), dtype=dtype, device="cuda"),
                    output_quantize=None,
                    output_scales=None,
                    scale_layout=ScaleLayout.LINEAR,
                    timeout_s=20.0,
                    stream=self.streams[rank],
                    num_sms=None,
                    enable_pdl=None,
                )
            )
        torch.cuda.synchronize()
        for rank in torch.randperm(case.ep_size).tolist():
            self.ranks[rank].combine(calls[rank])
        torch.cuda.synchronize()
        self.assert_fine()
        if dtype != case.dtype:
            rows_of = [round.expert_rows(rank, receipts) for rank in range(case.ep_size)]
            from a2a import reference

            sums = reference.combine(
                [each.topk_ids for each in round.inputs],
                rows_of,
                case.placed(),
                row_order=case.row_order,
                output_dtype=dtype,
            )
        for rank in range(case.ep_size):
            assert_equal(f"rank {rank}: output", calls[rank].output, sums[rank])


SHAPES = {
    "plain": {},
    "token order": {"row_order": "token"},
    "scrub all": {"scrub": "all"},
    "no scrub": {"scrub": None},
    "int64 ids": {"id_dtype": torch.int64},
    "narrow payloads": {"more_row_bytes": (1, 3, 18, 36)},
    "hidden 7": {"hidden_size": 7},
    "hidden 2880": {"hidden_size": 2880},
    "hidden 7168": {"hidden_size": 7168, "max_num_tokens": 40, "top_k": 8, "num_experts": 256},
    "hidden 16384": {"hidden_size": 16384},
    "top_k 1": {"top_k": 1},
    "top_k 9": {"top_k": 9},
    "top_k 22": {"top_k": 22, "num_experts": 64},
    "top_k 40": {"top_k": 40, "num_experts": 64},
    "60 experts": {"num_experts": 60},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "statistics": {"eplb": 13},
    "many tokens": {"max_num_tokens": 300, "hidden_size": 128},
}


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
@pytest.mark.parametrize("regime", ["small", "bulk"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_equal_the_oracle(shape: str, regime: str, ep_size: int) -> None:
    case = Case(ep_size=ep_size, **SHAPES[shape])  # type: ignore[arg-type]
    ranks = Ranks(case, small_max_tokens=1 << 20 if regime == "small" else 0)
    for seed in range(ROUNDS):
        ranks.play(draw(case, seed), staged=seed % 2 == 0)


@pytest.mark.parametrize("regime", ["small", "bulk"])
def test_a_table_places_experts(regime: str) -> None:
    table = tuple(int(rank) for rank in torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(5)))
    case = Case(ep_size=4, placement=table)
    ranks = Ranks(case, small_max_tokens=1 << 20 if regime == "small" else 0)
    for seed in range(ROUNDS):
        ranks.play(draw(case, seed), staged=False)


@pytest.mark.parametrize("regime", ["small", "bulk"])
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 5, 0, 0], [16, 0, 16, 1]])
def test_empty_ranks(regime: str, counts: list[int]) -> None:
    case = Case(ep_size=4)
    ranks = Ranks(case, small_max_tokens=1 << 20 if regime == "small" else 0)
    for seed in range(4):
        ranks.play(draw(case, seed, counts), staged=False)


@pytest.mark.parametrize("regime", ["small", "bulk"])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_output_types(regime: str, output: torch.dtype) -> None:
    case = Case(ep_size=2)
    ranks = Ranks(case, small_max_tokens=1 << 20 if regime == "small" else 0)
    for seed in range(4):
        ranks.play(draw(case, seed), staged=True, output_dtype=output)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    from a2a.errors import ShapeError
    from a2a.nvlink.exchange import Exchange

    case = Case(ep_size=2)
    config = ExchangeConfig(ep_size=2, **case.constructor())  # type: ignore[arg-type]
    layout = WorkspaceLayout(config, control_regions(config))
    short = torch.zeros((2, layout.num_bytes - 128), dtype=torch.uint8, device="cuda")
    with pytest.raises(ShapeError, match="workspace"):
        Exchange(short, 0, config, layout, case.placed(), small_max_tokens=8)
