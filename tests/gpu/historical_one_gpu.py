"""Eight ranks as streams of one process on one GPU, through the historical functions alone.

    python tests/gpu/historical_one_gpu.py [int64]

Says "exact" when every row, id, counter, table and sum of every rank is what it must be. Token t of rank r is filled
with 16 r + t; its picks are experts (5 r + 3 t + i) % 21, of which ranks 0 to 4 hold three each and the others two; the
last pick is -1 and goes nowhere. Rank 3 sends nothing in the second round. Each rank's ids are scrubbed while the
dispatches of those before it wait for the others. Ids are int32 unless int64 is asked for.
"""

import sys

import torch

from a2a.integrations.flashinfer import install

install()

from flashinfer.comm import (  # noqa: E402
    MoeAlltoAll,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)

RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS, INVALID = 8, 14, 256, 4, 21, 99
ID_DTYPE = torch.int64 if "int64" in sys.argv[1:] else torch.int32
OWNER = [rank for rank in range(RANKS) for _ in range(3 if rank < EXPERTS % RANKS else 2)]


def inputs_of(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and ids of a rank."""
    tokens = torch.arange(num_tokens)
    ids = torch.stack([(5 * rank + 3 * tokens + i) % EXPERTS for i in range(TOP_K)], dim=1).to(ID_DTYPE)
    ids[:, -1] = -1
    return (16 * rank + tokens).unsqueeze(1).expand(-1, HIDDEN).bfloat16().contiguous(), ids


def tables_of(ids: torch.Tensor) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Target ranks, slots and send counts of a rank."""
    targets, slots, sent = [], [], [0] * RANKS
    for picks in ids.tolist():
        owners = [-1 if pick < 0 else OWNER[pick] for pick in picks]
        firsts = [owner if owner not in owners[:i] else -1 for i, owner in enumerate(owners)]
        targets.append(firsts)
        slots.append([-1 if dst < 0 else sent[dst] for dst in firsts])
        for dst in set(firsts) - {-1}:
            sent[dst] += 1
    return targets, slots, sent


def main() -> None:
    """Plays three rounds and checks all ranks."""
    size = moe_a2a_get_workspace_size_per_rank(RANKS, TOKENS, 2 * HIDDEN + ID_DTYPE.itemsize * TOP_K, 2 * HIDDEN)
    workspace = torch.zeros((RANKS, size), dtype=torch.uint8, device="cuda")
    metainfo = [moe_a2a_initialize(workspace, rank, RANKS, TOKENS) for rank in range(RANKS)]
    streams = [torch.cuda.Stream() for _ in range(RANKS)]

    def read(rank: int, name: str, *shape: int) -> torch.Tensor:
        start = int(metainfo[rank][MoeAlltoAll._METAINFO_INDEX[f"{name}_OFFSET_INDEX"]])
        numel = int(torch.tensor(shape).prod())
        return workspace[rank, start : start + 4 * numel].view(torch.int32).view(shape).cpu()

    for most, counts in ((14, [14] * RANKS), (9, [5, 9, 1, 0, 7, 2, 9, 3]), (1, [1] * RANKS)):
        told = [inputs_of(rank, counts[rank]) for rank in range(RANKS)]
        sent = [tuple(each.cuda() for each in one) for one in told]
        torch.cuda.synchronize()
        got = []
        for rank in range(RANKS):
            with torch.cuda.stream(streams[rank]):
                views, offset, _ = moe_a2a_dispatch(
                    sent[rank][1], [*sent[rank]], workspace, metainfo[rank], most, rank, RANKS, TOP_K, EXPERTS
                )
                moe_a2a_sanitize_expert_ids(views[1], workspace, metainfo[rank], rank, INVALID)
                got.append((views, offset))
        torch.cuda.synchronize()
        tables = [tables_of(ids) for _, ids in told]
        payloads = []
        for rank, ((rows, row_ids), offset) in enumerate(got):
            targets, slots, counted = tables[rank]
            n = counts[rank]
            assert read(rank, "SEND_COUNTERS", RANKS).tolist() == counted
            assert read(rank, "RECV_COUNTERS", RANKS).tolist() == [tables[src][2][rank] for src in range(RANKS)]
            assert read(rank, "TOPK_TARGET_RANKS", TOKENS, TOP_K)[:n].tolist() == targets
            assert read(rank, "TOPK_SEND_INDICES", TOKENS, TOP_K)[:n].tolist() == slots
            for src, (hidden, ids) in enumerate(told):
                here = [t for t, row in enumerate(tables[src][0]) if rank in row]
                assert torch.equal(rows[src, : len(here)].cpu(), hidden[here])
                assert torch.equal(row_ids[src, : len(here)].cpu(), ids[here])
                assert (row_ids[src, len(here) :] == INVALID).all()
            start = rank * workspace.stride(0) + offset
            payload = moe_a2a_wrap_payload_tensor_in_workspace(
                workspace, [RANKS, most], start, start + rows.numel() * 2, torch.bfloat16
            )
            payloads.append(payload.copy_(rows))
        torch.cuda.synchronize()
        outs = []
        for rank in reversed(range(RANKS)):
            with torch.cuda.stream(streams[rank]):
                out = torch.full((counts[rank], HIDDEN), torch.nan, dtype=torch.bfloat16, device="cuda")
                common = (workspace, metainfo[rank], most, rank, RANKS, TOP_K, got[rank][1])
                outs.append(moe_a2a_combine(payloads[rank], counts[rank], *common, True, output=out))
        torch.cuda.synchronize()
        for rank, out in zip(reversed(range(RANKS)), outs, strict=True):
            times = torch.tensor([len(set(row) - {-1}) for row in tables[rank][0]]).view(-1, 1)
            # Sums of up to four numbers below 128: whole numbers that bf16 may round once.
            assert torch.equal(out.cpu(), (told[rank][0].float() * times).bfloat16())
    print("8 ranks on one GPU: exact", flush=True)


if __name__ == "__main__":
    main()
