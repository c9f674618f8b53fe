"""An MoE layer as SGLang drives it, on the host transport: dispatch, identity experts, combine; and its arguments."""

from __future__ import annotations

import abc
import dataclasses
import enum
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError, StateError
from a2a.integrations.sglang import Engine, dispatcher_class, resolve_config
from a2a.placement import Placement
from a2a.quant import ScaleLayout, unswizzle_scales, wire_format

NUM_RANKS, TOP_K, NUM_EXPERTS, MOST, HIDDEN = 3, 2, 7, 8, 64


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


class BaseDispatcher(abc.ABC):
    """The shape of the engine's base class."""

    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}
        self.runner_backend = None

    @abc.abstractmethod
    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any: ...

    @abc.abstractmethod
    def combine(self, combine_input: Any) -> Tensor: ...

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config


class DispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: Any
    moe_output: Tensor | None = None
    output_dtype: torch.dtype | None = None


class TopK(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Any


class Runner(enum.Enum):
    TRTLLM = "flashinfer_trtllm_routed"
    CUTLASS = "flashinfer_cutlass"
    TRITON = "triton"


@dataclasses.dataclass
class Forward:
    """The running forward pass and the process's arguments, as a test sets them."""

    dispatch_type: str = "bf16"
    tokens: int | None = None
    draft: bool = False

    def engine(self) -> Engine:
        return Engine(
            dispatch_output=DispatchOutput,
            topk_output=TopK,
            materialize=lambda topk: topk() if callable(topk) else topk,
            max_num_tokens=lambda: MOST,
            dispatch_type=lambda: self.dispatch_type,
            is_draft_model=lambda: self.draft,
            tokens_per_rank=lambda: self.tokens,
        )


def build(cls: type, comm: Any, runner: Runner | None, hidden: int = HIDDEN, **more: Any) -> Any:
    config = None if runner is None else types.SimpleNamespace(runner_backend=runner)
    return cls(
        group=comm, router_topk=TOP_K, num_experts=NUM_EXPERTS, num_local_experts=None, hidden_size=hidden,
        params_dtype=torch.bfloat16, moe_runner_config=config, **more,
    )  # fmt: skip


def tokens(rank: int, n: int) -> tuple[Tensor, TopK]:
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn((n, HIDDEN), generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (n, TOP_K), generator=generator)
    return rows, TopK(torch.rand((n, TOP_K), generator=generator), ids, "logits")


def times_of(ids: Tensor) -> Tensor:
    table = torch.as_tensor(Placement.contiguous(NUM_EXPERTS, NUM_RANKS).table)
    return torch.tensor([len({int(table[each]) for each in row if each >= 0}) for row in ids])[:, None].float()


QUANT: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nvfp4": {"input_global_scale": torch.tensor([21.0])},
    "mxfp8": {"use_mxfp8": True},
}


def every_format(comm: Any, kind: str, counts: Sequence[int]) -> list[str]:
    forward = Forward(kind, max(counts) or None)
    cls = dispatcher_class(BaseDispatcher, forward.engine)
    rank, wire = comm.Get_rank(), wire_format(kind)
    rows, topk = tokens(rank, counts[rank])
    wanted_rows, scales = (rows, None) if kind == "bf16" else wire.quantize(rows, **_scale(kind))
    if scales is not None:
        wanted_rows = wire.dequantize(wanted_rows, scales, dtype=torch.bfloat16, **_scale(kind))
    seen = []
    for runner in (Runner.TRTLLM, Runner.CUTLASS, Runner.TRITON, None):
        dispatcher = build(cls, comm, runner)
        assert isinstance(dispatcher, BaseDispatcher)
        dispatcher.set_quant_config(QUANT[kind])
        assert dispatcher.quant_config == QUANT[kind]
        seen.append(round_of(dispatcher, runner, kind, rows, topk, wanted_rows, max(1, *counts)))
    workspaces = {each._exchange.moe.workspace.data_ptr() for each in [dispatcher, build(cls, comm, None)]}
    assert len(workspaces) == 1, "layers share one workspace"
    forward.draft = True
    draft = build(cls, comm, None)
    forward.draft = False
    prefill = build(cls, comm, None, enable_sp_prefill_a2a=True)
    assert len({each.moe.workspace.data_ptr() for each in (draft, prefill)} - workspaces) == 2, "rounds side by side"
    cls.exchanges.close()
    return seen


def round_of(dispatcher: Any, runner: Any, kind: str, rows: Tensor, topk: TopK, back: Tensor, most: int) -> str:
    invalid = -1 if runner is Runner.TRTLLM else NUM_EXPERTS
    got = dispatcher.dispatch(hidden_states=rows, topk_output=lambda: topk)
    assert got.hidden_states.shape[0] == got.topk_output.topk_ids.shape[0] == NUM_RANKS * most
    assert got.topk_output.topk_ids.dtype == torch.int32 and got.output_dtype == torch.bfloat16
    assert got.topk_output.router_logits == "logits"
    filled = (torch.arange(most)[None] < dispatcher.moe.recv_counts[:, None]).flatten()
    assert (got.topk_output.topk_ids[~filled] == invalid).all()
    made, scales = got.hidden_states, got.hidden_states_scale
    if scales is not None:
        assert scales.dtype == torch.uint8
        wire = wire_format(kind)
        if kind == "nvfp4" and runner is Runner.CUTLASS:
            scales = unswizzle_scales(scales, ScaleLayout.SWIZZLED_128X4, made.shape[0], wire.scales_width(HIDDEN))
        if wire.scales_dtype is not None:
            made = wire.dequantize(made, scales.view(wire.scales_dtype), dtype=torch.bfloat16, **_scale(kind))
    made = torch.where(filled[:, None], made, float("nan"))
    assert (got.moe_output is not None) == (runner is Runner.CUTLASS)
    if got.moe_output is not None:
        made = got.moe_output.copy_(made)
    combined = dispatcher.combine(types.SimpleNamespace(hidden_states=made))
    assert torch.equal(combined, (back.float() * times_of(topk.topk_ids)).bfloat16())
    return str(runner)


def _scale(kind: str) -> dict[str, Any]:
    return {"global_scale": QUANT[kind]["input_global_scale"].reshape(())} if kind == "nvfp4" else {}


@pytest.mark.parametrize("kind", QUANT)
@pytest.mark.parametrize("counts", [(5, 1, 8), (4, 0, 2), (0, 0, 0)], ids=str)
def test_every_format_and_runner(run_ranks: Any, kind: str, counts: tuple[int, ...]) -> None:
    assert len(run_ranks(every_format, NUM_RANKS, kind, counts)) == NUM_RANKS


def layers_of_another_kind_and_halves(comm: Any) -> None:
    forward = Forward("mxfp8", 4)
    cls = dispatcher_class(BaseDispatcher, forward.engine)
    dispatcher = build(cls, comm, Runner.TRTLLM)
    rows, topk = tokens(comm.Get_rank(), 4)
    for quant in ({}, {"use_mxfp8": False}, {"input_global_scale": torch.ones(1)}):
        dispatcher.set_quant_config(quant)
        assert dispatcher.row_format().name == "bf16", "a layer of another kind sends 16-bit rows"
    with pytest.raises(StateError, match="combine_a"):
        dispatcher.combine(types.SimpleNamespace(hidden_states=rows))
    with pytest.raises(StateError, match="dispatch_b"):
        dispatcher.dispatch_b()
    dispatcher.dispatch_a(rows, topk)
    got = dispatcher.dispatch_b()
    with pytest.raises(StateError, match="dispatch_b"):
        dispatcher.dispatch_b()
    dispatcher.combine_a(types.SimpleNamespace(hidden_states=got.hidden_states.clone()))
    assert torch.equal(dispatcher.combine_b(), (rows.float() * times_of(topk.topk_ids)).bfloat16())
    with pytest.raises(StateError, match="combine_b"):
        dispatcher.combine_b()
    with pytest.raises(ShapeError, match=r"torch\.float32"):
        dispatcher.dispatch(rows.float(), topk)
    dispatcher.set_quant_config({"weight_dtype": torch.float8_e4m3fn})
    with pytest.raises(ShapeError, match=r"wanted torch\.bfloat16 for runner flashinfer_trtllm_routed"):
        dispatcher.dispatch(rows.half(), topk)
    wider = build(cls, comm, Runner.TRTLLM, 2 * HIDDEN)
    assert wider.moe is dispatcher.moe and wider.moe.hidden_size == 2 * HIDDEN
    forward.dispatch_type = "auto"
    with pytest.raises(ConfigError, match="resolved from 'auto'"):
        build(cls, comm, None).dispatch(rows, topk)
    cls.exchanges.close()


def test_fallbacks_halves_and_errors(run_ranks: Any) -> None:
    run_ranks(layers_of_another_kind_and_halves, NUM_RANKS)


# ---- the plugin ----------------------------------------------------------------------------------------------------

DISPATCHER = """
try:
    from flashinfer import nvfp4_block_scale_interleave
    from flashinfer.comm import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import CommBackend, MnnvlConfig
    use_flashinfer = True
except ImportError:
    use_flashinfer = False
"""

DRIVER = """
import sys, torch
import a2a.integrations.sglang as adapter
adapter.register(); adapter.register()
assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"], "imports nothing of SGLang"
from sglang.srt.layers.moe.token_dispatcher import flashinfer as theirs
from a2a.comm.protocol import SingleComm
adapter.register()
from a2a.integrations.flashinfer import MoeAlltoAll
assert theirs.use_flashinfer and theirs.MoeAlltoAll.__wrapped__ is MoeAlltoAll, theirs.MoeAlltoAll

size = theirs.moe_a2a_get_workspace_size_per_rank(1, 8, 64 * 2 + 16, 64 * 2)
def layer(size=size):
    mapping = theirs.Mapping(world_size=1, rank=0, tp_size=1, moe_ep_size=1, gpus_per_node=0)
    config = theirs.MnnvlConfig(comm_backend=SingleComm())
    return theirs.MoeAlltoAll(mapping, max_num_tokens=8, top_k=2, num_experts=4, workspace_size_per_rank=size,
                              mnnvl_config=config)

torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    first = layer()
torch.set_default_dtype(torch.float32)
again, larger = layer(), layer(size + 128)
assert again.rounds is first.rounds and larger.rounds is not first.rounds, "equal arguments share a workspace"
rows, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
received, _ = first.dispatch(ids, [rows, ids], 3, invalid_token_expert_id=-1, expert_id_payload_index=1)
assert torch.equal(first.combine(received.clone(), 3), rows)
print("served")
"""


def test_the_plugin_serves_the_engines_own_dispatcher(tmp_path: Path) -> None:
    folder = tmp_path / "sglang/srt/layers/moe/token_dispatcher"
    folder.mkdir(parents=True)
    for each in (folder, *list(folder.parents)[:4]):
        (each / "__init__.py").touch()
    (folder / "flashinfer.py").write_text(DISPATCHER)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    path = [str(tmp_path), str(Path(__file__).resolve().parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; exec(open({str(driver)!r}).read())"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "served" in done.stdout, done.stdout + done.stderr


# ---- arguments ---------------------------------------------------------------------------------------------------

ON = {"moe_a2a_backend": "flashinfer", "tp_size": 8, "ep_size": 8, "attn_dp_size": 8}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"moe_runner_backend": "flashinfer_cutlass"}, ("bf16", "flashinfer_cutlass")),
        ({"moe_runner_backend": "flashinfer_cutlass", "quantization": "modelopt_fp4"}, ("nvfp4", "flashinfer_cutlass")),
        ({"quantization": "modelopt_fp4", "is_consumer_blackwell": True}, ("nvfp4", "flashinfer_cutlass")),
        (
            {"moe_runner_backend": "flashinfer_cutedsl", "quantization": "modelopt_fp4", "cutedsl_w4a16": True},
            ("bf16", "flashinfer_cutedsl"),
        ),
        (
            {"moe_runner_backend": "deep_gemm", "quantization": "fp8", "nvfp4_dispatch_variable": True},
            ("nvfp4", "deep_gemm"),
        ),
        ({"quantization": "mxfp8"}, ("bf16", "flashinfer_trtllm")),
        (
            {"quantization": "mxfp8", "flashinfer_a2a_dispatch_type": "auto"},
            ("mxfp8", "flashinfer_trtllm_routed"),
        ),
        (
            {"quantization": "mxfp8", "flashinfer_a2a_dispatch_type": "bf16"},
            ("bf16", "flashinfer_trtllm_routed"),
        ),
        (
            {"moe_runner_backend": "flashinfer_cutlass", "flashinfer_a2a_dispatch_type": "auto", "has_nvfp4_moe": True},
            ("nvfp4", "flashinfer_cutlass"),
        ),
        (
            {"moe_runner_backend": "deep_gemm", "quantization": "fp8", "flashinfer_a2a_dispatch_type": "auto"},
            ("bf16", "deep_gemm"),
        ),
        # Of runners that the user names, those without mxfp8 experts give way.
        ({"moe_runner_backend": "deep_gemm", "quantization": "mxfp8"}, ("bf16", "deep_gemm")),
        ({"moe_runner_backend": "triton", "quantization": "mxfp8"}, ("bf16", "flashinfer_trtllm")),
        (
            {
                "moe_runner_backend": "flashinfer_cutedsl",
                "quantization": "mxfp8",
                "flashinfer_a2a_dispatch_type": "mxfp8",
                "cutedsl_w4a16": True,
            },
            ("mxfp8", "flashinfer_trtllm_routed"),
        ),
        ({"moe_runner_backend": "flashinfer_cutedsl", "quantization": "nvfp4_online"}, ("bf16", "flashinfer_cutedsl")),
        (
            {"moe_runner_backend": "flashinfer_cutedsl", "quantization": "fp8", "has_nvfp4_moe": True},
            ("nvfp4", "flashinfer_cutedsl"),
        ),
        # The routed one, which the other becomes, is not asked what experts it takes by itself.
        (
            {
                "moe_runner_backend": "flashinfer_trtllm",
                "quantization": "compressed-tensors",
                "flashinfer_a2a_dispatch_type": "bf16",
            },
            ("bf16", "flashinfer_trtllm_routed"),
        ),
    ],
    ids=str,
)
def test_arguments_that_go_together(arguments: dict[str, Any], wanted: tuple[str, str]) -> None:
    resolved = resolve_config(**ON, **arguments)
    assert (resolved.dispatch_type, resolved.moe_runner_backend, resolved.ep_size) == (*wanted, 8)
    changed = resolved.moe_runner_backend != arguments.get("moe_runner_backend", "auto")
    assert any("runner" in each for each in resolved.reasons) == changed
    asked = arguments.get("flashinfer_a2a_dispatch_type") in ("bf16", "nvfp4", "mxfp8")
    assert any(f"dispatch type {wanted[0]}" in each for each in resolved.reasons) != asked


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ({"moe_runner_backend": "triton"}, ["one of flashinfer_cutlass"]),
        ({}, ["one of flashinfer_cutlass"]),
        (
            {"moe_runner_backend": "deep_gemm", "flashinfer_a2a_dispatch_type": "mxfp8", "quantization": "fp8"},
            ["quantization mxfp8", "flashinfer_trtllm_routed"],
        ),
        (
            {"moe_runner_backend": "deep_gemm", "flashinfer_a2a_dispatch_type": "nvfp4"},
            ["NVFP4 experts"],
        ),
        (
            {"moe_runner_backend": "deep_gemm", "flashinfer_a2a_dispatch_type": "int8"},
            ["one of auto, bf16, nvfp4, mxfp8"],
        ),
        (
            {
                "moe_runner_backend": "flashinfer_cutlass",
                "flashinfer_a2a_dispatch_type": "auto",
                "nvfp4_dispatch_variable": False,
            },
            ["SGLANG_MOE_NVFP4_DISPATCH"],
        ),
        (
            {
                "moe_runner_backend": "flashinfer_cutedsl",
                "quantization": "modelopt_fp4",
                "cutedsl_w4a16": True,
                "flashinfer_a2a_dispatch_type": "nvfp4",
            },
            ["bf16 rows for CuTe DSL"],
        ),
        (
            {"moe_runner_backend": "deep_gemm", "attn_dp_size": 4, "chunked_prefill_size": -1},
            ["attn_dp_size equal to tp_size 8", "chunked_prefill_size"],
        ),
        ({"moe_runner_backend": "flashinfer_cutlass", "quantization": "fp8"}, ["one of None, modelopt_fp4"]),
        ({"moe_runner_backend": "flashinfer_cutedsl"}, ["one of modelopt_fp4", "flashinfer_cutedsl"]),
        ({"moe_runner_backend": "flashinfer_trtllm", "quantization": "minimax_m3_nvfp4"}, ["compressed-tensors"]),
        ({"moe_runner_backend": "flashinfer_trtllm_routed", "quantization": "modelopt_fp8"}, ["minimax_m3_nvfp4"]),
        ({"moe_runner_backend": "deep_gemm", "quantization": "nvfp4_online"}, ["flashinfer_cutedsl for nvfp4_online"]),
        ({"quantization": "nvfp4_online", "is_consumer_blackwell": True}, ["SM100 or SM103"]),
        ({"moe_runner_backend": "flashinfer_cutlass", "ep_size": 2}, ["ep_size 1 or tp_size 8"]),
        ({"moe_runner_backend": "deep_gemm", "tp_size": 1, "ep_size": 1, "attn_dp_size": 1}, ["above 1"]),
        (
            {
                "moe_runner_backend": "deep_gemm",
                "tp_size": 2,
                "ep_size": 2,
                "attn_dp_size": 1,
                "sequence_parallel_prefill": True,
            },
            ["on 4 or 8 ranks"],
        ),
    ],
    ids=str,
)
def test_arguments_that_exclude_each_other(arguments: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(**{**ON, **arguments})
    assert all(each in str(caught.value) for each in reasons), caught.value


def test_other_back_ends_are_left_alone() -> None:
    left = resolve_config(moe_a2a_backend="deepep", moe_runner_backend="triton", ep_size=2)
    assert (left.dispatch_type, left.moe_runner_backend, left.ep_size, left.reasons) == (None, "triton", 2, ())
    with pytest.raises(ConfigError, match="only with moe_a2a_backend flashinfer"):
        resolve_config(moe_a2a_backend="deepep", flashinfer_a2a_dispatch_type="bf16")


def test_groups_without_attention_in_parallel() -> None:
    on = {**ON, "attn_dp_size": 1, "moe_runner_backend": "deep_gemm"}
    assert resolve_config(**on, sequence_parallel_prefill=True).dispatch_type == "bf16"
    decode = resolve_config(**{**on, "attn_dp_size": 8}, chunked_prefill_size=0, disaggregation_mode="decode")
    assert decode.ep_size == 8
    adjusted = resolve_config(**{**on, "attn_dp_size": 8, "ep_size": 2})
    assert adjusted.ep_size == 8 and any("ep_size 8" in each for each in adjusted.reasons)
