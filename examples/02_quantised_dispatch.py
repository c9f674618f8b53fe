"""The exchange quantises while it sends: bf16 in, the bytes and scales of a wire format out.

    python examples/02_quantised_dispatch.py                 # two ranks; or under mpiexec or torchrun, see 01

For each format: the bytes that a token takes on the way, how far its values are off; what arrives is bit for bit what
quantising first would have made.
"""

import os

import torch

import a2a
from a2a.comm import detect, spawn
from a2a.quant import wire_format

HIDDEN, TOKENS = 256, 5


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


def main() -> None:
    for name in ("bf16", "fp8_block", "mxfp8", "nvfp4", "mxfp4"):
        wire = wire_format(name)
        with a2a.MoeAlltoAll(
            max_num_tokens=9, top_k=2, num_experts=4, hidden_size=HIDDEN, wire_format=name, transport="host"
        ) as moe:
            mine = tokens_of(moe.ep_rank)
            # Every token picks experts 0 and 1: all rows go to rank 0.
            topk_ids, topk_weights = torch.tensor([[0, 1]] * TOKENS), torch.full((TOKENS, 2), 0.5)
            # nvfp4 takes one more scale, of the whole tensor and equal on all ranks.
            scale = torch.tensor(2.0) if wire.needs_global_scale else None

            # Scales come one row per token; scale_layout= swizzles them for kernels that want that.
            got = moe.dispatch_tokens(
                mine, topk_ids, topk_weights, runtime_max_tokens_per_rank=TOKENS, global_scale=scale
            )
            for source, count in enumerate(got.recv_counts.tolist()):
                data, scales = wire.quantize(tokens_of(source)[:count], global_scale=scale)
                assert torch.equal(got.hidden_states[source, :count].view(torch.uint8), data.view(torch.uint8))
                if got.scales is not None and scales is not None:
                    assert torch.equal(got.scales[source, :count].view(torch.uint8), scales.view(torch.uint8))
            scales = None if got.scales is None else got.scales.flatten(0, 1)
            values = wire.dequantize(got.hidden_states.flatten(0, 1), scales, global_scale=scale, dtype=torch.bfloat16)
            combined = moe.combine(values, TOKENS)
            carried = wire.quantize(mine, global_scale=scale)
            assert torch.equal(combined, wire.dequantize(*carried, global_scale=scale, dtype=torch.bfloat16))
            if moe.ep_rank == 0:
                off = ((combined - mine).float().norm() / mine.float().norm()).item()
                sizes = wire.data_bytes_per_token(HIDDEN), wire.scale_bytes_per_token(HIDDEN)
                print(f"{name:10} {sizes[0]:4} bytes of data, {sizes[1]:3} of scales a token; off by {off:.2%}")


if __name__ == "__main__":
    if detect(os.environ).kind == "none":
        spawn.run(main, 2, timeout_s=120)
    else:
        main()
