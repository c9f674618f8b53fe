"""config: what is exchanged; model presets and bench plans read from configs/.

Owns the values that must be equal on all ranks and the limits on them. Refuses to know where bytes lie (layout) or who
the ranks are (comm).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import types
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from a2a.errors import ConfigError
from a2a.quant import WIRE_FORMATS, wire_format

ABI_VERSION: Final = 1
"""Raised whenever an offset, a signal or a byte of control state changes meaning."""

MAX_EP_SIZE: Final = 256
MAX_TOP_K: Final = 64
MAX_PAYLOADS: Final = 8
MAX_CONTEXTS: Final = 256
"""A doorbell names its context in one byte."""

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
        num_contexts: independent rounds in flight, 1..256.

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
        _in_range("num_contexts", self.num_contexts, 1, MAX_CONTEXTS)
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
        if not isinstance(name, str) or name not in WIRE_FORMATS:
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
        row = self.data_bytes_per_token + self.scale_bytes_per_token
        return row + ids_and_weights + self.extra_payload_bytes_per_token

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
    # 1 == True in Python, yet a count is not a switch. The type first: not everything can be compared.
    if not any(type(got) is type(item) and got == item for item in allowed):
        raise ConfigError(what=what, got=got, wanted="one of " + ", ".join(map(repr, allowed)))


def _check_placement(placement: tuple[int, ...], num_experts: int, ep_size: int) -> None:
    if len(placement) != num_experts:
        raise ConfigError(what="placement", got=f"{len(placement)} entries", wanted=f"num_experts = {num_experts}")
    for expert, rank in enumerate(placement):
        _in_range(f"placement[{expert}]", rank, 0, ep_size - 1)


_Table = TypeVar("_Table", "ModelPreset", "BenchPlan", "ClusterFigures")

MAIN_BENCH_PLAN: Final = "main"
"""The bench plan that runs when none is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """What one MoE layer of a published model exchanges, and where the numbers come from.

    Attributes:
        name: file name without suffix.
        hidden_size: elements of an exchanged row; the latent width where a model projects its tokens first.
        num_experts: routed experts of a layer.
        top_k: routed experts of a token.
        wire_format: what engines usually send.
        mx_alignment: multiple to which mxfp8 rows are usually padded, in elements; 0 for the block size.
        moe_intermediate_size: inner width of a routed expert.
        num_shared_experts: experts that every token passes; they are not exchanged.
        num_moe_layers: layers with routed experts; None where no source was found.
        gated: whether an expert has a gate beside its up projection.
        model_hidden_size: the model's own hidden size where it differs from the exchanged row.
        routing: name of the recorded routing shipped for this model, or None.
        source: address of the numbers.
        note: what a reader of the numbers must know.
    """

    name: str
    hidden_size: int
    num_experts: int
    top_k: int
    wire_format: str
    moe_intermediate_size: int
    num_shared_experts: int
    gated: bool
    source: str
    note: str = ""
    mx_alignment: int = 0
    num_moe_layers: int | None = None
    model_hidden_size: int | None = None
    routing: str | None = None

    def __post_init__(self) -> None:
        _in_range("hidden_size", self.hidden_size, 1, None)
        _in_range("num_experts", self.num_experts, 1, None)
        _in_range("top_k", self.top_k, 1, min(MAX_TOP_K, self.num_experts))
        _in_range("moe_intermediate_size", self.moe_intermediate_size, 1, None)
        _in_range("num_shared_experts", self.num_shared_experts, 0, None)
        _in_range("mx_alignment", self.mx_alignment, 0, None)
        _one_of("wire_format", self.wire_format, tuple(WIRE_FORMATS))
        if not self.source.startswith("https://"):
            raise ConfigError(what="source", got=self.source, wanted="an https address")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """A sweep of the bench: every combination of tokens, wire formats, routings and row orders.

    Attributes:
        name: file name without suffix.
        description: one line for `a2a presets`.
        preset: name of the model preset.
        ranks: processes started where no launcher has started any.
        tokens: tokens per rank, one run each.
        wire_formats: names; "preset" stands for the preset's usual one.
        routings: names, generators or files, as on the command line.
        rounds: timed rounds of each combination.
        row_orders: "compact", "token" or both.
        peers: other implementations timed beside a2a.
    """

    name: str
    description: str
    preset: str
    ranks: int
    tokens: tuple[int, ...]
    wire_formats: tuple[str, ...]
    routings: tuple[str, ...]
    rounds: int
    row_orders: tuple[str, ...] = ("compact",)
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _in_range("ranks", self.ranks, 1, MAX_EP_SIZE)
        _in_range("rounds", self.rounds, 1, None)
        for count in self.tokens:
            _in_range("tokens", count, 0, None)
        for key in ("tokens", "wire_formats", "routings", "row_orders"):
            if not getattr(self, key):
                raise ConfigError(what=key, got="an empty list", wanted="at least one entry")
        for order in self.row_orders:
            _one_of("row_orders", order, ROW_ORDERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFigures:
    """Measured figures of a kind of machine, on which `a2a plan` rests its prediction.

    Attributes:
        name: file name without suffix.
        transport: the transport they hold for.
        dispatch_gbps: 1e9 bytes/s at which dispatch moves rows.
        combine_gbps: 1e9 bytes/s at which combine reads and sums rows.
        fixed_us_per_phase: what a phase costs beside the rows.
        bandwidth_of: "rank" when each rank has the bandwidth for itself, "machine" when the ranks share it.
        bytes_counted: "link" when only rows that leave a rank cost, "logical" when those that stay cost too.
        max_ep_size_measured: a prediction beyond it is an extrapolation.
        source: how the figures were obtained.
    """

    name: str
    transport: str
    dispatch_gbps: float
    combine_gbps: float
    fixed_us_per_phase: float
    bandwidth_of: str
    bytes_counted: str
    max_ep_size_measured: int
    source: str

    def __post_init__(self) -> None:
        _one_of("bandwidth_of", self.bandwidth_of, ("rank", "machine"))
        _one_of("bytes_counted", self.bytes_counted, ("link", "logical"))
        _in_range("max_ep_size_measured", self.max_ep_size_measured, 1, MAX_EP_SIZE)
        for key in ("dispatch_gbps", "combine_gbps"):
            if getattr(self, key) <= 0:
                raise ConfigError(what=key, got=getattr(self, key), wanted="a number > 0")


def configs_dir() -> Path:
    """Directory of the shipped configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "configs", package.parent / "configs"):
        if (candidate / "models").is_dir():
            return candidate
    raise ConfigError(
        what="configs",
        got=f"neither {package / 'configs'} nor {package.parent / 'configs'}",
        wanted="the directory that ships with a2a",
        change="reinstall the package",
    )


def model_presets() -> tuple[str, ...]:
    """Names of the shipped model presets, sorted."""
    return _names("models")


def bench_plans() -> tuple[str, ...]:
    """Names of the shipped bench plans, sorted."""
    return _names("bench")


def model_preset(name: str) -> ModelPreset:
    """The preset of that name, in any case.

    Raises:
        ConfigError: unknown name (the known ones are listed), or a file that does not hold what it must.
    """
    return _read_table(_shipped("models", name, "preset"), ModelPreset)


def bench_plan(path_or_name: str) -> BenchPlan:
    """The bench plan in a TOML file, or the shipped plan of that name.

    Raises:
        ConfigError: no such plan, or a file with an unknown key, a missing key or a value of the wrong type.
    """
    path = Path(path_or_name)
    if path.suffix == ".toml" or path.is_file():
        return _read_table(path, BenchPlan)
    return _read_table(_shipped("bench", path_or_name, "config"), BenchPlan)


def cluster_figures(transport: str) -> ClusterFigures | None:
    """The shipped figures of a transport, or None where nothing was measured."""
    for name in _names("clusters"):
        figures = _read_table(configs_dir() / "clusters" / f"{name}.toml", ClusterFigures)
        if figures.transport == transport:
            return figures
    return None


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (configs_dir() / kind).glob("*.toml")))


def _shipped(kind: str, name: str, what: str) -> Path:
    if name.lower() not in _names(kind):
        raise ConfigError(what=what, got=name, wanted="one of " + ", ".join(_names(kind)))
    return configs_dir() / kind / f"{name.lower()}.toml"


def _read_table(path: Path, kind: type[_Table]) -> _Table:
    """A dataclass from a TOML file whose keys are the fields, `name` apart, which is the file's own."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(what=str(path), got=str(error), wanted="a readable TOML file") from error
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "name"}
    known = "known keys: " + ", ".join(fields)
    for key in table:
        if key not in fields:
            raise ConfigError(what=f"{path}: {key}", got=table[key], wanted="no such key", change=known)
    for key, field in fields.items():
        if key not in table and field.default is dataclasses.MISSING:
            raise ConfigError(what=f"{path}: {key}", got="nothing", wanted=_type_name(hints[key]), change=known)
    values: dict[str, Any] = {key: _typed(path, key, value, hints[key], known) for key, value in table.items()}
    try:
        return kind(name=path.stem, **values)
    except ConfigError as error:
        raise ConfigError(
            what=f"{path}: {error.what}", got=error.got, wanted=error.wanted, change=error.change or known
        ) from error


def _typed(path: Path, key: str, value: object, hint: object, known: str) -> object:
    """`value` as the field's type; TOML arrays become tuples, and an integer may stand for a float."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        if all(type(entry) is item for entry in value):
            return tuple(value)
    elif hint is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    elif type(value) is hint:
        return value
    raise ConfigError(what=f"{path}: {key}", got=value, wanted=_type_name(hint), change=known)


def _type_name(hint: object) -> str:
    if get_origin(hint) is tuple:
        return f"a list of {get_args(hint)[0].__name__}"
    return getattr(hint, "__name__", str(hint))
