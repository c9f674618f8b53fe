"""The command line from outside: what it prints, writes and returns. Small sizes; ranks are real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from a2a.bench.doctor import find_mpiexec
from a2a.bench.report import installed
from a2a.cli import main
from a2a.host.transport import HostTransport

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("bench", "--preset", "qwen3-30b-a3b", "--ranks", "3", "--tokens", "0,5", "--rounds", "4")

ROW_KEYS = {
    "implementation", "transport", "ep_size", "tokens_per_rank", "hidden_size", "top_k", "num_experts", "wire_format",
    "phase", "mode", "us_p50", "us_p99", "us_min", "link_bytes", "logical_bytes", "link_gbps", "exact", "regime",
    "limit", "row_order", "num_sms", "rounds", "rounds_per_graph", "payload_in_workspace", "routing",
}  # fmt: skip


def _a2a(*arguments: str, start: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*start, sys.executable, "-m", "a2a", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def _rows(*arguments: str, path: Path) -> list[dict[str, Any]]:
    """Rows of a bench run from this process: its ranks are processes, forked from a server that is already warm."""
    assert main([*arguments, "--json", str(path)]) == 0
    return _checked_rows(path)


def _checked_rows(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert document["schema"] == 1 and document["command"] == "bench"
    assert document["environment"]["ranks"] and document["workload"]["rounds"]
    rows: list[dict[str, Any]] = document["rows"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    return rows


def test_the_main_job(tmp_path: Path) -> None:
    done = _a2a("bench", "--json", str(tmp_path / "out.json"), "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = _checked_rows(tmp_path / "out.json")
    assert "exact" in done.stdout.splitlines()[1] and "NO" not in done.stdout
    assert {(row["routing"], row["tokens_per_rank"]) for row in rows} == {
        (routing, tokens) for routing in ("olmoe-1b-7b", "olmoe-1b-7b:warmup") for tokens in (16, 256)
    }
    assert {row["ep_size"] for row in rows} == {4} and all(row["exact"] is True for row in rows)
    assert all(row["us_min"] <= row["us_p50"] <= row["us_p99"] for row in rows)


def test_bytes_and_peers_of_a_sweep(tmp_path: Path) -> None:
    peers = ("torch-a2a", "ag-rs", "memcpy")
    asked = [word for name in peers for word in ("--peer", name)]
    rows = _rows(*SMALL, *asked, path=tmp_path / "o.json")
    assert len(rows) == 2 * 3 * 4 and all(row["exact"] is True for row in rows)
    assert {row["implementation"] for row in rows} == {"a2a", *peers}
    by = {(row["implementation"], row["phase"], row["tokens_per_rank"]): row for row in rows}
    # All implementations are told the same bytes: those that must move.
    assert len({by[name, "pair", 5]["link_bytes"] for name in ("a2a", *peers)}) == 1
    assert by["a2a", "pair", 0]["link_bytes"] == by["a2a", "pair", 0]["logical_bytes"] == 0
    # Rows of 2048 bf16 and 8 ids and 8 weights go out, rows of 2048 bf16 come back; at most 5 tokens to 2 others.
    assert by["a2a", "dispatch", 5]["link_bytes"] % (4096 + 64) == 0
    assert 0 < by["a2a", "dispatch", 5]["link_bytes"] <= 5 * 2 * (4096 + 64)
    assert by["a2a", "combine", 5]["link_bytes"] % 4096 == 0
    assert by["a2a", "pair", 5]["limit"] == "memcpy"
    assert by["a2a", "pair", 5]["limit_us"] == by["memcpy", "pair", 5]["us_p50"]


@pytest.mark.parametrize("wire_format", ["fp8_block,mxfp8", "nvfp4,mxfp4"])
def test_formats_orders_and_payloads(tmp_path: Path, wire_format: str) -> None:
    rows = _rows(
        "bench", "--preset", "qwen3-30b-a3b", "--ranks", "2", "--tokens", "3", "--rounds", "2", "--peer", "torch-a2a",
        "--wire-format", wire_format, "--row-order", "compact,token", "--payload-in-workspace", "yes,no",
        "--routing", "hot", "--peer", "memcpy", path=tmp_path / "o.json",
    )  # fmt: skip
    assert len(rows) == 2 * 2 * 2 * 3 * 3 and all(row["exact"] is True for row in rows)


def test_one_rank_has_no_link(tmp_path: Path) -> None:
    words = ("bench", "--ranks", "1", "--tokens", "8", "--rounds", "2", "--peer", "memcpy")
    rows = _rows(*words, path=tmp_path / "o.json")
    assert all(row["link_bytes"] == 0 and row["link_gbps"] == 0 and row["logical_bytes"] > 0 for row in rows)


def test_sixty_experts_over_eight_ranks(tmp_path: Path) -> None:
    words = ("bench", "--preset", "qwen1.5-moe-a2.7b", "--ranks", "8", "--tokens", "8", "--rounds", "2")
    rows = _rows(*words, path=tmp_path / "o.json")
    assert {row["routing"] for row in rows} == {"qwen1.5-moe-a2.7b", "qwen1.5-moe-a2.7b:warmup"}


@pytest.mark.skipif(installed("mpi4py") is None or find_mpiexec() is None, reason="needs mpi4py and an mpiexec")
def test_the_mpi_peer_starts_its_own_ranks(tmp_path: Path) -> None:
    rows = _rows(*SMALL, "--peer", "mpi", path=tmp_path / "o.json")
    assert {row["implementation"] for row in rows} == {"a2a", "mpi"} and all(row["exact"] is True for row in rows)
    assert json.loads((tmp_path / "o.json").read_text())["environment"]["ranks"] == 3


def test_no_mpiexec_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("a2a.bench.doctor.find_mpiexec", lambda: None)
    assert main([*SMALL, "--peer", "mpi"]) == 2
    assert "none found" in capsys.readouterr().err


def test_check_is_exact_and_says_what_it_covered(tmp_path: Path) -> None:
    done = _a2a("check", "--ranks", "3", "--rounds", "56", "--seed", "2", "--json", str(tmp_path / "c.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every byte equals the oracle's" in done.stdout
    covered = json.loads((tmp_path / "c.json").read_text())["covered"]
    assert set(covered["wire format"]) == {"raw payloads", "bf16", "fp16", "fp8_block", "mxfp8", "nvfp4", "mxfp4"}
    assert sum(covered["ids"].values()) == 56 and covered["memory"]["poisoned"]


@pytest.mark.parametrize("fault", ["drop-row", "flip-byte"])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    words = ["check", "--ranks", "2", "--rounds", "4", "--fault", fault, "--json", str(tmp_path / "c.json")]
    assert main(words) == 1
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["planted"].startswith(fault) and found["failures"] and found["exact"] is False


@pytest.mark.parametrize("point", HostTransport.POINTS)
def test_survivors_of_a_killed_rank_name_rank_phase_and_round(point: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert main(["check", "--ranks", "3", "--kill-rank", "1", "--kill-at", point]) == 1
    err = capsys.readouterr().err
    assert "rank 1: ended without a word (SIGKILL)" in err
    for survivor in (0, 2):
        assert re.search(rf"a2a: rank {survivor}: .*rank 1 is gone; .*phase '[\w.]+' of round \d+", err)
    # Found by the closed connection, not by a deadline of 30 s.
    assert time.monotonic() - start < 30


def test_a_point_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--ranks", "2", "--kill-rank", "1", "--kill-at", "dispatch.lunch"]) == 2
    err = capsys.readouterr().err
    assert "dispatch.enter" in err and "Traceback" not in err


def test_torchrun_starts_ranks() -> None:
    start = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2")
    done = _a2a("check", "--rounds", "3", start=start)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every byte equals the oracle's") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["bench", "--transport", "nvlink"],
            "sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        (["bench", "--transport", "pigeon"], "auto or one of"),
        (["bench", "--preset", "gpt-5"], "olmoe-1b-7b"),
        (["bench", "--peer", "deepep"], "torch-a2a"),
        (["bench", "--wire-format", "int8"], "nvfp4"),
        (["bench", "--row-order", "sorted"], "compact"),
        (["bench", "--mode", "graph"], "no graphs"),
        (["bench", "--config", "nothing.toml"], "nothing.toml"),
        (["check", "--fault", "drop-bomb"], "flip-byte"),
        (["check", "--kill-rank", "1"], "both or none"),
        (["plan", "--preset", "deepseek-v3", "--ep-size", "8", "--max-tokens", "8", "--tokens", "9"], "max_tokens"),
        (["presets", "gpt-5"], "olmoe-1b-7b"),
        (["check", "--json", "/no/such/place.json"], "can be written"),
        (["presets", "--json", "/tmp"], "can be written"),
        (["check", "--ranks", "257"], "1..256"),
    ],
)
def test_a_clear_refusal(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_a_refusal_by_the_ranks_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--preset", "mixtral-8x7b", "--ranks", "12", "--tokens", "2"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "num_experts" in err


def test_an_inexact_row_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from a2a import cli
    from a2a.bench import sweep
    from a2a.comm.protocol import SingleComm

    monkeypatch.setattr(sweep, "run", lambda *_: [{"exact": True}, {"exact": None}])
    monkeypatch.setattr("a2a.bench.report.print_bench", lambda rows: None)
    options = cli._parser().parse_args(list(SMALL))
    task, _ = cli._sweep_of(options, list(SMALL))
    assert cli._bench_rank(task, SingleComm(), None, "local", 1) == 1


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--preset", "deepseek-v3", "--ep-size", "8", "--max-tokens", "512", "--tokens", "4", "--json", "-"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["command"] == "plan"
    assert isinstance(document["workspace_bytes_per_rank"], int) and document["predicted_us"] > 0
    assert set(document["regions"][0]) == {"name", "offset_bytes", "num_bytes"}
    assert main(words[:-2]) == 0
    assert "rests on:" in capsys.readouterr().out


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert "deepseek-v4-pro" in out and "prefill" in out
    assert main(["presets", "gpt-oss-120b"]) == 0
    assert "2880" in capsys.readouterr().out
    assert main(["presets", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["presets"]) >= 15


def test_doctor_is_readable_and_finds_the_host_transport() -> None:
    done = _a2a("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for topic in ("memfd over a unix socket  yes", "GPUs", "MPI", "launcher", "auto would choose"):
        assert topic in done.stdout
    document = json.loads(_a2a("doctor", "--json", "-").stdout)
    assert document["chosen"] == "host" and document["transports"]["host"] == []


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["bench"], ["check"], ["tune"], ["plan"], ["doctor"], ["presets"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
    assert "tune" in capsys.readouterr().out


def test_help_needs_the_base_dependencies_only() -> None:
    script = (
        "import sys\n"
        "for name in ('numba', 'mpi4py', 'rich', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "from a2a.cli import main\n"
        "main(['presets'])\n"
        "main(['--help'])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
