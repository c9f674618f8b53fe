"""cli: the command line: bench, check, tune, plan, doctor, presets.

Owns words, defaults, exit codes and how ranks are started for a command. Refuses to measure or check anything itself;
what is heavy is imported when a command needs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from a2a import env
from a2a.errors import A2AError, ConfigError, Unsupported

if TYPE_CHECKING:
    from a2a.bench.check import Check
    from a2a.bench.sweep import Sweep
    from a2a.bench.tune import Tune

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2

_LAST_WORDS_S: Final = 0.5
"""How long an MPI rank that failed waits before it leaves: its launcher then ends the others, mid-word."""

_SHOWN_FAILURES: Final = 20
_DEFAULT_CHECK_ROUNDS: Final = 50
_DEFAULT_CHECK_RANKS: Final = 4
_TUNED_PRESET: Final = "deepseek-v3"
_TUNED_TOKENS: Final = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
_TUNED_FORMATS: Final = ("bf16", "mxfp8")
_DEFAULT_TUNE_BUDGET_S: Final = 180.0
_DEFAULT_TIMEOUT_S: Final = 3600.0

_EXAMPLES: Final = """\
examples:
  a2a bench                                    the main job: OLMoE's recorded routing over 4 local processes
  a2a bench --preset deepseek-v3 --ranks 4 --tokens 16,256,2048 --peer torch-a2a --peer memcpy
  a2a check --ranks 8 --rounds 200 --seed 1    random exchanges against the oracle
  a2a plan --preset deepseek-v3 --ep-size 8 --max-tokens 8192 --wire-format mxfp8
  a2a doctor                                   what this machine can do
  mpiexec -n 5 a2a check                       ranks started by MPI; torchrun --no-python a2a ... works too

exit codes: 0 all is well, 1 something is not exact or a rank failed, 2 a wrong option or an unsupported request
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        for what in ("json", "output"):
            _refuse_file(what, getattr(options, what, None))
        code: int = {
            "bench": _bench,
            "check": _check,
            "tune": _tune,
            "plan": _plan,
            "doctor": _doctor,
            "presets": _presets,
        }[options.command](options, arguments)
    except A2AError as error:
        if options.debug:
            raise
        _tell(error)
        code = _code_of(error)
    except KeyboardInterrupt:
        print("a2a: interrupted", file=sys.stderr)
        code = 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="a2a",
        description="Expert-parallel dispatch and combine between ranks: measure it, check it, plan for it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, help: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("--json", metavar="FILE", help="write one JSON object to FILE; - prints it")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    def add_ranks(
        command: argparse.ArgumentParser, default: str, transports: str = "auto (default), host, nvlink or nvshmem"
    ) -> None:
        command.add_argument(
            "--ranks", type=_positive, metavar="N", help=f"start N local processes ({default}); not under a launcher"
        )
        command.add_argument("--transport", default="auto", metavar="NAME", help=transports)
        command.add_argument("--seed", type=int, default=0, help="of everything that is random (default 0)")
        command.add_argument(
            "--timeout", type=_seconds, default=_DEFAULT_TIMEOUT_S, metavar="S",
            help="seconds after which local processes are ended (default %(default).0f)",
        )  # fmt: skip

    bench = add(
        "bench",
        "time dispatch and combine, every size checked before and after",
        "Time dispatch, combine and the pair, in microseconds of the slowest rank of each round.\n"
        "Every size is checked bit by bit before it is timed and after. Without options: the recorded routing of\n"
        "OLMoE-1B-7B over 4 local processes.\n\n"
        "Columns: link MB, bytes of the rows that leave the busiest rank; GB/s, these by the median time; x limit,\n"
        "the median time as a multiple of that of memcpy or copy, if one of them is a --peer; exact, the checks.",
    )
    what = bench.add_mutually_exclusive_group()
    what.add_argument("--preset", metavar="NAME", help="a model's shapes; `a2a presets` lists them")
    what.add_argument("--config", metavar="FILE", help="a bench plan: main, decode, prefill or a TOML file")
    add_ranks(bench, "default 4, or the plan's")
    bench.add_argument("--tokens", type=_counts, metavar="N,N", help="tokens per rank (default 16,256, or the plan's)")
    bench.add_argument(
        "--wire-format", type=_words, metavar="F,F",
        help="bf16 (default, or the plan's), fp16, fp8_block, mxfp8, nvfp4, mxfp4; preset means the model's usual one",
    )  # fmt: skip
    bench.add_argument(
        "--routing", type=_words, metavar="R,R",
        help="uniform, zipf[:exponent], hot[:share], skewed, a recording (olmoe-1b-7b, qwen1.5-moe-a2.7b) or a file, "
        "recordings also with :warmup or :rest; default: the preset's recording with its warm-up rows as a second "
        "workload, uniform where there is none",
    )  # fmt: skip
    bench.add_argument(
        "--peer", action="extend", type=_words, metavar="NAME",
        help="also time another: torch-a2a, ag-rs, mpi, flashinfer, memcpy or copy (limits); may be repeated",
    )  # fmt: skip
    bench.add_argument("--row-order", type=_words, metavar="O,O", help="compact (default, or the plan's), token")
    bench.add_argument("--payload-in-workspace", type=_switches, default=(True,), metavar="yes|no",
                       help="experts write where combine reads (default yes)")  # fmt: skip
    bench.add_argument("--mode", type=_words, default=("eager",), metavar="M,M", help="eager (default); graph on GPUs")
    bench.add_argument(
        "--rounds", type=_positive, metavar="N", help="timed rounds of each size (default 20, or the plan's)"
    )
    bench.add_argument("--rounds-per-graph", type=_positive, metavar="N", help="with --mode graph (default 20)")
    bench.add_argument("--num-sms", type=_positive, metavar="N", help="SMs a GPU transport may use")

    check = add(
        "check",
        "compare random exchanges with the oracle",
        "Run random exchanges (shapes, counts, ids, formats, row orders, poisoned memory) and compare every byte with\n"
        "the dense oracle. Prints what was covered. The same seed runs the same exchanges.",
    )
    add_ranks(check, f"default {_DEFAULT_CHECK_RANKS}")
    check.add_argument("--rounds", type=_positive, default=_DEFAULT_CHECK_ROUNDS, metavar="N",
                       help="rounds in all (default %(default)s)")  # fmt: skip
    check.add_argument("--fault", metavar="F", help="plant drop-row or flip-byte, which must end in exit code 1")
    check.add_argument("--kill-rank", type=int, metavar="R", help="end rank R by SIGKILL, with --kill-at")
    check.add_argument("--kill-at", metavar="POINT", help="the point of a round at which it ends, as dispatch.write")

    tune = add(
        "tune",
        "find regimes and launch shapes on the GPUs at hand, and write the table of them",
        "Time every launch shape at every size, dispatch and combine in turn, in a CUDA graph, the slowest rank\n"
        "counting. Every shape's sums are compared. The table goes to --output; A2A_TUNING=FILE takes it,\n"
        "configs/tuning ships it.",
    )
    add_ranks(tune, "default: one per GPU", "nvlink (default) or nvshmem")
    tune.add_argument("--preset", default=_TUNED_PRESET, metavar="NAME", help="whose shapes (default %(default)s)")
    tune.add_argument("--tokens", type=_counts, default=_TUNED_TOKENS, metavar="N,N",
                      help="tokens per rank (default 1 to 8192)")  # fmt: skip
    tune.add_argument("--wire-format", type=_words, default=_TUNED_FORMATS, metavar="F,F",
                      help="default bf16,mxfp8: rows that are copied, and rows that dispatch quantises")  # fmt: skip
    tune.add_argument(
        "--routing", type=_words, default=("uniform",), metavar="R,R", help="as in bench (default uniform)"
    )
    tune.add_argument("--row-order", type=_words, default=("compact",), metavar="O", help="compact (default) or token")
    tune.add_argument("--budget-s", type=float, default=_DEFAULT_TUNE_BUDGET_S, metavar="S",
                      help="no further shape is tried after that (default %(default).0f)")  # fmt: skip
    tune.add_argument("--output", metavar="FILE", help="write the table to FILE, TOML; it is printed in any case")

    plan = add(
        "plan",
        "sizes, bytes and a predicted time, without starting anything",
        "Say what an exchange will take: workspace by region, bytes on the link, a predicted time and its grounds.",
    )
    plan.add_argument("--preset", required=True, metavar="NAME", help="a model's shapes; `a2a presets` lists them")
    plan.add_argument("--ep-size", type=_positive, required=True, metavar="N", help="ranks")
    plan.add_argument("--max-tokens", type=_positive, required=True, metavar="N", help="capacity, tokens per rank")
    plan.add_argument("--tokens", type=int, metavar="N", help="tokens per rank of the round (default: the capacity)")
    plan.add_argument("--wire-format", default="bf16", metavar="F", help="bf16 (default), ..., preset")
    plan.add_argument("--transport", default="host", metavar="NAME", help="host (default), nvlink or nvshmem")
    plan.add_argument("--routing", default="uniform", metavar="R", help="as in bench (default uniform)")
    plan.add_argument("--row-order", default="compact", metavar="O", help="compact (default) or token")
    plan.add_argument("--seed", type=int, default=0, help="of a generated routing (default 0)")

    add("doctor", "what this machine can do", "Try what transports need and say what `auto` would choose, and why.")
    presets = add("presets", "list model presets and bench plans", "List the shipped model shapes with their sources.")
    presets.add_argument("name", nargs="?", help="show one preset in full")
    return parser


# ---- commands --------------------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from a2a.bench.peers import peer

    sweep, ranks = _sweep_of(options, arguments)
    for name in sweep.peers:
        refusal = peer(name).refusal()
        if refusal is not None:
            raise Unsupported(transport=name, reasons=(refusal,))
    return _on_ranks("bench", sweep, options, arguments, ranks, needs_mpi="mpi" in sweep.peers)


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from a2a.bench.check import FAULTS, Check

    _refuse_transport(options.transport)
    if (options.kill_rank is None) != (options.kill_at is None):
        raise ConfigError(what="kill-rank, kill-at", got="one of them", wanted="both or none")
    if options.fault is not None and options.fault not in FAULTS:
        raise ConfigError(what="fault", got=options.fault, wanted="one of " + ", ".join(FAULTS))
    asked = Check(
        rounds=options.rounds,
        seed=options.seed,
        transport=options.transport,
        fault=options.fault,
        kill_rank=options.kill_rank,
        kill_at=options.kill_at,
    )
    return _on_ranks("check", asked, options, arguments, options.ranks or _DEFAULT_CHECK_RANKS, needs_mpi=False)


def _tune(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import torch

    from a2a.bench.sweep import Sweep
    from a2a.bench.tune import Tune
    from a2a.config import model_preset

    if not torch.cuda.is_available():
        raise Unsupported(transport="nvlink", reasons=("there is nothing to tune without GPUs",))
    _refuse_words("wire-format", options.wire_format, _known_formats())
    _refuse_words("row-order", options.row_order, _known_orders())
    if min(options.tokens) < 1:
        raise ConfigError(what="tokens", got=min(options.tokens), wanted="at least 1")
    sweep = Sweep(
        preset=model_preset(options.preset),
        tokens=options.tokens,
        wire_formats=options.wire_format,
        routings=options.routing,
        row_orders=options.row_order,
        payloads_in_workspace=(True,),
        peers=(),
        rounds=1,
        transport="nvlink" if options.transport == "auto" else options.transport,
        modes=("graph",),
        seed=options.seed,
        num_sms=None,
        rounds_per_graph=None,
    )
    asked = Tune(sweep, options.budget_s, options.output)
    return _on_ranks("tune", asked, options, arguments, options.ranks or torch.cuda.device_count(), needs_mpi=False)


def _plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from a2a.bench import report
    from a2a.bench.plan import MIB, Plan, predict
    from a2a.config import model_preset

    preset = model_preset(options.preset)
    plan = Plan(
        preset=preset,
        ep_size=options.ep_size,
        max_tokens=options.max_tokens,
        tokens=options.max_tokens if options.tokens is None else options.tokens,
        wire_format=preset.wire_format if options.wire_format == "preset" else options.wire_format,
        transport=options.transport,
        routing=options.routing,
        row_order=options.row_order,
        seed=options.seed,
    )
    found = predict(plan)
    if options.json != "-":
        rows = [
            [each["name"], str(each["offset_bytes"]), str(each["num_bytes"]), f"{each['num_bytes'] / MIB:.2f}"]
            for each in found["regions"]
        ]
        size = found["workspace_bytes_per_rank"]
        rows.append(["workspace", "0", str(size), f"{size / MIB:.2f}"])
        sizes = f"{plan.ep_size} ranks, {plan.max_tokens} tokens, {plan.wire_format}"
        title = f"{preset.name}, {sizes}: one rank's workspace"
        report.print_table(title, ["region", "offset", "bytes", "MiB"], rows)
        times = [
            [
                phase,
                f"{each['link_bytes'] / 1e6:.2f}",
                f"{each['logical_bytes'] / 1e6:.2f}",
                "-" if each["predicted_us"] is None else f"{each['predicted_us']:.1f}",
            ]
            for phase, each in found["by_phase"].items()
        ]
        print()
        title = f"one round of {plan.tokens} tokens per rank"
        report.print_table(title, ["phase", "link MB", "logical MB", "predicted us"], times)
        print("rests on: " + "\n          ".join(found["rests_on"]))
    if options.json:
        report.write_json(options.json, {"command": "plan", "workload": _workload(options), **found})
    return OK


def _doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from a2a.bench import report
    from a2a.bench.doctor import diagnose

    diagnosis = diagnose()
    if options.json != "-":
        rows = [[each.topic, {True: "yes", False: "NO", None: ""}[each.ok], each.text] for each in diagnosis.findings]
        width = max(len(row[0]) for row in rows)
        for topic, works, text in rows:
            print(f"{topic:{width}}  {works:3}  {text}".rstrip())
    if options.json:
        findings = [{"topic": each.topic, "ok": each.ok, "text": each.text} for each in diagnosis.findings]
        transports = {name: list(reasons) for name, reasons in diagnosis.transports.items()}
        document = {"findings": findings, "transports": transports, "chosen": diagnosis.chosen}
        report.write_json(options.json, {"command": "doctor", **document})
    return OK if diagnosis.chosen is not None else FAILED


def _presets(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import dataclasses

    from a2a.bench import report
    from a2a.config import bench_plan, bench_plans, model_preset, model_presets

    names = (options.name,) if options.name else model_presets()
    presets = [model_preset(name) for name in names]
    if options.json != "-" and options.name:
        for key, value in dataclasses.asdict(presets[0]).items():
            print(f"{key:22} {value}")
    elif options.json != "-":
        columns = ["preset", "hidden", "experts", "top_k", "usual wire", "expert width", "routing", "source"]
        rows = [
            [
                each.name,
                str(each.hidden_size),
                str(each.num_experts),
                str(each.top_k),
                each.wire_format + (f" /{each.mx_alignment}" if each.mx_alignment else ""),
                str(each.moe_intermediate_size),
                "recorded" if each.routing else "",
                each.source.removeprefix("https://huggingface.co/").removesuffix("/blob/main/config.json"),
            ]
            for each in presets
        ]
        report.print_table("model presets (sources: config.json of the named Hugging Face repository)", columns, rows)
        print("\nbench plans (a2a bench --config NAME)")
        for name in bench_plans():
            print(f"  {name:10} {bench_plan(name).description}")
    if options.json:
        plans = [dataclasses.asdict(bench_plan(name)) for name in bench_plans()]
        document = {"presets": [dataclasses.asdict(each) for each in presets], "bench_plans": plans}
        report.write_json(options.json, {"command": "presets", **document})
    return OK


def _sweep_of(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[Sweep, int]:
    """The sweep that options and plan describe, and how many local ranks run it."""
    from a2a.bench.sweep import Sweep
    from a2a.config import MAIN_BENCH_PLAN, bench_plan, model_preset

    _refuse_transport(options.transport)
    plan = bench_plan(options.config or MAIN_BENCH_PLAN)
    preset = model_preset(options.preset or plan.preset)
    routings = plan.routings
    if options.preset:
        # A preset's own recording, else picks that favour nobody.
        routings = (preset.routing, f"{preset.routing}:warmup") if preset.routing else ("uniform",)
    sweep = Sweep(
        preset=preset,
        tokens=options.tokens or plan.tokens,
        wire_formats=options.wire_format or plan.wire_formats,
        routings=options.routing or routings,
        row_orders=options.row_order or plan.row_orders,
        payloads_in_workspace=options.payload_in_workspace,
        peers=tuple(dict.fromkeys(options.peer or plan.peers)),
        rounds=options.rounds or plan.rounds,
        transport=options.transport,
        modes=options.mode,
        seed=options.seed,
        num_sms=options.num_sms,
        rounds_per_graph=options.rounds_per_graph,
        arguments=tuple(arguments),
    )
    _refuse_words("wire-format", sweep.wire_formats, _known_formats())
    _refuse_words("row-order", sweep.row_orders, _known_orders())
    for mode in options.mode:
        if mode not in ("eager", "graph"):
            raise ConfigError(what="mode", got=mode, wanted="eager or graph")
    if options.rounds_per_graph is not None and "graph" not in options.mode:
        raise ConfigError(what="rounds-per-graph", got=options.rounds_per_graph, wanted="--mode graph beside it")
    if "graph" in options.mode:
        _refuse_graphs(options.transport)
    return sweep, options.ranks or plan.ranks


def _known_formats() -> tuple[str, ...]:
    from a2a.quant import WIRE_FORMATS

    return (*WIRE_FORMATS, "preset")


def _known_orders() -> tuple[str, ...]:
    from a2a.config import ROW_ORDERS

    return ROW_ORDERS


def _refuse_words(what: str, words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        if word not in known:
            raise ConfigError(what=what, got=word, wanted="one of " + ", ".join(known))


def _refuse_graphs(transport: str) -> None:
    import torch

    reasons = []
    if transport == "host":
        reasons.append("--mode graph: there are no graphs on the host")
    if not torch.cuda.is_available():
        reasons.append("--mode graph: there are no graphs without GPUs")
    if reasons:
        raise Unsupported(transport=transport, reasons=tuple(reasons))


def _refuse_file(what: str, name: str | None) -> None:
    """Say no to a file that cannot be written before the work that would be lost with it."""
    if name is None or name == "-":
        return
    from a2a.comm import detect

    if detect(env.snapshot()).rank not in (None, 0):
        # The first rank writes, and others may be on machines that have no such place.
        return
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(what=what, got=name, wanted="a file that can be written")


def _refuse_ranks(ranks: int) -> None:
    """Before as many processes are started."""
    from a2a.config import MAX_EP_SIZE

    if ranks > MAX_EP_SIZE:
        raise ConfigError(what="ranks", got=ranks, wanted=f"an integer in 1..{MAX_EP_SIZE}")


def _refuse_transport(name: str) -> None:
    """Say no before any process is started."""
    from a2a.transport import TRANSPORTS

    if name not in ("auto", *TRANSPORTS):
        raise ConfigError(what="transport", got=name, wanted="auto or one of " + ", ".join(TRANSPORTS))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _on_ranks(
    command: str,
    task: Sweep | Check | Tune,
    options: argparse.Namespace,
    arguments: Sequence[str],
    ranks: int,
    needs_mpi: bool,
) -> int:
    """Run a task on all ranks: this process is one under a launcher, else local processes are started."""
    from a2a.comm import detect
    from a2a.comm.launcher import MPI_KINDS, NONE

    launcher = detect(env.snapshot())
    if launcher.kind != NONE:
        if options.ranks not in (None, launcher.size) and launcher.size is not None:
            raise ConfigError(
                what="ranks",
                got=options.ranks,
                wanted=f"nothing: {launcher.kind} has started {launcher.size} ranks already",
            )
        code = _launched_rank(command, task, options.json, launcher.kind, options.debug)
        if code != OK and launcher.kind in MPI_KINDS:
            # Ending MPI in good order would wait for ranks that may be waiting for this one.
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_LAST_WORDS_S)
            os._exit(code)
        return code
    _refuse_ranks(ranks)
    if needs_mpi:
        return _under_mpiexec(arguments, ranks)
    from a2a.comm.spawn import outcomes

    ended = outcomes(
        rank_main, ranks, (command, task, options.json, "local"), timeout_s=options.timeout,
    )  # fmt: skip
    told: set[str] = set()
    traced = False
    code = OK
    for outcome in ended:
        if outcome.ok:
            code = max(code, int(outcome.result))
            continue
        if isinstance(outcome.error, A2AError):
            code = max(code, _code_of(outcome.error))
            line = f"rank {outcome.rank}: {_bare(outcome.error, outcome.rank)}"
            if options.debug:
                line += "\n" + "\n".join(getattr(outcome.error, "__notes__", []))
            # What all ranks say alike is said once.
            if _bare(outcome.error, outcome.rank) not in told or _names_a_rank(outcome.error):
                print(f"a2a: {line}", file=sys.stderr)
            told.add(_bare(outcome.error, outcome.rank))
            continue
        code = max(code, FAILED)
        if outcome.error is not None:
            # The first traceback is where to look; the others are mostly the same or follow from it.
            trace = "\n" + "\n".join(getattr(outcome.error, "__notes__", [])) if not traced else ""
            traced = True
            print(f"a2a: rank {outcome.rank}: {outcome.error!r}{trace}", file=sys.stderr)
        elif outcome.stopped:
            print(f"a2a: rank {outcome.rank}: ended by the command, it had not finished", file=sys.stderr)
        else:
            how = outcome.signal_name() or f"exit status {outcome.exit_status}"
            print(f"a2a: rank {outcome.rank}: ended without a word ({how})", file=sys.stderr)
    return code


def _launched_rank(command: str, task: Sweep | Check | Tune, json: str | None, launcher: str, debug: bool) -> int:
    from a2a.bench.check import story
    from a2a.comm import detect

    try:
        return rank_main(command, task, json, launcher)
    except A2AError as error:
        if debug:
            raise
        rank = detect(env.snapshot()).rank
        print("a2a: " + story(error, -1 if rank is None else rank), file=sys.stderr)
        return _code_of(error)


def _under_mpiexec(arguments: Sequence[str], ranks: int) -> int:
    """Start the same command again, N times, through the installed mpiexec."""
    import importlib.util

    from a2a.bench.doctor import find_mpiexec

    mpiexec = find_mpiexec()
    reasons = []
    if importlib.util.find_spec("mpi4py") is None:
        reasons.append("mpi4py is not installed: pip install 'a2a[mpi]'")
    if mpiexec is None:
        reasons.append("no mpiexec: none found on PATH or beside this Python")
    if mpiexec is None or reasons:
        raise Unsupported(transport="mpi", reasons=tuple(reasons))
    return subprocess.run([mpiexec, "-n", str(ranks), sys.executable, "-m", "a2a", *arguments], check=False).returncode


def rank_main(command: str, task: Any, json: str | None, launcher: str) -> int:
    """One rank of `bench`, `check` or `tune`; rank 0 prints. Returns the exit code, the same on every rank."""
    import torch

    from a2a.comm import resolve
    from a2a.comm.launcher import MPI_KINDS
    from a2a.env import Env

    comm = resolve(None, timeout_s=Env.read().startup_timeout_s)
    if launcher in MPI_KINDS:
        from a2a.comm.mpi import forget_names

        # The job is this command alone, and a rank of it may be killed.
        forget_names(comm)
    # The same for all implementations: the ranks of a machine share its cores.
    cores = sorted(os.sched_getaffinity(0))
    threads = max(1, len(cores) // comm.Get_size())
    torch.set_num_threads(threads)
    if command == "bench" and not torch.cuda.is_available():
        # Ranks that wake each other are moved onto one core by the scheduler, and others then stand idle.
        first = comm.Get_rank() * threads % len(cores)
        os.sched_setaffinity(0, cores[first : first + threads])
    if torch.cuda.is_available():
        # Ranks of a machine take its GPUs in turn.
        torch.cuda.set_device(comm.Get_rank() % torch.cuda.device_count())
    if command == "tune":
        return _tune_rank(task, comm, json, launcher, threads)
    run = _bench_rank if command == "bench" else _check_rank
    return run(task, comm, json, launcher, threads)


def _bench_rank(sweep: Sweep, comm: Any, json: str | None, launcher: str, threads: int) -> int:
    from a2a.bench import report
    from a2a.bench.sweep import run

    rank = comm.Get_rank()
    with report.progress("bench", sweep.num_steps, rank == 0) as on_round:
        rows = run(sweep, comm, on_round)
    if rank == 0:
        if json != "-":
            report.print_bench(rows)
        if json:
            workload = {
                "preset": sweep.preset.name,
                "tokens": list(sweep.tokens),
                "wire_formats": list(sweep.wire_formats),
                "routings": list(sweep.routings),
                "row_orders": list(sweep.row_orders),
                "payload_in_workspace": list(sweep.payloads_in_workspace),
                "peers": list(sweep.peers),
                "rounds": sweep.rounds,
                "modes": list(sweep.modes),
                "seed": sweep.seed,
                "num_sms": sweep.num_sms,
                "rounds_per_graph": sweep.rounds_per_graph,
                "arguments": list(sweep.arguments),
            }
            environment = report.environment(comm.Get_size(), launcher, threads)
            document = {"environment": environment, "workload": workload, "rows": rows}
            report.write_json(json, {"command": "bench", **document})
    return OK if all(row["exact"] is True for row in rows) else FAILED


def _tune_rank(asked: Tune, comm: Any, json: str | None, launcher: str, threads: int) -> int:
    from a2a.bench import report
    from a2a.bench.tune import rows_of, tune

    rank = comm.Get_rank()
    with report.progress("tune", asked.sweep.num_cases, rank == 0) as on_size:
        found = tune(asked.sweep, comm, asked.budget_s, on_size)
    if rank == 0:
        if asked.output is not None:
            with open(asked.output, "w", encoding="utf-8") as file:
                file.write(found.tuning.text())
        if json != "-":
            print(found.tuning.text(), end="")
            for size in found.skipped:
                print(f"# skipped, the time was over: {size}")
        if json:
            document = {
                "environment": report.environment(comm.Get_size(), launcher, threads),
                "trials": rows_of(found),
                "skipped": list(found.skipped),
                "table": found.tuning.text(),
            }
            report.write_json(json, {"command": "tune", **document})
    return OK


def _check_rank(asked: Check, comm: Any, json: str | None, launcher: str, threads: int) -> int:
    from a2a.bench import report
    from a2a.bench.check import check, kill

    rank = comm.Get_rank()
    with report.progress("check", asked.rounds, rank == 0) as on_round:
        if asked.kill_at is not None:
            kill(asked, comm, on_round)
        found = check(asked, comm, on_round)
    if rank == 0:
        if json != "-":
            rows = [
                [topic, name, str(count)]
                for topic, counts in found.covered.items()
                for name, count in sorted(counts.items(), key=lambda entry: -entry[1])
            ]
            title = f"{found.rounds} rounds over {comm.Get_size()} ranks, seed {asked.seed}; rounds with each property:"
            report.print_table(title, ["topic", "property", "rounds"], rows)
            if found.planted:
                print(f"planted: {found.planted}")
            for line in found.failures[:_SHOWN_FAILURES]:
                print(f"WRONG: {line}")
            print("exact: every byte equals the oracle's" if not found.failures else f"{len(found.failures)} wrong")
        if json:
            document = {
                "environment": report.environment(comm.Get_size(), launcher, threads),
                "workload": {"rounds": asked.rounds, "seed": asked.seed, "fault": asked.fault},
                "covered": found.covered,
                "planted": found.planted,
                "failures": list(found.failures),
                "exact": not found.failures,
            }
            report.write_json(json, {"command": "check", **document})
    return OK if not found.failures else FAILED


# ---- words -----------------------------------------------------------------------------------------------------------


def _workload(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("json", "debug", "command")}


def _tell(error: A2AError) -> None:
    print(f"a2a: {error}", file=sys.stderr)


def _code_of(error: A2AError) -> int:
    return USAGE if isinstance(error, (ConfigError, Unsupported)) else FAILED


def _bare(error: A2AError, rank: int) -> str:
    """The error's sentence without the rank that a line of it starts with anyway."""
    return str(error).removeprefix(f"rank {rank}: ")


def _names_a_rank(error: A2AError) -> bool:
    return _code_of(error) == FAILED


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= env.MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {env.MAX_TIMEOUT_S:.0f}")
    return value


def _counts(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text} has a negative number")
    return values


def _words(text: str) -> tuple[str, ...]:
    words = tuple(part.strip() for part in text.split(","))
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty entry")
    return words


def _switches(text: str) -> tuple[bool, ...]:
    words = _words(text)
    for word in words:
        if word not in ("yes", "no"):
            raise argparse.ArgumentTypeError(f"{word!r} is neither yes nor no")
    return tuple(word == "yes" for word in words)
