"""nvlink/quantize_rows: the kernel of dispatch's formats by itself, for rows that do not travel.

Owns the launch and its memory. Refuses to know the formats, which the kernel shares with dispatch, and who wants rows
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
from a2a.nvlink.driver import arch_of
from a2a.nvlink.launch import load
from a2a.nvlink.params import OUTPUT_TYPES, SCALE_LAYOUTS, QuantizeParams, defines, device_source
from a2a.quant import ScaleLayout, WireFormat, wire_format

FILE: Final = "quantize_rows.cu"
FORMATS: Final = ("mxfp8", "nvfp4", "mxfp4")
"""Those with scales of one byte, which alone have layouts."""
NUM_THREADS: Final = 256
WARP_ELEMENTS: Final = 512
"""What a warp takes at a time."""

_CTAS_PER_SM: Final = 8
_INPUT_TYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def constants(name: str) -> dict[str, int]:
    """The kernel's -D constants for a format: those of an exchange of one rank, of which it has the format alone."""
    config = ExchangeConfig(ep_size=1, max_num_tokens=1, top_k=1, num_experts=1, hidden_size=32)
    return defines(config, wire_format=name, placement_table=False)


class RowQuantizer:
    """The kernel of one format on one GPU.

    Args:
        device: the GPU.
        name: one of `FORMATS`.

    Raises:
        CompileError, Unsupported: it cannot be built or loaded.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        cubin, _ = compile_kernel(FILE, constants(name), arch_of(device), preamble=device_source())
        self._form = wire_format(name)
        self._kernel = load(cubin, device).kernel("quantize_rows", QuantizeParams)
        self._most_ctas = _CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        # A launch reads parameters that are filled in before it.
        self._lock = threading.Lock()

    def quantize(self, x: Tensor, alignment: int, layout: ScaleLayout) -> tuple[Tensor, Tensor]:
        """Rows and scales in a layout, as `a2a.experts.mxfp8_quantize` describes, on the current stream.

        Args:
            x: `[n, H]` bf16, fp16 or fp32 on this GPU, contiguous, n >= 1.
            alignment: 0 or, for mxfp8, a multiple of 32.

        No host synchronisation; may be captured.
        """
        form = self._form
        rows, width = x.shape
        data = torch.empty((rows, form.data_width(width, alignment)), dtype=form.data_dtype, device=x.device)
        shape = layout.shape(rows, form.scales_width(width, alignment))
        scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
        self.quantize_into(x, data, scales, layout, None)
        return data, scales

    def quantize_into(
        self, x: Tensor, data: Tensor, scales: Tensor, layout: ScaleLayout, global_scale: Tensor | None
    ) -> None:
        """The same into memory of the caller's, all of which is written, by one launch on the current stream.

        Args:
            x: `[n, H]` bf16, fp16 or fp32 on this GPU, contiguous; H is what the format can carry.
            data: `[n, K]` with K of the format's columns for H or for more, contiguous, at any address.
            scales: of one byte an element, as many as the layout takes, contiguous.
            global_scale: one fp32 on this GPU, for nvfp4; None: 1.0.

        No host synchronisation, and nothing is allocated; may be captured.
        """
        if not x.shape[0]:
            return
        with self._lock:
            parameters = self._kernel.parameters
            fill(parameters, self._form, x, data, scales, layout, global_scale)
            units = parameters.layout_rows * -(-parameters.layout_columns * self._form.block // WARP_ELEMENTS)
            self._kernel.shape((min(self._most_ctas, -(-units * 32 // NUM_THREADS)), 1), NUM_THREADS, 0)
            self._kernel.launch(torch.cuda.current_stream(x.device).cuda_stream)


def fill(
    parameters: QuantizeParams,
    form: WireFormat,
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    layout: ScaleLayout,
    global_scale: Tensor | None,
) -> None:
    """Tell the kernel of a format what to do; see `RowQuantizer.quantize_into`."""
    parameters.rows, parameters.data, parameters.scales = x.data_ptr(), data.data_ptr(), scales.data_ptr()
    parameters.global_scale = 0 if global_scale is None else global_scale.data_ptr()
    parameters.num_rows, parameters.hidden_size = x.shape
    parameters.row_elements = data.shape[1] * (2 if form.packed else 1)
    parameters.scale_columns = parameters.row_elements // form.block
    parameters.layout_rows, parameters.layout_columns = layout.shape(x.shape[0], parameters.scale_columns)
    parameters.input_type = OUTPUT_TYPES.index(_INPUT_TYPES[x.dtype])
    parameters.scale_layout = SCALE_LAYOUTS.index(layout.value)


@functools.cache
def row_quantizer(device_index: int, name: str) -> RowQuantizer:
    """The kernel of a format on a GPU, loaded once in a process, as torch does with those of its operators."""
    return RowQuantizer(torch.device("cuda", device_index), name)
