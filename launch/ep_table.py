#!/usr/bin/env python3
"""One call for the table of an expert-parallel group: python launch/ep_table.py [--ranks N].

Runs, on N GPUs (default: all), the GPU tests with the contract suite, then `a2a bench` for each preset and wire format,
beside all-gather/reduce-scatter, all-to-all, plain copies and, where it is installed, FlashInfer; one JSON file each
under tests/gpu/results, and prints their tables. Exit status 0 only if everything ran and every row is exact.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "gpu" / "results"
PEERS = ("torch-a2a", "ag-rs", "copy")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    codes = []
    if not options.no_tests:
        codes.append(_run([sys.executable, "tests/gpu/suite.py", "--limit-s", str(options.tests_limit_s)], None))
    options.out.mkdir(parents=True, exist_ok=True)
    written = []
    for preset in options.presets.split(","):
        for wire_format in options.wire_formats.split(","):
            reason = _refused(preset, wire_format)
            if reason:
                print(f"== {preset}, {wire_format}: left out, {reason}", flush=True)
                continue
            left_s = options.limit_s - (time.monotonic() - start)
            if left_s < 30:
                print(f"== {preset}, {wire_format}: not run, the time is over", flush=True)
                codes.append(1)
                continue
            file = options.out / f"{options.name}_ep{options.ranks}_{preset}_{wire_format}.json"
            codes.append(_run([sys.executable, "-m", "a2a", *_bench(options, preset, wire_format, file)], left_s))
            if file.is_file():
                written.append(str(file))
    if written:
        codes.append(_run([sys.executable, str(RESULTS / "summary.py"), *written], None))
    print(f"== {len(written)} files in {time.monotonic() - start:.0f} s; exit statuses {codes}")
    return 0 if not any(codes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep_table", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=None, help="default: one per GPU")
    parser.add_argument("--presets", default="deepseek-v3,gpt-oss-120b")
    parser.add_argument("--wire-formats", default="bf16,fp8_block,mxfp8")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192", help="per rank")
    parser.add_argument("--modes", default="graph,eager")
    parser.add_argument("--row-order", default="token")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rounds-per-graph", type=int, default=20)
    parser.add_argument("--no-flashinfer", action="store_true", help="although it is installed")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--tests-limit-s", type=float, default=480)
    parser.add_argument("--limit-s", type=float, default=3600, help="of everything")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="gpus", help="in front of the files' names, such as h200x8")
    return parser


def _bench(options: argparse.Namespace, preset: str, wire_format: str, file: Path) -> list[str]:
    peers = [*PEERS]
    if importlib.util.find_spec("flashinfer") is not None and not options.no_flashinfer:
        peers.append("flashinfer")
    words = ["bench", "--preset", preset, "--transport", "nvlink", "--routing", "uniform", "--tokens", options.tokens]
    words += ["--wire-format", wire_format, "--row-order", options.row_order, "--mode", options.modes]
    words += ["--rounds", str(options.rounds), "--json", str(file)]
    if options.ranks is not None:
        words += ["--ranks", str(options.ranks)]
    if "graph" in options.modes.split(","):
        words += ["--rounds-per-graph", str(options.rounds_per_graph)]
    return [*words, *(word for peer in peers for word in ("--peer", peer))]


def _refused(preset: str, wire_format: str) -> str | None:
    """Why rows of a model cannot travel in a format."""
    from a2a.config import model_preset
    from a2a.quant import wire_format as rules

    shape = model_preset(preset)
    reasons = rules(wire_format).check(shape.hidden_size, shape.mx_alignment if wire_format == "mxfp8" else 0)
    return "; ".join(reasons) or None


def _run(command: Sequence[str], limit_s: float | None) -> int:
    print("== " + " ".join(command), flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"== ended after {limit_s:.0f} s", flush=True)
        return 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
