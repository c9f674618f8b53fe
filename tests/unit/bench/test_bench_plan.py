"""Sizes and predictions, against the contract's reference points and by hand."""

from __future__ import annotations

import pytest

from a2a.bench.plan import MIB, Plan, predict
from a2a.config import cluster_figures, model_preset
from a2a.errors import ConfigError

V3 = model_preset("deepseek-v3")


def _plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "preset": V3, "ep_size": 8, "max_tokens": 64, "tokens": 4, "wire_format": "bf16", "transport": "host",
        "routing": "uniform",
    }  # fmt: skip
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ep_size", "max_tokens", "wire_format", "mib"),
    [
        (8, 8192, "bf16", 1797), (8, 8192, "fp8_block", 1363), (8, 8192, "mxfp8", 1363), (8, 8192, "nvfp4", 1153),
        (8, 512, "bf16", 112), (8, 512, "mxfp8", 85), (8, 512, "nvfp4", 72),
        (72, 1024, "bf16", 2021), (72, 1024, "mxfp8", 1532), (72, 1024, "nvfp4", 1296),
    ],
)  # fmt: skip
def test_reference_points(ep_size: int, max_tokens: int, wire_format: str, mib: int) -> None:
    found = predict(_plan(ep_size=ep_size, max_tokens=max_tokens, wire_format=wire_format))
    # The points are rounded to whole MiB.
    assert mib - 0.51 <= found["workspace_bytes_per_rank"] / MIB <= mib * 1.01
    assert sum(each["num_bytes"] for each in found["regions"]) <= found["workspace_bytes_per_rank"]


def test_regions_are_disjoint_and_inside() -> None:
    found = predict(_plan())
    end = 0
    for each in found["regions"]:
        assert each["offset_bytes"] >= end
        end = each["offset_bytes"] + each["num_bytes"]
    assert end <= found["workspace_bytes_per_rank"]


def test_one_rank_sends_nothing_and_costs_the_fixed_part() -> None:
    found = predict(_plan(ep_size=1, transport="nvlink", tokens=64))
    figures = cluster_figures("nvlink")
    assert figures is not None
    assert found["link_bytes_per_rank"] == 0 and found["logical_bytes_per_rank"] == 64 * (7168 * 2 * 2 + 64)
    assert found["predicted_us"] == pytest.approx(2 * figures.fixed_us_per_phase)


def test_a_prediction_by_hand() -> None:
    found = predict(_plan(ep_size=2, transport="nvlink", tokens=64))
    figures = cluster_figures("nvlink")
    assert figures is not None
    dispatch = found["by_phase"]["dispatch"]
    assert dispatch["link_bytes"] % (7168 * 2 + 64) == 0 and dispatch["link_bytes"] > 0
    by_hand = figures.fixed_us_per_phase + dispatch["link_bytes"] / (figures.dispatch_gbps * 1e3)
    assert dispatch["predicted_us"] == pytest.approx(by_hand)
    assert found["predicted_us"] == pytest.approx(by_hand + found["by_phase"]["combine"]["predicted_us"])


def test_extrapolation_is_said() -> None:
    assert any("extrapolated" in line for line in predict(_plan(ep_size=72))["rests_on"])


@pytest.mark.parametrize(
    "changes", [{"tokens": 65}, {"tokens": -1}, {"transport": "pigeon"}, {"routing": "x"}, {"ep_size": 300}]
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        predict(_plan(**changes))
