"""A whole MoE layer: dispatch, gated experts that write into the combine view in place, combine.

    python examples/05_moe_layer.py                          # four ranks, the layer of OLMoE-1B-7B with narrow rows
    python examples/05_moe_layer.py gpt-oss-120b             # of another preset: `a2a presets` lists them

Experts, picks and wire format are the preset's; both widths are divided by 16, so that all experts fit this machine and
each rank can compare its output with the dense layer: every expert on every token, without an exchange.
"""

import os
import sys

import torch

import a2a
from a2a.comm import detect, spawn
from a2a.config import model_preset
from a2a.experts import GatedMlp, MoeLayer, dense_layer

NARROWED, TOKENS = 16, 6


def main(preset_name: str) -> None:
    preset = model_preset(preset_name)
    hidden, inner = preset.hidden_size // NARROWED, preset.moe_intermediate_size // NARROWED
    # In fp64 an expert's output hardly depends on the order of summation: nearly always one result is right.
    experts = GatedMlp.random(preset.num_experts, hidden, inner, seed=0, compute_dtype=torch.float64)
    with a2a.MoeAlltoAll(
        max_num_tokens=TOKENS, top_k=preset.top_k, num_experts=preset.num_experts, hidden_size=hidden,
        wire_format=preset.wire_format, mx_alignment=preset.mx_alignment, transport="host",
    ) as moe:  # fmt: skip
        layer = MoeLayer(moe, experts.select(moe.placement.experts_of(moe.ep_rank)))
        # The router is the model's business; here it is random. Ranks have different numbers of tokens.
        generator = torch.Generator().manual_seed(moe.ep_rank)
        tokens = torch.randn(TOKENS - moe.ep_rank % 3, hidden, generator=generator).bfloat16()
        logits = torch.randn(tokens.shape[0], preset.num_experts, generator=generator)
        topk_weights, topk_ids = logits.softmax(dim=1).topk(preset.top_k)

        output = layer.forward(tokens, topk_ids, topk_weights, TOKENS)

        wanted = dense_layer(
            experts, tokens, topk_ids, topk_weights, moe.placement,
            wire=preset.wire_format, mx_alignment=preset.mx_alignment,
        )  # fmt: skip
        assert not wanted.misses(output).any()
        if moe.ep_rank == 0:
            single = (wanted.low == wanted.high).double().mean().item()
            print(f"{preset.name}: {preset.num_experts} experts on {moe.ep_size} ranks, top {preset.top_k}")
            print(f"rows of {hidden} as {preset.wire_format}")
            print(f"rank 0 sent {moe.send_counts.tolist()} rows to ranks 0, 1, ... for its {tokens.shape[0]} tokens")
            print(f"output equals the dense layer; for {single:.0%} of its elements a single value was right")


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["olmoe-1b-7b"]
    if detect(os.environ).kind == "none":
        spawn.run(main, 4, arguments, timeout_s=120)
    else:
        main(*arguments)
