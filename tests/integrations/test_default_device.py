"""What the adapters promise to be on the CPU is there under another default device, as model loaders set one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from a2a.comm.protocol import SingleComm
from a2a.integrations import flashinfer
from a2a.integrations.trtllm import Communication
from a2a.nvlink.caller_workspace import caller_layout, metainfo_of

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 4, 2, 16, 8


def historical() -> flashinfer.MoeAlltoAll:
    config = flashinfer.MnnvlConfig(SingleComm())
    return flashinfer.MoeAlltoAll(
        flashinfer.Mapping(), MOST, TOP_K, NUM_EXPERTS, hidden_size=HIDDEN, mnnvl_config=config, enable_rank_mask=True
    )


def mask_of_health() -> Tensor:
    health = types.SimpleNamespace(get_mask=lambda: 1)
    mapping = types.SimpleNamespace(moe_ep_rank=0, moe_ep_size=1, world_size=1)
    layer = Communication(
        mapping, NUM_EXPERTS, TOP_K, MOST, hidden_size=HIDDEN, dtype=torch.bfloat16, ep_group_health=health,
        comm=SingleComm(),
    )  # fmt: skip
    layer._exchange.active_ranks = None
    mask, _ = layer._mask(None)
    layer.destroy()
    assert mask is not None
    return mask


def mask_of_communication() -> Tensor:
    params = flashinfer.MoEEpCommParams(NUM_EXPERTS, TOP_K, MOST, HIDDEN)
    config = flashinfer.NVLinkOneSidedConfig(comm_backend=SingleComm(), enable_rank_mask=True)
    ours = flashinfer.create_communication(flashinfer.BootstrapConfig(1, 0), params, config)
    mask = ours.active_rank_mask([0])
    ours.destroy()
    return mask


MADE: dict[str, Callable[[], Tensor]] = {
    "metainfo of the class": lambda: historical().metainfo,
    "metainfo of a workspace": lambda: metainfo_of(caller_layout(2, MOST, 0, 4096)),
    "mask of a function": lambda: flashinfer.moe_a2a_active_rank_mask([0], 1),
    "mask of a communication": mask_of_communication,
    "mask of TensorRT-LLM's health": mask_of_health,
}


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


@pytest.mark.parametrize("name", MADE)
def test_tensors_of_the_cpu_are_on_the_cpu(name: str) -> None:
    wanted = MADE[name]()
    with torch.device("meta"):
        made = MADE[name]()
    assert made.device.type == "cpu" and torch.equal(made, wanted)


def test_rounds_of_the_historical_class() -> None:
    rows = torch.arange(3.0 * HIDDEN).view(3, HIDDEN).bfloat16()
    ids, weights = torch.tensor([[0, 1], [2, -1], [-1, 9]], dtype=torch.int32), torch.ones(3, TOP_K)
    with torch.device("meta"):
        ours = historical()
        mask = flashinfer.moe_a2a_active_rank_mask([0], 1)
        views: list[Any] = ours.dispatch(ids, [rows, ids, weights], 4, None, None, active_rank_mask=mask)
        flashinfer.moe_a2a_sanitize_expert_ids(views[1], ours.workspace, ours.metainfo, 0, 7)
        assert views[1][0, :, 0].tolist() == [0, 2, 7, 7]
        area = ours.get_combine_payload_tensor_in_workspace(4, HIDDEN, torch.bfloat16)
        combined = ours.combine(area.copy_(views[0]), 4, payload_in_workspace=True, active_rank_mask=mask)
    assert torch.equal(combined, torch.cat([rows[:2], torch.zeros_like(rows[2:])]))
    ours.close()
