"""integrations/flashinfer_moe_ep: the `moe_ep` interface: one communication object per expert-parallel group.

Owns the names, fields and defaults of FlashInfer's newer interface (releases 0.7.2 and 0.7.4, which spell one argument
of dispatch differently) and how its calls become rounds of `a2a.integrations.flashinfer_moe_alltoall`. Refuses to know
how rows move. Needs no FlashInfer, and takes FlashInfer's own parameter objects as well as the ones declared here.

Limits that the originals have and this has not: experts need not divide by the ranks, any `top_k` up to 64 will do,
ranks may be processes without GPUs, and two objects never share a workspace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from a2a.alltoall import narrow_ids
from a2a.comm import Comm
from a2a.comm.protocol import SingleComm
from a2a.env import Env
from a2a.errors import ConfigError, ShapeError, StateError
from a2a.integrations.flashinfer_functions import moe_a2a_get_workspace_size_per_rank, rank_mask
from a2a.integrations.flashinfer_moe_alltoall import MoeAlltoAll, Rounds, engine_comm

__all__ = [
    "BootstrapConfig",
    "MoEEpCommParams",
    "MoEEpDispatchResult",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "create_communication",
]

BACKEND_NAME: Final = "nvlink_one_sided"

_BYTES_OF_FORMAT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "BF16": lambda hidden: 2 * hidden,
        "FP16": lambda hidden: 2 * hidden,
        "FP8PerTensor": lambda hidden: hidden,
        "DeepSeekFp8": lambda hidden: hidden + 4 * math.ceil(hidden / 128),
        "MXFP8": lambda hidden: hidden + math.ceil(hidden / 32),
        "NVFP4": lambda hidden: math.ceil(hidden / 2) + math.ceil(hidden / 16),
        "MXFP4": lambda hidden: math.ceil(hidden / 2) + math.ceil(hidden / 32),
    }
)
"""Bytes of a token's values and scales by the name of the format; a scale of the whole tensor does not travel."""


_MAX_PADDING_SCALES: Final = 1024 // 32 - 1
"""Scales of a row's padding, at most: rows are padded to multiples of up to 1024 elements (vLLM: 256)."""


@dataclasses.dataclass(frozen=True)
class MoEEpCommParams:
    """What is exchanged, equal on all ranks.

    Attributes:
        num_experts: global experts.
        top_k: picks per token.
        max_tokens_per_rank: most tokens that a rank dispatches in one call.
        hidden_size: elements of an unquantised row, which is also what combine takes.
        dtype: of that row; None for bf16.
        dispatch_format: how rows are sent: None for `dtype`, else BF16, FP16, FP8PerTensor, DeepSeekFp8, MXFP8, NVFP4
            or MXFP4, by name or as an object with that `name`, such as FlashInfer's `QuantFormat`.
        invalid_expert_id: what ids of rows without a token become; no expert's.

    Raises:
        ConfigError (a ValueError): naming the value and the rule.
    """

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(what=f"MoEEpCommParams.{name}", got=value, wanted="an integer > 0")
        if self.top_k > self.num_experts:
            raise ConfigError(
                what="MoEEpCommParams.top_k", got=self.top_k, wanted=f"at most num_experts = {self.num_experts}"
            )
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise ConfigError(
                what="MoEEpCommParams.invalid_expert_id",
                got=self.invalid_expert_id,
                wanted=f"an id outside 0..{self.num_experts - 1}",
            )
        if self.dispatch_format is not None and _format_name(self.dispatch_format) not in _BYTES_OF_FORMAT:
            raise ConfigError(
                what="MoEEpCommParams.dispatch_format",
                got=self.dispatch_format,
                wanted="None or one of " + ", ".join(_BYTES_OF_FORMAT),
            )

    @property
    def token_dtype(self) -> torch.dtype:
        """`dtype`, bf16 by default."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes of a token's row as it is sent, scales included."""
        if self.dispatch_format is None:
            return self.hidden_size * self.token_dtype.itemsize
        return int(_BYTES_OF_FORMAT[_format_name(self.dispatch_format)](self.hidden_size))


def _format_name(dispatch_format: Any) -> str:
    return str(getattr(dispatch_format, "name", dispatch_format))


@dataclasses.dataclass(frozen=True)
class BootstrapConfig:
    """Who the ranks are.

    Attributes:
        world_size, rank: of the expert-parallel group.
        device: CUDA device of this rank; None for the current one.
        process_group: torch process group of those ranks; None for the default group if there is one, else the
            launcher's ranks.
        stream, auto_bootstrap, nccl_comm, tcp_store: taken for their callers; nothing here needs them.
    """

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: int | None = dataclasses.field(default=None, kw_only=True)
    nccl_comm: int | None = None
    process_group: Any = dataclasses.field(default=None, compare=False, hash=False)
    tcp_store: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ConfigError(what="BootstrapConfig.world_size", got=self.world_size, wanted="an integer > 0")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                what="BootstrapConfig.rank", got=self.rank, wanted=f"an integer in 0..{self.world_size - 1}"
            )


@dataclasses.dataclass
class NVLinkOneSidedConfig:
    """How the communication is built, equal on all ranks but for `comm_backend`.

    Attributes:
        extra_payload_bytes_per_token: room for what is sent beside rows, scales, int32 ids and fp32 weights.
        eplb_stats_num_experts: length of the statistics gathered with a dispatch; 0 for none.
        enable_rank_mask: whether dispatch and combine take an `active_rank_mask`.
        use_low_precision_combine: combine rows travel as e4m3.
        comm_backend: the engine's communicator; None for the bootstrap's process group.
        timeout_sec: seconds for each wait for a peer; None for A2A_TIMEOUT_S and A2A_STARTUP_TIMEOUT_S.
        enable_pdl: programmatic dependent launch; None where it pays.
        cft, cft_max_tokens_for_dispatch, cft_max_tokens_for_combine, lamport, lamport_max_tokens: choose between
            transports of FlashInfer 0.7.4. Accepted and without effect: the exchange takes its own way for every size.
    """

    backend_name: str = BACKEND_NAME
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None
    cft: bool | None = None
    cft_max_tokens_for_dispatch: int = 128
    cft_max_tokens_for_combine: int = 128
    lamport: bool | None = None
    lamport_max_tokens: int | None = None
    timeout_sec: int | None = None
    enable_pdl: bool | None = None


@dataclasses.dataclass(frozen=True)
class MoEEpDispatchResult:
    """What dispatch has received: tensors of `ep_size * tokens_per_rank` rows, valid until combine.

    Row `s * tokens_per_rank + j` is the j-th token of source rank `s` that has a pick here, in token order; rows behind
    the last one have the invalid id in every column of `topk_ids`.

    Attributes:
        hidden_states: `[ep * T, *]` as it was sent.
        topk_ids: int32 `[ep * T, k]`, global ids, those of other ranks too.
        topk_weights: `[ep * T, k]`, or None if none were sent.
        tokens_per_rank: T of this call.
        hidden_states_scale: `[ep * T, *]`, or None if none were sent.
        eplb_gathered_stats: int32 `[ep, Es]`, or None if none were sent.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int
    hidden_states_scale: Tensor | None = None
    eplb_gathered_stats: Tensor | None = None


class NVLinkOneSidedAlltoAll:
    """Dispatch and combine for one expert-parallel group, over the first transport that can (or A2A_TRANSPORT's).

    Building and destroying are collective. Every dispatch is followed by one combine.

    Args:
        bootstrap: `BootstrapConfig`, this package's or FlashInfer's.
        params: `MoEEpCommParams`, likewise.
        config: `NVLinkOneSidedConfig`, likewise; None for its defaults.

    Raises:
        ConfigError: a value that is not allowed, or a communicator that is not the bootstrap's group.
        Unsupported, MismatchError, PeerTimeout, PeerLost: as `a2a.MoeAlltoAll`.
    """

    backend_name: ClassVar[str] = BACKEND_NAME
    supports_cuda_graph: ClassVar[bool] = True

    def __init__(self, bootstrap: Any, params: Any, config: Any = None) -> None:
        self.config = NVLinkOneSidedConfig() if config is None else config
        self.bootstrap = bootstrap
        self.params = params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        self._alltoall: MoeAlltoAll | None = None
        self._tokens_per_rank: int | None = None
        self._buffer: Tensor | None = None
        self._enable_pdl: bool | None = getattr(self.config, "enable_pdl", None)
        with _device_of(bootstrap):
            self._alltoall = self._build()
        self.num_local_experts = self._alltoall.rounds.placement.experts_of(self.ep_rank).numel()

    def _build(self) -> MoeAlltoAll:
        params, config = self.params, self.config
        env = Env.read()
        timeout_s = getattr(config, "timeout_sec", None)
        startup_timeout_s = max(env.startup_timeout_s, timeout_s or 0.0)
        hidden, item = params.hidden_size, max(params.token_dtype.itemsize, 2)
        row_bytes, extra = params.dispatch_bytes_per_token, config.extra_payload_bytes_per_token
        is_padded = isinstance(extra, int) and extra > 0 and params.dispatch_format is not None
        if is_padded and _format_name(params.dispatch_format) == "MXFP8":
            # What vLLM adds for padded rows is the padding's scales alone: each stands for 32 bytes of the row itself.
            # More than that is room for wider rows of other layers.
            row_bytes += 32 * min(extra, _MAX_PADDING_SCALES)
        dispatch_bytes = _dispatch_bytes(hidden, row_bytes, extra)
        size = moe_a2a_get_workspace_size_per_rank(
            self.ep_size,
            params.max_tokens_per_rank,
            row_bytes + 8 * params.top_k + extra,
            hidden * item,
            config.eplb_stats_num_experts,
        )
        rounds = Rounds(
            None,
            size,
            comm=_group(self.bootstrap, config, startup_timeout_s),
            max_num_tokens=params.max_tokens_per_rank,
            top_k=params.top_k,
            num_experts=params.num_experts,
            hidden_size=hidden,
            combine_dtype_bytes_per_elem=item,
            eplb_stats_num_experts=config.eplb_stats_num_experts,
            enable_rank_mask=config.enable_rank_mask,
            name=f"moe_ep, {row_bytes} bytes a row",
            startup_timeout_s=startup_timeout_s,
            timeout_s=env.timeout_s if timeout_s is None else float(timeout_s),
            **dispatch_bytes,
        )
        return MoeAlltoAll.of(rounds, size)

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether some transport may run on this machine; what it takes in full is found out when building."""
        return sys.platform.startswith("linux")

    @property
    def alltoall(self) -> MoeAlltoAll:
        """The exchange in its historical form. StateError (a RuntimeError) after `destroy`."""
        if self._alltoall is None:
            raise StateError(rank=self.ep_rank, call="alltoall", state="destroyed", change="build a new object")
        return self._alltoall

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Whether a call whose busiest rank dispatches so many tokens fits."""
        return max_tokens_per_rank <= int(self.params.max_tokens_per_rank)

    def active_rank_mask(self, active_ranks: Sequence[int] | Tensor) -> Tensor:
        """uint64 `[ceil(ep/64)]` on the CPU with the bit of each active rank set."""
        return rank_mask(active_ranks, self.ep_size)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send every token to the ranks that hold its experts, once per rank.

        Args:
            hidden_states: `[n, *]`, in any format.
            topk_ids: `[n, k]`, global ids; received as int32, ids that int32 cannot hold as -1.
            topk_weights: `[n, k]`; on all ranks or on none, as are the scales and the statistics.
            hidden_states_scale: `[n, *]`.
            max_tokens_per_rank, runtime_max_tokens_per_rank: two names of one value, equal on all ranks and at least
                the busiest rank's tokens; None for the capacity.
            eplb_local_stats: int32 `[Es]`, gathered from all ranks.
            active_rank_mask: of `active_rank_mask()`; equal on all active ranks.

        Raises:
            As `a2a.MoeAlltoAll.dispatch`.
        """
        tokens = self._rows_of_a_block(max_tokens_per_rank, runtime_max_tokens_per_rank)
        alltoall = self.alltoall
        ids = narrow_ids(topk_ids)
        payloads = [hidden_states.contiguous()]
        if hidden_states_scale is not None:
            payloads.append(hidden_states_scale.contiguous())
        ids_payload = len(payloads)
        payloads.append(ids.contiguous())
        if topk_weights is not None:
            payloads.append(topk_weights.contiguous())
        views = alltoall.rounds.dispatch(
            payloads[ids_payload],
            payloads,
            tokens,
            self.params.invalid_expert_id,
            ids_payload,
            eplb_local_stats,
            active_rank_mask,
            enable_pdl=self._enable_pdl,
        )
        self._tokens_per_rank = tokens
        self._buffer = None
        rows = [view.flatten(0, 1) for view in views]
        return MoEEpDispatchResult(
            hidden_states=rows[0],
            topk_ids=rows[ids_payload],
            topk_weights=None if topk_weights is None else rows[ids_payload + 1],
            tokens_per_rank=tokens,
            hidden_states_scale=None if hidden_states_scale is None else rows[1],
            eplb_gathered_stats=None if eplb_local_stats is None else alltoall.eplb_gathered_stats,
        )

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        """`[ep * T, hidden_size]` of this rank's combine area, for experts that write their output in place.

        Passing it to combine saves a copy. Valid between dispatch and combine.
        """
        alltoall = self.alltoall
        view = alltoall.rounds.get_combine_payload_tensor_in_workspace(
            self._tokens_per_rank or 1, self.params.hidden_size, dtype
        )
        self._buffer = view.flatten(0, 1)
        return self._buffer

    def combine(
        self, expert_output: Tensor, *, output: Tensor | None = None, active_rank_mask: Tensor | None = None
    ) -> Tensor:
        """Sum every token's rows over the ranks it was sent to.

        Args:
            expert_output: `[ep * T, H']` or `[ep, T, H']`, weights applied and reduced over this rank's experts.
            output: `[n, H']` to write into; None makes one.
            active_rank_mask: as in dispatch.

        Returns:
            `[n, H']`, `output` itself if given.

        Raises:
            As `a2a.MoeAlltoAll.combine`.
        """
        rounds, buffer = self.alltoall.rounds, self._buffer
        in_workspace = buffer is not None and expert_output.data_ptr() == buffer.data_ptr()
        combined = rounds.combine(
            expert_output,
            self._tokens_per_rank or 1,
            payload_in_workspace=in_workspace,
            output=output,
            use_low_precision=self.config.use_low_precision_combine,
            active_rank_mask=active_rank_mask,
            enable_pdl=self._enable_pdl,
        )
        self._buffer = None
        return combined

    def checkpoint_prepare(self) -> None:
        """As `MoeAlltoAll.checkpoint_prepare`."""
        self.alltoall.checkpoint_prepare()
        self._buffer = None

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """As `MoeAlltoAll.checkpoint_restore`."""
        self.alltoall.checkpoint_restore(comm_backend)

    def destroy(self) -> None:
        """Let go of the workspace. Every rank should call it; idempotent."""
        if self._alltoall is not None:
            self._alltoall.close()
        self._alltoall = self._buffer = None

    def _rows_of_a_block(self, first: int | None, second: int | None) -> int:
        if first is not None and second is not None and first != second:
            raise ConfigError(
                what="max_tokens_per_rank, runtime_max_tokens_per_rank",
                got=(first, second),
                wanted="one of them, or equal values",
                rank=self.ep_rank,
            )
        tokens = first if first is not None else second
        most = int(self.params.max_tokens_per_rank)
        if tokens is None:
            return most
        if not 0 < tokens <= most:
            raise ShapeError(
                what="max_tokens_per_rank", got=tokens, wanted=f"an integer in 1..{most}", rank=self.ep_rank
            )
        return tokens


def create_communication(bootstrap: Any, params: Any, backend: Any, **options: Any) -> NVLinkOneSidedAlltoAll:
    """Build the communication that `backend` names. Collective.

    Args:
        bootstrap, params: as `NVLinkOneSidedAlltoAll`.
        backend: "nvlink_one_sided", or a configuration object whose `backend_name` that is.
        **options: further arguments of the communication, such as `config` where `backend` is a name.

    Raises:
        ConfigError: another name. Others as `NVLinkOneSidedAlltoAll`.
    """
    name = getattr(backend, "backend_name", backend)
    if name != BACKEND_NAME:
        raise ConfigError(
            what="backend", got=name, wanted=repr(BACKEND_NAME), change="the other communications are FlashInfer's own"
        )
    if not isinstance(backend, str):
        options["config"] = backend
    return NVLinkOneSidedAlltoAll(bootstrap, params, **options)


def _dispatch_bytes(hidden: int, row_bytes: int, extra: int) -> dict[str, int]:
    """Fields of the native configuration for rows of `row_bytes` and as much more as is said."""
    if not isinstance(extra, int) or extra < 0:
        raise ConfigError(what="extra_payload_bytes_per_token", got=extra, wanted="an integer >= 0")
    sizes = [size for size in (4, 2, 1) if hidden * size <= row_bytes] + ([0] if hidden % 2 == 0 else [])
    # A packed row of odd width has half a byte more than its elements: all of it counts as extra then.
    row = (hidden * sizes[0] if sizes[0] else hidden // 2) if sizes else hidden
    return {
        "dispatch_dtype_bytes_per_elem": sizes[0] if sizes else 1,
        "dispatch_scale_bytes_per_token": max(0, row_bytes - row),
        "extra_payload_bytes_per_token": extra,
    }


def _group(bootstrap: Any, config: Any, timeout_s: float) -> Comm:
    """The ranks of the bootstrap, from the first of what was given that says who they are."""
    backend = config.comm_backend
    if backend is None:
        backend = bootstrap.process_group
    if backend is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        backend = torch.distributed.group.WORLD
    alone = backend is None and bootstrap.world_size == 1
    comm = SingleComm() if alone else engine_comm(backend, timeout_s=timeout_s)
    if (comm.Get_rank(), comm.Get_size()) != (bootstrap.rank, bootstrap.world_size):
        raise ConfigError(
            what="rank and size of the communicator",
            got=(comm.Get_rank(), comm.Get_size()),
            wanted=f"the bootstrap's, {bootstrap.rank} and {bootstrap.world_size}",
        )
    return comm


@contextlib.contextmanager
def _device_of(bootstrap: Any) -> Iterator[None]:
    device = getattr(bootstrap, "device", None)
    if device is None or not torch.cuda.is_available():
        yield
    else:
        with torch.cuda.device(device):
            yield
