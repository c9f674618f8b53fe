"""`resolve_config` against the functions of an installed SGLang that resolve the same arguments, for all of them.

The functions are cut out of its sources, since importing their modules takes the whole engine; what they ask of the
rest of it is stood in for: see `resolver`.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from a2a.errors import ConfigError
from a2a.integrations.sglang import resolve_config
from a2a.integrations.sglang.arguments import RUNNERS

FUNCTIONS = {
    "moe_hook.py": (
        "_flashinfer_a2a_topology_is_supported",
        "handle_moe_kernel_config",
        "handle_flashinfer_a2a_dispatch_type",
        "handle_a2a_moe",
    ),
    "overrides.py": ("_moe_runner_backend_quant_constraints", "_a2a_ep_size"),
}
VALUES: dict[str, tuple[Any, ...]] = {
    "moe_runner_backend": ("auto", "triton", *RUNNERS),
    "quantization": (
        *(None, "fp8", "mxfp8", "compressed-tensors", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
        *("nvfp4_online", "minimax_m3_nvfp4"),
    ),
    "flashinfer_a2a_dispatch_type": (None, "auto", "bf16", "nvfp4", "mxfp8"),
    "has_nvfp4_moe": (False, True),
    "nvfp4_dispatch_variable": (None, False, True),
    "cutedsl_w4a16": (False, True),
    "is_consumer_blackwell": (False, True),
}
GROUPS = ((8, 8, 8, False), (8, 2, 8, False), (8, 8, 1, True), (4, 4, 1, True), (2, 2, 1, True), (1, 1, 1, False),
          (8, 8, 4, False), (8, 8, 8, True))  # fmt: skip
"""tp_size, ep_size, attn_dp_size, sequence_parallel_prefill."""


@pytest.fixture(scope="module")
def sources() -> Path:
    """Where the installed SGLang resolves arguments. Skips, saying what is missing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed here")
    found = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups"
    if not (found / "choices.py").exists():
        pytest.skip(f"the installed SGLang resolves its arguments elsewhere than in {found}")
    return found


class Variable:
    """An environment variable of the engine's, of two values."""

    value: bool | None = None

    def is_set(self) -> bool:
        return self.value is not None

    def get(self) -> bool:
        return bool(self.value)

    def set(self, value: bool) -> None:
        self.value = value


def pieces(path: Path, names: tuple[str, ...]) -> list[ast.stmt]:
    """The functions and lists of these names, without the decorators that register them."""
    found: list[ast.stmt] = []
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.FunctionDef) and each.name in names:
            each.decorator_list = []
            found.append(each)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id in names:
            found.append(each)
    assert len(found) == len(names), f"{path} has not all of {names}"
    return found


def resolver(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Any]:
    """What its own functions make of arguments: dispatch type, runner and ep_size, or an error's text."""
    variables: dict[str, Variable] = {}
    environment = type("Environment", (), {"__getattr__": lambda self, name: variables.setdefault(name, Variable())})()
    platform = types.SimpleNamespace(is_npu=False, is_hip=False, is_sm110=False)

    def declare(arguments: Any, who: str, **values: Any) -> None:
        vars(arguments).update(values)

    def run(arguments: Any, resolve: Callable[[Any], dict[str, Any]] | None) -> None:
        declare(arguments, "", **({} if resolve is None else resolve(arguments)))

    def quiet(*words: Any) -> None:
        return None

    held: dict[str, Any] = {
        "Any": Any,
        "envs": environment,
        "logger": types.SimpleNamespace(info=quiet, warning=quiet),
        "get_platform": lambda: platform,
        "resolving_view": lambda arguments: arguments,
        "resolved_view": lambda arguments: arguments,
        "model_config_of": lambda arguments: arguments.model,
        "attn_dp_enabled_of": lambda arguments: arguments.attn_dp_size > 1,
        "declare_resolution": declare,
        "run_post_process_pass": run,
        "_A2A_EP_SPANNING_BACKENDS": ("flashinfer",),
        **dict.fromkeys(("_moe_runner_fusion_disable", "_a2a_backend_overrides", "_a2a_fusion_adjustments")),
    }
    body = [each for name, names in FUNCTIONS.items() for each in pieces(sources / name, names)]
    exec(compile(ast.Module(body, []), str(sources), "exec"), held)
    choices = ast.Module(pieces(sources / "choices.py", ("MXFP8_MOE_RUNNER_BACKEND_CHOICES",)), [])
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    exec(compile(choices, str(sources), "exec"), sys.modules["sglang.srt.server_args"].__dict__)

    def resolve(given: dict[str, Any]) -> Any:
        variables.clear()
        environment.SGLANG_MOE_NVFP4_DISPATCH.value = given["nvfp4_dispatch_variable"]
        environment.SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16.value = given["cutedsl_w4a16"]
        platform.is_sm120, platform.is_sm100 = given["is_consumer_blackwell"], not given["is_consumer_blackwell"]
        name = "MuseSparkForConditionalGeneration" if given["sequence_parallel_prefill"] else "Another"
        arguments = types.SimpleNamespace(
            **given,
            moe_a2a_backend="flashinfer",
            enable_layernorm_sp=given["sequence_parallel_prefill"],
            enable_waterfill=False,
            deepep_mode="auto",
            model=types.SimpleNamespace(
                nvfp4_moe_meta={} if given["has_nvfp4_moe"] else None,
                hf_config=types.SimpleNamespace(architectures=[name]),
            ),
        )
        try:
            held["handle_moe_kernel_config"](arguments)
            held["handle_a2a_moe"](arguments)
        except (AssertionError, ValueError) as error:
            return str(error)
        kind = arguments.flashinfer_a2a_dispatch_type
        if kind is None:
            kind = "nvfp4" if environment.SGLANG_MOE_NVFP4_DISPATCH.get() else "bf16"
        return kind, arguments.moe_runner_backend, arguments.ep_size

    return resolve


def test_all_arguments_resolve_as_its_own_functions_resolve_them(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = resolver(sources, monkeypatch)
    outcomes = {True: 0, False: 0}
    for group, *values in itertools.product(GROUPS, *VALUES.values()):
        names = ("tp_size", "ep_size", "attn_dp_size", "sequence_parallel_prefill")
        given = {**dict(zip(names, group, strict=True)), **dict(zip(VALUES, values, strict=True))}
        wanted = theirs(given)
        try:
            resolved = resolve_config(moe_a2a_backend="flashinfer", **given)
            got: Any = (resolved.dispatch_type, resolved.moe_runner_backend, resolved.ep_size)
        except ConfigError as error:
            got = str(error)
        refused = isinstance(wanted, str)
        assert isinstance(got, str) if refused else got == wanted, (given, wanted, got)
        outcomes[refused] += 1
    assert min(outcomes.values()) > 1000
