"""alltoall: MoeAlltoAll: rounds, states, views.

Owns the public object: in which state which verb is legal, what one call tells the transport, and the views into the
workspace. Refuses to know how rows move (transport), where bytes live (layout) and what an argument may be (arguments).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from a2a.agreement import (
    CAPACITIES,
    Placeable,
    agree,
    capacities,
    check_budget,
    is_budget,
    placement_table,
    union,
)
from a2a.arguments import Arguments, Tokens, describe, is_plain, look
from a2a.comm import resolve
from a2a.comm.consent import gather
from a2a.config import ExchangeConfig
from a2a.env import Env
from a2a.errors import A2AError, ConfigError, ShapeError, StateError
from a2a.layout import WorkspaceLayout, combine_row_bytes
from a2a.placement import Placement
from a2a.quant import ScaleLayout, swizzle_scales
from a2a.transport import (
    Choice,
    CombineCall,
    DispatchCall,
    Hook,
    Payload,
    Quantize,
    Transport,
    choose,
    transport_class,
)

_Kept = TypeVar("_Kept")

DEFAULT_INVALID_ID: Final = -1

_IDLE: Final = "idle"
_DISPATCHED: Final = "dispatched"
_RELEASED: Final = "released"
_CLOSED: Final = "closed"
_MAX_KEPT: Final = 64
"""Of each kind of thing made for a round, how many are kept for rounds like it."""


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside, tensors are such as may be kept.

    Those that name no place and no dtype are fp32 on the CPU, whatever a model loader made the default; and none is of
    an inference or no-grad mode that its next user may not be in.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """What `dispatch_tokens` returns: views into the workspace, valid until this rank calls combine.

    Attributes:
        hidden_states: `[ep, R, W]` in the wire format's data dtype.
        scales: `[ep, R, S]` linear, or all rows' scales in the layout asked for; None for formats without scales.
        topk_ids: int32 `[ep, R, k]`, padded slots hold the invalid id.
        topk_weights: float32 `[ep, R, k]`.
        recv_counts: int32 `[ep]`, rows from each source rank.
    """

    hidden_states: Tensor
    scales: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    recv_counts: Tensor


@dataclasses.dataclass(slots=True)
class _Shared:
    """What the contexts of one object have in common; `ensure` replaces its parts."""

    config: ExchangeConfig
    layout: WorkspaceLayout
    placement: Placement
    transport: Transport
    arguments: Arguments
    startup_timeout_s: float
    timeout_s: float
    closed: bool = False
    released: bool = False


class _Round(NamedTuple):
    """What is known of a dispatch until its combine."""

    runtime_max_tokens_per_rank: int
    num_tokens: int
    num_picks: int
    has_eplb: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Geometry:
    """What a dispatch sends, apart from the tensors. Made once for all that look the same: see `DispatchCall.like`."""

    payloads: tuple[Payload, ...]
    ids_payload: int | None
    invalid_id: int
    round: _Round


class _PayloadPlan(NamedTuple):
    """What was found and made for a `dispatch`; holds for every one whose arguments look the same."""

    geometry: _Geometry
    views: tuple[Tensor, ...]


class _TokenPlan(NamedTuple):
    """The same for a `dispatch_tokens`; `quantize` is for one without a global scale of its own."""

    tokens: Tokens
    geometry: _Geometry
    received: Dispatched
    quantize: Quantize | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _CombinePlan:
    """The same for a combine after an equal dispatch: see `CombineCall.like`."""

    quantize: Quantize | None
    row_bytes: int
    strides: tuple[int, int, int]
    out_width: int
    out_dtype: torch.dtype


class RoundContext:
    """The verbs and the state of one sequence of rounds. `MoeAlltoAll` is one itself; more are its `contexts`.

    Rounds of different contexts may be in flight at the same time; each context goes `idle -> dispatched -> idle`.
    """

    def __init__(self, shared: _Shared, index: int) -> None:
        self._shared = shared
        self._index = index
        self._state = _IDLE
        self._round_number = 0
        self._attempt = 0
        self._warm = False
        self._round: _Round | None = None
        self._address: int | None = None
        self._views: dict[Hashable, Tensor] = {}
        self._payload_plans: dict[Hashable, _PayloadPlan] = {}
        self._token_plans: dict[Hashable, _TokenPlan] = {}
        self._combine_plans: dict[Hashable, _CombinePlan] = {}

    # ---- verbs -----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: Sequence[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        *,
        stream: Any = None,
        num_sms: int | None = None,
        enable_pdl: bool | None = None,
    ) -> list[Tensor]:
        """Send every token to the ranks that hold its experts, once per rank.

        Args:
            token_selected_experts: int32 or int64 `[n, k]`, contiguous, global expert ids; an id outside
                `[0, num_experts)` goes nowhere.
            input_payloads: 1 to 8 contiguous tensors `[n, *]` of any dtype, copied as bytes, never modified.
            runtime_max_tokens_per_rank: R, rows of a block; `max(1, n) <= R <= max_num_tokens`, equal on all ranks, as
                are the number of payloads and their row bytes.
            invalid_token_expert_id: id given to padded slots; None for -1. Ignored with `scrub=None`.
            expert_id_payload_index: which payload holds the ids; None for the one that is `token_selected_experts`.
            eplb_local_stats: int32 `[Es]`, gathered into `eplb_gathered_stats`; on all ranks or on none.
            active_rank_mask: uint64 `[ceil(ep/64)]` on the CPU, copied into `rank_mask`; equal on all active ranks. On
                GPUs the copy waits for the current stream and cannot be captured: `rank_mask` itself can be written
                there.
            stream: a `torch.cuda.Stream` or its handle as an integer; None for the current one. What this object has
                launched on another stream before goes first, but while a graph is captured. Like the next two without
                meaning on the host transport.
            num_sms: SMs that the launch may take; None for what the table of launch shapes says.
            enable_pdl: programmatic dependent launch; None for what the table says.

        Returns:
            One view `[ep, R, *]` per payload, contiguous, in the workspace; block `s` holds the rows of source rank
            `s`. Valid until this rank calls combine.

        Host synchronisation:
            The host transport returns when all rows have arrived. GPU transports do not synchronise: what a kernel or a
            peer finds wrong later is raised by the next verb or `check()`.

        Raises:
            StateError: not idle.
            ShapeError, ConfigError: an argument does not fit; raised on every rank, nothing was sent, still idle.
            MismatchError: ranks disagree; raised on every rank, nothing was sent, still idle.
            PeerTimeout, PeerLost: the round is lost; every rank must call `reset()`.
            On GPUs a peer's kernels may be waiting already when an argument is refused or compared: the round is lost
            then, received counts are 0, ids are invalid, and after any of these but StateError every rank must call
            `reset()`.
        """
        self._enter("dispatch", _IDLE)
        shared = self._shared
        try:
            if active_rank_mask is not None:
                self._set_mask(active_rank_mask, stream)
            key, plan = None, None
            ids_payload = expert_id_payload_index
            if isinstance(input_payloads, list | tuple):
                if ids_payload is None:
                    for index, each in enumerate(input_payloads):
                        if each is token_selected_experts:
                            ids_payload = index
                            break
                key = look(
                    token_selected_experts,
                    runtime_max_tokens_per_rank,
                    ids_payload,
                    invalid_token_expert_id,
                    eplb_local_stats,
                    *input_payloads,
                )
                plan = self._payload_plans.get(key)
            is_new = plan is None
            if plan is None:
                plan = self._plan_payloads(
                    token_selected_experts,
                    input_payloads,
                    runtime_max_tokens_per_rank,
                    ids_payload,
                    invalid_token_expert_id,
                    eplb_local_stats,
                )
            geometry = plan.geometry
            call = self._dispatch_call(
                geometry,
                token_selected_experts,
                tuple(input_payloads),
                None,
                eplb_local_stats,
                stream,
                num_sms,
                enable_pdl,
            )
        except A2AError as error:
            self._decline("dispatch", error)
            raise
        shared.transport.dispatch(call)
        if is_new:
            # What is refused leaves nothing behind. On GPUs a peer may refuse later; room once claimed stays claimed
            # then, since a graph may replay such a round.
            shared.layout.claim_dispatch([payload.row_bytes for payload in geometry.payloads])
            _keep(self._payload_plans, key, plan)
        self._state = _DISPATCHED
        self._round = geometry.round
        return list(plan.views)

    def dispatch_tokens(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        runtime_max_tokens_per_rank: int,
        scale: Tensor | None = None,
        global_scale: Tensor | None = None,
        invalid_token_expert_id: int | None = None,
        scale_layout: ScaleLayout = ScaleLayout.LINEAR,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        stream: Any = None,
        num_sms: int | None = None,
        enable_pdl: bool | None = None,
    ) -> Dispatched:
        """Quantise to the object's wire format inside the exchange and dispatch hidden states, ids and weights.

        Args:
            hidden_states: `[n, H']` in bf16, fp16 or fp32 to be quantised, or already in the wire format (those without
                scales take nothing else); `H'` at most hidden_size, equal on all ranks.
            topk_ids: int32 or int64 `[n, k]`; received as int32, ids that int32 cannot hold as -1.
            topk_weights: float32 `[n, k]`.
            runtime_max_tokens_per_rank, invalid_token_expert_id, eplb_local_stats, active_rank_mask: as in `dispatch`.
            scale: linear scales `[n, S]`, in the format's dtype, of hidden states that are already quantised; None
                otherwise.
            global_scale: float32 scalar tensor for nvfp4, equal on all ranks; None for 1.0.
            scale_layout: layout of the returned scales; anything but LINEAR makes a new tensor.
            stream, num_sms, enable_pdl: as in `dispatch`.

        Returns:
            `Dispatched`.

        Raises:
            As `dispatch`; ConfigError also without a wire format, or with a scale where none belongs (or none where
            one does).
        """
        self._enter("dispatch_tokens", _IDLE)
        shared = self._shared
        try:
            if active_rank_mask is not None:
                self._set_mask(active_rank_mask, stream)
            if (
                scale is None
                and global_scale is None
                and invalid_token_expert_id is None
                and eplb_local_stats is None
                and scale_layout is ScaleLayout.LINEAR
            ):
                # The usual call: a look at each option that is not used would take as long as one at a tensor.
                key = look(hidden_states, topk_ids, topk_weights, runtime_max_tokens_per_rank)
            else:
                key = look(
                    hidden_states,
                    topk_ids,
                    topk_weights,
                    runtime_max_tokens_per_rank,
                    scale,
                    global_scale,
                    scale_layout,
                    invalid_token_expert_id,
                    eplb_local_stats,
                )
            plan = self._token_plans.get(key)
            is_new = plan is None
            if plan is None:
                tokens = shared.arguments.tokens(
                    hidden_states, topk_ids, topk_weights, scale, global_scale, scale_layout
                )
                plan = self._plan_tokens(
                    tokens, topk_ids, runtime_max_tokens_per_rank, invalid_token_expert_id, eplb_local_stats
                )
            tokens = plan.tokens
            sent_ids = topk_ids
            if topk_ids.dtype != torch.int32:
                with self._on(stream):
                    sent_ids = narrow_ids(topk_ids)
            if tokens.wire.scales_dtype is None:
                rows: tuple[Tensor | None, ...] = (hidden_states, sent_ids, topk_weights)
            else:
                rows = (hidden_states, scale, sent_ids, topk_weights)
            quantize = plan.quantize if global_scale is None else shared.arguments.quantize(tokens, global_scale)
            call = self._dispatch_call(
                plan.geometry, topk_ids, rows, quantize, eplb_local_stats, stream, num_sms, enable_pdl
            )
        except A2AError as error:
            self._decline("dispatch", error)
            raise
        shared.transport.dispatch(call)
        if is_new:
            shared.layout.claim_dispatch(tokens.widths)
            _keep(self._token_plans, key, plan)
        self._state = _DISPATCHED
        self._round = plan.geometry.round
        received = plan.received
        if received.scales is None or scale_layout is ScaleLayout.LINEAR:
            return received
        scales = received.scales
        with self._on(stream):
            arranged = swizzle_scales(scales.reshape(-1, scales.shape[-1]), scale_layout)
        return dataclasses.replace(received, scales=arranged)

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """The combine area as a tensor `[ep, R, hidden_size]`, for experts that write their output in place.

        Exists only between dispatch and combine. Its contents are whatever was there before.

        Raises:
            StateError: not dispatched.
            ShapeError: wider than the workspace was built for, or R is not that of the dispatch.
        """
        shared, this = self._shared, self._round
        if this is None or self._state != _DISPATCHED or shared.closed or shared.released:
            self._require("get_combine_payload_tensor_in_workspace", _DISPATCHED)
            this = self._last_round("combine")
        if type(runtime_max_tokens_per_rank) is not int or (
            runtime_max_tokens_per_rank != this.runtime_max_tokens_per_rank
        ):
            self._check_rows(runtime_max_tokens_per_rank, this)
        if type(hidden_size) is not int or type(dtype) is not torch.dtype:
            hidden_size = shared.arguments.columns(hidden_size, dtype)
        key = ("combine payload", runtime_max_tokens_per_rank, hidden_size, dtype)
        view = self._views.get(key)
        # One that was written to with a gradient has a history, which would grow from round to round.
        if view is None or view.requires_grad:
            row_bytes = hidden_size * dtype.itemsize
            shared.arguments.check_combine_width(row_bytes, hidden_size, dtype)
            offset = shared.layout.combine_offset(row_bytes, self._index)
            view = self._remember(key, self._made_view(offset, runtime_max_tokens_per_rank, (hidden_size,), dtype))
            shared.layout.claim_combine(row_bytes)
        return view

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float | Tensor = 1.0,
        sf_layout: ScaleLayout = ScaleLayout.LINEAR,
        output: Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Tensor | None = None,
        stream: Any = None,
        num_sms: int | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        """Sum every token's rows over its distinct destination ranks.

        `out[t]` is the sum in fp32, in ascending destination rank from +0, rounded once to nearest even. No routing
        weights are applied: experts have applied them and reduced over their local experts. The result is already
        reduced over ranks.

        Args:
            payload: `[ep, R, H']` or `[ep*R, H']`, contiguous, fp16, bf16 or fp32 (or float8_e4m3fn with
                `use_low_precision`, taken at scale 1). `H'` equal on all ranks. Rows of no token are not read.
            runtime_max_tokens_per_rank: R of the dispatch.
            payload_in_workspace: the payload is the view of `get_combine_payload_tensor_in_workspace`: no copy is made.
            output_dtype: None for the payload's dtype (bf16 with `use_low_precision`, which sums to no other). fp16,
                bf16, fp32; or float8_e4m3fn makes mxfp8, uint8 with e4m3 `output_scales` nvfp4, uint8 with uint8 (or
                e8m0) `output_scales` mxfp4: the sum is rounded to the payload's dtype first, then quantised.
            output_scales: where quantised output's scales are written: contiguous, of as many elements as
                `sf_layout.shape(n, S)` says, S being the format's scales of a row.
            output_scalar_scale: global scale of nvfp4 output, a number or a tensor of one; 1.0 for everything else.
            sf_layout: layout of `output_scales`.
            output: `[n, W]` tensor of the caller to write into; None makes one.
            use_low_precision: the wire carries e4m3 with an fp32 scale per 128 elements. An element of a row is off by
                at most 2**-4 of its value (half a unit of a 3-bit mantissa) plus 2**-10/448 of its block's largest.
            active_rank_mask, stream, num_sms, enable_pdl: as in `dispatch`.

        Returns:
            `[n, W]`, `output` itself if given.

        Host synchronisation:
            The host transport returns when the sums are complete. GPU transports do not synchronise, as in `dispatch`.

        Raises:
            StateError: not dispatched.
            ShapeError, ConfigError, MismatchError: raised on every rank; still dispatched, combine may be called again.
            PeerTimeout, PeerLost: the round is lost; every rank must call `reset()`.
            On GPUs as in `dispatch`: every rank must call `reset()`; the output of a lost round is NaN.
        """
        self._enter("combine", _DISPATCHED)
        shared, this = self._shared, self._round or self._last_round("combine")
        try:
            if active_rank_mask is not None:
                self._set_mask(active_rank_mask, stream)
            if type(runtime_max_tokens_per_rank) is not int or (
                runtime_max_tokens_per_rank != this.runtime_max_tokens_per_rank
            ):
                self._check_rows(runtime_max_tokens_per_rank, this)
            low_precision = use_low_precision
            if type(low_precision) is not bool:
                low_precision = shared.arguments.switch("use_low_precision", low_precision)
            if type(payload_in_workspace) is not bool:
                payload_in_workspace = shared.arguments.switch("payload_in_workspace", payload_in_workspace)
            if (
                output_dtype is None
                and output_scales is None
                and type(output_scalar_scale) is float
                and output_scalar_scale == 1.0
                and sf_layout is ScaleLayout.LINEAR
            ):
                seen = look(payload, output)
                key = None if seen is None else (this, low_precision, seen)
            else:
                # A plan with a scale is for one call: the scale is a tensor, which a graph may need longer than we do.
                has_scale = type(output_scalar_scale) is not float or output_scalar_scale != 1.0
                seen = None if has_scale else look(payload, output, output_dtype, output_scales, sf_layout)
                key = None if seen is None else (this, low_precision, seen)
            plan = self._combine_plans.get(key)
            is_new = plan is None
            if plan is None:
                given = (output_dtype, output_scales, output_scalar_scale, sf_layout, output)
                with self._on(stream):
                    plan = self._plan_combine(payload, this, *given, low_precision)
            blocks = payload
            if payload.stride() != plan.strides:
                blocks = shared.arguments.in_blocks(payload, runtime_max_tokens_per_rank)
            if payload_in_workspace:
                self._check_in_workspace(blocks, plan.row_bytes)
            if output is None:
                output = self._made_output((this.num_tokens, plan.out_width), plan.out_dtype, blocks.device, stream)
            self._attempt += 1
            # By position: by name takes twice as long.
            call = CombineCall(
                self._index,
                self._round_number,
                self._attempt,
                blocks,
                payload_in_workspace,
                runtime_max_tokens_per_rank,
                this.num_tokens,
                low_precision,
                output,
                plan.quantize,
                output_scales,
                sf_layout,
                shared.timeout_s if self._warm else shared.startup_timeout_s,
                stream,
                num_sms,
                enable_pdl,
                plan,
            )
        except A2AError as error:
            self._decline("combine", error)
            raise
        shared.transport.combine(call)
        if is_new:
            shared.layout.claim_combine(combine_row_bytes(blocks.shape[2], blocks.dtype, low_precision))
            _keep(self._combine_plans, key, plan)
        self._state = _IDLE
        self._warm = True
        return output

    # ---- what a round left behind ----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of "idle", "dispatched", "released" and "closed"."""
        if self._shared.closed or self._shared.released:
            return _CLOSED if self._shared.closed else _RELEASED
        return self._state

    @property
    def recv_counts(self) -> Tensor:
        """int32 `[ep]` on the transport's device: rows received from each rank in the last dispatch."""
        return self._table("recv_counts", (self.ep_size,))

    @property
    def send_counts(self) -> Tensor:
        """int32 `[ep]` on the transport's device: rows sent to each rank in the last dispatch."""
        return self._table("send_counts", (self.ep_size,))

    @property
    def topk_target_ranks(self) -> Tensor:
        """int32 `[n, k]`: the rank of a token's first pick there; -1 for later picks and picks that go nowhere."""
        this = self._last_round("topk_target_ranks")
        return self._table("topk_target_ranks", (this.num_tokens, this.num_picks))

    @property
    def topk_send_indices(self) -> Tensor:
        """int32 `[n, k]`: the slot where `topk_target_ranks` has a rank, else -1."""
        this = self._last_round("topk_send_indices")
        return self._table("topk_send_indices", (this.num_tokens, this.num_picks))

    @property
    def eplb_gathered_stats(self) -> Tensor | None:
        """int32 `[ep, Es]`, the statistics of all ranks; None if the last dispatch carried none."""
        if not self._last_round("eplb_gathered_stats").has_eplb:
            return None
        return self._table("eplb_gathered_stats", (self.ep_size, self._shared.config.eplb_stats_num_experts))

    @property
    def rank_mask(self) -> Tensor:
        """uint64 `[ceil(ep/64)]` on the transport's device, bit `r` set while rank `r` takes part; writable.

        Equal on all active ranks at every call, own bit set. A masked rank is neither sent to nor waited for.

        Raises:
            ConfigError: the object was built without `enable_rank_mask`.
        """
        if not self._shared.config.enable_rank_mask:
            raise ConfigError(what="enable_rank_mask", got=False, wanted="True at construction to use rank_mask")
        if self._shared.released:
            raise StateError(rank=self.ep_rank, call="rank_mask", state=_RELEASED, change="call restore() first")
        return self._region("rank_mask").view(torch.uint64)

    # ---- identity --------------------------------------------------------------------------------------------------

    @property
    def ep_rank(self) -> int:
        """This rank in the group."""
        return self._shared.transport.rank

    @property
    def ep_size(self) -> int:
        """Ranks in the group."""
        return self._shared.config.ep_size

    @property
    def config(self) -> ExchangeConfig:
        """What is exchanged, as agreed by all ranks."""
        return self._shared.config

    @property
    def layout(self) -> WorkspaceLayout:
        """Where every byte of a workspace lives."""
        return self._shared.layout

    @property
    def placement(self) -> Placement:
        """Which rank holds which expert."""
        return self._shared.placement

    @property
    def max_num_tokens(self) -> int:
        """M, local tokens a rank may dispatch in one round."""
        return self._shared.config.max_num_tokens

    @property
    def top_k(self) -> int:
        """Most picks per token."""
        return self._shared.config.top_k

    @property
    def num_experts(self) -> int:
        """E, global experts."""
        return self._shared.config.num_experts

    @property
    def hidden_size(self) -> int:
        """H, elements of a row."""
        return self._shared.config.hidden_size

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _enter(self, verb: str, state: str) -> None:
        shared = self._shared
        if not shared.closed:
            # Before the state: what a failed round left behind is no misuse of the caller's.
            shared.transport.check()
        if self._state != state or shared.closed or shared.released:
            self._require(verb, state)

    def _require(self, verb: str, state: str) -> None:
        if self.state != state:
            change = {
                _CLOSED: "build a new object",
                _IDLE: "call dispatch first",
                _DISPATCHED: "call combine first, or reset() on every rank",
                _RELEASED: "call restore() on every rank",
            }[self.state]
            raise StateError(rank=self.ep_rank, call=verb, state=self.state, change=change)

    def _decline(self, phase: str, error: A2AError) -> None:
        if phase == "dispatch":
            self._round_number += 1
            self._attempt = 0
        else:
            self._attempt += 1
        self._shared.transport.decline(phase, self._index, self._round_number, self._attempt, error.to_facts())

    def _geometry(
        self,
        topk_ids: Tensor,
        widths: tuple[int, ...],
        fills: tuple[int | None, ...],
        runtime_max_tokens_per_rank: int,
        ids_payload: int | None,
        invalid_id: int | None,
        eplb_local_stats: Tensor | None,
    ) -> _Geometry:
        shared = self._shared
        config = shared.config
        most, (n, k) = runtime_max_tokens_per_rank, topk_ids.shape
        if not isinstance(most, int) or isinstance(most, bool) or not max(1, n) <= most <= config.max_num_tokens:
            raise ShapeError(
                what="runtime_max_tokens_per_rank",
                got=most,
                wanted=f"an integer in max(1, n = {n})..max_num_tokens = {config.max_num_tokens}",
                rank=self.ep_rank,
            )
        shared.arguments.check_eplb(eplb_local_stats)
        invalid = DEFAULT_INVALID_ID if invalid_id is None else invalid_id
        if not isinstance(invalid, int) or not -(2**31) <= invalid < 2**31:
            raise ConfigError(what="invalid_token_expert_id", got=invalid, wanted="a 32-bit integer", rank=self.ep_rank)
        offsets = shared.layout.payload_offsets(widths, self._index)
        return _Geometry(
            tuple(map(Payload, widths, offsets, fills)),
            None if config.scrub is None else ids_payload,
            invalid,
            _Round(most, n, k, eplb_local_stats is not None),
        )

    def _plan_payloads(
        self,
        token_selected_experts: Tensor,
        input_payloads: Sequence[Tensor],
        runtime_max_tokens_per_rank: int,
        ids_payload: int | None,
        invalid_id: int | None,
        eplb_local_stats: Tensor | None,
    ) -> _PayloadPlan:
        arguments, most = self._shared.arguments, runtime_max_tokens_per_rank
        topk_ids = arguments.topk_ids(token_selected_experts)
        rows = arguments.payloads(input_payloads, topk_ids.shape[0])
        arguments.check_ids_payload(ids_payload, rows, topk_ids)
        geometry = self._geometry(
            topk_ids,
            tuple(each.shape[1] * each.dtype.itemsize for each in rows),
            tuple(arguments.fill_byte(each.dtype) for each in rows),
            most,
            ids_payload,
            invalid_id,
            eplb_local_stats,
        )
        views = tuple(
            self._view(payload.offset_bytes, most, tuple(each.shape[1:]), each.dtype)
            for payload, each in zip(geometry.payloads, rows, strict=True)
        )
        return _PayloadPlan(geometry, views)

    def _plan_tokens(
        self,
        tokens: Tokens,
        topk_ids: Tensor,
        runtime_max_tokens_per_rank: int,
        invalid_id: int | None,
        eplb_local_stats: Tensor | None,
    ) -> _TokenPlan:
        most = runtime_max_tokens_per_rank
        ids_payload = len(tokens.widths) - 2
        geometry = self._geometry(
            topk_ids, tokens.widths, tokens.fills, most, ids_payload, invalid_id, eplb_local_stats
        )
        hidden, *scales, ids, weights = (
            self._view(payload.offset_bytes, most, (columns,), dtype)
            for payload, (columns, dtype) in zip(geometry.payloads, tokens.shapes, strict=True)
        )
        counts = self._table_view("recv_counts", (self.ep_size,))
        received = Dispatched(hidden, scales[0] if scales else None, ids, weights, counts)
        return _TokenPlan(tokens, geometry, received, self._shared.arguments.quantize(tokens, None))

    def _dispatch_call(
        self,
        geometry: _Geometry,
        topk_ids: Tensor,
        rows: tuple[Tensor | None, ...],
        quantize: Quantize | None,
        eplb_local_stats: Tensor | None,
        stream: Any,
        num_sms: int | None,
        enable_pdl: bool | None,
    ) -> DispatchCall:
        shared = self._shared
        self._round_number += 1
        self._attempt = 0
        return DispatchCall(
            self._index,
            self._round_number,
            topk_ids,
            geometry.payloads,
            rows,
            geometry.round.runtime_max_tokens_per_rank,
            geometry.ids_payload,
            geometry.invalid_id,
            quantize,
            eplb_local_stats,
            shared.timeout_s if self._warm else shared.startup_timeout_s,
            stream,
            num_sms,
            enable_pdl,
            geometry,
        )

    def _plan_combine(
        self,
        payload: Tensor,
        this: _Round,
        output_dtype: torch.dtype | None,
        output_scales: Tensor | None,
        output_scalar_scale: float | Tensor,
        sf_layout: ScaleLayout,
        output: Tensor | None,
        low_precision: bool,
    ) -> _CombinePlan:
        arguments, rows = self._shared.arguments, this.num_tokens
        arguments.check_combine_payload(payload, this.runtime_max_tokens_per_rank, low_precision)
        width = payload.shape[-1]
        row_bytes = combine_row_bytes(width, payload.dtype, low_precision)
        arguments.check_combine_width(row_bytes, width, payload.dtype)
        self._shared.layout.combine_offset(row_bytes, self._index)
        quantize, out_width, out_dtype = arguments.output(
            output_dtype, output_scales, output_scalar_scale, sf_layout, payload, low_precision
        )
        if output is not None:
            arguments.check_matrix("output", output, (rows, out_width), out_dtype)
        if quantize is not None and output_scales is not None:
            scales_width = quantize.wire_format.scales_width(width, quantize.alignment)
            numel = math.prod(sf_layout.shape(rows, scales_width))
            if output_scales.numel() != numel or not output_scales.is_contiguous():
                raise ShapeError(
                    what="output_scales",
                    got=f"{tuple(output_scales.shape)}",
                    wanted=f"a contiguous tensor of {numel} elements for {rows} rows of {scales_width} scales",
                    rank=self.ep_rank,
                )
        strides = (this.runtime_max_tokens_per_rank * width, width, 1)
        return _CombinePlan(quantize, width * payload.dtype.itemsize, strides, out_width, out_dtype)

    def _check_rows(self, runtime_max_tokens_per_rank: Any, this: _Round) -> None:
        """That R is the dispatch's; an integer may be of a type of its own, as an enumeration's is."""
        is_integer = isinstance(runtime_max_tokens_per_rank, int) and not isinstance(runtime_max_tokens_per_rank, bool)
        if is_integer and int(runtime_max_tokens_per_rank) == this.runtime_max_tokens_per_rank:
            return
        raise ShapeError(
            what="runtime_max_tokens_per_rank",
            got=runtime_max_tokens_per_rank,
            wanted=f"{this.runtime_max_tokens_per_rank}, that of the dispatch",
            rank=self.ep_rank,
        )

    def _check_in_workspace(self, blocks: Tensor, row_bytes: int) -> None:
        shared = self._shared
        if self._address is None:
            # Once: slicing a tensor costs as much as all other checks of a combine.
            self._address = shared.transport.workspace[self.ep_rank].data_ptr()
        address = self._address + shared.layout.combine_offset(row_bytes, self._index)
        if blocks.data_ptr() != address:
            raise ShapeError(
                what="payload with payload_in_workspace=True",
                got=f"address {blocks.data_ptr():#x}",
                wanted=f"{address:#x}, the view of get_combine_payload_tensor_in_workspace",
                rank=self.ep_rank,
            )

    def _set_mask(self, mask: Tensor, stream: Any) -> None:
        words = -(-self.ep_size // 64)
        mine = self.rank_mask
        if not is_plain(mask) or mask.dtype != torch.uint64 or tuple(mask.shape) != (words,) or mask.is_cuda:
            raise ShapeError(
                what="active_rank_mask",
                got=describe(mask),
                wanted=f"a uint64 tensor [{words}] on the CPU",
                rank=self.ep_rank,
            )
        if not int(mask[self.ep_rank // 64]) >> (self.ep_rank % 64) & 1:
            raise ConfigError(
                what="active_rank_mask",
                got=[hex(word) for word in mask.tolist()],
                wanted=f"bit {self.ep_rank} set, the caller's own",
                rank=self.ep_rank,
            )
        # Behind the round that may still be under way there: its kernels read the mask too.
        with self._on(stream):
            if mine.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    what="active_rank_mask",
                    got="a mask from the host while a graph is captured",
                    wanted="none: each replay reads rank_mask, which can be written on the device",
                    rank=self.ep_rank,
                )
            mine.copy_(mask)

    # ---- views -----------------------------------------------------------------------------------------------------

    def _last_round(self, what: str) -> _Round:
        if self._round is None or self._shared.closed:
            change = "call restore() on every rank" if self.state == _RELEASED else "call dispatch first"
            raise StateError(rank=self.ep_rank, call=what, state=self.state, change=change)
        return self._round

    def _region(self, name: str) -> Tensor:
        region = self._shared.layout.region(name, self._index)
        return self._shared.transport.workspace[self.ep_rank, region.offset_bytes : region.end_bytes]

    def _table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._last_round(name)
        return self._table_view(name, shape)

    def _table_view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        key = (name, shape)
        view = self._views.get(key)
        if view is None:
            with plain_tensors():
                flat = self._region(name).view(torch.int32)[: math.prod(shape)]
                view = self._remember(key, flat.view(shape))
        return view

    def _view(self, offset_bytes: int, most: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (offset_bytes, most, row_shape, dtype)
        view = self._views.get(key)
        return self._remember(key, self._made_view(*key)) if view is None else view

    def _made_view(self, offset_bytes: int, most: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = self.ep_size * most * dtype.itemsize * math.prod(row_shape)
        with plain_tensors():
            raw = self._shared.transport.workspace[self.ep_rank, offset_bytes : offset_bytes + num_bytes]
            return raw.view(dtype).view(self.ep_size, most, *row_shape)

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Within it, what torch enqueues goes where the launch will."""
        device = self._shared.transport.workspace.device
        if stream is None or device.type != "cuda":
            return contextlib.nullcontext()
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        on: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
        return on

    def _made_output(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, stream: Any) -> Tensor:
        if stream is None or device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=device)
        # Memory that the current stream may still have a use for must not be written by the other one; and the caller
        # reads it on the current one.
        with self._on(stream):
            output = torch.empty(shape, dtype=dtype, device=device)
        output.record_stream(torch.cuda.current_stream(device))
        return output

    def _forget_views(self) -> None:
        self._address = None
        for kept in (self._views, self._payload_plans, self._token_plans, self._combine_plans):
            kept.clear()

    def _remember(self, key: Hashable, view: Tensor) -> Tensor:
        _keep(self._views, key, view)
        return view

    def _start_over(self) -> None:
        self._state = _IDLE
        self._round_number = 0
        self._attempt = 0
        self._round = None
        self._forget_views()


class MoeAlltoAll(RoundContext):
    """The exchange of one Mixture-of-Experts layer group: dispatch to the experts' ranks, combine what they made.

    Building is collective: every rank of the group builds with equal values, or every rank raises. The object is a
    context manager, and the first of its own `contexts`. Verbs are for one thread at a time; on the host transport each
    context may have a thread of its own.

    Args:
        max_num_tokens: M, local tokens a rank may dispatch in one round.
        top_k: picks per token, at most 64; a dispatch may carry fewer.
        num_experts: E, global experts, at least one per rank.
        hidden_size: H, elements of a row.
        dispatch_dtype_bytes_per_elem: 2, 1, 4, or 0 for packed 4-bit: with `dispatch_scale_bytes_per_token` the row
            size for payloads that the caller quantises. Leave both alone when `wire_format` is given.
        dispatch_scale_bytes_per_token: bytes of scales beside a row.
        wire_format: "bf16", "fp16", "fp8_block", "mxfp8", "nvfp4" or "mxfp4", for `dispatch_tokens`.
        mx_alignment: multiple to which mxfp8 rows are padded, in elements.
        combine_dtype_bytes_per_elem: the widest element of a combine row: 2, 4, or 1 where every combine uses the e4m3
            wire (`use_low_precision`), for which 2 has room too in rows of 6 elements or more.
        extra_payload_bytes_per_token: bytes of payloads beyond row, scales, int32 ids and fp32 weights.
        comm: a torch ProcessGroup, an mpi4py communicator, any object with their verbs, or None for the launcher's
            environment. Its size is `ep_size`.
        transport: a transport's name, or "auto" for the one A2A_TRANSPORT names, else the first that can.
        placement: rank of each expert; None for contiguous shares.
        name: tells objects of one program apart in the comparison between ranks.
        row_order: "compact": row `j` of a block is the j-th of its source's tokens that has a pick here, padding behind
            the last; "token": row `j` is token `j`, and rows of tokens without a pick here are padding.
        scrub: "ids" gives padded slots the invalid id, "all" fills their other payloads too, None leaves them alone.
        eplb_stats_num_experts: Es, length of the statistics gathered with a dispatch.
        enable_rank_mask: allow ranks to be masked out.
        num_contexts: independent rounds in flight.
        startup_timeout_s: budget of each wait while building and in the first round, in seconds; None for
            A2A_STARTUP_TIMEOUT_S, else 300.
        timeout_s: budget of each wait afterwards, in seconds; None for A2A_TIMEOUT_S, else 30. Both may be set later.

    Raises:
        ConfigError, Unsupported, MismatchError: on every rank, before memory is taken.
        PeerTimeout, PeerLost: a rank does not come.
    """

    @plain_tensors()
    def __init__(
        self,
        *,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        dispatch_dtype_bytes_per_elem: int = 2,
        dispatch_scale_bytes_per_token: int = 0,
        wire_format: str | None = None,
        mx_alignment: int = 0,
        combine_dtype_bytes_per_elem: int = 2,
        extra_payload_bytes_per_token: int = 0,
        comm: object | None = None,
        transport: str = "auto",
        placement: Placeable | None = None,
        name: str = "default",
        row_order: str = "compact",
        scrub: str | None = "ids",
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        num_contexts: int = 1,
        startup_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        env = Env.read()
        startup_timeout_s = env.startup_timeout_s if startup_timeout_s is None else startup_timeout_s
        timeout_s = env.timeout_s if timeout_s is None else timeout_s
        # Anything may have been passed, and not everything can be compared.
        automatic = isinstance(transport, str) and transport == "auto"
        if automatic and env.transport is not None:
            transport, automatic = env.transport, env.transport == "auto"
        # Meeting the others needs a budget already; a bad one is reported to all ranks once they have met.
        meeting_s = startup_timeout_s if is_budget(startup_timeout_s) else Env.startup_timeout_s
        self._comm = resolve(comm, timeout_s=meeting_s)
        config: ExchangeConfig | None = None
        problem: A2AError | None = None
        try:
            check_budget("startup_timeout_s", startup_timeout_s)
            check_budget("timeout_s", timeout_s)
            config = ExchangeConfig(
                ep_size=self._comm.Get_size(),
                max_num_tokens=max_num_tokens,
                top_k=top_k,
                num_experts=num_experts,
                hidden_size=hidden_size,
                wire_format=wire_format,
                mx_alignment=mx_alignment,
                dispatch_dtype_bytes_per_elem=dispatch_dtype_bytes_per_elem,
                dispatch_scale_bytes_per_token=dispatch_scale_bytes_per_token,
                combine_dtype_bytes_per_elem=combine_dtype_bytes_per_elem,
                extra_payload_bytes_per_token=extra_payload_bytes_per_token,
                placement=placement_table(placement),
                name=name,
                row_order=row_order,
                scrub=scrub,
                eplb_stats_num_experts=eplb_stats_num_experts,
                enable_rank_mask=enable_rank_mask,
                num_contexts=num_contexts,
            )
            if not automatic:
                transport_class(transport)
        except A2AError as error:
            problem = error
        config = agree(self._comm, config, problem, {"transport": transport})
        self._choice = choose(transport, config, self._comm)
        super().__init__(self._build(config, startup_timeout_s, timeout_s), 0)
        self._others = self._more_contexts(1)
        self._at_close: list[Callable[[], None]] = []

    def _build(self, config: ExchangeConfig, startup_timeout_s: float, timeout_s: float) -> _Shared:
        chosen = transport_class(self._choice.name)
        layout = self._lay_out(config, chosen)
        placement = (
            Placement.contiguous(config.num_experts, config.ep_size)
            if config.placement is None
            else Placement(config.placement, config.ep_size)
        )
        moved = chosen(config, layout, placement, self._comm, timeout_s=startup_timeout_s)
        moved.set_budgets(startup_timeout_s, timeout_s)
        arguments = Arguments(config, moved.workspace.device, moved.rank)
        return _Shared(config, layout, placement, moved, arguments, startup_timeout_s, timeout_s)

    def _lay_out(self, config: ExchangeConfig, chosen: type[Transport]) -> WorkspaceLayout:
        return WorkspaceLayout(config, chosen.control_regions(config))

    def _more_contexts(self, first: int) -> tuple[RoundContext, ...]:
        return tuple(RoundContext(self._shared, index) for index in range(first, self._shared.config.num_contexts))

    @property
    def contexts(self) -> tuple[RoundContext, ...]:
        """`num_contexts` independent sequences of rounds; the first is the object itself."""
        return (self, *self._others)

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._choice.name

    def regime(self, runtime_max_tokens_per_rank: int) -> str:
        """Name of the way in which the transport moves rounds of that size."""
        return self._shared.transport.regime(runtime_max_tokens_per_rank)

    @property
    def transport_choice(self) -> Choice:
        """What was chosen and why."""
        return self._choice

    @property
    def workspace_size_per_rank(self) -> int:
        """Bytes of one rank's workspace."""
        return self._shared.layout.num_bytes

    @property
    def workspace(self) -> Tensor:
        """uint8 `[ep, bytes]`, the workspaces of all ranks, row `r` being rank `r`'s."""
        return self._shared.transport.workspace

    @property
    def startup_timeout_s(self) -> float:
        """Budget of each wait in a context's first round, in seconds; may be set."""
        return self._shared.startup_timeout_s

    @startup_timeout_s.setter
    def startup_timeout_s(self, value: float) -> None:
        check_budget("startup_timeout_s", value)
        self._shared.startup_timeout_s = value
        self._shared.transport.set_budgets(value, self._shared.timeout_s)

    @property
    def timeout_s(self) -> float:
        """Budget of each later wait, in seconds; may be set."""
        return self._shared.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        check_budget("timeout_s", value)
        self._shared.timeout_s = value
        self._shared.transport.set_budgets(self._shared.startup_timeout_s, value)

    def on_point(self, hook: Hook | None) -> None:
        """Call `hook(point, round)` at each named point of this rank's rounds; None calls nothing.

        For tests that delay, end or corrupt a rank there. The names are `POINTS` of the transport.
        """
        self._shared.transport.hook = hook

    def on_close(self, release: Callable[[], None]) -> None:
        """Call `release()` once when this object is closed: for whoever knows it by something else than a reference."""
        self._require_open("on_close")
        self._at_close.append(release)

    def check(self) -> None:
        """Raise the error that this rank or a peer has recorded, if any. No device synchronisation.

        On GPUs this rank's round is known to be good when its stream has been waited for and `check` raises nothing.
        """
        self._require_open("check")
        self._shared.transport.check()

    def reset(self, *, timeout_s: float | None = None) -> None:
        """Leave whatever state an exception left behind, in all contexts. Collective.

        Waits for this rank's launched work, then for all ranks to call it. Recorded errors are forgotten, round numbers
        start over, masked ranks that are connected take part again.

        Args:
            timeout_s: budget; None for the object's `timeout_s`.

        Raises:
            ConfigError: a budget that is none.
            PeerTimeout, PeerLost: a rank did not come.
        """
        self._require_open("reset")
        budget_s = self.timeout_s if timeout_s is None else timeout_s
        check_budget("timeout_s", budget_s)
        self._shared.transport.reset(timeout_s=budget_s)
        for context in self.contexts:
            context._start_over()

    def release(self) -> None:
        """Give the physical memory of the workspace back and keep its addresses. Collective, idempotent.

        Only between rounds; waits for this rank's launched work. Until `restore`, every verb but `close` raises, and
        views must not be touched: on GPUs nothing is mapped where they lie.

        Raises:
            StateError: a context of some rank is not idle; on every rank, nothing has changed.
        """
        shared = self._shared
        if self.state == _RELEASED:
            return
        self._require_open("release")
        problem: A2AError | None = None
        try:
            shared.transport.check()
            for context in self.contexts:
                context._require("release", _IDLE)
        except A2AError as error:
            problem = error
        gather(self._comm, None, problem)
        shared.transport.release(self._comm)
        shared.released = True
        for context in self.contexts:
            # Views stay: the addresses are the same when the memory is back.
            context._round = None

    @plain_tensors()
    def restore(self, comm: object | None = None, *, timeout_s: float | None = None) -> None:
        """Get memory at the same addresses again, zeroed, and start over as after `reset`. Collective, idempotent.

        A graph that was captured before replays after.

        Args:
            comm: who the ranks are, where the communicator of construction is gone: as there, of the same ranks.
            timeout_s: budget of each wait; None for the object's `startup_timeout_s`.

        Raises:
            ConfigError: a communicator of other ranks, or a budget that is none.
            Unsupported: no memory, on every rank; `restore` may be called again.
        """
        shared = self._shared
        if shared.closed:
            self._require_open("restore")
        if not shared.released:
            return
        budget_s = self.startup_timeout_s if timeout_s is None else timeout_s
        check_budget("timeout_s", budget_s)
        ranks = self._comm if comm is None else resolve(comm, timeout_s=budget_s)
        if (ranks.Get_rank(), ranks.Get_size()) != (self.ep_rank, self.ep_size):
            raise ConfigError(
                what="rank and size of comm",
                got=(ranks.Get_rank(), ranks.Get_size()),
                wanted=f"those of the object, {self.ep_rank} and {self.ep_size}",
            )
        shared.transport.restore(ranks, timeout_s=budget_s)
        self._comm = ranks
        shared.released = False
        for context in self.contexts:
            context._start_over()

    @plain_tensors()
    def ensure(self, **sizes: Any) -> bool:
        """Grow to the union of what this object holds and what any rank of its group asks for. Collective.

        Sizes never shrink. If anything grows, the workspace is a new one: old views are dead, rounds start over.

        Args:
            **sizes: fields of `config`, named and valued as in the constructor. Capacities (`max_num_tokens`, `top_k`,
                `hidden_size`, the byte sizes, `eplb_stats_num_experts`, `num_contexts`) grow; other values must be
                those of the object.

        Returns:
            Whether the workspace was replaced.

        Raises:
            StateError: a context is not idle; on every rank.
            ConfigError: an unknown name or a value that cannot change; on every rank.
        """
        self._require_open("ensure")
        config = self._shared.config
        wanted: ExchangeConfig | None = None
        problem: A2AError | None = None
        try:
            wanted = union(config, sizes)
            for context in self.contexts:
                context._require("ensure", _IDLE)
        except A2AError as error:
            problem = error
        requests = gather(self._comm, None if wanted is None else capacities(wanted), problem)
        grown = {name: max(each[name] for each in requests) for name in CAPACITIES}
        larger = dataclasses.replace(config, **grown)
        if larger == config:
            return False
        # A grown shape may be one that the transport cannot carry: ask before the old memory goes.
        choose(self._choice.name, larger, self._comm)
        shared = self._shared
        built = self._build(larger, shared.startup_timeout_s, shared.timeout_s)
        built.transport.hook = shared.transport.hook
        shared.transport.close()
        # In place: contexts that a caller holds go on with the new workspace.
        for field in dataclasses.fields(_Shared):
            setattr(shared, field.name, getattr(built, field.name))
        for context in self.contexts:
            context._start_over()
        self._others += self._more_contexts(len(self._others) + 1)
        return True

    def close(self) -> None:
        """Say goodbye to the peers and let go of the workspace; idempotent. Every rank should call it, none is awaited.

        Views that are still alive keep their memory.
        """
        if not self._shared.closed:
            self._shared.closed = True
            self._shared.transport.close()
            for context in self.contexts:
                context._forget_views()
            for release in self._at_close:
                release()
            self._at_close.clear()

    def __enter__(self) -> MoeAlltoAll:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self, verb: str) -> None:
        if self._shared.closed or self._shared.released:
            change = "build a new object" if self._shared.closed else "call restore() on every rank"
            raise StateError(rank=self.ep_rank, call=verb, state=self.state, change=change)


def _keep(kept: dict[Hashable, _Kept], key: Hashable, made: _Kept) -> None:
    """Remember what was made for a round like this one, if any is like it; the last few of them."""
    if key is None:
        return
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = made


def narrow_ids(ids: Tensor) -> Tensor:
    """Integer ids as int32, those that int32 cannot hold as -1: cut off, they could name an expert. int32: as it is."""
    return ids if ids.dtype == torch.int32 else torch.where(ids == ids.to(torch.int32), ids, -1).to(torch.int32)
