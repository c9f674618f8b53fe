"""transport: the seam: Transport, DispatchCall, CombineCall, choose().

Owns what `MoeAlltoAll` and a transport say to each other. Refuses to know how rows move.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from torch import Tensor

from a2a.comm import Comm
from a2a.config import ExchangeConfig
from a2a.errors import ConfigError, Unsupported
from a2a.layout import WorkspaceLayout
from a2a.placement import Placement
from a2a.quant import ScaleLayout, WireFormat

AUTOMATIC: Final = ("nvlink", "host")
"""Names in the order in which `auto` tries them."""
TRANSPORTS: Final = (*AUTOMATIC, "nvshmem")
"""All names; `a2a.<name>.transport.TRANSPORT` is the class."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quantize:
    """How rows become wire rows inside the exchange.

    Attributes:
        wire_format: the format's rules.
        alignment: multiple to which rows are padded, in elements.
        global_scale: fp32 scalar tensor on the rows' device, or None for formats without one.
    """

    wire_format: WireFormat
    alignment: int
    global_scale: Tensor | None


class Payload(NamedTuple):
    """What one payload of a dispatch becomes.

    Attributes:
        row_bytes: bytes of a row on the wire.
        offset_bytes: where the payload starts in every receiver's workspace.
        fill_byte: value of each byte of a padded row, or None to leave padded rows alone.
    """

    row_bytes: int
    offset_bytes: int
    fill_byte: int | None


class DispatchCall(NamedTuple):
    """One dispatch of one rank: everything a transport needs, checked by the caller.

    A tuple: a frozen dataclass takes three times as long to make, in every round.

    Attributes:
        context: index of the context.
        round: number of this dispatch in the context, from 1, equal on all ranks.
        topk_ids: int32 or int64 `[n, k]`, contiguous global expert ids.
        payloads: 1 to 8.
        rows: `[n, *]` of each payload, contiguous; when `quantize` is set those of the first are not quantised yet, and
            the second, which are the scales, has None.
        runtime_max_tokens_per_rank: rows of a block this round.
        ids_payload: index of the payload whose padded rows become `invalid_id`, or None.
        invalid_id: the value they become.
        quantize: how the first payload becomes wire rows, or None.
        eplb_local_stats: int32 `[Es]`, or None.
        timeout_s: budget of each wait.
        stream, num_sms, enable_pdl: launch options of GPU transports.
        like: calls with the same object here are the same but for the round, what tensors contain and where they lie,
            the budget and the launch options; None says nothing.
    """

    context: int
    round: int
    topk_ids: Tensor
    payloads: tuple[Payload, ...]
    rows: tuple[Tensor | None, ...]
    runtime_max_tokens_per_rank: int
    ids_payload: int | None
    invalid_id: int
    quantize: Quantize | None
    eplb_local_stats: Tensor | None
    timeout_s: float
    stream: Any
    num_sms: int | None
    enable_pdl: bool | None
    like: object = None


class CombineCall(NamedTuple):
    """One combine of one rank, checked by the caller.

    Attributes:
        context, round: of the dispatch that this combine ends.
        attempt: number of this combine within the round, from 1, equal on all ranks.
        payload: `[ep, R, H']`, contiguous rows to be summed.
        payload_in_workspace: the payload is this rank's combine area itself.
        runtime_max_tokens_per_rank: R of the dispatch.
        num_tokens: rows of the output, this rank's n.
        low_precision: rows travel as e4m3 with a scale per 128 elements.
        output: `[n, H']` for unquantised output, else the quantised data.
        output_quantize: how sums become output, or None.
        output_scales: where quantised output's scales go, in `scale_layout`.
        scale_layout: layout of `output_scales`.
        timeout_s: budget of each wait.
        stream, num_sms, enable_pdl: launch options of GPU transports.
        like: as in `DispatchCall`, but that `payload_in_workspace` and the attempt may differ too.
    """

    context: int
    round: int
    attempt: int
    payload: Tensor
    payload_in_workspace: bool
    runtime_max_tokens_per_rank: int
    num_tokens: int
    low_precision: bool
    output: Tensor
    output_quantize: Quantize | None
    output_scales: Tensor | None
    scale_layout: ScaleLayout
    timeout_s: float
    stream: Any
    num_sms: int | None
    enable_pdl: bool | None
    like: object = None


Hook = Callable[[str, int], None]
"""Called as `hook(point, round)` at each named point of a round; for tests that delay or end a rank there."""


class Transport(abc.ABC):
    """Moves rows between the workspaces of all ranks. Adding one means adding a room with a subclass of this.

    A subclass is constructed collectively, after `reasons` was empty on every rank, and has zeroed memory mapped by all
    when its constructor returns.

    Attributes:
        name: of the room.
        POINTS: names of the points at which `hook` is called.
        rank: this rank within the group.
        workspace: uint8 `[ep, bytes]`, all ranks' workspaces, row `r` being rank `r`'s.
        hook: see `Hook`, or None.
    """

    name: ClassVar[str]
    POINTS: ClassVar[tuple[str, ...]] = ()
    rank: int
    workspace: Tensor
    hook: Hook | None = None

    @classmethod
    @abc.abstractmethod
    def reasons(cls, config: ExchangeConfig, comm: Comm) -> list[str]:
        """Every reason why this rank cannot serve `config`; empty when it can.

        Collective: all ranks call it together, so that it may compare facts over `comm`. Keeps no memory.
        """

    @classmethod
    def control_regions(cls, config: ExchangeConfig) -> Sequence[tuple[str, int]]:
        """(name, bytes) of control regions that this transport needs in each context."""
        return ()

    @abc.abstractmethod
    def __init__(
        self, config: ExchangeConfig, layout: WorkspaceLayout, placement: Placement, comm: Comm, *, timeout_s: float
    ) -> None: ...

    @abc.abstractmethod
    def dispatch(self, call: DispatchCall) -> None:
        """Move rows, counts and tables; on return (in stream order on GPUs) this rank's receive area is complete."""

    @abc.abstractmethod
    def combine(self, call: CombineCall) -> None:
        """Sum the rows of all ranks into `call.output`."""

    def regime(self, runtime_max_tokens_per_rank: int) -> str:
        """Which of its ways of moving rows a round of that size takes: "bulk" where there is one for all sizes."""
        return "bulk"

    def set_budgets(self, startup_timeout_s: float, timeout_s: float) -> None:
        """Told after construction and whenever the object's budgets change, for waits that outlive the call.

        A transport whose waits end before the verb returns takes `timeout_s` of each call and has nothing to do here.
        """
        return

    @abc.abstractmethod
    def decline(self, phase: str, context: int, round: int, attempt: int, facts: Mapping[str, Any]) -> None:
        """Signal, in place of a dispatch or combine, that this rank's arguments were refused with the error `facts`."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise the error that this rank or a peer has recorded, if any; no device synchronisation."""

    @abc.abstractmethod
    def reset(self, *, timeout_s: float) -> None:
        """Collective: forget recorded errors and unfinished rounds of all contexts."""

    @abc.abstractmethod
    def release(self, comm: Comm) -> None:
        """Collective, between rounds: give the physical memory of all workspaces back; their addresses stay reserved.

        Waits for this rank's launched work. No verb but `restore` and `close` is called until then.
        """

    @abc.abstractmethod
    def restore(self, comm: Comm, *, timeout_s: float) -> None:
        """Collective: zeroed memory at the same addresses again, and round numbers from 1 on, as after construction.

        Raises:
            Unsupported: on every rank, with every reason; nothing is mapped, and `restore` may be called again.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Say goodbye and let go; idempotent, waits for nobody. Views that are alive keep their memory."""


def transport_class(name: str) -> type[Transport]:
    """The class of a transport by its room's name."""
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ConfigError(what="transport", got=name, wanted="'auto' or one of " + ", ".join(map(repr, TRANSPORTS)))
    found: type[Transport] = importlib.import_module(f"a2a.{name}.transport").TRANSPORT
    return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        name: the transport chosen.
        why: one line per transport that was looked at.
    """

    name: str
    why: tuple[str, ...]


def choose(requested: str, config: ExchangeConfig, comm: Comm) -> Choice:
    """Find a transport that serves `config` on every rank of `comm`. Collective; the answer is the same everywhere.

    Args:
        requested: a name, or "auto" for the first of `AUTOMATIC` that can.

    Raises:
        Unsupported: with every reason of every rank.
    """
    names = AUTOMATIC if requested == "auto" else (requested,)
    why: list[str] = []
    refused: list[str] = []
    for name in names:
        mine = transport_class(name).reasons(config, comm)
        theirs = [f"{reason} (rank {rank})" for rank, reasons in enumerate(comm.allgather(mine)) for reason in reasons]
        if not theirs:
            why.append(f"{name}: chosen, " + ("asked for by name" if requested != "auto" else "all ranks can serve it"))
            return Choice(name, tuple(why))
        why.append(f"{name}: " + "; ".join(theirs))
        refused += theirs
    raise Unsupported(transport=requested, reasons=tuple(refused))
