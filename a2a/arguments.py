"""arguments: what a caller may pass to a round: shapes, dtypes, devices, formats.

Owns every check of a verb's arguments that needs no peer and no state. Refuses to know rounds and memory: a check
either gives back what the round needs or raises, with the facts, before anything has happened.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from a2a.config import MAX_PAYLOADS, ExchangeConfig
from a2a.errors import ConfigError, ShapeError
from a2a.quant import ScaleLayout, WireFormat, wire_format
from a2a.transport import Quantize

_PLAIN: Final = frozenset([bool, int, float, str, torch.dtype])

SUM_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""What can be summed, and quantised from."""


def _is_conj_or_neg(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


_LAZY: Final = {
    **dict.fromkeys((torch.half, torch.float, torch.double), Tensor.is_neg),
    **dict.fromkeys((torch.chalf, torch.cfloat, torch.cdouble), _is_conj_or_neg),
}
"""Where torch may put off a negation or conjugation, so that the values are not those in memory: whether it has."""

_E8M0: Final = getattr(torch, "float8_e8m0fnu", None)
_NEUTRAL_E8M0: Final = 127


class Tokens(NamedTuple):
    """What a `dispatch_tokens` sends, by payload: hidden states, scales where the format has them, ids, weights.

    Attributes:
        wire: the format.
        to_quantize: whether hidden states become wire rows inside the exchange.
        widths: bytes of a row on the wire.
        shapes: columns and dtype of what is received.
        fills: the byte that padded rows are made of; None where they are left alone.
    """

    wire: WireFormat
    to_quantize: bool
    widths: tuple[int, ...]
    shapes: tuple[tuple[int, torch.dtype], ...]
    fills: tuple[int | None, ...]


class Arguments:
    """Checks the arguments of one rank's verbs.

    Args:
        config: the exchange.
        device: where every tensor must be.
        rank: named in the errors.

    Attributes:
        unit_scale: the fp32 scalar 1.0 on the device, the global scale of those who give none.
    """

    def __init__(self, config: ExchangeConfig, device: torch.device, rank: int) -> None:
        self.config = config
        self.device = device
        self.rank = rank
        self._combine_bytes_per_token = config.combine_bytes_per_token
        self.unit_scale = torch.ones((), dtype=torch.float32, device=device)

    def topk_ids(self, ids: Tensor) -> Tensor:
        """int32 or int64 `[n, k]`, `k` up to the object's top_k."""
        config = self.config
        fits = (
            is_plain(ids)
            and ids.dim() == 2
            and ids.dtype in (torch.int32, torch.int64)
            and 1 <= ids.shape[1] <= config.top_k
            and ids.is_contiguous()
            and ids.device == self.device
        )
        if not fits:
            raise ShapeError(
                what="token_selected_experts",
                got=describe(ids),
                wanted=f"a contiguous int32 or int64 tensor [n, k], 1 <= k <= top_k = {config.top_k}, on {self.device}",
                rank=self.rank,
            )
        return ids

    def payloads(self, payloads: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """1 to 8 contiguous `[n, *]`."""
        if not isinstance(payloads, list | tuple) or not 1 <= len(payloads) <= MAX_PAYLOADS:
            got = f"{len(payloads)} payloads" if isinstance(payloads, list | tuple) else describe(payloads)
            raise ShapeError(
                what="input_payloads", got=got, wanted=f"a list of 1 to {MAX_PAYLOADS} tensors", rank=self.rank
            )
        for index, rows in enumerate(payloads):
            self.check_matrix(f"input_payloads[{index}]", rows, (num_tokens, None), None)
        return list(payloads)

    def check_ids_payload(self, index: int | None, rows: Sequence[Tensor], topk_ids: Tensor) -> None:
        """Which payload holds the ids: None, or one of the ids' own shape."""
        if index is None:
            return
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(rows):
            raise ShapeError(
                what="expert_id_payload_index",
                got=index,
                wanted=f"the index of one of {len(rows)} payloads",
                rank=self.rank,
            )
        if rows[index].dtype not in (torch.int32, torch.int64) or rows[index].shape != topk_ids.shape:
            raise ShapeError(
                what=f"input_payloads[{index}], which expert_id_payload_index names",
                got=describe(rows[index]),
                wanted=f"int32 or int64 ids of shape {tuple(topk_ids.shape)}",
                rank=self.rank,
            )

    def check_matrix(self, what: str, tensor: Tensor, shape: tuple[int, int | None], dtype: torch.dtype | None) -> None:
        """A contiguous 2-D tensor on the device; None in `shape` and `dtype` stands for any."""
        device = self.device
        fits = (
            is_plain(tensor)
            and tensor.dim() == 2
            and tensor.shape[0] == shape[0]
            and shape[1] in (None, tensor.shape[1])
            and dtype in (None, tensor.dtype)
            and tensor.is_contiguous()
            and tensor.device == device
        )
        if not fits:
            columns = "*" if shape[1] is None else shape[1]
            raise ShapeError(
                what=what,
                got=describe(tensor),
                wanted=f"a contiguous tensor [{shape[0]}, {columns}]{f' of {dtype}' if dtype else ''} on {device}",
                rank=self.rank,
            )

    def check_eplb(self, stats: Tensor | None) -> None:
        """int32 `[Es]`, only where the object was built for it."""
        wanted = self.config.eplb_stats_num_experts
        if stats is None:
            return
        if not wanted:
            raise ConfigError(
                what="eplb_local_stats",
                got=describe(stats),
                wanted="None, since the object was built with eplb_stats_num_experts = 0",
                rank=self.rank,
            )
        device = self.device
        fits = (
            is_plain(stats)
            and tuple(stats.shape) == (wanted,)
            and stats.dtype == torch.int32
            and stats.is_contiguous()
            and stats.device == device
        )
        if not fits:
            raise ShapeError(
                what="eplb_local_stats",
                got=describe(stats),
                wanted=f"a contiguous int32 tensor [{wanted}] on {device}",
                rank=self.rank,
            )

    def fill_byte(self, dtype: torch.dtype) -> int | None:
        """The byte that padded rows of a payload are made of; None where they are left alone."""
        if self.config.scrub != "all":
            return None
        return _NEUTRAL_E8M0 if _E8M0 is not None and dtype == _E8M0 else 0

    def tokens(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scale: Tensor | None,
        global_scale: Tensor | None,
        scale_layout: ScaleLayout,
    ) -> Tokens:
        """The tensors of `dispatch_tokens`. What is found depends on nothing but how they `look`."""
        n, k = self.topk_ids(topk_ids).shape
        wire, to_quantize = self._wire(hidden_states, scale, global_scale, scale_layout)
        self.check_matrix("topk_weights", topk_weights, (n, k), torch.float32)
        hidden = self._hidden_size(wire, hidden_states, n, to_quantize)
        alignment = self.config.mx_alignment if to_quantize else 0
        shapes = [(wire.data_width(hidden, alignment), wire.data_dtype)]
        fills = [0]
        if wire.scales_dtype is not None:
            scales_width = wire.scales_width(hidden, alignment)
            if scale is not None:
                self.check_matrix("scale", scale, (n, scales_width), wire.scales_dtype)
            shapes.append((scales_width, wire.scales_dtype))
            fills.append(wire.neutral_scale_byte)
        shapes += [(k, torch.int32), (k, torch.float32)]
        fills += [0, 0]
        scrubbed = self.config.scrub == "all"
        return Tokens(
            wire,
            to_quantize,
            widths=tuple(columns * dtype.itemsize for columns, dtype in shapes),
            shapes=tuple(shapes),
            fills=tuple(fill if scrubbed else None for fill in fills),
        )

    def quantize(self, tokens: Tokens, global_scale: Tensor | None) -> Quantize | None:
        """How hidden states become wire rows: None if they are that already."""
        if not tokens.to_quantize:
            return None
        if global_scale is None and tokens.wire.needs_global_scale:
            global_scale = self.unit_scale
        return Quantize(tokens.wire, self.config.mx_alignment, global_scale)

    def _wire(
        self, hidden_states: Tensor, scale: Tensor | None, global_scale: Tensor | None, scale_layout: ScaleLayout
    ) -> tuple[WireFormat, bool]:
        """The object's wire format, and whether hidden states have yet to be quantised to it."""
        config = self.config
        if config.wire_format is None:
            raise ConfigError(
                what="wire_format",
                got=None,
                wanted="a wire format at construction to use dispatch_tokens",
                change="pass wire_format=..., or call dispatch with payloads of your own",
                rank=self.rank,
            )
        wire = wire_format(config.wire_format)
        if not isinstance(hidden_states, Tensor):
            raise ShapeError(
                what="hidden_states",
                got=describe(hidden_states),
                wanted="a tensor [n, hidden_size]",
                rank=self.rank,
            )
        if global_scale is not None:
            if not wire.needs_global_scale:
                raise ConfigError(
                    what="global_scale", got="a tensor", wanted=f"None, since {wire.name} has none", rank=self.rank
                )
            fits = (
                is_plain(global_scale)
                and global_scale.numel() == 1
                and global_scale.dtype == torch.float32
                and global_scale.device == self.device
            )
            if not fits:
                raise ShapeError(
                    what="global_scale",
                    got=describe(global_scale),
                    wanted=f"one float32 on {self.device}",
                    rank=self.rank,
                )
        self.check_layout("scale_layout", scale_layout)
        one_byte_scales = wire.scales_dtype is not None and wire.scales_dtype.itemsize == 1
        if scale_layout is not ScaleLayout.LINEAR and not one_byte_scales:
            raise ConfigError(
                what="scale_layout",
                got=scale_layout.name,
                wanted=f"LINEAR, since {wire.name} has no scales of one byte",
                rank=self.rank,
            )
        on_wire = hidden_states.dtype == wire.data_dtype
        if wire.scales_dtype is None:
            if scale is not None:
                raise ConfigError(
                    what="scale", got="a tensor", wanted=f"None, since {wire.name} has no scales", rank=self.rank
                )
            if not on_wire:
                raise ShapeError(
                    what="hidden_states",
                    got=describe(hidden_states),
                    wanted=f"{wire.data_dtype}, the wire format",
                    rank=self.rank,
                )
            return wire, False
        if on_wire:
            if scale is None:
                raise ConfigError(
                    what="scale",
                    got=None,
                    wanted=f"the scales of hidden states that are already {wire.name}",
                    rank=self.rank,
                )
            return wire, False
        if hidden_states.dtype not in SUM_DTYPES:
            raise ShapeError(
                what="hidden_states",
                got=describe(hidden_states),
                wanted=f"bf16, fp16 or fp32 to be quantised, or {wire.data_dtype} with its scales",
                rank=self.rank,
            )
        if scale is not None:
            raise ConfigError(
                what="scale",
                got="a tensor",
                wanted=f"None for {hidden_states.dtype} hidden states, which the exchange quantises itself",
                rank=self.rank,
            )
        return wire, True

    def _hidden_size(self, wire: WireFormat, hidden_states: Tensor, num_tokens: int, to_quantize: bool) -> int:
        """Elements of a hidden-state row before packing, at most those the workspace was built for."""
        self.check_matrix("hidden_states", hidden_states, (num_tokens, None), hidden_states.dtype)
        config = self.config
        most = wire.padded_size(config.hidden_size, config.mx_alignment)
        if to_quantize or wire.scales_dtype is None:
            width, most, alignment = hidden_states.shape[1], config.hidden_size, config.mx_alignment
        else:
            width, alignment = hidden_states.shape[1] * (2 if wire.packed else 1), 0
        reasons = wire.check(width, alignment) if 1 <= width <= most else [f"1 to {most} elements"]
        if reasons:
            raise ShapeError(
                what="hidden_states",
                got=describe(hidden_states),
                wanted=f"rows that {wire.name} can carry: " + "; ".join(reasons),
                rank=self.rank,
            )
        return width

    def switch(self, what: str, value: Any) -> bool:
        """Whether a value stands for yes."""
        try:
            return bool(value)
        except Exception:
            # Tensors of several elements, or of none.
            raise ConfigError(what=what, got=value, wanted="True or False", rank=self.rank) from None

    def check_layout(self, what: str, layout: object) -> None:
        """One of the scale layouts themselves, not its name."""
        if not isinstance(layout, ScaleLayout):
            allowed = ", ".join(f"ScaleLayout.{each.name}" for each in ScaleLayout)
            raise ConfigError(what=what, got=layout, wanted=f"one of {allowed}", rank=self.rank)

    def columns(self, hidden_size: Any, dtype: Any) -> int:
        """The columns of a combine view, where they are an integer of a type of their own."""
        if not isinstance(dtype, torch.dtype):
            raise ShapeError(what="dtype", got=dtype, wanted="a torch.dtype", rank=self.rank)
        try:
            if not isinstance(hidden_size, bool):
                return operator.index(hidden_size)
        except (TypeError, ValueError, RuntimeError):
            # What is no number, and tensors of several: told below.
            pass
        raise ShapeError(what="hidden_size", got=hidden_size, wanted="an integer", rank=self.rank)

    def check_combine_width(self, wire_bytes: int, hidden_size: int, dtype: torch.dtype) -> None:
        """A combine row fits the workspace."""
        most = self._combine_bytes_per_token
        if not 0 <= wire_bytes <= most:
            raise ShapeError(
                what="combine payload",
                got=f"{hidden_size} x {dtype}, {wire_bytes} bytes a row on the wire",
                wanted=f"at most the {most} bytes a row that the workspace was built for",
                change="raise hidden_size or combine_dtype_bytes_per_elem at construction",
                rank=self.rank,
            )

    def check_combine_payload(self, payload: Tensor, runtime_max_tokens_per_rank: int, low_precision: bool) -> None:
        """`[ep, R, H']` or `[ep*R, H']` of what can be summed, or travels with low precision."""
        ep, most = self.config.ep_size, runtime_max_tokens_per_rank
        allowed = (*SUM_DTYPES, torch.float8_e4m3fn) if low_precision else SUM_DTYPES
        fits = (
            is_plain(payload)
            and payload.dtype in allowed
            and payload.is_contiguous()
            and payload.device == self.device
            and payload.dim() in (2, 3)
            and tuple(payload.shape[:-1]) in ((ep, most), (ep * most,))
            and payload.shape[-1] >= 1
        )
        if not fits:
            raise ShapeError(
                what="payload",
                got=describe(payload),
                wanted=f"a contiguous tensor [{ep}, {most}, H'] or [{ep * most}, H'] of "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                + f" on {self.device}",
                rank=self.rank,
            )

    def in_blocks(self, payload: Tensor, runtime_max_tokens_per_rank: int) -> Tensor:
        """A checked combine payload as `[ep, R, H']`."""
        ep, most, width = self.config.ep_size, runtime_max_tokens_per_rank, payload.shape[-1]
        # Rows of one element count as contiguous with any stride; a view of another element size does not accept that.
        strides = (most * width, width, 1)
        return payload if payload.stride() == strides else payload.as_strided((ep, most, width), strides)

    def output(
        self,
        output_dtype: torch.dtype | None,
        output_scales: Tensor | None,
        output_scalar_scale: float | Tensor,
        sf_layout: ScaleLayout,
        payload: Tensor,
        low_precision: bool,
    ) -> tuple[Quantize | None, int, torch.dtype]:
        """How the output is made, its columns and its dtype."""
        self.check_layout("sf_layout", sf_layout)
        scalar = output_scalar_scale
        if not (isinstance(scalar, int | float) or (is_plain(scalar) and scalar.numel() == 1)):
            raise ShapeError(
                what="output_scalar_scale",
                got=describe(scalar),
                wanted="a number, or a tensor of one element",
                rank=self.rank,
            )
        width = payload.shape[-1]
        dtype = output_dtype
        if dtype is None:
            dtype = torch.bfloat16 if low_precision else payload.dtype
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(what="output_dtype", got=dtype, wanted="None or a torch.dtype", rank=self.rank)
        packed = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
        scalar_given = isinstance(output_scalar_scale, Tensor) or output_scalar_scale != 1.0
        if dtype in SUM_DTYPES:
            if low_precision and dtype != torch.bfloat16:
                raise ConfigError(
                    what="output_dtype", got=str(dtype), wanted="bfloat16 with use_low_precision", rank=self.rank
                )
            if output_scales is not None or scalar_given or sf_layout is not ScaleLayout.LINEAR:
                raise ConfigError(
                    what="output_scales, output_scalar_scale, sf_layout",
                    got="values for quantised output",
                    wanted=f"their defaults, since {dtype} output is not quantised",
                    rank=self.rank,
                )
            return None, width, dtype
        if dtype not in (torch.float8_e4m3fn, torch.uint8, packed):
            raise ConfigError(
                what="output_dtype",
                got=str(dtype),
                wanted="float16, bfloat16, float32, float8_e4m3fn (mxfp8) or uint8 (nvfp4, mxfp4)",
                rank=self.rank,
            )
        scales_dtype = output_scales.dtype if is_plain(output_scales) else None
        name = {
            (True, torch.uint8): "mxfp8",
            (True, _E8M0): "mxfp8",
            (False, torch.float8_e4m3fn): "nvfp4",
            (False, torch.uint8): "mxfp4",
            (False, _E8M0): "mxfp4",
        }.get((dtype == torch.float8_e4m3fn, scales_dtype))
        if scales_dtype is None or name is None:
            raise ConfigError(
                what="output_scales",
                got=describe(output_scales),
                wanted="a tensor whose dtype says the format: uint8 for mxfp8 and mxfp4, float8_e4m3fn for nvfp4",
                rank=self.rank,
            )
        wire = wire_format(name)
        reasons = wire.check(width, 0)
        if reasons:
            raise ShapeError(what=f"{name} output", got=f"rows of {width}", wanted="; ".join(reasons), rank=self.rank)
        if scalar_given and not wire.needs_global_scale:
            raise ConfigError(
                what="output_scalar_scale",
                got=output_scalar_scale,
                wanted=f"1.0, since {name} has no global scale",
                rank=self.rank,
            )
        scale: Tensor | None = None
        if wire.needs_global_scale:
            scale = self.unit_scale
            if isinstance(output_scalar_scale, Tensor):
                scale = output_scalar_scale.to(dtype=torch.float32, device=payload.device)
            elif scalar_given:
                # Written by a kernel: a copy from the host would wait for the stream, and void a capture.
                scale = torch.full((), output_scalar_scale, dtype=torch.float32, device=payload.device)
        return Quantize(wire, 0, scale), wire.data_width(width, 0), dtype


def look(*arguments: Any) -> tuple[Hashable, ...] | None:
    """All that a check asks of arguments, the contents of tensors apart; None where one is like nothing else.

    Arguments that look the same pass the same checks: a tensor is its shape, dtype, device and contiguity, a plain
    value its type and itself (1 is not True is not 1.0). Tensors that are not in memory as they are look like nothing.
    """
    # One flat list, as making and hashing a tuple for each costs more than what is in it. The first entry of an
    # argument (None, a shape or a type) says how many it has, so that other arguments never make this list.
    seen: list[Any] = []
    try:
        for each in arguments:
            if each is None:
                seen.append(None)
                continue
            kind = type(each)
            if kind is Tensor or kind is Parameter:
                dtype = each.dtype
                lazy = _LAZY.get(dtype)
                if (not each.data_ptr() and each.numel()) or (lazy is not None and lazy(each)):
                    return None
                seen += (each.shape, dtype, each.device, each.is_contiguous())
            elif kind is ScaleLayout:
                # There is one of each, and an enumeration's own hash is Python.
                seen += (kind, id(each))
            elif kind in _PLAIN:
                seen += (kind, each)
            else:
                return None
    except RuntimeError:
        # No memory, or no shape.
        return None
    return tuple(seen)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor whose elements lie in memory, as they are and where its strides say."""
    return isinstance(value, Tensor) and not _oddity(value)


def describe(value: object) -> str:
    """A tensor in words for an error; anything else as it prints."""
    if not isinstance(value, Tensor):
        return repr(value)
    kind = _oddity(value)
    if value.is_nested:
        return f"a {kind} {value.dtype} tensor on {value.device}"
    if not kind and not value.is_contiguous():
        kind = "non-contiguous"
    return f"a {kind}{' ' if kind else ''}{value.dtype} tensor {list(value.shape)} on {value.device}"


def _oddity(tensor: Tensor) -> str:
    """Why the bytes in memory are not the elements of a tensor; empty where they are."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").removeprefix("_")
    if tensor.is_quantized:
        return "quantized"
    if _is_conj_or_neg(tensor):
        return "lazily negated or conjugated"
    # Fake tensors, those of a collective still under way, those whose memory was given back.
    if tensor.numel() and not _address(tensor):
        return "memoryless"
    return ""


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Of the kinds of tensors that torch wraps, such as those that it differentiates as functions.
        return 0
