"""nvlink/tuning: the table of launch shapes: which regime and how many threads and CTAs a round of a size takes.

Owns the table's file, how a size that was not measured finds its nearest measured one, and which architecture's table
is taken. Refuses to measure (`a2a tune` does) and to know a kernel.

All ranks must choose the same regime for a round, so a choice rests on nothing but what they share: the table, phase,
ep_size, R and the bytes of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from a2a.config import configs_dir
from a2a.errors import ConfigError

PHASES: Final = ("dispatch", "combine")
ROWS: Final = ("copied", "quantized")
"""Whether a kernel moves rows as they are or makes the wire format itself; combine only copies."""
REGIMES: Final = ("small", "bulk", "push")
"""push: combine alone."""
MAX_POINT_THREADS: Final = 512
_ARCH: Final = re.compile(r"sm_(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was found best for one size.

    Attributes:
        phase: of `PHASES`.
        rows: of `ROWS`.
        ep_size, row_bytes, tokens: the size: ranks, bytes of a token's payloads on the wire, R.
        regime: of `REGIMES`.
        threads: of a CTA, a multiple of 32; fewer where a row has less for them to do.
        parts_per_thread: small regime: 16-byte parts of a row that one thread moves, hence the CTAs of a row.
        ctas: bulk and push: CTAs of the grid; 0: one per SM.
        unit_bytes: bulk and push: what a warp claims at a time, of a row; less where few rows must feed all warps.
        push_warps: push: warps of a CTA that send before they add.
        pdl: whether the kernel may come before the one before it has ended.
        pair_us: of the round with which it was found best; 0.0: not measured. Of two points for a size, the one with
            the lesser is taken.
    """

    phase: str
    rows: str
    ep_size: int
    row_bytes: int
    tokens: int
    regime: str
    threads: int
    parts_per_thread: int = 1
    ctas: int = 0
    unit_bytes: int = 3584
    push_warps: int = 0
    pdl: bool = False
    pair_us: float = 0.0

    def __post_init__(self) -> None:
        for key, known in (("phase", PHASES), ("rows", ROWS), ("regime", REGIMES)):
            if getattr(self, key) not in known:
                raise ConfigError(what=key, got=getattr(self, key), wanted="one of " + ", ".join(known))
        lowest = {"ep_size": 1, "row_bytes": 1, "tokens": 1, "parts_per_thread": 1, "ctas": 0, "unit_bytes": 512}
        lowest["push_warps"] = int(self.regime == "push")
        for key, low in lowest.items():
            value = getattr(self, key)
            if type(value) is not int or value < low:
                raise ConfigError(what=key, got=value, wanted=f"an integer >= {low}")
        if type(self.threads) is not int or self.threads % 32 or not 32 <= self.threads <= MAX_POINT_THREADS:
            raise ConfigError(what="threads", got=self.threads, wanted=f"a multiple of 32 up to {MAX_POINT_THREADS}")
        if self.regime == "push" and self.phase != "combine":
            raise ConfigError(what="regime", got=self.regime, wanted="small or bulk for dispatch")
        if self.push_warps and self.push_warps >= self.threads // 32:
            raise ConfigError(what="push_warps", got=self.push_warps, wanted=f"fewer than {self.threads // 32} warps")
        if self.regime == "bulk" and self.threads < 64:
            raise ConfigError(what="threads", got=self.threads, wanted="at least 64: a bulk CTA has a warp for signals")
        if type(self.pdl) is not bool:
            raise ConfigError(what="pdl", got=self.pdl, wanted="true or false")
        if type(self.pair_us) not in (int, float) or not 0.0 <= self.pair_us < math.inf:
            raise ConfigError(what="pair_us", got=self.pair_us, wanted="microseconds >= 0")

    @property
    def size(self) -> tuple[str, str, int, int, int]:
        """What the point is for."""
        return self.phase, self.rows, self.ep_size, self.row_bytes, self.tokens

    @property
    def key(self) -> tuple[str, str, int, int, int, str]:
        """What a table has one point for."""
        return *self.size, self.regime


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A table of points.

    Attributes:
        name: architecture, or the path of a file.
        source: how it was obtained.
        points: each size at most once in a regime; every phase at least once in small and in bulk, which, unlike push,
            are there for every round.
    """

    name: str
    source: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        keys = [point.key for point in self.points]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(
                what=f"tuning table {self.name}", got=f"two points for {twice}", wanted="one for each size"
            )
        for phase, rows in (("dispatch", "copied"), ("dispatch", "quantized"), ("combine", "copied")):
            for regime in ("small", "bulk"):
                if not any((each.phase, each.rows, each.regime) == (phase, rows, regime) for each in self.points):
                    raise ConfigError(
                        what=f"tuning table {self.name}",
                        got=f"no point for {phase} of {rows} rows in the {regime} regime",
                        wanted="at least one",
                    )

    @functools.cached_property
    def digest(self) -> str:
        """Equal for tables that choose alike."""
        return hashlib.sha256(repr(sorted(self.points, key=lambda point: point.key)).encode()).hexdigest()[:16]

    def choose(
        self, phase: str, rows: str, *, ep_size: int, row_bytes: int, tokens: int, regimes: Collection[str] = REGIMES
    ) -> Point:
        """The point nearest to a size: by ranks, then by bytes of a row, then by bytes of a rank's R rows, as ratios.

        Sizes that are as far above one point as below another go with the smaller; of two regimes for a size, the one
        that was faster.

        Args:
            row_bytes: 0 counts as 1.
            tokens: R.
            regimes: those that the round may take.
        """
        width = max(row_bytes, 1)

        def distance(point: Point) -> tuple[float, float, float, int, float]:
            ratios = (
                ep_size / point.ep_size,
                width / point.row_bytes,
                width * tokens / (point.row_bytes * point.tokens),
            )
            ranks, bytes_of_row, bytes_of_rows = (round(abs(math.log(ratio)), 9) for ratio in ratios)
            return ranks, bytes_of_row, bytes_of_rows, point.tokens, point.pair_us

        able = [each for each in self.points if (each.phase, each.rows) == (phase, rows) and each.regime in regimes]
        return min(able, key=distance)

    def with_points(self, points: Iterable[Point], source: str) -> Tuning:
        """The table with some sizes measured anew or for the first time."""
        found = tuple(points)
        sizes = {point.size for point in found}
        kept = (point for point in self.points if point.size not in sizes)
        return Tuning(self.name, source, _sorted((*kept, *found)))

    def replaced_by(self, points: Sequence[Point], source: str) -> Tuning:
        """The table after a measurement: points for the same kind of rows go, whatever their number of tokens.

        But where that would leave a phase without a regime, the old points of that regime stay.
        """
        measured = {point.size[:4] for point in points}
        kept = [point for point in self.points if point.size[:4] not in measured]
        served = {(point.phase, point.rows, point.regime) for point in (*kept, *points)}
        sizes = {point.size for point in points}
        kept += [
            point
            for point in self.points
            if point.size[:4] in measured
            and point.size not in sizes
            and (point.phase, point.rows, point.regime) not in served
        ]
        if kept:
            source = f"{source}; other sizes: {self.source.rpartition('; other sizes: ')[2]}"
        return Tuning(self.name, source, _sorted((*kept, *points)))

    def text(self) -> str:
        """The table as a file that `read_tuning` reads back."""
        lines = [f"source = {_quoted(self.source)}", "points = ["]
        for point in self.points:
            pairs = [f"{field.name} = {_toml(getattr(point, field.name))}" for field in dataclasses.fields(point)]
            lines.append("  { " + ", ".join(pairs) + " },")
        return "\n".join([*lines, "]", ""])


@dataclasses.dataclass(frozen=True)
class Found:
    """A table and why it is the one."""

    tuning: Tuning
    why: str


def find_tuning(arch: str, file: str | None = None) -> Found:
    """The table for an architecture.

    Args:
        arch: such as "sm_90".
        file: a table to take instead of a shipped one.

    Returns:
        The given file's, the architecture's own, else the nearest older one's, else the oldest there is.

    Raises:
        ConfigError: a file that cannot be read or holds what it must not.
    """
    if file is not None:
        return Found(read_tuning(Path(file)), f"{file}, given by A2A_TUNING")
    shipped = {_number(path.stem): path for path in (configs_dir() / "tuning").glob("sm_*.toml")}
    wanted = _number(arch)
    if wanted in shipped:
        return Found(read_tuning(shipped[wanted]), f"measured for {arch}")
    older = [number for number in shipped if number < wanted]
    taken = shipped[max(older) if older else min(shipped)]
    return Found(read_tuning(taken), f"that of {taken.stem}: none is shipped for {arch}; `a2a tune` makes one")


def read_tuning(path: Path) -> Tuning:
    """A table from its file.

    Raises:
        ConfigError: naming the file and, where one is wrong, the point.
    """
    try:
        with path.open("rb") as opened:
            table = tomllib.load(opened)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(what=str(path), got=str(error), wanted="a readable TOML file") from error
    if set(table) != {"source", "points"} or not isinstance(table["points"], list):
        raise ConfigError(what=str(path), got=", ".join(sorted(table)) or "nothing", wanted="source and points alone")
    points = [_point(f"{path}: point {index}", entry) for index, entry in enumerate(table["points"])]
    name = path.stem if _ARCH.fullmatch(path.stem) else str(path)
    return Tuning(name, str(table["source"]), tuple(points))


def _sorted(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda point: point.key))


def _point(where: str, entry: Any) -> Point:
    fields = dataclasses.fields(Point)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not isinstance(entry, dict) or not needed <= set(entry) <= names:
        got = ", ".join(sorted(entry)) if isinstance(entry, dict) else repr(entry)
        raise ConfigError(what=where, got=got, wanted=", ".join(field.name for field in fields))
    try:
        return Point(**entry)
    except ConfigError as error:
        raise ConfigError(what=f"{where}: {error.what}", got=error.got, wanted=error.wanted) from error


def _number(arch: str) -> int:
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ConfigError(what="architecture", got=arch, wanted="such as sm_90")
    return int(found[1])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else str(value)
