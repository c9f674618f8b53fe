"""TensorRT-LLM: its one-sided communication on a2a.

    python examples/10_tensorrt_llm.py  # what a layer then calls, on two ranks of this machine, with or without it

TensorRT-LLM has no entry point for plugins. In the program that every rank runs, before the model is built:

    from a2a.integrations.trtllm import register; register()

and `TRTLLM_FORCE_COMM_METHOD=NVLINK_ONE_SIDED`, so that a failure is an error and not another method in silence.
"""

import importlib.util
import os
from types import SimpleNamespace

import torch

from a2a.comm import detect, resolve, spawn
from a2a.integrations.trtllm import FACTORY, Communication, Exchanges, register

COUNTS, SLOTS, HIDDEN = (3, 5), 5, 64  # slots need not divide by ranks


def main() -> None:
    comm = resolve(None, timeout_s=60)
    rank = comm.Get_rank()
    mapping = SimpleNamespace(moe_ep_rank=rank, moe_ep_size=2, world_size=2)
    layer = Communication(
        mapping, SLOTS, 2, max(COUNTS), hidden_size=HIDDEN, dtype=torch.bfloat16, num_experts=SLOTS, comm=comm,
        exchanges=Exchanges(transport="host"),
    )  # fmt: skip
    assert layer.is_workload_feasible(COUNTS, num_chunks=1)
    tokens = torch.full((COUNTS[rank], HIDDEN), 1.0 + rank, dtype=torch.bfloat16)
    slots = torch.tensor([[0, 4]] * COUNTS[rank])  # one slot on each rank

    # The load balancer's statistics travel in the same round.
    layer.prepare_dispatch(slots, COUNTS, torch.bincount(slots.flatten(), minlength=SLOTS).int())
    received, _, _, _ = layer.dispatch(tokens, None, slots, None, COUNTS)
    picks = layer.get_eplb_gathered_statistics()
    area = layer.get_combine_payload_tensor_in_workspace(max(COUNTS), HIDDEN, torch.bfloat16)
    torch.mul(received.view_as(area), 0.5, out=area)  # the experts write into the combine area
    output = layer.combine(area)

    assert torch.equal(output, tokens)
    if rank == 0:
        print(f"picks of each slot by rank: {picks.tolist()}")
        print("each token is the sum of what its two slots made of it")
    layer.destroy()


if __name__ == "__main__":
    if detect(os.environ).kind != "none":
        raise SystemExit(main())
    if importlib.util.find_spec("tensorrt_llm") is None:
        print("TensorRT-LLM is not installed here; with it, `register` replaces NVLinkOneSided where it is made:")
        print(f"  {FACTORY}")
    else:
        register()
        print("NVLinkOneSided of TensorRT-LLM will be a2a's")
    spawn.run(main, 2, (), timeout_s=120)
