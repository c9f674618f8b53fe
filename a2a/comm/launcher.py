"""comm/launcher: which launcher started this process, and as which rank: a pure function of its variables.

Owns the table of who sets which variable, and what several launchers at once mean. Refuses to read the environment
itself, and to start or import anything.

A variable counts as set when its value is not empty; "0" is a value like any other. Where the variables come from:
torchrun https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
Open MPI https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
Slurm https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
Kubernetes https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from a2a.errors import ConfigError

TORCHRUN: Final = "torchrun"
OPEN_MPI: Final = "openmpi"
MPICH: Final = "mpich"
PMIX: Final = "pmix"
SLURM: Final = "slurm"
KUBERNETES: Final = "kubernetes"
NONE: Final = "none"

MPI_KINDS: Final = frozenset({OPEN_MPI, MPICH, PMIX})
"""Kinds whose ranks meet through mpi4py; the others meet at a store."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """Variables of one launcher. `size` is None where it gives none in the environment."""

    kind: str
    rank: str
    size: str | None
    local_rank: str | None
    local_size: str | None


_TABLE: Final = (
    _Row(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Row(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Row(MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Row(PMIX, "PMIX_RANK", None, None, None),
    _Row(SLURM, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None),
    _Row(KUBERNETES, "JOB_COMPLETION_INDEX", "WORLD_SIZE", None, None),
)
"""In the order of who is innermost: a launcher further up may have been started by one further down."""

_MASTER_ADDRESS: Final = "MASTER_ADDR"
_MASTER_PORT: Final = "MASTER_PORT"
_SERVED: Final = "TORCHELASTIC_USE_AGENT_STORE"
_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
_NUM_AGENTS: Final = "GROUP_WORLD_SIZE"
_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
_LOCAL_STORE: Final = "A2A_LOCAL_STORE"
_SLURM_STEP: Final = "SLURM_STEP_ID"
_SLURM_STEP_SIZE: Final = "SLURM_STEP_NUM_TASKS"
_SLURM_JOB: Final = "SLURM_JOB_ID"

_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""Slurm numbers the steps that are no srun of the user's (batch script, interactive shell) from the top of 32 bits.
Source: SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP in https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in"""

VARIABLES: Final = tuple(
    sorted(
        {name for row in _TABLE for name in (row.rank, row.size, row.local_rank, row.local_size) if name}
        | {_MASTER_ADDRESS, _MASTER_PORT, _SERVED, _ATTEMPT, _NUM_AGENTS, _RUN_ID, _LOCAL_STORE}
        | {_SLURM_STEP, _SLURM_STEP_SIZE, _SLURM_JOB}
    )
)
"""Every variable that `detect` looks at."""

FAMILIES: Final = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "HYDRA_", "PRTE_", "HYDI_")
"""Prefixes of what launchers set, `detect` reading it or not; see `without_launchers`."""

_TORCHRUN_EXTRA: Final = frozenset({_NUM_AGENTS, "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher:
    """Who started this process, as which rank.

    Attributes:
        kind: "torchrun" (or anything else that sets RANK and WORLD_SIZE), "openmpi", "mpich", "pmix", "slurm",
            "kubernetes" or "none".
        rank: rank in the job; None for "none".
        size: ranks of the job; None for "none", and for "pmix" alone, whose size only MPI itself can tell.
        local_rank: rank among those of this machine, where the launcher says.
        local_size: ranks of this machine, where the launcher says.
        master_address: MASTER_ADDR, where ranks that have no MPI meet.
        master_port: MASTER_PORT.
        store_is_served: whether the launcher itself listens there (torchrun's agent does), so that no rank has to.
        local_store: A2A_LOCAL_STORE, where the ranks of this package's own spawn meet instead.
        attempt: how often an elastic launcher has restarted the ranks.
        variables: names of the variables this rests on.
        notes: why variables that look like a rank's do not make this process one.
    """

    kind: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    store_is_served: bool = False
    local_store: str | None = None
    attempt: int = 0
    variables: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Claim:
    """What one launcher's variables say."""

    row: _Row
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    variables: tuple[str, ...]

    def told(self, environ: Mapping[str, str]) -> str:
        return ", ".join(f"{name}={environ[name]}" for name in self.variables)


def detect(environ: Mapping[str, str]) -> Launcher:
    """The launcher that made this process a rank, from variables alone.

    Several launchers at once are fine when they name the same rank, or when one runs inside the other: torchrun whose
    agents are tasks of Slurm, MPI or Kubernetes, and mpirun whose daemons are tasks of a Slurm step. The inner one
    counts. A Slurm step that is also an MPI job with the same ranks counts as Slurm if MASTER_ADDR and MASTER_PORT are
    set, since then no MPI is needed, and as MPI otherwise.

    Raises:
        ConfigError: half of a launcher's variables, a value that is no rank or size, or launchers that disagree and of
            which neither runs inside the other. All variables concerned are listed.
    """
    seen = {name: environ[name].strip() for name in VARIABLES if environ.get(name, "").strip()}
    notes: list[str] = []
    claims = [claim for row in _TABLE if (claim := _claim(row, seen, environ, notes)) is not None]
    _check_lone_size(seen, claims)
    inner = claims[0] if claims else None
    if inner is None:
        return Launcher(kind=NONE, notes=tuple(notes))
    for outer in claims[1:]:
        if not _agree(inner, outer) and not _nests(inner, outer, seen):
            raise ConfigError(
                what="launcher variables",
                got=f"{inner.row.kind}: {inner.told(seen)}; {outer.row.kind}: {outer.told(seen)}",
                wanted="one launcher, or launchers that name the same rank or run one inside the other",
                change="unset the variables of the launcher that did not start this process",
            )
    same = [claim for claim in claims if _agree(inner, claim)]
    has_master = _MASTER_ADDRESS in seen and _MASTER_PORT in seen
    chosen = inner
    if inner.row.kind in MPI_KINDS and has_master:
        chosen = next((claim for claim in same if claim.row.kind == SLURM), inner)
    sizes = [claim.size for claim in (chosen, *same) if claim.size is not None]
    local_ranks = [claim.local_rank for claim in (chosen, *same) if claim.local_rank is not None]
    local_sizes = [claim.local_size for claim in (chosen, *same) if claim.local_size is not None]
    variables = list(chosen.variables)
    address, port = None, None
    if chosen.row.kind not in MPI_KINDS:
        address, port = _master(seen, chosen)
        variables += [name for name in (_MASTER_ADDRESS, _MASTER_PORT, _LOCAL_STORE) if name in seen]
    is_torchrun = chosen.row.kind == TORCHRUN
    return Launcher(
        kind=chosen.row.kind,
        rank=chosen.rank,
        size=sizes[0] if sizes else None,
        local_rank=local_ranks[0] if local_ranks else None,
        local_size=local_sizes[0] if local_sizes else None,
        master_address=address,
        master_port=port,
        store_is_served=is_torchrun and seen.get(_SERVED, "") == "True",
        # A torchrun started by a spawned rank hands that rank's store on to ranks that have no business there.
        local_store=seen.get(_LOCAL_STORE) if is_torchrun and _RUN_ID not in seen else None,
        attempt=_number(_ATTEMPT, seen[_ATTEMPT], 0) if is_torchrun and _ATTEMPT in seen else 0,
        variables=tuple(variables),
        notes=tuple(notes),
    )


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` less everything by which a launcher speaks to its ranks: for processes that are no ranks of its."""
    return {
        name: value
        for name, value in environ.items()
        if name not in VARIABLES and name not in _TORCHRUN_EXTRA and not name.startswith(FAMILIES)
    }


def _claim(row: _Row, seen: Mapping[str, str], environ: Mapping[str, str], notes: list[str]) -> _Claim | None:
    if row.rank not in seen:
        # WORLD_SIZE alone is looked at once all rows are known; elsewhere a size without a rank is half a launcher.
        if row.size is not None and row.size in seen and row.kind in MPI_KINDS:
            raise _half(row.rank, {row.size: seen[row.size]}, environ)
        if row.kind == SLURM and row.size in seen:
            notes.append(f"{row.size} is set and {row.rank} is not: a shell inside an allocation, not a task of srun")
        return None
    size_name = row.size
    if row.kind == SLURM:
        why_not = _no_step(seen)
        if why_not:
            notes.append(why_not)
            return None
        # A step may have fewer tasks than its allocation.
        size_name = _SLURM_STEP_SIZE if _SLURM_STEP_SIZE in seen else row.size
    if size_name is not None and size_name not in seen:
        if row.kind == KUBERNETES and _MASTER_ADDRESS not in seen and _MASTER_PORT not in seen:
            notes.append(
                f"{row.rank} is set and {size_name}, {_MASTER_ADDRESS}, {_MASTER_PORT} are not: a Job whose pods do "
                "not form a group"
            )
            return None
        raise _half(size_name, {row.rank: seen[row.rank]}, environ)
    if row.kind == KUBERNETES and "RANK" in seen:
        # RANK and WORLD_SIZE belong together, so the index only says which pod this is.
        return None
    names = [name for name in (row.rank, size_name, row.local_rank, row.local_size) if name and name in seen]
    size = _number(size_name, seen[size_name], 1) if size_name else None
    rank = _number(row.rank, seen[row.rank], 0)
    local_rank = _number(row.local_rank, seen[row.local_rank], 0) if row.local_rank in seen and row.local_rank else None
    local_size = _number(row.local_size, seen[row.local_size], 1) if row.local_size in seen and row.local_size else None
    _below(row.rank, rank, size_name, size)
    _below(row.local_rank, local_rank, row.local_size, local_size)
    return _Claim(row=row, rank=rank, size=size, local_rank=local_rank, local_size=local_size, variables=tuple(names))


def _no_step(seen: Mapping[str, str]) -> str | None:
    if _SLURM_STEP in seen:
        if _number(_SLURM_STEP, seen[_SLURM_STEP], 0) >= _FIRST_SPECIAL_STEP:
            return f"{_SLURM_STEP}={seen[_SLURM_STEP]} is a batch script's or interactive shell's step, not an srun"
        return None
    if _SLURM_JOB in seen:
        return f"SLURM_PROCID is set inside job {seen[_SLURM_JOB]} without {_SLURM_STEP}: a batch script, not an srun"
    return None


def _check_lone_size(seen: Mapping[str, str], claims: list[_Claim]) -> None:
    """WORLD_SIZE without RANK: batch scripts export it beside another launcher's rank, whose size it then must be."""
    if "WORLD_SIZE" not in seen or "RANK" in seen or any(claim.row.kind == KUBERNETES for claim in claims):
        return
    size = _number("WORLD_SIZE", seen["WORLD_SIZE"], 1)
    if not claims:
        raise ConfigError(
            what="launcher variables",
            got=f"WORLD_SIZE={size} without a rank",
            wanted="RANK (or JOB_COMPLETION_INDEX) beside it",
            change="set RANK, or unset WORLD_SIZE",
        )
    known = [claim for claim in claims if claim.size is not None]
    if known and all(claim.size != size for claim in known):
        raise ConfigError(
            what="launcher variables",
            got=f"WORLD_SIZE={size}; " + "; ".join(f"{claim.row.kind}: {claim.told(seen)}" for claim in known),
            wanted="the same number of ranks",
            change="unset WORLD_SIZE or set it to the launcher's number of ranks",
        )


def _agree(one: _Claim, other: _Claim) -> bool:
    return one.rank == other.rank and (one.size is None or other.size is None or one.size == other.size)


def _nests(inner: _Claim, outer: _Claim, seen: Mapping[str, str]) -> bool:
    """Whether the ranks of `inner` can be children of the tasks of `outer`."""
    if inner.size is None or inner.local_size is None:
        return False
    if inner.row.kind == TORCHRUN:
        if _NUM_AGENTS in seen:
            num_agents = _number(_NUM_AGENTS, seen[_NUM_AGENTS], 1)
        elif inner.size % inner.local_size == 0:
            num_agents = inner.size // inner.local_size
        else:
            return False
        return num_agents == outer.size
    if inner.row.kind in (OPEN_MPI, MPICH) and outer.row.kind == SLURM and outer.size is not None:
        # One daemon per task of the step; each of the other daemons starts at least one of the other ranks.
        others, other_daemons = inner.size - inner.local_size, outer.size - 1
        return others >= other_daemons and (other_daemons > 0 or others == 0)
    return False


def _master(seen: Mapping[str, str], claim: _Claim) -> tuple[str | None, int | None]:
    address, port = seen.get(_MASTER_ADDRESS), seen.get(_MASTER_PORT)
    if (address is None) != (port is None) and claim.size != 1:
        missing, present = (_MASTER_ADDRESS, _MASTER_PORT) if address is None else (_MASTER_PORT, _MASTER_ADDRESS)
        raise _half(missing, {present: seen[present]}, seen)
    number = _number(_MASTER_PORT, port, 1) if port is not None else None
    if number is not None and number > 65535:
        raise ConfigError(what=_MASTER_PORT, got=port, wanted="a port in 1..65535")
    return address, number


def _half(missing: str, present: Mapping[str, str], environ: Mapping[str, str]) -> ConfigError:
    state = "empty" if missing in environ else "not set"
    return ConfigError(
        what="launcher variables",
        got=", ".join(f"{name}={value}" for name, value in present.items()) + f", and {missing} is {state}",
        wanted=f"{missing} beside it",
        change=f"set {missing}, or unset the others",
    )


def _number(name: str, text: str, low: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= low):
        raise ConfigError(what=name, got=text, wanted=f"a decimal integer >= {low}")
    return int(text)


def _below(rank_name: str | None, rank: int | None, size_name: str | None, size: int | None) -> None:
    if rank is not None and size is not None and rank >= size:
        raise ConfigError(what=f"{rank_name}, {size_name}", got=f"{rank}, {size}", wanted=f"a rank below {size}")
