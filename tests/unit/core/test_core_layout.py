"""Offsets and sizes: disjoint, aligned, inside, minimal, exact at any size, and the same for every round."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from a2a.config import ExchangeConfig
from a2a.errors import ShapeError
from a2a.layout import Region, WorkspaceLayout, align, combine_row_bytes

MIB = 1 << 20


def up(num_bytes: int) -> int:
    """The next multiple of 128, written another way than the layout does."""
    return num_bytes if num_bytes % 128 == 0 else num_bytes - num_bytes % 128 + 128


@st.composite
def configs(draw: st.DrawFn) -> ExchangeConfig:
    ep = draw(st.one_of(st.integers(1, 9), st.sampled_from([64, 65, 255, 256])))
    return ExchangeConfig(
        ep_size=ep,
        max_num_tokens=draw(st.one_of(st.integers(1, 40), st.sampled_from([8192, 65535, 65536]))),
        top_k=draw(st.sampled_from([1, 2, 3, 8, 63, 64])),
        num_experts=ep + draw(st.integers(0, 300)),
        hidden_size=2 * draw(st.one_of(st.integers(1, 70), st.sampled_from([1440, 3584, 8191, 8192]))),
        dispatch_dtype_bytes_per_elem=draw(st.sampled_from([0, 1, 2, 4])),
        dispatch_scale_bytes_per_token=draw(st.integers(0, 300)),
        combine_dtype_bytes_per_elem=draw(st.sampled_from([1, 2, 4])),
        extra_payload_bytes_per_token=draw(st.integers(0, 300)),
        row_order=draw(st.sampled_from(["compact", "token"])),
        eplb_stats_num_experts=draw(st.sampled_from([0, 1, 257])),
        enable_rank_mask=draw(st.booleans()),
        num_contexts=draw(st.integers(1, 3)),
    )


more_regions = st.lists(st.integers(0, 5000), max_size=3).map(
    lambda sizes: [(f"more_{index}", size) for index, size in enumerate(sizes)]
)


@given(configs(), more_regions)
def test_regions_are_disjoint_aligned_inside_and_without_waste(
    config: ExchangeConfig, more: list[tuple[str, int]]
) -> None:
    layout = WorkspaceLayout(config, more)
    free = 0
    for region in layout.regions:
        assert region.num_bytes >= 0
        assert region.offset_bytes == up(free), "the next region starts at the next boundary, neither before nor later"
        assert region.end_bytes == region.offset_bytes + region.num_bytes
        free = region.end_bytes
    assert layout.num_bytes == up(free)
    names = [(region.name, region.context) for region in layout.regions]
    assert len(set(names)) == len(names)
    for name, num_bytes in more:
        assert all(layout.region(name, each).num_bytes == num_bytes for each in range(config.num_contexts))


@given(configs())
def test_every_region_holds_what_it_is_for(config: ExchangeConfig) -> None:
    ep, tokens, picks = config.ep_size, config.max_num_tokens, config.top_k
    wanted = {
        "send_counts": 4 * ep,
        "recv_counts": 4 * ep,
        "topk_target_ranks": 4 * tokens * picks,
        "topk_send_indices": 4 * tokens * picks,
        "eplb_gathered_stats": 4 * ep * config.eplb_stats_num_experts,
        "row_valid": ep * tokens if config.row_order == "token" else 0,
        "rank_mask": 8 * ((ep + 63) // 64) if config.enable_rank_mask else 0,
        "dispatch": up(ep * tokens * config.dispatch_bytes_per_token) + 7 * 128,
        "combine": up(ep * tokens * config.combine_bytes_per_token),
    }
    layout = WorkspaceLayout(config)
    for context in range(config.num_contexts):
        found = {region.name: region.num_bytes for region in layout.regions if region.context == context}
        assert found == {name: size for name, size in wanted.items() if size}


@given(configs())
def test_contexts_lie_behind_one_another_and_alike(config: ExchangeConfig) -> None:
    layout = WorkspaceLayout(config)
    alone = WorkspaceLayout(dataclasses.replace(config, num_contexts=1))
    assert layout.num_bytes == config.num_contexts * alone.num_bytes
    for context in range(config.num_contexts):
        for region in alone.regions:
            moved = Region(region.name, context, region.offset_bytes + context * alone.num_bytes, region.num_bytes)
            assert layout.region(region.name, context) == moved


@given(configs(), st.data())
def test_payloads_that_sum_to_the_declared_bytes_fit_wherever_they_are_cut(
    config: ExchangeConfig, data: st.DataObject
) -> None:
    total = config.dispatch_bytes_per_token
    cuts = data.draw(st.lists(st.integers(0, total), max_size=7).map(sorted))
    widths = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    context = data.draw(st.integers(0, config.num_contexts - 1))
    layout = WorkspaceLayout(config)
    area = layout.region("dispatch", context)
    rows = config.ep_size * config.max_num_tokens
    offsets = layout.payload_offsets(widths, context)
    wanted = area.offset_bytes
    for offset, width in zip(offsets, widths, strict=True):
        assert offset == wanted and offset % 128 == 0
        wanted += up(rows * width)
        # Whatever R is, its ep * R rows start where M's start and end before they end.
        assert offset + rows * width <= area.end_bytes
    assert layout.payload_offsets(widths, context) == offsets


@given(configs(), st.integers(1, 4096), st.integers(1, 4096))
def test_only_the_payload_part_depends_on_the_hidden_size(config: ExchangeConfig, one: int, other: int) -> None:
    first = dataclasses.replace(config, hidden_size=2 * one)
    second = dataclasses.replace(config, hidden_size=2 * other)
    rows = config.ep_size * config.max_num_tokens

    def payload_part(each: ExchangeConfig) -> int:
        return up(rows * each.dispatch_bytes_per_token) + up(rows * each.combine_bytes_per_token)

    grown = WorkspaceLayout(second).num_bytes - WorkspaceLayout(first).num_bytes
    assert grown == config.num_contexts * (payload_part(second) - payload_part(first))


@given(configs(), st.integers(1, 7))
@settings(max_examples=30)
def test_more_capacity_never_moves_a_region_down(config: ExchangeConfig, factor: int) -> None:
    larger = WorkspaceLayout(dataclasses.replace(config, max_num_tokens=config.max_num_tokens * factor))
    for region in WorkspaceLayout(config).regions:
        grown = larger.region(region.name, region.context)
        assert grown.offset_bytes >= region.offset_bytes and grown.num_bytes >= region.num_bytes


def test_the_largest_exchange_is_exact() -> None:
    config = ExchangeConfig(ep_size=256, max_num_tokens=65536, top_k=8, num_experts=256, hidden_size=16384)
    layout = WorkspaceLayout(config)
    # 32768 bytes of bf16, 32 of ids and 32 of weights, times 2**24 rows.
    assert layout.region("dispatch").num_bytes == 550_829_555_712 + 896
    assert layout.region("combine").num_bytes == 549_755_813_888
    # Two counters of 1 KiB, two tables of 2 MiB.
    assert layout.region("dispatch").offset_bytes == 2 * 1024 + 2 * 2_097_152
    assert layout.region("combine").offset_bytes == 550_833_752_960
    assert layout.num_bytes == 1_100_589_566_848
    assert layout.payload_offsets([32768, 32, 32])[2] == 2 * 1024 + 2 * 2_097_152 + 32800 * 2**24


@pytest.mark.parametrize(
    ("ep_size", "max_num_tokens", "wanted_mib"),
    [(8, 8192, (1797, 1363, 1363, 1153)), (8, 512, (112, 85, 85, 72)), (72, 1024, (2021, 1532, 1532, 1296))],
)
def test_reference_points(ep_size: int, max_num_tokens: int, wanted_mib: tuple[int, ...]) -> None:
    formats = ("bf16", "fp8_block", "mxfp8", "nvfp4")
    row_bytes = (14336, 7168 + 224, 7168 + 224, 3584 + 448)
    for name, wire_bytes, wanted in zip(formats, row_bytes, wanted_mib, strict=True):
        config = ExchangeConfig(
            ep_size=ep_size,
            max_num_tokens=max_num_tokens,
            top_k=8,
            num_experts=288,
            hidden_size=7168,
            wire_format=name,
        )
        size = WorkspaceLayout(config).num_bytes
        touched = ep_size * max_num_tokens * (wire_bytes + 64 + 14336)
        assert touched <= size, f"{name}: smaller than what a round touches"
        assert (wanted - 0.5) * MIB <= size <= 1.01 * wanted * MIB, f"{name}: {size / MIB:.1f} MiB"


def test_a_list_that_does_not_fit_is_refused() -> None:
    layout = WorkspaceLayout(ExchangeConfig(ep_size=2, max_num_tokens=4, top_k=2, num_experts=4, hidden_size=8))
    assert len(layout.payload_offsets([32])) == 1
    assert len(layout.payload_offsets([4] * 8)) == 8
    with pytest.raises(ShapeError, match=r"33 per token.*at most the 32 bytes"):
        layout.payload_offsets([16, 17])
    for widths in ([], [1] * 9):
        with pytest.raises(ShapeError, match="1 to 8") as caught:
            layout.payload_offsets(widths)
        assert caught.value.what == "input_payloads"
    with pytest.raises(KeyError):
        layout.region("nothing")
    with pytest.raises(KeyError):
        layout.region("combine", 1)


@given(st.integers(0, 1 << 50), st.sampled_from([1, 2, 128, 4096, 1 << 21]))
def test_align(num_bytes: int, alignment: int) -> None:
    aligned = align(num_bytes, alignment)
    assert aligned % alignment == 0 and 0 <= aligned - num_bytes < alignment


@given(st.integers(1, 20000), st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]))
def test_combine_rows_of_the_e4m3_wire_hold_their_scales_aligned(width: int, dtype: torch.dtype) -> None:
    assert combine_row_bytes(width, dtype, low_precision=False) == width * dtype.itemsize
    row = combine_row_bytes(width, dtype, low_precision=True)
    if dtype == torch.float8_e4m3fn:
        assert row == width
        return
    scales = 4 * ((width + 127) // 128)
    assert row % 4 == 0 and 0 <= row - scales - width < 4


@given(configs())
def test_an_e4m3_combine_area_holds_its_rows(config: ExchangeConfig) -> None:
    assume(config.combine_dtype_bytes_per_elem == 1)
    assert combine_row_bytes(config.hidden_size, torch.bfloat16, low_precision=True) == config.combine_bytes_per_token
