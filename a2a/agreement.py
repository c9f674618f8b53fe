"""agreement: what all ranks of an object compare, and the values of its constructor, before memory is taken.

Owns how ranks find out that they disagree while building or growing. Refuses to know what is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from a2a.arguments import is_plain
from a2a.comm import Comm
from a2a.comm.consent import gather
from a2a.config import ExchangeConfig
from a2a.env import MAX_TIMEOUT_S
from a2a.errors import A2AError, ConfigError, MismatchError
from a2a.placement import Placement

Placeable = Placement | Sequence[int] | Tensor
"""A rank for each expert."""

CAPACITIES: Final = (
    "max_num_tokens",
    "top_k",
    "hidden_size",
    "dispatch_dtype_bytes_per_elem",
    "dispatch_scale_bytes_per_token",
    "combine_dtype_bytes_per_elem",
    "extra_payload_bytes_per_token",
    "eplb_stats_num_experts",
    "num_contexts",
)
"""Fields of a configuration that may grow."""

_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(ExchangeConfig))


def capacities(config: ExchangeConfig) -> dict[str, int]:
    """The values that may grow, by name."""
    return {name: getattr(config, name) for name in CAPACITIES}


def union(config: ExchangeConfig, sizes: dict[str, Any]) -> ExchangeConfig:
    """`config` grown to hold `sizes` too; ConfigError for an unknown name or a value that may not change."""
    names = _FIELDS - {"ep_size"}
    changes: dict[str, Any] = {}
    for name, value in sizes.items():
        if name not in names:
            raise ConfigError(what="ensure", got=name, wanted="one of " + ", ".join(sorted(names)))
        if name == "placement":
            value = placement_table(value)
        held = getattr(config, name)
        if name not in CAPACITIES:
            if not _equal(value, held):
                raise ConfigError(what=name, got=value, wanted=f"{held!r}, which ensure cannot change")
            continue
        # Checks the value by itself before it is compared.
        changes[name] = max(held, getattr(dataclasses.replace(config, **{name: value}), name))
    return dataclasses.replace(config, **changes)


def agree(comm: Comm, config: ExchangeConfig | None, problem: A2AError | None, more: dict[str, Any]) -> ExchangeConfig:
    """Compare what forms an address on all ranks, before memory is taken."""
    facts = gather(comm, None if config is None else {**config.facts(), **more}, problem)
    differing = [name for name in facts[0] if any(each[name] != facts[0][name] for each in facts)]
    if len(differing) == 1:
        raise MismatchError(what=differing[0], values={rank: each[differing[0]] for rank, each in enumerate(facts)})
    if differing:
        values = {rank: {name: each[name] for name in differing} for rank, each in enumerate(facts)}
        raise MismatchError(what=", ".join(differing), values=values)
    return ExchangeConfig(**{name: value for name, value in facts[0].items() if name in _FIELDS})


def placement_table(placement: Placeable | None) -> tuple[int, ...] | None:
    """A placement as plain numbers; None for contiguous shares."""
    if placement is None:
        return None
    if isinstance(placement, Placement):
        placement = placement.table
    if is_plain(placement):
        placement = placement.tolist()
    if not isinstance(placement, list | tuple):
        raise ConfigError(what="placement", got=type(placement).__name__, wanted="a rank for each expert")
    return tuple(placement)


def _equal(value: object, held: object) -> bool:
    try:
        return bool(value == held)
    except Exception:
        # A tensor of several elements, or of none, or what does not know how to compare itself.
        return False


def is_budget(value: object) -> bool:
    """Whether a value can bound a wait, in seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TIMEOUT_S


def check_budget(what: str, value: object) -> None:
    """ConfigError unless the value can bound a wait."""
    if not is_budget(value):
        raise ConfigError(what=what, got=value, wanted=f"a number of seconds above 0, up to {MAX_TIMEOUT_S:.0f}")
