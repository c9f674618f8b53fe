"""peers: other ways to exchange the same rows, one file each, timed beside a2a.

Owns their names. Refuses to import a peer's library before that peer is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

from a2a.bench.implementation import Implementation
from a2a.errors import ConfigError

PEERS: Final[Mapping[str, str]] = {
    "torch-a2a": "torch_a2a",
    "ag-rs": "ag_rs",
    "mpi": "mpi",
    "memcpy": "memcpy",
    "copy": "copy",
    "flashinfer": "flashinfer",
}
"""Name on the command line -> file of this folder."""


def peer(name: str) -> type[Implementation]:
    """The class of a peer by its name on the command line."""
    if name not in PEERS:
        raise ConfigError(what="peer", got=name, wanted="one of " + ", ".join(PEERS))
    found: type[Implementation] = importlib.import_module(f"a2a.bench.peers.{PEERS[name]}").PEER
    return found
