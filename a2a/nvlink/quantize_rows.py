"""nvlink/quantize_rows: the mxfp8 kernel of dispatch by itself, for rows that do not travel.

Owns the launch and its memory. Refuses to know the format, which the kernel shares with dispatch, and who wants rows
quantised.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

import torch
from torch import Tensor

from a2a.config import ExchangeConfig
from a2a.nvlink.compile import compile_kernel
from a2a.nvlink.launch import load
from a2a.nvlink.params import OUTPUT_TYPES, SCALE_LAYOUTS, QuantizeParams, defines, device_source
from a2a.quant import ScaleLayout, wire_format

FILE: Final = "quantize_rows.cu"
NUM_THREADS: Final = 256
WARP_ELEMENTS: Final = 512
"""What a warp takes at a time."""

_CTAS_PER_SM: Final = 8
_INPUT_TYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def constants() -> dict[str, int]:
    """The kernel's -D constants: those of an exchange of one rank, of which it has the format alone."""
    config = ExchangeConfig(ep_size=1, max_num_tokens=1, top_k=1, num_experts=1, hidden_size=32)
    return defines(config, wire_format="mxfp8", placement_table=False)


class RowQuantizer:
    """The kernel on one GPU.

    Raises:
        CompileError, Unsupported: it cannot be built or loaded.
    """

    def __init__(self, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        cubin, _ = compile_kernel(FILE, constants(), f"sm_{major}{minor}", preamble=device_source())
        self._kernel = load(cubin, device).kernel("quantize_rows", QuantizeParams)
        self._most_ctas = _CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        # A launch reads parameters that are filled in before it.
        self._lock = threading.Lock()

    def quantize(self, x: Tensor, alignment: int, layout: ScaleLayout) -> tuple[Tensor, Tensor]:
        """mxfp8 rows and scales in a layout, as `a2a.experts.mxfp8_quantize` describes, on the current stream.

        Args:
            x: `[n, H]` bf16, fp16 or fp32 on this GPU, contiguous, n >= 1.
            alignment: 0 or a multiple of 32.

        No host synchronisation; may be captured.
        """
        form = wire_format("mxfp8")
        rows, width = x.shape
        padded = form.padded_size(width, alignment)
        shape = layout.shape(rows, padded // form.block)
        data = torch.empty((rows, padded), dtype=torch.float8_e4m3fn, device=x.device)
        make = torch.empty if layout is ScaleLayout.LINEAR else torch.zeros
        scales = make(shape, dtype=torch.uint8, device=x.device)
        with self._lock:
            fill(self._kernel.parameters, x, data, scales, layout)
            units = rows * -(-padded // WARP_ELEMENTS)
            self._kernel.shape((min(self._most_ctas, -(-units * 32 // NUM_THREADS)), 1), NUM_THREADS, 0)
            self._kernel.launch(torch.cuda.current_stream(x.device).cuda_stream)
        return data, scales


def fill(parameters: QuantizeParams, x: Tensor, data: Tensor, scales: Tensor, layout: ScaleLayout) -> None:
    """Tell the kernel what to do: rows `x` into `data` `[n, K]`, and scales of their layout's size."""
    parameters.rows, parameters.data, parameters.scales = x.data_ptr(), data.data_ptr(), scales.data_ptr()
    parameters.num_rows, parameters.hidden_size = x.shape
    parameters.row_elements = data.shape[1]
    parameters.scale_columns = data.shape[1] // wire_format("mxfp8").block
    parameters.input_type = OUTPUT_TYPES.index(_INPUT_TYPES[x.dtype])
    parameters.scale_layout = SCALE_LAYOUTS.index(layout.value)


@functools.cache
def row_quantizer(device_index: int) -> RowQuantizer:
    """The kernel of a GPU, loaded once in a process, as torch does with those of its operators."""
    return RowQuantizer(torch.device("cuda", device_index))
