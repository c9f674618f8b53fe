"""Routings: by hand where they are small, by their promises where they are random."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from a2a.bench.workload import GENERATORS, read_recording, shipped_recordings, workload
from a2a.errors import ConfigError

SHAPE = {"ep_size": 4, "tokens": 50, "num_experts": 16, "top_k": 3}


@pytest.mark.parametrize("spec", [*GENERATORS, "zipf:2.5", "hot:0.5"])
def test_picks_are_distinct_in_range_and_the_same_every_time(spec: str) -> None:
    first, again = workload(spec, **SHAPE, seed=5), workload(spec, **SHAPE, seed=5)
    for ids, weights, same in zip(first.topk_ids, first.topk_weights, again.topk_ids, strict=True):
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape == weights.shape
        assert torch.equal(ids, same)
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())
    other = workload(spec, **SHAPE, seed=6)
    assert not torch.equal(first.topk_ids[0], other.topk_ids[0])
    assert not torch.equal(first.topk_ids[0], first.topk_ids[1])


def test_a_rank_picks_the_same_however_many_ranks_there_are() -> None:
    few, many = workload("zipf", **SHAPE), workload("zipf", **{**SHAPE, "ep_size": 8})
    assert torch.equal(few.topk_ids[3], many.topk_ids[3])


def test_zipf_prefers_some_experts_and_hot_one() -> None:
    shape = {"ep_size": 1, "tokens": 4000, "num_experts": 16, "top_k": 2}
    counts = torch.bincount(workload("zipf:1.5", **shape).topk_ids[0].flatten(), minlength=16)
    assert int(counts.max()) > 10 * int(counts.min())
    hot = workload("hot:0.75", **shape).topk_ids[0]
    # Those that are not made to pick expert 0 do so by chance, 2 of 16.
    assert abs((hot == 0).any(1).float().mean().item() - (0.75 + 0.25 * 2 / 16)) < 0.03


def test_skewed_sizes_by_hand() -> None:
    made = workload("skewed", **{**SHAPE, "tokens": 10})
    assert made.num_tokens == (10, 5, 3, 0)
    assert made.max_num_tokens == 10
    assert workload("skewed", **{**SHAPE, "ep_size": 1}).num_tokens == (50,)


def test_no_tokens_at_all() -> None:
    made = workload("uniform", **{**SHAPE, "tokens": 0})
    assert made.num_tokens == (0, 0, 0, 0) and made.max_num_tokens == 1


def test_shipped_recordings_start_with_their_warmup_batch() -> None:
    assert shipped_recordings() == ("olmoe-1b-7b", "qwen1.5-moe-a2.7b")
    shape = {"ep_size": 2, "tokens": 3000, "num_experts": 64, "top_k": 8}
    warmup = workload("olmoe-1b-7b:warmup", **shape)
    assert torch.equal(warmup.topk_ids[0], torch.tensor([[7, 6, 4, 5, 1, 0, 2, 3]], dtype=torch.int32).expand(3000, 8))
    assert torch.equal(warmup.topk_ids[0], warmup.topk_ids[1])
    rest = workload("olmoe-1b-7b:rest", **shape)
    assert len({tuple(row) for row in rest.topk_ids[0].tolist()}) > 2000
    # 6,519 rows of which 2,048 are warm-up: rank 0 starts with them, rank 1 starts after them.
    everything = workload("olmoe-1b-7b", **shape)
    assert torch.equal(everything.topk_ids[0][:2048], warmup.topk_ids[0][:2048])
    assert not torch.equal(everything.topk_ids[1][0], warmup.topk_ids[0][0])
    assert float(warmup.topk_weights[0][0, 0]) == 0.125


def test_a_recording_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="60 experts, top 4"):
        workload("qwen1.5-moe-a2.7b", ep_size=2, tokens=4, num_experts=64, top_k=8)


def _lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return path


def _route(*ids: int) -> dict[str, object]:
    return {"type": "route", "topk_ids": list(ids)}


def test_shares_of_a_small_recording_by_hand(tmp_path: Path) -> None:
    path = _lines(tmp_path / "five.jsonl", {"type": "meta", "num_experts": 9}, *(_route(i, 8) for i in range(5)))
    made = workload(str(path), ep_size=2, tokens=4, num_experts=9, top_k=2)
    # Rank 0 starts at row 0, rank 1 at row 5 // 2 = 2; both go round the end.
    assert made.topk_ids[0][:, 0].tolist() == [0, 1, 2, 3]
    assert made.topk_ids[1][:, 0].tolist() == [2, 3, 4, 0]
    assert made.topk_weights[0].tolist() == [[0.5, 0.5]] * 4


def test_warmup_is_the_leading_run_and_no_run_of_one(tmp_path: Path) -> None:
    rows = [_route(1, 2)] * 3 + [_route(2, 1), _route(1, 2)]
    assert read_recording(_lines(tmp_path / "a.jsonl", *rows)).num_warmup == 3
    path = _lines(tmp_path / "b.jsonl", _route(1, 2), _route(2, 1))
    assert read_recording(path).num_warmup == 0
    with pytest.raises(ConfigError, match="warmup"):
        workload(f"{path}:warmup", ep_size=1, tokens=1, num_experts=3, top_k=2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "JSON"),
        ("[1, 2]", "one JSON object"),
        ({"type": "route"}, "list of integers"),
        (_route(1, 2, 3), "3 ids"),
        (_route(1, 9), r"0\.\.7"),
        (_route(1, -1), r"0\.\.7"),
        ({"type": "route", "topk_ids": [1, 2], "topk_weights": [0.5]}, "2 numbers"),
        ({"type": "token"}, "'meta' or 'route'"),
        ({"type": "meta", "top_k": 0}, "top_k"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    path = _lines(tmp_path / "bad.jsonl", {"type": "meta", "num_experts": 8, "top_k": 2}, _route(0, 1), line)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_recording(path)
    assert caught.value.what.startswith(f"{path}:3")


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress("\n".join(json.dumps(_route(i % 7, 7)) for i in range(3000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz:\d+"):
        read_recording(path)
    path = tmp_path / "changed.jsonl.gz"
    path.write_bytes(whole[:40] + bytes(40) + whole[80:])
    with pytest.raises(ConfigError, match=r"changed\.jsonl\.gz:\d+"):
        read_recording(path)
    path = tmp_path / "none.jsonl.gz"
    path.write_bytes(b"plain text")
    with pytest.raises(ConfigError, match=r"none\.jsonl\.gz:1"):
        read_recording(path)


def test_arrays_of_ids(tmp_path: Path) -> None:
    ids = [[3, 1], [0, 2], [1, 0]]
    np.save(tmp_path / "ids.npy", np.array(ids, dtype=np.uint16))
    torch.save(torch.tensor(ids), tmp_path / "ids.pt")
    for name in ("ids.npy", "ids.pt"):
        # An array does not say how many experts there are: any number that holds its ids will do.
        made = workload(str(tmp_path / name), ep_size=1, tokens=3, num_experts=6, top_k=2)
        assert made.topk_ids[0].tolist() == ids
        with pytest.raises(ConfigError, match="4 experts"):
            workload(str(tmp_path / name), ep_size=1, tokens=3, num_experts=3, top_k=2)


@pytest.mark.parametrize("array", [np.zeros((2, 2)), np.zeros(3, int), np.array([[1, -2]]), np.zeros((0, 2), int)])
def test_arrays_that_are_no_ids(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(ConfigError, match=r"bad\.npy"):
        read_recording(tmp_path / "bad.npy")
    (tmp_path / "bad.pt").write_bytes(b"nothing of torch's")
    with pytest.raises(ConfigError, match=r"bad\.pt"):
        read_recording(tmp_path / "bad.pt")


@pytest.mark.parametrize("spec", ["unifrom", "zipf:x", "zipf:-1", "hot:1.5", "uniform:3", "nothing.jsonl", "a.csv"])
def test_a_wrong_name_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="routing"):
        workload(spec, **SHAPE)
