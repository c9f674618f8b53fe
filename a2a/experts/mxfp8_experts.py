"""experts/mxfp8_experts: SwiGLU experts of one rank with mxfp8 weights, on packed top-k, into memory that is given.

Owns the weights of a set of experts, and the operator that runs rows through the experts they picked. Refuses to know
ranks and the exchange; of global expert ids only a table that says which are here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from a2a.errors import ShapeError
from a2a.experts.gated_mlp import GatedMlp
from a2a.experts.mxfp8_linear import BLOCK, Mxfp8Linear, dispatch_w8a8_mxfp8_linear
from a2a.experts.mxfp8_rows import mxfp8_quantize
from a2a.quant import ScaleLayout, swizzle_scales, unpack_topk
from a2a.quant.ops import register

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def routed_mxfp8_moe(
    out: Tensor,
    packed_topk: Tensor,
    hidden_states: Tensor,
    scales: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    local_experts: Tensor,
    *,
    linear: Mxfp8Linear,
    weight_layout: ScaleLayout = ScaleLayout.LINEAR,
) -> None:
    """For each row the sum over its picks here of routing weight times expert output, written into `out`.

    An expert makes `w2 @ q(silu(gate) * up)`, where `gate, up = w13 @ x` and q is mxfp8 quantisation.

    Args:
        out: bf16, fp16 or fp32 `[..., H]`, contiguous; rows without a pick here are left alone. The combine view, say.
        packed_topk: int32 `[..., k]` of `pack_topk`, global ids; a pick that is not here adds nothing, whatever its
            weight.
        hidden_states: float8_e4m3fn `[..., K]`.
        scales: uint8 `[..., K / 32]`.
        w13: float8_e4m3fn `[E, 2I, K]`, the rows of the gate, then those of up.
        w13_scales: uint8 `[E, 2I, K / 32]`, or each expert's in `weight_layout`.
        w2: float8_e4m3fn `[E, H, J]`, J being I rounded up to 32.
        w2_scales: uint8 `[E, H, J / 32]`, or each expert's in `weight_layout`.
        local_experts: int32 `[num_experts]`, index of each global id among the E, -1 for those elsewhere.
        linear: how products are made, and what quantises between them.
        weight_layout: of the scales of both weights.

    Sums are formed in fp32, weights of a row's picks of one expert first, then by ascending expert, and rounded once.

    Host synchronisation:
        One, for the number of rows of each expert.

    Raises:
        ShapeError: a shape or dtype.
    """
    _MOE(
        out,
        packed_topk,
        hidden_states,
        scales,
        w13,
        w13_scales,
        w2,
        w2_scales,
        local_experts,
        linear.backend,
        linear.quantize,
        weight_layout.value,
    )


class Mxfp8Experts:
    """The mxfp8 weights of a set of SwiGLU experts, and what they make of rows.

    Args:
        w13, w13_scales, w2, w2_scales: as in `routed_mxfp8_moe`, scales linear.
        linear: None for the best that the weights' device has.

    Raises:
        ShapeError: the weights do not fit each other.
    """

    def __init__(
        self, w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, *, linear: Mxfp8Linear | None = None
    ) -> None:
        _check_weights(w13, w13_scales, w2, w2_scales, ScaleLayout.LINEAR)
        self.linear = dispatch_w8a8_mxfp8_linear(device=w13.device) if linear is None else linear
        self.w13, self.w13_scales = w13, w13_scales
        self.w2, self.w2_scales = w2, w2_scales
        self._ready_scales = tuple(swizzle_scales(each, self.linear.weight_layout) for each in (w13_scales, w2_scales))

    @classmethod
    def quantize(cls, experts: GatedMlp, *, alignment: int = 0, linear: Mxfp8Linear | None = None) -> Mxfp8Experts:
        """The same experts with weights in mxfp8, rows of w13 padded like those of the wire with `mx_alignment`."""
        made: list[Tensor] = []
        for weights, multiple in ((experts.w13, alignment), (experts.w2, 0)):
            data, scales = mxfp8_quantize(weights.flatten(0, 1), multiple)
            made += [each.view(*weights.shape[:2], each.shape[1]) for each in (data, scales)]
        return cls(made[0], made[1], made[2], made[3], linear=linear)

    @property
    def num_experts(self) -> int:
        """E, the experts held here."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H, elements of a row that comes out."""
        return self.w2.shape[1]

    @property
    def wire_width(self) -> int:
        """K, elements of a row that goes in, padding included."""
        return self.w13.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.w13.device

    def write(
        self, out: Tensor, packed_topk: Tensor, hidden_states: Tensor, scales: Tensor, local_experts: Tensor
    ) -> None:
        """`routed_mxfp8_moe` with these weights."""
        w13_scales, w2_scales = self._ready_scales
        routed_mxfp8_moe(
            out, packed_topk, hidden_states, scales, self.w13, w13_scales, self.w2, w2_scales, local_experts,
            linear=self.linear, weight_layout=self.linear.weight_layout,
        )  # fmt: skip


def _check_weights(w13: Tensor, w13_scales: Tensor, w2: Tensor, w2_scales: Tensor, layout: ScaleLayout) -> None:
    fits = (
        w13.dim() == 3
        and w2.dim() == 3
        and w13.shape[0] == w2.shape[0]
        and w13.shape[1] % 2 == 0
        and w13.shape[2] % BLOCK == 0
        and w2.shape[2] == -(-w13.shape[1] // 2 // BLOCK) * BLOCK
        and w13.dtype == w2.dtype == torch.float8_e4m3fn
    )
    if not fits:
        raise ShapeError(
            what="w13, w2",
            got=f"{w13.dtype} {list(w13.shape)}, {w2.dtype} {list(w2.shape)}",
            wanted="float8_e4m3fn [E, 2I, K] and [E, H, J], K a multiple of 32 and J = I rounded up to 32",
        )
    for what, scales, weights in (("w13_scales", w13_scales, w13), ("w2_scales", w2_scales, w2)):
        shape = (weights.shape[0], *layout.shape(weights.shape[1], weights.shape[2] // BLOCK))
        if tuple(scales.shape) != shape or scales.dtype != torch.uint8 or scales.device != weights.device:
            raise ShapeError(
                what=what,
                got=f"{scales.dtype} {list(scales.shape)} on {scales.device}",
                wanted=f"uint8 {list(shape)} on {weights.device}",
            )


def _check_rows(
    out: Tensor, packed: Tensor, hidden: Tensor, scales: Tensor, w13: Tensor, w2: Tensor, local_experts: Tensor
) -> None:
    lead, width = tuple(packed.shape[:-1]), w13.shape[2]
    for what, tensor, shape, dtypes in (
        ("out", out, (*lead, w2.shape[1]), _OUTPUTS),
        ("packed_topk", packed, tuple(packed.shape), (torch.int32,)),
        ("hidden_states", hidden, (*lead, width), (torch.float8_e4m3fn,)),
        ("scales", scales, (*lead, width // BLOCK), (torch.uint8,)),
        ("local_experts", local_experts, tuple(local_experts.shape[:1]), (torch.int32,)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != w13.device:
            raise ShapeError(
                what=what,
                got=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                wanted=f"{' or '.join(map(str, dtypes))} {list(shape)} on {w13.device}",
            )


def _moe(
    out: Tensor,
    packed: Tensor,
    hidden: Tensor,
    scales: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    local_experts: Tensor,
    backend: str,
    quantize: str,
    weight_layout: str,
) -> None:
    _moe_fake(
        out, packed, hidden, scales, w13, w13_scales, w2, w2_scales, local_experts, backend, quantize, weight_layout
    )
    if not out.is_contiguous():
        raise ShapeError(what="out", got=f"strides {out.stride()}", wanted="a contiguous tensor")
    linear, layout = Mxfp8Linear(backend, quantize, ()), ScaleLayout(weight_layout)
    picks, weights = _picks_here(packed.reshape(-1, packed.shape[-1]), local_experts)
    rows = (picks >= 0).any(1).nonzero().flatten()
    if not rows.numel():
        return
    picks, weights = (each.flatten() for each in _each_expert_once(picks[rows], weights[rows]))
    data, data_scales = _rows_of(hidden, rows), _rows_of(scales, rows)
    sizes = torch.bincount(picks[picks >= 0], minlength=w13.shape[0]).tolist()
    # Picks that are not here sort first.
    order = picks.argsort(stable=True)[picks.numel() - sum(sizes) :]
    total = torch.zeros((rows.numel(), w2.shape[1]), dtype=torch.float32, device=out.device)
    for expert, group in enumerate(torch.split(order, sizes)):
        if group.numel():
            tokens = group // packed.shape[-1]
            both = linear(
                _rows_of(data, tokens), w13[expert], w13_scales[expert], input_scales=data_scales[tokens],
                weight_layout=layout, output_dtype=linear.accumulator_dtype,
            )  # fmt: skip
            gate, up = both.float().chunk(2, dim=1)
            made = linear(
                silu(gate) * up, w2[expert], w2_scales[expert], weight_layout=layout,
                output_dtype=linear.accumulator_dtype,
            )  # fmt: skip
            total.index_add_(0, tokens, made.float() * weights[group, None])
    out.view(-1, out.shape[-1])[rows] = total.to(out.dtype)


def _picks_here(packed: Tensor, local_experts: Tensor) -> tuple[Tensor, Tensor]:
    """int64 `[m, k]` index among the experts here, -1 for picks that are not; fp32 weights."""
    ids, weights = unpack_topk(packed)
    known = (ids >= 0) & (ids < local_experts.shape[0])
    return torch.where(known, local_experts[torch.where(known, ids, 0)], -1).long(), weights


def _each_expert_once(picks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Picks `[m, k]` without a row's later picks of the same expert, whose weights go to the first.

    So that sums over an expert's rows add to each row once: else their order, and the bits, would differ by run.
    """
    same = picks[:, :, None] == picks[:, None, :]
    # Not by a product: what is not here may weigh NaN.
    totals = torch.where(same, weights[:, None, :], 0).sum(2)
    return picks.masked_fill(same.tril(-1).any(2), -1), totals


def _rows_of(blocks: Tensor, rows: Tensor) -> Tensor:
    """Rows of `[..., W]`, moved as bytes: not every index kernel takes 8-bit floats."""
    return blocks.reshape(-1, blocks.shape[-1]).view(torch.uint8)[rows].view(blocks.dtype)


def _moe_fake(
    out: Tensor,
    packed: Tensor,
    hidden: Tensor,
    scales: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    local_experts: Tensor,
    backend: str,
    quantize: str,
    weight_layout: str,
) -> None:
    _check_weights(w13, w13_scales, w2, w2_scales, ScaleLayout(weight_layout))
    _check_rows(out, packed, hidden, scales, w13, w2, local_experts)


_MOE = register(
    "routed_mxfp8_moe(Tensor(a!) out, Tensor packed_topk, Tensor hidden_states, Tensor scales, Tensor w13, "
    "Tensor w13_scales, Tensor w2, Tensor w2_scales, Tensor local_experts, str backend, str quantize, "
    "str weight_layout) -> ()",
    _moe,
    _moe_fake,
)
