"""nvlink/probe: whether the lines of the small regime arrive whole, found by doing it at every build.

Owns the run of `probe_lines` between all ranks and their agreement on it. Refuses to decide what a torn line means for
a round. That a warp's 128-byte store becomes visible at once is seen on machines and promised by no model, so a machine
where it is not must be noticed before the first round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from a2a.comm import Comm
from a2a.nvlink.compile import compile_kernel
from a2a.nvlink.driver import arch_of
from a2a.nvlink.launch import load
from a2a.nvlink.memory import SymmetricMemory
from a2a.nvlink.params import ProbeParams, device_source

_CTAS: Final = 8
_PROBE_BYTES: Final = 1024
"""Of memory per rank and CTA; PROBE_BYTES of the kernel."""
_UPDATES: Final = 1000
"""About 3 ms between two GPUs: a round trip each."""
_BUDGET_NS: Final = 30_000_000
"""Ranks start apart by the skew of a barrier; what has not been looked at by then is not looked at."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """What a probe found; equal on all ranks.

    Attributes:
        seen: lines looked at, by (writer, reader); pairs on one GPU are not tried.
        torn: of them, those whose tag came before their data.
    """

    seen: dict[tuple[int, int], int]
    torn: dict[tuple[int, int], int]

    @property
    def whole(self) -> bool:
        """Whether no line was torn."""
        return not any(self.torn.values())

    def text(self) -> str:
        """One sentence."""
        if not self.seen:
            return "not tried: no two ranks have GPUs of their own"
        if self.whole:
            return f"none of {sum(self.seen.values())} lines between {len(self.seen)} pairs of ranks was torn"
        told = [f"{count} from rank {pair[0]} to {pair[1]}" for pair, count in sorted(self.torn.items()) if count]
        return "lines are torn: " + ", ".join(told) + "; the bulk regime serves every size"


class LineProbe:
    """A probe of one rank, loaded.

    Args:
        memory: of all ranks; its first `ep * 8 KiB` bytes are used.

    Raises:
        CompileError: with the compiler's log.
        Unsupported: the code cannot be loaded.
    """

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._counts = torch.zeros((memory.size, 2), dtype=torch.int32, device=memory.device)
        cubin, _ = compile_kernel("probe.cu", {}, arch_of(memory.device), preamble=device_source())
        self._kernel = load(cubin, memory.device).kernel("probe_lines", ProbeParams)
        params = self._kernel.parameters
        params.memory, params.stride, params.counts = memory.address, memory.stride_bytes, self._counts.data_ptr()
        params.ep_rank, params.updates, params.budget_ns = memory.rank, _UPDATES, _BUDGET_NS
        for peer in _peers(memory.device_uuids, memory.rank):
            params.peers[peer // 64] |= 1 << peer % 64
        self._kernel.shape((_CTAS, memory.size), 64, 0)

    def run(self, comm: Comm) -> Lines:
        """Rewrite and watch lines between every two ranks on different GPUs; a few ms, at most about 50.

        Collective; the memory must be zero on all ranks before and is after. Synchronises a stream of its own alone.
        """
        memory = self._memory
        stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(memory.device))
        comm.barrier()
        with torch.cuda.stream(stream):
            self._kernel.launch(stream.cuda_stream)
            found: Sequence[list[list[int]]] = comm.allgather(self._counts.tolist())
            # Every rank's kernel has ended by now: nobody writes here any more.
            memory.tensor[memory.rank, : memory.size * _CTAS * _PROBE_BYTES].zero_()
            stream.synchronize()
        comm.barrier()
        pairs = {
            (writer, reader): found[reader][writer]
            for reader in range(memory.size)
            for writer in _peers(memory.device_uuids, reader)
        }
        return Lines({pair: each[0] for pair, each in pairs.items()}, {pair: each[1] for pair, each in pairs.items()})


def _peers(device_uuids: Sequence[str], rank: int) -> list[int]:
    # Processes that share a GPU take turns: one never watches while the other writes.
    return [peer for peer, uuid in enumerate(device_uuids) if uuid != device_uuids[rank]]
