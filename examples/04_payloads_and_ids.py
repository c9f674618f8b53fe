"""What travels with a token, where it goes, and what the tables say about it.

    python examples/04_payloads_and_ids.py                   # four ranks; or under mpiexec or torchrun, see 01

Ten experts on four ranks do not divide evenly: 3, 3, 2, 2. Rank 1 has no tokens. A payload of our own tells where each
row came from. An id outside 0..9 means that this pick goes nowhere.
"""

import os

import torch

import a2a
from a2a.comm import detect, spawn

EXPERTS, ROWS = 10, 6


def main() -> None:
    # Room for bf16 rows, int32 ids and fp32 weights is there anyway; 16 bytes more a token for our own payload.
    with a2a.MoeAlltoAll(
        max_num_tokens=ROWS, top_k=3, num_experts=EXPERTS, hidden_size=8, extra_payload_bytes_per_token=16,
        transport="host",
    ) as moe:  # fmt: skip
        rank = moe.ep_rank
        n = 0 if rank == 1 else 4
        # Token 1 has two picks on one rank and is sent there once; token 2 has one pick that counts, token 3 none.
        topk_ids = torch.tensor([[0, 3, 9], [1, 2, 8], [-1, 4, EXPERTS], [-1, -1, -1]], dtype=torch.int32)[:n]
        rows = torch.full((n, 8), float(rank + 1)).bfloat16()
        origin = torch.stack([torch.full((n,), rank), torch.arange(n)], dim=1)
        got_rows, got_ids, got_origin = moe.dispatch(topk_ids, [rows, topk_ids, origin], ROWS)

        for source, count in enumerate(moe.recv_counts.tolist()):
            # Rows of a block come from one rank, in the order of its tokens; padded slots hold the id -1.
            assert (got_origin[source, :count, 0] == source).all() and (got_ids[source, count:] == -1).all()
            assert (got_origin[source, :count, 1].diff() > 0).all()
            # A row keeps all its ids, those of other ranks too; at least one of them is an expert of this rank.
            assert (moe.placement.owners(got_ids[source, :count]) == rank).any(1).all()

        # The first pick of a token on a rank holds the rank and the token's slot there, later picks hold -1.
        targets, slots = moe.topk_target_ranks.clone(), moe.topk_send_indices.clone()
        owners = moe.placement.owners(topk_ids)
        for token in range(n):
            assert set(targets[token].tolist()) | {-1} == set(owners[token].tolist()) | {-1}

        # Any contiguous tensor can be combined, of another width too. A token that went nowhere comes back as zeros.
        num_ranks = (targets >= 0).sum(1, keepdim=True)
        assert torch.equal(moe.combine(got_rows[..., :4].contiguous(), ROWS), rows[:, :4] * num_ranks)
        if rank == 0:
            print(f"experts by rank      {[moe.placement.experts_of(each).tolist() for each in range(moe.ep_size)]}")
            print(f"picks of 4 tokens    {topk_ids.tolist()}")
            print(f"ranks of the picks   {owners.tolist()}\ntarget ranks         {targets.tolist()}")
            print(f"slots there          {slots.tolist()}\nrows received        {moe.recv_counts.tolist()}")


if __name__ == "__main__":
    if detect(os.environ).kind == "none":
        spawn.run(main, 4, timeout_s=120)
    else:
        main()
