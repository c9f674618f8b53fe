"""integrations/shared_exchange: one exchange for all MoE layers of a group, grown as layers ask for more.

Owns when the exchange is built, by how many bytes it grows and which memory it must lie in. Refuses to know the engine
whose layers share it.
"""

from __future__ import annotations

from typing import Any

import torch

from a2a.alltoall import MoeAlltoAll
from a2a.env import Env
from a2a.errors import StateError, Unsupported


class SharedExchange:
    """A `MoeAlltoAll` that many layers use one after the other.

    Layers differ in width, format, picks and capacity: the exchange holds the union and never shrinks. All ranks of the
    group call `grow` in the same order, once per layer, while the model is built; the waits are of this group alone.

    Args:
        group: what `MoeAlltoAll` takes as `comm`.
        name: tells exchanges of one program apart.
        **options: further arguments of `MoeAlltoAll` that layers do not ask for.

    Attributes:
        active_ranks: bits of the rank mask as it is for all that its layers know, since the mask is of the exchange and
            not of a layer; None where it may be another. For layers that set masks.
    """

    def __init__(self, group: object, *, name: str, **options: Any) -> None:
        self.active_ranks: int | None = None
        self._group = group
        self._name = name
        self._options = options
        self._moe: MoeAlltoAll | None = None
        self._num_holders = 0

    @property
    def is_built(self) -> bool:
        """Whether a layer has asked already."""
        return self._moe is not None

    @property
    def moe(self) -> MoeAlltoAll:
        """The exchange. Ask anew for each round: the views of an earlier workspace are dead once it grows.

        Raises:
            StateError: no layer has called `grow`, or the exchange was closed.
        """
        if self._moe is None:
            raise StateError(
                rank=_rank(self._group), call=self._name, state="not built", change="initialise it on every rank first"
            )
        return self._moe

    def grow(
        self,
        *,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        row_bytes_per_token: int,
        **capacities: int,
    ) -> MoeAlltoAll:
        """Make room for one more layer. Collective.

        Args:
            max_num_tokens, top_k, num_experts: of the layer; all layers must have the same `num_experts`.
            hidden_size: elements of a row that comes back, without padding.
            row_bytes_per_token: bytes of a row that is sent, with its scales and padding.
            **capacities: further sizes of `MoeAlltoAll.ensure` that grow.

        Raises:
            ConfigError, MismatchError: as `MoeAlltoAll` and its `ensure`; on every rank.
            Unsupported: on every rank; no transport can, or only one over host memory can where this process has GPUs.
        """
        sizes: dict[str, Any] = {
            "max_num_tokens": max_num_tokens,
            "top_k": top_k,
            "num_experts": num_experts,
            "hidden_size": hidden_size,
            **capacities,
        }
        if torch.cuda.is_available():
            # The workspace is no memory of the caching allocator: what that holds idle may be what is missing.
            torch.cuda.empty_cache()
        return self._grow(sizes, hidden_size, row_bytes_per_token)

    def _grow(self, sizes: dict[str, Any], hidden_size: int, row_bytes_per_token: int) -> MoeAlltoAll:
        if self._moe is None:
            row = _row(hidden_size, row_bytes_per_token)
            self._moe = MoeAlltoAll(comm=self._group, name=self._name, **sizes, **row, **self._options)
            self._check_memory(self._moe)
            self.active_ranks = 2**self._moe.ep_size - 1
        else:
            config = self._moe.config
            held = config.data_bytes_per_token + config.scale_bytes_per_token
            row = _row(max(hidden_size, config.hidden_size), max(row_bytes_per_token, held))
            if self._moe.ensure(**sizes, **row):
                self.active_ranks = 2**self._moe.ep_size - 1
        return self._moe

    def close(self) -> None:
        """Let go of the exchange; idempotent, nobody is awaited. A later `grow` builds a new one."""
        if self._moe is not None:
            moe, self._moe = self._moe, None
            moe.close()

    def hold(self) -> None:
        """Count one more holder, who will call `release`."""
        self._num_holders += 1

    def release(self) -> None:
        """Count one holder less; the last one closes the exchange."""
        self._num_holders -= 1
        if self._num_holders <= 0:
            self.close()

    def _check_memory(self, moe: MoeAlltoAll) -> None:
        # Asked for by name, host memory is no surprise.
        asked_for = "transport" in self._options or Env.read().transport is not None
        if not torch.cuda.is_available() or moe.workspace.is_cuda or asked_for:
            return
        choice = moe.transport_choice
        self.close()
        raise Unsupported(transport=choice.name, reasons=("it carries no CUDA tensors", *choice.why))


class Exchanges:
    """The exchanges that the layers of one process share: one for each group and purpose.

    Layers whose rounds may be in flight side by side must not share one.

    Args:
        **options: arguments of `MoeAlltoAll` that all exchanges have.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._held: list[tuple[object, str, SharedExchange]] = []

    def of(self, group: object, purpose: str, **options: Any) -> SharedExchange:
        """The exchange of a group and purpose, by the identity of the group; `options` build it if it is new."""
        for each, known, exchange in self._held:
            if each is group and known == purpose:
                return exchange
        made = SharedExchange(group, name=purpose, **{**self._options, **options})
        self._held.append((group, purpose, made))
        return made

    def close(self) -> None:
        """Let go of all; idempotent."""
        for _, _, exchange in self._held:
            exchange.close()


def _row(hidden_size: int, row_bytes_per_token: int) -> dict[str, Any]:
    """A row of so many bytes in the terms of `MoeAlltoAll`: elements, and what is beside them."""
    size = 1 if row_bytes_per_token >= hidden_size else 0
    elements = hidden_size if size else hidden_size // 2
    return {
        "dispatch_dtype_bytes_per_elem": size,
        "dispatch_scale_bytes_per_token": max(0, row_bytes_per_token - elements),
    }


def _rank(group: object) -> int:
    for name in ("rank", "Get_rank"):
        verb = getattr(group, name, None)
        if callable(verb):
            return int(verb())
    return -1
