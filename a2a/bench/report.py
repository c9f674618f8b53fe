"""report: a table for people, one JSON object for programs.

Owns how results look, with rich where it is installed and in plain text elsewhere. Refuses to know what they mean.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Protocol

import torch

from a2a.env import Env

SCHEMA: Final = 1
_GIT_TIMEOUT_S: Final = 5
_VERSIONED: Final = ("torch", "numpy", "numba", "mpi4py", "rich")


class Progress(Protocol):
    """A bar that moves by one."""

    def __call__(self) -> None: ...


def environment(ep_size: int, launcher: str, threads: int) -> dict[str, Any]:
    """What a figure depends on beside the workload."""
    return {
        "a2a": installed("a2a"),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "ranks": ep_size,
        "threads_per_rank": threads,
        "cores_of_rank_0": sorted(os.sched_getaffinity(0)),
        "launcher": launcher,
        "gpus": _gpus(),
        **{name: installed(name) for name in _VERSIONED},
    }


def _gpus() -> list[str]:
    """Names of the GPUs that this process sees, and the CUDA that torch was built for."""
    if not torch.cuda.is_available():
        return []
    built = torch.version.cuda
    return [f"{torch.cuda.get_device_name(index)}, CUDA {built}" for index in range(torch.cuda.device_count())]


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """What A2A_COMMIT says; else the commit of the checkout that the package runs from, with "+" where it has changes.

    A copy of a checkout may hold other files than its history says, hence the order. None where neither is known.
    """
    told = Env.read().commit
    root = Path(__file__).resolve().parents[2]
    if told is not None or not (root / ".git").exists():
        return told

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(target: str, document: Mapping[str, Any]) -> None:
    """Write one JSON object to a file; "-" prints it."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=1, allow_nan=False)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: IO[str] | None = None) -> None:
    """Print a table; every cell is text, columns whose cells are numbers are aligned right."""
    out = sys.stdout if file is None else file
    right = [all(_is_number(row[column]) for row in rows) for column in range(len(columns))]
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    # Drawn borders take 3 more characters a column; a table that does not fit would lose its ends.
    fits = sum(widths) + 3 * len(columns) + 1 <= shutil.get_terminal_size().columns
    if _has_rich() and out.isatty() and fits:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for name, is_right in zip(columns, right, strict=True):
            table.add_column(name, justify="right" if is_right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(file=out).print(table)
        return

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    print(title, file=out)
    print(line(columns), file=out)
    print("  ".join("-" * width for width in widths), file=out)
    for row in rows:
        print(line(row), file=out)


def print_bench(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of `a2a bench`."""
    columns = [
        "implementation", "transport", "routing", "wire", "rows", "tokens", "phase",
        "us p50", "us p99", "us min", "link MB", "GB/s", "x limit", "exact",
    ]  # fmt: skip
    cells = [
        [
            row["implementation"], row["transport"], Path(row["routing"]).name, row["wire_format"], row["row_order"],
            str(row["tokens_per_rank"]), row["phase"],
            f"{row['us_p50']:.0f}", f"{row['us_p99']:.0f}", f"{row['us_min']:.0f}",
            f"{row['link_bytes'] / 1e6:.2f}", f"{row['link_gbps']:.2f}",
            f"{row['us_p50'] / row['limit_us']:.2f}" if row["limit_us"] else "-",
            {True: "yes", False: "NO", None: "unchecked"}[row["exact"]],
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = (
        f"{first['ep_size']} ranks, hidden {first['hidden_size']}, {first['num_experts']} experts, "
        f"top {first['top_k']}: "
        f"microseconds of the slowest rank, over {first['rounds']} rounds"
    )
    print_table(title, columns, cells)
    for row in rows:
        if row["exact"] is not True:
            print(f"{row['implementation']} {row['phase']}, {row['tokens_per_rank']} tokens: {row['reason']}")


@contextmanager
def progress(title: str, steps: int, shown: bool) -> Iterator[Progress]:
    """A progress bar on stderr where that is a terminal and `shown`; nothing elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield _nothing
        return
    if _has_rich():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Drawn seldom: a thread that draws takes time from the rounds.
        with RichProgress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
            task = bar.add_task(title, total=steps)
            yield lambda: bar.advance(task)
        return
    plain = _PlainProgress(title, steps)
    yield plain
    plain.end()


class _PlainProgress:
    """A percentage that rewrites its line."""

    def __init__(self, title: str, steps: int) -> None:
        self._title, self._steps, self._done, self._shown = title, steps, 0, -1

    def __call__(self) -> None:
        self._done += 1
        percent = 100 * self._done // max(1, self._steps)
        if percent != self._shown:
            self._shown = percent
            print(f"\r{self._title} {percent:3d} %", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print("\r" + " " * (len(self._title) + 6) + "\r", end="", file=sys.stderr, flush=True)


def _nothing() -> None:
    return


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _is_number(cell: str) -> bool:
    return cell in ("-", "") or cell.replace(".", "", 1).replace("-", "", 1).isdigit()
