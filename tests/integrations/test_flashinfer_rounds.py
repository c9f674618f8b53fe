"""What a rank on a caller's workspace tells its kernels, without a GPU: places, order, states, masks, refusals."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.errors import ConfigError, MismatchError, PeerTimeout, ShapeError, StateError
from a2a.integrations import flashinfer as fi
from a2a.layout import align
from a2a.transport import CombineCall, DispatchCall

if importlib.util.find_spec("cuda") is None:
    pytest.skip("needs the CUDA packages: install a2a[cu13]", allow_module_level=True)

from a2a.integrations import flashinfer_functions as functions
from a2a.integrations import flashinfer_rounds as rounds
from a2a.nvlink import scrub_ids

EP, TOKENS, TOP_K, EXPERTS, HIDDEN = 2, 6, 2, 5, 64
ROWS = EP * TOKENS


class Launches:
    """In place of an exchange: remembers what it was told to launch."""

    def __init__(self, workspace: torch.Tensor, ep_rank: int, config: Any, layout: Any, *_: Any, **more: Any) -> None:
        self.told: list[DispatchCall | CombineCall] = []
        self.words = (SimpleNamespace(recorded=0, kind=0, phase=1, peer=1, round=1, waited_us=0, wanted=0, seen=0),)
        self.stream: object = None
        self.config, self.more, self.workspace = config, more, workspace
        self.budgets: tuple[float, float] | None = None

    def set_budgets(self, *budgets: float) -> None:
        self.budgets = (budgets[0], budgets[1])

    def dispatch(self, call: DispatchCall) -> None:
        self.told.append(call)

    def combine(self, call: CombineCall) -> None:
        self.told.append(call)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether a graph is being captured; everything else that asks for a GPU is answered too."""
    state = SimpleNamespace(now=False, scrubbed=[], loaded=[])
    scrubber = SimpleNamespace(scrub=lambda *told: state.scrubbed.append(told))
    monkeypatch.setattr(rounds, "id_scrubber", lambda index: state.loaded.append(index) or scrubber)
    monkeypatch.setattr(scrub_ids, "id_scrubber", lambda index: scrubber)
    monkeypatch.setattr(rounds, "Exchange", Launches)
    monkeypatch.setattr(rounds, "device_of_address", lambda address: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.now)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(rounds, "_is_on_gpu", lambda tensor: True)
    return state


def aligned(size: int) -> torch.Tensor:
    """As GPUs align theirs."""
    raw = torch.full((EP * size + 128,), 7, dtype=torch.uint8)
    start = -raw.data_ptr() % 128
    return raw[start : start + EP * size].view(EP, size)


def made(dispatch: int = 2 * HIDDEN + 4 * TOP_K, combine: int = 2 * HIDDEN) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A workspace and each rank's metainfo."""
    size = fi.moe_a2a_get_workspace_size_per_rank(EP, TOKENS, dispatch, combine)
    workspace = aligned(size)
    return workspace, [fi.moe_a2a_initialize(workspace, rank, EP, TOKENS) for rank in range(EP)]


def dispatch(workspace: torch.Tensor, metainfo: torch.Tensor, rank: int = 0, n: int = 3, width: int = 2 * HIDDEN,
             most: int = 4, **more: Any) -> tuple[list[torch.Tensor], int, torch.Tensor | None]:  # fmt: skip
    ids = torch.zeros((n, TOP_K), dtype=torch.int32)
    rows = torch.zeros((n, width), dtype=torch.uint8)
    return fi.moe_a2a_dispatch(ids, [rows, ids], workspace, metainfo, most, rank, EP, TOP_K, EXPERTS, **more)


def combine(workspace: torch.Tensor, metainfo: torch.Tensor, offset: int, rank: int = 0, n: int = 3,
            width: int = HIDDEN, most: int = 4, **more: Any) -> torch.Tensor:  # fmt: skip
    payload = torch.zeros((EP, most, width), dtype=torch.bfloat16)
    return fi.moe_a2a_combine(payload, n, workspace, metainfo, most, rank, EP, TOP_K, offset, **more)


def launches(workspace: torch.Tensor, rank: int = 0) -> list[DispatchCall | CombineCall]:
    (exchange,) = rounds.rank_of(workspace, rank)._exchanges.values()
    assert isinstance(exchange, Launches)
    return exchange.told


def test_initialize_zeroes_the_row_and_tells_its_offsets(capturing: Any) -> None:
    workspace, metainfo = made()
    assert not workspace.any() and torch.equal(metainfo[0], metainfo[1])
    workspace.fill_(9)
    fi.moe_a2a_initialize(workspace, 1, EP, TOKENS)
    assert not workspace[1].any() and (workspace[0] == 9).all()


def test_initialize_loads_what_later_calls_use(capturing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other ranks may wait on the GPU later, and loading would wait for these."""
    written: list[int] = []
    write = rounds.CallerRank._write_mask
    monkeypatch.setattr(rounds.CallerRank, "_write_mask", lambda rank, to: written.extend(to) or write(rank, to))
    made()
    assert capturing.loaded == [None] * EP and written == [0] * EP


def test_all_ranks_kernels_are_loaded_before_any_is_found(capturing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, metainfo = made()
    ranks = [rounds.rank_of(workspace, rank) for rank in range(EP)]
    seen = []
    make = rounds.CallerRank._make_exchange

    def watched(self: Any, kind: Any) -> Any:
        seen.append([len(rank._exchanges) for rank in ranks])
        return make(self, kind)

    monkeypatch.setattr(rounds.CallerRank, "_make_exchange", watched)
    dispatch(workspace, metainfo[0])
    dispatch(workspace, metainfo[1], rank=1)
    assert seen == [[0, 0]] * EP and [len(rank._exchanges) for rank in ranks] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_on_a_gpu_are_scrubbed_by_the_kernel(capturing: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    workspace, metainfo = made()
    ids = torch.zeros((EP * 4, TOP_K), dtype=dtype)
    start = int(metainfo[1][fi.MoeAlltoAll._METAINFO_INDEX["RECV_COUNTERS_OFFSET_INDEX"]])
    workspace[1, start : start + 4 * EP].view(torch.int32).copy_(torch.tensor([3, 1]))
    monkeypatch.setattr(functions, "_is_on_gpu", lambda tensor: True)
    fi.moe_a2a_sanitize_expert_ids(ids, workspace, metainfo[1], 1, 77)
    ((told, counts, invalid),) = capturing.scrubbed
    assert told.data_ptr() == ids.data_ptr() and tuple(told.shape) == (EP, 4, TOP_K)
    assert counts.tolist() == [3, 1] and counts.data_ptr() == workspace[1].data_ptr() + start and invalid == 77
    fi.moe_a2a_sanitize_expert_ids(ids[:0], workspace, metainfo[1], 1, 77)
    assert len(capturing.scrubbed) == 1 and not ids.any(), "nothing is launched for no ids"
    with pytest.raises(ShapeError, match="metainfo"):
        fi.moe_a2a_sanitize_expert_ids(ids, workspace[:, : start + 4], metainfo[1], 1, 77)
    with pytest.raises(ShapeError, match="expert_ids"):
        fi.moe_a2a_sanitize_expert_ids(ids.to("meta"), workspace, metainfo[1], 1, 77)
    # Without a GPU torch does the same.
    monkeypatch.undo()
    fi.moe_a2a_sanitize_expert_ids(ids, workspace, metainfo[1], 1, 77)
    assert (ids.view(EP, 4, TOP_K)[0, 3:] == 77).all() and (ids.view(EP, 4, TOP_K)[1, 1:] == 77).all()
    assert int((ids == 77).sum()) == 4 * TOP_K


def test_a_round_lies_where_it_is_told(capturing: Any) -> None:
    workspace, metainfo = made()
    views, offset, stats = dispatch(workspace, metainfo[0])
    start = int(metainfo[0][9])
    assert stats is None and type(views) is list and type(offset) is int
    assert [tuple(view.shape) for view in views] == [(EP, 4, 2 * HIDDEN), (EP, 4, TOP_K)]
    row = workspace[0].data_ptr()
    # At the capacity's distances, whatever R is.
    assert views[0].data_ptr() == row + start
    assert views[1].data_ptr() == row + start + align(ROWS * 2 * HIDDEN)
    assert offset == start + align(ROWS * 2 * HIDDEN) + align(ROWS * 4 * TOP_K)
    view = fi.moe_a2a_wrap_payload_tensor_in_workspace(
        workspace[0], [EP, 4], offset, offset + EP * 4 * 2 * HIDDEN, torch.bfloat16
    )
    out = fi.moe_a2a_combine(view, 3, workspace, metainfo[0], 4, 0, EP, TOP_K, offset, payload_in_workspace=True)
    assert out.shape == (3, HIDDEN)
    first, second = launches(workspace)
    assert isinstance(first, DispatchCall) and isinstance(second, CombineCall)
    assert first.ids_payload is None and [each.fill_byte for each in first.payloads] == [None, None]
    assert second.payload_in_workspace and second.payload.data_ptr() == view.data_ptr()
    (exchange,) = rounds.rank_of(workspace, 0)._exchanges.values()
    assert isinstance(exchange, Launches)
    assert exchange.more == {"small_max_tokens": 0, "sharers": EP} and exchange.budgets == (300.0, 30.0)
    assert (exchange.config.top_k, exchange.config.num_experts) == (TOP_K, EXPERTS)
    # Every rank of the process was made ready before one of them was launched.
    assert len(rounds.rank_of(workspace, 1)._exchanges) == 1 and launches(workspace, 1) == []


def test_a_wider_dispatch_waits_for_the_readers_of_the_place_it_takes(capturing: Any) -> None:
    workspace, metainfo = made()
    places, kinds = [], []
    for width in (16, 16, 2 * HIDDEN, 16, 2 * HIDDEN):
        _, offset, _ = dispatch(workspace, metainfo[0], width=width)
        combine(workspace, metainfo[0], offset)
        places.append(offset)
        kinds.append(len(launches(workspace)))
        launches(workspace).clear()
    # Two launches a round, two more once before the first wide one; the place of the combine rows stays then.
    assert kinds == [2, 2, 4, 2, 2]
    assert places[0] == places[1] < places[2] == places[3] == places[4]
    dispatch(workspace, metainfo[1], rank=1, width=2 * HIDDEN)
    assert len(launches(workspace, 1)) == 1, "nobody reads before the first round"


def test_the_empty_round_has_no_tokens(capturing: Any) -> None:
    workspace, metainfo = made()
    _, offset, _ = dispatch(workspace, metainfo[0], width=16)
    combine(workspace, metainfo[0], offset)
    launches(workspace).clear()
    dispatch(workspace, metainfo[0])
    empty, ended, real = launches(workspace)
    assert isinstance(empty, DispatchCall) and empty.topk_ids.shape == (0, TOP_K)
    assert empty.runtime_max_tokens_per_rank == 1
    assert isinstance(ended, CombineCall) and ended.num_tokens == 0 and ended.payload_in_workspace
    assert ended.payload.shape == (EP, 1, 1)
    assert isinstance(real, DispatchCall) and real.topk_ids.shape[0] == 3


def test_a_refused_dispatch_takes_no_place(capturing: Any) -> None:
    """Else the wide dispatch that is not refused would find its place taken already and wait for no reader of it."""
    workspace, metainfo = made()
    masked: dict[str, Any] = {"enable_rank_mask": True, "active_rank_mask": fi.moe_a2a_active_rank_mask([0, 1], EP)}
    _, before, _ = dispatch(workspace, metainfo[0], width=16, **masked)
    combine(workspace, metainfo[0], before, **masked)
    launches(workspace).clear()
    capturing.now = True
    other = {**masked, "active_rank_mask": fi.moe_a2a_active_rank_mask([0], EP)}
    with pytest.raises(StateError, match="capturing"):
        dispatch(workspace, metainfo[0], **other)
    capturing.now = False
    assert launches(workspace) == []
    _, offset, _ = dispatch(workspace, metainfo[0], **masked)
    assert offset > before and len(launches(workspace)) == 3


def test_a_captured_round_keeps_its_place(capturing: Any) -> None:
    """A graph goes on with the place of its capture, so whoever reaches beyond it waits every time."""
    workspace, metainfo = made()
    capturing.now = True
    _, offset, _ = dispatch(workspace, metainfo[0], width=16)
    combine(workspace, metainfo[0], offset)
    capturing.now = False
    counts = []
    for width in (2 * HIDDEN, 2 * HIDDEN, 16):
        launches(workspace).clear()
        _, offset, _ = dispatch(workspace, metainfo[0], width=width)
        combine(workspace, metainfo[0], offset)
        counts.append(len(launches(workspace)))
    assert counts == [4, 4, 2]


def test_states(capturing: Any) -> None:
    workspace, metainfo = made()
    with pytest.raises(StateError, match="moe_a2a_dispatch first"):
        combine(workspace, metainfo[0], 0)
    _, offset, _ = dispatch(workspace, metainfo[0])
    for wrong in ({"n": 2}, {"most": 5}):
        with pytest.raises(ShapeError, match="those of the dispatch"):
            combine(workspace, metainfo[0], offset, **wrong)
    with pytest.raises(ShapeError, match="those of the dispatch"):
        combine(workspace, metainfo[0], offset + 128)
    with pytest.raises(ShapeError, match="address"):
        combine(workspace, metainfo[0], offset, payload_in_workspace=True)
    combine(workspace, metainfo[0], offset)
    with pytest.raises(StateError, match="moe_a2a_initialize"):
        dispatch(torch.zeros_like(workspace), metainfo[0])


def test_a_dispatch_without_combine_ends_with_the_next(capturing: Any) -> None:
    workspace, metainfo = made()
    dispatch(workspace, metainfo[0], most=5)
    dispatch(workspace, metainfo[0])
    first, ended, second = launches(workspace)
    assert isinstance(first, DispatchCall) and isinstance(second, DispatchCall)
    assert isinstance(ended, CombineCall) and ended.num_tokens == 0
    assert ended.runtime_max_tokens_per_rank == first.runtime_max_tokens_per_rank == 5
    assert ended.payload.shape == (EP, 5, 1)


def test_the_state_is_found_through_any_view_and_goes_with_the_memory(capturing: Any) -> None:
    workspace, metainfo = made()
    _, offset, _ = dispatch(workspace, metainfo[0])
    combine(workspace[:], metainfo[0].clone(), offset)
    rank = weakref.ref(rounds.rank_of(workspace, 0))
    storage = weakref.ref(workspace.untyped_storage())
    launches(workspace).clear()
    del workspace
    gc.collect()
    assert rank() is None and storage() is None, "what is kept with the memory keeps it"


def test_initializing_again_starts_over(capturing: Any) -> None:
    workspace, metainfo = made()
    dispatch(workspace, metainfo[0])
    fi.moe_a2a_initialize(workspace, 0, EP, TOKENS)
    dispatch(workspace, metainfo[0])
    assert len(launches(workspace)) == 1


def test_arguments(capturing: Any) -> None:
    workspace, metainfo = made()
    ids = torch.zeros((3, TOP_K), dtype=torch.int32)
    for most in (2, TOKENS + 1):
        with pytest.raises(ShapeError, match="runtime_max_tokens_per_rank"):
            dispatch(workspace, metainfo[0], most=most)
    with pytest.raises(ShapeError, match="token_selected_experts"):
        fi.moe_a2a_dispatch(ids, [ids], workspace, metainfo[0], 4, 0, EP, TOP_K + 1, EXPERTS)
    with pytest.raises(ShapeError, match="input_payloads"):
        fi.moe_a2a_dispatch(ids, [ids] * 9, workspace, metainfo[0], 4, 0, EP, TOP_K, EXPERTS)
    with pytest.raises(ShapeError, match="at most the"):
        dispatch(workspace, metainfo[0], width=10 * HIDDEN)
    with pytest.raises(ShapeError, match="ep_size"):
        fi.moe_a2a_dispatch(ids, [ids], workspace, metainfo[0], 4, 0, EP + 1, TOP_K, EXPERTS)
    with pytest.raises(ConfigError, match="eplb_local_stats"):
        dispatch(workspace, metainfo[0], eplb_local_stats=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ConfigError, match="enable_rank_mask"):
        dispatch(workspace, metainfo[0], active_rank_mask=fi.moe_a2a_active_rank_mask([0, 1], EP))
    with pytest.raises(ShapeError, match="rows on multiples of 128"):
        fi.moe_a2a_initialize(workspace[:, :-1].contiguous(), 0, EP, TOKENS)
    with pytest.raises(ConfigError, match="at least"):
        fi.moe_a2a_initialize(aligned(1024), 0, EP, TOKENS)


def test_masks(capturing: Any) -> None:
    workspace, metainfo = made()
    region = rounds.rank_of(workspace, 0).layout.region("rank_mask")
    mask = workspace[0, region.offset_bytes : region.end_bytes].view(torch.int64)

    def play(active: list[int] | None) -> None:
        told = None if active is None else fi.moe_a2a_active_rank_mask(active, EP)
        more = {"enable_rank_mask": True, "active_rank_mask": told}
        _, offset, _ = dispatch(workspace, metainfo[0], **more)
        combine(workspace, metainfo[0], offset, **more)

    play(None)
    assert mask.tolist() == [3]
    play([0])
    assert mask.tolist() == [1]
    with pytest.raises(ConfigError, match="own"):
        play([1])
    capturing.now = True
    play([0])
    with pytest.raises(StateError, match="capturing"):
        play([0, 1])


@pytest.mark.parametrize(("scalar", "seen"), [(1.0, 1.0), (2, 2.0), (37.5, 37.5), (torch.tensor([0.5]), 0.5)])
def test_a_global_scale_of_the_output_is_one_number_on_the_device(capturing: Any, scalar: Any, seen: float) -> None:
    workspace, metainfo = made()
    _, offset, _ = dispatch(workspace, metainfo[0])
    scales = torch.zeros((3, HIDDEN // 16), dtype=torch.float8_e4m3fn)
    combine(workspace, metainfo[0], offset, output_dtype=torch.uint8, output_scales=scales, output_scalar_scale=scalar)
    told = launches(workspace)[-1]
    assert isinstance(told, CombineCall) and told.output_quantize is not None
    scale = told.output_quantize.global_scale
    assert scale is not None and scale.dtype == torch.float32 and scale.item() == seen
    assert not isinstance(scalar, torch.Tensor) or scale is scalar, "what lies there is not copied"


def test_statistics(capturing: Any) -> None:
    size = fi.moe_a2a_get_workspace_size_per_rank(EP, TOKENS, 256, 256, 3)
    workspace = aligned(size)
    metainfo = [fi.moe_a2a_initialize(workspace, rank, EP, TOKENS, 3) for rank in range(EP)]
    _, _, stats = dispatch(workspace, metainfo[1], rank=1, eplb_local_stats=torch.ones(3, dtype=torch.int32))
    assert stats is not None and stats.shape == (EP, 3)
    assert stats.data_ptr() == workspace[1].data_ptr() + int(metainfo[1][8])


def test_views_are_kept_for_callers_that_ask(capturing: Any) -> None:
    workspace, metainfo = made()
    cache: dict[Any, Any] = {}
    seen = []
    for _ in range(2):
        views, offset, _ = dispatch(workspace, metainfo[0], recv_view_cache=cache)
        combine(workspace, metainfo[0], offset)
        seen.append(views)
    assert all(one is two for one, two in zip(*seen, strict=True))
    other, others = made()
    views, _, _ = dispatch(other, others[0], recv_view_cache=cache)
    assert views[0].data_ptr() == other[0].data_ptr() + int(others[0][9]) and cache["_workspace"] is other


def test_what_kernels_recorded_is_raised_at_the_next_call(capturing: Any) -> None:
    workspace, metainfo = made()
    _, offset, _ = dispatch(workspace, metainfo[0])
    (exchange,) = rounds.rank_of(workspace, 0)._exchanges.values()
    words: Any = exchange.words[0]
    words.recorded, words.kind, words.waited_us = 1, 1, 2_000_000
    with pytest.raises(PeerTimeout, match="rank 1 in phase 'dispatch' of round 1"):
        combine(workspace, metainfo[0], offset)
    words.kind, words.wanted, words.seen = 3, 4, 5
    with pytest.raises(MismatchError) as caught:
        combine(workspace, metainfo[0], offset)
    assert caught.value.values == {0: 4, 1: 5}
    fi.moe_a2a_initialize(workspace, 0, EP, TOKENS)
    dispatch(workspace, metainfo[0])
