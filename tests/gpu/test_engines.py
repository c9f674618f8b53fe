"""The engines' adapters on CUDA tensors: layers as engines drive them, and as they capture them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_shapes import COUNTS, LAYERS, NUM_EXPERTS, NUM_RANKS, TOP_K, Forward, build, distinct_ranks, play, tokens

from a2a.integrations import sglang, trtllm

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "nvlink")
    monkeypatch.setenv("A2A_TIMEOUT_S", "60")


def every_vllm_layer(comm: Any, counts: tuple[int, ...]) -> str:
    forward = Forward()
    layers = build(comm, forward, LAYERS)
    for name, layer in layers.items():
        for in_place in (True, False):
            play(forward, layer, comm.Get_rank(), counts, LAYERS[name], in_place=in_place, seed=len(name))
    torch.cuda.synchronize()
    forward.manager.moe_alltoall.check()
    device = forward.manager.moe_alltoall.workspace.device.type
    forward.manager.destroy()
    return str(device)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_vllm_layers_of_every_format(run_ranks: Any, counts: tuple[int, ...]) -> None:
    assert run_ranks(every_vllm_layer, NUM_RANKS, counts) == ["cuda"] * NUM_RANKS


def captured_vllm_layer(comm: Any, name: str) -> int:
    """Prepare, experts in place and finalize in one graph, replayed with other tokens and picks."""
    forward = Forward(sizes=(4,) * NUM_RANKS)
    layer = build(comm, forward, {name: LAYERS[name]})[name]
    hidden, quant, deferred = LAYERS[name]
    rows, weights, ids = (each.cuda() for each in tokens(comm.Get_rank(), 4, hidden))
    output = torch.empty_like(rows)

    def run() -> None:
        got, _, _, got_ids, got_weights = layer.prepare(
            rows, weights, ids, NUM_EXPERTS, None, False, None if deferred else quant, deferred
        )
        area = layer.allocate_fused_expert_output((got.shape[0], hidden), rows.dtype, rows.device, None)
        # Ids travel with every format: what comes back is the id of a token's first pick, once for each rank.
        area.copy_(got_ids[:, :1].to(rows.dtype).expand(-1, hidden))
        layer.finalize(output, area, got_weights, got_ids, False, None)

    run()
    torch.cuda.synchronize()
    comm.barrier()
    moe = forward.manager.moe_alltoall
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(1, 4):
        if seed == 3:
            # The engine sleeps and wakes; the graph knows nothing of it.
            forward.manager.checkpoint_prepare()
            forward.manager.checkpoint_restore()
        for held, fresh in zip((rows, weights, ids), tokens(comm.Get_rank(), 4, hidden, seed), strict=True):
            held.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        moe.check()
        wanted = ids[:, :1].cpu().float() * distinct_ranks(ids.cpu())[:, None]
        assert torch.equal(output.cpu().float(), wanted.expand(-1, hidden)), f"seed {seed}"
    forward.manager.destroy()
    return 3


@pytest.mark.parametrize("name", ["bf16", "mxfp8 padded", "nvfp4 in tiles", "fp8 block"])
def test_a_captured_vllm_layer_replays(run_ranks: Any, name: str) -> None:
    assert run_ranks(captured_vllm_layer, NUM_RANKS, name) == [3] * NUM_RANKS


def two_micro_batches(comm: Any) -> None:
    forward = Forward(num_micro_batches=2)
    layer = build(comm, forward, {"bf16": LAYERS["bf16"]})["bf16"]
    hidden = LAYERS["bf16"][0]
    forward.sizes = sizes = (2, 0, 5, 1)
    kept = []
    for forward.micro_batch in (0, 1):
        rows, weights, ids = (each.cuda() for each in tokens(comm.Get_rank(), sizes[comm.Get_rank()], hidden, 7))
        received = layer.prepare_async(rows + forward.micro_batch, weights, ids, NUM_EXPERTS, None, False, None, False)
        kept.append((rows + forward.micro_batch, ids, received))
    for forward.micro_batch in (0, 1):
        rows, ids, receive = kept[forward.micro_batch]
        got, _, _, got_ids, got_weights = receive()
        output = torch.empty_like(rows)
        layer.finalize_async(output, got.clone(), got_weights, got_ids, False, None)()
        assert torch.equal(output.cpu(), (rows.cpu().float() * distinct_ranks(ids.cpu())[:, None]).bfloat16())
    forward.manager.destroy()


def test_two_micro_batches(run_ranks: Any) -> None:
    run_ranks(two_micro_batches, NUM_RANKS)


def sglang_and_trtllm(comm: Any) -> None:
    rank, counts, hidden = comm.Get_rank(), (3, 0, 5, 1), 96
    rows, weights, ids = (each.cuda() for each in tokens(rank, counts[rank], hidden))
    ids = ids.clamp(min=0)
    wanted = (rows.cpu().float() * distinct_ranks(ids.cpu())[:, None]).bfloat16()

    engine = sglang.Engine(
        dispatch_output=lambda got, scales, topk, area, dtype: SimpleNamespace(got=got, topk=topk, area=area),
        topk_output=lambda *parts: parts,
        materialize=lambda topk: topk,
        max_num_tokens=lambda: 8,
        dispatch_type=lambda: "bf16",
        tokens_per_rank=lambda: max(counts),
    )
    exchanges = sglang.Exchanges()
    for runner in ("flashinfer_cutlass", "deep_gemm"):
        config = SimpleNamespace(runner_backend=runner)
        layer = sglang.Dispatcher(
            engine, exchanges, comm, TOP_K, NUM_EXPERTS, hidden_size=hidden, moe_runner_config=config
        )
        sent = layer.dispatch(rows, SimpleNamespace(topk_ids=ids, topk_weights=weights))
        made: Tensor = sent.got.clone() if sent.area is None else sent.area.copy_(sent.got)
        assert torch.equal(layer.combine(SimpleNamespace(hidden_states=made)).cpu(), wanted), runner
    exchanges.close()

    mapping = SimpleNamespace(moe_ep_rank=rank, moe_ep_size=NUM_RANKS, world_size=NUM_RANKS)
    health = SimpleNamespace(get_mask=lambda: 2**NUM_RANKS - 1)
    method = trtllm.Communication(
        mapping, NUM_EXPERTS, TOP_K, 8, hidden_size=hidden, dtype=torch.bfloat16, num_experts=3, comm=comm,
        ep_group_health=health,
    )  # fmt: skip
    method.prepare_dispatch(ids, counts, torch.full((3,), rank, dtype=torch.int32, device="cuda"))
    got, _, _, _ = method.dispatch(rows, None, ids, weights, counts)
    gathered = method.get_eplb_gathered_statistics()
    assert gathered is not None and gathered[:, 0].tolist() == list(range(NUM_RANKS))
    area = method.get_combine_payload_tensor_in_workspace(max(counts), hidden, torch.bfloat16)
    area.copy_(got.view(area.shape))
    assert torch.equal(method.combine(area).cpu(), wanted)
    method.destroy()


def test_layers_of_sglang_and_tensorrt_llm(run_ranks: Any) -> None:
    run_ranks(sglang_and_trtllm, NUM_RANKS)
