"""integrations/trtllm: the one-sided `Communication` of TensorRT-LLM's MoE layers on this package's exchange.

Owns the order of payloads and what TensorRT-LLM's verbs mean in rounds. Refuses to know how rows move, and imports
nothing of TensorRT-LLM before it is asked to.

TensorRT-LLM has no entry point for plugins: call `register()` in the program that every rank runs, before the model is
built. `TRTLLM_FORCE_COMM_METHOD=NVLINK_ONE_SIDED` then makes an error of what would silently be another method.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from a2a.alltoall import MoeAlltoAll, narrow_ids
from a2a.errors import ConfigError
from a2a.integrations.after_import import after_import
from a2a.integrations.shared_exchange import Exchanges

FACTORY = "tensorrt_llm._torch.modules.fused_moe.communication.communication_factory"
INVALID_ID = -1
"""Id of slots that no token fills; TensorRT-LLM's experts know no other."""

_METHOD = "NVLinkOneSided"

Received = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""Hidden states, their scales, slots, weights."""


class Communication:
    """Dispatch after quantisation, with the verbs and arguments of TensorRT-LLM's communication methods.

    Building is collective: layers are built in the same order on all ranks. Layers of one process share a workspace.

    Args:
        mapping: TensorRT-LLM's, or any object with `moe_ep_rank`, `moe_ep_size` and `world_size`.
        num_slots: expert slots; ids of slots are what tokens are routed by. Need not divide by the group's size.
        top_k: most slots a token picks.
        max_num_tokens_per_rank: most tokens a rank brings in one round.
        payload_in_workspace: whether the layer asks for the combine area to write into; kept for the layer to read.
        hidden_size, dtype: of a row before quantisation; the workspace holds rows of that size in both directions.
        num_experts: length of the load balancer's statistics; None without it.
        use_low_precision_combine: whether rows come back as e4m3 with a scale per 128 elements.
        ep_group_health: whose `get_mask()` says which ranks take part, as bits of an integer; None for all.
        alltoall_watchdog_timeout_s: deadline of every wait; None for the exchange's own.
        alltoall_watchdog_poll_interval_s: taken, since layers pass it; waits here watch themselves.
        comm: who the ranks are, as `MoeAlltoAll` takes it; its ranks are those of the mapping's expert parallelism.
        exchanges: shared by the layers of a process; None for this layer alone.

    Raises:
        ConfigError, MismatchError, Unsupported: on every rank.
    """

    def __init__(
        self,
        mapping: Any,
        num_slots: int,
        top_k: int,
        max_num_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        num_experts: int | None = None,
        use_low_precision_combine: bool = False,
        ep_group_health: Any = None,
        alltoall_watchdog_timeout_s: float | None = None,
        alltoall_watchdog_poll_interval_s: float = 0.1,
        *,
        comm: object | None = None,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.mapping = mapping
        self.ep_rank: int = mapping.moe_ep_rank
        self.ep_size: int = mapping.moe_ep_size
        self.num_experts = num_slots
        self.top_k = top_k
        self.max_num_tokens_per_rank = max_num_tokens_per_rank
        self.payload_in_workspace = payload_in_workspace
        self.use_low_precision_combine = use_low_precision_combine
        self.ep_group_health = ep_group_health
        self.enable_eplb = num_experts is not None
        self.eplb_stats_num_experts = num_experts
        if hidden_size is None or dtype is None:
            raise ConfigError(
                what="hidden_size, dtype", got=(hidden_size, str(dtype)), wanted="both, to size the workspace"
            )
        if mapping.world_size != self.ep_size:
            raise ConfigError(
                what="mapping",
                got=f"moe_ep_size {self.ep_size} of world_size {mapping.world_size}",
                wanted="expert parallelism over all ranks",
            )
        options: dict[str, Any] = {"enable_rank_mask": ep_group_health is not None}
        if alltoall_watchdog_timeout_s is not None:
            options["timeout_s"] = alltoall_watchdog_timeout_s
        purpose = f"trtllm {num_slots} {sorted(options.items())}"
        self._exchange = (exchanges or Exchanges()).of(comm, purpose, **options)
        self._exchange.grow(
            max_num_tokens=max_num_tokens_per_rank,
            top_k=top_k,
            num_experts=num_slots,
            hidden_size=hidden_size,
            row_bytes_per_token=hidden_size * dtype.itemsize,
            combine_dtype_bytes_per_elem=max(2, dtype.itemsize),
            eplb_stats_num_experts=num_experts or 0,
        )
        self._exchange.hold()
        self._is_held = True
        self._most = 1
        self._stats: Tensor | None = None
        self._gathered: Tensor | None = None

    @property
    def moe(self) -> MoeAlltoAll:
        """The exchange as it is now."""
        return self._exchange.moe

    # ---- what TensorRT-LLM asks before it calls ------------------------------------------------------------------

    @staticmethod
    def is_platform_supported() -> bool:
        """Whether to build this at all: yes; building says on every rank what no transport can serve."""
        return True

    def supports_post_quant_dispatch(self) -> bool:
        """Rows are sent as they are given, quantised or not."""
        return True

    def is_workload_feasible(self, all_rank_num_tokens: Sequence[int], num_chunks: int) -> bool:
        """Whether one round holds the tokens of every rank; chunks are rounds of their own."""
        return max(all_rank_num_tokens, default=0) <= self.max_num_tokens_per_rank

    # ---- rounds --------------------------------------------------------------------------------------------------

    def prepare_dispatch(
        self,
        token_selected_slots: Tensor,
        all_rank_num_tokens: Sequence[int],
        local_statistic_tensor: Tensor | None = None,
    ) -> Tensor | None:
        """Take this rank's statistics, int32 `[num_experts]`; they travel with the dispatch that follows.

        Returns:
            None: what was gathered is there after dispatch, from `get_eplb_gathered_statistics`.
        """
        self._stats = local_statistic_tensor
        return None

    def dispatch(
        self,
        hidden_states: Tensor,
        hidden_states_sf: Tensor | None,
        token_selected_slots: Tensor,
        token_final_scales: Tensor | None,
        all_rank_num_tokens: Sequence[int],
        use_dp_padding: bool | None = None,
        *,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        **for_other_methods: Any,
    ) -> Received:
        """Send rows to the ranks of their slots.

        Args:
            hidden_states: `[n, W]` of any dtype, as it is to arrive.
            hidden_states_sf: its scales `[n, S]`, linear, or None.
            token_selected_slots: int32 or int64 `[n, k]`; arrives as int32, what that cannot hold as -1.
            token_final_scales: weights `[n, k]`, or None.
            all_rank_num_tokens: tokens of every rank; R is the largest.
            use_dp_padding: unused: R is the same on all ranks either way.
            eplb_local_stats: statistics, unless `prepare_dispatch` was given them.
            active_rank_mask: uint64 on the CPU, instead of what `ep_group_health` says.
            **for_other_methods: what layers pass to every method for the sake of some: whether to sanitise ids (which
                happens in any case), scales of W4A8 experts.

        Returns:
            The four of `[ep * R, ...]`, None where None was given; slots of no token hold -1. Valid until combine.

        Host synchronisation: none on GPUs.

        Raises:
            As `MoeAlltoAll.dispatch`.
        """
        slots = narrow_ids(token_selected_slots).contiguous()
        given = (hidden_states, hidden_states_sf, slots, token_final_scales)
        payloads = [each.contiguous() for each in given if each is not None]
        ids_payload = 1 if hidden_states_sf is None else 2
        payloads[ids_payload] = slots
        most = max(1, *all_rank_num_tokens)
        stats = self._stats if eplb_local_stats is None else eplb_local_stats
        moe = self.moe
        mask, active_ranks = self._mask(active_rank_mask)
        views = moe.dispatch(
            slots,
            payloads,
            most,
            INVALID_ID,
            ids_payload,
            eplb_local_stats=stats,
            active_rank_mask=mask,
        )
        self._exchange.active_ranks = active_ranks
        self._most, self._stats = most, None
        self._gathered = moe.eplb_gathered_stats
        received = iter(view.flatten(0, 1) for view in views)
        rows, scales, ids, weights = (None if each is None else next(received) for each in given)
        return rows, scales, ids, weights  # type: ignore[return-value]

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """The combine area `[ep, R, hidden_size]`, for experts that write their output in place; see `MoeAlltoAll`."""
        moe = self.moe
        return moe.get_combine_payload_tensor_in_workspace(runtime_max_tokens_per_rank, hidden_size, dtype)

    def combine(
        self,
        final_hidden_states: Tensor,
        *,
        output: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        **for_other_methods: Any,
    ) -> Tensor:
        """Sum every token's rows over the ranks of its slots.

        Args:
            final_hidden_states: `[ep, R, H]` or `[ep * R, H]`, weights applied and reduced over this rank's experts.
                The tensor of `get_combine_payload_tensor_in_workspace` is not copied.
            output: `[n, H]` to write into; None makes one.
            active_rank_mask: as that of dispatch.
            **for_other_methods: what layers pass to every method for the sake of some, such as
                `all_rank_max_num_tokens`: R is that of dispatch.

        Returns:
            `[n, H]`, reduced over all ranks.

        Host synchronisation: none on GPUs.

        Raises:
            As `MoeAlltoAll.combine`.
        """
        rows, moe = final_hidden_states.contiguous(), self.moe
        return moe.combine(
            rows,
            self._most,
            payload_in_workspace=self._is_area(moe, rows),
            output=output,
            use_low_precision=self.use_low_precision_combine,
            # What `ep_group_health` says by now is for the next round: this one ends with the ranks it began with.
            active_rank_mask=active_rank_mask,
        )

    def get_eplb_gathered_statistics(self) -> Tensor | None:
        """int32 `[ep, num_experts]`, what the last dispatch gathered; None if it carried no statistics.

        Raises:
            ConfigError: built without `num_experts`.
        """
        if not self.enable_eplb:
            raise ConfigError(what="num_experts", got=None, wanted="the length of the statistics, at construction")
        return self._gathered

    def reset_state(self) -> None:
        """Leave a round that dispatched and will not combine. Collective then; without such a round it does nothing."""
        self._stats = None
        if self._exchange.is_built and self.moe.state == "dispatched":
            self.moe.reset()
            self._exchange.active_ranks = None

    def destroy(self) -> None:
        """Let go of the exchange, which closes when the last layer that shares it has. Idempotent."""
        if self._is_held:
            self._is_held = False
            self._exchange.release()

    def _mask(self, given: Tensor | None) -> tuple[Tensor | None, int | None]:
        """What a dispatch is to set, and the ranks that are active then; None for what is or remains unknown."""
        if given is not None or self.ep_group_health is None:
            return given, None
        bits = int(self.ep_group_health.get_mask())
        if bits == self._exchange.active_ranks:
            # The device has it already, and no tensor of the host's may be given while a graph is captured.
            return None, bits
        words = [(bits >> (64 * word)) & (2**64 - 1) for word in range(-(-self.ep_size // 64))]
        return torch.tensor(words, dtype=torch.uint64, device="cpu"), bits

    def _is_area(self, moe: MoeAlltoAll, rows: Tensor) -> bool:
        width = rows.shape[-1]
        fits = rows.dtype.is_floating_point and width * rows.dtype.itemsize <= moe.config.combine_bytes_per_token
        if moe.state != "dispatched" or not fits:
            return False
        area = moe.get_combine_payload_tensor_in_workspace(self._most, width, rows.dtype)
        return area.data_ptr() == rows.data_ptr()


def communication_class(base: Any, find_comm: Callable[[Any], object], kind: type | None = None) -> type:
    """`Communication` as a class of the engine's own kind; its objects share one set of exchanges.

    Args:
        base: the engine's abstract class.
        find_comm: who the ranks of a mapping are; called once for each group.
        kind: the engine's own method, of which objects shall be instances too, since layers give the combine area and
            the load balancer's statistics to no other; of it only the kind. None: of the abstract class alone.
    """
    exchanges, comms = Exchanges(), _Once(find_comm)

    def __init__(self: Any, mapping: Any, *arguments: Any, **keywords: Any) -> None:
        base.__init__(self, mapping)
        Communication.__init__(self, mapping, *arguments, **keywords, comm=comms.of(mapping), exchanges=exchanges)

    return types.new_class(
        "A2ANVLinkOneSided",
        (Communication, base if kind is None else kind),
        {},
        lambda body: body.update(__init__=__init__, exchanges=exchanges),
    )


def register() -> None:
    """Put `Communication` in the place of TensorRT-LLM's one-sided method, once it is imported. May be called again."""
    after_import(FACTORY, _replace)


class _Once:
    """Who the ranks are, asked once for each place in the expert parallelism."""

    def __init__(self, find_comm: Callable[[Any], object]) -> None:
        self._find_comm = find_comm
        self._held: dict[tuple[int, int], object] = {}

    def of(self, mapping: Any) -> object:
        place = (mapping.moe_ep_rank, mapping.moe_ep_size)
        if place not in self._held:
            self._held[place] = self._find_comm(mapping)
        return self._held[place]


def _replace(module: ModuleType) -> None:
    theirs = getattr(module, _METHOD)
    if not issubclass(theirs, Communication):
        module.__dict__[_METHOD] = communication_class(module.__dict__["Communication"], _ranks_of, theirs)


def _ranks_of(mapping: Any) -> object:
    """The ranks of TensorRT-LLM's own MPI session, in the order of expert parallelism."""
    from tensorrt_llm._utils import mpi_comm

    return mpi_comm().Split(0, mapping.moe_ep_rank)
