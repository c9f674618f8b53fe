"""Stand-ins with the shapes of vLLM's base classes and configuration, and an engine made of them.

The names, the arguments and what is abstract are those of the modular kernel of releases 0.22 to 0.33.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from a2a.integrations.vllm import Engine


class ActivationFormat(enum.Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class PrepareAndFinalizeBase(abc.ABC):
    def post_init_setup(self, fused_experts: Any) -> None:
        return

    def allocate_fused_expert_output(self, shape: Any, dtype: Any, device: Any, weight_and_reduce_impl: Any) -> Any:
        return None

    @property
    @abc.abstractmethod
    def activation_format(self) -> Any: ...

    @abc.abstractmethod
    def topk_indices_dtype(self) -> Any: ...

    @abc.abstractmethod
    def max_num_tokens_per_rank(self) -> Any: ...

    @abc.abstractmethod
    def num_dispatchers(self) -> int: ...

    @abc.abstractmethod
    def output_is_reduced(self) -> bool: ...

    def supports_async(self) -> bool:
        return False

    def supports_dbo(self) -> bool:
        return self.supports_async()


class FusedMoEPrepareAndFinalizeModular(PrepareAndFinalizeBase):
    @abc.abstractmethod
    def prepare(self, *arguments: Any, **keywords: Any) -> Any: ...

    def prepare_async(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    @abc.abstractmethod
    def finalize(self, *arguments: Any, **keywords: Any) -> Any: ...

    def finalize_async(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError


class All2AllManagerBase:
    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.cpu_group = cpu_group
        self.rank = cpu_group.Get_rank()
        self.world_size = cpu_group.Get_size()

    def get_handle(self, kwargs: Any) -> Any:
        raise NotImplementedError

    def destroy(self) -> None:
        pass


@dataclasses.dataclass
class QuantConfig:
    """What the adapters read of a `FusedMoEQuantConfig`."""

    quant_dtype: Any = None
    block_shape: list[int] | None = None
    a1_gscale: Tensor | None = None
    per_act_token_quant: bool = False
    is_scale_swizzled: bool = False
    mx_alignment: int = 0


class WeightAndReduce:
    """Sums `[m, k, K]` over k with the weights; what experts that leave it to us hand over."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        return (fused_expert_output.float() * weights[..., None]).sum(1).to(fused_expert_output.dtype)


@dataclasses.dataclass
class Forward:
    """The running forward pass, as a test sets it."""

    manager: Any = None
    sizes: Sequence[int] | None = None
    micro_batch: int = 0
    num_micro_batches: int = 1
    regions: int = 0

    def engine(self, **more: Any) -> Engine:
        @contextlib.contextmanager
        def region() -> Any:
            self.regions += 1
            yield

        return Engine(
            activation_format=ActivationFormat.Standard,
            local_sizes=lambda: self.sizes,
            all2all_manager=lambda: self.manager,
            num_micro_batches=lambda: self.num_micro_batches,
            micro_batch=lambda: self.micro_batch,
            comm_region=region,
            **more,
        )
