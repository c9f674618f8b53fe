"""experts: what a MoE layer does around the exchange: reference experts, MXFP8 linear, weight layouts.

Owns the list of what this room offers. Refuses to know ranks, workspaces and transports, which the exchange has.
"""

from __future__ import annotations

from a2a.experts.dense import Bracket, dense_layer
from a2a.experts.gated_mlp import GatedMlp
from a2a.experts.layer import MoeLayer

__all__ = ["Bracket", "GatedMlp", "MoeLayer", "dense_layer"]
