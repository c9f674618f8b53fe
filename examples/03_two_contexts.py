"""Two micro-batches in flight: while one is with the experts, the other is on the way.

    python examples/03_two_contexts.py                       # four ranks; or under mpiexec or torchrun, see 01

`num_contexts=2` gives two independent rounds inside one workspace; `moe.contexts[i]` has the verbs of the object. Every
rank calls the verbs of one context in the same order; contexts may be interleaved at will.
"""

import os

import torch
from torch import Tensor

import a2a
from a2a.comm import detect, spawn

HIDDEN, TOP_K, EXPERTS, TOKENS, STEPS = 64, 2, 8, 6, 6


def micro_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens of whole numbers, so that every sum is exact, and their picks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).bfloat16()
    return rows, torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator, dtype=torch.int32)


def main() -> None:
    with a2a.MoeAlltoAll(
        max_num_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN, num_contexts=2, transport="host"
    ) as moe:
        order: list[str] = []
        arrived: dict[int, Tensor] = {}
        for step in range(STEPS + 1):
            if step < STEPS:
                rows, topk_ids = micro_batch(moe.ep_rank, step)
                (arrived[step],) = moe.contexts[step % 2].dispatch(topk_ids, [rows], TOKENS)
                order.append(f"dispatch {step}")
            if step > 0:
                # What came with micro-batch step-1 is still there: only the combine of its own context ends it.
                tripled = arrived.pop(step - 1) * 3
                combined = moe.contexts[(step - 1) % 2].combine(tripled, TOKENS)
                order.append(f"combine {step - 1}")
                rows, topk_ids = micro_batch(moe.ep_rank, step - 1)
                owners = moe.placement.owners(topk_ids)
                num_ranks = torch.tensor([[len(set(ranks))] for ranks in owners.tolist()])
                assert torch.equal(combined, rows * 3 * num_ranks)
        if moe.ep_rank == 0:
            print(", ".join(order))
            print(f"all {STEPS} micro-batches exact; contexts are now {[context.state for context in moe.contexts]}")


if __name__ == "__main__":
    if detect(os.environ).kind == "none":
        spawn.run(main, 4, timeout_s=120)
    else:
        main()
