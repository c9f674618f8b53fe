"""config: what is exchanged; model presets and bench plans read from configs/.

Owns the values that must be equal on all ranks and the limits on them. Refuses to know where bytes lie (layout) or who
the ranks are (comm).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Final

from a2a.errors import ConfigError
from a2a.quant import WIRE_FORMATS, wire_format

ABI_VERSION: Final = 1
"""Raised whenever an offset, a signal or a byte of control state changes meaning."""

MAX_EP_SIZE: Final = 256
MAX_TOP_K: Final = 64
MAX_PAYLOADS: Final = 8
ROW_ORDERS: Final = ("compact", "token")
SCRUBS: Final = ("ids", "all", None)
ELEMENT_SIZES: Final = (0, 1, 2, 4)
"""Bytes per element on the wire; 0 stands for packed 4-bit, two elements a byte."""

ID_BYTES: Final = 4
WEIGHT_BYTES: Final = 4
LOW_PRECISION_BLOCK: Final = 128
"""Elements that share one fp32 scale on the combine wire with `use_low_precision`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Everything that forms an address, equal on all ranks. Values are checked on construction.

    Attributes:
        ep_size: ranks in the expert-parallel group, 1..256.
        max_num_tokens: capacity, local tokens per rank and round, >= 1.
        top_k: picks per token, 1..64.
        num_experts: global experts, >= ep_size.
        hidden_size: elements of a hidden-state row, >= 1.
        wire_format: name of the dispatch wire format, or None when the row size is given in bytes.
        mx_alignment: multiple to which mxfp8 rows are padded, in elements; 0 means the block size.
        dispatch_dtype_bytes_per_elem: 4, 2, 1, or 0 for packed 4-bit.
        dispatch_scale_bytes_per_token: bytes of scales beside a row.
        combine_dtype_bytes_per_elem: 4, 2, or 1 (the e4m3 wire, whose scales are added).
        extra_payload_bytes_per_token: bytes of further payloads of a token.
        placement: rank of each expert, or None for contiguous shares.
        name: tells two groups of objects apart.
        row_order: "compact" or "token".
        scrub: "ids", "all" or None.
        eplb_stats_num_experts: length of the statistics vector gathered with a round; 0 for none.
        enable_rank_mask: whether ranks may be masked out.
        num_contexts: independent rounds in flight, >= 1.

    Raises:
        ConfigError: naming the value and the rule.
    """

    ep_size: int
    max_num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    wire_format: str | None = None
    mx_alignment: int = 0
    dispatch_dtype_bytes_per_elem: int = 2
    dispatch_scale_bytes_per_token: int = 0
    combine_dtype_bytes_per_elem: int = 2
    extra_payload_bytes_per_token: int = 0
    placement: tuple[int, ...] | None = None
    name: str = "default"
    row_order: str = "compact"
    scrub: str | None = "ids"
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    num_contexts: int = 1

    def __post_init__(self) -> None:
        _in_range("ep_size", self.ep_size, 1, MAX_EP_SIZE)
        _in_range("max_num_tokens", self.max_num_tokens, 1, None)
        _in_range("top_k", self.top_k, 1, MAX_TOP_K)
        _in_range("num_experts", self.num_experts, self.ep_size, None)
        _in_range("hidden_size", self.hidden_size, 1, None)
        _in_range("mx_alignment", self.mx_alignment, 0, None)
        _one_of("dispatch_dtype_bytes_per_elem", self.dispatch_dtype_bytes_per_elem, ELEMENT_SIZES)
        _in_range("dispatch_scale_bytes_per_token", self.dispatch_scale_bytes_per_token, 0, None)
        _one_of("combine_dtype_bytes_per_elem", self.combine_dtype_bytes_per_elem, (1, 2, 4))
        _in_range("extra_payload_bytes_per_token", self.extra_payload_bytes_per_token, 0, None)
        _one_of("row_order", self.row_order, ROW_ORDERS)
        _one_of("scrub", self.scrub, SCRUBS)
        _in_range("eplb_stats_num_experts", self.eplb_stats_num_experts, 0, None)
        _one_of("enable_rank_mask", self.enable_rank_mask, (True, False))
        _in_range("num_contexts", self.num_contexts, 1, None)
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(what="name", got=self.name, wanted="a non-empty string")
        if self.wire_format is None and self.dispatch_dtype_bytes_per_elem == 0 and self.hidden_size % 2:
            raise ConfigError(what="hidden_size", got=self.hidden_size, wanted="an even number for packed 4-bit rows")
        if self.wire_format is not None:
            self._check_wire_format(self.wire_format)
        elif self.mx_alignment:
            raise ConfigError(what="mx_alignment", got=self.mx_alignment, wanted="0 unless wire_format is 'mxfp8'")
        if self.placement is not None:
            _check_placement(self.placement, self.num_experts, self.ep_size)

    def _check_wire_format(self, name: str) -> None:
        if name not in WIRE_FORMATS:
            raise ConfigError(what="wire_format", got=name, wanted="one of " + ", ".join(WIRE_FORMATS))
        reasons = wire_format(name).check(self.hidden_size, self.mx_alignment)
        if reasons:
            raise ConfigError(what="wire_format", got=name, wanted="a shape it can carry", change="; ".join(reasons))
        given = (self.dispatch_dtype_bytes_per_elem, self.dispatch_scale_bytes_per_token)
        if given != (2, 0):
            raise ConfigError(
                what="dispatch_dtype_bytes_per_elem, dispatch_scale_bytes_per_token",
                got=given,
                wanted=f"neither, since wire_format {name!r} decides them",
            )

    @property
    def data_bytes_per_token(self) -> int:
        """Bytes of one hidden-state row on the dispatch wire, scales apart."""
        if self.wire_format is not None:
            return wire_format(self.wire_format).data_bytes_per_token(self.hidden_size, self.mx_alignment)
        size = self.dispatch_dtype_bytes_per_elem
        return self.hidden_size * size if size else self.hidden_size // 2

    @property
    def scale_bytes_per_token(self) -> int:
        """Bytes of scales beside one row."""
        if self.wire_format is not None:
            return wire_format(self.wire_format).scale_bytes_per_token(self.hidden_size, self.mx_alignment)
        return self.dispatch_scale_bytes_per_token

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes that one token may take on the dispatch wire: row, scales, ids, weights, extra payloads."""
        ids_and_weights = self.top_k * (ID_BYTES + WEIGHT_BYTES)
        return (
            self.data_bytes_per_token + self.scale_bytes_per_token + ids_and_weights + self.extra_payload_bytes_per_token
        )

    @property
    def combine_bytes_per_token(self) -> int:
        """Bytes that one row may take in the combine area: row, and its scales on the e4m3 wire."""
        if self.combine_dtype_bytes_per_elem == 1:
            return low_precision_bytes_per_token(self.hidden_size)
        return self.hidden_size * self.combine_dtype_bytes_per_elem

    def facts(self) -> dict[str, Any]:
        """Plain data of every field and the ABI version, for comparison between ranks."""
        return {**dataclasses.asdict(self), "abi_version": ABI_VERSION}

    def digest(self) -> str:
        """Hash of `facts`, equal on two ranks if and only if they would form the same addresses."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()


def low_precision_bytes_per_token(hidden_size: int) -> int:
    """Bytes of an e4m3 row and its fp32 scales, 4-byte aligned so that the scales can be read as fp32."""
    blocks = -(-hidden_size // LOW_PRECISION_BLOCK)
    return -(-hidden_size // 4) * 4 + 4 * blocks


def _in_range(what: str, got: object, low: int, high: int | None) -> None:
    ok = isinstance(got, int) and not isinstance(got, bool) and got >= low and (high is None or got <= high)
    if not ok:
        bound = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
        raise ConfigError(what=what, got=got, wanted=bound)


def _one_of(what: str, got: object, allowed: tuple[object, ...]) -> None:
    # 1 == True in Python, yet a count is not a switch.
    if not any(got == item and type(got) is type(item) for item in allowed):
        raise ConfigError(what=what, got=got, wanted="one of " + ", ".join(map(repr, allowed)))


def _check_placement(placement: tuple[int, ...], num_experts: int, ep_size: int) -> None:
    if len(placement) != num_experts:
        raise ConfigError(what="placement", got=f"{len(placement)} entries", wanted=f"num_experts = {num_experts}")
    for expert, rank in enumerate(placement):
        _in_range(f"placement[{expert}]", rank, 0, ep_size - 1)
