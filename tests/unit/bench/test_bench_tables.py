"""The tables of results, and the one call that makes them: commands and arithmetic, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summary, ep_table = _load("tests/gpu/results/summary.py"), _load("launch/ep_table.py")


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([], "no size has both"),
        ([(1, 2.0, 3.0), (8, 4.0, 5.0)], "faster at every size measured, from 1 tokens"),
        ([(1, 3.0, 2.0), (8, 5.0, 4.0)], "slower at every size measured, up to 8 tokens"),
        # Twice as slow at 10, twice as fast at 1000: equal at the geometric mean.
        ([(10, 2.0, 1.0), (1000, 1.0, 2.0)], "overtakes at about 100 tokens per rank"),
        ([(10, 1.0, 2.0), (1000, 2.0, 1.0), (2000, 1.0, 1.5)], "falls behind at about 100"),
    ],
)
def test_where_one_overtakes_the_other(pairs: list[tuple[int, float, float]], told: str) -> None:
    assert summary.overtaking(pairs).startswith(told)


def _row(name: str, tokens: int, phase: str, us: float, **more: Any) -> dict[str, Any]:
    row = {
        "implementation": name, "tokens_per_rank": tokens, "phase": phase, "us_p50": us, "exact": True, "mode": "graph",
        "wire_format": "bf16", "row_order": "token", "routing": "uniform", "payload_in_workspace": True,
        "num_sms": None, "link_gbps": 100 / us, "regime": "small",
    }  # fmt: skip
    return {**row, **more}


def test_a_table_has_every_figure_of_its_file() -> None:
    rows = [
        _row(name, tokens, phase, scale * tokens)
        for name, scale in (("a2a", 1.0), ("ag-rs", 3.0), ("copy", 0.5))
        for tokens in (8, 64)
        for phase in ("pair", "dispatch", "combine")
    ]
    rows[-1]["exact"] = False
    document = {
        "environment": {"ranks": 8, "gpus": ["G"] * 8, "torch": "2", "python": "3", "commit": "abc", "platform": "p"},
        "workload": {"preset": "deepseek-v3", "arguments": ["bench", "--ranks", "8"]},
        "rows": rows,
    }
    text = "\n".join(summary.tables("x.json", document))
    assert "8 ranks, 8 x G" in text and "commit abc" in text and "`a2a bench --ranks 8`" in text
    assert "| **a2a** pair | 8.0 | 64.0 |" in text and "| ag-rs pair | 24.0 | 192.0 |" in text
    assert "| pair, of a copy | 0.50 | 0.50 |" in text and "| a2a dispatch, physical GB/s | 12.5 | 1.6 |" in text
    assert "32.0 (not exact)" in text
    assert "a2a against ag-rs: faster at every size measured" in text


def test_the_readme_is_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "HERE", tmp_path)
    for file in (ROOT / "tests/gpu/results").glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    assert summary.main(["--readme"]) == 0
    assert (tmp_path / "README.md").read_text() == (ROOT / "tests/gpu/results/README.md").read_text()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is started; benches leave a file."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(list(command[1:]))
        if "bench" in command:
            Path(command[command.index("--json") + 1]).write_text(json.dumps({}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_one_call_runs_tests_benches_and_tables(commands: list[list[str]], tmp_path: Path, capsys: Any) -> None:
    assert ep_table.main(["--ranks", "8", "--name", "h200x8", "--out", str(tmp_path)]) == 0
    assert commands[0][0] == "tests/gpu/suite.py"
    benches = [command for command in commands if "bench" in command]
    # Rows of gpt-oss are no multiple of 128, which fp8_block needs.
    assert len(benches) == 5 and "gpt-oss-120b, fp8_block: left out" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} >= {"h200x8_ep8_deepseek-v3_bf16.json"}
    for command in benches:
        assert command[command.index("--ranks") + 1] == "8" and "graph,eager" in command
        assert [command[i + 1] for i, word in enumerate(command) if word == "--peer"][:3] == list(ep_table.PEERS)
        assert command[command.index("--tokens") + 1] == "1,8,32,128,512,2048,8192"
    assert commands[-1][0].endswith("summary.py") and len(commands[-1]) == 6


def test_what_fails_or_is_not_reached_is_told(
    commands: list[list[str]], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ep_table.main(["--no-tests", "--limit-s", "1", "--out", str(tmp_path)]) == 1
    assert not commands and "the time is over" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    assert ep_table.main(["--presets", "deepseek-v3", "--wire-formats", "bf16", "--out", str(tmp_path)]) == 1


def test_readme_has_the_figures_of_the_files() -> None:
    figures = _load("tests/bench/results/readme_tables.py")
    lines = (ROOT / "README.md").read_text().splitlines()
    wanted = [*figures.host_table(), *figures.gpu_table(), *(f"    {command}" for command in figures.commands())]
    missing = [line for line in wanted if line not in lines]
    assert not missing, f"README lacks what tests/bench/results/readme_tables.py prints: {missing}"
    assert figures.largest() in "\n".join(lines)
    # Nor has it multiples that no file is behind.
    assert [line for line in lines if line.startswith("|") and "x) |" in line] == list(figures.host_table())
