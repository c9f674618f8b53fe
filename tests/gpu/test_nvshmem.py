"""nvlink's kernels on NVSHMEM's memory: what NVSHMEM maps, and rounds against the oracle on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, draw, play

import a2a
from a2a.comm import Comm

pytestmark = [pytest.mark.gpu(2), pytest.mark.alone]

CASES = (
    Case(ep_size=2),
    Case(ep_size=2, row_order="token", scrub="all", more_row_bytes=(1, 3, 18, 36), hidden_size=7),
    Case(ep_size=2, hidden_size=7168, top_k=8, num_experts=256, max_num_tokens=600),
)


def _maps(comm: Comm) -> dict[str, Any]:
    """Step by step, so that a step that fails is seen with what led to it."""
    from cuda.bindings import driver as cu

    from a2a.nvlink import nvshmem
    from a2a.nvlink.driver import on_device

    facts: dict[str, Any] = {"library": nvshmem.library_reason() or "loaded"}
    device = torch.device("cuda", torch.cuda.current_device())
    with on_device(device):
        library = nvshmem._load()
        places = nvshmem._join(library, comm)
        buffer = library.nvshmem_malloc(4 << 20)
        facts |= {"places": places, "buffer": hex(buffer or 0)}
        facts["pointers"] = [hex(library.nvshmem_ptr(buffer, place) or 0) for place in places]
        for rank, pointer in enumerate(facts["pointers"]):
            status, *found = cu.cuMemGetAddressRange(int(pointer, 16))
            facts[f"range of rank {rank}"] = (status.name, *(hex(int(each)) for each in found))
            status, *_ = cu.cuMemRetainAllocationHandle(int(pointer, 16))
            facts[f"handle of rank {rank}"] = status.name
        addresses = [int(pointer, 16) for pointer in facts["pointers"]]
        facts["ascending by"] = [hex(after - before) for before, after in itertools.pairwise(addresses)]
    return facts


def test_what_nvshmem_maps(run_ranks: Any) -> None:
    told = run_ranks(_maps, 2)
    for rank, facts in enumerate(told):
        print(f"rank {rank}:", *(f"\n  {name}: {value}" for name, value in facts.items()))
    for facts in told:
        statuses = [facts[f"{what} of rank {rank}"] for what in ("range", "handle") for rank in range(2)]
        assert all("CUDA_SUCCESS" in status for status in statuses), told


def _rounds(comm: Comm) -> list[str]:
    kinds = []
    for case in CASES:
        with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="nvshmem", name=repr(case)) as moe:
            for seed in range(4):
                play(moe, draw(case, seed), in_workspace=seed % 2 == 0)
            kinds.append(f"{moe.transport}, {moe._shared.transport.lines.text()}")
    return kinds


def test_rounds_equal_the_oracle(run_ranks: Any) -> None:
    for kinds in run_ranks(_rounds, 2):
        assert len(kinds) == len(CASES) and all(kind.startswith("nvshmem, none of") for kind in kinds), kinds


def _replays(comm: Comm) -> int:
    """Captured once, replayed with other rows; beside an object on nvlink's own memory, which must not be disturbed."""
    case, rank = CASES[2], comm.Get_rank()
    with (
        a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="nvshmem") as moe,
        a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="nvlink", name="beside") as beside,
    ):
        drawn = draw(case, 1, [600, 600])
        ids, hidden = drawn.inputs[rank].topk_ids.cuda(), torch.zeros((600, case.hidden_size), device="cuda").bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (rows,) = moe.dispatch(ids, [hidden], 600)
            output = moe.combine(rows.clone(), 600)
        for seed in range(5):
            hidden.copy_(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(10 * seed + rank)))
            graph.replay()
            (rows,) = beside.dispatch(ids, [hidden], 600)
            wanted = beside.combine(rows.clone(), 600)
            assert_equal(f"seed {seed}", output, wanted.cpu())
        moe.check()
    return rank


def test_graphs_beside_an_object_on_other_memory(run_ranks: Any) -> None:
    assert run_ranks(_replays, 2) == [0, 1]
