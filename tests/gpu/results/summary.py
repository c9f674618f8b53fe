"""Tables of what `a2a bench --json` wrote: python tests/gpu/results/summary.py [--readme] [FILE...].

Without files: every JSON file beside this script. With `--readme` the tables become README.md beside it, so that no
figure there is typed by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS, LIMIT = "a2a", "copy"
Row = Mapping[str, Any]

HEAD = """\
# What was measured, on which machine, from which commit

Written by `python tests/gpu/results/summary.py --readme` from the files beside it, which are what `a2a bench --json`
wrote, but for the path behind its `--json`. Microseconds per round of the slowest rank, median over rounds; every row
was compared bit by bit before it was timed and after. In a graph the pair is timed whole; its phases in a graph of
their own, with events between them, which keep kernels apart that otherwise overlap; "alone in a graph" is a graph of
dispatches and nothing else, in contexts of their own. Physical GB/s count what leaves a
rank. "of a copy" is the time of plain copies of the same bytes between the GPUs, taken in the same run, as a share of
a2a's.

A "+" behind a commit: the copy that was measured held other files than that commit; those of 3470899+ were the files of
commit 9edf25f. The launch shapes were a table that `a2a tune` had just made for h200x2_bf16_token_graph,
h200x2_formats_token_graph and h200x2_bf16_token_graph_large, and the shipped one for the others. Ranks start a graph a
little apart, which 20 rounds a graph show more than 100. That, and the host's time to launch a graph, is in all of
these figures; bench has since come to hand a replay over to a device that pauses, behind a round that is not counted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="summary", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--readme", action="store_true", help="write README.md beside this script")
    options = parser.parse_args(arguments)
    files = options.files or sorted(HERE.glob("*.json"))
    parts = [part for file in files for part in tables(file.name, json.loads(file.read_text()))]
    text = "\n".join([HEAD, *parts])
    if options.readme:
        (HERE / "README.md").write_text(text)
    print(text, end="")
    return 0


def tables(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    """The part of one file: where it is from, then a table for each kind of round."""
    environment, workload = document["environment"], document["workload"]
    gpus = environment.get("gpus") or []
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else environment["platform"]
    yield f"## {name}\n"
    yield f"* {environment['ranks']} ranks, {machine}, torch {environment['torch']}, Python {environment['python']}"
    yield f"* commit {environment['commit'] or 'not recorded'}"
    if workload.get("arguments"):
        yield f"* `a2a {' '.join(workload['arguments'])}`"
    yield ""
    for kind, rows in _kinds(document["rows"]).items():
        yield f"### {workload['preset']}, " + ", ".join(kind) + "\n"
        yield from _table(rows)
        yield from _remarks(rows)
        yield ""


def _kinds(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        place = "combine from the workspace" if row["payload_in_workspace"] else "combine from another tensor"
        sms = f"{row['num_sms']} SMs" if row["num_sms"] else "all SMs"
        key = (row["wire_format"], f"{row['mode']} mode", f"rows {row['row_order']}", row["routing"], place, sms)
        found.setdefault(key, []).append(row)
    return found


def _table(rows: Sequence[Row]) -> Iterator[str]:
    tokens = sorted({row["tokens_per_rank"] for row in rows})
    yield "| us, tokens per rank | " + " | ".join(map(str, tokens)) + " |"
    yield "|---|" + "---|" * len(tokens)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for name in names:
        for phase in ("pair", "dispatch", "combine"):
            at = _at(rows, name, phase)
            if at:
                label = f"**{name}** {phase}" if name == OURS else f"{name} {phase}"
                yield f"| {label} | " + " | ".join(_us(at.get(count)) for count in tokens) + " |"
    at = _at(rows, OURS, "dispatch")
    if any("us_alone" in row for row in at.values()):
        cells = [f"{at[count]['us_alone']:.1f}" if "us_alone" in at.get(count, {}) else "" for count in tokens]
        yield f"| {OURS} dispatch, alone in a graph | " + " | ".join(cells) + " |"
    for phase in ("dispatch", "combine"):
        at = _at(rows, OURS, phase)
        if at:
            cells = [f"{at[count]['link_gbps']:.1f}" if count in at else "" for count in tokens]
            yield f"| {OURS} {phase}, physical GB/s | " + " | ".join(cells) + " |"
    limits, ours = _at(rows, LIMIT, "pair"), _at(rows, OURS, "pair")
    if limits and ours:
        cells = [
            f"{limits[count]['us_p50'] / ours[count]['us_p50']:.2f}" if count in limits and count in ours else ""
            for count in tokens
        ]
        yield "| pair, of a copy | " + " | ".join(cells) + " |"
    regimes = {count: row["regime"] for count, row in ours.items()}
    yield f"| regime of {OURS} | " + " | ".join(regimes.get(count, "") for count in tokens) + " |"


def _at(rows: Sequence[Row], name: str, phase: str) -> dict[int, Row]:
    return {row["tokens_per_rank"]: row for row in rows if (row["implementation"], row["phase"]) == (name, phase)}


def _us(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['us_p50']:.1f}" if row["exact"] is True else f"{row['us_p50']:.1f} (not exact)"


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    ours = _at(rows, OURS, "pair")
    for name in dict.fromkeys(row["implementation"] for row in rows):
        theirs = _at(rows, name, "pair")
        if name not in (OURS, LIMIT) and theirs:
            pairs = [(n, ours[n]["us_p50"], theirs[n]["us_p50"]) for n in sorted(ours.keys() & theirs.keys())]
            yield f"\n{OURS} against {name}: {overtaking(pairs)}."


def overtaking(pairs: Sequence[tuple[int, float, float]]) -> str:
    """Where the first of two figures becomes the smaller one, from (tokens, first, second) in ascending tokens."""
    if not pairs:
        return "no size has both"
    signs = [first < second for _, first, second in pairs]
    if all(signs):
        return f"faster at every size measured, from {pairs[0][0]} tokens per rank on"
    if not any(signs):
        return f"slower at every size measured, up to {pairs[-1][0]} tokens per rank"
    told = []
    for (n, a, b), (m, c, d) in itertools.pairwise(pairs):
        if (a < b) != (c < d):
            low, high = math.log(a / b), math.log(c / d)
            tokens = math.exp(math.log(n) + (math.log(m) - math.log(n)) * low / (low - high))
            told.append(f"{'overtakes' if c < d else 'falls behind'} at about {tokens:.0f} tokens per rank")
    return ", ".join(told)


if __name__ == "__main__":
    sys.exit(main())
