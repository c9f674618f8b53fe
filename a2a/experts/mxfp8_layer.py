"""experts/mxfp8_layer: a MoE layer in mxfp8: quantise, dispatch, routed experts into the combine view, combine.

Owns the order of the steps and what travels: rows, scales and packed top-k. All steps are operators, so that
torch.compile makes one graph of them, for any number of tokens. Refuses to know how rows move and how experts compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from a2a import ops
from a2a.alltoall import MoeAlltoAll
from a2a.errors import ConfigError, ShapeError
from a2a.experts.layer import check_experts, local_experts
from a2a.experts.mxfp8_experts import Mxfp8Experts
from a2a.experts.mxfp8_rows import mxfp8_quantize
from a2a.quant import unpack_topk

_NO_PICK = -1 << 16
"""Packed top-k of a pick that goes nowhere: id -1, weight 0."""


class Mxfp8MoeLayer:
    """One MoE layer of one rank with mxfp8 weights, behind an exchange that layers may share.

    `torch.compile(layer.forward, fullgraph=True, dynamic=True)` gives the same bits. Ranks compile for themselves:
    while one does, others wait for it in a round, so let the first calls of a program meet `startup_timeout_s`, or
    `timeout_s` be long enough for a compilation.

    Args:
        moe: the exchange, built with `wire_format="mxfp8"`.
        experts: the experts of this rank in the order of `moe.placement.experts_of(moe.ep_rank)`, on its device, with
            rows of w13 as wide as the wire's: quantised with `alignment=moe.config.mx_alignment`.
        context: index of the context of `moe` whose rounds this layer takes.
        dtype: bf16, fp16 or fp32: of rows on the combine wire and of the output.

    Raises:
        ConfigError, ShapeError: on this rank; the exchange does not fit these experts.
    """

    def __init__(
        self, moe: MoeAlltoAll, experts: Mxfp8Experts, *, context: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        config = moe.config
        if config.wire_format != "mxfp8":
            raise ConfigError(
                what="wire_format", got=config.wire_format, wanted="an exchange built with 'mxfp8'", rank=moe.ep_rank
            )
        check_experts(moe, context, experts.num_experts, experts.hidden_size, experts.device)
        step = config.mx_alignment or 32
        width = -(-experts.hidden_size // step) * step
        if experts.wire_width != width:
            raise ShapeError(
                what="rows of the experts' w13",
                got=f"{experts.wire_width} elements",
                wanted=f"{width}, hidden_size {experts.hidden_size} padded to {step}",
                change=f"quantise the weights with alignment={config.mx_alignment}",
                rank=moe.ep_rank,
            )
        self.moe = moe
        self.experts = experts
        self.dtype = dtype
        self._alignment = config.mx_alignment
        self._handle = ops.bind(moe, context)
        self._local = local_experts(moe)

    def forward(self, hidden_states: Tensor, packed_topk: Tensor, runtime_max_tokens_per_rank: int) -> Tensor:
        """This rank's tokens through the experts of all ranks. Collective.

        Args:
            hidden_states: `[n, H]` in bf16, fp16 or fp32; n may be symbolic.
            packed_topk: int32 `[n, k]` of `pack_topk`: global expert ids, -1 for a pick that goes nowhere, and bf16
                weights, which the experts' ranks apply.
            runtime_max_tokens_per_rank: R, equal on all ranks, at least n of every rank.

        Returns:
            `[n, H]` of the layer's dtype: the sum over ranks, each rank's share rounded once before it travels, and the
            sum rounded once more.

        Host synchronisation:
            That of the experts, between dispatch and combine.

        Raises:
            ShapeError: rows of another width, on this rank alone; nothing was sent.
            Otherwise as `a2a.ops.dispatch` and `combine`. After any other exception in between, every rank must call
            `moe.reset()`.
        """
        hidden = self.experts.hidden_size
        if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden:
            raise ShapeError(
                what="hidden_states", got=list(hidden_states.shape), wanted=f"[n, {hidden}]", rank=self.moe.ep_rank
            )
        handle, most = self._handle, runtime_max_tokens_per_rank
        rows, scales = mxfp8_quantize(hidden_states, self._alignment, backend=self.experts.linear.quantize)
        topk_ids, _ = unpack_topk(packed_topk)
        # In place: nothing reads what was received but the experts' operator, whose output combine takes.
        received, _ = ops.dispatch(
            handle, topk_ids, [rows, scales, packed_topk], most, in_place=True,
            invalid_token_expert_id=_NO_PICK, expert_id_payload_index=2,
        )  # fmt: skip
        shares = ops.combine_area(handle, hidden_states, most, hidden, self.dtype)
        self.experts.write(shares, received[2], received[0], received[1], self._local)
        return ops.combine(handle, shares, most, hidden_states.shape[0])
