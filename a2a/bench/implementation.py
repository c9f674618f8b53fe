"""implementation: what every timed exchange offers: load, dispatch, fill, combine.

Owns the case that all implementations are given and the rules by which their results are checked. Refuses to know how
any of them moves rows, and how long it takes.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, Protocol

import torch
from torch import Tensor

from a2a.bench.byte_count import destinations
from a2a.bench.workload import Workload
from a2a.comm import Comm
from a2a.placement import Placement
from a2a.quant import WireFormat, wire_format

Experts = Callable[[Tensor, int], Tensor]
"""Called as `experts(rows, ep_rank)` with `[rows, H]` in bf16; returns as many rows of the same width and dtype."""


_CPU: Final = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination of a sweep, equal on all ranks but for `ep_rank`.

    Attributes:
        ep_rank, ep_size: who this process is.
        hidden_size, num_experts, top_k: of the layer.
        format_name, mx_alignment: the dispatch wire.
        row_order: of a2a's receive blocks.
        payload_in_workspace: whether expert output is written where combine reads it.
        tokens_per_rank: as asked for; `workload.num_tokens` has each rank's.
        workload: routing of all ranks.
        transport: as asked for, "auto" or a name.
        num_sms: as asked for; ignored on the host.
        device: where rows, ids and weights of this rank lie.
    """

    ep_rank: int
    ep_size: int
    hidden_size: int
    num_experts: int
    top_k: int
    format_name: str
    mx_alignment: int
    row_order: str
    payload_in_workspace: bool
    tokens_per_rank: int
    workload: Workload
    transport: str = "auto"
    num_sms: int | None = None
    device: torch.device = _CPU

    @property
    def wire_format(self) -> WireFormat:
        """The rules of the dispatch wire."""
        return wire_format(self.format_name)

    @property
    def placement(self) -> Placement:
        """Contiguous shares."""
        return Placement.contiguous(self.num_experts, self.ep_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.workload.num_tokens[self.ep_rank]

    @functools.cached_property
    def topk_ids(self) -> Tensor:
        """int32 `[n, k]` of this rank, on the case's device."""
        return self.workload.topk_ids[self.ep_rank].to(self.device)

    @functools.cached_property
    def topk_weights(self) -> Tensor:
        """float32 `[n, k]` of this rank, on the case's device."""
        return self.workload.topk_weights[self.ep_rank].to(self.device)

    @functools.cached_property
    def expected(self) -> dict[tuple[str, int], Received]:
        """What is known already of what dispatches must bring, by rows and seed."""
        return {}

    @functools.cached_property
    def on_host(self) -> Case:
        """The same case with its tensors on the CPU, where expectations are made."""
        return self if self.device == _CPU else dataclasses.replace(self, device=_CPU)

    @property
    def max_tokens(self) -> int:
        """`runtime_max_tokens_per_rank` of the case."""
        return self.workload.max_num_tokens

    @property
    def row_dtype(self) -> torch.dtype:
        """Of the rows that enter and leave the exchange."""
        return torch.float16 if self.format_name == "fp16" else torch.bfloat16

    @property
    def dispatch_row_bytes(self) -> int:
        """Bytes of a token on the dispatch wire: row, scales, ids, weights."""
        return self.wire_row_bytes + 8 * self.top_k

    @property
    def wire_row_bytes(self) -> int:
        """Bytes of a row and its scales on the dispatch wire."""
        form = self.wire_format
        return form.data_bytes_per_token(self.hidden_size, self.mx_alignment) + form.scale_bytes_per_token(
            self.hidden_size, self.mx_alignment
        )

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row on the combine wire."""
        return 2 * self.hidden_size

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows as they travel; bf16 and fp16 rows travel as they are."""
        if self.wire_format.scales_dtype is None:
            return rows, None
        return self.wire_format.quantize(rows, alignment=self.mx_alignment)

    def dequantize(self, data: Tensor, scales: Tensor | None) -> Tensor:
        """Received rows in the dtype that experts work in."""
        if scales is None:
            return data
        return self.wire_format.dequantize(data, scales, hidden_size=self.hidden_size, dtype=self.row_dtype)


@dataclasses.dataclass(frozen=True)
class Received:
    """Valid rows of a dispatch, by source rank and, within it, by token.

    Attributes:
        counts: rows of each source rank.
        data: `[sum(counts), W]` wire rows.
        scales: their scales, or None.
        topk_ids: int32 `[sum(counts), k]`.
        topk_weights: fp32 `[sum(counts), k]`.
    """

    counts: tuple[int, ...]
    data: Tensor
    scales: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor


class Dispatches(Protocol):
    """Dispatches none of which waits for the combine of another, and these combines; by index from 0."""

    def dispatch(self, index: int) -> None:
        """As `Implementation.dispatch`, of the rows that the implementation has loaded."""

    def combine(self, index: int) -> None:
        """End the round of that dispatch; what it sums means nothing."""

    def received(self) -> Received:
        """What the last dispatch brought, before its combine."""


class Implementation(abc.ABC):
    """One way to exchange the rows of a case. Buffers are allocated on construction, which is collective.

    Attributes:
        name: in the table and on the command line.
        capturable: its rounds can be captured in a CUDA graph.
        role: "exchange" for what is checked by its results, "limit" for what only moves the bytes.
    """

    name: ClassVar[str]
    role: ClassVar[str] = "exchange"
    capturable: ClassVar[bool] = True

    @abc.abstractmethod
    def __init__(self, case: Case, comm: Comm) -> None: ...

    @classmethod
    def refusal(cls) -> str | None:
        """Why this machine cannot run it at all, or None. Not collective; takes nothing."""
        return None

    @property
    @abc.abstractmethod
    def transport(self) -> str:
        """What carries the bytes."""

    @property
    def regime(self) -> str:
        """Which of its ways of moving rows this case takes: "bulk" where there is one for all sizes."""
        return "bulk"

    @abc.abstractmethod
    def load(self, rows: Tensor) -> None:
        """Take this rank's rows, `[n, H]` in the case's row dtype, for the rounds that follow. Not timed."""

    @abc.abstractmethod
    def dispatch(self) -> None:
        """Send every row to the ranks of its picks; on return this rank's rows have arrived."""

    @abc.abstractmethod
    def received(self) -> Received:
        """What the last dispatch brought. Not timed; copies."""

    @abc.abstractmethod
    def fill(self, experts: Experts) -> None:
        """Write the experts' output for the received rows where combine takes it. Not timed."""

    def settle(self) -> None:
        """Make what combine reads right for rounds to come, too, where rows may change their slots. Not timed.

        Called before rounds are repeated and their sums compared; what is not filled by slots need do nothing.
        """
        return

    @abc.abstractmethod
    def combine(self) -> Tensor:
        """Return the sum over ranks of each token's expert rows, `[n, H]`."""

    @contextlib.contextmanager
    def dispatches(self, count: int) -> Iterator[Dispatches | None]:
        """`count` dispatches to be timed by themselves, or None where they would take another way. Collective."""
        yield _Repeated(self)

    @abc.abstractmethod
    def close(self) -> None:
        """Free what construction took; collective."""


class _Repeated:
    """The dispatch of an implementation that knows no rounds."""

    def __init__(self, each: Implementation) -> None:
        self._each = each
        self.received = each.received

    def dispatch(self, index: int) -> None:
        self._each.dispatch()

    def combine(self, index: int) -> None:
        self._each.combine()


def random_rows(case: Case, rank: int, seed: int) -> Tensor:
    """Normal rows of a rank, `[n, H]`; every rank can make every other's."""
    generator = torch.Generator().manual_seed((seed * 7919 + rank) % 2**63)
    return torch.randn(case.workload.num_tokens[rank], case.hidden_size, generator=generator).to(case.row_dtype)


def integer_rows(case: Case, rank: int, seed: int) -> Tensor:
    """Rows of integers that every wire format carries exactly, and whose sums over 36 ranks are exact in bf16 whatever
    the order (see `integer_experts`).

    1 to 3, with a 3 in every block of 16 elements; for fp8_block, whose scale is the largest over 448, a 448 in every
    block of 128.
    """
    generator = torch.Generator().manual_seed((seed * 104_729 + rank) % 2**63)
    shape = (case.workload.num_tokens[rank], case.hidden_size)
    rows = torch.randint(1, 4, shape, generator=generator)
    rows[:, ::16] = 3
    if case.format_name == "fp8_block":
        rows[:, ::128] = 448
    return rows.to(case.row_dtype)


def random_experts(rows: Tensor, ep_rank: int) -> Tensor:
    """Rows scaled by a factor of the rank's own and rounded: sums of them round, so their order shows."""
    return (rows.float() * (1.0 + ep_rank / 8)).to(rows.dtype)


def integer_experts(rows: Tensor, ep_rank: int) -> Tensor:
    """The row, negated on odd ranks: tells ranks apart and cannot grow past its largest times the number of ranks."""
    return -rows if ep_rank % 2 else rows.clone()


def expected_received(case: Case, rows_of: Callable[[int], Tensor]) -> Received:
    """What a dispatch must bring to this rank, from all ranks' inputs."""
    counts, data, scales, ids, weights = [], [], [], [], []
    for src_rank in range(case.ep_size):
        src_ids = case.workload.topk_ids[src_rank]
        hit = destinations(src_ids, case.placement)[:, case.ep_rank]
        wire, wire_scales = case.quantize(rows_of(src_rank)[hit])
        counts.append(int(hit.sum()))
        data.append(wire)
        scales.append(wire_scales)
        ids.append(src_ids[hit])
        weights.append(case.workload.topk_weights[src_rank][hit])
    joined = None if scales[0] is None else torch.cat([part for part in scales if part is not None])
    return Received(tuple(counts), torch.cat(data), joined, torch.cat(ids), torch.cat(weights))


def expected_integer_sums(case: Case, rows: Tensor) -> Tensor:
    """What combine must return on this rank after `integer_experts`: each row times its even less its odd ranks."""
    hits = destinations(case.topk_ids, case.placement)
    signs = 1 - 2 * (torch.arange(case.ep_size) % 2)
    # In integers, so that a token whose ranks cancel gives +0 as a sum does.
    return (rows.to(torch.int32) * (hits * signs).sum(dim=1, keepdim=True)).to(rows.dtype)


def difference(got: Received, want: Received) -> str:
    """What differs first, bit by bit, or an empty string."""
    if got.counts != want.counts:
        return f"received counts {got.counts}, wanted {want.counts}"
    for name in ("data", "scales", "topk_ids", "topk_weights"):
        reason = tensor_difference(name, getattr(got, name), getattr(want, name))
        if reason:
            return reason
    return ""


def tensor_difference(name: str, got: Tensor | None, want: Tensor | None) -> str:
    """What differs between two tensors, bit by bit, or an empty string."""
    if got is None or want is None:
        return "" if got is want else f"{name}: one of two is missing"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name}: got {list(got.shape)} {got.dtype}, wanted {list(want.shape)} {want.dtype}"
    if got.numel() == 0:
        return ""
    if got.dim() < 2:
        # The entries of a vector are its rows.
        got, want = got.reshape(-1, 1), want.reshape(-1, 1)
    different = (as_bytes(got).cpu() != as_bytes(want).cpu()).any(dim=-1).nonzero()
    if not different.shape[0]:
        return ""
    return f"{name}: row {tuple(different[0].tolist())} differs, {different.shape[0]} rows in all"


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor along its last dimension."""
    # A last dimension of one element may carry any stride and still count as contiguous.
    dense = tensor.contiguous() if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)
