"""integrations/vllm/engine: what is asked of vLLM, in one object, so that a stand-in can answer instead.

Owns the imports of vLLM and which name of it answers what. Refuses to know the exchange and the formats.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Engine:
    """The parts of a vLLM release that the adapters touch.

    Attributes:
        activation_format: the member of its enumeration that says `[tokens, hidden]` rows.
        local_sizes: token counts of the group's ranks in the running forward pass, or None when all are equal.
        all2all_manager: the manager of the expert-parallel group.
        quantize: `(rows, quant_config) -> (data, linear scales)` by its own kernels; None leaves it to this package.
        choose_reduction: what an expert's "weight and reduce" object stands for, if it leaves the choice to us.
        num_micro_batches: micro-batches that may be in flight.
        micro_batch: the one that this thread runs.
        comm_region: a context in whose body work is launched beside the other micro-batch's computation.
        low_precision_combine: whether the user asked for an 8-bit combine wire.
    """

    activation_format: object
    local_sizes: Callable[[], Sequence[int] | None]
    all2all_manager: Callable[[], Any]
    quantize: Callable[[Tensor, Any], tuple[Tensor, Tensor | None]] | None = None
    choose_reduction: Callable[[Any], Any] = lambda reduction: reduction
    num_micro_batches: Callable[[], int] = lambda: 1
    micro_batch: Callable[[], int] = lambda: 0
    comm_region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    low_precision_combine: bool = False


def installed_engine() -> Engine:
    """The vLLM that this process runs. Imports its modules of MoE layers: not for a process that will fork."""
    import vllm.envs as envs
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular_kernel
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_ep_group
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
    from vllm.v1.worker import ubatching

    def local_sizes() -> Sequence[int] | None:
        metadata = get_forward_context().dp_metadata
        sizes: Sequence[int] | None = None if metadata is None else metadata.get_chunk_sizes_across_dp_rank()
        return sizes

    def quantize(rows: Tensor, config: Any) -> tuple[Tensor, Tensor | None]:
        kernel = moe_kernel_quantize_input
        further = {"mx_alignment": config.mx_alignment} if getattr(config, "mx_alignment", 0) else {}
        data, scales = kernel(
            rows,
            config.a1_gscale,
            config.quant_dtype,
            config.per_act_token_quant,
            config.block_shape,
            is_scale_swizzled=False,
            **further,
        )
        return data, scales

    def choose_reduction(reduction: Any) -> Any:
        return TopKWeightAndReduceContiguous() if isinstance(reduction, TopKWeightAndReduceDelegate) else reduction

    def comm_region() -> contextlib.AbstractContextManager[Any]:
        region = contextlib.ExitStack()
        if ubatching.dbo_enabled() and not torch.cuda.is_current_stream_capturing():
            # The other micro-batch enqueues its computation before this one's launch; its stream then waits for ours.
            ubatching.dbo_yield_and_switch_from_compute_to_comm()
            region.callback(ubatching.dbo_switch_to_compute_sync)
        return region

    def num_micro_batches() -> int:
        parallel = get_current_vllm_config().parallel_config
        return max(1, getattr(parallel, "num_ubatches", 2 if getattr(parallel, "enable_dbo", False) else 1))

    return Engine(
        activation_format=modular_kernel.FusedMoEActivationFormat.Standard,
        local_sizes=local_sizes,
        all2all_manager=lambda: get_ep_group().device_communicator.all2all_manager,
        quantize=quantize,
        choose_reduction=choose_reduction,
        num_micro_batches=num_micro_batches,
        micro_batch=ubatching.dbo_current_ubatch_id,
        comm_region=comm_region,
        low_precision_combine=bool(getattr(envs, "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", False)),
    )
