"""workload: which token picks which experts: generated routings and recorded ones.

Owns expert ids, router weights and token counts of every rank, as a pure function of a name, a seed and a rank. Refuses
to know what the tokens carry and who owns an expert.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from a2a.config import configs_dir
from a2a.errors import ConfigError

GENERATORS: Final = ("uniform", "zipf", "hot", "skewed")
"""uniform; zipf[:exponent] over a random order of experts; hot[:share of tokens that pick expert 0]; skewed sizes."""

PARTS: Final = ("all", "warmup", "rest")
"""Rows of a recording: all of them, its leading identical rows, or the others."""

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".npy", ".pt")
_DEFAULT_EXPONENT: Final = 1.0
_DEFAULT_SHARE: Final = 0.9
_SKEW_RATIO: Final = 0.5


@dataclasses.dataclass(frozen=True)
class Recording:
    """A routing recorded from a model.

    Attributes:
        topk_ids: int32 `[tokens, top_k]`, global expert ids.
        topk_weights: fp32 `[tokens, top_k]`; equal shares where the file holds none.
        num_experts: as the file says; None where it does not.
        num_warmup: leading rows that are identical; 0 when the second row already differs.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    num_experts: int | None
    num_warmup: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every rank routes in a round.

    Attributes:
        name: as on the command line.
        topk_ids: of each rank, int32 `[n_r, top_k]`.
        topk_weights: of each rank, fp32 `[n_r, top_k]`.
    """

    name: str
    topk_ids: tuple[Tensor, ...]
    topk_weights: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(ids.shape[0] for ids in self.topk_ids)

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the largest rank, at least 1: the smallest legal `runtime_max_tokens_per_rank`."""
        return max(1, *self.num_tokens)


def workload(spec: str, *, ep_size: int, tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Workload:
    """The routing called `spec`, for all ranks; the same on every rank and every run.

    Args:
        spec: a generator of `GENERATORS`, the name of a shipped recording, or the path of a file; recordings take a
            suffix `:all`, `:warmup` or `:rest`.
        ep_size: number of ranks.
        tokens: tokens of a rank; of the largest rank for "skewed".
        num_experts: experts that may be picked.
        top_k: picks per token; generated picks of a token are distinct.
        seed: of generated routings. Rank r's picks depend on (seed, r) alone.

    Raises:
        ConfigError: unknown name, malformed file (with its line), or a recording of another number of experts or picks.
    """
    if top_k > num_experts:
        raise ConfigError(what="top_k", got=top_k, wanted=f"at most num_experts = {num_experts}")
    kind, _, argument = spec.partition(":")
    if kind in GENERATORS:
        logits, sizes = _generator(kind, argument, spec, ep_size, tokens, num_experts, seed)
        pairs = [_sample(logits, size, top_k, seed, rank, kind, argument) for rank, size in enumerate(sizes)]
    else:
        recording, part = _find_recording(spec)
        rows = _rows(recording, part, spec)
        highest, width = int(recording.topk_ids.max()), recording.topk_ids.shape[1]
        experts = recording.num_experts or max(num_experts, highest + 1)
        if (experts, width) != (num_experts, top_k):
            raise ConfigError(
                what=f"routing {spec}",
                got=f"{experts} experts, top {width}",
                wanted=f"{num_experts} experts, top {top_k}",
                change="choose the preset of the recorded model, or a generated routing",
            )
        pairs = [_share(recording, rows, rank, ep_size, tokens) for rank in range(ep_size)]
    return Workload(spec, tuple(ids for ids, _ in pairs), tuple(weights for _, weights in pairs))


def shipped_recordings() -> tuple[str, ...]:
    """Names of the recordings that ship with the package."""
    return tuple(sorted(path.name.removesuffix(".jsonl.gz") for path in (configs_dir() / "routing").glob("*.jsonl.gz")))


@functools.lru_cache(maxsize=8)
def read_recording(path: Path) -> Recording:
    """Read a recording: JSON lines (plain or gzip) or an array of ids in `.npy` or `.pt`.

    Raises:
        ConfigError: naming the file, the line or row, and what is wrong with it.
    """
    name = path.name
    if not path.is_file():
        raise ConfigError(what="routing", got=str(path), wanted="a file that exists")
    if name.endswith(".npy"):
        return _from_array(path, _load_npy(path))
    if name.endswith(".pt"):
        return _from_array(path, _load_pt(path))
    if name.endswith(SUFFIXES):
        return _from_lines(path)
    raise ConfigError(what="routing", got=str(path), wanted="a file ending in " + ", ".join(SUFFIXES))


def _generator(
    kind: str, argument: str, spec: str, ep_size: int, tokens: int, num_experts: int, seed: int
) -> tuple[Tensor, list[int]]:
    """Log-probability of each expert, and the token count of each rank."""
    sizes = [tokens] * ep_size
    logits = torch.zeros(num_experts)
    if kind == "zipf":
        exponent = _number(argument, spec, _DEFAULT_EXPONENT, 0.0, 10.0)
        order = torch.randperm(num_experts, generator=_seeded(seed, -1))
        logits = -exponent * torch.log1p(order.float())
    elif kind == "hot":
        _number(argument, spec, _DEFAULT_SHARE, 0.0, 1.0)
    elif argument:
        raise ConfigError(what="routing", got=spec, wanted=f"{kind!r} without an argument")
    if kind == "skewed":
        # Halving sizes, the last rank empty: the largest and the emptiest sender of one round.
        sizes = [math.ceil(tokens * _SKEW_RATIO**rank) for rank in range(ep_size)]
        if ep_size > 1:
            sizes[-1] = 0
    return logits, sizes


def _sample(
    logits: Tensor, tokens: int, top_k: int, seed: int, rank: int, kind: str, argument: str
) -> tuple[Tensor, Tensor]:
    """Distinct picks with probability following `logits`: the top of Gumbel-perturbed logits, without replacement."""
    generator = _seeded(seed, rank)
    uniform = torch.rand(tokens, logits.numel(), generator=generator).clamp_(1e-20, 1.0 - 1e-7)
    scores = logits - torch.log(-torch.log(uniform))
    if kind == "hot":
        share = float(argument) if argument else _DEFAULT_SHARE
        scores[torch.rand(tokens, generator=generator) < share, 0] = math.inf
    ids = scores.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator).softmax(dim=1)
    return ids, weights


def _seeded(seed: int, rank: int) -> torch.Generator:
    # Consecutive seeds of ranks must not meet those of the next run.
    return torch.Generator().manual_seed((seed * 1_000_003 + rank + 1) % 2**63)


def _number(argument: str, spec: str, default: float, low: float, high: float) -> float:
    try:
        value = float(argument) if argument else default
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(what="routing", got=spec, wanted=f"a number in {low:g}..{high:g} after the colon")
    return value


def _find_recording(spec: str) -> tuple[Recording, str]:
    name, _, part = spec.rpartition(":")
    if part not in PARTS:
        name, part = spec, "all"
    if name in shipped_recordings():
        return read_recording(configs_dir() / "routing" / f"{name}.jsonl.gz"), part
    if name.endswith(SUFFIXES):
        return read_recording(Path(name)), part
    known = [f"{generator!r}" for generator in (*GENERATORS, *shipped_recordings())]
    raise ConfigError(what="routing", got=spec, wanted=", ".join(known) + " or a file ending in " + ", ".join(SUFFIXES))


def _rows(recording: Recording, part: str, spec: str) -> Tensor:
    """Indices of the rows of a part."""
    total = recording.topk_ids.shape[0]
    first, last = {
        "all": (0, total),
        "warmup": (0, recording.num_warmup),
        "rest": (recording.num_warmup, total),
    }[part]
    if first == last:
        raise ConfigError(what="routing", got=spec, wanted=f"a recording with {part} rows")
    return torch.arange(first, last)


def _share(recording: Recording, rows: Tensor, rank: int, ep_size: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The rank's tokens: it starts where its equal share of the recording starts and wraps around at the end."""
    start = rank * rows.numel() // ep_size
    index = rows[(start + torch.arange(tokens)) % rows.numel()]
    return recording.topk_ids[index], recording.topk_weights[index]


def _from_lines(path: Path) -> Recording:
    ids: list[list[int]] = []
    weights: list[list[float]] = []
    num_experts: int | None = None
    top_k: int | None = None
    for number, record in _records(path):
        where = f"{path}:{number}"
        kind = record.get("type", "route")
        if kind == "meta":
            num_experts = _field(record, "num_experts", where, num_experts)
            top_k = _field(record, "top_k", where, top_k)
        elif kind == "route":
            row, row_weights = _route(record, where, num_experts, top_k)
            top_k = len(row)
            ids.append(row)
            weights.append(row_weights)
        else:
            raise ConfigError(what=where, got=f"type {kind!r}", wanted="'meta' or 'route'")
    if not ids:
        raise ConfigError(what=str(path), got="no route", wanted="at least one line of type 'route'")
    table = torch.tensor(ids, dtype=torch.int32)
    return Recording(table, torch.tensor(weights), num_experts, _warmup(table))


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(what=f"{path}:{number}", got=str(error), wanted="one JSON object") from error
                if not isinstance(record, dict):
                    raise ConfigError(what=f"{path}:{number}", got=line.strip()[:40], wanted="one JSON object")
                yield number, record
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(what=f"{path}:{number + 1}", got=str(error), wanted="readable text") from error


def _field(record: dict[str, Any], key: str, where: str, default: int | None) -> int | None:
    value = record.get(key, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(what=f"{where}: {key}", got=value, wanted="an integer >= 1")
    return value


def _route(
    record: dict[str, Any], where: str, num_experts: int | None, top_k: int | None
) -> tuple[list[int], list[float]]:
    row = record.get("topk_ids")
    if not isinstance(row, list) or not row or any(type(item) is not int for item in row):
        raise ConfigError(what=f"{where}: topk_ids", got=row, wanted="a list of integers")
    if top_k is not None and len(row) != top_k:
        raise ConfigError(what=f"{where}: topk_ids", got=f"{len(row)} ids", wanted=f"{top_k} as before")
    if min(row) < 0 or (num_experts is not None and max(row) >= num_experts):
        bound = "0 or more" if num_experts is None else f"0..{num_experts - 1}"
        raise ConfigError(what=f"{where}: topk_ids", got=row, wanted=f"ids of {bound}")
    weights = record.get("topk_weights", [1.0 / len(row)] * len(row))
    if not isinstance(weights, list) or len(weights) != len(row) or any(type(w) not in (int, float) for w in weights):
        raise ConfigError(what=f"{where}: topk_weights", got=weights, wanted=f"a list of {len(row)} numbers")
    return row, [float(weight) for weight in weights]


def _load_npy(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(what=str(path), got=str(error), wanted="an array saved by numpy.save") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise ConfigError(what=str(path), got=str(getattr(array, "dtype", type(array))), wanted="integers")
    return torch.from_numpy(array.astype(np.int64))


def _load_pt(path: Path) -> Tensor:
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its unpickler meets
        got = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(what=str(path), got=got, wanted="a tensor saved by torch.save") from error
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        got = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ConfigError(what=str(path), got=got, wanted="a tensor of integers")
    return tensor.long()


def _from_array(path: Path, table: Tensor) -> Recording:
    if table.dim() != 2 or 0 in table.shape:
        raise ConfigError(what=str(path), got=f"shape {list(table.shape)}", wanted="[tokens, top_k], neither 0")
    bad = ((table < 0) | (table > 2**31 - 1)).any(dim=1).nonzero().flatten()
    if bad.numel():
        row = int(bad[0])
        raise ConfigError(what=f"{path}: row {row}", got=table[row].tolist(), wanted="ids of 0 or more")
    ids = table.to(torch.int32)
    weights = torch.full(ids.shape, 1.0 / ids.shape[1])
    return Recording(ids, weights, None, _warmup(ids))


def _warmup(ids: Tensor) -> int:
    """Length of the leading run of identical rows; a run of one is no run."""
    same = (ids == ids[0]).all(dim=1)
    length = int(same.long().cumprod(0).sum())
    return length if length > 1 else 0
