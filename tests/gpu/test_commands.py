"""The command line on GPUs: tune writes a table that rounds then go by, bench times graphs and their phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from a2a.bench.doctor import diagnose
from a2a.cli import main
from a2a.nvlink.tuning import read_tuning

SMALL = ("--preset", "olmoe-1b-7b", "--ranks", "2", "--routing", "uniform")


@pytest.mark.gpu(1)
def test_tune_writes_a_table_that_bench_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, told, rows = (str(tmp_path / name) for name in ("table.toml", "tune.json", "bench.json"))
    assert main(["tune", *SMALL, "--tokens", "4,100", "--budget-s", "15", "--output", table, "--json", told]) == 0
    tuning = read_tuning(Path(table))
    mine = [point for point in tuning.points if point.ep_size == 2 and point.row_bytes in (4160, 4096)]
    assert {point.tokens for point in mine if point.phase == "dispatch"} >= {4}, tuning.text()
    document = json.loads(Path(told).read_text())
    assert document["trials"] and all(trial["pair_us"] > 0 for trial in document["trials"])
    monkeypatch.setenv("A2A_TUNING", table)
    assert "given by A2A_TUNING" in {each.topic: each.text for each in diagnose().findings}["launch shapes"]
    assert main(["bench", *SMALL, "--tokens", "4,100", "--wire-format", "bf16,mxfp8", "--json", rows]) == 0


@pytest.mark.gpu(2)
def test_bench_times_graphs_and_their_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_COMMIT", "0123456789")
    path = tmp_path / "rows.json"
    words = ["bench", *SMALL, "--tokens", "0,8,600", "--mode", "graph,eager", "--wire-format", "bf16,fp8_block"]
    words += ["--rounds", "4", "--peer", "ag-rs", "--peer", "copy", "--peer", "torch-a2a", "--json", str(path)]
    assert main(words) == 0
    document = json.loads(path.read_text())
    rows: list[dict[str, Any]] = document["rows"]
    assert document["environment"]["commit"] and document["workload"]["arguments"] == words
    assert all(row["exact"] is True and row["us_p50"] > 0 for row in rows)
    graphs = {(row["implementation"], row["phase"]) for row in rows if row["mode"] == "graph"}
    assert graphs == {(name, phase) for name in ("a2a", "ag-rs", "copy") for phase in ("dispatch", "combine", "pair")}
    alone = [row["us_alone"] for row in rows if row["mode"] == "graph" and row["phase"] == "dispatch"]
    assert alone and all(us > 0 for us in alone)
    assert {row["implementation"] for row in rows if row["mode"] == "eager"} == {"a2a", "ag-rs", "copy", "torch-a2a"}


@pytest.mark.gpu(2)
def test_doctor_tries_lines_between_two_gpus() -> None:
    texts = {each.topic: each.text for each in diagnose().findings}
    assert "none of" in texts["128-byte lines"] and "pairs of ranks was torn" in texts["128-byte lines"], texts
