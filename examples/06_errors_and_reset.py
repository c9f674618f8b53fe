"""What one sees when ranks disagree, when one is late, and when one dies; and how to go on.

    python examples/06_errors_and_reset.py                   # three ranks, started here: a launcher would end the job

Every error is an `a2a.A2AError` whose fields hold the facts. No wait is endless: `startup_timeout_s` bounds those of
building and of the first round, `timeout_s` those of later rounds.
"""

import os
import time

import torch

import a2a
from a2a.comm import spawn
from a2a.errors import MismatchError, PeerLost, PeerTimeout


def one_round(moe: a2a.MoeAlltoAll, room: int = 4) -> None:
    rows, topk_ids = torch.ones((1, 8)).bfloat16(), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    (arrived,) = moe.dispatch(topk_ids, [rows], room)
    assert torch.equal(moe.combine(arrived.clone(), room), rows * 3)


def main() -> list[str]:
    seen = []
    with a2a.MoeAlltoAll(max_num_tokens=8, top_k=3, num_experts=3, hidden_size=8, transport="host") as moe:
        one_round(moe)
        try:
            one_round(moe, room=5 if moe.ep_rank == 2 else 4)
        except MismatchError as error:
            # The same on every rank, and nothing was sent: the object is as it was.
            seen.append(f"disagree: {error}")
        one_round(moe)
        moe.timeout_s = 2
        if moe.ep_rank == 1:
            time.sleep(4)
        try:
            one_round(moe)
        except PeerTimeout as error:
            # Rank 1 hears of it too. The round is lost; every rank has to say that it is ready for another.
            seen.append(f"late: {error}")
        moe.reset(timeout_s=60)
        one_round(moe)
        if moe.ep_rank == 2:
            os._exit(9)
        try:
            one_round(moe)
        except PeerLost as error:
            # Told at once, not at a deadline. Without rank 2 only a new object over fewer ranks can go on.
            seen.append(f"dead: {error}")
    return seen


if __name__ == "__main__":
    outcomes = {outcome.rank: outcome for outcome in spawn.outcomes(main, 3, timeout_s=120)}
    assert outcomes[2].exit_status == 9
    for rank in (0, 1):
        assert [line.partition(":")[0] for line in outcomes[rank].result] == ["disagree", "late", "dead"]
    print(*outcomes[0].result, sep="\n")
