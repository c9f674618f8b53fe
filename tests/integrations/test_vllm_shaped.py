"""A MoE layer as vLLM drives it, on the host transport: prepare, identity experts, finalize."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_shapes import (
    COUNTS,
    HALF_STEP,
    LAYERS,
    MOST,
    NUM_EXPERTS,
    NUM_RANKS,
    TOP_K,
    ActivationFormat,
    All2AllManagerBase,
    Forward,
    FusedMoEPrepareAndFinalizeModular,
    QuantConfig,
    WeightAndReduce,
    build,
    distinct_ranks,
    play,
    tokens,
)

from a2a.errors import ConfigError, ShapeError, StateError


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


def every_layer(comm: Any, counts: tuple[int, ...]) -> list[int]:
    forward = Forward()
    layers = build(comm, forward, LAYERS)
    before = forward.manager.moe_alltoall.config
    for name, layer in layers.items():
        for in_place in (True, False):
            play(forward, layer, comm.Get_rank(), counts, LAYERS[name], in_place=in_place, seed=len(name))
    assert forward.manager.moe_alltoall.config == before
    forward.manager.destroy()
    return [before.hidden_size, before.max_num_tokens, before.dispatch_bytes_per_token]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_every_format_gives_back_each_token_once_per_rank_of_its_experts(
    run_ranks: Any, counts: tuple[int, ...]
) -> None:
    for hidden, tokens_, row in run_ranks(every_layer, NUM_RANKS, counts):
        widest = 512 + 512 // 32  # of 288 elements, padded to 256
        assert (hidden, tokens_) == (288, MOST) and row >= widest + 8 * TOP_K


def first_words(comm: Any) -> tuple[Any, ...]:
    forward = Forward()
    layer = build(comm, forward, {"bf16": LAYERS["bf16"]})["bf16"]
    manager = forward.manager
    assert isinstance(layer, FusedMoEPrepareAndFinalizeModular) and isinstance(manager, All2AllManagerBase)
    assert layer.activation_format is ActivationFormat.Standard
    assert layer.topk_indices_dtype() == torch.int32 and layer.max_num_tokens_per_rank() is None
    assert layer.num_dispatchers() == NUM_RANKS and layer.output_is_reduced() and not layer.supports_async()
    assert manager.initialized and manager.get_handle({}) is manager and manager.world_size == NUM_RANKS
    first = manager.moe_alltoall.workspace_size_per_rank
    manager.initialize(max_num_tokens=2, top_k=2, num_experts=NUM_EXPERTS, hidden_size=64)
    assert manager.moe_alltoall.workspace_size_per_rank == first, "never shrinks"
    manager.initialize(2 * MOST, TOP_K + 1, NUM_EXPERTS, 64, x_bytes_per_token=32, x_sf_bytes_per_token=4)
    config = manager.moe_alltoall.config
    assert (config.max_num_tokens, config.top_k, config.hidden_size) == (2 * MOST, TOP_K + 1, 96)
    with pytest.raises(ConfigError, match="num_experts"):
        manager.initialize(MOST, TOP_K, NUM_EXPERTS + 1, 64)
    # The class of releases up to 0.32 calls the manager's exchange itself.
    rows, weights, ids = tokens(comm.Get_rank(), 3, 96)
    views = manager.moe_alltoall.dispatch(
        token_selected_experts=ids, input_payloads=[rows, ids, weights], runtime_max_tokens_per_rank=3,
        invalid_token_expert_id=-1, expert_id_payload_index=1,
    )  # fmt: skip
    output = torch.empty_like(rows)
    manager.combine_into(payload=views[0].clone(), runtime_max_tokens_per_rank=3, output=output)
    assert torch.equal(output, (rows.float() * distinct_ranks(ids)[:, None]).bfloat16())
    kept = manager.moe_alltoall.workspace.data_ptr()
    manager.checkpoint_prepare()
    with pytest.raises(StateError, match="released"):
        layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    manager.checkpoint_restore()
    assert manager.moe_alltoall.workspace.data_ptr() == kept
    play(forward, layer, comm.Get_rank(), (3,) * NUM_RANKS, LAYERS["bf16"], in_place=True)
    manager.cleanup()
    manager.checkpoint_prepare()
    manager.checkpoint_restore()
    assert not manager.initialized
    with pytest.raises(StateError, match="not built"):
        manager.moe_alltoall.dispatch(ids, [rows], 3)
    manager.initialize(MOST, TOP_K, NUM_EXPERTS, 64)
    manager.destroy()
    return config.max_num_tokens, config.top_k


def test_the_manager_grows_to_the_union_and_tells_what_vllm_asks(run_ranks: Any) -> None:
    assert run_ranks(first_words, NUM_RANKS) == [(2 * MOST, TOP_K + 1)] * NUM_RANKS


def two_micro_batches(comm: Any) -> int:
    forward = Forward(num_micro_batches=2)
    spec = LAYERS["bf16"]
    layer = build(comm, forward, {"bf16": spec})["bf16"]
    assert layer.supports_async() and layer.supports_dbo()
    rank, hidden = comm.Get_rank(), spec[0]
    forward.sizes = sizes = (2, 0, 5, 1)
    kept: list[tuple[Tensor, Tensor, Any]] = []
    for micro_batch in (0, 1):
        forward.micro_batch = micro_batch
        rows, weights, ids = tokens(rank, sizes[rank], hidden, seed=micro_batch)
        kept.append((rows, ids, layer.prepare_async(rows, weights, ids, NUM_EXPERTS, None, False, None, False)))
    for micro_batch in (0, 1):
        forward.micro_batch = micro_batch
        rows, ids, receive = kept[micro_batch]
        got, _, _, got_ids, got_weights = receive()
        output = torch.empty_like(rows)
        done = layer.finalize_async(output, got.clone(), got_weights, got_ids, False, None)
        assert done() is None
        assert torch.equal(output, (rows.float() * distinct_ranks(ids)[:, None]).bfloat16())
    forward.manager.destroy()
    return forward.regions


def test_two_micro_batches_are_in_flight_in_contexts_of_their_own(run_ranks: Any) -> None:
    assert run_ranks(two_micro_batches, NUM_RANKS) == [4] * NUM_RANKS


def experts_that_pad_and_experts_that_leave_the_sum(comm: Any) -> None:
    forward = Forward()
    layer = build(comm, forward, {"bf16": LAYERS["bf16"]})["bf16"]
    rank, hidden = comm.Get_rank(), LAYERS["bf16"][0]
    forward.sizes = (3,) * NUM_RANKS
    rows, weights, ids = tokens(rank, 3, hidden)
    wanted = (rows.float() * distinct_ranks(ids)[:, None]).bfloat16()

    got, *_, got_ids, got_weights = layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    padded = torch.nn.functional.pad(got, (0, 32), value=9.0)
    area = layer.allocate_fused_expert_output(tuple(padded.shape), padded.dtype, padded.device, None)
    assert area is None, "wider than what comes back"
    output = torch.empty_like(rows)
    layer.finalize(output, padded, got_weights, got_ids, False, None)
    assert torch.equal(output, wanted)

    # A layer of padded rows, whose experts leave the padding out.
    got, *_, got_ids, got_weights = layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    area = layer.allocate_fused_expert_output((got.shape[0], 64), got.dtype, got.device, None)
    assert area is not None
    made, output = area.copy_(got[:, :64]), torch.empty_like(rows[:, :64].contiguous())
    layer.finalize(output, made, got_weights, got_ids, False, None)
    assert torch.equal(output, wanted[:, :64])

    got, *_, got_ids, got_weights = layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    each = got[:, None, :].expand(-1, TOP_K, -1) / TOP_K
    output = torch.empty(rows.shape, dtype=torch.float32)
    layer.finalize(output, each.contiguous(), torch.ones_like(got_weights), got_ids, False, WeightAndReduce())
    assert torch.allclose(output, rows.float() * distinct_ranks(ids)[:, None], rtol=2**-6)

    layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    with pytest.raises(ShapeError, match="at least 96"):
        layer.finalize(torch.empty_like(rows), got[:, :64].contiguous(), got_weights, got_ids, False, None)
    forward.manager.moe_alltoall.reset()

    alone = ids[:, :1].contiguous()
    got, *_, got_ids, got_weights = layer.prepare(
        rows, weights[:, :1], alone, NUM_EXPERTS, None, apply_router_weight_on_input=True, quant_config=None
    )
    output = torch.empty_like(rows)
    layer.finalize(output, got.clone(), got_weights, got_ids, True, None)
    assert torch.equal(output, rows * weights[:, :1].bfloat16() * distinct_ranks(alone)[:, None].bfloat16())
    # One pick a token: as many rows as experts that reduce give back, and yet without its weight.
    got, *_, got_ids, got_weights = layer.prepare(rows, weights[:, :1], alone, NUM_EXPERTS, None, False, None)
    layer.finalize(output, got[:, None, :].clone(), got_weights, got_ids, False, WeightAndReduce())
    assert torch.equal(output, (rows.float() * weights[:, :1] * distinct_ranks(alone)[:, None]).bfloat16())
    with pytest.raises(ConfigError, match="top_k = 1"):
        layer.prepare(rows, weights, ids, NUM_EXPERTS, None, True, None)
    with pytest.raises(ConfigError, match=r"mxfp6.*'nvfp4', 'mxfp8'.*block_shape"):
        layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, QuantConfig("mxfp6_e3m2"))
    forward.manager.destroy()


def test_what_experts_may_give_back(run_ranks: Any) -> None:
    run_ranks(experts_that_pad_and_experts_that_leave_the_sum, NUM_RANKS)


def built_as_engines_build(comm: Any) -> None:
    """Under another default device and dtype, as model loaders set them."""
    forward = Forward()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        layer = build(comm, forward, {"bf16": LAYERS["bf16"]})["bf16"]
        assert torch.empty(1).device.type == "meta" and torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float32)
    play(forward, layer, comm.Get_rank(), (3, 0, 2, 1), LAYERS["bf16"], in_place=True)
    forward.manager.destroy()


def test_building_is_the_same_under_a_model_loader(run_ranks: Any) -> None:
    run_ranks(built_as_engines_build, NUM_RANKS)


def low_precision(comm: Any) -> None:
    forward = Forward()
    layer = build(comm, forward, {"bf16": LAYERS["bf16"]}, low_precision_combine=True)["bf16"]
    forward.sizes = (3,) * NUM_RANKS
    rows, weights, ids = tokens(comm.Get_rank(), 3, 96)
    got, *_, got_ids, got_weights = layer.prepare(rows, weights, ids, NUM_EXPERTS, None, False, None)
    assert layer.allocate_fused_expert_output(tuple(got.shape), got.dtype, got.device, None) is None
    output = torch.empty_like(rows)
    layer.finalize(output, got.clone(), got_weights, got_ids, False, None)
    exact = rows.float() * distinct_ranks(ids)[:, None]
    assert not torch.equal(output, exact.bfloat16())
    assert ((output.float() - exact).abs() <= exact.abs() * (HALF_STEP + 2**-8) + 2**-10).all()
    forward.manager.destroy()


def test_an_eight_bit_combine_wire(run_ranks: Any) -> None:
    run_ranks(low_precision, NUM_RANKS)
