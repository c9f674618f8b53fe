"""experts: what a MoE layer does around the exchange: reference experts, MXFP8 linear, weight layouts.

Owns the list of what this room offers. Refuses to know ranks, workspaces and transports, which the exchange has.
"""

from __future__ import annotations

from a2a.experts.dense import Bracket, dense_layer
from a2a.experts.gated_mlp import GatedMlp
from a2a.experts.layer import MoeLayer
from a2a.experts.mxfp8_experts import Mxfp8Experts, routed_mxfp8_moe
from a2a.experts.mxfp8_layer import Mxfp8MoeLayer
from a2a.experts.mxfp8_linear import Mxfp8Linear, dispatch_w8a8_mxfp8_linear, mm_mxfp8
from a2a.experts.mxfp8_rows import mxfp8_quantize
from a2a.experts.mxfp8_weights import align_mxfp8_moe_parameters, align_mxfp8_moe_weights
from a2a.quant import pack_topk, unpack_topk

__all__ = [
    "Bracket",
    "GatedMlp",
    "MoeLayer",
    "Mxfp8Experts",
    "Mxfp8Linear",
    "Mxfp8MoeLayer",
    "align_mxfp8_moe_parameters",
    "align_mxfp8_moe_weights",
    "dense_layer",
    "dispatch_w8a8_mxfp8_linear",
    "mm_mxfp8",
    "mxfp8_quantize",
    "pack_topk",
    "routed_mxfp8_moe",
    "unpack_topk",
]
