"""Sizes, masks, mappings and what is refused before there is any rank."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2a.errors import ConfigError
from a2a.integrations import flashinfer as fi
from a2a.integrations.flashinfer_formats import mxfp8_quantize, nvfp4_block_scale_interleave
from a2a.integrations.flashinfer_mapping import ep_group
from a2a.layout import align
from a2a.nvlink.caller_workspace import caller_layout, metainfo_of
from a2a.quant import ScaleLayout, swizzle_scales, wire_format

MIB = 1 << 20
SIZES = st.integers(0, 1 << 20)


@settings(deadline=None)
@given(ep=st.integers(1, 256), tokens=st.integers(1, 65536), eplb=st.integers(0, 300), one=SIZES, two=SIZES,
       three=SIZES, four=SIZES)  # fmt: skip
def test_sizes_differ_by_the_formula(
    ep: int, tokens: int, eplb: int, one: int, two: int, three: int, four: int
) -> None:
    size = fi.moe_a2a_get_workspace_size_per_rank
    rows = ep * tokens
    difference = size(ep, tokens, one, two, eplb) - size(ep, tokens, three, four, eplb)
    assert difference == align(rows * one) + align(rows * two) - align(rows * three) - align(rows * four)


@pytest.mark.parametrize(
    ("ep", "tokens", "wanted"), [(8, 8192, (1797, 1363, 1153)), (8, 512, (112, 85, 72)), (72, 1024, (2021, 1532, 1296))]
)
def test_reference_points(ep: int, tokens: int, wanted: tuple[int, int, int]) -> None:
    hidden, picks = 7168, 8 * 8
    dispatch = (2 * hidden, hidden + hidden // 32, hidden // 2 + hidden // 16)
    for row_bytes, reference in zip(dispatch, wanted, strict=True):
        size = fi.moe_a2a_get_workspace_size_per_rank(ep, tokens, row_bytes + picks, 2 * hidden)
        assert (reference - 0.5) * MIB <= size <= (reference + 0.5) * MIB * 1.01


def test_the_class_s_size_is_that_of_16_bit_rows() -> None:
    size = fi.moe_a2a_get_workspace_size_per_rank(4, 100, 2 * 64 + 8 * 3 + 5, 2 * 64, 7)
    assert fi.MoeAlltoAll.get_moe_workspace_size_per_rank(4, 3, 100, 64, 5, 7) == size


@settings(deadline=None)
@given(ep=st.integers(1, 256), tokens=st.integers(1, 5000), eplb=st.integers(0, 300))
def test_a_workspace_of_the_size_holds_what_metainfo_says(ep: int, tokens: int, eplb: int) -> None:
    size = fi.moe_a2a_get_workspace_size_per_rank(ep, tokens, 100, 30, eplb)
    rows = ep * tokens
    layout = caller_layout(ep, tokens, eplb, align(100 * rows) + align(30 * rows))
    assert layout.num_bytes == size
    offsets = dict(zip(fi.MoeAlltoAll._METAINFO_INDEX, metainfo_of(layout).tolist(), strict=True))
    assert all(offset % 128 == 0 and offset < size for offset in offsets.values())
    bytes_of = {
        "SEND_COUNTERS": 4 * ep,
        "RECV_COUNTERS": 4 * ep,
        "TOPK_TARGET_RANKS": 4 * tokens * 64,
        "TOPK_SEND_INDICES": 4 * tokens * 64,
        "PAYLOAD_DATA": size - offsets["PAYLOAD_DATA_OFFSET_INDEX"],
    }
    taken = sorted((offsets[f"{name}_OFFSET_INDEX"], num_bytes) for name, num_bytes in bytes_of.items())
    for (start, num_bytes), (following, _) in itertools.pairwise(taken):
        assert start + num_bytes <= following
    assert sum(taken[-1]) == size


def test_the_rows_have_all_that_was_asked_for() -> None:
    """As many payloads as there may be, each a byte over a boundary, and the combine rows, at the capacity."""
    widths, combine = [1, 3, 5, 7, 9, 11, 13, 15], 17
    size = fi.moe_a2a_get_workspace_size_per_rank(3, 5, sum(widths), combine)
    layout = caller_layout(3, 5, 0, align(15 * sum(widths)) + align(15 * combine))
    ends = [start + 15 * width for start, width in zip(layout.payload_offsets(widths), widths, strict=True)]
    layout.claim_dispatch(widths)
    start = layout.combine_offset(combine)
    assert max(ends) <= start and start + 15 * combine <= size


@pytest.mark.parametrize(
    "call",
    [
        lambda: fi.moe_a2a_get_workspace_size_per_rank(2, 4, 8, 8, backend="cake"),
        lambda: fi.MoeAlltoAll.get_moe_workspace_size_per_rank(2, 1, 4, 8, backend="cake"),
        lambda: fi.MoeAlltoAll(fi.Mapping(), 4, 1, 1, hidden_size=8, backend="cake"),
        lambda: fi.moe_a2a_initialize(torch.zeros(1, 1), 0, 1, 4, backend="cake"),
        lambda: fi.moe_a2a_dispatch(
            torch.zeros(1, 1), [], torch.zeros(1, 1), torch.zeros(10), 1, 0, 1, 1, 1, backend="cake"
        ),
        lambda: fi.moe_a2a_combine(
            torch.zeros(1, 1), 1, torch.zeros(1, 1), torch.zeros(10), 1, 0, 1, 1, 0, backend="cake"
        ),
        lambda: fi.moe_a2a_sanitize_expert_ids(
            torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(10), 0, -1, backend="cake"
        ),
    ],
)
def test_other_kernels_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="'cake'"):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("size", [-1, 1.5, True, None])
def test_bad_sizes(size: object) -> None:
    with pytest.raises(ConfigError, match="total_dispatch_payload_size_per_token"):
        fi.moe_a2a_get_workspace_size_per_rank(2, 4, size, 8)  # type: ignore[arg-type]


def test_a_size_without_room_for_rows_says_what_is_needed() -> None:
    mapping = fi.Mapping()
    with pytest.raises(ConfigError, match="workspace_size_per_rank: got 128, wanted at least"):
        fi.MoeAlltoAll(mapping, 4, 1, 1, 128, mnnvl_config=fi.MnnvlConfig(comm_backend=Alone()))
    with pytest.raises(ConfigError, match="at least one of them"):
        fi.MoeAlltoAll(mapping, 4, 1, 1, mnnvl_config=fi.MnnvlConfig(comm_backend=Alone()))


class Alone(fi.CommBackend):
    """The one rank of a group."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, data: object) -> list[object]:
        return [data]

    def bcast(self, data: object, root: int) -> object:
        return data

    def barrier(self) -> None:
        return None

    def Split(self, color: int, key: int) -> Alone:
        return self


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (torch.empty(3, 8, dtype=torch.bfloat16), "on the GPU"),
        (torch.empty(8, 3, dtype=torch.bfloat16).T, "strides"),
        (torch.empty(2, 8, dtype=torch.bfloat16), "[3, 8]"),
    ],
)
def test_a_bad_output_is_refused_before_anything_else(output: torch.Tensor, says: str) -> None:
    """Nothing here is a workspace: were the output not looked at first, another error would come."""
    payload = torch.zeros((2, 3, 8), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="output") as caught:
        fi.moe_a2a_combine(
            payload, 3, torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(10), 3, 0, 2, 1, 0, output=output
        )
    assert says in str(caught.value)


def test_rank_masks() -> None:
    mask = fi.moe_a2a_active_rank_mask([0, 3, 63], 64)
    assert mask.dtype == torch.uint64 and mask.device.type == "cpu" and mask.tolist() == [1 | 8 | 1 << 63]
    assert fi.moe_a2a_active_rank_mask(torch.tensor([1]), 2).tolist() == [2]
    with pytest.raises(ValueError, match="active_ranks"):
        fi.moe_a2a_active_rank_mask([2], 2)
    with pytest.raises(ValueError, match="ep_size"):
        fi.moe_a2a_active_rank_mask([0], 65)


SIGNATURES = {
    "MoeAlltoAll": "mapping max_num_tokens top_k num_experts workspace_size_per_rank=None hidden_size=None "
    "mnnvl_config=None eplb_stats_num_experts=0 enable_rank_mask=False * backend='trtllm'",
    "moe_a2a_initialize": "workspace ep_rank ep_size max_num_tokens eplb_stats_num_experts=0 * backend='trtllm'",
    "moe_a2a_dispatch": "token_selected_experts input_payloads workspace metainfo runtime_max_tokens_per_rank ep_rank "
    "ep_size top_k num_experts enable_pdl=None eplb_local_stats=None enable_rank_mask=False active_rank_mask=None "
    "* backend='trtllm' recv_view_cache=None",
    "moe_a2a_combine": "payload local_num_tokens workspace metainfo runtime_max_tokens_per_rank ep_rank ep_size top_k "
    "combine_payload_offset payload_in_workspace=False output_dtype=None output_scales=None output_scalar_scale=1.0 "
    "sf_layout=<SfLayout.layout_linear: 2> output=None * use_low_precision=False enable_pdl=None "
    "enable_rank_mask=False active_rank_mask=None backend='trtllm'",
    "moe_a2a_sanitize_expert_ids": "expert_ids workspace metainfo ep_rank invalid_expert_id enable_pdl=None "
    "* backend='trtllm'",
    "moe_a2a_get_workspace_size_per_rank": "ep_size max_num_tokens total_dispatch_payload_size_per_token "
    "combine_payload_size_per_token eplb_stats_num_experts=0 * backend='trtllm'",
    "moe_a2a_wrap_payload_tensor_in_workspace": "workspace leading_shape slice_start slice_end dtype",
    "moe_a2a_active_rank_mask": "active_ranks ep_size",
    "MoeAlltoAll.dispatch": "self token_selected_experts input_payloads runtime_max_tokens_per_rank "
    "invalid_token_expert_id=None expert_id_payload_index=None eplb_local_stats=None active_rank_mask=None",
    "MoeAlltoAll.combine": "self payload runtime_max_tokens_per_rank payload_in_workspace=False output_dtype=None "
    "output_scales=None output_scalar_scale=1.0 sf_layout=<SfLayout.layout_linear: 2> output=None "
    "* use_low_precision=False active_rank_mask=None",
    "MoeAlltoAll.get_combine_payload_tensor_in_workspace": "self runtime_max_tokens_per_rank hidden_size dtype",
    "MoeAlltoAll.checkpoint_prepare": "self",
    "MoeAlltoAll.checkpoint_restore": "self comm_backend",
    "MoeAlltoAll.get_moe_workspace_size_per_rank": "ep_size top_k max_num_tokens hidden_size "
    "extra_payload_bytes_per_token=0 eplb_stats_num_experts=0 * backend='trtllm'",
    "MoEEpCommParams": "num_experts top_k max_tokens_per_rank hidden_size dtype=None dispatch_format=None "
    "invalid_expert_id=-1",
}
"""Names, order and defaults, as the release of the class has them."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found: object = fi
    for part in name.split("."):
        found = getattr(found, part)
    told, star = [], False
    for each in inspect.signature(found).parameters.values():  # type: ignore[arg-type]
        if each.kind is each.KEYWORD_ONLY and not star:
            told, star = [*told, "*"], True
        told.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    assert " ".join(told) == SIGNATURES[name]


METAINFO = """FLAG_VAL LOCAL_TOKEN_COUNTER SEND_COUNTERS RECV_COUNTERS DISPATCH_COMPLETION_FLAGS
COMBINE_COMPLETION_FLAGS TOPK_TARGET_RANKS TOPK_SEND_INDICES EPLB_GATHERED_STATS PAYLOAD_DATA"""


def test_metainfo_names_are_in_order() -> None:
    wanted = {f"{name}_OFFSET_INDEX": index for index, name in enumerate(METAINFO.split())}
    assert dict(fi.MoeAlltoAll._METAINFO_INDEX) == wanted


def test_mappings() -> None:
    mapping = fi.Mapping(world_size=16, rank=13, gpus_per_node=8, tp_size=8, pp_size=2, moe_ep_size=4)
    assert (mapping.moe_tp_size, mapping.moe_ep_rank, mapping.moe_tp_rank, mapping.pp_rank) == (2, 1, 1, 1)
    assert mapping.moe_ep_group == [12, 13, 14, 15] and mapping.tp_group == list(range(8, 16))
    assert (mapping.node_rank, mapping.local_rank, mapping.has_moe_ep()) == (1, 5, True)
    plain = fi.Mapping(4, 2, tp_size=4)
    assert (plain.moe_ep_size, plain.moe_tp_size, plain.moe_ep_rank) == (1, 4, 0)
    # As the engines build it.
    engine = fi.Mapping(rank=1, tp_size=2, moe_ep_size=2, world_size=2, gpus_per_node=0, pp_size=1, cp_size=1)
    assert engine.moe_ep_group == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"world_size": 4, "tp_size": 2}, "world_size"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 3}, "tp_size"),
        ({"world_size": 4, "tp_size": 4, "attn_tp_size": 3}, "attn"),
        ({"world_size": 2, "tp_size": 2, "rank": 2}, "rank"),
    ],
)
def test_mappings_that_do_not_multiply_up(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fi.Mapping(**sizes)  # type: ignore[arg-type]


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="moe_ep_size = 2"):
        ep_group(Alone(), fi.Mapping(world_size=2, tp_size=2, moe_ep_size=2))  # type: ignore[arg-type]


def test_format_functions() -> None:
    scales = torch.arange(200 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).view(200, 6)
    swizzled = swizzle_scales(scales, ScaleLayout.SWIZZLED_128X4).flatten()
    assert torch.equal(nvfp4_block_scale_interleave(scales), swizzled)
    two = nvfp4_block_scale_interleave(torch.stack([scales, scales]))
    assert torch.equal(two, swizzled.repeat(2))
    rows = torch.randn(5, 96).bfloat16()
    data, linear = mxfp8_quantize(rows, False)
    wanted, wanted_scales = wire_format("mxfp8").quantize(rows)
    assert wanted_scales is not None
    assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(linear.view(5, 3), wanted_scales)
    _, laid_out = mxfp8_quantize(rows)
    assert torch.equal(laid_out, swizzle_scales(wanted_scales, ScaleLayout.SWIZZLED_128X4).flatten())
    padded, _ = mxfp8_quantize(rows, alignment=128)
    assert padded.shape == (5, 128)
