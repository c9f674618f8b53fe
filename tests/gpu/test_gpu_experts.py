"""The mxfp8 layer's parts on a GPU: the bytes of the CPU, exact products, and what this GPU was found to have."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from a2a.experts import (
    GatedMlp,
    Mxfp8Experts,
    align_mxfp8_moe_weights,
    dispatch_w8a8_mxfp8_linear,
    mm_mxfp8,
    mxfp8_quantize,
    pack_topk,
    unpack_topk,
)
from a2a.experts.mxfp8_linear import BACKENDS
from a2a.experts.mxfp8_rows import choose_quantize
from a2a.quant import ScaleLayout

pytestmark = pytest.mark.gpu(1)


def same(gpu: Tensor, cpu: Tensor) -> bool:
    return gpu.is_cuda and torch.equal(gpu.cpu().view(torch.uint8), cpu.view(torch.uint8))


def rows(n: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + width)
    sizes = torch.exp2(torch.randint(-40, 40, (n, 1), generator=generator).float())
    made = (torch.randn(n, width, generator=generator) * sizes).bfloat16()
    made[::5, 7], made[1::5, 40], made[2::5, 9] = float("nan"), float("inf"), -0.0
    return made


@pytest.mark.parametrize("layout", list(ScaleLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize(("hidden", "alignment"), [(160, 128), (2880, 256)])
@pytest.mark.parametrize("n", [0, 1, 7, 128, 300])
def test_quantising(n: int, hidden: int, alignment: int, layout: ScaleLayout) -> None:
    x = rows(n, hidden)
    chosen = choose_quantize("cuda")
    assert chosen.backend != "torch" or importlib.util.find_spec("cuda") is None, chosen.why
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = x.to(dtype)
        for backend in {"auto", "torch", chosen.backend}:
            made = mxfp8_quantize(given.cuda(), alignment, layout, backend=backend)
            assert all(map(same, made, mxfp8_quantize(given, alignment, layout))), backend


def test_quantising_rows_that_are_not_aligned() -> None:
    x = rows(33, 77)
    for part in (x[1:], x[:, 1:], x[::3]):
        assert all(map(same, mxfp8_quantize(part.cuda(), 64), mxfp8_quantize(part, 64)))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("inner", [16, 48, 64, 128])
def test_weights_on_an_index_matrix(inner: int, gated: bool) -> None:
    height = 2 * inner if gated else inner
    w13 = torch.arange(2 * height * 96, dtype=torch.int32).view(2, height, 96)
    w2 = torch.arange(2 * 96 * inner, dtype=torch.int32).view(2, 96, inner)
    s13 = torch.randint(0, 256, (2, height, 3), dtype=torch.uint8)
    s2 = torch.randint(0, 256, (2, 96, -(-inner // 32)), dtype=torch.uint8)
    given = w13, s13, w2, s2
    made = align_mxfp8_moe_weights(*(each.cuda() for each in given), gated=gated)
    assert all(map(same, made, align_mxfp8_moe_weights(*given, gated=gated)))
    w8 = [each.to(torch.uint8).view(torch.float8_e4m3fn) for each in (w13, w2)]
    made = align_mxfp8_moe_weights(w8[0].cuda(), s13.cuda(), w8[1].cuda(), s2.cuda(), gated=gated)
    assert all(map(same, made, align_mxfp8_moe_weights(w8[0], s13, w8[1], s2, gated=gated)))


def test_packed_ids() -> None:
    ids = torch.tensor([[0, 1, 32767, -1], [-1, 5, 255, 3]], dtype=torch.int32)
    weights = torch.tensor([[-0.5, 1.0, -1.25, -2.0], [0.3, -0.3, 1e-3, 0.0]])
    packed = pack_topk(ids.cuda(), weights.cuda())
    assert same(packed, pack_topk(ids, weights))
    assert all(map(same, unpack_topk(packed), unpack_topk(pack_topk(ids, weights))))


@pytest.mark.parametrize("m", [0, 1, 7, 128])
def test_products_are_exact_on_integers(m: int) -> None:
    """In every way that works here; a way that does not was refused with a reason."""
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-4, 5, (n, 256), generator=generator).to(torch.float8_e4m3fn) for n in (m, 128))
    left, right = (torch.randint(126, 129, (n, 8), generator=generator, dtype=torch.uint8) for n in (m, 128))
    wanted = mm_mxfp8(a, b, left, right)
    chosen = dispatch_w8a8_mxfp8_linear(device="cuda")
    assert chosen.backend in BACKENDS and len(chosen.why) >= 2, chosen.why
    for backend in {"dequantize", chosen.backend}:
        assert same(mm_mxfp8(a.cuda(), b.cuda(), left.cuda(), right.cuda(), backend=backend), wanted), backend


def test_routed_experts_are_close_to_those_of_the_cpu() -> None:
    experts = GatedMlp.random(4, 160, 48, seed=1)
    x, local = torch.randn(64, 160, generator=torch.Generator().manual_seed(2)).bfloat16(), torch.arange(4)
    packed = pack_topk(torch.arange(64 * 2).view(64, 2) % 5 - 1, torch.full((64, 2), -0.75))
    outputs = []
    for device in ("cpu", "cuda"):
        mine = Mxfp8Experts.quantize(experts.to(device), alignment=128)
        data, scales = mxfp8_quantize(x.to(device), 128)
        out = torch.zeros(64, 160, device=device)
        mine.write(out, packed.to(device), data, scales, local.int().to(device))
        outputs.append(out.cpu())
    assert (outputs[0] - outputs[1]).norm() <= 2.0**-5 * outputs[0].norm()


def test_no_host_synchronisation_outside_the_experts() -> None:
    x, w = rows(64, 256).nan_to_num(0, 0, 0).cuda(), rows(128, 256).nan_to_num(0, 0, 0).cuda()
    linear = dispatch_w8a8_mxfp8_linear(device="cuda")
    weight, scales = mxfp8_quantize(w, 0, linear.weight_layout)

    def everything() -> Tensor:
        return linear(x, weight, scales, weight_layout=linear.weight_layout)

    wanted = everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    graph.replay()
    assert torch.equal(captured, wanted)
