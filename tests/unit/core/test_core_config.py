"""Every limit works at its cap and is refused one beyond, by name; nothing that differs has an equal digest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from a2a.config import ExchangeConfig, low_precision_bytes_per_token
from a2a.errors import ConfigError

SMALL: dict[str, Any] = {"ep_size": 4, "max_num_tokens": 8, "top_k": 2, "num_experts": 8, "hidden_size": 256}


def config(**changes: Any) -> ExchangeConfig:
    return ExchangeConfig(**{**SMALL, **changes})


AT_THE_CAP = [
    {"ep_size": 1},
    {"ep_size": 256, "num_experts": 256},
    {"top_k": 1},
    {"top_k": 64},
    {"max_num_tokens": 1},
    {"num_experts": 4},
    {"hidden_size": 1},
    {"hidden_size": 7},
    {"dispatch_dtype_bytes_per_elem": 0},
    {"dispatch_dtype_bytes_per_elem": 1, "dispatch_scale_bytes_per_token": 17},
    {"dispatch_dtype_bytes_per_elem": 4},
    {"combine_dtype_bytes_per_elem": 1},
    {"combine_dtype_bytes_per_elem": 4},
    {"extra_payload_bytes_per_token": 1},
    {"row_order": "token"},
    {"scrub": "all"},
    {"scrub": None},
    {"eplb_stats_num_experts": 1},
    {"enable_rank_mask": True},
    {"num_contexts": 9},
    {"placement": (0,) * 8},
    {"placement": (3, 3, 3, 3, 0, 1, 2, 3)},
    {"wire_format": "mxfp8", "mx_alignment": 512},
    {"wire_format": "nvfp4"},
]


@pytest.mark.parametrize("changes", AT_THE_CAP, ids=str)
def test_values_up_to_the_cap_work(changes: dict[str, Any]) -> None:
    made = config(**changes)
    assert all(getattr(made, name) == value for name, value in changes.items())


BEYOND = [
    ("ep_size", {"ep_size": 0}),
    ("ep_size", {"ep_size": 257, "num_experts": 257}),
    ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": 65}),
    ("max_num_tokens", {"max_num_tokens": 0}),
    ("num_experts", {"num_experts": 3}),
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": 7, "dispatch_dtype_bytes_per_elem": 0}),
    ("dispatch_dtype_bytes_per_elem", {"dispatch_dtype_bytes_per_elem": 3}),
    ("dispatch_dtype_bytes_per_elem", {"dispatch_dtype_bytes_per_elem": 8}),
    ("dispatch_scale_bytes_per_token", {"dispatch_scale_bytes_per_token": -1}),
    ("combine_dtype_bytes_per_elem", {"combine_dtype_bytes_per_elem": 0}),
    ("extra_payload_bytes_per_token", {"extra_payload_bytes_per_token": -1}),
    ("row_order", {"row_order": "sorted"}),
    ("row_order", {"row_order": None}),
    ("scrub", {"scrub": "none"}),
    ("scrub", {"scrub": False}),
    ("eplb_stats_num_experts", {"eplb_stats_num_experts": -1}),
    ("enable_rank_mask", {"enable_rank_mask": 1}),
    ("num_contexts", {"num_contexts": 0}),
    ("num_contexts", {"num_contexts": 257}),
    ("name", {"name": ""}),
    ("name", {"name": 3}),
    ("placement", {"placement": (0,) * 7}),
    ("placement", {"placement": (0,) * 9}),
    ("placement[5]", {"placement": (0, 0, 0, 0, 0, 4, 0, 0)}),
    ("placement[2]", {"placement": (0, 0, -1, 0, 0, 0, 0, 0)}),
    ("placement[0]", {"placement": (False,) * 8}),
    ("mx_alignment", {"mx_alignment": 32}),
    ("mx_alignment", {"wire_format": "mxfp8", "mx_alignment": -32}),
    ("wire_format", {"wire_format": "fp6"}),
    ("wire_format", {"wire_format": "MXFP8"}),
    ("wire_format", {"wire_format": "mxfp8", "mx_alignment": 33}),
    ("wire_format", {"wire_format": "fp8_block", "hidden_size": 192}),
    ("wire_format", {"wire_format": "bf16", "mx_alignment": 32}),
    ("dispatch_dtype_bytes_per_elem", {"wire_format": "mxfp8", "dispatch_dtype_bytes_per_elem": 1}),
    ("dispatch_scale_bytes_per_token", {"wire_format": "mxfp8", "dispatch_scale_bytes_per_token": 8}),
]


@pytest.mark.parametrize(("named", "changes"), BEYOND, ids=str)
def test_values_beyond_are_refused_by_name(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert named in caught.value.what
    assert caught.value.what in str(caught.value) and "wanted" in str(caught.value)


COUNTS = [
    "ep_size",
    "max_num_tokens",
    "top_k",
    "num_experts",
    "hidden_size",
    "mx_alignment",
    "dispatch_dtype_bytes_per_elem",
    "dispatch_scale_bytes_per_token",
    "combine_dtype_bytes_per_elem",
    "extra_payload_bytes_per_token",
    "eplb_stats_num_experts",
    "num_contexts",
]


@pytest.mark.parametrize("value", [True, 2.0, "2", None], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_only_an_integer_is_a_count(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert caught.value.what == name and caught.value.got == value


def test_the_lists_above_know_every_field() -> None:
    named = {name for name, _ in BEYOND} | set(COUNTS)
    assert {field.name for field in dataclasses.fields(ExchangeConfig)} <= named


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        config(max_tokens=8)


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().top_k = 3  # type: ignore[misc]


OTHER = [
    {"ep_size": 3},
    {"max_num_tokens": 9},
    {"top_k": 3},
    {"num_experts": 9},
    {"hidden_size": 255},
    {"wire_format": "mxfp8"},
    {"wire_format": "mxfp8", "mx_alignment": 128},
    {"dispatch_dtype_bytes_per_elem": 1},
    {"dispatch_scale_bytes_per_token": 1},
    {"combine_dtype_bytes_per_elem": 4},
    {"extra_payload_bytes_per_token": 1},
    {"placement": (0, 0, 1, 1, 2, 2, 3, 3)},
    {"placement": (0, 0, 1, 1, 2, 2, 3, 2)},
    {"name": "draft"},
    {"row_order": "token"},
    {"scrub": "all"},
    {"scrub": None},
    {"eplb_stats_num_experts": 1},
    {"enable_rank_mask": True},
    {"num_contexts": 2},
]


def test_digests_tell_every_field_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [config().digest(), *(config(**changes).digest() for changes in OTHER)]
    assert len(set(digests)) == len(digests)
    assert {name for changes in OTHER for name in changes} == {f.name for f in dataclasses.fields(ExchangeConfig)}
    assert config().digest() == config().digest()
    # What travels between ranks is plain data.
    assert json.loads(json.dumps(config().facts())) == config().facts()
    monkeypatch.setattr("a2a.config.ABI_VERSION", 0)
    assert config().digest() not in digests


@pytest.mark.parametrize(
    ("changes", "row_bytes", "scale_bytes"),
    [
        ({}, 512, 0),
        ({"dispatch_dtype_bytes_per_elem": 4}, 1024, 0),
        ({"dispatch_dtype_bytes_per_elem": 0, "dispatch_scale_bytes_per_token": 16}, 128, 16),
        ({"wire_format": "bf16"}, 512, 0),
        ({"wire_format": "fp16"}, 512, 0),
        ({"wire_format": "fp8_block"}, 256, 8),
        ({"wire_format": "mxfp8"}, 256, 8),
        ({"wire_format": "mxfp8", "hidden_size": 160, "mx_alignment": 128}, 256, 8),
        ({"wire_format": "nvfp4"}, 128, 16),
        ({"wire_format": "mxfp4"}, 128, 8),
    ],
    ids=str,
)
def test_bytes_on_the_dispatch_wire(changes: dict[str, Any], row_bytes: int, scale_bytes: int) -> None:
    made = config(extra_payload_bytes_per_token=5, **changes)
    assert (made.data_bytes_per_token, made.scale_bytes_per_token) == (row_bytes, scale_bytes)
    # Two picks: 8 bytes of ids and 8 of weights.
    assert made.dispatch_bytes_per_token == row_bytes + scale_bytes + 16 + 5


@pytest.mark.parametrize(("hidden_size", "num_bytes"), [(1, 8), (4, 8), (5, 12), (128, 132), (129, 140), (7168, 7392)])
def test_bytes_on_the_e4m3_combine_wire(hidden_size: int, num_bytes: int) -> None:
    assert low_precision_bytes_per_token(hidden_size) == num_bytes
    made = config(hidden_size=hidden_size, combine_dtype_bytes_per_elem=1)
    assert made.combine_bytes_per_token == num_bytes
    assert config(hidden_size=hidden_size, combine_dtype_bytes_per_elem=4).combine_bytes_per_token == 4 * hidden_size
