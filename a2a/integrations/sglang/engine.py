"""integrations/sglang/engine: what is asked of SGLang, in one object, so that a stand-in can answer instead.

Owns the imports of SGLang and which name of it answers what. Refuses to know the exchange and the formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Engine:
    """The parts of an SGLang release that the dispatcher touches.

    Attributes:
        dispatch_output: makes what dispatch returns, of (hidden states, scales, top-k output, tensor to write into or
            None, dtype of the output).
        topk_output: makes the engine's top-k output of (weights, ids, router logits).
        materialize: gives the ids and weights of a top-k output that has left the choice to the runner.
        max_num_tokens: most tokens a rank brings in one round.
        dispatch_type: the format that the whole process was asked for: "bf16", "nvfp4" or "mxfp8".
        is_draft_model: whether the model being built drafts for another.
        tokens_per_rank: R of the running forward pass, or None when all ranks have equally many.
        quantize: `(wire format's name, rows, global scale) -> (data, linear scales)` by the engine's own kernels; None
            leaves it to this package.
    """

    dispatch_output: Callable[..., Any]
    topk_output: Callable[[Tensor, Tensor, Any], Any]
    materialize: Callable[[Any], Any]
    max_num_tokens: Callable[[], int]
    dispatch_type: Callable[[], str]
    is_draft_model: Callable[[], bool] = lambda: False
    tokens_per_rank: Callable[[], int | None] = lambda: None
    quantize: Callable[[str, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None


def installed_engine() -> Engine:
    """The SGLang that this process runs; 0.5.23's names. Imports its modules of MoE layers."""
    from sglang.srt.arg_groups.overrides import flashinfer_a2a_max_dispatch_tokens_per_rank
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.layers.moe.token_dispatcher.flashinfer import FlashinferDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker
    from sglang.srt.layers.moe.utils import get_flashinfer_a2a_dispatch_type
    from sglang.srt.runtime_context import get_flags, get_parallel, max_prefill_buffer_tokens

    def tokens_per_rank() -> int | None:
        counts = get_dp_global_num_tokens()
        if counts is None or len(counts) < 2:
            return None
        most: int = max(counts)
        return -(-most // int(get_parallel().attn_tp_size))

    def quantize(name: str, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if name == "nvfp4":
            from sglang.srt.layers.quantization.fp4_utils import fp4_quantize

            data, scales = fp4_quantize(rows, global_scale, is_sf_swizzled_layout=False)
        else:
            from flashinfer import mxfp8_quantize

            data, scales = mxfp8_quantize(rows, False)
        return data, scales

    return Engine(
        dispatch_output=FlashinferDispatchOutput,
        topk_output=StandardTopKOutput,
        materialize=lambda topk: topk.to_standard() if TopKOutputChecker.format_is_bypassed(topk) else topk,
        max_num_tokens=lambda: int(flashinfer_a2a_max_dispatch_tokens_per_rank(max_prefill_buffer_tokens())),
        dispatch_type=lambda: str(get_flashinfer_a2a_dispatch_type().value),
        is_draft_model=lambda: bool(get_flags().moe.speculative_context),
        tokens_per_rank=tokens_per_rank,
        quantize=quantize,
    )
