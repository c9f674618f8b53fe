"""Two ranks exchange tokens and get them back summed.

    python examples/01_two_ranks.py                          # starts two processes of this machine itself
    mpiexec -n 2 python examples/01_two_ranks.py             # or a launcher starts the ranks
    torchrun --nproc-per-node 2 examples/01_two_ranks.py

Four experts: rank 0 holds experts 0 and 1, rank 1 holds experts 2 and 3. Every token picks two of them. `dispatch`
takes a token to each rank that holds one of its picks, once; the experts here double it; `combine` brings the doubled
rows home and adds them up.
"""

import os

import torch

import a2a
from a2a.comm import detect, spawn


def main() -> None:
    # All ranks build together; the launcher's environment, or the local spawn's, says who they are. Transport "host":
    # processes of one machine over shared memory, tensors on the CPU.
    with a2a.MoeAlltoAll(max_num_tokens=8, top_k=2, num_experts=4, hidden_size=4, transport="host") as moe:
        rank = moe.ep_rank
        # Three tokens of this rank: row t is filled with 10 * rank + t. Their picks lie on rank 0, on both, on rank 1.
        tokens = (10 * rank + torch.arange(3)[:, None].expand(3, 4)).bfloat16()
        topk_ids = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)

        # Any tensors [n, *] can be sent. 3 is R, the room for tokens of each source rank: equal on all ranks.
        received, received_ids = moe.dispatch(topk_ids, [tokens, topk_ids], 3)

        # received is [ranks, R, 4]: block s holds recv_counts[s] rows of rank s, and padded slots beyond them.
        counts = moe.recv_counts.tolist()
        rows = [received[source, :count, 0].tolist() for source, count in enumerate(counts)]
        assert rows == [[10 * source + t for t in ((0, 1), (1, 2))[rank]] for source in range(2)]
        # Padded slots hold the id -1, so that experts can skip them.
        assert all((received_ids[source, count:] == -1).all() for source, count in enumerate(counts))

        # Experts write straight into the memory that combine reads; what they write into padded slots is never read.
        view = moe.get_combine_payload_tensor_in_workspace(3, 4, torch.bfloat16)
        torch.mul(received, 2, out=view)
        combined = moe.combine(view, 3, payload_in_workspace=True)

        # Token 1 went to two ranks, so it comes back as the sum of two doubled rows.
        assert torch.equal(combined, tokens * torch.tensor([[2], [4], [2]]))
        if rank == 0:
            print(f"tokens of rank 0             {tokens[:, 0].tolist()}")
            print(f"rank 0 received from 0, 1    {rows}")
            print(f"combined on rank 0           {combined[:, 0].tolist()}")


if __name__ == "__main__":
    if detect(os.environ).kind == "none":
        spawn.run(main, 2, timeout_s=120)
    else:
        main()
