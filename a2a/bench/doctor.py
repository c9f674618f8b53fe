"""doctor: what this machine can do, found out by trying.

Owns the probes and what they say. Refuses to guess: what could not be tried is told as such.
"""

from __future__ import annotations

import array
import dataclasses
import importlib
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from a2a import env
from a2a.bench.report import installed
from a2a.comm import detect, spawn
from a2a.comm.launcher import without_launchers
from a2a.comm.protocol import SingleComm
from a2a.config import ExchangeConfig
from a2a.errors import A2AError
from a2a.nvlink.tuning import find_tuning
from a2a.transport import AUTOMATIC, TRANSPORTS, transport_class

_PROBE_TIMEOUT_S: Final = 20
_LINES_TIMEOUT_S: Final = 60.0
_WORD: Final = b"a2a was here"
_VERSIONS: Final = (
    "a2a", "torch", "numpy", "numba", "mpi4py", "mpich", "openmpi", "rich", "cuda-core", "cuda-bindings",
)  # fmt: skip

_CHILD: Final = f"""
import array, mmap, os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
_, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4))
descriptor = array.array("i", ancillary[0][2])[0]
with mmap.mmap(descriptor, 4096) as memory:
    memory[: {len(_WORD)}] = {_WORD!r}
channel.send(b"x")
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        topic: what was looked at.
        ok: True when it works, False when it was tried and does not, None for a fact or what could not be tried.
        text: in words.
    """

    topic: str
    ok: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All answers.

    Attributes:
        findings: in the order in which they are shown.
        transports: name -> reasons why it cannot serve here; empty when it can.
        chosen: what `transport="auto"` takes on this machine, or None.
    """

    findings: tuple[Finding, ...]
    transports: Mapping[str, tuple[str, ...]]
    chosen: str | None


def diagnose() -> Diagnosis:
    """Try everything a transport may need; leaves nothing behind."""
    import torch

    findings = [
        Finding("machine", None, f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores usable, {_memory()}"),
        Finding("versions", None, _versions()),
        _descriptors(),
        _shared_memory(),
        *_devices(torch),
        _mpi(),
        Finding("mpiexec", None, find_mpiexec() or "none found on PATH or beside this Python"),
        _sums(),
        _launcher(),
    ]
    transports = {name: tuple(_reasons(name, findings)) for name in TRANSPORTS}
    for name, reasons in transports.items():
        text = "can serve" if not reasons else "cannot serve: " + "; ".join(reasons)
        findings.append(Finding(f"transport {name}", not reasons, text))
    chosen, why = _automatic(transports)
    findings.append(Finding("auto would choose", chosen is not None, why))
    return Diagnosis(tuple(findings), transports, chosen)


def _automatic(transports: Mapping[str, tuple[str, ...]]) -> tuple[str | None, str]:
    """What `transport="auto"` takes here, or None, and why."""
    try:
        named = env.Env.read().transport
    except A2AError as error:
        return None, f"nothing: {error}"
    if named not in (None, "auto"):
        if named not in transports:
            return None, f"nothing: A2A_TRANSPORT={named} is none of {', '.join(transports)}"
        if transports[named]:
            return None, f"nothing: A2A_TRANSPORT={named} cannot serve here"
        return named, f"{named}: A2A_TRANSPORT names it"
    chosen = next((name for name in AUTOMATIC if not transports[name]), None)
    if chosen is None:
        return None, "no transport works here"
    return chosen, f"{chosen}: the first of {', '.join(AUTOMATIC)} that can serve here"


def find_mpiexec() -> str | None:
    """Path of an mpiexec: on PATH, or beside the Python that runs this, where MPI wheels put theirs."""
    for name in ("mpiexec", "mpirun"):
        beside = Path(sys.executable).parent / name
        found = shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)
        if found:
            return found
    return None


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError as error:
        return f"memory unknown ({error.strerror})"
    facts = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return f"{facts['MemAvailable'] / 2**20:.1f} of {facts['MemTotal'] / 2**20:.1f} GiB memory free"


def _versions() -> str:
    known = [f"{name} {installed(name)}" for name in _VERSIONS if installed(name)]
    return f"Python {platform.python_version()}, " + ", ".join(known)


def _descriptors() -> Finding:
    """An anonymous memory file, mapped by another process that got its descriptor over a unix socket."""
    topic = "memfd over a unix socket"
    try:
        descriptor = os.memfd_create("a2a-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Finding(topic, False, f"memfd_create: {error.strerror}")
    mine, theirs = socket.socketpair()
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", _CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        mine.settimeout(_PROBE_TIMEOUT_S)
        try:
            mine.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
            answered = mine.recv(1) == b"x"
        except ConnectionError:
            # The other process ended; what it says of it is worth more.
            answered = False
        _, complaint = child.communicate(timeout=_PROBE_TIMEOUT_S)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            arrived = memory[: len(_WORD)] == _WORD
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(topic, False, str(error))
    finally:
        mine.close()
        theirs.close()
        os.close(descriptor)
    if answered and arrived:
        return Finding(topic, True, "tried: another process mapped it and wrote, this one read it")
    last = complaint.decode(errors="replace").strip().splitlines()
    return Finding(topic, False, "tried: " + (last[-1] if last else "nothing arrived"))


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", None, f"{error.strerror}; not needed by a2a")
    sizes = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    return Finding("/dev/shm", None, f"{sizes}; not needed by a2a")


def _devices(torch: Any) -> list[Finding]:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return [
            Finding("GPUs", None, f"none ({built})"),
            Finding("peer access", None, "not tried: no GPU"),
            Finding("GPU handle types", None, "not tried: no GPU"),
        ]
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    open_pairs = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return [
        Finding("GPUs", None, f"{count}: " + ", ".join(names)),
        Finding("peer access", open_pairs == pairs if pairs else None, f"{len(open_pairs)} of {len(pairs)} pairs"),
        *_handle_types(torch.device("cuda", 0)),
        *_lines(count),
        _launch_shapes("sm_{}{}".format(*torch.cuda.get_device_capability(0))),
    ]


def _lines(count: int) -> list[Finding]:
    """Whether the lines of nvlink's small regime arrive whole, between a rank on each GPU."""
    topic = "128-byte lines"
    if count < 2 or installed("cuda-bindings") is None:
        return [Finding(topic, None, "not tried: it takes two GPUs and cuda-bindings")]
    try:
        whole, text = spawn.run(_probe_lines, count, timeout_s=_LINES_TIMEOUT_S)[0]
    except (A2AError, RuntimeError) as error:
        return [Finding(topic, False, str(error))]
    return [Finding(topic, whole, f"tried: {text}")]


def _probe_lines() -> tuple[bool, str]:
    """Body of one rank."""
    import torch

    from a2a.comm import resolve
    from a2a.comm.mesh import Mesh

    comm = resolve(None, timeout_s=_PROBE_TIMEOUT_S)
    device = torch.device("cuda", comm.Get_rank())
    torch.cuda.set_device(device)
    mesh = Mesh(comm, (), timeout_s=_PROBE_TIMEOUT_S)
    try:
        memory = importlib.import_module("a2a.nvlink.memory").SymmetricMemory(
            1, device, comm, mesh, timeout_s=_PROBE_TIMEOUT_S
        )
        lines = importlib.import_module("a2a.nvlink.probe").LineProbe(memory).run(comm)
        return lines.whole, lines.text()
    finally:
        comm.barrier()
        mesh.close()


def _launch_shapes(arch: str) -> Finding:
    """Which table of regimes and launch shapes serves a GPU."""
    topic = "launch shapes"
    try:
        found = find_tuning(arch, env.Env.read().tuning)
    except A2AError as error:
        return Finding(topic, False, str(error))
    return Finding(topic, None, f"{arch}: {found.why} ({found.tuning.source})")


def _handle_types(device: Any) -> list[Finding]:
    """Memory of each handle type, created and exported on one GPU."""
    if installed("cuda-bindings") is None:
        return [Finding("GPU handle types", None, "not tried: cuda-bindings is not installed")]
    reasons = importlib.import_module("a2a.nvlink.memory").handle_reasons(device)
    return [
        Finding(f"GPU handle type {name}", reason is None, f"tried: {reason or 'created and exported'}")
        for name, reason in reasons.items()
    ]


def _mpi() -> Finding:
    version = installed("mpi4py")
    if version is None:
        return Finding("MPI", None, "mpi4py is not installed; needed only under mpirun: pip install 'a2a[mpi]'")
    # Importing mpi4py.MPI starts MPI, which is not for this process to do.
    probe = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            # As one process of its own, not as another rank of a job that this one belongs to.
            env=without_launchers(env.snapshot()),
        )
    except subprocess.SubprocessError as error:
        return Finding("MPI", False, f"mpi4py {version}: {error}")
    if done.returncode:
        last = done.stderr.strip().splitlines()
        return Finding("MPI", False, f"mpi4py {version}: " + (last[-1] if last else f"exit status {done.returncode}"))
    return Finding("MPI", True, f"mpi4py {version}, " + " ".join(done.stdout.split()))


def _sums() -> Finding:
    if installed("numba") is None:
        return Finding("host sums", None, "by torch; install numba for faster ones: pip install 'a2a[cpu]'")
    return Finding("host sums", None, f"by numba {installed('numba')}")


def _launcher() -> Finding:
    try:
        launcher = detect(env.snapshot())
    except A2AError as error:
        return Finding("launcher", False, str(error))
    if launcher.rank is None:
        return Finding("launcher", None, "none: a2a starts local ranks itself")
    return Finding("launcher", None, f"{launcher.kind}: rank {launcher.rank} of {launcher.size}")


def _reasons(name: str, findings: list[Finding]) -> list[str]:
    """Why a transport cannot serve an ordinary exchange on this machine."""
    config = ExchangeConfig(ep_size=1, max_num_tokens=8, top_k=2, num_experts=8, hidden_size=128)
    try:
        reasons = list(transport_class(name).reasons(config, SingleComm()))
    except (A2AError, ImportError, OSError) as error:
        reasons = [str(error)]
    if name == "host":
        reasons += [f"{each.topic}: {each.text}" for each in findings if each.topic.startswith("memfd") and not each.ok]
    return reasons
