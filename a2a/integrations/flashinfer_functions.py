"""integrations/flashinfer_functions: the historical functions that engines call on a workspace of their own.

Owns the argument orders, defaults and return types of FlashInfer 0.7.2.post1's `moe_a2a_*` and what their values mean
here. Refuses to know how rows move and where their offsets lie.

All but `wrap` and `active_rank_mask` take `backend="trtllm"`, the only one there is. The state of a rank's rounds is
kept with the workspace's storage: it lives as long as the memory, and whoever passes another view of it finds it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from a2a.errors import ConfigError, ShapeError
from a2a.nvlink.caller_workspace import METAINFO_INDEX, caller_bytes
from a2a.quant import ScaleLayout

if TYPE_CHECKING:
    from a2a.integrations.flashinfer_rounds import CallerRank

MOE_A2A_RANK_MASK_WORDS: Final = 1
"""Words of the functions' rank mask, which hold 64 ranks."""

BACKENDS: Final = ("trtllm",)


class SfLayout(enum.IntEnum):
    """Layouts of output scales in the historical numbers; see `a2a.ScaleLayout`."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


_SCALE_LAYOUTS: Final[Mapping[SfLayout, ScaleLayout]] = MappingProxyType(
    {
        SfLayout.layout_128x4: ScaleLayout.SWIZZLED_128X4,
        SfLayout.layout_8x4: ScaleLayout.SWIZZLED_8X4,
        SfLayout.layout_linear: ScaleLayout.LINEAR,
    }
)


def moe_a2a_initialize(
    workspace: Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> Tensor:
    """Zero one rank's row of a workspace and make it ready for rounds.

    Once per rank before the first round of any, or again while no rank has a round in flight. Ranks that share a
    process must all be initialised before the first of them dispatches: what their calls need is loaded here, and
    loading may wait for kernels that wait for other ranks. Payload rows are zero afterwards and stay so until a token
    is written to them.

    Args:
        workspace: uint8 `[ep, bytes]` on a GPU, row `r` being rank `r`'s: any CUDA tensor, or memory that ranks share.
            Rows start on multiples of 128 bytes and are as long as `moe_a2a_get_workspace_size_per_rank` says.
        ep_rank, ep_size: this rank, and how many there are.
        max_num_tokens: local tokens that a rank may dispatch in one round.
        eplb_stats_num_experts: length of the statistics gathered with a dispatch; 0 for none.

    Returns:
        int64 `[10]` on the CPU: offsets in a rank's row, by `MoeAlltoAll._METAINFO_INDEX`.

    Host synchronisation:
        Waits for the current stream.

    Raises:
        ConfigError, ShapeError (ValueErrors): a workspace or a size that does not fit.
    """
    check_backend(backend)
    from a2a.integrations.flashinfer_rounds import initialize

    return initialize(workspace, ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts)


def moe_a2a_dispatch(
    token_selected_experts: Tensor,
    input_payloads: list[Tensor],
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[Tensor], int, Tensor | None]:
    """Send every token to the ranks that hold its experts, once per rank, on the current stream.

    Followed by one combine, or by another dispatch, which ends the round without sums.

    Args:
        token_selected_experts: int32 or int64 `[n, top_k]`, global expert ids.
        input_payloads: 1 to 8 contiguous tensors `[n, *]`.
        workspace, metainfo: of `moe_a2a_initialize`.
        runtime_max_tokens_per_rank: R, equal on all ranks, at least every rank's n.
        ep_rank, ep_size, top_k, num_experts: of the exchange.
        enable_pdl: programmatic dependent launch; off where ranks share a GPU.
        eplb_local_stats: int32 `[Es]`, gathered from all ranks.
        enable_rank_mask: whether there is a mask at all, equal on all ranks.
        active_rank_mask: uint64 on the CPU, see `moe_a2a_active_rank_mask`; None for all ranks.
        recv_view_cache: a dictionary of the caller's in which views are kept from call to call.

    Returns:
        A view `[ep, R, *]` per payload, the offset of the combine area in this rank's row, and the gathered statistics
        `[ep, Es]` or None. Ids of padded slots are left alone: see `moe_a2a_sanitize_expert_ids`.

    No host synchronisation, but for the first call of a kind (top_k, num_experts, enable_rank_mask), which compiles and
    loads kernels for all ranks of this process before it launches. Where several ranks of a process share a GPU, no
    other kind's round may be under way then: loading may wait for kernels that wait for a rank yet to be called.

    Raises:
        ConfigError, ShapeError (ValueErrors), StateError: an argument or a state that does not allow it.
        PeerTimeout, MismatchError: what a launched round of this rank has recorded.
    """
    check_backend(backend)
    rank = _rank_of(workspace, metainfo, ep_rank, ep_size)
    combine_offset, offsets = rank.dispatch(
        token_selected_experts,
        input_payloads,
        runtime_max_tokens_per_rank,
        top_k,
        num_experts,
        enable_pdl,
        eplb_local_stats,
        enable_rank_mask,
        active_rank_mask,
    )
    if recv_view_cache is not None and recv_view_cache.get("_workspace") is not workspace:
        recv_view_cache.clear()
        recv_view_cache["_workspace"] = workspace
    views = []
    for rows, offset in zip(input_payloads, offsets, strict=True):
        key = (ep_rank, offset, runtime_max_tokens_per_rank, tuple(rows.shape[1:]), rows.dtype)
        view = None if recv_view_cache is None else recv_view_cache.get(key)
        if view is None:
            num_bytes = ep_size * runtime_max_tokens_per_rank * math.prod(rows.shape[1:]) * rows.dtype.itemsize
            raw = workspace[ep_rank, offset : offset + num_bytes].view(rows.dtype)
            view = raw.view(ep_size, runtime_max_tokens_per_rank, *rows.shape[1:])
            if recv_view_cache is not None:
                recv_view_cache[key] = view
        views.append(view)
    stats = None
    if eplb_local_stats is not None:
        start = int(metainfo[METAINFO_INDEX["EPLB_GATHERED_STATS_OFFSET_INDEX"]])
        num_bytes = 4 * ep_size * eplb_local_stats.numel()
        stats = workspace[ep_rank, start : start + num_bytes].view(torch.int32).view(ep_size, -1)
    return views, combine_offset, stats


def moe_a2a_combine(
    payload: Tensor,
    local_num_tokens: int,
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: Any = SfLayout.layout_linear,
    output: Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    backend: str = "trtllm",
) -> Tensor:
    """Sum every token's rows over the ranks it was sent to, on the current stream.

    Args:
        payload: `[ep, R, H']`, what this rank's experts made of the rows it received.
        local_num_tokens, runtime_max_tokens_per_rank, top_k, combine_payload_offset: of the dispatch.
        workspace, metainfo, ep_rank, ep_size, enable_pdl, enable_rank_mask, active_rank_mask: as there.
        payload_in_workspace: the payload lies at `combine_payload_offset` of this rank's row.
        output_dtype, output_scales, output_scalar_scale, sf_layout, output, use_low_precision: as
            `a2a.MoeAlltoAll.combine`; the layout by its historical number or as a `ScaleLayout`.

    Returns:
        `[n, H']`, `output` itself if given.

    Host synchronisation:
        None, but with an `output_scalar_scale` that is a tensor on the CPU.

    Where several ranks of a process share a GPU, a rank's call must not wait there for kernels that wait for ranks yet
    to be called. Torch's allocator may, when it has to give memory back to make room for an `output` that is not given,
    for sums that are quantised, or for the copy of a payload in the workspace that `use_low_precision` needs.

    Raises:
        ShapeError (a ValueError): a bad `output`, before any kernel is compiled. Others as `moe_a2a_dispatch`.
    """
    check_backend(backend)
    if output is not None:
        _check_output(output, payload, local_num_tokens, output_dtype, use_low_precision)
    scale, layout = output_format(output_scales, output_scalar_scale, sf_layout)
    rank = _rank_of(workspace, metainfo, ep_rank, ep_size)
    return rank.combine(
        payload,
        local_num_tokens,
        runtime_max_tokens_per_rank,
        top_k,
        combine_payload_offset,
        payload_in_workspace,
        (output_dtype, output_scales, scale, layout, output),
        use_low_precision,
        enable_pdl,
        enable_rank_mask,
        active_rank_mask,
    )


def moe_a2a_sanitize_expert_ids(
    expert_ids: Tensor,
    workspace: Tensor,
    metainfo: Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Give every id of every padded slot the invalid value, in place: rows at or past the count of their source.

    Args:
        expert_ids: int32 or int64 `[ep, R, k]` or `[ep * R, k]` as dispatch returned it.
        workspace, metainfo, ep_rank: of the dispatch. Any device.
        invalid_expert_id: the value.
        enable_pdl: without meaning.

    On a GPU one launch on the current stream, of a kernel that `moe_a2a_initialize`, or `MoeAlltoAll`, has loaded; may
    be captured. No host synchronisation.

    Raises:
        ShapeError, ConfigError (ValueErrors): ids that do not fit, or a value that ids on a GPU cannot have.
    """
    check_backend(backend)
    ep_size = workspace.shape[0]
    if (
        not expert_ids.is_contiguous()
        or expert_ids.dim() not in (2, 3)
        or expert_ids.numel() % ep_size
        or expert_ids.device != workspace.device
    ):
        raise ShapeError(
            what="expert_ids",
            got=f"{expert_ids.dtype} {tuple(expert_ids.shape)} on {expert_ids.device}",
            wanted=f"contiguous ids [{ep_size}, R, k] or [{ep_size} * R, k] on {workspace.device}",
            rank=ep_rank,
        )
    if not expert_ids.numel():
        return
    blocks = expert_ids.view(ep_size, -1, expert_ids.shape[-1])
    start = int(metainfo[METAINFO_INDEX["RECV_COUNTERS_OFFSET_INDEX"]])
    counts = workspace[ep_rank, start : start + 4 * ep_size].view(torch.int32)
    if counts.numel() != ep_size:
        raise ShapeError(what="metainfo", got=start, wanted="what moe_a2a_initialize returned", rank=ep_rank)
    if _is_on_gpu(blocks) and blocks.dtype in (torch.int32, torch.int64):
        from a2a.nvlink.scrub_ids import id_scrubber

        id_scrubber(blocks.device.index).scrub(blocks, counts, invalid_expert_id)
        return
    slots = torch.arange(blocks.shape[1], dtype=torch.int32, device=blocks.device)
    blocks.masked_fill_((slots >= counts.unsqueeze(1)).unsqueeze(2), invalid_expert_id)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: Tensor, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> Tensor:
    """Bytes of a workspace as a tensor `[*leading_shape, -1]`.

    Args:
        workspace: `[ep, bytes]`, or one rank's `[bytes]`.
        leading_shape: all dimensions but the last, which follows.
        slice_start, slice_end: bytes from the start of the workspace, within one rank's row.
        dtype: of the result.

    Raises:
        ShapeError (a ValueError): the slice leaves the row.
    """
    rows = workspace.unsqueeze(0) if workspace.dim() == 1 else workspace
    if rows.dim() != 2:
        raise ShapeError(what="workspace", got=f"{workspace.dim()} dimensions", wanted="[ep, bytes] or [bytes]")
    rows = rows.view(torch.uint8)
    rank, start = divmod(slice_start, rows.stride(0))
    end = start + slice_end - slice_start
    if not 0 <= start <= end <= rows.shape[1] or not 0 <= rank < rows.shape[0]:
        raise ShapeError(
            what="slice_start, slice_end",
            got=(slice_start, slice_end),
            wanted=f"a slice within one of {rows.shape[0]} rows of {rows.shape[1]} bytes",
        )
    return rows[rank, start:end].view(dtype).view(*leading_shape, -1)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes of one rank's workspace for rows of so many bytes.

    A control part that does not depend on the rows, and the rows of both directions, each rounded up to 128 bytes.

    Raises:
        ConfigError (a ValueError): a backend or a size that is not allowed.
    """
    check_backend(backend)
    return caller_bytes(
        ep_size,
        max_num_tokens,
        total_dispatch_payload_size_per_token,
        combine_payload_size_per_token,
        eplb_stats_num_experts,
    )


def moe_a2a_active_rank_mask(active_ranks: Sequence[int] | Tensor, ep_size: int) -> Tensor:
    """uint64 `[1]` on the CPU with the bit of each active rank set.

    Raises:
        ConfigError: a rank outside the group, or a group of more than 64 ranks, whose mask is longer: build
            `a2a.MoeAlltoAll` for those.
    """
    if not 1 <= ep_size <= 64 * MOE_A2A_RANK_MASK_WORDS:
        raise ConfigError(what="ep_size", got=ep_size, wanted=f"an integer in 1..{64 * MOE_A2A_RANK_MASK_WORDS}")
    return rank_mask(active_ranks, ep_size)


def rank_mask(active_ranks: Sequence[int] | Tensor, ep_size: int) -> Tensor:
    """uint64 `[ceil(ep_size / 64)]` on the CPU with the bit of each active rank set."""
    words = [0] * -(-ep_size // 64)
    for each in active_ranks:
        rank = int(each)
        if not 0 <= rank < ep_size:
            raise ConfigError(what="active_ranks", got=rank, wanted=f"ranks in 0..{ep_size - 1}")
        words[rank // 64] |= 1 << rank % 64
    return torch.tensor(words, dtype=torch.uint64, device="cpu")


def check_backend(backend: str) -> None:
    """ConfigError (a ValueError) unless this package has the backend."""
    if backend not in BACKENDS:
        raise ConfigError(
            what="backend", got=backend, wanted="'trtllm'", change="the other kernels are FlashInfer's own"
        )


def output_format(scales: Tensor | None, scalar_scale: Any, sf_layout: Any) -> tuple[Any, ScaleLayout]:
    """Global scale and layout of quantised output; values that mean nothing for this output are dropped, as ever."""
    if scales is None:
        return 1.0, ScaleLayout.LINEAR
    if not isinstance(sf_layout, ScaleLayout):
        try:
            sf_layout = _SCALE_LAYOUTS[SfLayout(SfLayout.layout_linear if sf_layout is None else int(sf_layout))]
        except (TypeError, ValueError):
            raise ConfigError(
                what="sf_layout",
                got=sf_layout,
                wanted="one of " + ", ".join(f"SfLayout.{each.name}" for each in SfLayout),
            ) from None
    return (scalar_scale if scales.dtype == torch.float8_e4m3fn else 1.0), sf_layout


# ---- checks that need no state -------------------------------------------------------------------------------------


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _check_output(
    output: Tensor, payload: Tensor, num_tokens: int, output_dtype: torch.dtype | None, low_precision: bool
) -> None:
    dtype = output_dtype or (torch.bfloat16 if low_precision else payload.dtype)
    plain = dtype in (torch.bfloat16, torch.float16, torch.float32)
    fits = (
        output.is_cuda
        and output.device == payload.device
        and output.is_contiguous()
        and output.dim() == 2
        and output.shape[0] == num_tokens
        and output.dtype == dtype
        and (not plain or output.shape[1] == payload.shape[-1])
    )
    if not fits:
        raise ShapeError(
            what="output",
            got=f"{output.dtype} {tuple(output.shape)} strides {output.stride()} on {output.device}",
            wanted=f"a contiguous {dtype} tensor [{num_tokens}, {payload.shape[-1] if plain else '*'}] on the GPU of "
            f"the payload, {payload.device}",
        )


def _rank_of(workspace: Tensor, metainfo: Tensor, ep_rank: int, ep_size: int) -> CallerRank:
    if workspace.shape[0] != ep_size:
        raise ShapeError(
            what="workspace", got=f"{workspace.shape[0]} rows", wanted=f"ep_size = {ep_size}", rank=ep_rank
        )
    if metainfo.numel() != len(METAINFO_INDEX):
        raise ShapeError(
            what="metainfo",
            got=f"{metainfo.numel()} numbers",
            wanted="what moe_a2a_initialize returned",
            rank=ep_rank,
        )
    from a2a.integrations.flashinfer_rounds import rank_of

    return rank_of(workspace, ep_rank)
