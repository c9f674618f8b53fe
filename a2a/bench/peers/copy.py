"""copy: the limit between GPUs: the bytes of a round in as few plain copies as there are pairs of ranks.

Owns the figure of the link itself: rows that are packed already go to each receiver in one copy, and the combine rows
come back in one copy from each. Refuses to signal, to gather, to sum and to look anything up during a round.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from a2a.bench.implementation import Case
from a2a.bench.peers.memcpy import Memcpy
from a2a.comm import Comm


class Copy(Memcpy):
    """Plain copies of packed rows through the workspace of an exchange object of the same case."""

    name: ClassVar[str] = "copy"
    about: ClassVar[str] = "one copy of packed rows to each receiver and one of combine rows from each"

    def __init__(self, case: Case, comm: Comm) -> None:
        super().__init__(case, comm)
        self._packed = [self._wire[tokens] for tokens in self._tokens]

    def load(self, rows: Tensor) -> None:
        super().load(rows)
        for packed, tokens in zip(self._packed, self._tokens, strict=True):
            torch.index_select(self._wire, 0, tokens, out=packed)

    def dispatch(self) -> None:
        for packed, landing in zip(self._packed, self._landing, strict=True):
            landing.copy_(packed)


PEER = Copy
