"""experts/dense: the same MoE layer without ranks: every expert on every token, and which outputs are right.

Owns what a layer must return, as an interval that follows from the arithmetic. Refuses to know the exchange; of ranks
only which experts' outputs are added before a rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from a2a.experts.gated_mlp import GatedMlp
from a2a.placement import Placement
from a2a.quant import wire_format

_UNITS: Final = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
"""Largest relative error of one rounding to nearest."""

_MAX_SLOPE: Final = 1.1
"""At least the largest slope of silu, 1.0998 at x = 2.3994."""

_ACTIVATION_ROUNDINGS: Final = 8
"""In silu(gate) * up: an exponential good to 2 units in the last place counts 4, sum, quotient, product and the
conversion one each."""


@dataclasses.dataclass(frozen=True)
class Bracket:
    """Outputs `[n, H]` between which a right output lies, element by element.

    Attributes:
        low, high: the least and the greatest right output, in the output's dtype.
        nearest: the output if no operation within an expert had rounded; the only right one for data on which none
            does.
    """

    low: Tensor
    high: Tensor
    nearest: Tensor

    def misses(self, output: Tensor) -> Tensor:
        """bool `[n, H]`, the elements of an output that are wrong; NaN is."""
        return ~((self.low <= output) & (output <= self.high))


def dense_layer(
    experts: GatedMlp,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    placement: Placement,
    *,
    wire: str = "bf16",
    mx_alignment: int = 0,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Bracket:
    """What `MoeLayer` must return for these tokens.

    Values are formed in fp64, beside a bound on what the experts' arithmetic may be off in any order of summation: a
    dot product of K terms by at most g(K) = K u / (1 - K u) of the sum of its terms' magnitudes, where u is 2**-24 or
    2**-53 by the experts' compute dtype (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1; it holds
    without under- and overflow). A rank's share then lies in an interval, and so does the output, because rounding and
    addition are monotone: the summation rule of combine is applied to the intervals' ends. Where no rounding boundary
    lies between the ends they are equal, and a single output is right.

    Args:
        experts: all experts, by global id.
        hidden_states: `[n, H]`.
        topk_ids: integer `[n, k]`; ids outside the experts add nothing.
        topk_weights: fp32 `[n, k]`.
        placement: which experts' outputs one rank adds before it rounds.
        wire: name of the wire format in which the rows travel.
        mx_alignment, global_scale: of the wire format.
        dtype: of the rows on the combine wire and of the output.

    Returns:
        `Bracket` of `[n, H]`.
    """
    form = wire_format(wire)
    sent = form.quantize(hidden_states, alignment=mx_alignment, global_scale=global_scale)
    rows = form.dequantize(*sent, hidden_size=hidden_states.shape[1], global_scale=global_scale).double()
    shape = (placement.ep_size, *hidden_states.shape)
    value, bound, size = (torch.zeros(shape, dtype=torch.float64, device=rows.device) for _ in range(3))
    for expert in range(experts.num_experts):
        rank = placement.owner(expert)
        made, off = _apply(experts, expert, rows)
        for pick in range(topk_ids.shape[1]):
            weight = torch.where(topk_ids[:, pick] == expert, topk_weights[:, pick], 0).double()[:, None]
            value[rank] += weight * made
            bound[rank] += weight.abs() * off
            size[rank] += weight.abs() * (made.abs() + off)
    unit = _UNITS[experts.compute_dtype]
    bound += _growth(topk_ids.shape[1], unit) * size
    # The fp64 value is off as well, by 2**-53 / unit of the bound; the last term covers the arithmetic of the bound.
    bound *= 1 + _UNITS[torch.float64] / unit + 2.0**-20
    return Bracket(*(_sum(each, dtype) for each in (value - bound, value + bound, value)))


def _apply(experts: GatedMlp, expert: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 output of one expert and by how much arithmetic in its compute dtype may be off."""
    unit = _UNITS[experts.compute_dtype]
    w13, w2 = experts.w13[expert].double(), experts.w2[expert].double()
    gate, up = (rows @ w13.T).chunk(2, dim=1)
    gate_off, up_off = (_growth(experts.hidden_size, unit) * (rows.abs() @ w13.abs().T)).chunk(2, dim=1)
    gated, gated_off = silu(gate).abs(), _MAX_SLOPE * gate_off
    inner = silu(gate) * up
    rounded = 1 + _growth(_ACTIVATION_ROUNDINGS, unit)
    inner_off = (gated + gated_off) * (up.abs() + up_off) * rounded - inner.abs()
    sums = (inner.abs() + inner_off) @ w2.abs().T
    return inner @ w2.T, _growth(experts.intermediate_size, unit) * sums + inner_off @ w2.abs().T


def _growth(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit)


def _sum(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """The summation rule of combine: shares `[ep, n, H]` rounded, added in fp32 by ascending rank, rounded."""
    total = torch.zeros(shares.shape[1:], dtype=torch.float32, device=shares.device)
    for share in shares:
        # By way of fp32, as the experts' own output goes.
        total += share.float().to(dtype).float()
    return total.to(dtype)
