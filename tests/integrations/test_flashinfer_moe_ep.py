"""The `moe_ep` interface on ranks: dispatch and combine in every format, and what its objects promise."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Any

import pytest
import torch
from exchange_case import Case, assert_equal, draw
from test_flashinfer_moe_alltoall import Engine

from a2a.comm import Comm
from a2a.errors import ConfigError, MismatchError, ShapeError, StateError
from a2a.integrations.flashinfer import (
    BootstrapConfig,
    MoEEpCommParams,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    create_communication,
)
from a2a.quant import wire_format


class QuantFormat(enum.Enum):
    """As the library's: values without meaning here, names with."""

    MXFP8 = 17


FORMATS: dict[str, tuple[Any, str | None]] = {
    "bf16": (None, None),
    "BF16": ("BF16", None),
    "MXFP8": (QuantFormat.MXFP8, "mxfp8"),
    "NVFP4": ("NVFP4", "nvfp4"),
    "MXFP4": ("MXFP4", "mxfp4"),
    "DeepSeekFp8": ("DeepSeekFp8", "fp8_block"),
}


def build(comm: Comm, params: MoEEpCommParams, **config: Any) -> NVLinkOneSidedAlltoAll:
    return create_communication(
        BootstrapConfig(world_size=comm.Get_size(), rank=comm.Get_rank()),
        params,
        backend=NVLinkOneSidedConfig(comm_backend=Engine(comm), **config),
    )


def _rounds_equal_the_oracle(comm: Comm, name: str, weights: bool, num_rounds: int) -> int:
    told, wire = FORMATS[name]
    case = Case(ep_size=3, num_experts=7, top_k=3, hidden_size=128)
    rank, ep = comm.Get_rank(), case.ep_size
    ours = build(comm, MoEEpCommParams(7, 3, case.max_num_tokens, 128, dispatch_format=told, invalid_expert_id=7))
    assert isinstance(ours, NVLinkOneSidedAlltoAll) and ours.backend_name == "nvlink_one_sided"
    assert ours.num_local_experts == [3, 2, 2][rank] and ours.params.num_experts == 7
    device = ours.alltoall.workspace.device
    for seed in range(num_rounds):
        round = draw(case, seed)
        most, receipts, mine = round.runtime_max_tokens_per_rank, round.receipts(invalid_id=7), round.inputs[rank]
        hidden, ids, scores = mine.payloads
        data, scales = (hidden, None) if wire is None else wire_format(wire).quantize(hidden)
        kind = "max_tokens_per_rank" if seed % 2 else "runtime_max_tokens_per_rank"
        got = ours.dispatch(
            data.to(device),
            # Any integer ids will do.
            ids.to(device, torch.int64 if seed % 2 else torch.int32),
            scores.to(device) if weights else None,
            hidden_states_scale=None if scales is None else scales.to(device),
            **{kind: None if seed == 0 else most},
        )
        rows = case.max_num_tokens if seed == 0 else most
        assert got.tokens_per_rank == rows
        wanted = receipts[rank]
        block_ids = got.topk_ids.view(ep, rows, -1)
        assert (block_ids[:, most:] == 7).all()
        assert_equal("ids", block_ids[:, :most], wanted.payloads[1])
        everyone = [each.payloads[0] if wire is None else wire_format(wire).quantize(each.payloads[0])[0]
                    for each in round.inputs]  # fmt: skip
        assert got.hidden_states.dtype == data.dtype and got.hidden_states.shape == (ep * rows, data.shape[1])
        assert (got.hidden_states_scale is None) == (scales is None) and (got.topk_weights is None) == (not weights)
        for src in range(ep):
            sent = [t for t, picks in enumerate(_ranks_of(round, src)) if rank in picks]
            block = got.hidden_states.view(ep, rows, -1)[src, : len(sent)]
            assert_equal("rows", block.view(torch.uint8), everyone[src][sent].view(torch.uint8))
            if scales is not None and got.hidden_states_scale is not None:
                theirs = wire_format(str(wire)).quantize(round.inputs[src].payloads[0])[1]
                assert theirs is not None
                block = got.hidden_states_scale.view(ep, rows, -1)[src, : len(sent)]
                assert_equal("scales", block.view(torch.uint8), theirs[sent].view(torch.uint8))
            if got.topk_weights is not None:
                block = got.topk_weights.view(ep, rows, -1)[src, : len(sent)]
                assert_equal("weights", block, round.inputs[src].payloads[2][sent])
        made = torch.full((ep, rows, 128), float("nan"), dtype=torch.bfloat16, device=device)
        made[:, :most] = round.expert_rows(rank, receipts).to(device)
        payload = made.flatten(0, 1) if seed % 3 else made
        if seed % 2:
            buffer = ours.get_combine_input_buffer(torch.bfloat16)
            assert buffer.shape == (ep * rows, 128)
            payload = buffer.copy_(made.flatten(0, 1))
        output = torch.empty(hidden.shape, dtype=torch.bfloat16, device=device)
        assert ours.combine(payload, output=output) is output
        assert_equal("combined", output, round.sums(receipts)[rank])
    ours.destroy()
    ours.destroy()
    return num_rounds


def _ranks_of(round: Any, src: int) -> list[set[int]]:
    owners = round.case.placed().owners(round.inputs[src].topk_ids)
    return [{int(rank) for rank in row if rank >= 0} for row in owners]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_rounds_equal_the_oracle(run_ranks: Any, name: str, weights: bool) -> None:
    assert run_ranks(_rounds_equal_the_oracle, 3, name, weights, 6) == [6] * 3


def _other_promises(comm: Comm) -> list[Any]:
    rank = comm.Get_rank()
    params = MoEEpCommParams(4, 1, 5, 32)
    more = {"eplb_stats_num_experts": 4, "extra_payload_bytes_per_token": 64, "use_low_precision_combine": True}
    ours = build(comm, params, **more)
    device = ours.alltoall.workspace.device
    ids = torch.tensor([[rank], [3 - rank]], device=device)
    rows = torch.full((2, 32), rank + 1.0, dtype=torch.bfloat16, device=device)
    stats = torch.full((4,), rank, dtype=torch.int32, device=device)
    with pytest.raises(StateError, match="dispatch first"):
        ours.get_combine_input_buffer(torch.bfloat16)
    for bad in ({"max_tokens_per_rank": 6}, {"max_tokens_per_rank": 0}):
        with pytest.raises(ShapeError, match=r"max_tokens_per_rank"):
            ours.dispatch(rows, ids, **bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="equal values"):
        ours.dispatch(rows, ids, max_tokens_per_rank=3, runtime_max_tokens_per_rank=4)
    got = ours.dispatch(rows, ids, eplb_local_stats=stats, max_tokens_per_rank=3, runtime_max_tokens_per_rank=3)
    assert got.eplb_gathered_stats is not None and got.topk_weights is None
    gathered = got.eplb_gathered_stats.tolist()
    with pytest.raises(StateError, match="combine first"):
        ours.dispatch(rows, ids)
    out = ours.combine(got.hidden_states.clone())
    assert out.dtype == torch.bfloat16 and out[:, 0].tolist() == [rank + 1.0] * 2
    ours.checkpoint_prepare()
    with pytest.raises(RuntimeError, match="restore"):
        ours.dispatch(rows, ids)
    ours.checkpoint_restore(Engine(comm))
    again = ours.dispatch(rows, ids)
    assert torch.equal(ours.combine(again.hidden_states.clone()), out)
    assert ours.is_workload_feasible(5) and not ours.is_workload_feasible(6)
    assert ours.active_rank_mask([1]).tolist() == [2]
    assert ours.config.use_low_precision_combine and ours.alltoall.max_num_tokens == 5
    ours.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        _ = ours.alltoall
    with pytest.raises(RuntimeError, match="destroyed"):
        ours.dispatch(rows, ids)
    return gathered


def test_what_else_is_promised(run_ranks: Any) -> None:
    assert run_ranks(_other_promises, 2) == [[[0] * 4, [1] * 4]] * 2


def _growth(comm: Comm) -> int:
    """As an engine grows its one communication over its layers: the next is built when the last is destroyed."""
    sizes = []
    for hidden, format in ((64, None), (64, "NVFP4"), (128, "MXFP8")):
        params = dataclasses.replace(MoEEpCommParams(4, 2, 8, 32), hidden_size=hidden, dispatch_format=format)
        ours = build(comm, params, timeout_sec=60, lamport=False, cft_max_tokens_for_combine=3)
        assert ours.alltoall.rounds.timeout_s == 60
        sizes.append(ours.alltoall.workspace_size_per_rank)
        ours.destroy()
    return sum(small != large for small, large in itertools.pairwise(sizes))


def test_a_communication_follows_another(run_ranks: Any) -> None:
    assert run_ranks(_growth, 2) == [2, 2]


def _differences(comm: Comm) -> str:
    with pytest.raises(MismatchError) as caught:
        build(comm, MoEEpCommParams(4, 2, 8, 32, dispatch_format="MXFP8" if comm.Get_rank() else "BF16"))
    with pytest.raises(ConfigError, match="the bootstrap's"):
        create_communication(
            BootstrapConfig(3, comm.Get_rank()), MoEEpCommParams(4, 2, 8, 32), NVLinkOneSidedConfig(comm_backend=comm)
        )
    return str(caught.value)


def test_formats_that_differ_are_told_on_every_rank(run_ranks: Any) -> None:
    first, second = run_ranks(_differences, 2)
    assert first == second and "bytes a row" in first


@pytest.mark.parametrize(
    ("format", "num_bytes"),
    [(None, 200), ("BF16", 200), ("FP16", 200), ("FP8PerTensor", 100), ("DeepSeekFp8", 104), ("MXFP8", 104),
     ("NVFP4", 57), ("MXFP4", 54)],
)  # fmt: skip
def test_bytes_of_formats(format: str | None, num_bytes: int) -> None:
    assert MoEEpCommParams(4, 2, 8, 100, dispatch_format=format).dispatch_bytes_per_token == num_bytes
    assert MoEEpCommParams(4, 2, 8, 100, dtype=torch.float32).dispatch_bytes_per_token == 400
    # What engines look for to tell the generations apart.
    assert hasattr(MoEEpCommParams, "dispatch_format")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 5}, "top_k"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"invalid_expert_id": 3}, "invalid_expert_id"),
        ({"dispatch_format": "INT3"}, "dispatch_format"),
    ],
)
def test_bad_parameters(change: dict[str, Any], says: str) -> None:
    good = {"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 16}
    with pytest.raises(ValueError, match=says):
        MoEEpCommParams(**{**good, **change})


def test_bad_bootstraps_and_other_backends() -> None:
    for world_size, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match="BootstrapConfig"):
            BootstrapConfig(world_size, rank)
    with pytest.raises(ConfigError, match="nixl"):
        create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, 8, 16), "nixl")
    with pytest.raises(ConfigError, match="extra_payload_bytes_per_token"):
        create_communication(
            BootstrapConfig(1, 0), MoEEpCommParams(4, 2, 8, 16), NVLinkOneSidedConfig(extra_payload_bytes_per_token=-1)
        )
    alone = create_communication(BootstrapConfig(1, 0), MoEEpCommParams(4, 2, 8, 16), "nvlink_one_sided")
    assert alone.ep_size == 1 and alone.num_local_experts == 4
    alone.destroy()
