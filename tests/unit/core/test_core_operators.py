"""dispatch and combine as operators: opcheck, fakes, handles and their end, on a group of one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import a2a
from a2a import ops
from a2a.comm.protocol import SingleComm
from a2a.errors import ConfigError, ShapeError, StateError

MOST, HIDDEN, TOP_K = 8, 32, 2


class Restarting(a2a.MoeAlltoAll):
    """Brings itself into the state that a verb needs, so that any operator can be run any number of times."""

    def dispatch(self, *arguments: Any, **keywords: Any) -> Any:
        if self.state == "dispatched":
            self.reset()
        return super().dispatch(*arguments, **keywords)

    def combine(self, *arguments: Any, **keywords: Any) -> Any:
        self.be_dispatched()
        return super().combine(*arguments, **keywords)

    def be_dispatched(self) -> None:
        if self.state == "idle":
            super().dispatch(*picks(5, self.workspace.device))


TRANSPORTS = ["host", *(["nvlink"] if torch.cuda.is_available() else [])]


def picks(n: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Ids, payloads and R; every second token goes nowhere."""
    ids = torch.arange(n * TOP_K, dtype=torch.int32).view(n, TOP_K) % 4
    ids[1::2] = -1
    rows = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)).bfloat16()
    ids, rows = ids.to(device), rows.to(device)
    return ids, [rows, ids], MOST


def built(kind: type[a2a.MoeAlltoAll] = a2a.MoeAlltoAll, transport: str = "host", **more: Any) -> a2a.MoeAlltoAll:
    return kind(max_num_tokens=MOST, top_k=TOP_K, num_experts=4, hidden_size=HIDDEN, comm=SingleComm(),
                transport=transport, **more)  # fmt: skip


@pytest.fixture
def moe() -> Iterator[a2a.MoeAlltoAll]:
    with built() as made:
        yield made


def operator(name: str) -> Any:
    return getattr(torch.ops.a2a, name).default


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_opcheck(n: int, transport: str) -> None:
    with built(Restarting, transport) as moe:
        assert isinstance(moe, Restarting)
        handle, device = ops.bind(moe), moe.workspace.device
        ids, rows, most = picks(n, device)
        torch.library.opcheck(operator("dispatch"), (handle.turn, ids, rows, 1, most, 0, False, -1, 1))
        torch.library.opcheck(operator("dispatch"), (handle.turn, ids, rows, 1, most, 0, True))
        moe.be_dispatched()
        torch.library.opcheck(operator("combine_area"), (handle.turn, ids, 1, most, HIDDEN, torch.bfloat16))
        payload = torch.randn(1, MOST, HIDDEN, device=device)
        moe.reset()
        for dtype in (None, torch.bfloat16):
            for blocks in (payload[..., :16].contiguous(), payload[0, :, :16].contiguous()):
                torch.library.opcheck(operator("combine"), (handle.turn, blocks, most, 5, 0, dtype))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operators_do_what_the_verbs_do(transport: str) -> None:
    with built(transport=transport) as moe:
        compare_with_verbs(moe)


def compare_with_verbs(moe: a2a.MoeAlltoAll) -> None:
    handle = ops.bind(moe)
    for n in (0, 1, 5, 8):
        ids, rows, most = picks(n, moe.workspace.device)
        wanted = [each.clone() for each in moe.dispatch(ids, rows, most, None, 1)]
        counts, sums = moe.recv_counts.clone(), moe.combine(wanted[0], most)
        views, recv_counts = ops.dispatch(handle, ids, rows, most, in_place=n % 2 == 0, expert_id_payload_index=1)
        assert torch.equal(recv_counts, counts) and len(views) == 2
        assert all(map(torch.equal, views, wanted))
        first = moe.workspace[0, moe.layout.region("dispatch").offset_bytes :]
        assert (views[0].data_ptr() == first.data_ptr()) is (n % 2 == 0)
        area = ops.combine_area(handle, rows[0], most, HIDDEN, torch.bfloat16)
        assert area.data_ptr() == moe.get_combine_payload_tensor_in_workspace(most, HIDDEN, torch.bfloat16).data_ptr()
        area.copy_(views[0])
        assert torch.equal(ops.combine(handle, area, most, n), sums)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_a_handle_serves_other_modes_than_it_was_made_in(moe: a2a.MoeAlltoAll, around: Any) -> None:
    """Model loaders build layers under a default device, and engines under inference mode."""
    with around():
        handle = ops.bind(moe)
    assert handle.turn.device.type == "cpu"
    compare_with_verbs(moe)
    with torch.inference_mode():
        compare_with_verbs(moe)
    compare_with_verbs(moe)


def test_fakes_know_shapes_for_every_number_of_tokens(moe: a2a.MoeAlltoAll) -> None:
    real = ops.bind(moe)
    some = torch.zeros(77, HIDDEN, dtype=torch.bfloat16)
    kinds = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        rows = mode.from_tensor(some, source=ConstantSource("rows"), symbolic_context=kinds)
        scales = rows.new_empty((rows.shape[0], 3), dtype=torch.uint8)
        ids = rows.new_empty((rows.shape[0], TOP_K), dtype=torch.int32)
        handle = ops.Handle(mode.from_tensor(real.turn), 3, 0)
        views, counts = ops.dispatch(handle, ids, [rows, scales, ids], MOST)
        area = ops.combine_area(handle, rows, MOST, HIDDEN, torch.float16)
        sums = ops.combine(handle, area, MOST, rows.shape[0])
        flat = ops.combine(handle, area.flatten(0, 1), MOST, rows.shape[0], output_dtype=torch.float32)
        low = ops.combine(handle, area, MOST, rows.shape[0], use_low_precision=True)
    assert [(tuple(each.shape), each.dtype) for each in (*views, counts, area)] == [
        ((3, MOST, HIDDEN), torch.bfloat16),
        ((3, MOST, 3), torch.uint8),
        ((3, MOST, TOP_K), torch.int32),
        ((3,), torch.int32),
        ((3, MOST, HIDDEN), torch.float16),
    ]
    for made, dtype in ((sums, torch.float16), (flat, torch.float32), (low, torch.bfloat16)):
        assert made.dtype == dtype and made.shape[1] == HIDDEN
        assert isinstance(made.shape[0], torch.SymInt) and made.shape[0].node.expr == rows.shape[0].node.expr
    assert not shape_env.guards, "no number of tokens is held to anything"


def test_a_handle_ends_with_its_object() -> None:
    with built() as moe:
        handle, again = ops.bind(moe), ops.bind(moe)
        assert again.turn is handle.turn
    ids, rows, most = picks(5)
    for call in (
        lambda: ops.dispatch(handle, ids, rows, most),
        lambda: ops.combine_area(handle, ids, most, HIDDEN, torch.bfloat16),
        lambda: ops.combine(handle, rows[0], most, 5),
    ):
        with pytest.raises(StateError, match=r"rank 0: .* 'closed'; bind a live object"):
            call()
    with pytest.raises(StateError, match="bind is not possible"):
        ops.bind(moe)
    assert not ops._BOUND and not ops._TURNS


def test_a_handle_keeps_no_object_alive() -> None:
    moe = built()
    handle, seen = ops.bind(moe), weakref.ref(moe)
    del moe
    gc.collect()
    assert seen() is None and not ops._BOUND and not ops._TURNS
    with pytest.raises(StateError):
        ops.combine(handle, torch.zeros(1, MOST, HIDDEN), MOST, 0)


def test_a_handle_outlives_growth() -> None:
    with built() as moe:
        handle = ops.bind(moe)
        assert moe.ensure(max_num_tokens=2 * MOST, hidden_size=2 * HIDDEN)
        ids, rows, _ = picks(12)
        wide = torch.cat([rows[0], rows[0]], dim=1)
        received, _ = ops.dispatch(handle, ids, [wide], 2 * MOST)
        assert torch.equal(ops.combine(handle, received[0], 2 * MOST, 12)[::2], wide[::2])


def test_contexts_share_the_turn() -> None:
    with built(num_contexts=2) as moe:
        handles = ops.bind(moe), ops.bind(moe, 1)
        assert handles[0].turn is handles[1].turn
        ids, rows, most = picks(5)
        got = [ops.dispatch(each, ids, [rows[0] + place], most)[0] for place, each in enumerate(handles)]
        sums = [ops.combine(each, views[0], most, 5) for each, views in zip(handles, got, strict=True)]
        assert torch.equal(sums[0][::2], rows[0][::2])
        assert torch.equal(sums[1][::2], (rows[0] + 1)[::2])
        assert int(handles[0].turn[2]) == 4
        with pytest.raises(ConfigError, match="num_contexts = 2"):
            ops.bind(moe, 2)


def test_refusals_are_those_of_the_verbs(moe: a2a.MoeAlltoAll) -> None:
    handle = ops.bind(moe)
    ids, rows, most = picks(5)
    with pytest.raises(StateError, match="call dispatch first"):
        ops.combine(handle, torch.zeros(1, most, HIDDEN), most, 5)
    with pytest.raises(ShapeError, match="max_num_tokens = 8"):
        ops.dispatch(handle, ids, rows, most + 1)
    views, _ = ops.dispatch(handle, ids, rows, most)
    with pytest.raises(ShapeError, match="output"):
        ops.combine(handle, views[0], most, 4)
    with pytest.raises(ConfigError, match="output_dtype"):
        ops.combine(handle, views[0], most, 5, output_dtype=torch.float8_e4m3fn)
    assert moe.state == "dispatched"
    ops.combine(handle, views[0], most, 5)
