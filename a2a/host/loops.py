"""host/loops: what the host transport does token by token, behind one interface.

Owns the interface and the choice: numba kernels where numba is installed, torch otherwise; both are exact and equal.
Refuses to know the protocol: it gets tensors and offsets.
"""

from __future__ import annotations

import abc
import importlib.util

from torch import Tensor


class Loops(abc.ABC):
    """Loops over tokens and rows."""

    @abc.abstractmethod
    def route(
        self,
        ids: Tensor,
        owners: Tensor,
        active: Tensor,
        compact: bool,
        targets: Tensor,
        indices: Tensor,
        counts: Tensor,
        slots: Tensor,
    ) -> None:
        """Find every pick's rank and slot.

        Args:
            ids: int32 or int64 `[n, k]`, contiguous, global expert ids; those outside `[0, E)` go nowhere.
            owners: int32 `[E]`, rank of each expert.
            active: uint8 `[ep]`, nonzero for ranks that take part; picks of others go nowhere.
            compact: slots count the tokens that have a pick at the rank; else a token's slot is its index.
            targets: int32, contiguous; its first `n * k` become `[n, k]`: the rank at the first pick there, else -1.
            indices: int32, likewise: its slot, else -1.
            counts: int32 `[ep]`, written: rows sent to each rank.
            slots: int32 `[n, ep]`, contiguous, written: the row that a token takes in this rank's block at each rank,
                -1 where it has none.
        """

    @abc.abstractmethod
    def write_counts(self, counts: Tensor, active: Tensor, there: Tensor) -> None:
        """Tell every rank that takes part how many rows it gets.

        Args:
            counts: as `route` writes them.
            active: uint8 `[ep]`, nonzero for ranks that take part.
            there: int32 `[ep]` of any stride, this rank's entry at each of them.
        """

    @abc.abstractmethod
    def write_rows(self, rows: Tensor, row_bytes: int, slots: Tensor, memory: Tensor, start: int, stride: int) -> None:
        """Copy every row to its slot at every rank that it goes to.

        Args:
            rows: `[n, *]` of any dtype, contiguous.
            row_bytes: bytes of a row.
            slots: as `route` writes them.
            memory: uint8, all workspaces as one 1-D tensor.
            start: offset in `memory` of the block that this rank writes at rank 0, in bytes.
            stride: distance from there to its block at the next rank, in bytes.
        """

    @abc.abstractmethod
    def fill_padded(self, area: Tensor, counts: Tensor, valid: Tensor | None, value: int) -> None:
        """Give padded rows a value.

        Args:
            area: `[ep, R, *]` of an integer dtype.
            counts: int32 `[ep]`, valid rows of each block, when they are compact.
            valid: uint8 `[ep, R]`, nonzero for valid rows, when they are not; else None.
            value: what every element of the other rows becomes.
        """

    @abc.abstractmethod
    def sum_rows(self, words: Tensor, start: int, stride: int, slots: Tensor, output: Tensor) -> None:
        """Write every token's sum: in fp32 from +0, in ascending rank, rounded once to nearest, ties to even.

        Args:
            words: all workspaces as one 1-D tensor of the rows' dtype: bf16, fp16 or fp32.
            start: offset in `words` of the block that rank 0 keeps for this rank, in elements.
            stride: distance from there to the block at the next rank, in elements.
            slots: as `route` writes them.
            output: `[n, H']` bf16, fp16 or fp32, contiguous.
        """


def have_numba() -> bool:
    """Whether the numba kernels can be had; looks, imports nothing."""
    return importlib.util.find_spec("numba") is not None


def fastest() -> Loops:
    """The numba kernels if numba is installed, torch otherwise."""
    if have_numba():
        from a2a.host.numba_loops import NumbaLoops

        return NumbaLoops()
    from a2a.host.torch_loops import TorchLoops

    return TorchLoops()
