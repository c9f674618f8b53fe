"""The adapters against an installed vLLM: its own base classes and modular kernel, without a GPU.

Too heavy for CI. In an environment of its own: vLLM without its dependencies, a CPU build of torch, and the small
Python packages that an import of its MoE modules names one after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from a2a import env
from a2a.placement import Placement
from a2a.quant import wire_format

KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
TOP_K, NUM_EXPERTS, HIDDEN = 2, 5, 96
COUNTS = ((3, 5), (4, 0), (0, 0), (1, 1))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


@pytest.fixture(scope="module")
def vllm() -> str:
    """Skips, saying what is missing, unless vLLM's MoE modules can be imported."""
    try:
        importlib.import_module(KERNEL)
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        pytest.skip(f"vLLM's MoE modules cannot be imported here: {error}")


def tokens(rank: int, n: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(17 + rank)
    rows = torch.randn((n, hidden), generator=generator).bfloat16()
    ids = torch.randint(0, NUM_EXPERTS, (n, TOP_K), generator=generator, dtype=torch.int32)
    return rows, torch.rand((n, TOP_K), generator=generator), ids


def times_of(ids: Tensor) -> Tensor:
    table = torch.as_tensor(Placement.contiguous(NUM_EXPERTS, 2).table)
    return torch.tensor([len({int(table[each]) for each in row}) for row in ids], dtype=torch.float32)[:, None]


def stand_in_for_the_engine(comm: Any, store: str) -> Any:
    """The least of a running engine: groups, forward context, configuration. Returns what sets the ranks' counts."""
    import vllm.config.vllm as config
    import vllm.distributed.parallel_state as groups
    import vllm.forward_context as forward

    rank, size = comm.Get_rank(), comm.Get_size()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    config._current_vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(num_ubatches=1))
    groups._DP = types.SimpleNamespace(rank_in_group=rank, world_size=size)
    groups._TP = types.SimpleNamespace(rank_in_group=0, world_size=1)
    groups._EP = types.SimpleNamespace(device_communicator=types.SimpleNamespace(all2all_manager=None))

    def set_sizes(counts: tuple[int, ...]) -> None:
        metadata = forward.DPMetadata(torch.tensor(counts), local_sizes=list(counts))
        forward._forward_context = types.SimpleNamespace(dp_metadata=metadata)

    return set_sizes


def play(layer: Any, rank: int, counts: tuple[int, ...], quant_dtype: str | None = None) -> None:
    """One layer through the modular kernel's own prepare and finalize, with experts that give back what they get."""
    kernel = kernel_over(layer, quant_dtype)
    rows, weights, ids = tokens(rank, counts[rank])
    got, scales, meta, got_ids, got_weights = kernel._prepare(rows, weights, ids, NUM_EXPERTS, None, False)
    num_rows = 2 * max(1, *counts)
    assert got.shape == (num_rows, HIDDEN) and meta is None and (scales is None) == (quant_dtype is None)
    assert got_ids.dtype == torch.int32 and got_ids.shape == got_weights.shape == (num_rows, TOP_K)
    wanted = rows
    if scales is not None:
        wire = wire_format("mxfp8")
        got = wire.dequantize(got, scales, dtype=torch.bfloat16)
        wanted = wire.dequantize(*wire.quantize(rows), dtype=torch.bfloat16)
    output = torch.full_like(rows, 3.0)
    same = kernel._finalize(output, got.clone(), rows, got_weights, got_ids, False, None, None)
    assert same is output and torch.equal(output, (wanted.float() * times_of(ids)).bfloat16())


def kernel_over(layer: Any, quant_dtype: str | None) -> Any:
    """vLLM's modular kernel around the two ends of a layer, with experts that it never calls."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    kernel = mk.FusedMoEKernelModularImpl.__new__(mk.FusedMoEKernelModularImpl)
    kernel.prepare_finalize = layer
    kernel.fused_experts = types.SimpleNamespace(
        quant_config=FusedMoEQuantConfig.make(quant_dtype),
        expects_unquantized_inputs=False,
        finalize_weight_and_reduce_impl=TopKWeightAndReduceNoOP,
    )
    return kernel


def through_the_plugin(comm: Any, store: str) -> list[str]:
    from a2a.integrations import vllm as adapter

    adapter.register()
    set_sizes = stand_in_for_the_engine(comm, store)
    import vllm.distributed.parallel_state as groups
    import vllm.model_executor.layers.fused_moe.all2all_utils as layers
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    manager = all2all.FlashInferNVLinkOneSidedManager(dist.group.WORLD)
    groups._EP.device_communicator.all2all_manager = manager
    row: dict[str, Any] = {"dispatch_dtype_bytes_per_elem": 2, "dispatch_scale_bytes_per_token": 0}
    if hasattr(layers, "flashinfer_one_sided_dispatch_layout"):
        # In the releases that have this function, it is the plugin's by now.
        layout = layers.flashinfer_one_sided_dispatch_layout(HIDDEN, FUSED_MOE_UNQUANTIZED_CONFIG)
        row = {"dispatch_format": layout.dispatch_format, "extra_payload_bytes_per_token": 0}
    layer = layers.FlashInferNVLinkOneSidedPrepareAndFinalize(
        max_num_tokens=8, top_k=TOP_K, num_experts=NUM_EXPERTS, hidden_size=HIDDEN, num_dispatchers=manager.world_size,
        **row,
    )  # fmt: skip
    assert isinstance(layer, mk.FusedMoEPrepareAndFinalizeModular)
    assert layer.activation_format is mk.FusedMoEActivationFormat.Standard
    for counts in COUNTS:
        set_sizes(counts)
        for quant_dtype in (None, "mxfp8"):
            play(layer, comm.Get_rank(), counts, quant_dtype)
    served = [type(manager).__mro__[1].__module__, type(layer).__mro__[1].__module__, manager.moe_alltoall.transport]
    manager.destroy()
    dist.destroy_process_group()
    return served


def test_the_plugin_serves_the_modular_kernel(run_ranks: Any, vllm: str, tmp_path: Path) -> None:
    served = ["a2a.integrations.vllm.manager", "a2a.integrations.vllm.prepare_finalize", "host"]
    assert run_ranks(through_the_plugin, 2, str(tmp_path / "store")) == [served] * 2, vllm


def through_its_own_classes(comm: Any, store: str) -> list[str]:
    """Its own manager and prepare/finalize class, on what they import as `flashinfer.moe_ep` or `flashinfer.comm`."""
    from a2a.integrations.flashinfer import MoeAlltoAll, NVLinkOneSidedAlltoAll, install

    install()
    # Without a GPU: vLLM asks for FlashInfer's compiler or its compiled kernels, and torch for an accelerator.
    env.replace({**env.snapshot(), "VLLM_HAS_FLASHINFER_CUBIN": "1"})
    if not torch.cuda.is_available():
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda: None
    set_sizes = stand_in_for_the_engine(comm, store)
    import vllm.distributed.parallel_state as groups
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.prepare_finalize import flashinfer_nvlink_one_sided as theirs

    manager = all2all.FlashInferNVLinkOneSidedManager(dist.group.WORLD)
    groups._EP.device_communicator.all2all_manager = manager
    cls = theirs.FlashInferNVLinkOneSidedPrepareAndFinalize
    in_bytes = "x_bytes_per_token" in inspect.signature(cls).parameters

    def build(hidden: int, most: int) -> Any:
        row = {"x_bytes_per_token": 2 * hidden, "x_sf_bytes_per_token": 0} if in_bytes else {}
        return cls(
            max_num_tokens=most, top_k=TOP_K, num_experts=NUM_EXPERTS, hidden_size=hidden, num_dispatchers=2, **row
        )

    narrow, layer = build(32, 4), build(HIDDEN, 8)
    assert narrow.all2all_manager is manager, "grown for the second layer"
    alltoall = manager.moe_alltoall if in_bytes else manager.get_communication().alltoall
    assert isinstance(alltoall, MoeAlltoAll) and (in_bytes or isinstance(manager.communication, NVLinkOneSidedAlltoAll))
    for counts in ((3, 5), (4, 0), (1, 1)):
        set_sizes(counts)
        play(layer, comm.Get_rank(), counts)
        if min(counts):
            # The quantising that vLLM has without a GPU knows no empty tensor.
            play(layer, comm.Get_rank(), counts, "mxfp8")
    served = [type(layer).__module__, alltoall.rounds.transport]
    manager.cleanup()
    dist.destroy_process_group()
    return served


def test_its_own_classes_run_on_what_they_import_as_flashinfer(run_ranks: Any, vllm: str, tmp_path: Path) -> None:
    module = "vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_one_sided"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"vLLM {vllm} has no {module}")
    communicator = importlib.util.find_spec("vllm.distributed.device_communicators.mnnvl_compat")
    text = "" if communicator is None or communicator.origin is None else Path(communicator.origin).read_text()
    if "two_sided" in text and not _can_import("flashinfer.comm.trtllm_alltoall"):
        pytest.skip(f"vLLM {vllm} does not load its communicator without FlashInfer's two-sided kernels")
    assert run_ranks(through_its_own_classes, 2, str(tmp_path / "store")) == [[module, "host"]] * 2, vllm


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
