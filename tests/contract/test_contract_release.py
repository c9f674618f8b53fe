"""release() and restore(): memory goes and comes back at the same addresses, only between rounds, on all ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_case import Case, draw, play

import a2a
from a2a.comm import Comm
from a2a.errors import ConfigError, StateError

CASE = Case(ep_size=3, max_num_tokens=64, hidden_size=2048, eplb=3)


def build(comm: Comm, transport: str, **more: Any) -> a2a.MoeAlltoAll:
    return a2a.MoeAlltoAll(**CASE.constructor(), comm=comm, transport=transport, **more)


def resident_bytes(moe: a2a.MoeAlltoAll) -> int:
    """What this process holds of the memory that `moe` has mapped; objects of earlier tests may still be alive."""
    first = moe.workspace.data_ptr()
    end = first + moe.ep_size * moe.workspace.stride(0)
    mapping = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ .*memfd:a2a.*\n(?:\w+: .*\n)*?Rss: +(\d+) kB", re.MULTILINE)
    found = [(int(at, 16), int(kib)) for at, kib in mapping.findall(Path("/proc/self/smaps").read_text())]
    mine = [kib for at, kib in found if first <= at < end]
    # One per rank: what is read here is this object's memory, all of it.
    assert len(mine) == moe.ep_size, found
    return 1024 * sum(mine)


def _memory_goes_and_comes_back(comm: Comm, transport: str) -> list[bool]:
    moe = build(comm, transport, num_contexts=2, enable_rank_mask=True)
    address = moe.workspace.data_ptr()
    facts = []
    for cycle in range(3):
        for seed in range(3):
            play(moe, draw(CASE, 10 * cycle + seed))
            play(moe.contexts[1], draw(CASE, 100 + seed))
        comm.barrier()
        if transport == "host":
            facts.append(resident_bytes(moe) > moe.workspace_size_per_rank // 2)
        moe.release()
        moe.release()
        facts.append(moe.state == moe.contexts[1].state == "released")
        if transport == "host":
            facts.append(resident_bytes(moe) == 0)
        comm.barrier()
        moe.restore()
        moe.restore()
        facts.append(moe.state == "idle" and moe.workspace.data_ptr() == address)
        mask = moe.layout.region("rank_mask"), moe.layout.region("rank_mask", 1)
        row = moe.workspace[moe.ep_rank].clone()
        for region in mask:
            facts.append(bool(row[region.offset_bytes : region.end_bytes].any()))
            row[region.offset_bytes : region.end_bytes] = 0
        facts.append(not row.any())
        comm.barrier()
    play(moe, draw(CASE, 99))
    moe.close()
    return facts


def test_memory_goes_and_comes_back(run_ranks: Any, transport: str) -> None:
    for facts in run_ranks(_memory_goes_and_comes_back, 3, transport):
        assert all(facts), facts


def _calls(moe: a2a.MoeAlltoAll) -> dict[str, Any]:
    device = moe.workspace.device
    ids = torch.zeros((1, CASE.top_k), dtype=torch.int32, device=device)
    rows = torch.zeros((CASE.ep_size, 1, 8), dtype=torch.bfloat16, device=device)
    return {
        "dispatch": lambda: moe.dispatch(ids, [ids], 1),
        "combine": lambda: moe.combine(rows, 1),
        "view": lambda: moe.get_combine_payload_tensor_in_workspace(1, 8, torch.bfloat16),
        "recv_counts": lambda: moe.recv_counts,
        "rank_mask": lambda: moe.rank_mask,
        "check": moe.check,
        "reset": moe.reset,
        "ensure": lambda: moe.ensure(top_k=5),
        "context": lambda: moe.contexts[1].dispatch(ids, [ids], 1),
    }


def _every_call_in_between_raises(comm: Comm, transport: str) -> list[str]:
    moe = build(comm, transport, num_contexts=2, enable_rank_mask=True)
    play(moe, draw(CASE, 0))
    comm.barrier()
    moe.release()
    silent = []
    for name, call in _calls(moe).items():
        try:
            call()
        except StateError as error:
            if "released" not in str(error) or "restore()" not in str(error):
                silent.append(f"{name}: {error}")
        else:
            silent.append(name)
    with pytest.raises(ConfigError, match="rank and size of comm"):
        moe.restore(comm.Split(comm.Get_rank()))
    moe.restore(comm)
    play(moe, draw(CASE, 1))
    comm.barrier()
    moe.release()
    moe.close()
    with pytest.raises(StateError, match="closed"):
        moe.restore()
    with pytest.raises(StateError, match="closed"):
        moe.release()
    return silent


def test_every_call_in_between_raises(run_ranks: Any, transport: str) -> None:
    assert run_ranks(_every_call_in_between_raises, 3, transport) == [[]] * 3


def _only_between_rounds(comm: Comm, transport: str) -> list[str]:
    """One rank is in a round: all are told, and the round goes on."""
    moe = build(comm, transport, num_contexts=2)
    device, told = moe.workspace.device, []
    ids = torch.zeros((1, CASE.top_k), dtype=torch.int32, device=device)
    moe.contexts[1].dispatch(ids, [ids], 1)
    for _ in range(2):
        with pytest.raises(StateError) as caught:
            moe.release()
        told.append(caught.value.state)
    moe.contexts[1].combine(torch.ones((3, 1, 8), dtype=torch.bfloat16, device=device), 1)
    comm.barrier()
    moe.release()
    moe.restore()
    play(moe, draw(CASE, 2))
    moe.close()
    return told


def test_only_between_rounds(run_ranks: Any, transport: str) -> None:
    assert run_ranks(_only_between_rounds, 3, transport) == [["dispatched"] * 2] * 3
