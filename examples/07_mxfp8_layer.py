"""A MoE layer in mxfp8 from end to end, and the same layer as one graph of torch.compile.

    python examples/07_mxfp8_layer.py                        # two ranks; or under mpiexec or torchrun, see 01

Weights and rows are e4m3 with a scale per 32 elements. Rows are quantised before they travel, ids and weights travel
packed in one int32 a pick, experts write into the combine view. Any number of tokens, 0 too, runs through one graph.
"""

import os

import torch

import a2a
from a2a.comm import detect, spawn
from a2a.experts import GatedMlp, Mxfp8Experts, Mxfp8MoeLayer, align_mxfp8_moe_weights, dense_layer, pack_topk

HIDDEN, INNER, EXPERTS, TOP_K, MOST = 160, 48, 8, 2, 16


def main() -> None:
    plain = GatedMlp.random(EXPERTS, HIDDEN, INNER, seed=0)
    with a2a.MoeAlltoAll(
        max_num_tokens=MOST, top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN,
        wire_format="mxfp8", mx_alignment=128, transport="host",
    ) as moe:  # fmt: skip
        mine = plain.select(moe.placement.experts_of(moe.ep_rank))
        experts = Mxfp8Experts.quantize(mine, alignment=128)
        layer = Mxfp8MoeLayer(moe, experts)
        # The backend of a real program is inductor, torch's default; this one needs no C++ compiler.
        program = torch.compile(layer.forward, fullgraph=True, dynamic=True, backend="aot_eager")

        generator = torch.Generator().manual_seed(moe.ep_rank)
        for tokens in (5 + moe.ep_rank, 16, 0):
            hidden_states = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
            logits = torch.randn(tokens, EXPERTS, generator=generator)
            topk_weights, topk_ids = logits.softmax(dim=1).topk(TOP_K)
            packed = pack_topk(topk_ids, topk_weights)
            output = layer.forward(hidden_states, packed, MOST)
            assert torch.equal(program(hidden_states, packed, MOST), output)
            if tokens and moe.ep_rank == 0:
                exact = dense_layer(plain, hidden_states, topk_ids, topk_weights, moe.placement).nearest
                off = ((output - exact).float().norm() / exact.float().norm()).item()
                print(f"{tokens:2} tokens: compiled equals eager; {off:.1%} from the layer in bf16")
        if moe.ep_rank == 0:
            print(f"{HIDDEN} wide rows travel as {experts.wire_width} bytes and {experts.wire_width // 32} scales")
            print("products: " + "; ".join(experts.linear.why))
            # A kernel that reads shuffled tiles takes the same weights in its own order.
            w2 = experts.w2[..., :INNER]
            shuffled = align_mxfp8_moe_weights(experts.w13, experts.w13_scales, w2, experts.w2_scales)
            print(f"w13 {list(experts.w13.shape)} becomes {list(shuffled[0].shape)} for tile-shuffled kernels")


if __name__ == "__main__":
    if detect(os.environ).kind == "none":
        spawn.run(main, 2, timeout_s=120)
    else:
        main()
