"""Tables and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from a2a.bench import report


def test_a_plain_table_aligns_numbers_right() -> None:
    out = io.StringIO()
    report.print_table("title", ["name", "n"], [["a", "1"], ["long name", "20"]], out)
    assert out.getvalue().splitlines() == ["title", "name        n", "---------  --", "a           1", "long name  20"]


def test_a_table_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(report, "_has_rich", lambda: False)
    out = Terminal()
    report.print_table("t", ["a"], [["b"]], out)
    assert out.getvalue() == "t\na\n-\nb\n"


def test_json_goes_to_a_file_or_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.write_json(str(tmp_path / "x.json"), {"command": "plan", "n": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"schema": 1, "command": "plan", "n": 1}
    report.write_json("-", {"command": "plan"})
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "command": "plan"}


def test_no_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with report.progress("work", 3, shown=True) as step:
        step()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


def test_a_plain_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "_has_rich", lambda: False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with report.progress("work", 4, shown=True) as step:
        for _ in range(4):
            step()
    err = capsys.readouterr().err
    assert "work  25 %" in err and "work 100 %" in err


def test_an_inexact_row_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "implementation": "a2a", "transport": "host", "routing": "uniform", "wire_format": "bf16",
        "row_order": "compact", "tokens_per_rank": 4, "phase": "pair", "us_p50": 10.0, "us_p99": 11.0, "us_min": 9.0,
        "link_bytes": 0, "logical_bytes": 0, "link_gbps": 0.0, "limit_us": None, "exact": False, "ep_size": 2,
        "hidden_size": 8, "num_experts": 4, "top_k": 2, "rounds": 1, "reason": "rank 1: sums: row (0,) differs",
    }  # fmt: skip
    report.print_bench([row])
    out = capsys.readouterr().out
    assert "NO" in out and "a2a pair, 4 tokens: rank 1: sums: row (0,) differs" in out
