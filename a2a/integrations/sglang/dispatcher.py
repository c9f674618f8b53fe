"""integrations/sglang/dispatcher: the token dispatcher of an MoE layer of SGLang, with an exchange of this package.

Owns the order of payloads, the format of each layer's rows, the id of empty slots and where the experts write. Refuses
to know how rows move, and SGLang itself beyond what `engine` names.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from a2a.alltoall import MoeAlltoAll, narrow_ids
from a2a.errors import ConfigError, ShapeError, StateError
from a2a.integrations.rows import RowFormat
from a2a.integrations.sglang.arguments import DROPS_NEGATIVE_IDS, WRITES_IN_PLACE
from a2a.integrations.sglang.engine import Engine
from a2a.integrations.shared_exchange import Exchanges
from a2a.quant import ScaleLayout, swizzle_scales

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class _Round:
    """What is known between dispatch and combine."""

    runtime_max_tokens_per_rank: int
    area: Tensor | None


class Dispatcher:
    """Rows of all ranks to this rank's experts and back, as SGLang's layers call it.

    Building is collective: layers are built in the same order on all ranks of the group.

    Args:
        engine: what is asked of SGLang.
        exchanges: shared by the dispatchers of this process.
        group: torch process group of the exchange, or what `MoeAlltoAll` takes as `comm`.
        router_topk, num_experts, hidden_size: of the layer.
        num_local_experts, params_dtype: taken, since layers pass them; not needed.
        moe_runner_config: names the runner in its `runner_backend`; None or no runner: experts that take tensors and
            give tensors.
        enable_sp_prefill_a2a: the dispatcher is for the prefill of a model that shards sequences, whose rounds may be
            in flight beside those of decoding.

    Raises:
        ConfigError, MismatchError, Unsupported: on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        exchanges: Exchanges,
        group: Any,
        router_topk: int,
        num_experts: int,
        num_local_experts: int | None = None,
        hidden_size: int = 0,
        params_dtype: torch.dtype | None = None,
        moe_runner_config: Any = None,
        enable_sp_prefill_a2a: bool = False,
    ) -> None:
        self._engine = engine
        self._layer_quant: dict[str, Any] = {}
        self._hidden_size = hidden_size
        self._dispatch_type = engine.dispatch_type()
        runner = getattr(moe_runner_config, "runner_backend", None)
        self._runner = str(getattr(runner, "value", runner))
        self.invalid_token_expert_id = -1 if self._runner in DROPS_NEGATIVE_IDS else num_experts
        self._writes_in_place = self._runner in WRITES_IN_PLACE
        # A model that drafts for another has rounds of its own in flight beside the other's.
        purpose = "sglang draft" if engine.is_draft_model() else "sglang"
        self._exchange = exchanges.of(group, purpose + " prefill" if enable_sp_prefill_a2a else purpose)
        self._exchange.grow(
            max_num_tokens=engine.max_num_tokens(),
            top_k=router_topk,
            num_experts=num_experts,
            hidden_size=hidden_size,
            # 16-bit rows are the widest, and any layer may fall back to them.
            row_bytes_per_token=2 * hidden_size,
        )
        self._round: _Round | None = None
        self._received: Any = None
        self._combined: Tensor | None = None

    @property
    def moe(self) -> MoeAlltoAll:
        """The exchange as it is now."""
        return self._exchange.moe

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """What the layer's weights are: `input_global_scale` of NVFP4 layers, `use_mxfp8`, `weight_dtype`."""
        self._layer_quant = quant_config or {}

    def row_format(self) -> RowFormat:
        """The format of this layer's rows: the process's, where the layer is of that kind; else 16-bit rows."""
        kind = self._dispatch_type
        if kind == "bf16":
            return RowFormat("bf16")
        if kind == "nvfp4":
            return RowFormat("nvfp4" if self._layer_quant.get("input_global_scale") is not None else "bf16")
        if kind == "mxfp8":
            return RowFormat("mxfp8" if self._layer_quant.get("use_mxfp8", False) else "bf16")
        raise ConfigError(what="dispatch type", got=kind, wanted="'bf16', 'nvfp4' or 'mxfp8', resolved from 'auto'")

    # ---- dispatch ------------------------------------------------------------------------------------------------

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any:
        """Quantise as the layer needs it, and send.

        Args:
            hidden_states: 16-bit `[n, H]`, n >= 0; not modified.
            topk_output: the engine's, with `topk_ids [n, k]` and `topk_weights [n, k]`.

        Returns:
            The engine's dispatch output: hidden states `[ep * R, W]`, scales `[ep * R, S]` (in 128x4 tiles for NVFP4
            experts of CUTLASS's kind) or None, ids with the runner's invalid id in empty slots, weights; the combine
            area as the tensor to write into, for runners that write in place.

        Host synchronisation: none on GPUs.

        Raises:
            ConfigError, ShapeError: on this rank; nothing was sent.
            StateError, MismatchError, PeerTimeout, PeerLost: as `MoeAlltoAll.dispatch`.
        """
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> None:
        """The first half: launch. See `dispatch`."""
        topk = self._engine.materialize(topk_output)
        form = self.row_format()
        self._check_rows(hidden_states)
        data, scales = self._quantized(form, hidden_states)
        ids, weights = narrow_ids(topk.topk_ids).contiguous(), topk.topk_weights.contiguous()
        payloads = [data, ids, weights] if scales is None else [data, scales, ids, weights]
        n, most = hidden_states.shape[0], self._engine.tokens_per_rank()
        most = max(1, n if most is None else most)
        moe = self.moe
        views = moe.dispatch(ids, payloads, most, self.invalid_token_expert_id, len(payloads) - 2)
        flat = [view.flatten(0, 1) for view in views]
        area = None
        if self._writes_in_place:
            area = moe.get_combine_payload_tensor_in_workspace(most, self._hidden_size, hidden_states.dtype)
            area = area.flatten(0, 1)
        self._round = _Round(most, area)
        sent_scales = None if scales is None else flat[1]
        if sent_scales is not None and form.name == "nvfp4" and self._runner == "flashinfer_cutlass":
            sent_scales = swizzle_scales(sent_scales, ScaleLayout.SWIZZLED_128X4)
        self._received = self._engine.dispatch_output(
            flat[0],
            sent_scales,
            self._engine.topk_output(flat[-1], flat[-2], getattr(topk, "router_logits", None)),
            area,
            hidden_states.dtype,
        )

    def dispatch_b(self) -> Any:
        """The second half: what was received. See `dispatch`."""
        if self._received is None:
            raise self._out_of_turn("dispatch_b", "call dispatch_a first")
        received, self._received = self._received, None
        return received

    def _check_rows(self, hidden_states: Tensor) -> None:
        quantizes = self._layer_quant.get("weight_dtype") in _FP8 and self._runner in DROPS_NEGATIVE_IDS
        allowed = (torch.bfloat16,) if quantizes else (torch.bfloat16, torch.float16)
        if hidden_states.dtype not in allowed:
            raise ShapeError(
                what="hidden_states",
                got=hidden_states.dtype,
                wanted=" or ".join(map(str, allowed)) + f" for runner {self._runner}",
                rank=self.moe.ep_rank,
            )

    def _quantized(self, form: RowFormat, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if form.name == "bf16":
            return rows.contiguous(), None
        scale = self._layer_quant.get("input_global_scale") if form.name == "nvfp4" else None
        by_engine = self._engine.quantize
        if by_engine is None or not rows.is_cuda or rows.shape[0] == 0:
            # Kernels of an engine need not know empty tensors.
            data, scales = form.quantize(rows, scale)
        else:
            data, scales = by_engine(form.name, rows, scale)
            scales = scales.reshape(rows.shape[0], -1)
        # Scales are bytes to this engine, of whichever format.
        return data.contiguous(), None if scales is None else scales.contiguous().view(torch.uint8)

    # ---- combine -------------------------------------------------------------------------------------------------

    def combine(self, combine_input: Any) -> Tensor:
        """Sum every token's rows over the ranks of its experts.

        Args:
            combine_input: the engine's, with `hidden_states [ep * R, H']`; weights applied and reduced over this rank's
                experts. The tensor that dispatch gave to write into is not copied.

        Returns:
            `[n, H']`, reduced over all ranks.

        Host synchronisation: none on GPUs.

        Raises:
            StateError: without a dispatch before it. Others as `MoeAlltoAll.combine`.
        """
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """The first half: launch. See `combine`."""
        if self._round is None:
            raise self._out_of_turn("combine_a", "call dispatch first")
        this, rows = self._round, combine_input.hidden_states
        in_workspace = this.area is not None and rows.data_ptr() == this.area.data_ptr()
        self._combined = self.moe.combine(
            rows.contiguous(), this.runtime_max_tokens_per_rank, payload_in_workspace=in_workspace
        )
        self._round = None

    def combine_b(self) -> Tensor:
        """The second half: the sums. See `combine`."""
        if self._combined is None:
            raise self._out_of_turn("combine_b", "call combine_a first")
        combined, self._combined = self._combined, None
        return combined

    def _out_of_turn(self, verb: str, change: str) -> StateError:
        state = "idle" if self._round is None else "dispatched"
        return StateError(rank=self.moe.ep_rank, call=verb, state=state, change=change)


def dispatcher_class(base: Any, find_engine: Callable[[], Engine]) -> type:
    """`Dispatcher` as a class of the engine's own kind; its objects share one set of exchanges."""
    exchanges = Exchanges()

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        base.__init__(self)
        Dispatcher.__init__(self, find_engine(), exchanges, *arguments, **keywords)

    def set_quant_config(self: Any, quant_config: dict[str, Any]) -> None:
        base.set_quant_config(self, quant_config)
        Dispatcher.set_quant_config(self, quant_config)

    return types.new_class(
        "A2ADispatcher",
        (Dispatcher, base),
        {},
        lambda body: body.update(__init__=__init__, set_quant_config=set_quant_config, exchanges=exchanges),
    )
