"""The historical functions: several ranks of one process on one GPU, a stream each, on an ordinary CUDA tensor."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_case import IDS_PAYLOAD, Case, Round, as_bytes, assert_equal, assert_receipt, draw
from torch import Tensor

from a2a import reference
from a2a.errors import MismatchError, PeerTimeout
from a2a.integrations import flashinfer as fi
from a2a.integrations.flashinfer_functions import _SCALE_LAYOUTS
from a2a.quant import swizzle_scales, wire_format

pytestmark = pytest.mark.gpu(1)
ROUNDS = int(os.environ.get("A2A_GPU_TEST_ROUNDS", "12"))
INDEX = fi.MoeAlltoAll._METAINFO_INDEX


class Ranks:
    """All ranks of an exchange, which know nothing but the functions."""

    def __init__(self, case: Case, *, row_bytes: int = 0, poison: bool = True) -> None:
        self.case = case
        row = row_bytes or case.hidden_size * case.dtype.itemsize + (4 + case.id_dtype.itemsize) * case.top_k
        size = fi.moe_a2a_get_workspace_size_per_rank(
            case.ep_size,
            case.max_num_tokens,
            row + sum(case.more_row_bytes),
            case.hidden_size * case.dtype.itemsize,
            case.eplb,
        )
        self.workspace = torch.full((case.ep_size, size), 0xFF, dtype=torch.uint8, device="cuda")
        self.metainfo = [
            fi.moe_a2a_initialize(self.workspace, rank, case.ep_size, case.max_num_tokens, case.eplb)
            for rank in range(case.ep_size)
        ]
        if poison:
            self.workspace[:, int(self.metainfo[0][9]) :] = 0xFF
        self.streams = [torch.cuda.Stream() for _ in range(case.ep_size)]
        torch.cuda.synchronize()

    def everyone(self) -> list[int]:
        """Ranks launch in an order of their own each time; none may need another to have been launched first."""
        order: list[int] = torch.randperm(self.case.ep_size).tolist()
        return order

    def read(self, rank: int, name: str, *shape: int) -> Tensor:
        start = int(self.metainfo[rank][INDEX[f"{name}_OFFSET_INDEX"]])
        numel = int(torch.tensor(shape).prod())
        return self.workspace[rank, start : start + 4 * numel].view(torch.int32).view(shape)

    def dispatch(self, round: Round, rows: list[list[Tensor]], **more: Any) -> list[tuple[list[Tensor], int, Any]]:
        case, results = self.case, {}
        for rank in self.everyone():
            stats = round.inputs[rank].eplb_local_stats
            with torch.cuda.stream(self.streams[rank]):
                results[rank] = fi.moe_a2a_dispatch(
                    rows[rank][IDS_PAYLOAD],
                    rows[rank],
                    self.workspace,
                    self.metainfo[rank],
                    round.runtime_max_tokens_per_rank,
                    rank,
                    case.ep_size,
                    case.top_k,
                    case.num_experts,
                    eplb_local_stats=None if stats is None else stats.cuda(),
                    **more,
                )
        torch.cuda.synchronize()
        return [results[rank] for rank in range(case.ep_size)]

    def combine(
        self,
        round: Round,
        made: list[Tensor],
        offsets: list[int],
        in_workspace: bool,
        *,
        output: bool = False,
        **more: Any,
    ) -> list[Tensor]:
        case, most, results = self.case, round.runtime_max_tokens_per_rank, {}
        payloads = made
        if in_workspace:
            payloads = []
            for rank, rows in enumerate(made):
                start = rank * self.workspace.stride(0) + offsets[rank]
                num_bytes = rows.numel() * rows.itemsize
                view = fi.moe_a2a_wrap_payload_tensor_in_workspace(
                    self.workspace, [case.ep_size, most], start, start + num_bytes, rows.dtype
                )
                payloads.append(view.copy_(rows))
            torch.cuda.synchronize()
        outputs: list[Tensor | None] = [None] * case.ep_size
        if output:
            shapes = [(each.topk_ids.shape[0], case.hidden_size) for each in round.inputs]
            outputs = [torch.full(shape, float("nan"), dtype=case.dtype, device="cuda") for shape in shapes]
            torch.cuda.synchronize()
        for rank in self.everyone():
            with torch.cuda.stream(self.streams[rank]):
                results[rank] = fi.moe_a2a_combine(
                    payloads[rank],
                    round.inputs[rank].topk_ids.shape[0],
                    self.workspace,
                    self.metainfo[rank],
                    most,
                    rank,
                    case.ep_size,
                    case.top_k,
                    offsets[rank],
                    payload_in_workspace=in_workspace,
                    output=outputs[rank],
                    **more,
                )
                assert outputs[rank] is None or results[rank] is outputs[rank]
        torch.cuda.synchronize()
        return [results[rank] for rank in range(case.ep_size)]

    def play(self, round: Round, *, in_workspace: bool, scrub: bool = True, output: bool = False, **more: Any) -> None:
        """One round compared with the oracle in every byte that is defined, counters and tables through metainfo."""
        case, ep = self.case, self.case.ep_size
        active = more.pop("active_ranks", None)
        if active is not None:
            more = {"enable_rank_mask": True, "active_rank_mask": fi.moe_a2a_active_rank_mask(active, ep)}
        receipts = round.receipts(active_ranks=active)
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        torch.cuda.synchronize()
        got = self.dispatch(round, rows, **more)
        for rank, (views, _, stats) in enumerate(got):
            if scrub:
                fi.moe_a2a_sanitize_expert_ids(views[IDS_PAYLOAD], self.workspace, self.metainfo[rank], rank, -1)
                assert_receipt(receipts[rank], views)
            n = round.inputs[rank].topk_ids.shape[0]
            assert_equal("recv", self.read(rank, "RECV_COUNTERS", ep), receipts[rank].recv_counts)
            assert_equal("send", self.read(rank, "SEND_COUNTERS", ep), receipts[rank].send_counts)
            for name in ("topk_target_ranks", "topk_send_indices"):
                table = self.read(rank, name.upper(), case.max_num_tokens, case.top_k)
                assert_equal(name, table[:n], getattr(receipts[rank], name))
            assert (stats is None) == (receipts[rank].eplb_gathered_stats is None)
            if receipts[rank].eplb_gathered_stats is not None:
                assert_equal("statistics", stats, receipts[rank].eplb_gathered_stats)
        made = [round.expert_rows(rank, receipts).cuda() for rank in range(ep)]
        sums = round.sums(receipts, active_ranks=active)
        outs = self.combine(round, made, [offset for _, offset, _ in got], in_workspace, output=output, **more)
        for rank, out in enumerate(outs):
            assert_equal(f"rank {rank}: combined", out, sums[rank])


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int64 ids": {"id_dtype": torch.int64},
    "eight payloads": {"more_row_bytes": (1, 3, 18, 36, 7)},
    "hidden 7": {"hidden_size": 7},
    "hidden 7168": {"hidden_size": 7168, "max_num_tokens": 40, "top_k": 8, "num_experts": 256},
    "top_k 1": {"top_k": 1},
    "top_k 9": {"top_k": 9},
    "top_k 64": {"top_k": 64, "num_experts": 128, "max_num_tokens": 9},
    "61 experts": {"num_experts": 61},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "statistics": {"eplb": 13},
    "many tokens": {"max_num_tokens": 300, "hidden_size": 128},
}


@pytest.mark.parametrize("ep_size", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_equal_the_oracle(shape: str, ep_size: int) -> None:
    case = Case(ep_size=ep_size, **SHAPES[shape])
    ranks = Ranks(case)
    for seed in range(ROUNDS):
        ranks.play(draw(case, seed), in_workspace=seed % 2 == 0, output=seed % 3 == 0)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [0, 5, 0, 0], [16, 0, 16, 1]])
def test_empty_ranks(counts: list[int]) -> None:
    case = Case(ep_size=4)
    ranks = Ranks(case)
    for seed in range(4):
        ranks.play(draw(case, seed, counts), in_workspace=seed % 2 == 0)


def test_rows_that_no_token_was_written_to_are_zero() -> None:
    case = Case(ep_size=4, max_num_tokens=12, more_row_bytes=(5,))
    ranks = Ranks(case, poison=False)
    assert not ranks.workspace[:, int(ranks.metainfo[0][9]) :].any()
    written = [torch.zeros((4, 12), dtype=torch.bool) for _ in range(4)]
    for seed in range(ROUNDS):
        round = draw(case, seed, most=12)
        receipts = round.receipts()
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        got = ranks.dispatch(round, rows)
        for rank, (views, _, _) in enumerate(got):
            written[rank] |= receipts[rank].valid
            for view in views:
                assert not as_bytes(view.cpu()[~written[rank]]).any()
        made = [round.expert_rows(rank, receipts).cuda() for rank in range(4)]
        outs = ranks.combine(round, made, [offset for _, offset, _ in got], True)
        for out, wanted in zip(outs, round.sums(receipts), strict=True):
            assert_equal("combined", out, wanted)
    assert not all(bool(each.all()) for each in written)


def test_widths_that_grow_and_shrink() -> None:
    """The wide rounds move the combine rows; ranks that run ahead must not overwrite rows that others still read."""
    narrow = Case(ep_size=4, hidden_size=32)
    wide = Case(ep_size=4, hidden_size=2048)
    ranks = Ranks(wide)
    for seed in range(4 * ROUNDS):
        ranks.case = wide if seed % 5 in (2, 3) else narrow
        ranks.play(draw(ranks.case, seed), in_workspace=seed % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_scrubbed_right_behind_their_dispatch(dtype: torch.dtype) -> None:
    """While other ranks' kernels wait on the GPU, at any place of the ids among 16 bytes."""
    case = Case(ep_size=8, id_dtype=dtype, top_k=3, max_num_tokens=21)
    ranks = Ranks(case)
    for seed in range(ROUNDS):
        round = draw(case, seed)
        receipts = round.receipts()
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        copies = [torch.zeros((8, 21, 3), dtype=dtype, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        got = {}
        for rank in ranks.everyone():
            with torch.cuda.stream(ranks.streams[rank]):
                common = (ranks.workspace, ranks.metainfo[rank])
                views, _, _ = fi.moe_a2a_dispatch(
                    rows[rank][IDS_PAYLOAD], rows[rank], *common, round.runtime_max_tokens_per_rank, rank, 8, 3,
                    case.num_experts,
                )  # fmt: skip
                ids = views[IDS_PAYLOAD]
                fi.moe_a2a_sanitize_expert_ids(ids if rank % 2 else ids.flatten(0, 1), *common, rank, -1)
                # Ids elsewhere, behind the same counts.
                few = copies[rank].flatten()[rank % 4 : rank % 4 + 8 * 2 * 3].view(8, 2, 3)
                fi.moe_a2a_sanitize_expert_ids(few, *common, rank, 1 << 30)
                got[rank] = views
        torch.cuda.synchronize()
        for rank, views in got.items():
            assert_receipt(receipts[rank], views)
            wanted = torch.zeros((8, 2, 3), dtype=dtype)
            for src, count in enumerate(receipts[rank].recv_counts.tolist()):
                wanted[src, min(count, 2) :] = 1 << 30
            start = rank % 4
            assert_equal("few ids", copies[rank].flatten()[start : start + 48].view(8, 2, 3), wanted)
            assert int(copies[rank].count_nonzero()) == int(wanted.count_nonzero()), "another id was written"
    ranks.play(draw(case, ROUNDS), in_workspace=True)


def test_dispatches_alone() -> None:
    """Nothing is combined in between, as where only dispatch is measured; the last round is whole."""
    case = Case(ep_size=4)
    ranks = Ranks(case)
    for seed in range(ROUNDS):
        round = draw(case, seed)
        receipts = round.receipts()
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        torch.cuda.synchronize()
        for rank, (views, _, _) in enumerate(ranks.dispatch(round, rows)):
            fi.moe_a2a_sanitize_expert_ids(views[IDS_PAYLOAD], ranks.workspace, ranks.metainfo[rank], rank, -1)
            assert_receipt(receipts[rank], views)
    ranks.play(draw(case, ROUNDS), in_workspace=True)


def test_a_mask() -> None:
    case = Case(ep_size=4)
    ranks = Ranks(case)
    for seed in range(ROUNDS):
        ranks.play(draw(case, seed), in_workspace=False, active_ranks=[0, 1, 2, 3])


def test_other_outputs() -> None:
    case = Case(ep_size=2, hidden_size=128)
    ranks = Ranks(case)
    for seed, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        round = draw(case, seed, [5, 9])
        receipts = round.receipts()
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        got = ranks.dispatch(round, rows)
        made = [round.expert_rows(rank, receipts).cuda() for rank in range(2)]
        offsets = [offset for _, offset, _ in got]
        outs = ranks.combine(round, made, offsets, False, output_dtype=dtype)
        ids = [each.topk_ids for each in round.inputs]
        on_host = [each.cpu() for each in made]
        wanted = reference.combine(ids, on_host, case.placed(), row_order=case.row_order, output_dtype=dtype)
        for out, each in zip(outs, wanted, strict=True):
            assert_equal(str(dtype), out, each)


QUANTIZED: dict[str, tuple[torch.dtype, torch.dtype, float]] = {
    "mxfp8": (torch.float8_e4m3fn, torch.uint8, 1.0),
    "nvfp4": (torch.uint8, torch.float8_e4m3fn, 37.5),
    "mxfp4": (torch.uint8, torch.uint8, 1.0),
}
"""dtypes of output and scales, and a global scale."""


@pytest.mark.parametrize("layout", list(fi.SfLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_outputs(name: str, layout: Any) -> None:
    """Each rank's sums are quantised while combines of others wait on the GPU; every byte of rows and scales."""
    case = Case(ep_size=8, hidden_size=160, max_num_tokens=21)
    ranks = Ranks(case)
    dtype, scales_dtype, scalar = QUANTIZED[name]
    form, kind = wire_format(name), _SCALE_LAYOUTS[layout]
    for seed in range(min(ROUNDS, 4)):
        round = draw(case, seed)
        receipts, most = round.receipts(), round.runtime_max_tokens_per_rank
        rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
        got = ranks.dispatch(round, rows)
        made = [round.expert_rows(rank, receipts).cuda() for rank in range(8)]
        counts = [each.topk_ids.shape[0] for each in round.inputs]
        shapes = [kind.shape(n, form.scales_width(case.hidden_size)) for n in counts]
        scales = [torch.full(shape, 0xAA, dtype=torch.uint8, device="cuda").view(scales_dtype) for shape in shapes]
        torch.cuda.synchronize()
        outs = {}
        for rank in ranks.everyone():
            with torch.cuda.stream(ranks.streams[rank]):
                outs[rank] = fi.moe_a2a_combine(
                    made[rank], counts[rank], ranks.workspace, ranks.metainfo[rank], most, rank, 8, case.top_k,
                    got[rank][1], output_dtype=dtype, output_scales=scales[rank], output_scalar_scale=scalar,
                    sf_layout=layout,
                )  # fmt: skip
        torch.cuda.synchronize()
        for rank, sums in enumerate(round.sums(receipts)):
            scale = torch.tensor(scalar) if form.needs_global_scale else None
            data, linear = form.quantize(sums, global_scale=scale)
            arranged = swizzle_scales(form.need_scales(linear).view(torch.uint8), kind)
            assert_equal(f"rank {rank}: rows", outs[rank].view(torch.uint8), data.view(torch.uint8))
            assert_equal(f"rank {rank}: scales", scales[rank].view(torch.uint8), arranged)


def test_a_disagreement_is_told_at_the_next_call_and_forgotten_by_initializing() -> None:
    case = Case(ep_size=2)
    ranks = Ranks(case)
    round = draw(case, 0, [3, 3], 8)
    rows = [[each.cuda() for each in one.payloads] for one in round.inputs]
    torch.cuda.synchronize()
    for rank in range(2):
        with torch.cuda.stream(ranks.streams[rank]):
            fi.moe_a2a_dispatch(
                rows[rank][1], rows[rank], ranks.workspace, ranks.metainfo[rank], 8 - rank, rank, 2, case.top_k,
                case.num_experts,
            )  # fmt: skip
    torch.cuda.synchronize()
    payload = torch.zeros((2, 8, case.hidden_size), dtype=case.dtype, device="cuda")
    with pytest.raises(MismatchError, match="runtime_max_tokens_per_rank"):
        fi.moe_a2a_combine(payload, 3, ranks.workspace, ranks.metainfo[0], 8, 0, 2, case.top_k, 0)
    for rank in range(2):
        fi.moe_a2a_initialize(ranks.workspace, rank, 2, case.max_num_tokens)
    ranks.play(draw(case, 1), in_workspace=True)


def test_a_rank_that_does_not_come_is_told_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_STARTUP_TIMEOUT_S", "1")
    case = Case(ep_size=2)
    ranks = Ranks(case)
    ids = torch.ones((2, case.top_k), dtype=torch.int32, device="cuda")
    arguments = (ranks.workspace, ranks.metainfo[0], 2, 0, 2, case.top_k, case.num_experts)
    fi.moe_a2a_dispatch(ids, [ids], *arguments)
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeout, match="rank 1"):
        fi.moe_a2a_dispatch(ids, [ids], *arguments)


def test_a_captured_round_replays() -> None:
    case = Case(ep_size=1, max_num_tokens=8)
    ranks = Ranks(case)
    first = draw(case, 0, [8], 8)
    ranks.play(first, in_workspace=False)
    rows = [each.cuda() for each in first.inputs[0].payloads]
    made = first.expert_rows(0, first.receipts()).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        common = (ranks.workspace, ranks.metainfo[0], 8, 0, 1, case.top_k)
        views, offset, _ = fi.moe_a2a_dispatch(rows[1], rows, *common, case.num_experts)
        fi.moe_a2a_sanitize_expert_ids(views[1], ranks.workspace, ranks.metainfo[0], 0, -1)
        out = fi.moe_a2a_combine(made, 8, *common, offset)
    for seed in range(1, 6):
        round = draw(case, seed, [8], 8)
        receipts = round.receipts()
        for held, each in zip(rows, round.inputs[0].payloads, strict=True):
            held.copy_(each)
        made.copy_(round.expert_rows(0, receipts))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_receipt(receipts[0], views)
        assert_equal("combined", out, round.sums(receipts)[0])


def test_the_state_goes_with_the_memory() -> None:
    used = []
    for _ in range(4):
        ranks = Ranks(Case(ep_size=2, hidden_size=4096, max_num_tokens=512))
        ranks.play(draw(ranks.case, 0, [3, 4]), in_workspace=True)
        del ranks
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[-1], used


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_the_script_of_eight_ranks(ids: str) -> None:
    """Historical names alone, found where FlashInfer would be; a fresh process has loaded none of torch's kernels."""
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    script = root / "tests" / "gpu" / "historical_one_gpu.py"
    done = subprocess.run([sys.executable, str(script), ids], capture_output=True, text=True, timeout=250, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 ranks on one GPU: exact\n"
