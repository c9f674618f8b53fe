"""env: the variables this package honours, one documented field each; the only reader of os.environ.

Owns the names and meaning of the A2A_* variables and every access to the process environment. Refuses to know what a
launcher's variables mean (comm/launcher.py reads a mapping) and who uses a value.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Final

from a2a.errors import ConfigError

PREFIX: Final = "A2A_"

MAX_TIMEOUT_S: Final = 1e6
"""Longest budget of a wait, over eleven days: waits of the kernel's count milliseconds in 31 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Env:
    """Settings taken from variables. An argument of the same meaning always wins over its variable.

    Attributes:
        startup_timeout_s: A2A_STARTUP_TIMEOUT_S, deadline in seconds of every wait while ranks meet and of the first
            round, in which ranks may still be loading; default 300.
        timeout_s: A2A_TIMEOUT_S, deadline in seconds of every wait of later rounds; default 30.
        transport: A2A_TRANSPORT, the transport that `transport="auto"` takes; default None, the choice is free.
        local_store: A2A_LOCAL_STORE, the unix socket at which ranks of one machine meet; set by the local spawn for
            its ranks, not by users; default None.
        tuning: A2A_TUNING, a file that `a2a tune` wrote, taken instead of the shipped table of launch shapes; the same
            contents on every rank; default None.
        commit: A2A_COMMIT, commit of the code that runs, for reports from a copy; default None: the checkout's.
        install_flashinfer: A2A_INSTALL_FLASHINFER, "1" to let engines that look for FlashInfer's exchange find this
            package's from the start of the process on (see `a2a.integrations.flashinfer.install`), "shared" for the
            same with `share_workspaces`; "0" counts as unset; default None.
    """

    startup_timeout_s: float = 300.0
    timeout_s: float = 30.0
    transport: str | None = None
    local_store: str | None = None
    tuning: str | None = None
    commit: str | None = None
    install_flashinfer: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Env:
        """Reads the A2A_* variables of `environ`, by default those of this process. An empty value counts as unset.

        Raises:
            ConfigError: a value that cannot be read, or an A2A_* variable that is not known.
        """
        variables = snapshot() if environ is None else environ
        known = {PREFIX + field.name.upper(): field for field in dataclasses.fields(cls)}
        unknown = sorted(name for name in variables if name.startswith(PREFIX) and name not in known)
        if unknown:
            raise ConfigError(
                what="environment variable",
                got=", ".join(unknown),
                wanted="one of " + ", ".join(known),
                change="unset it or correct its name",
            )
        given = {name: variables[name] for name in known if variables.get(name, "").strip()}
        return cls(
            startup_timeout_s=_seconds(given, "A2A_STARTUP_TIMEOUT_S", cls.startup_timeout_s),
            timeout_s=_seconds(given, "A2A_TIMEOUT_S", cls.timeout_s),
            transport=_text(given, "A2A_TRANSPORT"),
            local_store=_text(given, "A2A_LOCAL_STORE"),
            tuning=_text(given, "A2A_TUNING"),
            commit=_text(given, "A2A_COMMIT"),
            install_flashinfer=_one_of(given, "A2A_INSTALL_FLASHINFER", ("0", "1", "shared")),
        )


def snapshot() -> dict[str, str]:
    """A copy of the process environment as it is now."""
    return dict(os.environ)


def replace(variables: Mapping[str, str]) -> None:
    """Makes `variables` the whole environment of this process: how a spawned rank gets its own."""
    os.environ.clear()
    os.environ.update(variables)


def default(variables: Mapping[str, str]) -> None:
    """Sets those of `variables` that this process has not, for libraries that read them when they start."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _text(given: Mapping[str, str], name: str) -> str | None:
    return given[name].strip() if name in given else None


def _one_of(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    """One of `allowed`, of which the first stands for nothing."""
    value = given.get(name, allowed[0]).strip()
    if value not in allowed:
        raise ConfigError(what=name, got=given[name], wanted="one of " + ", ".join(allowed))
    return None if value == allowed[0] else value


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    if name not in given:
        return default
    try:
        value = float(given[name])
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(what=name, got=given[name], wanted=f"a number of seconds above 0, up to {MAX_TIMEOUT_S:.0f}")
    return value
