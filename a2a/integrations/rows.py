"""integrations/rows: how a hidden-state row travels, in the terms in which engines ask for it.

Owns the sizes, the empty tensors and the quantising of rows in a named wire format. Refuses to know which engine asks
and how rows move.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from a2a.errors import ShapeError
from a2a.quant import WireFormat, wire_format


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """A wire format and the multiple, in elements, to which its rows are padded (0: its block).

    Attributes:
        name: "bf16" (16-bit rows of either kind, as they are), "nvfp4", "mxfp8" or "fp8_block".
        alignment: only for mxfp8; 256 for experts of TensorRT-LLM's MXFP4 x MXFP8 kind.
    """

    name: str
    alignment: int = 0

    @property
    def wire(self) -> WireFormat:
        """Sizes and bytes of the format."""
        return wire_format(self.name)

    def data_bytes_per_token(self, hidden_size: int) -> int:
        """Bytes of one row, padding included."""
        return self.wire.data_bytes_per_token(hidden_size, self.alignment)

    def scale_bytes_per_token(self, hidden_size: int) -> int:
        """Bytes of one row of scales, those of the padding included."""
        return self.wire.scale_bytes_per_token(hidden_size, self.alignment)

    def bytes_per_token(self, hidden_size: int) -> int:
        """Bytes of a row and its scales.

        Raises:
            ShapeError: the format cannot carry rows of that many elements.
        """
        reasons = self.wire.check(hidden_size, self.alignment)
        if reasons:
            raise ShapeError(
                what="hidden_size", got=hidden_size, wanted=f"rows that {self.name} can carry: " + "; ".join(reasons)
            )
        return self.data_bytes_per_token(hidden_size) + self.scale_bytes_per_token(hidden_size)

    def quantize(self, rows: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Rows `[n, H]` as they travel: data, and linear scales or None. 16-bit rows are returned as they are.

        Args:
            rows: bf16, fp16 or fp32, on any device, n >= 0; not modified.
            global_scale: fp32 numbers for nvfp4, of which the first counts, as engines keep one for each expert and
                their kernels read the first; None for 1.0. Other formats have none and leave it alone.

        No host synchronisation.
        """
        if self.name == "bf16":
            return rows, None
        scale = None
        if self.wire.needs_global_scale and global_scale is not None:
            scale = global_scale.reshape(-1)[:1].to(rows.device, torch.float32).reshape(())
        return self.wire.quantize(rows, alignment=self.alignment, global_scale=scale)
