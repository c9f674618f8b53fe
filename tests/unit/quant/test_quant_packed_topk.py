"""Packed top-k: ids and weights in one int32, by hand, by property, and what does not fit."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2a.errors import ConfigError, ShapeError
from a2a.quant import pack_topk, unpack_topk


def bf16_bits(value: float) -> int:
    """fp32 -> bf16, to nearest, ties to even, on integers."""
    b = struct.unpack("<I", struct.pack("<f", value))[0]
    if b & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16 & 0xFFFF


def test_by_hand():
    ids = torch.tensor([[0, 1, 255, 32767, -1, -1]])
    weights = torch.tensor([[1.0, -1.0, 0.5, -0.0, 0.25, -2.0]])
    packed = pack_topk(ids, weights)
    want = [0x00003F80, 0x0001BF80, 0x00FF3F00, 0x7FFF8000, 0xFFFF3E80, 0xFFFFC000]
    assert [v & 0xFFFFFFFF for v in packed[0].tolist()] == want
    assert packed.dtype == torch.int32
    back, values = unpack_topk(packed)
    assert back.dtype == torch.int32 and values.dtype == torch.float32
    assert back.tolist() == ids.tolist() and values.tolist() == weights.tolist()


@settings(deadline=None, max_examples=100)
@given(
    pairs=st.lists(st.tuples(st.integers(-1, 32767), st.floats(width=32, allow_nan=False)), min_size=0, max_size=40),
    wide=st.booleans(),
)
def test_round_trip(pairs, wide):
    ids = torch.tensor([i for i, _ in pairs], dtype=torch.int64 if wide else torch.int32)
    weights = torch.tensor([w for _, w in pairs], dtype=torch.float32)
    packed = pack_topk(ids, weights)
    assert [v & 0xFFFFFFFF for v in packed.tolist()] == [(i & 0xFFFF) << 16 | bf16_bits(w) for i, w in pairs]
    back, values = unpack_topk(packed)
    assert back.tolist() == ids.tolist()
    assert values.view(torch.int32).tolist() == weights.bfloat16().float().view(torch.int32).tolist()


def test_weights_round_to_even_and_nan_has_one_pattern():
    weights = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7FC00001, -0x3FFFFF, 0x7F800001]).to(torch.int32)
    for width in (1, 3, 16, 33):  # torch's own casts of NaN differ between their vector loop and its tail
        row = weights.repeat(width).view(torch.float32)
        packed = pack_topk(torch.zeros(6 * width, dtype=torch.int32), row)
        assert packed.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0x7FC0, 0x7FC0] * width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_weights(dtype):
    weights = torch.tensor([[0.5, -0.75]], dtype=dtype)
    ids, back = unpack_topk(pack_topk(torch.tensor([[3, -1]]), weights))
    assert ids.tolist() == [[3, -1]] and back.tolist() == [[0.5, -0.75]]


@pytest.mark.parametrize("bad", [32768, -2, 1 << 40, -(1 << 40), 65535])
def test_ids_that_do_not_fit_are_refused_on_the_host(bad):
    with pytest.raises(ConfigError, match=str(bad)):
        pack_topk(torch.tensor([[1, bad]]), torch.ones(1, 2))


def test_empty_and_strided():
    assert pack_topk(torch.zeros(0, 8, dtype=torch.int64), torch.zeros(0, 8)).shape == (0, 8)
    assert [t.shape for t in unpack_topk(torch.zeros(0, 8, dtype=torch.int32))] == [(0, 8)] * 2
    ids, weights = torch.arange(12).view(3, 4).T, torch.ones(8, 6)[::2, ::2]
    packed = pack_topk(ids, weights)
    assert packed.is_contiguous() and unpack_topk(packed)[0].tolist() == ids.tolist()
    assert unpack_topk(packed.T)[0].is_contiguous()


def test_refusals():
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    for bad in ((ids.short(), weights), (ids, weights.double()), (ids, weights[:1]), (ids.float(), weights)):
        with pytest.raises(ShapeError):
            pack_topk(*bad)
    with pytest.raises(ShapeError):
        unpack_topk(ids.long())
