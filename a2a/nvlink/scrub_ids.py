"""nvlink/scrub_ids: the invalid id into every padded slot, behind a dispatch that has left the ids alone.

Owns the launch. Refuses to know where the counts and the ids come from.

One kernel of our own, loaded beforehand: ranks that are streams of one process call it while other ranks' kernels wait
on the same GPU, and loading code, as the first use of a torch operator does, may wait for these.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

import torch
from torch import Tensor

from a2a.errors import ConfigError
from a2a.nvlink.compile import compile_kernel
from a2a.nvlink.driver import arch_of
from a2a.nvlink.launch import load
from a2a.nvlink.params import ScrubParams, device_source

FILE: Final = "scrub_ids.cu"
NUM_THREADS: Final = 256

_CTAS_PER_SM: Final = 8
_STORE_BYTES: Final = 16
"""What a thread writes at a time."""


class IdScrubber:
    """The kernel on one GPU.

    Raises:
        CompileError, Unsupported: it cannot be built or loaded.
    """

    def __init__(self, device: torch.device) -> None:
        cubin, _ = compile_kernel(FILE, {}, arch_of(device), preamble=device_source())
        self._kernel = load(cubin, device).kernel("scrub_ids", ScrubParams)
        self._most_ctas = _CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        # A launch reads parameters that are filled in before it.
        self._lock = threading.Lock()

    def scrub(self, ids: Tensor, recv_counts: Tensor, invalid_id: int) -> None:
        """Ids of slots at or past the count of their source become `invalid_id`, on the current stream.

        Args:
            ids: int32 or int64 `[ep, R, k]` on this GPU, contiguous, not empty.
            recv_counts: int32 `[ep]` on this GPU, contiguous.
            invalid_id: what ids of this dtype can be.

        No host synchronisation, and nothing is allocated; may be captured.

        Raises:
            ConfigError (a ValueError): an invalid id that does not fit.
        """
        with self._lock:
            fill(self._kernel.parameters, ids, recv_counts, invalid_id)
            self._kernel.shape(grid_of(ids, self._most_ctas), NUM_THREADS, 0)
            self._kernel.launch(torch.cuda.current_stream(ids.device).cuda_stream)


def fill(parameters: ScrubParams, ids: Tensor, recv_counts: Tensor, invalid_id: int) -> None:
    """Tell the kernel what to do; see `IdScrubber.scrub`."""
    limits = torch.iinfo(ids.dtype)
    if not limits.min <= invalid_id <= limits.max:
        raise ConfigError(what="invalid_expert_id", got=invalid_id, wanted=f"an {ids.dtype}".replace("torch.", ""))
    parameters.ids, parameters.recv_counts = ids.data_ptr(), recv_counts.data_ptr()
    parameters.invalid_id = invalid_id
    parameters.ep_size, parameters.runtime_max_tokens_per_rank, parameters.top_k = ids.shape
    parameters.id_bytes = ids.dtype.itemsize


def grid_of(ids: Tensor, most_ctas: int) -> tuple[int, int]:
    """CTAs per source, sources at a time: a store of each thread where so many CTAs are allowed."""
    ep, most, top_k = ids.shape
    # Blocks need not begin where a store does.
    stores = -(-most * top_k * ids.dtype.itemsize // _STORE_BYTES) + 1
    rows = min(ep, most_ctas)
    return min(-(-stores // NUM_THREADS), max(1, most_ctas // rows)), rows


@functools.cache
def id_scrubber(device_index: int) -> IdScrubber:
    """The kernel of a GPU, loaded once in a process, as torch does with those of its operators."""
    return IdScrubber(torch.device("cuda", device_index))
