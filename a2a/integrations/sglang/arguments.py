"""integrations/sglang/arguments: which of SGLang's arguments go together with `--moe-a2a-backend flashinfer`.

Owns the rules of releases 0.5.2x: what is chosen where the user chose nothing, and what is an error. Refuses to read
the engine's configuration: the answer depends on the arguments alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from a2a.errors import ConfigError

BACKEND: Final = "flashinfer"
DISPATCH_TYPES: Final = ("bf16", "nvfp4", "mxfp8")
RUNNERS: Final = (
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
    "deep_gemm",
)
"""Runners that take rows of this back end."""

DROPS_NEGATIVE_IDS: Final = ("deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed")
"""Runners for which a slot that no token fills has the id -1; for the others it has `num_experts`."""

WRITES_IN_PLACE: Final = ("flashinfer_cutlass",)
"""Runners that take a tensor to write into, and are given the combine area."""

QUANTIZATIONS: Final[Mapping[str, tuple[str | None, ...]]] = MappingProxyType(
    {
        "flashinfer_cutlass": (None, "modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
        "flashinfer_cutedsl": ("modelopt_fp4", "modelopt_mixed", "nvfp4_online"),
        "flashinfer_trtllm": (
            None,
            "compressed-tensors",
            "fp8",
            "modelopt_fp4",
            "modelopt_fp8",
            "modelopt_mixed",
            "mxfp8",
            "nvfp4_online",
        ),
        "flashinfer_trtllm_routed": (
            None,
            "fp8",
            "minimax_m3_nvfp4",
            "modelopt_fp4",
            "modelopt_mixed",
            "mxfp8",
            "nvfp4_online",
        ),
    }
)
"""Quantisations that a runner takes where the user names it, None being 16-bit weights; runners not here take any."""

NVFP4_ONLINE_RUNNERS: Final = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")
"""Runners of experts that become NVFP4 when they are loaded."""

MXFP8_RUNNERS: Final = (
    "cutlass",
    "deep_gemm",
    "flashinfer_megamoe",
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
)
"""Runners of mxfp8 experts; another one that the user names gives way to `flashinfer_trtllm`."""

SEQUENCE_PARALLEL_RANKS: Final = (4, 8)
"""Sizes of a group whose model may shard sequences."""


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What the engine runs with.

    Attributes:
        dispatch_type: format of the rows on the wire; None where another back end moves them.
        moe_runner_backend: the runner of the experts.
        ep_size: ranks of the exchange.
        reasons: why each value that the user did not give is what it is.
    """

    dispatch_type: str | None
    moe_runner_backend: str
    ep_size: int
    reasons: tuple[str, ...] = ()


def resolve_config(
    *,
    moe_a2a_backend: str,
    moe_runner_backend: str = "auto",
    quantization: str | None = None,
    flashinfer_a2a_dispatch_type: str | None = None,
    has_nvfp4_moe: bool = False,
    nvfp4_dispatch_variable: bool | None = None,
    cutedsl_w4a16: bool = False,
    tp_size: int = 1,
    ep_size: int = 1,
    attn_dp_size: int | None = None,
    sequence_parallel_prefill: bool = False,
    chunked_prefill_size: int = 8192,
    disaggregation_mode: str = "null",
    is_consumer_blackwell: bool = False,
) -> Resolved:
    """Resolve the arguments of an engine, or say everything that is wrong with them.

    Args:
        moe_a2a_backend, moe_runner_backend, quantization, tp_size, ep_size, attn_dp_size, chunked_prefill_size,
            disaggregation_mode: the engine's arguments of these names; attn_dp_size None for no data parallelism of
            attention.
        flashinfer_a2a_dispatch_type: None where the user gave none, which is not the same as "auto".
        has_nvfp4_moe: the checkpoint has NVFP4 experts beside layers of other kinds.
        nvfp4_dispatch_variable: SGLANG_MOE_NVFP4_DISPATCH; None where it is not set.
        cutedsl_w4a16: SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16: experts of 4-bit weights that take 16-bit rows.
        sequence_parallel_prefill: the model shards sequences evenly over the ranks, in place of attention's data
            parallelism; on 4 or 8 ranks.
        is_consumer_blackwell: SM110 or SM120.

    Returns:
        What the engine runs with; with another back end, the arguments as they are.

    Raises:
        ConfigError: the arguments exclude each other; `wanted` has every reason.
    """
    if moe_a2a_backend != BACKEND:
        if flashinfer_a2a_dispatch_type not in (None, "auto"):
            raise _error(
                {"moe_a2a_backend": moe_a2a_backend, "flashinfer_a2a_dispatch_type": flashinfer_a2a_dispatch_type},
                [f"flashinfer_a2a_dispatch_type only with moe_a2a_backend {BACKEND}"],
            )
        return Resolved(None, moe_runner_backend, ep_size)
    reasons: list[str] = []
    wrong = _topology(tp_size, attn_dp_size, sequence_parallel_prefill, chunked_prefill_size, disaggregation_mode)
    if ep_size != tp_size:
        reasons.append(f"ep_size {tp_size}: all {tp_size} tensor-parallel ranks exchange tokens")
    runner = _runner(moe_runner_backend, quantization, is_consumer_blackwell, reasons)
    wrong += _unfit_experts(runner, quantization, has_nvfp4_moe, is_consumer_blackwell)
    if runner in ("flashinfer_cutlass", "flashinfer_cutedsl") and ep_size not in (1, tp_size):
        wrong.append(f"ep_size 1 or tp_size {tp_size} with moe_runner_backend {runner}")
    if runner == "flashinfer_trtllm" and flashinfer_a2a_dispatch_type is not None:
        runner = "flashinfer_trtllm_routed"
        reasons.append(f"moe_runner_backend {runner}: rows arrive with ids and weights chosen")
    is_nvfp4 = quantization == "modelopt_fp4" or has_nvfp4_moe
    w4a16 = cutedsl_w4a16 and runner == "flashinfer_cutedsl"
    if w4a16 and (nvfp4_dispatch_variable or flashinfer_a2a_dispatch_type in ("auto", "nvfp4")):
        wrong.append("bf16 rows for CuTe DSL experts of 4-bit weights that take 16-bit rows")
    if flashinfer_a2a_dispatch_type is None:
        dispatch_type = _undemanded_type(is_nvfp4 and not w4a16, nvfp4_dispatch_variable, reasons)
    else:
        if nvfp4_dispatch_variable is not None:
            wrong.append("either SGLANG_MOE_NVFP4_DISPATCH or flashinfer_a2a_dispatch_type, not both")
        dispatch_type = _demanded_type(flashinfer_a2a_dispatch_type, quantization, is_nvfp4, reasons)
        wrong += _mismatches(dispatch_type, runner, quantization, is_nvfp4)
    if runner not in RUNNERS:
        wrong.append("moe_runner_backend one of " + ", ".join(RUNNERS))
    if wrong:
        given: dict[str, object] = {
            "moe_runner_backend": moe_runner_backend,
            "quantization": quantization,
            "flashinfer_a2a_dispatch_type": flashinfer_a2a_dispatch_type,
            "tp_size": tp_size,
            "attn_dp_size": attn_dp_size,
        }
        raise _error(given, wrong)
    return Resolved(dispatch_type, runner, tp_size, tuple(reasons))


def _topology(
    tp_size: int, attn_dp_size: int | None, sequence_parallel: bool, chunked_prefill_size: int, disaggregation: str
) -> list[str]:
    wrong = []
    if attn_dp_size in (None, 1):
        if not sequence_parallel or tp_size not in SEQUENCE_PARALLEL_RANKS:
            ranks = " or ".join(map(str, SEQUENCE_PARALLEL_RANKS))
            wrong.append(
                f"attn_dp_size equal to tp_size {tp_size} and above 1, so that every rank knows how many tokens each "
                f"has, or sequence_parallel_prefill on {ranks} ranks"
            )
    elif attn_dp_size != tp_size:
        wrong.append(f"attn_dp_size equal to tp_size {tp_size}, so that every rank knows how many tokens each has")
    if disaggregation != "decode" and chunked_prefill_size <= 0:
        wrong.append("chunked_prefill_size above 0, since the workspace holds so many tokens and no more")
    return wrong


def _runner(asked: str, quantization: str | None, is_consumer_blackwell: bool, reasons: list[str]) -> str:
    if asked != "auto":
        if quantization != "mxfp8" or asked in MXFP8_RUNNERS:
            return asked
        reasons.append(f"moe_runner_backend flashinfer_trtllm: {asked} runs no mxfp8 experts")
        return "flashinfer_trtllm"
    runner = {"mxfp8": "flashinfer_trtllm", "nvfp4_online": "flashinfer_trtllm"}.get(quantization or "", "auto")
    if quantization == "modelopt_fp4" and is_consumer_blackwell:
        runner = "flashinfer_cutlass"
    if runner != "auto":
        reasons.append(f"moe_runner_backend {runner}: what {quantization} experts run on")
    return runner


def _unfit_experts(
    runner: str, quantization: str | None, has_nvfp4_moe: bool, is_consumer_blackwell: bool
) -> list[str]:
    wrong = []
    if quantization == "nvfp4_online":
        if is_consumer_blackwell:
            wrong.append("SM100 or SM103 for quantization nvfp4_online")
        if runner not in NVFP4_ONLINE_RUNNERS:
            wrong.append("moe_runner_backend one of " + ", ".join(NVFP4_ONLINE_RUNNERS) + " for nvfp4_online")
    allowed = QUANTIZATIONS.get(runner, (quantization,))
    if quantization not in allowed and not (runner == "flashinfer_cutedsl" and has_nvfp4_moe):
        names = ", ".join(str(each) for each in allowed)
        wrong.append(f"quantization one of {names} with moe_runner_backend {runner}")
    return wrong


def _undemanded_type(is_nvfp4: bool, variable: bool | None, reasons: list[str]) -> str:
    if variable is not None:
        chosen = "nvfp4" if variable else "bf16"
        reasons.append(f"dispatch type {chosen}: SGLANG_MOE_NVFP4_DISPATCH says so")
        return chosen
    chosen = "nvfp4" if is_nvfp4 else "bf16"
    reasons.append(f"dispatch type {chosen}: " + ("the experts are NVFP4" if is_nvfp4 else "none was asked for"))
    return chosen


def _demanded_type(asked: str, quantization: str | None, is_nvfp4: bool, reasons: list[str]) -> str:
    if asked != "auto":
        return asked
    chosen = "mxfp8" if quantization == "mxfp8" else "nvfp4" if is_nvfp4 else "bf16"
    why = "the experts are not quantised alike" if chosen == "bf16" else f"the experts are {chosen.upper()}"
    reasons.append(f"dispatch type {chosen}: {why}")
    return chosen


def _mismatches(dispatch_type: str, runner: str, quantization: str | None, is_nvfp4: bool) -> list[str]:
    wrong = []
    if dispatch_type not in DISPATCH_TYPES:
        wrong.append("flashinfer_a2a_dispatch_type one of auto, " + ", ".join(DISPATCH_TYPES))
    if dispatch_type == "mxfp8" and quantization != "mxfp8":
        wrong.append("quantization mxfp8 for mxfp8 rows")
    if dispatch_type == "mxfp8" and runner != "flashinfer_trtllm_routed":
        wrong.append("moe_runner_backend flashinfer_trtllm_routed for mxfp8 rows")
    if dispatch_type == "nvfp4" and not is_nvfp4:
        wrong.append("NVFP4 experts (quantization modelopt_fp4, or a checkpoint with some) for nvfp4 rows")
    return wrong


def _error(given: dict[str, object], wrong: list[str]) -> ConfigError:
    return ConfigError(what="arguments of SGLang", got=given, wanted="; ".join(wrong))
