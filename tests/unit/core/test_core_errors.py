"""Errors tell who, what, got and wanted, and tell the same on the ranks that hear of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from a2a import errors
from a2a.errors import (
    A2AError,
    CompileError,
    ConfigError,
    MismatchError,
    PeerLost,
    PeerTimeout,
    ShapeError,
    StateError,
    Unsupported,
    from_facts,
)

CASES: list[tuple[A2AError, list[str], type[Exception]]] = [
    (
        ConfigError(what="top_k", got=65, wanted="an integer in 1..64", change="pass fewer", rank=3),
        ["rank 3", "top_k", "65", "1..64", "pass fewer"],
        ValueError,
    ),
    (
        Unsupported(transport="nvlink", reasons=("no GPU (rank 0)", "no peer access (rank 1)"), rank=2),
        ["rank 2", "nvlink", "no GPU (rank 0)", "no peer access (rank 1)"],
        A2AError,
    ),
    (
        ShapeError(what="output", got=(2, 3), wanted="[2, 4]", change="make it wider", rank=0),
        ["rank 0", "output", "2, 3", "[2, 4]", "make it wider"],
        ValueError,
    ),
    (
        StateError(rank=1, call="combine", state="idle", change="call dispatch first"),
        ["rank 1", "combine", "idle", "call dispatch first"],
        RuntimeError,
    ),
    (
        MismatchError(what="hidden_size", values={1: 64, 0: 128, 10: 64}),
        ["hidden_size", "rank 0: 128, rank 1: 64, rank 10: 64", "same value on every rank"],
        A2AError,
    ),
    (
        PeerTimeout(rank=2, peer=5, phase="dispatch.done", round=7, waited_s=30.0),
        ["rank 2", "rank 5", "dispatch.done", "round 7", "30 s", "timeout_s"],
        TimeoutError,
    ),
    (
        PeerLost(rank=2, peer=5, phase="combine.ready", round=7),
        ["rank 2", "rank 5", "combine.ready", "round 7"],
        ConnectionError,
    ),
    (CompileError(kernel="dispatch", log="line 3: expected ;"), ["dispatch", "line 3: expected ;"], A2AError),
]


def fields(error: A2AError) -> dict[str, Any]:
    return {name: value for name, value in error.to_facts().items() if name != "reporter"}


def test_every_kind_is_here() -> None:
    kinds = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, A2AError)}
    assert kinds - {A2AError} == {type(error) for error, _, _ in CASES}


@pytest.mark.parametrize(("error", "told", "builtin"), CASES, ids=lambda each: type(each).__name__)
def test_the_story_names_who_what_got_and_wanted(error: A2AError, told: list[str], builtin: type[Exception]) -> None:
    for part in told:
        assert part in str(error)
    assert "reported" not in str(error)
    assert isinstance(error, builtin) and isinstance(error, A2AError)
    with pytest.raises(builtin):
        raise error


@pytest.mark.parametrize(("error", "told", "builtin"), CASES, ids=lambda each: type(each).__name__)
def test_an_error_reads_the_same_after_a_trip(error: A2AError, told: list[str], builtin: type[Exception]) -> None:
    heard = from_facts(json.loads(json.dumps(error.to_facts())), reporter=4)
    assert type(heard) is type(error) and fields(heard) == fields(error)
    assert heard.reporter == 4 and str(heard) == f"{error} (reported by rank 4)"
    # Passed on once more, it still names the rank that met it first.
    again = from_facts(json.loads(json.dumps(heard.to_facts())), reporter=9)
    assert again.reporter == 4 and str(again) == str(heard)
    for each in (error, heard):
        copied = pickle.loads(pickle.dumps(each))
        assert type(copied) is type(each) and copied.to_facts() == each.to_facts() and str(copied) == str(each)


class Odd:
    def __repr__(self) -> str:
        return "an odd thing"


@pytest.mark.parametrize(
    ("got", "plain"),
    [
        (torch.float16, "torch.float16"),
        ({1: torch.int8, "b": (2, Odd())}, {"1": "torch.int8", "b": [2, "an odd thing"]}),
        (np.int64(3), repr(np.int64(3))),
        (b"\xff", r"b'\xff'"),
        ({3}, "{3}"),
        (None, None),
        (True, True),
        (1 << 70, 1 << 70),
        (float("inf"), float("inf")),
    ],
    ids=repr,
)
def test_values_that_json_does_not_know_are_told_as_they_print(got: object, plain: object) -> None:
    error = ConfigError(what="value", got=got, wanted="another")
    assert error.got == plain
    heard = from_facts(json.loads(json.dumps(error.to_facts())))
    assert isinstance(heard, ConfigError) and heard.got == plain and str(heard) == str(error)


def test_values_of_ranks_keep_their_keys() -> None:
    error = MismatchError(what="placement", values={np.int64(11): (0, 1), 2: {"a": torch.int32}})
    assert error.values == {11: [0, 1], 2: {"a": "torch.int32"}}
    heard = from_facts(json.loads(json.dumps(error.to_facts())))
    assert isinstance(heard, MismatchError) and isinstance(heard.values, Mapping)
    assert heard.values == error.values and str(heard) == str(error)


def test_facts_are_fields_by_name_only() -> None:
    with pytest.raises(TypeError):
        ConfigError("top_k", 65, "less")  # type: ignore[misc]
    with pytest.raises(TypeError):
        PeerLost(rank=1, peer=2, phase="dispatch.done")  # type: ignore[call-arg]
    with pytest.raises(KeyError):
        from_facts({"kind": "SystemExit", "reporter": None})
