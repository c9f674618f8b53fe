"""Presets, bench plans and cluster figures: what ships is readable, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from a2a import config
from a2a.bench.workload import shipped_recordings
from a2a.config import bench_plan, bench_plans, cluster_figures, model_preset, model_presets
from a2a.errors import ConfigError
from a2a.quant import wire_format

WANTED = [
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "glm-4.5",
    "gpt-oss-120b",
    "kimi-k2",
    "minimax-m2",
    "mixtral-8x7b",
    "nemotron-3-super",
    "olmoe-1b-7b",
    "qwen1.5-moe-a2.7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3.5-397b-a17b",
]


def test_all_presets_ship() -> None:
    assert set(WANTED) <= set(model_presets())


@pytest.mark.parametrize("name", WANTED)
def test_a_preset_can_be_exchanged(name: str) -> None:
    preset = model_preset(name)
    assert preset.name == name and preset.source.startswith("https://")
    assert wire_format(preset.wire_format).check(preset.hidden_size, preset.mx_alignment) == []
    assert preset.routing is None or preset.routing in shipped_recordings()


def test_numbers_of_one_preset() -> None:
    preset = model_preset("DeepSeek-V3")
    assert (preset.hidden_size, preset.num_experts, preset.top_k) == (7168, 256, 8)


def test_plans_and_figures_ship() -> None:
    assert {"decode", "prefill", "main"} <= set(bench_plans())
    for name in bench_plans():
        plan = bench_plan(name)
        model_preset(plan.preset)
    assert bench_plan("main").preset == "olmoe-1b-7b" and bench_plan("main").ranks == 4
    for transport in ("host", "nvlink"):
        figures = cluster_figures(transport)
        assert figures is not None and figures.source
    assert cluster_figures("carrier pigeon") is None


GOOD = """description = "x"
preset = "deepseek-v3"
ranks = 2
tokens = [1, 2]
wire_formats = ["bf16"]
routings = ["uniform"]
rounds = 3
"""


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert bench_plan(str(path)).tokens == (1, 2)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("rounds = 3", "rounds = 3\nround = 3", "round"),
        ("ranks = 2\n", "", "ranks"),
        ("ranks = 2", 'ranks = "2"', "ranks"),
        ("ranks = 2", "ranks = true", "ranks"),
        ("ranks = 2", "ranks = 0", "ranks"),
        ("tokens = [1, 2]", "tokens = 1", "tokens"),
        ("tokens = [1, 2]", "tokens = [1, 2.5]", "tokens"),
        ("tokens = [1, 2]", "tokens = []", "tokens"),
        ("tokens = [1, 2]", "tokens = [-1]", "tokens"),
        ('"bf16"]', '"bf16"]\nrow_orders = ["sorted"]', "row_orders"),
    ],
)
def test_a_wrong_key_is_named_with_its_file_and_the_known_keys(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        bench_plan(str(path))
    assert caught.value.what == f"{path}: {key}"
    assert "known keys: description, preset, ranks" in caught.value.change


def test_a_file_that_is_not_toml_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("ranks = = 2")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    for name in ("a.toml", "b.toml", "c.toml"):
        with pytest.raises(ConfigError, match=name):
            bench_plan(str(tmp_path / name))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="deepseek-v3, deepseek-v4-flash"):
        model_preset("deepseek")
    with pytest.raises(ConfigError, match="decode, main, prefill"):
        bench_plan("decoder")


def test_configs_are_found_beside_the_package_or_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "a2a"
    package.mkdir(parents=True)
    monkeypatch.setattr(config, "__file__", str(package / "config.py"))
    with pytest.raises(ConfigError, match="reinstall"):
        config.configs_dir()
    (tmp_path / "site" / "configs" / "models").mkdir(parents=True)
    assert config.configs_dir() == tmp_path / "site" / "configs"
    (package / "configs" / "models").mkdir(parents=True)
    assert config.configs_dir() == package / "configs"
