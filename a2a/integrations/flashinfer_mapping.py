"""integrations/flashinfer_mapping: the layout of parallelism and the communicator that historical constructors take.

Owns stand-ins for `Mapping`, `MnnvlConfig` and `CommBackend`, and how any such objects become the group of an exchange.
Refuses to know what is exchanged. The libraries' own objects of these names serve as well: they are read by attribute.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from a2a.comm import Comm
from a2a.comm.protocol import CheckedComm
from a2a.comm.store import split
from a2a.errors import ConfigError


class CommBackend(abc.ABC):
    """Who the ranks are, as engines tell it: six verbs in mpi4py's spelling."""

    @abc.abstractmethod
    def Get_rank(self) -> int: ...

    @abc.abstractmethod
    def Get_size(self) -> int: ...

    @abc.abstractmethod
    def allgather(self, data: Any) -> list[Any]: ...

    @abc.abstractmethod
    def bcast(self, data: Any, root: int) -> Any: ...

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def Split(self, color: int, key: int) -> CommBackend: ...


@dataclasses.dataclass
class MnnvlConfig:
    """Where the historical constructor finds its communicator.

    Attributes:
        comm_backend: a `CommBackend`, or whatever `a2a.MoeAlltoAll` takes as `comm`; None for the launcher's ranks.
        allocation_granularity, fabric_page_size: accepted for their callers; the driver's granularity is taken.
    """

    comm_backend: Any = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


class Mapping:
    """Which part of a model's parallelism a process is: pipeline, context, tensor and, inside tensor, experts.

    Ranks count tensor fastest, then context, then pipeline; inside a tensor group experts fastest, then clusters, then
    the tensor split of experts. Sizes of -1 follow from the others.

    Args:
        world_size, rank: of the whole job; `tp_size * pp_size * cp_size` must be `world_size`.
        gpus_per_node: processes of a host.
        tp_size, pp_size, cp_size: tensor, pipeline and context parallelism.
        moe_tp_size, moe_ep_size, moe_cluster_size: their product is `tp_size`.
        attn_tp_size, attn_cp_size: their product is `tp_size * cp_size`.
        cp_config, auto_parallel, enable_attention_dp: kept as given.

    Raises:
        ConfigError: sizes that do not multiply up, or a rank outside the job.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        moe_cluster_size = 1 if moe_cluster_size == -1 else moe_cluster_size
        if moe_ep_size == -1:
            moe_ep_size = 1 if moe_tp_size == -1 else tp_size // (moe_tp_size * moe_cluster_size)
        if moe_tp_size == -1:
            moe_tp_size = tp_size // (moe_ep_size * moe_cluster_size)
        if attn_cp_size == -1:
            attn_cp_size = 1 if attn_tp_size == -1 else cp_size * tp_size // attn_tp_size
        if attn_tp_size == -1:
            attn_tp_size = cp_size * tp_size // attn_cp_size
        products = (
            ("tp_size * pp_size * cp_size", tp_size * pp_size * cp_size, "world_size", world_size),
            ("moe_tp_size * moe_ep_size * moe_cluster_size", moe_tp_size * moe_ep_size * moe_cluster_size, "tp_size",
             tp_size),
            ("attn_tp_size * attn_cp_size", attn_tp_size * attn_cp_size, "tp_size * cp_size", tp_size * cp_size),
        )  # fmt: skip
        for what, got, name, wanted in products:
            if got != wanted and not (auto_parallel and name == "world_size"):
                raise ConfigError(what=what, got=got, wanted=f"{name} = {wanted}")
        if not enable_attention_dp and not 0 <= rank < world_size:
            raise ConfigError(what="rank", got=rank, wanted=f"an integer in 0..{world_size - 1}")
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.tp_size, self.pp_size, self.cp_size = tp_size, pp_size, cp_size
        self.moe_tp_size, self.moe_ep_size, self.moe_cluster_size = moe_tp_size, moe_ep_size, moe_cluster_size
        self.attn_tp_size, self.attn_cp_size = attn_tp_size, attn_cp_size
        self.cp_config = cp_config or {}
        self.auto_parallel, self.enable_attention_dp = auto_parallel, enable_attention_dp

    @property
    def tp_rank(self) -> int:
        """Place in the tensor group."""
        return 0 if self.auto_parallel else self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """Place in the context group."""
        return 0 if self.auto_parallel else self.rank % (self.tp_size * self.cp_size) // self.tp_size

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return 0 if self.auto_parallel else self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_ep_rank(self) -> int:
        """Place among the ranks between which experts are spread."""
        return self.tp_rank % self.moe_ep_size

    @property
    def moe_cluster_rank(self) -> int:
        """Place among the clusters."""
        return self.tp_rank % self.moe_cluster_size

    @property
    def moe_tp_rank(self) -> int:
        """Place among the ranks between which one expert is split."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_ep_group(self) -> list[int]:
        """Ranks of the job that exchange tokens with this one, this one included."""
        first = self.rank - self.moe_ep_rank
        return list(range(first, first + self.moe_ep_size))

    @property
    def tp_group(self) -> list[int]:
        """Ranks of the job in this one's tensor group."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))

    @property
    def node_rank(self) -> int:
        """Which host this is, if all hold `gpus_per_node` ranks."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """Place on the host."""
        return self.rank % self.gpus_per_node

    def has_moe_ep(self) -> bool:
        """Whether experts are spread over ranks."""
        return self.moe_ep_size > 1


class EngineComm:
    """An engine's communicator as this package asks it.

    Engines' `bcast` counts its root in the whole job and their `Split` gives back the same object: only their
    `allgather` is relied on.
    """

    def __init__(self, backend: Any, *, timeout_s: float) -> None:
        self._comm = CheckedComm(backend)
        self._timeout_s = timeout_s

    def Get_rank(self) -> int:
        return self._comm.Get_rank()

    def Get_size(self) -> int:
        return self._comm.Get_size()

    def allgather(self, obj: Any) -> list[Any]:
        return self._comm.allgather(obj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self._comm.allgather(obj if root == self._comm.Get_rank() else None)[root]

    def barrier(self) -> None:
        self._comm.barrier()

    def Split(self, color: int, key: int = 0) -> Comm:
        return split(self, color, key, timeout_s=self._timeout_s)


def ep_group(comm: Comm, mapping: Any) -> Comm:
    """The ranks of `comm` that exchange tokens with this one. Collective if `comm` has more than those.

    Args:
        comm: the group itself, or ranks among which `mapping.moe_ep_group` says who belongs together.
        mapping: any object with `moe_ep_size` and `moe_ep_rank`.

    Raises:
        ConfigError: a group whose size or order is not the mapping's.
    """
    ep_size, ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
    if comm.Get_size() != ep_size:
        members = getattr(mapping, "moe_ep_group", None)
        if members is None or comm.Get_size() < ep_size:
            raise ConfigError(
                what="the communicator's size",
                got=comm.Get_size(),
                wanted=f"moe_ep_size = {ep_size}" + ("" if members else ", or a mapping with moe_ep_group"),
            )
        comm = comm.Split(min(members), ep_rank)
    if (comm.Get_size(), comm.Get_rank()) != (ep_size, ep_rank):
        raise ConfigError(
            what="rank and size of the communicator",
            got=(comm.Get_rank(), comm.Get_size()),
            wanted=f"moe_ep_rank, moe_ep_size = {ep_rank}, {ep_size}",
        )
    return comm
