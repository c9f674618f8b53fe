"""Calls that look like one that was checked are not checked again: whatever looks otherwise is."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import a2a
from a2a.arguments import look
from a2a.comm.protocol import SingleComm
from a2a.errors import ConfigError, ShapeError, StateError
from a2a.quant import ScaleLayout
from a2a.transport import CombineCall, DispatchCall

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
    values += [IDS.long(), IDS[:, :1], IDS.unsqueeze(0), IDS.to("meta"), square, square.t()[1:], square[1:]]
    looks = [look(each) for each in values]
    assert len(set(looks)) == len(looks)
    assert look([]) is None and look(IDS, [1]) is None and look(IDS, object()) is None


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


def test_payloads_that_look_otherwise_are_checked() -> None:
    n, k = 3, 2
    rows, ids = torch.ones((n, HIDDEN), dtype=torch.bfloat16), torch.zeros((n, k), dtype=torch.int32)
    good: dict[str, Any] = {
        "token_selected_experts": ids,
        "input_payloads": [rows, ids],
        "runtime_max_tokens_per_rank": 4,
    }
    bad: list[dict[str, Any]] = [
        {"input_payloads": [rows.t().contiguous().t(), ids]},
        {"input_payloads": [rows[:2], ids]},
        {"input_payloads": [rows.tolist(), ids]},
        {"input_payloads": [rows, None]},
        {"input_payloads": [rows.to("meta"), ids]},
        {"input_payloads": []},
        {"input_payloads": rows},
        {"input_payloads": None},
        {"input_payloads": iter([rows, ids])},
        {"input_payloads": [rows, ids] * 5},
        {"input_payloads": [rows.double(), rows.double(), rows.double()]},
        {"token_selected_experts": ids.float()},
        {"token_selected_experts": ids[:, :1].contiguous(), "expert_id_payload_index": 1},
        {"token_selected_experts": ids.tolist()},
        {"expert_id_payload_index": 0},
        {"expert_id_payload_index": 2},
        {"expert_id_payload_index": True},
        {"expert_id_payload_index": 1.0},
        {"runtime_max_tokens_per_rank": 4.0},
        {"runtime_max_tokens_per_rank": True},
        {"runtime_max_tokens_per_rank": 2},
        {"runtime_max_tokens_per_rank": 9},
        {"invalid_token_expert_id": 2**31},
        {"eplb_local_stats": torch.zeros(3, dtype=torch.int32)},
        {"active_rank_mask": torch.ones(1, dtype=torch.uint64)},
    ]
    with built() as moe:
        for change in ({}, *bad):
            if change:
                with pytest.raises((ShapeError, ConfigError)):
                    moe.dispatch(**{**good, **change})
                assert moe.state == "idle"
            for number in range(2):
                fresh = torch.full_like(rows, float(number + 1))
                views = moe.dispatch(ids, [fresh, ids], 4, 7)
                assert (views[0][0, :n] == number + 1).all()
                # The list is the caller's to change; the ids are where they were given, or nowhere.
                views.clear()
                moe.combine(torch.zeros(1, 4, HIDDEN, dtype=torch.bfloat16), 4)
                views = moe.dispatch(ids, [fresh, ids.clone()], 4, 7)
                assert views[1][0, :n].tolist() == ids.tolist()
                moe.combine(torch.zeros(1, 4, HIDDEN, dtype=torch.bfloat16), 4)
                views = moe.dispatch(**good, invalid_token_expert_id=7)
                assert views[1][0].tolist() == [*ids.tolist(), [7, 7]]
                views[1].zero_()
                moe.combine(torch.zeros(1, 4, HIDDEN, dtype=torch.bfloat16), 4)


def test_calls_that_are_said_to_be_alike_are() -> None:
    """What a transport may keep for the calls of one `like` is theirs, whatever was asked for in between."""
    rows = {dtype: torch.ones((8, HIDDEN), dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    ids = {dtype: torch.zeros((8, 2), dtype=dtype) for dtype in (torch.int32, torch.int64)}
    weights, stats = torch.ones((8, 2)), torch.ones(5, dtype=torch.int32)
    free = {"round", "attempt", "topk_ids", "rows", "payload", "output", "eplb_local_stats", "stream", "num_sms"}
    free |= {"enable_pdl", "payload_in_workspace", "output_scales", "timeout_s"}
    draw, seen = random.Random(1), dict[object, set[object]]()

    def note(call: DispatchCall | CombineCall) -> None:
        facts = {name: value for name, value in call._asdict().items() if name not in free}
        like = facts.pop("like")
        assert like is not None
        tensors = [getattr(call, name, None) for name in ("topk_ids", "payload", "output", "eplb_local_stats")]
        tensors += getattr(call, "rows", ())
        looks = look(*tensors)
        seen.setdefault(like, set()).add((tuple(facts.items()), looks))

    with built(wire_format="mxfp8", num_contexts=2, eplb_stats_num_experts=5, combine_dtype_bytes_per_elem=4) as moe:
        transport = moe._shared.transport
        for name in ("dispatch", "combine"):
            play = getattr(transport, name)
            setattr(transport, name, lambda call, play=play: (note(call), play(call))[1])
        for _ in range(300):
            context, n, k = draw.choice(moe.contexts), draw.choice((1, 3)), draw.choice((1, 2))
            most = draw.choice((3, 4))
            mine = ids[draw.choice((torch.int32, torch.int64))][:n, :k].contiguous()
            hidden = rows[draw.choice((torch.bfloat16, torch.float32))][:n]
            options: dict[str, Any] = {
                "invalid_token_expert_id": draw.choice((None, 7)),
                "eplb_local_stats": draw.choice((None, stats)),
            }
            if draw.random() < 0.5:
                given = weights[:n, :k].contiguous()
                context.dispatch_tokens(hidden, mine, given, runtime_max_tokens_per_rank=most, **options)
            else:
                hidden = rows[draw.choice((torch.bfloat16, torch.float16))][:n, : draw.choice((8, 16))].contiguous()
                context.dispatch(mine, draw.choice(([hidden], [hidden, mine])), most, **options)
            payload = torch.zeros((1, most, draw.choice((8, HIDDEN))), dtype=draw.choice(list(rows)))
            low = payload.dtype == torch.bfloat16 and draw.random() < 0.3
            context.combine(payload, most, use_low_precision=low)
    assert len(seen) > 20 and all(len(each) == 1 for each in seen.values())


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
        data = moe.combine(payload, 4, output_dtype=torch.uint8, output_scales=scales, output_scalar_scale=scale)
        return [*data.flatten().tolist(), *scales.view(torch.uint8).flatten().tolist()]

    with built() as moe:
        found = {}
        for value in (2.0, 300.0, 2.0):
            found[value] = quantized(moe, torch.tensor(value))
            assert quantized(moe, value) == found[value]
        assert found[2.0] != found[300.0]


def _round(moe: a2a.MoeAlltoAll, n: int = 3, most: int = 4) -> tuple[list[Tensor], Tensor]:
    """A dispatch of ones and the combine area, not yet combined."""
    rows, ids = torch.ones((n, HIDDEN), dtype=torch.bfloat16), torch.zeros((n, 2), dtype=torch.int32)
    views = moe.dispatch(ids, [rows, ids], most)
    return views, moe.get_combine_payload_tensor_in_workspace(most, HIDDEN, torch.bfloat16)


@pytest.mark.parametrize("loops", ["numba", "torch"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_was_kept_in_a_mode_can_be_used_outside(mode: Any, loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loops == "torch":
        monkeypatch.setitem(sys.modules, "numba", None)
    with mode():
        moe = built()
        _, area = _round(moe)
        moe.combine(area, 4, payload_in_workspace=True)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        views, area = _round(moe)
        assert not area.requires_grad
        (views[0].float() * weight).sum().backward()
        area.copy_(views[0] * weight)
        out = moe.combine(area.detach(), 4, payload_in_workspace=True)
        assert out.eq(1).all()
    moe.close()


@pytest.mark.parametrize("loops", ["numba", "torch"])
def test_a_default_device_is_nothing_to_the_host(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loops == "torch":
        monkeypatch.setitem(sys.modules, "numba", None)
    with built(row_order="token") as moe:
        for n in (3, 2, 1):
            rows, ids = torch.ones((n, HIDDEN), dtype=torch.bfloat16), torch.zeros((n, 2), dtype=torch.int32)
            with torch.device("meta"):
                views = moe.dispatch(ids, [rows, ids], 4)
                out = moe.combine(views[0], 4)
            assert out.device.type == "cpu" and out.eq(1).all()


@pytest.mark.parametrize("most", [4.0, True, "4", None, 3])
def test_rows_of_another_type_are_refused_however_often_the_right_ones_came(most: Any) -> None:
    with built() as moe:
        for _ in range(2):
            _, area = _round(moe, n=1, most=1 if most is True else 4)
            with pytest.raises(ShapeError, match="runtime_max_tokens_per_rank"):
                moe.get_combine_payload_tensor_in_workspace(most, HIDDEN, torch.bfloat16)
            with pytest.raises(ShapeError, match="runtime_max_tokens_per_rank"):
                moe.combine(area, most, payload_in_workspace=True)
            moe.combine(area, 1 if most is True else 4, payload_in_workspace=True)


def test_a_scale_belongs_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph needs it for as long as it lives, and no plan is kept as long; and 0.0 is not -0.0."""
    told: list[CombineCall] = []
    with built(wire_format="nvfp4") as moe:
        combine = moe._shared.transport.combine
        monkeypatch.setattr(moe._shared.transport, "combine", lambda call: (told.append(call), combine(call)))
        made = []
        for scale in (0.5, 0.5, 0.0, -0.0):
            rows = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
            moe.dispatch_tokens(rows, IDS, torch.ones((3, 2)), runtime_max_tokens_per_rank=4)
            scales = torch.zeros((3, HIDDEN // 16), dtype=torch.float8_e4m3fn)
            payload = torch.ones((1, 4, HIDDEN), dtype=torch.bfloat16)
            moe.combine(payload, 4, output_dtype=torch.uint8, output_scales=scales, output_scalar_scale=scale)
            made.append(scales.view(torch.uint8).clone())
        held = [call.output_quantize.global_scale for call in told if call.output_quantize is not None]
        assert len({id(each) for each in held}) == 4 and not moe._combine_plans
    assert made[0].equal(made[1]) and not made[2].equal(made[3])


def test_a_mask_is_set_on_the_stream_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it would change under the kernels of the round before."""
    ids, mask = torch.zeros((2, 2), dtype=torch.int32), torch.ones(1, dtype=torch.uint64)
    here: list[object] = [None]
    copied: list[object] = []

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        here.append(stream)
        yield
        here.pop()

    copy = Tensor.copy_

    def copy_(to: Tensor, source: Tensor) -> Tensor:
        if source is mask:
            copied.append(here[-1])
        return copy(to, source)

    with built(enable_rank_mask=True) as moe:
        monkeypatch.setattr(moe, "_on", on)
        monkeypatch.setattr(Tensor, "copy_", copy_)
        moe.dispatch(ids, [ids], 2, active_rank_mask=mask, stream=5)
        moe.combine(torch.zeros(1, 2, HIDDEN, dtype=torch.bfloat16), 2, active_rank_mask=mask, stream=6)
    assert copied == [5, 6]
