"""integrations/vllm/prepare_finalize: the two ends of a MoE layer of vLLM: quantise and dispatch, reduce and combine.

Owns the order of payloads, which rows are sent in which format, and where the experts' output lies. Refuses to know how
rows move, and vLLM itself beyond what `engine` names.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from a2a.alltoall import narrow_ids
from a2a.errors import ConfigError, ShapeError
from a2a.integrations.rows import RowFormat
from a2a.integrations.vllm.engine import Engine
from a2a.integrations.vllm.payload import row_format
from a2a.quant import ScaleLayout, swizzle_scales

INVALID_ID = -1
"""Expert id of slots that no token fills; experts of TensorRT-LLM's kind know no other."""

Prepared = tuple[Tensor, Tensor | None, None, Tensor, Tensor]
"""Hidden states, scales, no counts per expert, ids, weights."""


class PrepareAndFinalize:
    """Rows of all ranks to this rank's experts and back, with the modular-kernel interface of vLLM.

    Building is collective, as is `initialize` of the manager: layers are built in the same order on all ranks.

    Args:
        engine: what is asked of vLLM.
        max_num_tokens: most tokens a rank brings in one round.
        top_k, num_experts, hidden_size: of the layer; hidden_size of its rows, which vLLM pads for some experts, the
            most that comes back.
        num_dispatchers: ranks of the group, as vLLM counts them.
        **sizes: what a row takes, in any release's words: see `payload.row_bytes_per_token`.

    Raises:
        ConfigError, MismatchError, Unsupported: on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        num_dispatchers: int = 1,
        **sizes: Any,
    ) -> None:
        self._engine = engine
        self._hidden_size = hidden_size
        self._num_dispatchers = num_dispatchers
        self.all2all_manager = engine.all2all_manager()
        self.all2all_manager.initialize(
            max_num_tokens=max_num_tokens, top_k=top_k, num_experts=num_experts, hidden_size=hidden_size, **sizes
        )
        # One for each micro-batch: R of its round, from dispatch to combine.
        self._most = [1] * self.all2all_manager.moe_alltoall.config.num_contexts

    # ---- what vLLM asks before it calls --------------------------------------------------------------------------

    @property
    def activation_format(self) -> object:
        """Rows `[tokens, hidden]`."""
        return self._engine.activation_format

    def topk_indices_dtype(self) -> torch.dtype:
        """Ids are sent as int32."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """No batch size: rows are not grouped by expert."""
        return None

    def num_dispatchers(self) -> int:
        """Ranks of the group, as vLLM counts them."""
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """The output is the sum over all ranks."""
        return True

    def supports_async(self) -> bool:
        """Whether the split verbs serve a purpose: two micro-batches in flight, each in a context of its own."""
        return len(self._most) > 1

    # ---- prepare -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Prepared:
        """Quantise and dispatch.

        Args:
            a1: bf16 or fp16 `[n, H]`, n >= 0; not modified.
            topk_weights: `[n, k]`.
            topk_ids: int32 or int64 `[n, k]`, global expert ids; sent as int32.
            num_experts, expert_map: unused: the exchange was built for so many, in contiguous shares.
            apply_router_weight_on_input: multiply rows by their weight first; only for k = 1.
            quant_config: vLLM's; None for a layer without quantisation.
            defer_input_quant: send rows as they are; the experts quantise.

        Returns:
            hidden states `[ep * R, W]`, scales `[ep * R, S]` or None (of nvfp4 in the 128x4 layout if the experts take
            it), None, ids `[ep * R, k]` with -1 in slots that no token fills, weights `[ep * R, k]`. Views into the
            workspace, valid until this micro-batch's finalize.

        Host synchronisation: none on GPUs.

        Raises:
            ConfigError: a quantisation that cannot be sent, or weights on the input with k > 1; nothing was sent.
            ShapeError, StateError, MismatchError, PeerTimeout, PeerLost: as `MoeAlltoAll.dispatch`.
        """
        form = row_format(quant_config, defer_input_quant=defer_input_quant)
        rows = _weighted(a1, topk_weights) if apply_router_weight_on_input else a1
        data, scales = self._quantized(form, rows, quant_config)
        payloads = [data] if scales is None else [data, scales]
        ids_payload = len(payloads)
        ids = narrow_ids(topk_ids).contiguous()
        payloads += [ids, topk_weights.contiguous()]
        micro_batch, sizes = self._engine.micro_batch(), self._engine.local_sizes()
        most = max(1, a1.shape[0] if sizes is None else max(sizes))
        context = self.all2all_manager.round_context()
        with self._engine.comm_region():
            views = context.dispatch(ids, payloads, most, INVALID_ID, ids_payload)
        self._most[micro_batch] = most
        flat = [view.flatten(0, 1) for view in views]
        sent_scales = None if scales is None else _laid_out(flat[1], form, quant_config)
        return flat[0], sent_scales, None, flat[ids_payload], flat[ids_payload + 1]

    def prepare_async(self, *arguments: Any, **keywords: Any) -> Callable[[], Prepared]:
        """As `prepare`, launched beside the other micro-batch's computation; call the result for the tensors."""
        prepared = self.prepare(*arguments, **keywords)
        return lambda: prepared

    def _quantized(self, form: RowFormat, rows: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
        if form.name == "bf16":
            return rows.contiguous(), None
        by_engine = self._engine.quantize
        if by_engine is None or not rows.is_cuda or rows.shape[0] == 0:
            # Kernels of an engine need not know empty tensors.
            data, scales = form.quantize(rows, getattr(quant_config, "a1_gscale", None))
        else:
            data, scales = by_engine(rows, quant_config)
            scales = None if scales is None else scales.reshape(rows.shape[0], -1)
        return data.contiguous(), None if scales is None else scales.contiguous()

    # ---- experts -------------------------------------------------------------------------------------------------

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> Tensor | None:
        """The combine area, for experts whose output is one row for each row received; None for others.

        Rows may be narrower than the layer's: experts that take padded rows may give back unpadded ones.
        """
        moe = self.all2all_manager.moe_alltoall
        context, most = self.all2all_manager.round_context(), self._most[self._engine.micro_batch()]
        fits = (
            context.state == "dispatched"
            and not self._engine.low_precision_combine
            and device == moe.workspace.device
            and dtype in (torch.bfloat16, torch.float16, torch.float32)
            and len(shape) == 2
            and shape[0] == moe.ep_size * most
            and shape[1] <= self._hidden_size
            and shape[1] * dtype.itemsize <= moe.config.combine_bytes_per_token
        )
        if not fits:
            return None
        area: Tensor = context.get_combine_payload_tensor_in_workspace(most, shape[1], dtype)
        return area.flatten(0, 1)

    # ---- finalize ------------------------------------------------------------------------------------------------

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Sum every token's rows over the ranks of its experts, into `output`.

        Args:
            output: `[n, H]`, contiguous; written in place, no copy is made beside it.
            fused_expert_output: `[ep * R, H']`, weights applied and reduced over this rank's experts; or
                `[ep * R, k, H']`, which `weight_and_reduce_impl` reduces first. H' may be padded: columns from H on are
                left out. The tensor that `allocate_fused_expert_output` gave is not copied.
            topk_weights, topk_ids: as `prepare` returned them; read only by `weight_and_reduce_impl`.
            apply_router_weight_on_input: as in `prepare`.
            weight_and_reduce_impl: vLLM's object; not called where the experts have reduced.

        Host synchronisation: none on GPUs.

        Raises:
            ShapeError, StateError, MismatchError, PeerTimeout, PeerLost: as `MoeAlltoAll.combine`.
        """
        context, most = self.all2all_manager.round_context(), self._most[self._engine.micro_batch()]
        received = self._num_rows(most)
        rows = fused_expert_output
        if rows.dim() == 3 or rows.numel() != received * rows.shape[-1]:
            reduction = self._engine.choose_reduction(weight_and_reduce_impl)
            rows = reduction.apply(
                output=None,
                fused_expert_output=rows,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        rows = self._combinable(rows.reshape(received, rows.shape[-1]), output)
        area = self.allocate_fused_expert_output(tuple(rows.shape), rows.dtype, rows.device, weight_and_reduce_impl)
        in_workspace = area is not None and area.data_ptr() == rows.data_ptr()
        with self._engine.comm_region():
            context.combine(
                rows,
                most,
                payload_in_workspace=in_workspace,
                output_dtype=None if output.dtype == rows.dtype else output.dtype,
                output=output,
                use_low_precision=self._engine.low_precision_combine,
            )

    def finalize_async(self, *arguments: Any, **keywords: Any) -> Callable[[], None]:
        """As `finalize`, launched beside the other micro-batch's computation; call the result before the output."""
        self.finalize(*arguments, **keywords)
        return lambda: None

    def _num_rows(self, most: int) -> int:
        ep_size: int = self.all2all_manager.moe_alltoall.ep_size
        return ep_size * most

    def _combinable(self, rows: Tensor, output: Tensor) -> Tensor:
        """Without the columns that padded experts add."""
        width = output.shape[-1]
        if rows.shape[1] < width:
            raise ShapeError(
                what="fused_expert_output",
                got=f"rows of {rows.shape[1]}",
                wanted=f"rows of at least {width}, those of the output",
                rank=self.all2all_manager.moe_alltoall.ep_rank,
            )
        return rows if rows.shape[1] == width else rows[:, :width].contiguous()


def prepare_finalize_class(base: Any, find_engine: Callable[[], Engine]) -> type:
    """`PrepareAndFinalize` as a class of the engine's own kind, built as the engine builds its classes."""

    def __init__(self: Any, **keywords: Any) -> None:
        base.__init__(self)
        PrepareAndFinalize.__init__(self, find_engine(), **keywords)

    return types.new_class(
        "A2APrepareAndFinalize", (PrepareAndFinalize, base), {}, lambda body: body.update(__init__=__init__)
    )


def _weighted(rows: Tensor, topk_weights: Tensor) -> Tensor:
    if topk_weights.shape[1] != 1:
        raise ConfigError(
            what="apply_router_weight_on_input", got=f"top_k = {topk_weights.shape[1]}", wanted="top_k = 1"
        )
    return rows * topk_weights.to(rows.dtype)


def _laid_out(scales: Tensor, form: RowFormat, quant_config: Any) -> Tensor:
    """Scales as the experts take them: linear, but in tiles for nvfp4 experts of CUTLASS's kind."""
    if form.name != "nvfp4" or not getattr(quant_config, "is_scale_swizzled", False):
        return scales
    return swizzle_scales(scales.view(torch.uint8), ScaleLayout.SWIZZLED_128X4)
