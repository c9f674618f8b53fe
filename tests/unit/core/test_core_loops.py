"""The host transport's loops: numba and torch agree with each other, with the oracle and with sums made by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exchange_case import Case, draw, play
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor

import a2a
from a2a import reference
from a2a.comm import Comm
from a2a.host.loops import Loops, fastest, have_numba
from a2a.host.numba_loops import NumbaLoops
from a2a.host.torch_loops import TorchLoops
from a2a.placement import Placement
from a2a.reference import RankInput

LOOPS: dict[str, Loops] = {"numba": NumbaLoops(), "torch": TorchLoops()}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
NAN, INF = float("nan"), float("inf")

each_loops = pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
seeds = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Route(NamedTuple):
    slots: Tensor
    counts: Tensor
    targets: Tensor
    indices: Tensor


def routed(loops: Loops, ids: Tensor, placement: Placement, active: Sequence[int], compact: bool) -> Route:
    takes_part = torch.zeros(placement.ep_size, dtype=torch.uint8)
    takes_part[list(active)] = 1
    # A rank writes into tables that hold an older round.
    targets = torch.full(ids.shape, 99, dtype=torch.int32)
    indices = torch.full(ids.shape, 99, dtype=torch.int32)
    counts = torch.full((placement.ep_size,), 99, dtype=torch.int32)
    slots = torch.full((ids.shape[0], placement.ep_size), 99, dtype=torch.int32)
    loops.route(ids, placement.table, takes_part, compact, targets, indices, counts, slots)
    return Route(slots, counts, targets, indices)


@given(seeds, st.integers(0, 30), st.integers(1, 9), st.integers(1, 7), st.booleans(), st.booleans(), st.booleans())
@few
def test_routes_are_the_oracles(
    seed: int, n: int, k: int, ep: int, compact: bool, wide: bool, some_masked: bool
) -> None:
    random = generator(seed)
    placement = Placement(torch.randint(0, ep, (ep + 5,), generator=random), ep)
    ids = torch.randint(-2, placement.num_experts + 2, (n, k), generator=random)
    if n:
        ids[0, 0] = torch.iinfo(torch.int64).min if wide else -1
        ids[n // 2, -1] = torch.iinfo(torch.int64).max if wide else torch.iinfo(torch.int32).max
    ids = ids if wide else ids.int()
    active = [rank for rank in range(ep) if not some_masked or rank % 2 == 0]
    none = torch.full((0, k), -1)
    inputs = [RankInput(ids, [])] + [RankInput(none, [])] * (ep - 1)
    order = "compact" if compact else "token"
    wanted = reference.dispatch(inputs, placement, max(1, n), row_order=order, active_ranks=active)[0]
    _, hits = reference.destinations(ids, placement, active)
    for loops in LOOPS.values():
        route = routed(loops, ids, placement, active, compact)
        assert torch.equal(route.targets, wanted.topk_target_ranks)
        assert torch.equal(route.indices, wanted.topk_send_indices)
        assert torch.equal(route.counts, wanted.send_counts)
        assert route.slots.dtype == route.counts.dtype == torch.int32 and route.slots.shape == (n, ep)
        assert torch.equal(route.slots >= 0, hits)
        for rank in range(ep):
            taken = route.slots[:, rank][hits[:, rank]].tolist()
            assert taken == (list(range(len(taken))) if compact else hits[:, rank].nonzero().flatten().tolist())


@each_loops
def test_a_route_by_hand(loops: Loops) -> None:
    ids = torch.tensor([[0, 3, 1], [2, 9, 2], [-1, -5, 4]], dtype=torch.int32)
    route = routed(loops, ids, Placement([0, 0, 1, 1], 2), [0, 1], True)
    assert route.slots.tolist() == [[0, 0], [-1, 1], [-1, -1]] and route.counts.tolist() == [1, 2]
    assert route.targets.tolist() == [[0, 1, -1], [1, -1, -1], [-1, -1, -1]]
    assert route.indices.tolist() == [[0, 0, -1], [1, -1, -1], [-1, -1, -1]]


@given(seeds, st.integers(0, 20), st.integers(1, 5), st.integers(0, 70), st.booleans())
@few
def test_rows_land_in_their_slots_and_nothing_else_changes(
    seed: int, n: int, ep: int, row_bytes: int, compact: bool
) -> None:
    random = generator(seed)
    placement = Placement.contiguous(ep, ep)
    ids = torch.randint(-1, ep, (n, 2), generator=random)
    route = routed(LOOPS["torch"], ids, placement, range(ep), compact)
    rows = torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, generator=random)
    stride = n * row_bytes + 13
    before = torch.randint(0, 256, (5 + ep * stride,), dtype=torch.uint8, generator=random)
    wanted = before.clone()
    for rank in range(ep):
        for token in range(n):
            slot = int(route.slots[token, rank])
            if slot >= 0:
                at = 5 + rank * stride + slot * row_bytes
                wanted[at : at + row_bytes] = rows[token]
    for name, loops in LOOPS.items():
        memory = before.clone()
        loops.write_rows(rows, rows.shape[1], route.slots, memory, 5, stride)
        assert torch.equal(memory, wanted), name


@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([(torch.uint8, 127), (torch.int32, -1), (torch.int64, -1), (torch.int32, 2**31 - 1)]),
)
@few
def test_padded_rows_are_filled_and_valid_ones_kept(
    seed: int, ep: int, most: int, width: int, compact: bool, filled: tuple[torch.dtype, int]
) -> None:
    dtype, value = filled
    random = generator(seed)
    area = torch.randint(0, 100, (ep, most, width), generator=random).to(dtype)
    counts = torch.randint(0, most + 1, (ep,), dtype=torch.int32, generator=random)
    valid = torch.randint(0, 2, (ep, most), dtype=torch.uint8, generator=random)
    kept = torch.arange(most) < counts[:, None] if compact else valid != 0
    wanted = torch.where(kept[..., None], area, value)
    for name, loops in LOOPS.items():
        got = area.clone()
        loops.fill_padded(got, counts, None if compact else valid, value)
        assert got.dtype == dtype and torch.equal(got, wanted), name


def summed(loops: Loops, rows: Tensor, slots: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`rows`: `[ep, R, H']`, where each rank's block is followed by memory of somebody else."""
    ep, most, width = rows.shape
    words = torch.full((ep, most * width + 3), NAN, dtype=rows.dtype)
    words[:, 2 : 2 + most * width] = rows.flatten(1)
    output = torch.full((slots.shape[0], width), 7.0, dtype=out_dtype)
    loops.sum_rows(words.view(-1), 2, most * width + 3, slots, output)
    return output


def same(got: Tensor, wanted: Tensor) -> bool:
    """Equal bits, and NaN where a NaN is wanted, whatever its bits."""
    bits = BITS[got.dtype]
    equal = (got.view(bits) == wanted.view(bits)) | (got.isnan() & wanted.isnan())
    return got.dtype == wanted.dtype and got.shape == wanted.shape and bool(equal.all())


def plain_sums(rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """One addition after the other, in fp32, in numpy."""
    total = np.zeros((slots.shape[0], rows.shape[2]), np.float32)
    values = rows.float().numpy()
    with np.errstate(all="ignore"):
        for token, taken in enumerate(slots.tolist()):
            for rank, slot in enumerate(taken):
                if slot >= 0:
                    total[token] = total[token] + values[rank, slot]
    return torch.from_numpy(total).to(dtype)


def any_bits(dtype: torch.dtype, shape: tuple[int, ...], random: Tensor) -> Tensor:
    return random.view(BITS[dtype]).view(dtype).view(shape)


@given(
    seeds,
    st.integers(0, 12),
    st.integers(1, 6),
    st.one_of(st.integers(1, 40), st.sampled_from([2047, 2048, 2049])),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "tiny", "bits"]),
)
@settings(max_examples=80, deadline=None)
def test_sums_are_exact(
    seed: int, n: int, ep: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype, kind: str
) -> None:
    random, most = generator(seed), max(1, n)
    slots = torch.stack([torch.randperm(most, generator=random)[:n] for _ in range(ep)], 1).int()
    slots[torch.rand((n, ep), generator=random) < 0.3] = -1
    if kind == "bits":
        # Every bit pattern: NaN, Inf, subnormals.
        count = ep * most * width * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
        rows = any_bits(dtype, (ep, most, width), raw)
    else:
        scale = 1.0 if kind == "normal" else torch.finfo(dtype).smallest_normal
        rows = (torch.randn((ep, most, width), generator=random) * scale).to(dtype)
    wanted = plain_sums(rows, slots, out_dtype)
    for name, loops in LOOPS.items():
        assert same(summed(loops, rows, slots, out_dtype), wanted), name


@each_loops
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_nobody_sent_are_never_read(loops: Loops, dtype: torch.dtype) -> None:
    rows = torch.full((3, 2, 5), NAN, dtype=dtype)
    rows[1, 1] = 2.0
    slots = torch.tensor([[-1, 1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert summed(loops, rows, slots, dtype).tolist() == [[2.0] * 5, [0.0] * 5]
    infinite = torch.tensor([INF, -INF, NAN, INF, 1.0]).to(dtype).view(1, 1, 5).expand(2, 1, 5).clone()
    infinite[1, 0, 3] = -INF
    total = summed(loops, infinite, torch.zeros((1, 2), dtype=torch.int32), dtype)[0].tolist()
    assert total[:2] == [INF, -INF] and total[4] == 2.0
    assert total[2] != total[2] and total[3] != total[3]


@each_loops
@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        # bf16 has 8 bits. Halfway between 256 and 258, and between 258 and 260: the even mantissa each time.
        ([256.0, 1.0], torch.bfloat16, 256.0),
        ([258.0, 1.0], torch.bfloat16, 260.0),
        ([-256.0, -1.0], torch.bfloat16, -256.0),
        ([-258.0, -1.0], torch.bfloat16, -260.0),
        # Just off the halfway point, by what only fp32 keeps.
        ([256.0, 1.0, 2.0**-10], torch.bfloat16, 258.0),
        ([258.0, 1.0, -(2.0**-10)], torch.bfloat16, 258.0),
        # Rounded once at the end, not after each addition.
        ([256.0, 1.0, 1.0], torch.bfloat16, 258.0),
        # In ascending rank: 2**24 + 1 is 2**24 in fp32, 1 + 1 + 2**24 is not.
        ([2.0**24, 1.0, 1.0], torch.float32, 2.0**24),
        ([1.0, 1.0, 2.0**24], torch.float32, 2.0**24 + 2),
        # A mantissa of ones rounds into the next power of two, the largest into infinity.
        ([255.0, 0.5], torch.bfloat16, 256.0),
        ([3.3895313892515355e38, 1.3292279957849159e36], torch.bfloat16, INF),
        ([2.0**127, 2.0**127], torch.float32, INF),
        # Subnormals of bf16 are those of fp32.
        ([2.0**-133, 2.0**-133], torch.bfloat16, 2.0**-132),
        ([2.0**-126, -(2.0**-133)], torch.bfloat16, 2.0**-126 - 2.0**-133),
        # fp16 has 11 bits, its largest is 65504, its smallest 2**-24.
        ([2048.0, 1.0], torch.float16, 2048.0),
        ([2050.0, 1.0], torch.float16, 2052.0),
        ([65504.0, 15.0], torch.float16, 65504.0),
        ([65504.0, 16.0], torch.float16, INF),
        ([2.0**-24, 2.0**-24], torch.float16, 2.0**-23),
        ([2.0**-14, -(2.0**-24)], torch.float16, 2.0**-14 - 2.0**-24),
        # From +0: no sum is -0.
        ([-0.0, -0.0], torch.bfloat16, 0.0),
        ([-0.0], torch.float16, 0.0),
    ],
    ids=str,
)
def test_sums_by_hand(loops: Loops, values: list[float], dtype: torch.dtype, wanted: float) -> None:
    rows = torch.tensor(values, dtype=torch.float64).to(dtype).view(-1, 1, 1)
    assert rows.double().flatten().tolist() == values, "the example is not one: a value is not of the dtype"
    # Wide enough that vectorised code has a body and a rest.
    total = summed(loops, rows.expand(-1, 1, 37).contiguous(), torch.zeros((1, len(values)), dtype=torch.int32), dtype)
    assert same(total, torch.full((1, 37), wanted, dtype=dtype)), total[0, 0]


@each_loops
def test_fp32_rows_round_to_narrow_outputs(loops: Loops) -> None:
    halfway = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-149, -(2.0**-134), 3 * 2.0**-134]).view(1, 1, -1)
    slots = torch.zeros((1, 1), dtype=torch.int32)
    got = summed(loops, halfway, slots, torch.bfloat16)[0].double().tolist()
    assert got == [1.0, 1 + 2.0**-6, 0.0, 0.0, 2 * 2.0**-133]
    halfway = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25, 65520.0]).view(1, 1, -1)
    got = summed(loops, halfway, slots, torch.float16)[0].double().tolist()
    assert got == [1.0, 1 + 2.0**-9, 0.0, 2.0**-23, INF]


@each_loops
def test_nothing_to_do(loops: Loops) -> None:
    none = torch.empty((0, 3), dtype=torch.int32)
    route = routed(loops, none, Placement.contiguous(4, 2), [0, 1], True)
    assert route.counts.tolist() == [0, 0] and route.targets.shape == route.indices.shape == (0, 3)
    memory = torch.arange(8, dtype=torch.uint8)
    loops.write_rows(torch.empty((0, 5), dtype=torch.uint8), 5, route.slots, memory, 0, 4)
    assert memory.tolist() == list(range(8))
    assert summed(loops, torch.ones(2, 1, 4), route.slots, torch.float32).shape == (0, 4)


def test_the_fastest_is_numba_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert have_numba() and isinstance(fastest(), NumbaLoops)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not have_numba() and isinstance(fastest(), TorchLoops)


def without_numba(comm: Comm, everywhere: bool) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if everywhere or comm.Get_rank() == 1:
            # What importing a package that is not installed comes to.
            for name in ("numba", "llvmlite", "a2a.host.numba_loops", "a2a.host.numba_atomics", "a2a.host.numba_bells"):
                patch.setitem(sys.modules, name, None)
        case = Case(ep_size=comm.Get_size(), num_experts=9, more_row_bytes=(3,), scrub="all", eplb=5)
        with a2a.MoeAlltoAll(**case.constructor(), comm=comm, transport="host") as moe:
            for number in range(2):
                play(moe, draw(case, number), in_workspace=bool(number))
            transport: Any = moe._shared.transport
            return type(transport._loops).__name__, type(transport._bells).__name__


def test_the_host_transport_works_without_numba(run_ranks: Ranks) -> None:
    assert set(run_ranks(without_numba, 3, True)) == {("TorchLoops", "StreamBells")}


def test_ranks_with_and_without_numba_ring_the_same_bells(run_ranks: Ranks) -> None:
    with_numba = ("NumbaLoops", "StreamBells")
    assert run_ranks(without_numba, 3, False) == [with_numba, ("TorchLoops", "StreamBells"), with_numba]


@pytest.mark.parametrize("row_bytes", [1 << 16, (1 << 16) - 2])
@pytest.mark.parametrize("shift", [0, 64, 10])
def test_many_megabytes_arrive_like_few(row_bytes: int, shift: int) -> None:
    """Enough to be written past the caches, from whole lines and from anything else."""
    generator = torch.Generator().manual_seed(row_bytes + shift)
    n, ep = 150, 3
    rows = torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, generator=generator)
    goes = torch.rand((n, ep), generator=generator) < 0.8
    slots = torch.where(goes, goes.cumsum(0) - 1, -1).int()
    assert int(goes.sum()) * row_bytes > 16 << 20
    stride = n * row_bytes // 64 * 64 + 64
    for loops in LOOPS.values():
        raw = torch.zeros(shift + ep * stride + 64, dtype=torch.uint8)
        memory = raw[-raw.data_ptr() % 64 :]
        loops.write_rows(rows, rows.shape[1], slots, memory, shift, stride)
        for rank in range(ep):
            count = int(goes[:, rank].sum())
            block = memory[shift + rank * stride :][: count * row_bytes].view(count, row_bytes)
            assert torch.equal(block, rows[goes[:, rank]])
            assert not memory[shift + rank * stride + count * row_bytes : shift + (rank + 1) * stride].any()
