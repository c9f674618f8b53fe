"""An installed SGLang's own dispatcher through the plugin, without a GPU and without the rest of the engine.

Three files of SGLang are run as they are: the dispatcher, the base class of dispatchers and the communicator that it
hands on. What they import of the engine beyond each other is stood in for: see `engine_around`.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from a2a.placement import Placement
from a2a.quant import ScaleLayout, unswizzle_scales, wire_format

DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
TOP_K, NUM_EXPERTS, HIDDEN, MOST = 2, 5, 64, 16
COUNTS = ((3, 5), (4, 0))
GLOBAL_SCALE = 21.0


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the dispatchers of the installed SGLang lie. Skips, saying what is missing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed here")
    found = Path(spec.submodule_search_locations[0]).joinpath(*DISPATCHERS.split(".")[1:])
    dispatcher = found / "flashinfer.py"
    if not dispatcher.exists() or "MoeAlltoAll" not in dispatcher.read_text():
        pytest.skip(f"the installed SGLang has no dispatcher over MoeAlltoAll at {dispatcher}")
    return found


class TopK(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Any


class DispatchType(enum.Enum):
    BF16 = "bf16"
    NVFP4 = "nvfp4"
    MXFP8 = "mxfp8"


class Runner:
    """Answers the engine's questions `is_...()` about one runner."""

    def __init__(self, name: str) -> None:
        self.name = self.value = name

    def __getattr__(self, question: str) -> Any:
        return lambda: question == f"is_{self.name}"


class CombineInput(NamedTuple):
    hidden_states: Tensor
    format: str = "flashinfer"


def fp4_quantize(rows: Tensor, scale: Tensor, is_sf_swizzled_layout: bool) -> tuple[Tensor, Tensor]:
    data, scales = wire_format("nvfp4").quantize(rows, global_scale=scale)
    return data, scales.view(torch.uint8)


def engine_around(folder: str) -> types.SimpleNamespace:
    """What the three files import of the engine. Returns the answers that a test may change."""
    now = types.SimpleNamespace(counts=(1, 1), kind=DispatchType.BF16, draft=False)
    answers: dict[str, dict[str, Any]] = {
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda verb: verb},
        "sglang.srt.arg_groups.overrides": {"flashinfer_a2a_max_dispatch_tokens_per_rank": lambda tokens: tokens},
        "sglang.srt.layers.dp_attention": {
            "get_dp_global_num_tokens": lambda: list(now.counts),
            "get_is_extend_in_batch": lambda: False,
            "is_dp_attention_enabled": lambda: True,
        },
        f"{DISPATCHERS}.standard": {
            "StandardCombineInput": CombineInput,
            "StandardDispatcher": lambda config: None,
            "StandardDispatchOutput": tuple,
        },
        "sglang.srt.layers.moe.topk": {
            "StandardTopKOutput": TopK,
            "TopKOutput": Any,
            "TopKOutputChecker": types.SimpleNamespace(
                format_is_bypassed=lambda topk: False, format_is_standard=lambda topk: True
            ),
        },
        "sglang.srt.layers.moe.utils": {
            "FlashinferA2ADispatchType": DispatchType,
            "get_flashinfer_a2a_dispatch_type": lambda: now.kind,
        },
        "sglang.srt.runtime_context": {
            "get_flags": lambda: types.SimpleNamespace(moe=types.SimpleNamespace(speculative_context=now.draft)),
            "get_forward": lambda: types.SimpleNamespace(sp_active=False),
            "get_parallel": lambda: types.SimpleNamespace(attn_tp_size=1),
            "get_spec": lambda: types.SimpleNamespace(speculative_algorithm=None),
            "max_prefill_buffer_tokens": lambda: MOST,
        },
        "sglang.srt.speculative.spec_info": {
            "SpeculativeAlgorithm": types.SimpleNamespace(
                from_string=lambda name: types.SimpleNamespace(is_eagle=lambda: False)
            )
        },
        "sglang.srt.utils": {"is_flashinfer_available": lambda: True},
        "sglang.srt.layers.quantization.fp4_utils": {"fp4_quantize": fp4_quantize},
        DISPATCHERS: {"__path__": [folder]},
    }
    for name in answers:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            parent.__dict__.setdefault("__path__", [])
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(answers[name])
    base = importlib.import_module(f"{DISPATCHERS}.base")
    names = ("BaseDispatcher", "CombineInput", "CombineInputFormat", "DispatchOutput", "DispatchOutputFormat")
    sys.modules[DISPATCHERS].__dict__.update({name: getattr(base, name) for name in names})
    return now


def exchange(dispatcher: Any, rank: int, counts: tuple[int, ...], kind: str, runner: str) -> None:
    generator = torch.Generator().manual_seed(rank)
    n, most = counts[rank], max(counts)
    rows = torch.randn((n, HIDDEN), generator=generator).bfloat16()
    ids = torch.randint(0, NUM_EXPERTS, (n, TOP_K), generator=generator)
    got = dispatcher.dispatch(rows, TopK(torch.rand((n, TOP_K), generator=generator), ids, None))
    wire, made, wanted = wire_format(kind), got.hidden_states, rows
    scale = {"global_scale": torch.tensor(GLOBAL_SCALE)} if kind == "nvfp4" else {}
    if wire.scales_dtype is not None:
        scales, cols = got.hidden_states_scale, wire.scales_width(HIDDEN)
        if runner == "flashinfer_cutlass" and kind == "nvfp4":
            scales = unswizzle_scales(
                scales.view(ScaleLayout.SWIZZLED_128X4.shape(made.shape[0], cols)),
                ScaleLayout.SWIZZLED_128X4, made.shape[0], cols,
            )  # fmt: skip
        made = wire.dequantize(made, scales.view(wire.scales_dtype), dtype=torch.bfloat16, **scale)
        wanted = wire.dequantize(*wire.quantize(rows, **scale), dtype=torch.bfloat16, **scale)
    assert made.shape == (2 * most, HIDDEN) and got.topk_output.topk_ids.shape == (2 * most, TOP_K)
    counts_here = (dispatcher.moe if hasattr(dispatcher, "moe") else dispatcher.moe_a2a.rounds).recv_counts
    empty = (torch.arange(most)[None] >= counts_here[:, None]).flatten()
    invalid = NUM_EXPERTS if runner == "flashinfer_cutlass" else -1
    assert (got.topk_output.topk_ids[empty] == invalid).all()
    assert (got.moe_output is not None) == (runner == "flashinfer_cutlass")
    made = made.clone() if got.moe_output is None else got.moe_output.copy_(made)
    combined = dispatcher.combine(CombineInput(made))
    table = torch.as_tensor(Placement.contiguous(NUM_EXPERTS, 2).table)
    times = torch.tensor([len({int(table[each]) for each in row}) for row in ids], dtype=torch.float32)[:, None]
    assert torch.equal(combined, (wanted.float() * times).bfloat16())


def through_the_plugin(comm: Any, folder: str, store: str) -> list[str]:
    from a2a.integrations import sglang as adapter
    from a2a.integrations.flashinfer import MoeAlltoAll

    adapter.register()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=comm.Get_rank(), world_size=2)
    now = engine_around(folder)
    module = importlib.import_module(f"{DISPATCHERS}.flashinfer")
    assert module.use_flashinfer and module.MoeAlltoAll.__wrapped__ is MoeAlltoAll
    quant = {"input_global_scale": torch.tensor(GLOBAL_SCALE), "use_mxfp8": True}

    def build(runner: str) -> Any:
        config = types.SimpleNamespace(runner_backend=Runner(runner))
        made = module.FlashinferDispatcher(
            dist.group.WORLD, TOP_K, num_experts=NUM_EXPERTS, hidden_size=HIDDEN, moe_runner_config=config
        )
        made.prefill_dispatcher = types.SimpleNamespace(set_quant_config=lambda quant: None)
        made.set_quant_config(quant)
        return made

    # FlashInfer's own quantising and swizzling, which a real installation brings, want CUDA tensors.
    kinds = [DispatchType.BF16] if hasattr(sys.modules["flashinfer"], "__file__") else list(DispatchType)
    exchanges, served = set(), []
    for now.kind in kinds:
        for runner in ("flashinfer_trtllm_routed", "flashinfer_cutlass"):
            dispatcher = build(runner)
            exchanges.add(dispatcher.moe_a2a.rounds)
            for now.counts in COUNTS:
                exchange(dispatcher, comm.Get_rank(), now.counts, now.kind.value, runner)
            served.append(f"{now.kind.value} {runner}")
    assert len(exchanges) == 1, "layers share one workspace"
    ours = adapter.dispatcher_class(module.BaseDispatcher, adapter.installed_engine)
    arguments = [set(inspect.signature(each).parameters) for each in (module.FlashinferDispatcher, adapter.Dispatcher)]
    assert arguments[0] <= arguments[1], "what the engine's layers may pass"
    for now.kind in DispatchType:
        for runner in ("flashinfer_trtllm_routed", "flashinfer_cutlass"):
            config = types.SimpleNamespace(runner_backend=Runner(runner))
            layer = ours(dist.group.WORLD, TOP_K, num_experts=NUM_EXPERTS, hidden_size=HIDDEN, moe_runner_config=config)
            layer.set_quant_config(quant)
            for now.counts in COUNTS:
                exchange(layer, comm.Get_rank(), now.counts, now.kind.value, runner)
    ours.exchanges.close()
    now.kind, now.draft = kinds[-1], True
    draft = build("flashinfer_cutlass")
    assert draft.moe_a2a.rounds not in exchanges, "a model that drafts has its own"
    exchange(draft, comm.Get_rank(), now.counts, now.kind.value, "flashinfer_cutlass")
    assert draft.moe_a2a.rounds.transport == "host" or torch.cuda.is_available()
    dist.destroy_process_group()
    return served


def test_its_own_dispatcher_builds_and_exchanges(run_ranks: Any, folder: Path, tmp_path: Path) -> None:
    served = run_ranks(through_the_plugin, 2, str(folder), str(tmp_path / "store"))
    assert served[0] == served[1] and served[0][0] == "bf16 flashinfer_trtllm_routed"
    assert len(served[0]) == (2 if importlib.util.find_spec("flashinfer") else 2 * len(DispatchType))
