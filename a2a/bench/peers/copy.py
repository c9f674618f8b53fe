"""copy: the limit between GPUs: the bytes of a round in as few plain copies as there are pairs of ranks.

Owns the figure of the link itself: rows that are packed already go to each receiver in one copy, and the combine rows
come back in one copy from each. Refuses to signal, to gather, to sum and to look anything up during a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from a2a.bench.implementation import Case
from a2a.bench.peers.memcpy import Memcpy
from a2a.comm import Comm
from a2a.errors import Unsupported


class Copy(Memcpy):
    """Plain copies of packed rows through the workspace of an exchange object of the same case."""

    name: ClassVar[str] = "copy"

    @classmethod
    def refusal(cls) -> str | None:
        return None if torch.cuda.is_available() else "it needs GPUs; on the host the limit is memcpy"

    def __init__(self, case: Case, comm: Comm) -> None:
        super().__init__(case, comm)
        if case.device.type != "cuda":
            raise Unsupported(transport=self.name, reasons=("it is a limit between GPUs: on the host it is memcpy",))
        self._packed = [self._wire[tokens] for tokens in self._tokens]
        self._streams: list[Any] = [
            torch.cuda.Stream(case.device)  # type: ignore[no-untyped-call]
            for _ in self._tokens
        ]

    def load(self, rows: Tensor) -> None:
        super().load(rows)
        for packed, tokens in zip(self._packed, self._tokens, strict=True):
            torch.index_select(self._wire, 0, tokens, out=packed)

    def dispatch(self) -> None:
        self._copy(self._landing, self._packed)

    def combine(self) -> Tensor:
        self._copy(self._private_parts, self._combine_rows)
        return self._private

    def _copy(self, to: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """All pairs side by side: what stays on the GPU must not keep the link waiting."""
        here = torch.cuda.current_stream(self._case.device)
        for stream, target, source in zip(self._streams, to, rows, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                target.copy_(source)
        for stream in self._streams:
            here.wait_stream(stream)


PEER = Copy
