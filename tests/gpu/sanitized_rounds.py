"""What the sanitizers look at: rounds of at most 8 tokens, all regimes, copied and quantized rows, on one GPU.

    python tests/gpu/sanitized_rounds.py streams|processes ROUNDS

As two streams of one process, or, where a tool lets one kernel run at a time, as two processes that share the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch
from device_ranks import REGIMES, Ranks
from exchange_case import Case, assert_equal, draw

import a2a
from a2a.comm import resolve, spawn
from a2a.quant import ScaleLayout

DEADLINE_S = 120.0
"""Under a tool a kernel may take a thousand times as long."""
OUTPUTS = ("mxfp8", "nvfp4", "mxfp4")
LAYOUTS = tuple(ScaleLayout)
CASES = {
    "copied": Case(ep_size=2, max_num_tokens=8, hidden_size=256, more_row_bytes=(3,), eplb=4),
    "token order": Case(ep_size=2, max_num_tokens=8, hidden_size=72, row_order="token", scrub="all"),
    "mxfp8": Case(ep_size=2, max_num_tokens=8, hidden_size=160),
    "fp8_block": Case(ep_size=2, max_num_tokens=8, hidden_size=256),
    "nvfp4": Case(ep_size=2, max_num_tokens=8, hidden_size=96),
}


def as_streams(rounds: int) -> int:
    """Rounds that were played and are exact."""
    done = 0
    for name, case in CASES.items():
        ranks = Ranks(case, name if "fp" in name else None, timeout_s=DEADLINE_S)
        for seed in range(rounds // len(CASES)):
            ranks.take(REGIMES[seed % len(REGIMES)])
            # 72 elements are no whole blocks of 16.
            made = (OUTPUTS[seed % len(OUTPUTS)], LAYOUTS[seed % len(LAYOUTS)]) if case.hidden_size % 32 == 0 else None
            ranks.play(draw(case, seed), staged=seed % 4 < 2, made=made if seed % 2 else None)
            done += 1
    return done


def one_process(rounds: int) -> int:
    """The same as one of two ranks."""
    comm = resolve(None, timeout_s=DEADLINE_S)
    torch.cuda.set_device(0)
    done = 0
    for name in ("copied", "token order"):
        case = CASES[name]
        with a2a.MoeAlltoAll(
            **case.constructor(), comm=comm, transport="nvlink", startup_timeout_s=DEADLINE_S, timeout_s=DEADLINE_S
        ) as moe:
            exchange = moe._shared.transport._exchange
            for seed in range(rounds // 2):
                exchange._small_max_tokens = 0 if seed % 2 else 1 << 20
                exchange.tune(exchange.tuning)
                drawn = draw(case, seed)
                receipts = drawn.receipts()
                rows = [each.cuda() for each in drawn.inputs[moe.ep_rank].payloads]
                stats = drawn.inputs[moe.ep_rank].eplb_local_stats
                moe.dispatch(
                    rows[1],
                    rows,
                    drawn.runtime_max_tokens_per_rank,
                    eplb_local_stats=None if stats is None else stats.cuda(),
                )
                output = moe.combine(drawn.expert_rows(moe.ep_rank, receipts).cuda(), drawn.runtime_max_tokens_per_rank)
                assert_equal(f"seed {seed}", output, drawn.sums(receipts)[moe.ep_rank])
                moe.check()
                done += 1
    return done


if __name__ == "__main__":
    mode, wanted = sys.argv[1], int(sys.argv[2])
    if mode == "streams":
        played = as_streams(wanted)
    else:
        played = min(spawn.run(one_process, 2, (wanted,), timeout_s=10 * DEADLINE_S))
    print(f"rounds played: {played}")
