"""nvlink/transport: transport: GPUs of one NVLink domain; memory, compile, launch, kernels/*.cu.

Owns what surrounds the kernels of one rank: symmetric memory, the mesh on which ranks tell each other what went wrong,
a small thread that listens to it, recorded errors, reset and goodbye. Refuses to know how rows move (kernels) and which
launch moves them (exchange).

A failure travels thus. A kernel whose wait does not end in time, or that reads another value than its own, writes the
facts to pinned host memory and returns; later kernels return at once. The next call, `check()` or the thread reads
them, makes an error of them and announces it on the mesh. Every other rank's thread hears it and sets the word that
ends all waits of its kernels, so that all ranks raise the same error. A connection that closes without goodbye sets
that word too. `reset()` starts over.

Importing this module needs no CUDA package; `reasons` says what is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from a2a.comm import Comm
from a2a.comm.consent import gather
from a2a.comm.mesh import Mesh, host_identity
from a2a.config import ExchangeConfig
from a2a.env import Env
from a2a.errors import (
    A2AError,
    CompileError,
    ConfigError,
    MismatchError,
    PeerLost,
    PeerTimeout,
    Unsupported,
    from_facts,
)
from a2a.layout import WorkspaceLayout
from a2a.nvlink.params import KINDS, PHASES, control_regions, later_round, next_round
from a2a.nvlink.tuning import Tuning, find_tuning
from a2a.placement import Placement
from a2a.transport import CombineCall, DispatchCall, Transport

if TYPE_CHECKING:
    from a2a.nvlink.exchange import Exchange
    from a2a.nvlink.memory import SymmetricMemory

_DECLINED: Final = {"dispatch": "dispatch.declined", "combine": "combine.declined"}
_FACTS: Final = {"dispatch": "dispatch.facts", "combine": "combine.facts"}
"""What a rank said in a round about which some rank found a disagreement."""
_PLAYED: Final = "reset.played"
_READY: Final = "reset.ready"
_NO_RANK: Final = 0xFFFFFFFF
"""Abort word for a reason that is no lost rank."""
_LOOK_S: Final = 0.05
"""The thread looks at what kernels have recorded this often; what peers say wakes it at once."""
_STORY_S: Final = 1.0
"""How long a disagreement waits for what every rank said before it is told without."""
_TIMEOUT, _ABORTED = 1, 2
_MIN_CAPABILITY: Final = (8, 0)
_PROBE_BYTES: Final = 1 << 20
_PROBE_TIMEOUT_S: Final = 60.0


class NvlinkTransport(Transport):
    """GPUs that can map each other's memory. See the module for failures and `Transport` for the interface.

    The rank's GPU is the current device at construction. Several ranks may share a GPU.

    Attributes:
        lines: what the probe of the small regime's lines found; where one was torn, no round takes that regime.
    """

    name: ClassVar[str] = "nvlink"
    POINTS: ClassVar[tuple[str, ...]] = ("dispatch.enter", "combine.enter")

    @classmethod
    def reasons(cls, config: ExchangeConfig, comm: Comm) -> list[str]:
        mine = reasons_of_this_process()
        fabric = not mine and _fabric_attribute()
        hosts = comm.allgather(host_identity() if sys.platform.startswith("linux") else "")
        if len(set(hosts)) > 1 and not mine and not fabric:
            mine.append("the ranks are on several hosts and this GPU has no FABRIC handles")
        if all(comm.allgather(not mine)):
            mine += _reasons_of_memory(comm)
        return mine

    @classmethod
    def control_regions(cls, config: ExchangeConfig) -> list[tuple[str, int]]:
        return control_regions(config)

    @classmethod
    def memory_class(cls) -> type[SymmetricMemory]:
        """Where the workspaces come from."""
        from a2a.nvlink.memory import SymmetricMemory

        return SymmetricMemory

    def __init__(
        self, config: ExchangeConfig, layout: WorkspaceLayout, placement: Placement, comm: Comm, *, timeout_s: float
    ) -> None:
        from a2a.nvlink.driver import arch_of
        from a2a.nvlink.exchange import Exchange
        from a2a.nvlink.probe import LineProbe

        self.rank = comm.Get_rank()
        self._config = config
        self._layout = layout
        self._closed = False
        self._starting_over = False
        self._looking = threading.Lock()
        self._base = [0] * config.num_contexts
        self._launched: dict[tuple[int, str], tuple[int, int, tuple[Any, ...]]] = {}
        self._told: dict[tuple[int, str, int, int], float] = {}
        device = torch.device("cuda", torch.cuda.current_device())
        # For small copies that must not queue behind the caller's work.
        self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        phases = (*_DECLINED.values(), *_FACTS.values(), _PLAYED, _READY)
        self._mesh = Mesh(comm, phases, timeout_s=timeout_s)
        self._memory = self.memory_class()(layout.num_bytes, device, comm, self._mesh, timeout_s=timeout_s)
        self.workspace = self._memory.tensor[:, : layout.num_bytes]
        places = list(zip(self._memory.device_uuids, comm.allgather((host_identity(), os.getpid())), strict=True))
        problem: A2AError | None = None
        try:
            found = find_tuning(arch_of(device), Env.read().tuning)
            probe = LineProbe(self._memory)
        except (CompileError, ConfigError, Unsupported) as error:
            problem = error
        tables = gather(comm, None if problem is not None else (found.tuning.name, found.tuning.digest), problem)
        if len({digest for _, digest in tables}) > 1:
            raise MismatchError(what="tuning table", values=dict(enumerate(tables)))
        self.lines = probe.run(comm)
        try:
            self._exchange: Exchange = Exchange(
                self.workspace,
                self.rank,
                config,
                layout,
                placement,
                tuning=found.tuning,
                small_max_tokens=None if self.lines.whole else 0,
                sharers=places.count(places[self.rank]),
            )
            self._exchange.set_budgets(timeout_s, timeout_s)
            self._set_all_active()
        except (CompileError, Unsupported) as error:
            problem = error
        gather(comm, None, problem)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_listen, args=(self._mesh, self._stop, weakref.ref(self)), name="a2a-nvlink", daemon=True
        )
        self._thread.start()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def dispatch(self, call: DispatchCall) -> None:
        if self.hook is not None:
            self.hook("dispatch.enter", call.round)
        makes = call.quantize is not None
        said = (call.runtime_max_tokens_per_rank, call.payloads, call.eplb_local_stats is not None, makes)
        self._before("dispatch", call.context, call.round, 0, said)
        self._exchange.dispatch(call)

    def combine(self, call: CombineCall) -> None:
        if self.hook is not None:
            self.hook("combine.enter", call.round)
        payload = call.payload
        said = (call.runtime_max_tokens_per_rank, payload.shape, payload.dtype, call.low_precision)
        self._before("combine", call.context, call.round, call.attempt, said)
        self._exchange.combine(call)

    def regime(self, runtime_max_tokens_per_rank: int) -> str:
        return self._exchange.regime(runtime_max_tokens_per_rank)

    @property
    def tuning(self) -> Tuning:
        """The table of launch shapes in use."""
        return self._exchange.tuning

    @property
    def landing_tokens(self) -> int:
        """Largest R that the small regime can take."""
        return self._exchange.landing_tokens

    def pushes(self, row_bytes: int, runtime_max_tokens_per_rank: int) -> bool:
        """Whether combine may push rows of that many bytes."""
        return self._exchange.pushes(row_bytes, runtime_max_tokens_per_rank)

    def tune(self, tuning: Tuning) -> None:
        """Take another table for the rounds that follow; every rank the same, between the same two rounds."""
        self._exchange.tune(tuning)

    def _before(self, phase: str, context: int, round: int, attempt: int, said: tuple[Any, ...]) -> None:
        """Refuse a launch whose signals cannot come; otherwise remember it, as `_facts_of` makes facts of it."""
        # The mask cannot be read while a graph is captured; a replay finds out by itself.
        mesh = self._mesh
        if mesh.lost and not (self._config.enable_rank_mask and torch.cuda.is_current_stream_capturing()):
            with self._looking:
                needed = self._needed(context)
                for peer in sorted(needed & mesh.lost):
                    raise self._recorded(PeerLost(rank=self.rank, peer=peer, phase=phase, round=round))
                self._end_waits_for_lost_peers()
        if mesh.has_heard:
            for peer, body in mesh.arrived(_DECLINED[phase], context, round, attempt=attempt).items():
                raise from_facts(json.loads(body), reporter=peer)
        self._launched[context, phase] = (round, attempt, said)

    def decline(self, phase: str, context: int, round: int, attempt: int, facts: Mapping[str, Any]) -> None:
        self._mesh.signal(_DECLINED[phase], context, round, json.dumps(facts).encode(), attempt=attempt)

    def set_budgets(self, startup_timeout_s: float, timeout_s: float) -> None:
        self._exchange.set_budgets(startup_timeout_s, timeout_s)

    # ---- errors ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for words in self._exchange.words:
            if words.recorded:
                self._raise_recorded()
        if self._mesh.error is not None:
            self._exchange.abort(_NO_RANK)
            raise self._mesh.error

    def _raise_recorded(self) -> None:
        for context, words in enumerate(self._exchange.words):
            if words.recorded:
                if words.kind not in (_TIMEOUT, _ABORTED):
                    self._await_story()
                raise self._recorded(self._error_of(context))

    def _await_story(self) -> None:
        """Give the thread time to hear what every rank said."""
        deadline = time.monotonic() + 2 * _STORY_S
        while self._mesh.error is None and time.monotonic() < deadline:
            time.sleep(1e-3)

    def _recorded(self, error: A2AError) -> A2AError:
        """Announce `error` unless another one came first; the one that counts."""
        counts = self._mesh.record(error)
        self._exchange.abort(_NO_RANK)
        return counts

    def _error_of(self, context: int) -> A2AError:
        """What a kernel wrote down, as an error."""
        words = self._exchange.words[context]
        kind, peer, phase = int(words.kind), int(words.peer), PHASES[int(words.phase)]
        round = int(words.round) - self._base[context]
        if kind == _ABORTED:
            if self._mesh.error is not None:
                return self._mesh.error
            reason = int(words.abort)
            peer = peer if reason in (0, _NO_RANK) else reason - 1
            return PeerLost(rank=self.rank, peer=peer, phase=phase, round=round)
        if kind != _TIMEOUT:
            return self._mismatch(context, phase)
        if peer in self._mesh.lost:
            return PeerLost(rank=self.rank, peer=peer, phase=phase, round=round)
        return PeerTimeout(rank=self.rank, peer=peer, phase=phase, round=round, waited_s=int(words.waited_us) / 1e6)

    def _look(self) -> None:
        """What the thread does whenever it wakes."""
        with self._looking:
            if not self._starting_over and not self._closed:
                self._spread_failures()

    def _spread_failures(self) -> None:
        """From this rank's kernels to the peers, and from the peers to this rank's kernels."""
        mesh = self._mesh
        if mesh.error is None:
            self._look_for_declined()
            for context, words in enumerate(self._exchange.words):
                if words.recorded and words.kind in (_TIMEOUT, _ABORTED):
                    mesh.record(self._error_of(context))
            self._compare_what_was_said()
        if mesh.error is not None:
            self._exchange.abort(_NO_RANK)
        self._end_waits_for_lost_peers()

    def _end_waits_for_lost_peers(self) -> None:
        """Ends waits for a signal that has not come; a kernel that has all its signals is not disturbed."""
        lost = self._mesh.lost - self._mesh.departed
        if not lost:
            return
        needed = set[int]().union(*(self._needed(context) for context in range(self._config.num_contexts)))
        for peer in sorted(lost - needed):
            # Lost before it was masked: the rounds that do without it may wait for each other.
            self._exchange.retract(1 + peer)
        for peer in sorted(lost & needed):
            self._exchange.abort(1 + peer)

    def _compare_what_was_said(self) -> None:
        """Where a kernel or a peer found a disagreement: tell all what this rank said, and wait for what they did."""
        for (context, phase), (round, attempt, said) in list(self._launched.items()):
            words = self._exchange.words[context]
            found = bool(words.recorded) and words.kind not in (_TIMEOUT, _ABORTED) and PHASES[words.phase] == phase
            heard = self._mesh.arrived(_FACTS[phase], context, round, attempt=attempt)
            key = (context, phase, round, attempt)
            if (found or heard) and key not in self._told:
                self._told[key] = time.monotonic()
                body = json.dumps(_facts_of(phase, said)).encode()
                self._mesh.signal(_FACTS[phase], context, round, body, attempt=attempt)
            if found:
                missing = self._needed(context) - {self.rank} - set(heard)
                if not missing or time.monotonic() - self._told[key] > _STORY_S:
                    self._mesh.record(self._mismatch(context, phase))

    def _mismatch(self, context: int, phase: str) -> MismatchError:
        """What every rank said, as far as it is known; else what the kernel compared."""
        words = self._exchange.words[context]
        round, attempt, mine = self._launched[context, phase]
        facts = _facts_of(phase, mine)
        heard = self._mesh.arrived(_FACTS[phase], context, round, attempt=attempt)
        said = {rank: json.loads(body) for rank, body in heard.items()}
        said[self.rank] = json.loads(json.dumps(facts))
        said = dict(sorted(said.items()))
        names = [name for name in facts if any(each[name] != said[self.rank][name] for each in said.values())]
        if not names:
            values = {self.rank: int(words.wanted), int(words.peer): int(words.seen)}
            what = KINDS[int(words.kind)].removeprefix("mismatch of ")
            return MismatchError(what=f"{what} in {phase}", values=dict(sorted(values.items())))
        return MismatchError(
            what=f"{', '.join(names)} in {phase}",
            values={
                rank: each[names[0]] if len(names) == 1 else {name: each[name] for name in names}
                for rank, each in said.items()
            },
        )

    def _look_for_declined(self) -> None:
        for (context, phase), (round, attempt, _) in list(self._launched.items()):
            for peer, body in self._mesh.arrived(_DECLINED[phase], context, round, attempt=attempt).items():
                self._mesh.record(from_facts(json.loads(body), reporter=peer))

    def reset(self, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        mesh, exchange = self._mesh, self._exchange
        with self._looking:
            self._starting_over = True
        try:
            self._end_launched_work(deadline)
            masked = set(range(self._config.ep_size))
            for context in range(self._config.num_contexts):
                masked -= self._needed(context)
            mesh.reset(timeout_s=max(deadline - time.monotonic(), 0.0), absent=masked - {self.rank})
            peers = [peer for peer in mesh.peers if not (peer in masked and peer in mesh.lost)]
            played = exchange.rounds()
            mesh.signal(_PLAYED, 0, 0, json.dumps(played).encode(), peers=peers)
            heard = mesh.wait(_PLAYED, 0, 0, peers=peers, timeout_s=max(deadline - time.monotonic(), 0.0))
            everyone = [played, *(json.loads(body) for body in heard.values())]
            self._base = [next_round(functools.reduce(later_round, rounds)) for rounds in zip(*everyone, strict=True)]
            exchange.start_over(self._base)
            self._launched.clear()
            self._told.clear()
            self._set_all_active(absent=masked & mesh.lost)
            mesh.signal(_READY, 0, 0, peers=peers)
            mesh.wait(_READY, 0, 0, peers=peers, timeout_s=max(deadline - time.monotonic(), 0.0))
        finally:
            self._starting_over = False

    def release(self, comm: Comm) -> None:
        # The thread reads masks, which lie in the memory that goes.
        with self._looking:
            self._starting_over = True
        # Replays of captured graphs may be on any stream.
        torch.cuda.synchronize(self.workspace.device)
        comm.barrier()
        problem: A2AError | None = None
        try:
            self._memory.release()
        except Unsupported as error:
            problem = error
        try:
            # Also the barrier after which the memory of all is free.
            gather(comm, None, problem)
        except A2AError:
            self._starting_over = False
            raise

    def restore(self, comm: Comm, *, timeout_s: float) -> None:
        self._memory.restore(comm, self._mesh, timeout_s=timeout_s)
        self._mesh.reset(timeout_s=timeout_s)
        self._base = [0] * self._config.num_contexts
        self._exchange.start_over(self._base)
        self._launched.clear()
        self._told.clear()
        self._set_all_active()
        comm.barrier()
        self._starting_over = False

    def _end_launched_work(self, deadline: float) -> None:
        """Wait for the launched work; end its waits where a failure is known or time runs out."""
        exchange, mesh = self._exchange, self._mesh
        while exchange.busy():
            failed = mesh.error is not None or mesh.lost or any(words.recorded for words in exchange.words)
            if failed or time.monotonic() > deadline - 1.0:
                exchange.abort(_NO_RANK)
                break
            time.sleep(1e-3)
        exchange.wait()

    def close(self) -> None:
        """As `Transport.close`; waits for this rank's own launched work, whose waits all have deadlines."""
        if self._closed:
            return
        try:
            if self._mesh.error is not None or self._mesh.lost - self._mesh.departed:
                self._exchange.abort(_NO_RANK)
            # A goodbye says that all signals of this rank have been given.
            self._exchange.wait()
        finally:
            self._closed = True
            self._stop.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._mesh.close()
            self.workspace = torch.empty((self._config.ep_size, 0), dtype=torch.uint8, device=self.workspace.device)
            del self._exchange, self._memory

    def __del__(self) -> None:
        stop: threading.Event | None = getattr(self, "_stop", None)
        if stop is not None and not self._closed:
            # Kernels that still wait end at once, so that unmapping the memory need not wait for peers.
            self._exchange.abort(_NO_RANK)
            stop.set()

    # ---- who takes part --------------------------------------------------------------------------------------------

    def _needed(self, context: int) -> set[int]:
        """Ranks whose signals a round of the context needs. Reads device memory if ranks can be masked."""
        everyone = set(range(self._config.ep_size))
        if not self._config.enable_rank_mask:
            return everyone
        with torch.cuda.stream(self._side_stream):
            words = self._mask(context).tolist()
        return {rank for rank in everyone if int(words[rank // 64]) >> (rank % 64) & 1}

    def _mask(self, context: int) -> torch.Tensor:
        region = self._layout.region("rank_mask", context)
        return self.workspace[self.rank, region.offset_bytes : region.end_bytes].view(torch.uint64)

    def _set_all_active(self, absent: set[int] | None = None) -> None:
        if not self._config.enable_rank_mask:
            return
        ep = self._config.ep_size
        active = [rank for rank in range(ep) if rank not in (absent or set())]
        words = [sum(1 << rank % 64 for rank in active if rank // 64 == word) for word in range(-(-ep // 64))]
        with torch.cuda.stream(self._side_stream):
            for context in range(self._config.num_contexts):
                self._mask(context).copy_(torch.tensor(words, dtype=torch.uint64, device="cpu"))
        self._side_stream.synchronize()


def _facts_of(phase: str, said: tuple[Any, ...]) -> dict[str, Any]:
    """What ranks compare of a launch, by name. Made when it is asked for: nearly no launch is."""
    if phase == "dispatch":
        most, payloads, has_stats, makes = said
        return {
            "runtime_max_tokens_per_rank": most,
            "payload_row_bytes": [payload.row_bytes for payload in payloads],
            "eplb_local_stats": has_stats,
            "quantised_by_dispatch": makes,
        }
    most, shape, dtype, low_precision = said
    return {
        "runtime_max_tokens_per_rank": most,
        "payload_columns": shape[2],
        "payload_dtype": str(dtype).removeprefix("torch."),
        "use_low_precision": low_precision,
    }


def _listen(mesh: Mesh, stop: threading.Event, owner: weakref.ref[NvlinkTransport]) -> None:
    """Body of the thread; ends with its transport."""
    while not stop.is_set():
        mesh.pump(_LOOK_S)
        transport = owner()
        if transport is None:
            return
        transport._look()
        del transport


def reasons_of_this_process() -> list[str]:
    """Why this process cannot run the kernels, whatever its peers can."""
    reasons = []
    if not sys.platform.startswith("linux"):
        reasons.append("it needs Linux")
    missing = [name for name in ("cuda.bindings", "cuda.core") if not _importable(name)]
    if missing:
        reasons.append(f"{' and '.join(missing)} cannot be imported: install a2a[cu13] or a2a[cu12]")
    if not torch.cuda.is_available():
        reasons.append("torch sees no GPU in this process")
    elif torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        reasons.append(f"the GPU has compute capability {major}.{minor}, it needs 8.0")
    if not missing:
        from a2a.nvlink.compile import compiler_version

        try:
            compiler_version()
        except CompileError as error:
            reasons.append(f"{error.log}: install a2a[cu13] or a2a[cu12]")
    if not reasons:
        from a2a.nvlink.driver import attribute

        device = torch.device("cuda", torch.cuda.current_device())
        if not attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            reasons.append("the driver has no virtual memory management for this GPU")
    return reasons


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _fabric_attribute() -> bool:
    from a2a.nvlink.driver import attribute

    return bool(attribute(torch.device("cuda", torch.cuda.current_device()), "HANDLE_TYPE_FABRIC_SUPPORTED"))


def _reasons_of_memory(comm: Comm) -> list[str]:
    """Why the ranks cannot map each other's memory: found by doing it once, with a little. Collective."""
    from a2a.nvlink.memory import SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    mesh = Mesh(comm, (), timeout_s=_PROBE_TIMEOUT_S)
    try:
        SymmetricMemory(_PROBE_BYTES, device, comm, mesh, timeout_s=_PROBE_TIMEOUT_S)
    except Unsupported as error:
        # Every rank has every rank's reasons; each tells its own.
        mine = f"rank {comm.Get_rank()}: "
        return [reason.removeprefix(mine) for reason in error.reasons if reason.startswith(mine)]
    finally:
        comm.barrier()
        mesh.close()
    return []


TRANSPORT: Final = NvlinkTransport
