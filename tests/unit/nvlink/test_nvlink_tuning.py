"""The table of launch shapes: which point a size takes, what a file may hold, what `a2a tune` makes of a sweep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.bench import tune as module
from a2a.bench.sweep import Sweep
from a2a.bench.tune import LARGE_SHAPES, descend, small_points, tune
from a2a.cli import main
from a2a.comm.protocol import SingleComm
from a2a.config import configs_dir, model_preset
from a2a.errors import ConfigError, Unsupported
from a2a.nvlink.transport import NvlinkTransport
from a2a.nvlink.tuning import Point, Tuning, find_tuning, read_tuning

SIZE: dict[str, Any] = {"phase": "dispatch", "rows": "copied", "ep_size": 2, "row_bytes": 1024}


def point(tokens: int, regime: str = "small", threads: int = 64, **more: Any) -> Point:
    return Point(**{**SIZE, "tokens": tokens, "regime": regime, "threads": threads, **more})


REST = tuple(
    point(1, regime, phase=phase, rows=rows)
    for phase, rows in (("dispatch", "quantized"), ("combine", "copied"))
    for regime in ("small",)
) + tuple(
    point(9, "bulk", phase=phase, rows=rows) for phase, rows in (("dispatch", "quantized"), ("combine", "copied"))
)
TABLE = Tuning(
    "sm_90",
    "made up",
    (point(8), point(128, threads=96), point(512, "bulk", 512), point(8, "bulk", 256, ep_size=8), *REST),
)


def chosen(tokens: int, *, ep_size: int = 2, row_bytes: int = 1024, **more: Any) -> Point:
    return TABLE.choose("dispatch", "copied", ep_size=ep_size, row_bytes=row_bytes, tokens=tokens, **more)


@pytest.mark.parametrize(
    ("tokens", "threads"), [(1, 64), (8, 64), (31, 64), (32, 64), (33, 96), (128, 96), (255, 96), (257, 512)]
)
def test_the_nearest_measured_size_decides(tokens: int, threads: int) -> None:
    assert chosen(tokens).threads == threads


def test_rows_of_other_widths_count_by_their_bytes() -> None:
    assert chosen(512, row_bytes=256).threads == 96
    assert chosen(0x4000, row_bytes=1).threads == 64


def test_ranks_come_before_bytes() -> None:
    assert chosen(8, ep_size=8).threads == chosen(512, ep_size=8).threads == 256
    assert chosen(8, ep_size=3).threads == 64


def test_a_regime_that_a_round_cannot_take_is_not_chosen() -> None:
    assert chosen(1, regimes=("bulk",)).threads == 512
    assert chosen(9999, regimes=("small",)).threads == 96


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    odd = Tuning("sm_90", 'a "quoted" \\ source', (*TABLE.points[1:], point(8, parts_per_thread=2, pdl=True, ctas=3)))
    path = tmp_path / "sm_90.toml"
    path.write_text(odd.text())
    back = read_tuning(path)
    assert back.source == odd.source and set(back.points) == set(odd.points) and back.digest == odd.digest
    assert back.digest != TABLE.digest


@pytest.mark.parametrize("path", sorted((configs_dir() / "tuning").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_tables_can_be_read(path: Path) -> None:
    table = read_tuning(path)
    assert table.source and table.name == path.stem


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("source = ", "readable TOML"),
        ('source = "x"', "source and points alone"),
        ('source = "x"\npoints = [{ phase = "dispatch" }]', "point 0"),
        ('source = "x"\npoints = [{ phase = "d", rows = "copied", ep_size = 2, row_bytes = 1, tokens = 1, '
         'regime = "bulk", threads = 64 }]', "point 0: phase"),
        ('source = "x"\npoints = [{ phase = "dispatch", rows = "copied", ep_size = 2, row_bytes = 1, tokens = 1, '
         'regime = "bulk", threads = 64 }]', "no point for dispatch of copied rows in the small regime"),
    ],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_tuning(path)


@pytest.mark.parametrize(
    "change",
    [{"threads": 33}, {"threads": 1024}, {"threads": 32, "regime": "bulk"}, {"tokens": 0}, {"pdl": 1}, {"ctas": -1}],
)
def test_a_point_that_no_kernel_can_take_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(point(8), **change)


def test_a_size_has_one_point() -> None:
    with pytest.raises(ConfigError, match="two points"):
        Tuning("x", "y", (*TABLE.points, point(8, threads=96)))


def test_an_architecture_without_a_table_takes_the_nearest_older_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tuning").mkdir()
    for name in ("sm_90", "sm_100"):
        (tmp_path / "tuning" / f"{name}.toml").write_text(TABLE.text())
    monkeypatch.setattr("a2a.nvlink.tuning.configs_dir", lambda: tmp_path)
    for arch, taken in (("sm_80", "sm_90"), ("sm_90", "sm_90"), ("sm_95", "sm_90"), ("sm_103", "sm_100")):
        found = find_tuning(arch)
        assert found.tuning.name == taken
        assert ("none is shipped" in found.why) == (arch != taken)
    (tmp_path / "mine.toml").write_text(TABLE.text())
    assert find_tuning("sm_90", str(tmp_path / "mine.toml")).tuning.name == str(tmp_path / "mine.toml")


def test_a_measurement_replaces_rows_of_its_kind() -> None:
    new = TABLE.replaced_by((point(64, "bulk", 128),), "now")
    mine = [each for each in new.points if each.size[:4] == ("dispatch", "copied", 2, 1024)]
    # No small regime was measured: what is known of it stays.
    assert [(each.tokens, each.regime) for each in mine] == [(8, "small"), (64, "bulk"), (128, "small")]
    assert set(REST) < set(new.points) and new.source == "now; other sizes: made up"
    again = new.replaced_by((point(64, "bulk", 128), point(1)), "later")
    mine = [each for each in again.points if each.size[:4] == ("dispatch", "copied", 2, 1024)]
    assert [each.tokens for each in mine] == [1, 64] and again.source == "later; other sizes: made up"


# ---- the sweep over shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "rows"), [("dispatch", "copied"), ("dispatch", "quantized"), ("combine", "copied")])
@pytest.mark.parametrize("row_bytes", [1, 14400, 100_000])
def test_every_small_shape_can_be_launched(phase: str, rows: str, row_bytes: int) -> None:
    found = small_points({"phase": phase, "rows": rows, "ep_size": 2, "row_bytes": row_bytes, "tokens": 8})
    assert found and len(set(found)) == len(found)


def test_a_descent_finds_the_best_shape_and_times_none_twice() -> None:
    start = Point(phase="combine", rows="copied", ep_size=2, row_bytes=14336, tokens=512, regime="push", threads=512,
                  push_warps=4)  # fmt: skip
    timed: list[Point] = []

    def cost(point: Point) -> float:
        return abs(point.threads - 128) + abs(point.push_warps - 3) + abs((point.ctas or 132) - 64) / 8 + point.pdl

    def time_of(point: Point) -> float:
        timed.append(point)
        return cost(point)

    descend(start, LARGE_SHAPES, time_of)
    assert len(set(timed)) == len(timed) < 60
    best = min(timed, key=lambda point: (cost(point), point.unit_bytes))
    # More warps than the CTA has are not tried.
    assert (best.threads, best.push_warps, best.ctas, best.pdl) == (128, 3, 64, False)
    assert all(point.push_warps < point.threads // 32 for point in timed)


def test_a_descent_ends_when_the_time_is_over() -> None:
    start = Point(phase="combine", rows="copied", ep_size=2, row_bytes=14336, tokens=512, regime="bulk", threads=512)
    times = iter([5.0, 4.0, None])
    descend(start, LARGE_SHAPES, lambda point: next(times))
    assert next(times, "over") == "over"


class _Mover(NvlinkTransport):
    """Keeps the table; has no GPU."""

    landing_tokens = 512  # type: ignore[assignment]

    def __init__(self) -> None:
        self.table = TABLE

    def __del__(self) -> None:
        return

    def tune(self, tuning: Tuning) -> None:
        self.table = tuning

    def pushes(self, row_bytes: int, runtime_max_tokens_per_rank: int) -> bool:
        return True


class _Exchange:
    transport = "nvlink"

    def __init__(self, case: Any, comm: Any) -> None:
        self.mover = _Mover()

    def close(self) -> None:
        return


class _Timer:
    """96 threads are best below 200 tokens, above 24 CTAs in bulk and, of combine, 2 warps that push."""

    def __init__(self, each: _Exchange, transport: _Mover, *_: Any) -> None:
        return

    def pair_us(self, tuning: Tuning, replays: int) -> float:
        return sum(self._us(each) for each in tuning.points if each.row_bytes > 2000)

    def _us(self, each: Point) -> float:
        if each.regime == "small":
            return 1 + abs(each.threads - 96) + each.parts_per_thread + (50 if each.tokens > 200 else 0)
        pushing = abs(each.push_warps - 2) - 5 if each.regime == "push" else 0
        return 10 + abs(each.ctas - 24) + abs(each.threads - 256) + each.pdl + pushing


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "Exchange", _Exchange)
    monkeypatch.setattr(module, "_Timer", _Timer)
    monkeypatch.setattr(module, "checked_round", lambda *_: {"pair": ""})
    monkeypatch.setattr(module, "find_tuning", lambda *_: SimpleNamespace(tuning=TABLE))
    return Sweep(
        preset=model_preset("olmoe-1b-7b"),
        tokens=(8, 256),
        wire_formats=("bf16", "mxfp8"),
        routings=("uniform",),
        row_orders=("compact",),
        payloads_in_workspace=(True,),
        peers=(),
        rounds=1,
        transport="nvlink",
        modes=("graph",),
        seed=0,
        num_sms=None,
        rounds_per_graph=None,
    )


def test_the_best_shape_of_each_size_is_found(sweep: Sweep) -> None:
    done: list[int] = []
    found = tune(sweep, SingleComm(), 100.0, lambda: done.append(1))
    assert len(done) == 4 and not found.skipped
    new = [each for each in found.tuning.points if each not in TABLE.points]
    pushed = [each for each in new if each.regime == "push"]
    by = {(each.phase, each.rows, each.tokens): each for each in new if each.regime != "push"}
    assert {each.ep_size for each in new} == {1}
    assert {(each.phase, each.rows, each.tokens) for each in new} == {
        (phase, rows, tokens)
        for phase, rows in (("dispatch", "copied"), ("dispatch", "quantized"), ("combine", "copied"))
        for tokens in (8, 256)
    }
    assert by["combine", "copied", 8].regime == "small" and by["combine", "copied", 8].threads == 96
    assert by["combine", "copied", 8].row_bytes == 4096 and by["dispatch", "copied", 8].row_bytes == 4096 + 64
    bulk = by["dispatch", "quantized", 256]
    assert (bulk.regime, bulk.threads, bulk.ctas, bulk.pdl) == ("bulk", 256, 24, False)
    # Rounds that cannot push find the next best shape.
    assert [(each.phase, each.tokens, each.push_warps, each.threads) for each in pushed] == [("combine", 256, 2, 256)]
    assert by["combine", "copied", 256].regime == "bulk"
    assert pushed[0].pair_us < by["combine", "copied", 256].pair_us
    assert "a GPU" in found.tuning.source and "other sizes: made up" in found.tuning.source
    assert {trial.final for trial in found.trials} == {True, False}


def test_sizes_beyond_the_budget_are_told(sweep: Sweep) -> None:
    with pytest.raises(Unsupported, match="no size was tuned"):
        tune(sweep, SingleComm(), -1.0, lambda: None)


def test_a_wrong_round_ends_it(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checked_round", lambda *_: {"pair": "row 3 differs"})
    with pytest.raises(Unsupported, match="row 3 differs"):
        tune(sweep, SingleComm(), 100.0, lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nothing_to_tune_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    assert "without GPUs" in capsys.readouterr().err
