"""layout: where every byte of a workspace lives; the only arithmetic on offsets.

Owns region offsets, sizes and alignment, and where a payload of a round starts. Refuses to know how memory is obtained,
who writes it and when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from a2a.config import MAX_PAYLOADS, ExchangeConfig, low_precision_bytes_per_token
from a2a.errors import ShapeError

ALIGNMENT: Final = 128
"""Every region and every payload starts on a multiple of this, in bytes: one cache line pair, one NVLink flit group."""

PAYLOAD_SLACK_BYTES: Final = (MAX_PAYLOADS - 1) * ALIGNMENT
"""Each payload of a round but the first may lose up to 127 bytes to alignment."""


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def combine_row_bytes(width: int, dtype: torch.dtype, low_precision: bool) -> int:
    """Distance between rows of the combine area, in bytes.

    Args:
        width: elements of a row.
        dtype: of the payload.
        low_precision: rows lie there as e4m3 with their scales behind them; e4m3 payloads have no scales.
    """
    if low_precision and dtype != torch.float8_e4m3fn:
        return low_precision_bytes_per_token(width)
    return width * dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Region:
    """A named part of one rank's workspace.

    Attributes:
        name: what it holds.
        context: index of the context it belongs to.
        offset_bytes: from the start of the rank's workspace, a multiple of 128.
        num_bytes: its length, without the padding up to the next region.
    """

    name: str
    context: int
    offset_bytes: int
    num_bytes: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset_bytes + self.num_bytes


class WorkspaceLayout:
    """Offsets and sizes of one rank's workspace, a pure function of the configuration.

    All regions of a context lie together: first control (counters, tables, what the transport asks for), then the
    dispatch area, then the combine area. Offsets are constant for the life of an object, whatever a round carries.
    Python integers, hence exact for any size.

    Args:
        config: the exchange.
        transport_regions: (name, bytes) of further control regions that the transport needs in each context, which
            must be equal on all ranks.

    Attributes:
        regions: every region in ascending offset.
        num_bytes: bytes of one rank's workspace; with `ep_size` of them mapped side by side at any stride >= this.
    """

    def __init__(self, config: ExchangeConfig, transport_regions: Sequence[tuple[str, int]] = ()) -> None:
        self.config = config
        regions: list[Region] = []
        offset = 0
        for context in range(config.num_contexts):
            for name, num_bytes in self._regions_of_context(transport_regions):
                regions.append(Region(name, context, offset, num_bytes))
                offset = align(offset + num_bytes)
        self.regions: tuple[Region, ...] = tuple(regions)
        self.num_bytes = offset
        self._by_key = {(region.name, region.context): region for region in regions}
        self._dispatch_bytes_per_token = config.dispatch_bytes_per_token
        self._widest_dispatch_bytes = self._widest_combine_bytes = 0

    def _regions_of_context(self, transport_regions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        config = self.config
        rows = config.ep_size * config.max_num_tokens
        return [
            *_control_regions(config, transport_regions),
            ("dispatch", align(rows * config.dispatch_bytes_per_token) + PAYLOAD_SLACK_BYTES),
            ("combine", align(rows * config.combine_bytes_per_token)),
        ]

    def region(self, name: str, context: int = 0) -> Region:
        """The region of that name in a context; `KeyError` if there is none."""
        return self._by_key[name, context]

    def payload_offsets(self, row_bytes: Sequence[int], context: int = 0) -> tuple[int, ...]:
        """Start of each payload of a round in a receiver's workspace, in bytes.

        Payload `i` starts where the sum over `j < i` of `align128(ep * M * row_bytes[j])` ends: it depends on this
        round's widths and not on its token counts.

        Raises:
            ShapeError: more payloads or wider rows than the workspace was built for.
        """
        config, most = self.config, self._dispatch_bytes_per_token
        if not 1 <= len(row_bytes) <= MAX_PAYLOADS:
            raise ShapeError(what="input_payloads", got=f"{len(row_bytes)} payloads", wanted=f"1 to {MAX_PAYLOADS}")
        if sum(row_bytes) > most:
            raise ShapeError(
                what="input_payloads",
                got=f"rows of {list(row_bytes)} bytes, {sum(row_bytes)} per token",
                wanted=f"at most the {most} bytes per token the workspace was built for",
                change="raise extra_payload_bytes_per_token or the dispatch sizes at construction",
            )
        offset = self.region("dispatch", context).offset_bytes
        offsets = []
        for width in row_bytes:
            offsets.append(offset)
            offset += align(config.ep_size * config.max_num_tokens * width)
        return tuple(offsets)

    def dispatch_offset(self, context: int = 0) -> int:
        """Start of the dispatch area, which ends before the combine area."""
        return self._by_key["dispatch", context].offset_bytes

    def combine_offset(self, row_bytes: int, context: int = 0) -> int:
        """Start of the combine area of rounds whose rows take `row_bytes` there: the same for all widths."""
        return self._by_key["combine", context].offset_bytes

    def extent_bytes(self, row_bytes: Sequence[int]) -> int:
        """What payloads of these widths take."""
        rows = self.config.ep_size * self.config.max_num_tokens
        return sum(align(rows * width) for width in row_bytes)

    def claim_dispatch(self, row_bytes: Sequence[int]) -> None:
        """Told of the widths of every dispatch that has begun; some layouts go by the widest. Refused ones are none."""
        self._widest_dispatch_bytes = max(self._widest_dispatch_bytes, self.extent_bytes(row_bytes))

    def claim_combine(self, row_bytes: int) -> None:
        """The same for a combine, and for its rows that are handed out to be written."""
        self._widest_combine_bytes = max(self._widest_combine_bytes, self.extent_bytes((row_bytes,)))


class SharedAreaLayout(WorkspaceLayout):
    """Layout of a workspace whose owner has said how many bytes it has, and not which are for dispatch.

    Control regions come first, then one area "payloads": a round's payloads lie from its start on, as in a dispatch
    area, and its combine rows before its end, `align128(ep * M * row_bytes)` of them. Both depend on this round's
    widths and not on its token counts. The widest dispatch and the widest combine that have ever begun must fit side
    by side: a rank that is ahead writes rows of its next round while others still read combine rows of this one.

    Args:
        config: the exchange, whose byte sizes are but the most that a row may take.
        transport_regions: as in `WorkspaceLayout`.
        payload_bytes: what the owner has for rows; slack for the payloads' alignment is added.
    """

    def __init__(
        self, config: ExchangeConfig, transport_regions: Sequence[tuple[str, int]] = (), *, payload_bytes: int
    ) -> None:
        self._payload_bytes = payload_bytes
        super().__init__(config, transport_regions)

    def _regions_of_context(self, transport_regions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return [
            *_control_regions(self.config, transport_regions),
            ("payloads", align(self._payload_bytes) + PAYLOAD_SLACK_BYTES),
        ]

    def payload_offsets(self, row_bytes: Sequence[int], context: int = 0) -> tuple[int, ...]:
        """As in `WorkspaceLayout`, from the start of the shared area."""
        config = self.config
        if not 1 <= len(row_bytes) <= MAX_PAYLOADS:
            raise ShapeError(what="input_payloads", got=f"{len(row_bytes)} payloads", wanted=f"1 to {MAX_PAYLOADS}")
        offset, offsets = self.region("payloads", context).offset_bytes, []
        for width in row_bytes:
            offsets.append(offset)
            offset += align(config.ep_size * config.max_num_tokens * width)
        widest = max(self._widest_dispatch_bytes, self.extent_bytes(row_bytes))
        self._check_room("input_payloads", f"rows of {list(row_bytes)} bytes", widest, self._widest_combine_bytes)
        return tuple(offsets)

    def dispatch_offset(self, context: int = 0) -> int:
        """As in `WorkspaceLayout`: that of the shared area."""
        return self.region("payloads", context).offset_bytes

    def combine_offset(self, row_bytes: int, context: int = 0) -> int:
        """Start of the combine area of rounds whose rows take `row_bytes` there."""
        num_bytes = self.extent_bytes((row_bytes,))
        widest = max(self._widest_combine_bytes, num_bytes)
        self._check_room("combine payload", f"rows of {row_bytes} bytes", self._widest_dispatch_bytes, widest)
        area = self.region("payloads", context)
        return area.offset_bytes + align(area.num_bytes) - num_bytes

    def _check_room(self, what: str, got: str, dispatch_bytes: int, combine_bytes: int) -> None:
        most = align(self._payload_bytes) + PAYLOAD_SLACK_BYTES
        if dispatch_bytes + combine_bytes > most:
            raise ShapeError(
                what=what,
                got=f"{got}: the widest dispatch takes {dispatch_bytes} bytes and the widest combine {combine_bytes}",
                wanted=f"at most the {most} bytes that the workspace has for both",
                change="compute the workspace's size from the widest rows of all rounds",
            )


class GrowingDispatchLayout(SharedAreaLayout):
    """As `SharedAreaLayout`, but that combine rows lie behind the widest dispatch so far.

    For owners who must be told where they will lie before they say how wide they are. Their place changes with the
    first round of a wider dispatch; whoever plays it must know that no rank reads at the old place any more.
    """

    @property
    def reach_bytes(self) -> int:
        """What the widest dispatch so far takes of the shared area."""
        return self._widest_dispatch_bytes

    def combine_offset(self, row_bytes: int, context: int = 0) -> int:
        """Start of the combine area; `row_bytes` only says whether such rows have room there."""
        super().combine_offset(row_bytes, context)
        return self.region("payloads", context).offset_bytes + self._widest_dispatch_bytes


def _control_regions(config: ExchangeConfig, transport_regions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    ep, tokens, top_k = config.ep_size, config.max_num_tokens, config.top_k
    regions = [
        ("send_counts", 4 * ep),
        ("recv_counts", 4 * ep),
        ("topk_target_ranks", 4 * tokens * top_k),
        ("topk_send_indices", 4 * tokens * top_k),
    ]
    if config.eplb_stats_num_experts:
        regions.append(("eplb_gathered_stats", 4 * ep * config.eplb_stats_num_experts))
    if config.row_order == "token":
        # Which slots of a block hold a row; compact blocks say it with a count.
        regions.append(("row_valid", ep * tokens))
    if config.enable_rank_mask:
        regions.append(("rank_mask", 8 * -(-ep // 64)))
    return [*regions, *transport_regions]
