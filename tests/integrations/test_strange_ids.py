"""Ids that no expert has, through every adapter that makes int32 of an engine's int64: a pick of one goes nowhere."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vllm_shapes import All2AllManagerBase, Forward, FusedMoEPrepareAndFinalizeModular

from a2a.comm.protocol import SingleComm
from a2a.integrations.flashinfer import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication
from a2a.integrations.sglang import Dispatcher, Engine, Exchanges
from a2a.integrations.trtllm import Communication
from a2a.integrations.vllm import manager_class, prepare_finalize_class

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 4, 2, 16, 8
STRANGE = (-1, -(2**31), 2**31 - 1, NUM_EXPERTS, 2**32, 2**32 + 1, -(2**32), -(2**40) + 3, 2**62 + 2, -(2**63))
"""The later ones, cut to 32 bits, would name an expert."""

Round = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Ids received and sums, of rows, ids and weights."""


def by_moe_ep(rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    params = MoEEpCommParams(NUM_EXPERTS, TOP_K, MOST, HIDDEN)
    ours = create_communication(BootstrapConfig(1, 0), params, NVLinkOneSidedConfig(comm_backend=SingleComm()))
    got = ours.dispatch(rows, ids, weights, max_tokens_per_rank=rows.shape[0])
    received = got.topk_ids.clone()
    combined = ours.combine(got.hidden_states.clone())
    ours.destroy()
    return received, combined


def by_vllm(rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    forward = Forward()
    engine = forward.engine()
    forward.manager = manager_class(All2AllManagerBase, lambda: engine)(SingleComm())
    layer = prepare_finalize_class(FusedMoEPrepareAndFinalizeModular, lambda: engine)(
        max_num_tokens=MOST, top_k=TOP_K, num_experts=NUM_EXPERTS, hidden_size=HIDDEN
    )
    got, *_, got_ids, got_weights = layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    received, combined = got_ids.clone(), torch.empty_like(rows)
    layer.finalize(combined, got.clone(), got_weights, got_ids, False, None)
    forward.manager.destroy()
    return received, combined


def by_sglang(rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    engine = Engine(
        dispatch_output=lambda *received: received,
        topk_output=lambda weights, ids, logits: ids,
        materialize=lambda topk: topk,
        max_num_tokens=lambda: MOST,
        dispatch_type=lambda: "bf16",
    )
    exchanges = Exchanges()
    layer = Dispatcher(engine, exchanges, SingleComm(), TOP_K, NUM_EXPERTS, hidden_size=HIDDEN)
    got, _, got_ids, *_ = layer.dispatch(rows, types.SimpleNamespace(topk_ids=ids, topk_weights=weights))
    received = got_ids.clone()
    combined = layer.combine(types.SimpleNamespace(hidden_states=got.clone()))
    exchanges.close()
    return received, combined


def by_trtllm(rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mapping = types.SimpleNamespace(moe_ep_rank=0, moe_ep_size=1, world_size=1)
    layer = Communication(
        mapping, NUM_EXPERTS, TOP_K, MOST, hidden_size=HIDDEN, dtype=torch.bfloat16, comm=SingleComm()
    )
    got, _, got_ids, _ = layer.dispatch(rows, None, ids, weights, [rows.shape[0]])
    received = got_ids.clone()
    combined = layer.combine(got.clone())
    layer.destroy()
    return received, combined


@pytest.mark.parametrize("play", [by_moe_ep, by_vllm, by_sglang, by_trtllm])
@pytest.mark.parametrize("beside", [3, -1], ids=["beside a pick", "alone"])
def test_a_pick_of_no_expert_goes_nowhere(play: Round, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")
    for strange in STRANGE:
        rows = torch.arange(1.0, 3 * HIDDEN + 1).view(3, HIDDEN).bfloat16()
        ids = torch.tensor([[0, 1], [strange, beside], [2, strange]])
        received, combined = play(rows, ids, torch.ones((3, TOP_K)))
        picks = ((received >= 0) & (received < NUM_EXPERTS)).sum(1).tolist()
        assert picks == ([2, 1, 1] if beside >= 0 else [2, 1, 0]), (strange, received)
        assert torch.equal(combined, torch.where(torch.tensor([True, beside >= 0, True])[:, None], rows, 0)), strange
