"""errors: every failure a user can meet, with its facts as fields.

Owns the error types, their wording and their plain-data form (`to_facts` / `from_facts`), in which one rank tells the
others. Refuses to know who raises them or how they travel.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(eq=False, kw_only=True)
class A2AError(Exception):
    """Base of all errors of this package.

    Attributes:
        reporter: EP rank that met the error first, when another rank told this one about it; else None.
    """

    reporter: int | None = None

    def __post_init__(self) -> None:
        # Plain data from the start: the error then reads the same on the ranks that are told of it.
        for field in dataclasses.fields(self):
            setattr(self, field.name, _plain(getattr(self, field.name)))

    @abc.abstractmethod
    def story(self) -> str:
        """One sentence: who, what, got, wanted, what to change."""

    def __str__(self) -> str:
        if self.reporter is None:
            return self.story()
        return f"{self.story().removeprefix(f'rank {self.reporter}: ')} (reported by rank {self.reporter})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling replays positional arguments, which keyword-only fields do not have.
        return from_facts, (self.to_facts(),)

    def to_facts(self) -> dict[str, Any]:
        """Plain data (JSON types) from which `from_facts` builds an equal error on another rank."""
        facts: dict[str, Any] = {"kind": type(self).__name__}
        for field in dataclasses.fields(self):
            facts[field.name] = getattr(self, field.name)
        return facts


@dataclasses.dataclass(eq=False, kw_only=True)
class ConfigError(A2AError, ValueError):
    """A value, key or keyword that is not allowed. `what` names it, `rank` the EP rank if one is known."""

    what: str
    got: object
    wanted: str
    change: str = ""
    rank: int | None = None

    def story(self) -> str:
        return _sentence(self.rank, f"{self.what}: got {self.got!r}, wanted {self.wanted}", self.change)


@dataclasses.dataclass(eq=False, kw_only=True)
class Unsupported(A2AError):
    """A transport cannot serve a configuration; `reasons` holds every reason, not the first."""

    transport: str
    reasons: Sequence[str]
    rank: int | None = None

    def story(self) -> str:
        return _sentence(self.rank, f"transport {self.transport!r} cannot serve this: " + "; ".join(self.reasons), "")


@dataclasses.dataclass(eq=False, kw_only=True)
class ShapeError(A2AError, ValueError):
    """A tensor whose shape, dtype, device or memory does not fit. Nothing was sent and no state changed."""

    what: str
    got: object
    wanted: str
    change: str = ""
    rank: int | None = None

    def story(self) -> str:
        return _sentence(self.rank, f"{self.what}: got {self.got}, wanted {self.wanted}", self.change)


@dataclasses.dataclass(eq=False, kw_only=True)
class StateError(A2AError, RuntimeError):
    """A verb called in a state that does not allow it. The state is unchanged."""

    rank: int
    call: str
    state: str
    change: str = ""

    def story(self) -> str:
        return _sentence(self.rank, f"{self.call} is not possible in state {self.state!r}", self.change)


@dataclasses.dataclass(eq=False, kw_only=True)
class MismatchError(A2AError):
    """Ranks disagree on a value that must be equal. `values` has every rank's value, keyed by EP rank."""

    what: str
    values: Mapping[int, object]
    change: str = "pass the same value on every rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = {int(rank): value for rank, value in self.values.items()}

    def story(self) -> str:
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(self.values.items()))
        return _sentence(None, f"ranks disagree on {self.what}: {listed}", self.change)


@dataclasses.dataclass(eq=False, kw_only=True)
class PeerTimeout(A2AError, TimeoutError):
    """A wait for a peer reached its deadline; the peer is connected but silent."""

    rank: int
    peer: int
    phase: str
    round: int
    waited_s: float
    change: str = "look at what the peer does, or raise timeout_s (startup_timeout_s until the first round is over)"

    def story(self) -> str:
        return _sentence(
            self.rank,
            f"no signal from rank {self.peer} in phase {self.phase!r} of round {self.round} "
            f"after {self.waited_s:.3g} s",
            self.change,
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class PeerLost(A2AError, ConnectionError):
    """A peer's connection closed while a signal from it was still needed."""

    rank: int
    peer: int
    phase: str
    round: int

    def story(self) -> str:
        return _sentence(
            self.rank,
            f"rank {self.peer} is gone; its signal for phase {self.phase!r} of round {self.round} will not come",
            "",
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class CompileError(A2AError):
    """A kernel did not compile; `log` is the compiler's own text."""

    kernel: str
    log: str

    def story(self) -> str:
        return f"kernel {self.kernel!r} does not compile: {self.log}"


_KINDS: Mapping[str, type[A2AError]] = {
    kind.__name__: kind
    for kind in (ConfigError, Unsupported, ShapeError, StateError, MismatchError, PeerTimeout, PeerLost, CompileError)
}


def from_facts(facts: Mapping[str, Any], reporter: int | None = None) -> A2AError:
    """The error that `to_facts` described; `reporter` is set if given and not already known."""
    fields = dict(facts)
    kind = _KINDS[fields.pop("kind")]
    if fields["reporter"] is None:
        fields["reporter"] = reporter
    return kind(**fields)


def _plain(value: object) -> object:
    """The value in JSON types: what is none of them is told as it prints."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    try:
        return repr(value)
    except Exception:
        # What cannot be printed may be what the error is about.
        return object.__repr__(value)


def _sentence(rank: int | None, what: str, change: str) -> str:
    who = f"rank {rank}: " if rank is not None else ""
    return who + what + (f"; {change}" if change else "")
