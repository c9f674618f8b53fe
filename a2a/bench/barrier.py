"""barrier: where all ranks meet before a timed round.

Owns how ranks wait for each other outside the timed rounds. Refuses to know what is timed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from a2a.comm import Comm
from a2a.comm.mesh import Mesh
from a2a.config import ExchangeConfig
from a2a.host.bells import DONE, PHASES, Active, Bells, Said, Signal, StreamBells, connect, control_regions
from a2a.host.memory import shared_workspaces
from a2a.layout import WorkspaceLayout


@contextlib.contextmanager
def meeting(comm: Comm, timeout_s: float) -> Iterator[Callable[[], None]]:
    """A barrier over the ranks of `comm`, the same for whatever is timed behind it. Collective.

    Ranks that wait sleep and are woken by the last one to come. A barrier that polls lets some ranks go late, by more
    than a small round takes; one in which every rank hears every other by a message of its own lets them go busy with
    those messages. Either would be a part of every implementation's figure, and of small rounds the larger part.
    """
    with contextlib.closing(Mesh(comm, PHASES, timeout_s=timeout_s)) as mesh:
        bells = _bells(mesh, comm, timeout_s)
        everyone = Active(range(mesh.size), mesh.rank, mesh.size)
        nothing = Said(())
        numbers = itertools.count(1)

        def barrier() -> None:
            signal = Signal(DONE, 0, next(numbers), 0)
            bells.ring(signal, nothing, everyone, timeout_s)
            bells.wait(signal, nothing, everyone, timeout_s)

        yield barrier


def _bells(mesh: Mesh, comm: Comm, timeout_s: float) -> Bells:
    if mesh.peers and mesh.family != "unix":
        return StreamBells(mesh)
    config = ExchangeConfig(
        ep_size=mesh.size, max_num_tokens=1, top_k=1, num_experts=mesh.size, hidden_size=1, name="bench-barrier"
    )
    layout = WorkspaceLayout(config, control_regions(mesh.size))
    return connect(shared_workspaces(layout.num_bytes, mesh, timeout_s=timeout_s), layout, mesh, comm)
