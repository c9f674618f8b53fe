"""Ranks through the `moe_ep` interface alone, with any release of FlashInfer that has it, and with none.

    torchrun --nproc-per-node 2 tests/integrations/moe_ep_two_ranks.py

On GPUs where there are, else between processes of this machine. Says "exact" when rows, ids, weights and sums are what
they must be: every token is filled with a number of its own and comes home once per rank that it was sent to.
"""

import torch
import torch.distributed as dist

from a2a.integrations.flashinfer import install

install()

import flashinfer  # noqa: E402
from flashinfer.moe_ep import (  # noqa: E402
    BootstrapConfig,
    MoEEpCommParams,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    create_communication,
)

HIDDEN, TOKENS, TOP_K = 128, 16, 2


def inputs_of(rank: int, num_tokens: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, ids and weights of a rank."""
    tokens = torch.arange(num_tokens)
    ids = torch.stack([tokens % num_experts, (3 * tokens + 1) % num_experts], dim=1).int()
    hidden = (16 * rank + tokens).unsqueeze(1).expand(-1, HIDDEN).bfloat16().contiguous()
    return hidden, ids, (ids + 0.5 + rank).float()


def main() -> None:
    """Plays rounds with and without the buffer for experts and checks them."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    # Three experts a rank and one more on the first: they need not divide.
    num_experts = 3 * size + 1
    params = MoEEpCommParams(num_experts, TOP_K, TOKENS, HIDDEN, dtype=torch.bfloat16)
    comm = create_communication(BootstrapConfig(size, rank), params, backend=NVLinkOneSidedConfig())
    assert isinstance(comm, NVLinkOneSidedAlltoAll) and comm.params is params
    owner = torch.tensor([0, *(rank for rank in range(size) for _ in range(3))])
    for played, counts in enumerate(([TOKENS - r for r in range(size)], [3 * r for r in range(size)])):
        most = max(counts)
        hidden, ids, weights = inputs_of(rank, counts[rank], num_experts)
        got = comm.dispatch(hidden.to(device), ids.to(device), weights.to(device), **{AT_MOST: most})
        for src in range(size):
            sent = inputs_of(src, counts[src], num_experts)
            here = (owner[sent[1]] == rank).any(1).nonzero().flatten()
            for rows, theirs in zip((got.hidden_states, got.topk_ids, got.topk_weights), sent, strict=True):
                assert torch.equal(rows.view(size, most, -1)[src, : len(here)].cpu(), theirs[here])
            assert (got.topk_ids.view(size, most, -1)[src, len(here) :] == -1).all()
        made = got.hidden_states * 2
        if played:
            made = comm.get_combine_input_buffer(torch.bfloat16).copy_(made)
        output = torch.empty((counts[rank], HIDDEN), dtype=torch.bfloat16, device=device)
        assert comm.combine(made, output=output) is output
        times = torch.tensor([len(set(picks)) for picks in owner[ids].tolist()]).unsqueeze(1)
        assert torch.equal(output.cpu().float(), hidden.float() * 2 * times)
    dist.barrier()
    comm.destroy()
    print(f"rank {rank}: exact with FlashInfer {getattr(flashinfer, '__version__', 'absent')}", flush=True)
    dist.destroy_process_group()


RELEASE = getattr(flashinfer, "__version__", "0.7.4")
AT_MOST = "max_tokens_per_rank" if RELEASE.startswith("0.7.2") else "runtime_max_tokens_per_rank"
"""How the release spells the busiest rank's tokens; both are understood here."""


if __name__ == "__main__":
    main()
