"""experts/layer: a reference MoE layer: dispatch, gated experts into the combine view in place, combine.

Owns the order of the three steps and the way from global expert ids to this rank's experts. Refuses to know how rows
move, how an expert computes, and how a router chose: ids and weights are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from a2a.alltoall import Dispatched, MoeAlltoAll
from a2a.errors import ConfigError, ShapeError
from a2a.experts.gated_mlp import GatedMlp
from a2a.quant import wire_format


class MoeLayer:
    """One MoE layer of one rank: its experts behind an exchange that layers may share.

    Args:
        moe: the exchange, built with a `wire_format`. Layers may share it: call `moe.ensure(hidden_size=...)` on all
            ranks before a layer that is wider.
        experts: the experts of this rank in the order of `moe.placement.experts_of(moe.ep_rank)`, on its device.
        context: index of the context of `moe` whose rounds this layer takes, for layers in flight side by side.
        dtype: bf16, fp16 or fp32: of rows on the combine wire and of the output.

    Raises:
        ConfigError, ShapeError: on this rank; the exchange does not fit these experts.
    """

    def __init__(
        self, moe: MoeAlltoAll, experts: GatedMlp, *, context: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if moe.config.wire_format is None:
            raise ConfigError(
                what="wire_format", got=None, wanted="an exchange that was built with one", rank=moe.ep_rank
            )
        check_experts(moe, context, experts.num_experts, experts.hidden_size, experts.w13.device)
        self.moe = moe
        self.experts = experts
        self.dtype = dtype
        self._context = context
        self._local = local_experts(moe)

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        runtime_max_tokens_per_rank: int,
        *,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """This rank's tokens through the experts of all ranks. Collective.

        Args:
            hidden_states: `[n, H]` in bf16, fp16 or fp32, as far as the exchange's wire format takes it.
            topk_ids: int32 or int64 `[n, k]`, contiguous, global expert ids; an id outside the experts adds nothing.
            topk_weights: fp32 `[n, k]`, applied by the experts' ranks.
            runtime_max_tokens_per_rank: R, equal on all ranks, at least n of every rank.
            global_scale: for nvfp4, see `MoeAlltoAll.dispatch_tokens`.

        Returns:
            `[n, H]` of the layer's dtype: the sum over ranks, each rank's share (weighted, reduced over its experts in
            fp32) rounded once before it travels, and the sum rounded once more.

        Host synchronisation:
            Between dispatch and combine, for the number of rows of each expert.

        Raises:
            ShapeError: rows of another width, on this rank alone; nothing was sent.
            Otherwise as `dispatch_tokens` and `combine`. After any other exception in between, every rank must call
            `moe.reset()`.
        """
        hidden = self.experts.hidden_size
        if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden:
            raise ShapeError(
                what="hidden_states", got=list(hidden_states.shape), wanted=f"[n, {hidden}]", rank=self.moe.ep_rank
            )
        rounds = self.moe.contexts[self._context]
        most = runtime_max_tokens_per_rank
        received = rounds.dispatch_tokens(
            hidden_states,
            topk_ids,
            topk_weights,
            runtime_max_tokens_per_rank=most,
            global_scale=global_scale,
        )
        shares = rounds.get_combine_payload_tensor_in_workspace(most, hidden, self.dtype)
        self._write_shares(received, global_scale, shares)
        return rounds.combine(shares, most, payload_in_workspace=True)

    def _write_shares(self, received: Dispatched, global_scale: Tensor | None, shares: Tensor) -> None:
        """What this rank's experts add to each row it received, `[ep, R, H]`; other rows stay as they are."""
        picks = self._local_picks(received.topk_ids.flatten(0, 1))
        rows = (picks >= 0).any(1).nonzero().flatten()
        scales = None if received.scales is None else _take(received.scales, rows)
        wire = wire_format(str(self.moe.config.wire_format))
        values = wire.dequantize(
            _take(received.hidden_states, rows), scales, hidden_size=self.experts.hidden_size, global_scale=global_scale
        )
        made = self.experts.forward(values, picks[rows], received.topk_weights.flatten(0, 1)[rows])
        shares.flatten(0, 1)[rows] = made.to(shares.dtype)

    def _local_picks(self, topk_ids: Tensor) -> Tensor:
        """int32 `[m, k]` index among this rank's experts; -1 for experts elsewhere, padded slots and invalid ids."""
        known = (topk_ids >= 0) & (topk_ids < self._local.numel())
        return torch.where(known, self._local[torch.where(known, topk_ids, 0)], -1)


def check_experts(moe: MoeAlltoAll, context: int, num_experts: int, hidden_size: int, device: torch.device) -> None:
    """Whether experts are those that an exchange gives this rank, and fit it.

    Args:
        context: whose rounds they shall take.
        num_experts, hidden_size, device: of the experts.

    Raises:
        ConfigError, ShapeError: on this rank.
    """
    config, rank = moe.config, moe.ep_rank
    if not 0 <= context < config.num_contexts:
        raise ConfigError(
            what="context",
            got=context,
            wanted=f"an index below num_contexts = {config.num_contexts}",
            change="raise num_contexts with moe.ensure on all ranks",
            rank=rank,
        )
    if hidden_size > config.hidden_size:
        raise ConfigError(
            what="hidden_size of the experts",
            got=hidden_size,
            wanted=f"at most {config.hidden_size}, that of the exchange",
            change=f"call moe.ensure(hidden_size={hidden_size}) on all ranks first",
            rank=rank,
        )
    mine = moe.placement.experts_of(rank).numel()
    if num_experts != mine or device != moe.workspace.device:
        raise ShapeError(
            what="experts",
            got=f"{num_experts} on {device}",
            wanted=f"the {mine} experts that the placement gives this rank, on {moe.workspace.device}",
            rank=rank,
        )


def local_experts(moe: MoeAlltoAll) -> Tensor:
    """`[num_experts]` on the exchange's device: index of each global id among this rank's experts, -1 elsewhere."""
    placement = moe.placement
    return torch.where(placement.table == moe.ep_rank, placement.local, -1).to(moe.workspace.device)


def _take(blocks: Tensor, rows: Tensor) -> Tensor:
    """Rows of `[ep, R, W]`; moved as bytes where the dtype is an 8-bit float, which not every index kernel takes."""
    flat = blocks.flatten(0, 1)
    return flat.view(torch.uint8)[rows].view(flat.dtype) if flat.dtype.itemsize == 1 else flat[rows]
