"""Stand-ins with the shapes of vLLM's base classes and configuration, an engine made of them, and a layer it drives.

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

from a2a.integrations.rows import RowFormat
from a2a.integrations.vllm import Engine, dispatch_layout, manager_class, prepare_finalize_class, row_format
from a2a.placement import Placement
from a2a.quant import ScaleLayout, unswizzle_scales


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


# ---- a model of many layers ----------------------------------------------------------------------------------------

NUM_RANKS, TOP_K, NUM_EXPERTS, MOST = 4, 3, 10, 6
HALF_STEP = 2.0**-4
"""Half a unit of e4m3's 3-bit mantissa, relative."""
HALF_GRID = (1 + HALF_STEP) / 6
"""Half the widest gap of e2m1 (4 to 6) with a scale of amax / 6 rounded to e4m3, relative to amax."""

FP8 = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}
LAYERS: dict[str, tuple[int, Any, bool]] = {
    "none": (160, None, False),
    "bf16": (96, QuantConfig(), False),
    "deferred": (160, QuantConfig("nvfp4"), True),
    "nvfp4": (160, QuantConfig("nvfp4", a1_gscale=torch.tensor([37.0])), False),
    "nvfp4, a scale for each expert": (96, QuantConfig("nvfp4", a1_gscale=torch.full((3,), 37.0)), False),
    "nvfp4 in tiles": (64, QuantConfig("nvfp4", is_scale_swizzled=True), False),
    "mxfp8": (160, QuantConfig("mxfp8"), False),
    "mxfp8 padded": (160, QuantConfig("mxfp8", mx_alignment=128), False),
    "mxfp8 padded to 256": (288, QuantConfig("mxfp8", mx_alignment=256), False),
    "fp8 block": (256, QuantConfig(**FP8), False),
}
"""Width, quantisation, whether the experts quantise: layers of one model, in the order in which it is built."""

COUNTS = {"uneven": (5, 1, 6, 3), "empty rank": (4, 0, 2, 6), "one token": (0, 0, 0, 1), "no tokens": (0, 0, 0, 0)}


def build(comm: Any, forward: Forward, layers: dict[str, tuple[int, Any, bool]], **more: Any) -> dict[str, Any]:
    """All layers, on one manager, as the engine builds them."""
    engine = forward.engine(**more)
    forward.manager = manager_class(All2AllManagerBase, lambda: engine)(comm)
    layer_class = prepare_finalize_class(FusedMoEPrepareAndFinalizeModular, lambda: engine)
    built = {}
    for name, (hidden, quant, deferred) in layers.items():
        layout = dispatch_layout(hidden, quant, torch.bfloat16 if deferred else None)
        built[name] = layer_class(
            max_num_tokens=MOST, top_k=TOP_K, num_experts=NUM_EXPERTS, hidden_size=hidden, num_dispatchers=NUM_RANKS,
            dispatch_format=layout.dispatch_format,
        )  # fmt: skip
    return built


def tokens(rank: int, n: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    rows = torch.randn((n, hidden), generator=generator) * torch.rand((n, 1), generator=generator).exp()
    ids = torch.randint(-1, NUM_EXPERTS, (n, TOP_K), generator=generator, dtype=torch.int32)
    return rows.bfloat16(), torch.rand((n, TOP_K), generator=generator), ids


def distinct_ranks(ids: Tensor) -> Tensor:
    ranks = Placement.contiguous(NUM_EXPERTS, NUM_RANKS).table
    table = torch.as_tensor(ranks)
    return torch.tensor([len({int(table[each]) for each in row if each >= 0}) for row in ids], dtype=torch.float32)


def values(form: RowFormat, received: Tensor, scales: Tensor | None, hidden: int, quant: Any) -> Tensor:
    """What the received bytes stand for: what identity experts give back."""
    if scales is None:
        return received
    if form.name == "nvfp4" and quant.is_scale_swizzled:
        cols = form.wire.scales_width(hidden)
        scales = unswizzle_scales(scales, ScaleLayout.SWIZZLED_128X4, received.shape[0], cols)
    scale = {}
    if form.name == "nvfp4" and quant.a1_gscale is not None:
        scale = {"global_scale": quant.a1_gscale[:1].to(received.device)}
    return form.wire.dequantize(received, scales, hidden_size=hidden, dtype=torch.bfloat16, **scale)


def assert_within(form: RowFormat, got: Tensor, hidden: Tensor, times: Tensor) -> None:
    exact = hidden.float() * times[:, None]
    error = (got.float() - exact).abs()
    if form.name == "bf16":
        assert torch.equal(got, exact.bfloat16()), "bf16 is bit-exact"
        return
    rounding = exact.abs() * 2.0**-8 * 2
    if form.name == "nvfp4":
        amax = hidden.float().abs().unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, dim=1)
        allowed = amax * times[:, None] * HALF_GRID
    else:
        block = form.wire.block
        padded = torch.nn.functional.pad(hidden.float().abs(), (0, -hidden.shape[1] % block))
        amax = padded.unflatten(1, (-1, block)).amax(2).repeat_interleave(block, dim=1)[:, : hidden.shape[1]]
        # Below the smallest normal e4m3 the step is 2**-9 of a scale of at most 2 * amax / 448.
        allowed = exact.abs() * HALF_STEP + amax * times[:, None] * (2 / 448 * 2.0**-10)
    assert (error <= allowed + rounding).all(), f"{form}: off by {(error - allowed - rounding).max()}"


def play(forward: Forward, layer: Any, rank: int, counts: Any, spec: Any, *, in_place: bool, seed: int = 0) -> None:
    hidden, quant, deferred = spec
    n, most = counts[rank], max(1, *counts)
    forward.sizes = counts
    moe = forward.manager.moe_alltoall
    device = moe.workspace.device
    rows, weights, ids = (each.to(device) for each in tokens(rank, n, hidden, seed))
    before = rows.clone()
    form = row_format(quant, defer_input_quant=deferred)
    got, scales, counts_per_expert, got_ids, got_weights = layer.prepare(
        rows, weights, ids, NUM_EXPERTS, None, False, quant, deferred
    )
    assert torch.equal(rows, before) and counts_per_expert is None
    assert got.shape[0] == got_ids.shape[0] == got_weights.shape[0] == NUM_RANKS * most
    assert got_ids.dtype == torch.int32 and got_ids.shape[1] == TOP_K and got_weights.dtype == torch.float32
    assert (scales is None) == (form.name == "bf16")
    made = values(form, got, scales, hidden, quant)
    filled = torch.arange(most, device=device)[None, :] < moe.recv_counts[:, None]
    assert (got_ids.view(NUM_RANKS, most, TOP_K)[~filled] == -1).all(), "slots that no token fills go nowhere"
    # Rows of no token are garbage and must never show.
    made = torch.where(filled.flatten()[:, None], made, float("nan"))
    if in_place:
        area = layer.allocate_fused_expert_output(tuple(made.shape), made.dtype, made.device, None)
        assert area is not None
        made = area.copy_(made)
    output = torch.full_like(rows, 7.0)
    layer.finalize(output, made, got_weights, got_ids, False, None)
    times = distinct_ranks(ids.cpu())
    assert_within(form, output.cpu(), before.cpu(), times)
