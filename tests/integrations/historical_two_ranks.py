"""Two ranks through the historical API alone, as code that was written for it calls it.

    mpirun -n 2 python tests/integrations/historical_two_ranks.py

On GPUs where there are two, else between processes of this machine. Says "exact" when every row, counter, table and sum
is what it must be. Token t of rank r is filled with 50 r + t; its picks are experts t % 6 and (t + 1) % 6, of which
ranks hold three each; -1 goes nowhere. Rank 1 sends nothing in the third round.
"""

import torch
from mpi4py import MPI

from a2a.integrations.flashinfer import install

install()

from flashinfer.comm import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank  # noqa: E402
from flashinfer.comm.mapping import Mapping  # noqa: E402

HIDDEN, TOKENS, TOP_K, EXPERTS, RANKS, INVALID = 256, 40, 3, 6, 2, -1


def inputs_of(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and ids of a rank."""
    tokens = torch.arange(num_tokens)
    ids = torch.stack([tokens % EXPERTS, (tokens + 1) % EXPERTS, torch.full_like(tokens, -1)], dim=1).int()
    return (50 * rank + tokens).unsqueeze(1).expand(-1, HIDDEN).bfloat16().contiguous(), ids


def main() -> None:
    """Plays three rounds and checks them."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    assert size == RANKS, f"{size} ranks: start two"
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    mapping = Mapping(world_size=size, rank=rank, gpus_per_node=size, tp_size=size, moe_ep_size=size)
    workspace_size = moe_a2a_get_workspace_size_per_rank(size, TOKENS, 2 * HIDDEN + 4 * TOP_K, 2 * HIDDEN)
    moe = MoeAlltoAll(mapping, TOKENS, TOP_K, EXPERTS, workspace_size)

    def read(name: str, *shape: int) -> torch.Tensor:
        start = int(moe.metainfo[MoeAlltoAll._METAINFO_INDEX[f"{name}_OFFSET_INDEX"]])
        numel = int(torch.tensor(shape).prod())
        return moe.workspace[rank, start : start + 4 * numel].view(torch.int32).view(shape).cpu()

    for most, counts in ((40, (40, 13)), (7, (5, 7)), (9, (9, 0))):
        hidden, ids = inputs_of(rank, counts[rank])
        payloads = [hidden.to(device), ids.to(device)]
        rows, row_ids = moe.dispatch(payloads[1], payloads, most, INVALID, 1)
        mine = range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
        for src in range(size):
            theirs, their_ids = inputs_of(src, counts[src])
            here = [t for t, picks in enumerate(their_ids.tolist()) if set(picks) & set(mine)]
            assert int(read("RECV_COUNTERS", size)[src]) == len(here)
            assert torch.equal(rows[src, : len(here)].cpu(), theirs[here])
            assert torch.equal(row_ids[src, : len(here)].cpu(), their_ids[here])
            assert (row_ids[src, len(here) :] == INVALID).all()
        targets, slots, sent = [], [], [0] * size
        for picks in ids.tolist():
            owners = [-1 if pick < 0 else pick // 3 for pick in picks]
            firsts = [owner if owner not in owners[:i] else -1 for i, owner in enumerate(owners)]
            targets.append(firsts)
            slots.append([-1 if dst < 0 else sent[dst] for dst in firsts])
            for dst in set(firsts) - {-1}:
                sent[dst] += 1
        n = counts[rank]
        assert read("SEND_COUNTERS", size).tolist() == sent
        assert read("TOPK_TARGET_RANKS", TOKENS, TOP_K)[:n].tolist() == targets
        assert read("TOPK_SEND_INDICES", TOKENS, TOP_K)[:n].tolist() == slots
        view = moe.get_combine_payload_tensor_in_workspace(most, HIDDEN, torch.bfloat16)
        torch.mul(rows, rank + 1, out=view)
        combined = moe.combine(view, most, payload_in_workspace=True)
        factor = torch.tensor([sum(dst + 1 for dst in set(row) - {-1}) for row in targets])
        assert torch.equal(combined.cpu().float(), hidden.float() * factor.unsqueeze(1))
    MPI.COMM_WORLD.Barrier()
    print(f"rank {rank}: exact", flush=True)


if __name__ == "__main__":
    main()
