"""The tables of figures in README.md, from what `a2a bench --json` wrote: python tests/bench/results/readme_tables.py.

A test compares them with README, so that no figure there is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
HOST: Final = ROOT / "tests/bench/results/host_2core.json"
GPU: Final = ROOT / "tests/gpu/results"
TOKEN, COMPACT = "h200x2_bf16_token_graph.json", "h200x2_bf16_compact_graph.json"
LARGEST: Final = "h200x2_bf16_token_graph_large.json"


def main() -> None:
    print("\n".join([*host_table(), "", *gpu_table(), "", largest()]))


def host_table() -> Iterator[str]:
    """Rows of the pair on the host transport, other implementations also as multiples of a2a."""
    pairs = _pairs(HOST)
    for tokens in _tokens(pairs):
        ours = pairs["a2a", tokens]
        others = (pairs[name, tokens] for name in ("torch-a2a", "mpi", "memcpy"))
        cells = [f"{ours:,.0f}", *(f"{other:,.0f} ({other / ours:.1f}x)" for other in others)]
        yield f"| {tokens} | {' | '.join(cells)} |"


def gpu_table() -> Iterator[str]:
    """Rows of the pair on two GPUs."""
    pairs, compact = _pairs(GPU / TOKEN), _pairs(GPU / COMPACT)
    tokens = _tokens(pairs)
    yield _row("tokens per rank", map(str, tokens))
    for name, found, of in (
        ("**a2a**, rows in token order", pairs, "a2a"),
        ("**a2a**, compact rows", compact, "a2a"),
        ("all-gather + reduce-scatter (NCCL)", pairs, "ag-rs"),
    ):
        yield _row(name, (f"{found[of, each]:.1f}" if (of, each) in found else "-" for each in tokens))


def largest() -> str:
    """The pair at 8192 tokens, in words."""
    return f"tokens the pair took {_pairs(GPU / LARGEST)['a2a', 8192]:.0f}"


def commands() -> Iterator[str]:
    """The command lines of the files on GPUs."""
    for name in (TOKEN, COMPACT, LARGEST):
        words: list[str] = json.loads((GPU / name).read_text())["workload"]["arguments"]
        yield "a2a " + " ".join(words[: words.index("--json")])


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _pairs(path: Path) -> dict[tuple[str, int], float]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["implementation"], row["tokens_per_rank"]): row["us_p50"] for row in rows if row["phase"] == "pair"}


def _tokens(pairs: dict[tuple[str, int], float]) -> list[int]:
    return sorted({tokens for _, tokens in pairs})


if __name__ == "__main__":
    main()
