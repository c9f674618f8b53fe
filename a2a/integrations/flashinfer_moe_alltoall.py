"""integrations/flashinfer_moe_alltoall: the historical class that engines call.

Owns the argument order, defaults and return types of FlashInfer 0.7.2.post1's MoeAlltoAll and how its calls become
rounds of `a2a.MoeAlltoAll`, on every transport. Refuses to know how rows move.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from a2a.alltoall import MoeAlltoAll as NativeMoeAlltoAll
from a2a.comm import Comm, resolve
from a2a.comm.protocol import SingleComm
from a2a.config import ExchangeConfig
from a2a.env import Env
from a2a.errors import ConfigError
from a2a.integrations.flashinfer_functions import (
    SfLayout,
    check_backend,
    moe_a2a_get_workspace_size_per_rank,
    output_format,
)
from a2a.integrations.flashinfer_mapping import EngineComm, ep_group
from a2a.layout import SharedAreaLayout, WorkspaceLayout, align
from a2a.nvlink.caller_workspace import METAINFO_INDEX, NO_FLAGS, metainfo_of, payload_bytes_of
from a2a.transport import Transport


class Rounds(NativeMoeAlltoAll):
    """The exchange behind the historical class: its workspace may be one area that dispatch and combine share.

    Args:
        payload_bytes: bytes of that area, if its owner has not said how much of it is for dispatch; else None.
        least_bytes: bytes of a rank's workspace, at least.
        **arguments: of `a2a.MoeAlltoAll`.

    Attributes:
        num_users: objects of the historical class that play their rounds here.
    """

    def __init__(self, payload_bytes: int | None, least_bytes: int, **arguments: Any) -> None:
        self.num_users = 0
        self._payload_bytes = payload_bytes
        self._least_bytes = least_bytes
        super().__init__(**arguments)
        if self.workspace.is_cuda:
            # For callers of moe_a2a_sanitize_expert_ids: loading is no part of rounds or captures.
            from a2a.nvlink.scrub_ids import id_scrubber

            id_scrubber(self.workspace.device.index)

    def _lay_out(self, config: ExchangeConfig, chosen: type[Transport]) -> WorkspaceLayout:
        regions = [*chosen.control_regions(config)]
        if not any(name == "round_state" for name, _ in regions):
            regions.append((NO_FLAGS, 4 * config.ep_size))
        layout = self._layout_with(config, regions)
        missing = self._least_bytes - layout.num_bytes
        return layout if missing <= 0 else self._layout_with(config, [*regions, ("spare", align(missing))])

    def _layout_with(self, config: ExchangeConfig, regions: Sequence[tuple[str, int]]) -> WorkspaceLayout:
        if self._payload_bytes is None:
            return WorkspaceLayout(config, regions)
        return SharedAreaLayout(config, regions, payload_bytes=self._payload_bytes)


class SharedRounds:
    """Exchanges by what they are for, so that objects with equal arguments play their rounds in one, each at a time.

    As FlashInfer does it, for engines that build an object per layer: `install(share_workspaces=True)`. Every rank
    builds the same objects in the same order. A dispatch while another object is in its round is a StateError.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[tuple[Any, ...], Rounds] = weakref.WeakValueDictionary()

    def find(self, key: tuple[Any, ...], build: Callable[[], Rounds]) -> Rounds:
        """The exchange for `key`, built if there is none that is open."""
        found = self._held.get(key)
        if found is None or found.state == "closed":
            found = self._held[key] = build()
        return found


class MoeAlltoAll:
    """The historical class on this package's transports: same calls, `a2a.MoeAlltoAll` behind them.

    Building is collective over the EP group. Two objects never share memory or flags, however equal their arguments,
    unless the program has asked for it (see `SharedRounds`). Which transport: `A2A_TRANSPORT`, else the first that can.

    Args:
        mapping: this package's `Mapping`, FlashInfer's, or any object with `moe_ep_rank` and `moe_ep_size`.
        max_num_tokens: local tokens that a rank may dispatch in one round.
        top_k, num_experts: picks per token; global experts, which need not divide by the group's size.
        workspace_size_per_rank: bytes for one rank, as `moe_a2a_get_workspace_size_per_rank` computes them; rounds may
            then share them between dispatch and combine as they like. None: from `hidden_size`.
        hidden_size: elements of a 16-bit row, used where `workspace_size_per_rank` is None.
        mnnvl_config: whose `comm_backend` says who the ranks are; None, or one without: the launcher's ranks.
        eplb_stats_num_experts: length of the statistics gathered with a dispatch; 0 for none.
        enable_rank_mask: whether dispatch and combine take an `active_rank_mask`.
        backend: "trtllm", the only one there is here.

    Raises:
        ConfigError (a ValueError): an argument that is not allowed, on every rank.
        Unsupported, MismatchError, PeerTimeout, PeerLost: as `a2a.MoeAlltoAll`.
    """

    _METAINFO_INDEX: ClassVar[Mapping[str, int]] = METAINFO_INDEX
    shared: ClassVar[SharedRounds | None] = None

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        check_backend(backend)
        timeout_s = Env.read().startup_timeout_s
        told = getattr(mnnvl_config, "comm_backend", None)
        alone = told is None and mapping.moe_ep_size == 1
        comm = ep_group(SingleComm() if alone else engine_comm(told, timeout_s=timeout_s), mapping)
        ep_size = comm.Get_size()
        if workspace_size_per_rank is None:
            if hidden_size is None:
                raise ConfigError(
                    what="workspace_size_per_rank, hidden_size", got=(None, None), wanted="at least one of them"
                )
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                ep_size, top_k, max_num_tokens, hidden_size, eplb_stats_num_experts=eplb_stats_num_experts
            )
        payload_bytes = payload_bytes_of(workspace_size_per_rank, ep_size, max_num_tokens, eplb_stats_num_experts)
        # The most that a token may take in either direction; what both take together is the layout's to watch. It
        # has no area for dispatch alone into which combine could push rows: padded slots that nobody scrubs stay zero.
        most_elements = max(1, payload_bytes // (ep_size * max_num_tokens) // 2)
        build = functools.partial(
            Rounds,
            payload_bytes,
            workspace_size_per_rank,
            comm=comm,
            max_num_tokens=max_num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            eplb_stats_num_experts=eplb_stats_num_experts,
            enable_rank_mask=enable_rank_mask,
            hidden_size=most_elements,
            name=f"flashinfer, {payload_bytes} bytes for rows",
        )
        key = (
            (comm.Get_rank(), ep_size, max_num_tokens, top_k, num_experts, eplb_stats_num_experts, enable_rank_mask),
            workspace_size_per_rank,
        )
        self._adopt(build() if self.shared is None else self.shared.find(key, build), workspace_size_per_rank)

    @classmethod
    def of(cls, rounds: Rounds, workspace_size_per_rank: int) -> MoeAlltoAll:
        """The historical view of an exchange that somebody else has built and closes."""
        view = cls.__new__(cls)
        view._adopt(rounds, workspace_size_per_rank)
        return view

    def _adopt(self, rounds: Rounds, workspace_size_per_rank: int) -> None:
        self.rounds = rounds
        self._closed = False
        rounds.num_users += 1
        self._workspace_size_per_rank = workspace_size_per_rank
        self._metainfo = metainfo_of(rounds.layout)

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes of one rank's workspace for 16-bit rows, their int32 ids, fp32 weights and further payload bytes."""
        dispatch_bytes = 2 * hidden_size + 8 * top_k + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, dispatch_bytes, 2 * hidden_size, eplb_stats_num_experts, backend=backend
        )

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """As `a2a.MoeAlltoAll.dispatch`, but that no invalid id leaves the ids of padded slots alone.

        Raises:
            ConfigError: an invalid id without `expert_id_payload_index`. Others as there.
        """
        payloads: Sequence[Tensor] = input_payloads
        if invalid_token_expert_id is None:
            # A payload that is the ids themselves would be taken for the one to be given the invalid id.
            expert_id_payload_index = None
            payloads = [rows.detach() if rows is token_selected_experts else rows for rows in input_payloads]
        elif expert_id_payload_index is None:
            raise ConfigError(
                what="expert_id_payload_index",
                got=None,
                wanted="the index of the ids' payload, since invalid_token_expert_id is given",
                rank=self.ep_rank,
            )
        return self.rounds.dispatch(
            token_selected_experts,
            payloads,
            runtime_max_tokens_per_rank,
            invalid_token_expert_id,
            expert_id_payload_index,
            eplb_local_stats,
            active_rank_mask,
        )

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: Any = SfLayout.layout_linear,
        output: Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        """As `a2a.MoeAlltoAll.combine`; `sf_layout` by its historical number or as a `ScaleLayout`."""
        scale, layout = output_format(output_scales, output_scalar_scale, sf_layout)
        return self.rounds.combine(
            payload,
            runtime_max_tokens_per_rank,
            payload_in_workspace,
            output_dtype,
            output_scales,
            scale,
            layout,
            output,
            use_low_precision=use_low_precision,
            active_rank_mask=active_rank_mask,
        )

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """The combine area as `[ep, R, hidden_size]`; StateError (a RuntimeError) unless dispatched."""
        return self.rounds.get_combine_payload_tensor_in_workspace(runtime_max_tokens_per_rank, hidden_size, dtype)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def checkpoint_prepare(self) -> None:
        """Give the workspace's physical memory back and keep its addresses; collective, between rounds, idempotent.

        Every call in between raises a StateError (a RuntimeError).
        """
        self.rounds.release()

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Memory at the same addresses again, zeroed; collective, idempotent. Captured graphs replay.

        Args:
            comm_backend: who the ranks are, of the same rank and size as at construction; None for that one.

        Raises:
            ConfigError (a ValueError), Unsupported: as `a2a.MoeAlltoAll.restore`.
        """
        comm = None if comm_backend is None else engine_comm(comm_backend, timeout_s=self.rounds.startup_timeout_s)
        self.rounds.restore(comm)

    def close(self) -> None:
        """Let go of the workspace; idempotent. The historical class had no such verb: memory went with the object."""
        if not self._closed:
            self._closed = True
            self.rounds.num_users -= 1
            if not self.rounds.num_users:
                self.rounds.close()

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def workspace(self) -> Tensor:
        """uint8 `[ep, bytes]`: the workspaces of all ranks, of at least the size asked for."""
        return self.rounds.workspace

    @property
    def metainfo(self) -> Tensor:
        """int64 `[10]` on the CPU: offsets by `_METAINFO_INDEX` in a rank's row of the workspace."""
        return self._metainfo

    @property
    def ep_rank(self) -> int:
        """This rank in the group."""
        return self.rounds.ep_rank

    @property
    def ep_size(self) -> int:
        """Ranks in the group."""
        return self.rounds.ep_size

    @property
    def max_num_tokens(self) -> int:
        """Local tokens that a rank may dispatch in one round."""
        return self.rounds.max_num_tokens

    @property
    def top_k(self) -> int:
        """Most picks per token."""
        return self.rounds.top_k

    @property
    def num_experts(self) -> int:
        """Global experts."""
        return self.rounds.num_experts

    @property
    def workspace_size_per_rank(self) -> int:
        """Bytes of one rank's workspace as asked for, or as `get_moe_workspace_size_per_rank` computed them."""
        return self._workspace_size_per_rank

    @property
    def eplb_stats_num_experts(self) -> int:
        """Length of the statistics gathered with a dispatch; 0 for none."""
        return self.rounds.config.eplb_stats_num_experts

    @property
    def eplb_gathered_stats(self) -> Tensor | None:
        """int32 `[ep, Es]` between a dispatch that carried statistics and its combine; else None."""
        return self.rounds.eplb_gathered_stats if self.rounds.state == "dispatched" else None


def engine_comm(backend: Any, *, timeout_s: float) -> Comm:
    """The ranks that an engine's communicator, a process group, or None (the launcher's environment) stands for."""
    if backend is None or not callable(getattr(backend, "Get_rank", None)) or hasattr(backend, "Iallgather"):
        return resolve(backend, timeout_s=timeout_s)
    return EngineComm(backend, timeout_s=timeout_s)
