"""vLLM: its one-sided all2all back end on a2a.

    pip install a2a                     # beside vLLM (0.22 to 0.33), which finds the plugin by its entry point
    vllm serve MODEL --data-parallel-size 8 --enable-expert-parallel --all2all-backend flashinfer_nvlink_one_sided

    python examples/08_vllm.py          # what vLLM then calls in a layer, on two ranks, with or without vLLM

`VLLM_PLUGINS`, if set, must name `a2a`. With `--enable-dbo` two micro-batches are in flight in contexts of their own.
"""

import importlib
import importlib.util
import os

import torch

from a2a.comm import detect, resolve, spawn
from a2a.integrations import vllm as adapter

COUNTS, EXPERTS, HIDDEN = (3, 5), 4, 64


def main() -> None:
    comm = resolve(None, timeout_s=60)
    # Stands in for the engine: what it is asked while a layer is built and run.
    engine = adapter.Engine("rows", local_sizes=lambda: COUNTS, all2all_manager=lambda: manager)
    manager = adapter.Manager(comm, lambda: engine, transport="host")
    layer = adapter.PrepareAndFinalize(
        engine, max_num_tokens=8, top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN,
        dispatch_format=adapter.row_format(None),
    )  # fmt: skip
    rank = comm.Get_rank()
    tokens = torch.full((COUNTS[rank], HIDDEN), 1.0 + rank, dtype=torch.bfloat16)
    topk_ids = torch.tensor([[0, 3]] * COUNTS[rank], dtype=torch.int32)  # one expert on each rank
    weights = torch.full((COUNTS[rank], 2), 0.5)

    received, _, _, ids, _ = layer.prepare(tokens, weights, topk_ids, EXPERTS, None, False, quant_config=None)
    # The experts: they apply the weights, sum over their own picks and write into the combine area.
    made = layer.allocate_fused_expert_output(tuple(received.shape), received.dtype, received.device, None)
    torch.mul(received, 0.5, out=made)
    output = torch.empty_like(tokens)
    layer.finalize(output, made, weights, ids, False, None)

    assert torch.equal(output, tokens)
    if rank == 0:
        print(f"a layer of {EXPERTS} experts on 2 ranks: each token is the sum of what its experts made of it")
    manager.destroy()


if __name__ == "__main__":
    if detect(os.environ).kind != "none":
        raise SystemExit(main())
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here; it would call `register`, and its back end would be these classes:")
        print(f"  {adapter.Manager.__module__}.Manager, {adapter.PrepareAndFinalize.__module__}.PrepareAndFinalize")
    else:
        adapter.register()
        replaced = importlib.import_module(adapter.MANAGERS).FlashInferNVLinkOneSidedManager
        print(f"vLLM {importlib.import_module('vllm').__version__}: its manager is now {replaced.__mro__[1]}")
    spawn.run(main, 2, (), timeout_s=120)
