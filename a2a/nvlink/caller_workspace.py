"""nvlink/caller_workspace: what a caller must know of a workspace of its own before any kernel is there.

Owns the size that such a workspace needs, the layout of one that has a given size, and the words in which the
historical interface tells its offsets. Refuses to know kernels, ranks and rounds. Needs no CUDA package.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from a2a.config import MAX_TOP_K, ExchangeConfig
from a2a.errors import ConfigError
from a2a.layout import ALIGNMENT, GrowingDispatchLayout, WorkspaceLayout, align
from a2a.nvlink.params import control_regions

METAINFO_INDEX: Final[Mapping[str, int]] = MappingProxyType(
    {
        f"{name}_OFFSET_INDEX": index
        for index, name in enumerate(
            (
                "FLAG_VAL",
                "LOCAL_TOKEN_COUNTER",
                "SEND_COUNTERS",
                "RECV_COUNTERS",
                "DISPATCH_COMPLETION_FLAGS",
                "COMBINE_COMPLETION_FLAGS",
                "TOPK_TARGET_RANKS",
                "TOPK_SEND_INDICES",
                "EPLB_GATHERED_STATS",
                "PAYLOAD_DATA",
            )
        )
    }
)
"""Place of each offset in a metainfo tensor, in the historical names."""

NO_FLAGS: Final = "no_flags"
"""Region of zeros that nobody writes, for readers of flags where a transport keeps none in the workspace."""

_REGIONS: Final = (
    ("round_state", NO_FLAGS),
    ("tables_ready", NO_FLAGS),
    ("send_counts",),
    ("recv_counts",),
    ("dispatch_flags", NO_FLAGS),
    ("combine_flags", NO_FLAGS),
    ("topk_target_ranks",),
    ("topk_send_indices",),
    ("eplb_gathered_stats", NO_FLAGS, "send_counts"),
    ("payloads", "dispatch"),
)
"""Of each offset of a metainfo tensor, the region that holds it: the first that a layout has."""


def caller_config(ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int, row_bytes: int) -> ExchangeConfig:
    """The exchange of a caller that has not yet said how many picks and experts there are.

    Tables get the most columns that a round may need, rank masks their words. `row_bytes` is the most that one token
    may take, in dispatch or in combine.
    """
    return ExchangeConfig(
        ep_size=ep_size,
        max_num_tokens=max_num_tokens,
        top_k=MAX_TOP_K,
        num_experts=ep_size,
        hidden_size=max(1, row_bytes // 2),
        eplb_stats_num_experts=eplb_stats_num_experts,
        enable_rank_mask=True,
        scrub=None,
    )


def caller_layout(
    ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int, payload_bytes: int
) -> GrowingDispatchLayout:
    """Layout of one rank's part of a caller's workspace with `payload_bytes` for rows, without landing areas.

    Raises:
        ConfigError: a size out of its limits.
    """
    rows = ep_size * max_num_tokens
    config = caller_config(ep_size, max_num_tokens, eplb_stats_num_experts, payload_bytes // max(1, rows))
    regions = [each for each in control_regions(config) if each[0] not in ("dispatch_landing", "combine_landing")]
    return GrowingDispatchLayout(config, regions, payload_bytes=payload_bytes)


def control_bytes(ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int) -> int:
    """Bytes of a caller's workspace beside its rows: flags, counters, tables of 64 columns, the payloads' slack."""
    return caller_layout(ep_size, max_num_tokens, eplb_stats_num_experts, 0).num_bytes


def caller_bytes(
    ep_size: int,
    max_num_tokens: int,
    dispatch_bytes_per_token: int,
    combine_bytes_per_token: int,
    eplb_stats_num_experts: int,
) -> int:
    """Bytes of one rank's part of a workspace whose rows take at most so much.

    The control part, and `align128(ep * M * dispatch) + align128(ep * M * combine)`.

    Raises:
        ConfigError: a size that is no integer >= 0, or out of its limits.
    """
    for what, got in (
        ("total_dispatch_payload_size_per_token", dispatch_bytes_per_token),
        ("combine_payload_size_per_token", combine_bytes_per_token),
    ):
        if not isinstance(got, int) or isinstance(got, bool) or got < 0:
            raise ConfigError(what=what, got=got, wanted="an integer >= 0")
    control = control_bytes(ep_size, max_num_tokens, eplb_stats_num_experts)
    rows = ep_size * max_num_tokens
    return control + align(rows * dispatch_bytes_per_token) + align(rows * combine_bytes_per_token)


def payload_bytes_of(num_bytes: int, ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int) -> int:
    """What a rank's part of `num_bytes` has for rows.

    Raises:
        ConfigError: it has less than one byte per row.
    """
    rest = num_bytes - control_bytes(ep_size, max_num_tokens, eplb_stats_num_experts)
    least = ep_size * max_num_tokens
    if rest < least:
        raise ConfigError(
            what="workspace_size_per_rank",
            got=num_bytes,
            wanted=f"at least {num_bytes - rest + least} bytes for {ep_size} ranks of {max_num_tokens} tokens",
            change="compute it with moe_a2a_get_workspace_size_per_rank",
        )
    # Rows end where a rank's part ends.
    return rest // ALIGNMENT * ALIGNMENT


def metainfo_of(layout: WorkspaceLayout) -> Tensor:
    """int64 `[10]` on the CPU: the offsets of `METAINFO_INDEX` in a rank's part of the workspace, in bytes."""
    known = {region.name: region.offset_bytes for region in layout.regions if region.context == 0}
    offsets = [next(known[name] for name in names if name in known) for names in _REGIONS]
    return torch.tensor(offsets, dtype=torch.int64, device="cpu")
