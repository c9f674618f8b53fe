"""nvlink/quantize_rows: rows that do not travel into a format: what a kernel is told, and a kernel that does only this.

Owns the launch and its memory. Refuses to know the formats, which the kernel shares with dispatch, and who wants rows
quantised: combine's kernels are told the same of their output.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

import torch
from torch import Tensor

from a2a.config import ExchangeConfig
from a2a.nvlink.compile import compile_kernel
from a2a.nvlink.driver import arch_of
from a2a.nvlink.launch import load
from a2a.nvlink.params import (
    OUTPUT_TYPES,
    SCALE_LAYOUTS,
    TYPE_NAMES,
    WIRE_FORMATS,
    QuantizeParams,
    defines,
    device_source,
)
from a2a.quant import ScaleLayout, WireFormat, wire_format

FILE: Final = "quantize_rows.cu"
FORMATS: Final = ("mxfp8", "nvfp4", "mxfp4")
"""Those with scales of one byte, which alone have layouts."""
NUM_THREADS: Final = 256
WARP_ELEMENTS: Final = 512
"""What a warp takes at a time."""

_CTAS_PER_SM: Final = 8


def constants() -> dict[str, int]:
    """The kernel's -D constants: those of an exchange of one rank, which files that it shares with others ask for."""
    config = ExchangeConfig(ep_size=1, max_num_tokens=1, top_k=1, num_experts=1, hidden_size=32)
    return defines(config, placement_table=False)


class RowQuantizer:
    """The kernel on one GPU.

    Args:
        device: the GPU.

    Raises:
        CompileError, Unsupported: it cannot be built or loaded.
    """

    def __init__(self, device: torch.device) -> None:
        cubin, _ = compile_kernel(FILE, constants(), arch_of(device), preamble=device_source())
        self._kernel = load(cubin, device).kernel("quantize_rows", QuantizeParams)
        self._most_ctas = _CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        # A launch reads parameters that are filled in before it.
        self._lock = threading.Lock()

    def quantize(self, x: Tensor, name: str, alignment: int, layout: ScaleLayout) -> tuple[Tensor, Tensor]:
        """Rows and scales in a layout, as `a2a.experts.mxfp8_quantize` describes, by one launch on the current stream.

        Args:
            x: `[n, H]` bf16, fp16 or fp32 on this GPU, contiguous, n >= 1, H what the format can carry.
            name: one of `FORMATS`; nvfp4 with a global scale of 1.
            alignment: 0 or, for mxfp8, a multiple of 32.

        No host synchronisation; may be captured.
        """
        form = wire_format(name)
        rows, width = x.shape
        data = torch.empty((rows, form.data_width(width, alignment)), dtype=form.data_dtype, device=x.device)
        shape = layout.shape(rows, form.scales_width(width, alignment))
        scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
        with self._lock:
            parameters = self._kernel.parameters
            fill(parameters, form, x, data, scales, layout, None)
            units = parameters.layout_rows * -(-width // WARP_ELEMENTS)
            self._kernel.shape((min(self._most_ctas, -(-units * 32 // NUM_THREADS)), 1), NUM_THREADS, 0)
            self._kernel.launch(torch.cuda.current_stream(x.device).cuda_stream)
        return data, scales


def fill(
    parameters: QuantizeParams,
    form: WireFormat,
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    layout: ScaleLayout,
    global_scale: Tensor | None,
) -> None:
    """Tell a kernel what to make of rows; all of `data` and `scales` is then written.

    Args:
        form: one of `FORMATS`.
        x: `[n, H]` bf16, fp16 or fp32, contiguous; H is what the format can carry.
        data: `[n, K]` with K of the format's columns for H or for more, contiguous, at any address.
        scales: of one byte an element, as many as the layout takes, contiguous.
        global_scale: one fp32 on the GPU, for nvfp4; None: 1.0.
    """
    parameters.wire_format = WIRE_FORMATS.index(form.name)
    parameters.rows, parameters.data, parameters.scales = x.data_ptr(), data.data_ptr(), scales.data_ptr()
    parameters.global_scale = 0 if global_scale is None else global_scale.data_ptr()
    parameters.num_rows, parameters.hidden_size = x.shape
    parameters.row_elements = data.shape[1] * (2 if form.packed else 1)
    parameters.scale_columns = parameters.row_elements // form.block
    parameters.layout_rows, parameters.layout_columns = layout.shape(x.shape[0], parameters.scale_columns)
    parameters.input_type = OUTPUT_TYPES.index(TYPE_NAMES[x.dtype])
    parameters.scale_layout = SCALE_LAYOUTS.index(layout.value)


@functools.cache
def row_quantizer(device_index: int) -> RowQuantizer:
    """The kernel on a GPU, loaded once in a process, as torch does with those of its operators."""
    return RowQuantizer(torch.device("cuda", device_index))
