"""Calls that look like one that was checked are not checked again: whatever looks otherwise is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import a2a
from a2a.arguments import look
from a2a.comm.protocol import SingleComm
from a2a.errors import ConfigError, ShapeError, StateError
from a2a.quant import ScaleLayout

HIDDEN = 32
IDS = torch.zeros((3, 2), dtype=torch.int32)


def built(**keywords: Any) -> a2a.MoeAlltoAll:
    return a2a.MoeAlltoAll(
        max_num_tokens=8,
        top_k=2,
        num_experts=4,
        hidden_size=HIDDEN,
        comm=SingleComm(),
        transport="host",
        **keywords,
    )


def test_what_looks_the_same_is_of_one_kind() -> None:
    for same in ([IDS, IDS + 1], [None, None], [7, 7], [ScaleLayout.LINEAR, ScaleLayout.LINEAR], [torch.uint8] * 2):
        assert look(same[0]) == look(same[1]) and hash(look(same[0])) == hash(look(same[1]))
    square = torch.zeros(4, 4)
    values: list[Any] = [1, True, 1.0, "1", None, 0, False, 2, torch.uint8, torch.int8, *ScaleLayout, IDS, IDS[:2]]
    values += [IDS.long(), IDS[:, :1], IDS.unsqueeze(0), IDS.to("meta"), square, square.t()[1:], square[1:], [], [1]]
    looks = [look(each) for each in values]
    assert len(set(looks)) == len(looks)


def test_tokens_that_look_otherwise_are_checked() -> None:
    n, k, hidden = 3, 2, HIDDEN
    rows = torch.ones((n, hidden), dtype=torch.bfloat16)
    ids, weights = torch.zeros((n, k), dtype=torch.int32), torch.ones((n, k))
    good: dict[str, Any] = {
        "hidden_states": rows,
        "topk_ids": ids,
        "topk_weights": weights,
        "runtime_max_tokens_per_rank": 4,
    }
    bad: list[dict[str, Any]] = [
        {"hidden_states": rows.t().contiguous().t()},
        {"hidden_states": rows.float()},
        {"hidden_states": rows[:2]},
        {"hidden_states": rows.tolist()},
        {"topk_ids": ids.float()},
        {"topk_ids": ids[:, :1]},
        {"topk_ids": ids.t().contiguous().t()},
        {"topk_weights": weights.double()},
        {"topk_weights": weights[:2]},
        {"topk_weights": None},
        {"scale": torch.ones((n, 1))},
        {"scale": 1.0},
        {"global_scale": torch.ones(())},
        {"scale_layout": "LINEAR"},
        {"scale_layout": None},
        {"scale_layout": []},
        {"runtime_max_tokens_per_rank": 4.0},
        {"runtime_max_tokens_per_rank": True},
        {"runtime_max_tokens_per_rank": 2},
        {"runtime_max_tokens_per_rank": 9},
        {"invalid_token_expert_id": 2**31},
        {"invalid_token_expert_id": -1.0},
        {"eplb_local_stats": torch.zeros(3, dtype=torch.int32)},
    ]
    with built(wire_format="bf16") as moe:
        for change in ({}, *bad):
            if change:
                with pytest.raises((ShapeError, ConfigError)):
                    moe.dispatch_tokens(**{**good, **change})
                assert moe.state == "idle"
            for number in range(2):
                # Others of the same look, elsewhere: their rows arrive, not those of before.
                fresh = {**good, "hidden_states": torch.full_like(rows, float(number + 1)), "topk_ids": ids.clone()}
                received = moe.dispatch_tokens(**fresh)
                assert (received.hidden_states[0, :n] == number + 1).all()
                moe.combine(torch.zeros(1, 4, hidden, dtype=torch.bfloat16), 4)


@pytest.mark.parametrize("recognised", [False, True])
def test_combines_that_look_otherwise_are_checked(recognised: bool) -> None:
    most = 4
    payload = torch.ones((1, most, HIDDEN), dtype=torch.bfloat16)
    output = torch.zeros((3, HIDDEN), dtype=torch.bfloat16)
    good: dict[str, Any] = {"payload": payload, "runtime_max_tokens_per_rank": most, "output": output}
    bad: list[dict[str, Any]] = [
        {"payload": payload.double()},
        {"payload": payload[:, :3]},
        {"payload": payload.transpose(1, 2).contiguous().transpose(1, 2)},
        {"payload": payload.tolist()},
        {"payload": torch.ones((1, most, HIDDEN + 1), dtype=torch.bfloat16)},
        {"runtime_max_tokens_per_rank": 3},
        {"payload_in_workspace": True},
        {"output": output[:2]},
        {"output": output.float()},
        {"output": output.t().contiguous().t()},
        {"output_dtype": torch.float64},
        {"output_dtype": torch.uint8},
        {"output_scales": torch.ones((3, 1))},
        {"output_scalar_scale": 2.0},
        {"output_scalar_scale": torch.tensor(1.0)},
        {"sf_layout": "LINEAR"},
    ]
    with built() as moe:
        for number, change in enumerate(bad):
            if recognised:
                moe.dispatch(IDS, [IDS], most)
                moe.combine(**good)
            moe.dispatch(IDS, [IDS], most)
            with pytest.raises((ShapeError, ConfigError)):
                moe.combine(**{**good, **change})
            assert moe.state == "dispatched"
            payload.fill_(number)
            assert moe.combine(**good) is output and (output == number).all()


def test_a_recognised_payload_in_the_workspace_is_found_by_its_address() -> None:
    with built() as moe:
        for turn in range(4):
            moe.dispatch(IDS, [IDS], 4)
            view = moe.get_combine_payload_tensor_in_workspace(4, HIDDEN, torch.bfloat16)
            view.fill_(float(turn))
            with pytest.raises(ShapeError, match="get_combine_payload_tensor_in_workspace"):
                moe.combine(view.clone(), 4, payload_in_workspace=True)
            assert (moe.combine(view, 4, payload_in_workspace=True) == turn).all()
            with pytest.raises(StateError):
                moe.get_combine_payload_tensor_in_workspace(4, HIDDEN, torch.bfloat16)


def test_the_contents_of_a_scale_are_no_look() -> None:
    payload = torch.randn((1, 4, HIDDEN), generator=torch.Generator().manual_seed(1)).bfloat16()

    def quantized(moe: a2a.MoeAlltoAll, scale: float | Tensor) -> list[int]:
        moe.dispatch(IDS, [IDS], 4)
        scales = torch.zeros((3, HIDDEN // 16), dtype=torch.float8_e4m3fn)
        data = moe.combine(
            payload, 4, output_dtype=torch.uint8, output_scales=scales, output_scalar_scale=scale
        )
        return [*data.flatten().tolist(), *scales.view(torch.uint8).flatten().tolist()]

    with built() as moe:
        found = {}
        for value in (2.0, 300.0, 2.0):
            found[value] = quantized(moe, torch.tensor(value))
            assert quantized(moe, value) == found[value]
        assert found[2.0] != found[300.0]
