"""SGLang: `--moe-a2a-backend flashinfer` on a2a.

    pip install a2a                     # beside SGLang (0.5.2x), which finds the plugin by its entry point
    python -m sglang.launch_server --model MODEL --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend flashinfer

    python examples/09_sglang.py        # which arguments go together, and a layer on two ranks, with or without SGLang

`SGLANG_PLUGINS`, if set, must name `a2a`. The engine's own dispatcher then finds a2a where it looks for FlashInfer.
"""

import importlib.util
import os
from types import SimpleNamespace

import torch

from a2a.comm import detect, resolve, spawn
from a2a.errors import ConfigError
from a2a.integrations import sglang as adapter

COUNTS, EXPERTS, HIDDEN = (3, 0), 4, 64


def arguments() -> None:
    on = {"moe_a2a_backend": "flashinfer", "tp_size": 8, "ep_size": 8, "attn_dp_size": 8}
    resolved = adapter.resolve_config(**on, quantization="mxfp8", flashinfer_a2a_dispatch_type="auto")
    print(f"mxfp8, all automatic: rows as {resolved.dispatch_type}, experts on {resolved.moe_runner_backend}")
    try:
        adapter.resolve_config(**on, moe_runner_backend="triton", flashinfer_a2a_dispatch_type="nvfp4")
    except ConfigError as error:
        print(f"triton with nvfp4 rows is refused: {error.wanted}")


def main() -> None:
    comm = resolve(None, timeout_s=60)
    # Stands in for the engine: what it is asked while a layer is built and run.
    engine = adapter.Engine(
        dispatch_output=lambda rows, scales, topk, area, dtype: SimpleNamespace(rows=rows, scales=scales, area=area),
        topk_output=lambda weights, ids, logits: (weights, ids), materialize=lambda topk: topk,
        max_num_tokens=lambda: 8, dispatch_type=lambda: "bf16", tokens_per_rank=lambda: max(COUNTS),
    )  # fmt: skip
    exchanges, runner = adapter.Exchanges(transport="host"), SimpleNamespace(runner_backend="flashinfer_cutlass")
    layer = adapter.Dispatcher(engine, exchanges, comm, 2, EXPERTS, hidden_size=HIDDEN, moe_runner_config=runner)
    n = COUNTS[comm.Get_rank()]
    tokens, ids = torch.ones(n, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 3]] * n).view(n, 2)
    got = layer.dispatch(tokens, SimpleNamespace(topk_ids=ids, topk_weights=torch.ones(n, 2)))
    made = torch.mul(got.rows, 0.5, out=got.area)  # the experts write into the combine area
    assert torch.equal(layer.combine(SimpleNamespace(hidden_states=made)), tokens)
    print(f"rank {comm.Get_rank()} brought {n} tokens and has them back, summed over two experts")
    exchanges.close()


if __name__ == "__main__":
    if detect(os.environ).kind != "none":
        raise SystemExit(main())
    found = importlib.util.find_spec("sglang") is not None
    print("SGLang finds" if found else "SGLang is not installed here; it would find", "a2a by its entry point")
    arguments()
    spawn.run(main, 2, (), timeout_s=120)
