"""integrations/vllm/manager: the all2all manager of an expert-parallel group of vLLM, with an exchange of this package.

Owns the exchange that all MoE layers of the group share and how it grows. Refuses to know what a layer sends.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from a2a.alltoall import MoeAlltoAll, RoundContext
from a2a.integrations.shared_exchange import SharedExchange
from a2a.integrations.vllm.engine import Engine
from a2a.integrations.vllm.payload import row_bytes_per_token


class Manager:
    """What vLLM calls the all2all manager. Layers initialise it in the same order on all ranks of the group.

    Args:
        cpu_group: the expert-parallel group; all waits are of this group alone, since other groups of the same job may
            grow their exchanges another number of times.
        find_engine: gives the engine when it is first needed.
        **options: further arguments of `MoeAlltoAll`.
    """

    def __init__(self, cpu_group: Any, find_engine: Callable[[], Engine], **options: Any) -> None:
        self._find_engine = find_engine
        self._engine: Engine | None = None
        self._group = cpu_group
        self._options = options
        self._exchange: SharedExchange | None = None

    @property
    def engine(self) -> Engine:
        """What is asked of vLLM."""
        if self._engine is None:
            self._engine = self._find_engine()
        return self._engine

    def initialize(self, max_num_tokens: int, top_k: int, num_experts: int, hidden_size: int, **sizes: Any) -> None:
        """Make room for one more layer: build the exchange, or grow it to the union. Collective; never shrinks.

        Args:
            max_num_tokens, top_k, num_experts: of the layer. The number of experts must be the same for all layers.
            hidden_size: elements of a row that the experts give back.
            **sizes: what a row takes, in any release's words: see `payload.row_bytes_per_token`.

        Raises:
            ConfigError, MismatchError, Unsupported: on every rank.
        """
        row = row_bytes_per_token(hidden_size, **sizes)
        self._shared().grow(
            max_num_tokens=max_num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            hidden_size=hidden_size,
            row_bytes_per_token=row,
        )

    @property
    def initialized(self) -> bool:
        """Whether a layer has been here."""
        return self._exchange is not None and self._exchange.is_built

    @property
    def moe_alltoall(self) -> MoeAlltoAll:
        """The exchange as it is now; the name is that of releases up to 0.32."""
        return self._shared().moe

    def round_context(self) -> RoundContext:
        """The sequence of rounds of the micro-batch that this thread runs."""
        return self.moe_alltoall.contexts[self.engine.micro_batch()]

    def combine_into(self, payload: Tensor, runtime_max_tokens_per_rank: int, output: Tensor) -> None:
        """What the prepare/finalize class of releases up to 0.32 calls to combine."""
        self.round_context().combine(
            payload,
            runtime_max_tokens_per_rank,
            output=output,
            use_low_precision=self.engine.low_precision_combine,
        )

    def _shared(self) -> SharedExchange:
        if self._exchange is None:
            self._exchange = SharedExchange(
                self._group, name="vllm", num_contexts=self.engine.num_micro_batches(), **self._options
            )
        return self._exchange

    def get_handle(self, kwargs: Any) -> Manager:
        """What layers hold; all hold the manager."""
        return self

    def checkpoint_prepare(self) -> None:
        """Give the workspace's memory back while the engine sleeps, between rounds. Collective; nothing if not built.

        Its addresses stay: a graph that was captured before replays after `checkpoint_restore`.
        """
        if self.initialized:
            self.moe_alltoall.release()

    def checkpoint_restore(self) -> None:
        """Get memory at the same addresses again, when the engine wakes. Collective; nothing if not built."""
        if self.initialized:
            self.moe_alltoall.restore()

    def cleanup(self) -> None:
        """Let go of the exchange; layers may initialise the manager anew."""
        if self._exchange is not None:
            self._exchange.close()

    def destroy(self) -> None:
        """As `cleanup`, at the end of the engine."""
        self.cleanup()


def manager_class(base: Any, find_engine: Callable[[], Engine]) -> type:
    """`Manager` as a class of the engine's own kind, built as the engine builds its managers."""

    def __init__(self: Any, cpu_group: Any, tcp_store_group: Any = None) -> None:
        if tcp_store_group is None:
            base.__init__(self, cpu_group)
        else:
            base.__init__(self, cpu_group, tcp_store_group)
        Manager.__init__(self, cpu_group, find_engine)

    return types.new_class("A2AOneSidedManager", (Manager, base), {}, lambda body: body.update(__init__=__init__))
