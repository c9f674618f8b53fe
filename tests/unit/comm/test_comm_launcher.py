"""The table of environments: who started this process, as which rank, or why that cannot be said."""

from __future__ import annotations

import pytest

from a2a.comm import detect
from a2a.comm.launcher import without_launchers
from a2a.errors import ConfigError

MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **MASTER,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}
SLURM_AGENTS = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
BATCH_SHELL = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "5", "WORLD_SIZE": "8", **MASTER}

RANK_5_OF_8 = {
    "torchrun": (TORCHRUN, "torchrun", 1, 4),
    "rank and size set by hand": ({"RANK": "5", "WORLD_SIZE": "8", **MASTER}, "torchrun", None, None),
    "Open MPI": (OPEN_MPI, "openmpi", 1, 4),
    "Open MPI 5, which speaks PMIx": ({**OPEN_MPI, "PMIX_RANK": "5"}, "openmpi", 1, 4),
    "MPICH": (MPICH, "mpich", 1, 4),
    "MPICH without local ranks": ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "mpich", None, None),
    "Slurm": ({**SLURM, **MASTER}, "slurm", 1, None),
    "Slurm, variables handed on without the step": (
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", **MASTER},
        "slurm",
        1,
        None,
    ),
    "a Slurm step smaller than its allocation": (
        {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8", **MASTER},
        "slurm",
        1,
        None,
    ),
    "Kubernetes": (KUBERNETES, "kubernetes", None, None),
    "Kubernetes operator that sets RANK": ({"JOB_COMPLETION_INDEX": "3", **TORCHRUN}, "torchrun", 1, 4),
    "torchrun, one agent per Slurm task": ({**TORCHRUN, **SLURM_AGENTS}, "torchrun", 1, 4),
    "torchrun in a Slurm batch shell": ({**TORCHRUN, **BATCH_SHELL}, "torchrun", 1, 4),
    "torchrun, one agent per MPI rank": ({**TORCHRUN, "PMI_RANK": "1", "PMI_SIZE": "2"}, "torchrun", 1, 4),
    "torchrun that says only its local size": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER, **SLURM_AGENTS},
        "torchrun",
        1,
        4,
    ),
    "srun of a script that exports RANK": ({"RANK": "5", "WORLD_SIZE": "8", **MASTER, **SLURM}, "torchrun", 1, None),
    "mpirun of a script that exports RANK": (
        {"RANK": "5", "WORLD_SIZE": "8", **MASTER, **OPEN_MPI},
        "torchrun",
        1,
        4,
    ),
    "srun of an MPI program": ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, "mpich", 1, None),
    "srun of an MPI program over PMIx": ({**SLURM, "PMIX_RANK": "5"}, "pmix", 1, None),
    "srun with PMI where a master is set": ({**SLURM, **MASTER, "PMI_RANK": "5", "PMI_SIZE": "8"}, "slurm", 1, None),
    "mpirun in a Slurm batch shell": ({**BATCH_SHELL, **MPICH}, "mpich", 1, 4),
    "mpirun whose daemons are Slurm tasks": ({**SLURM_AGENTS, **MPICH}, "mpich", 1, 4),
    "Slurm and an exported WORLD_SIZE": ({**SLURM, **MASTER, "WORLD_SIZE": "8"}, "slurm", 1, None),
    "empty values count as unset": (
        {**SLURM, **MASTER, "RANK": "", "WORLD_SIZE": "", "PMI_RANK": " "},
        "slurm",
        1,
        None,
    ),
}


@pytest.mark.parametrize(("environ", "kind", "local_rank", "local_size"), RANK_5_OF_8.values(), ids=RANK_5_OF_8)
def test_rank_5_of_8(environ, kind, local_rank, local_size):
    found = detect(environ)
    assert (found.kind, found.rank, found.size) == (kind, 5, 8)
    assert (found.local_rank, found.local_size) == (local_rank, local_size)
    meets_at_master = kind in ("torchrun", "slurm", "kubernetes")
    assert (found.master_address, found.master_port) == (("node0", 29500) if meets_at_master else (None, None))
    assert found.store_is_served == (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    assert set(found.variables) <= set(environ)


NO_RANK = {
    "nothing": {},
    "only a master": MASTER,
    "empty": {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""},
    "Slurm batch shell": BATCH_SHELL,
    "Slurm batch shell that set a master": {**BATCH_SHELL, **MASTER},
    "shell of salloc": {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"},
    "interactive step": {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290"},
    "batch step": {**BATCH_SHELL, "SLURM_STEP_ID": "4294967291"},
    "pod of a Job that is no group": {"JOB_COMPLETION_INDEX": "0"},
}


@pytest.mark.parametrize("environ", NO_RANK.values(), ids=NO_RANK)
def test_no_rank(environ):
    found = detect(environ)
    assert (found.kind, found.rank, found.size, found.variables) == ("none", None, None, ())
    looks_like_one = any(name.startswith(("SLURM_", "JOB_")) for name in environ)
    assert bool(found.notes) == looks_like_one


def test_zero_is_a_rank_and_unset_is_not():
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).rank == 0
    assert detect({"PMI_RANK": "0", "PMI_SIZE": "2"}).rank == 0
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", **MASTER}).local_rank == 0
    assert detect({}).rank is None


def test_store_of_the_local_spawn_is_for_its_own_ranks():
    spawned = {"RANK": "0", "WORLD_SIZE": "2", **MASTER, "A2A_LOCAL_STORE": "a2a-0123"}
    assert detect(spawned).local_store == "a2a-0123"
    assert detect({**TORCHRUN, "A2A_LOCAL_STORE": "a2a-0123"}).local_store is None, "torchrun inside a spawned rank"


def test_size_of_pmix_is_known_to_mpi_alone():
    found = detect({"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun"})
    assert (found.kind, found.rank, found.size) == ("pmix", 2, None)


REFUSED = {
    "size missing": ({"RANK": "0", **MASTER}, ["WORLD_SIZE", "not set"]),
    "size empty": ({"RANK": "0", "WORLD_SIZE": "", **MASTER}, ["WORLD_SIZE", "empty"]),
    "rank missing": ({"WORLD_SIZE": "4", **MASTER}, ["RANK", "WORLD_SIZE"]),
    "rank empty": ({"RANK": "", "WORLD_SIZE": "4"}, ["RANK"]),
    "Open MPI size missing": ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE"]),
    "Open MPI rank missing": ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK"]),
    "PMI size missing": ({"PMI_RANK": "1"}, ["PMI_SIZE"]),
    "Slurm size missing": ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, ["SLURM_NTASKS"]),
    "Kubernetes size missing": ({"JOB_COMPLETION_INDEX": "1", **MASTER}, ["WORLD_SIZE"]),
    "port missing": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, ["MASTER_PORT"]),
    "address missing": ({**SLURM, "MASTER_PORT": "29500"}, ["MASTER_ADDR"]),
    "port too big": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "65536"}, ["65536"]),
    "not a number": ({"RANK": "one", "WORLD_SIZE": "2", **MASTER}, ["RANK", "one"]),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, ["RANK", "-1"]),
    "rank not below size": ({"PMI_RANK": "2", "PMI_SIZE": "2"}, ["PMI_RANK", "PMI_SIZE"]),
    "size zero": ({"PMI_RANK": "0", "PMI_SIZE": "0"}, ["PMI_SIZE"]),
    "local rank not below local size": ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    "RANK and MPI disagree": (
        {"RANK": "0", "WORLD_SIZE": "2", **MASTER, **OPEN_MPI},
        ["RANK=0", "WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=5"],
    ),
    "two MPIs disagree": ({**OPEN_MPI, "PMI_RANK": "0", "PMI_SIZE": "8"}, ["OMPI_COMM_WORLD_RANK=5", "PMI_RANK=0"]),
    "PMIx disagrees": ({**OPEN_MPI, "PMIX_RANK": "1"}, ["PMIX_RANK=1"]),
    "torchrun agents are not the Slurm tasks": (
        {**TORCHRUN, **SLURM_AGENTS, "SLURM_NTASKS": "3"},
        ["WORLD_SIZE=8", "SLURM_NTASKS=3"],
    ),
    "more Slurm tasks than MPI could have daemons": (
        {**SLURM, **MPICH, "SLURM_NTASKS": "12"},
        ["PMI_SIZE=8", "SLURM_NTASKS=12"],
    ),
    "exported WORLD_SIZE is another": ({**SLURM, **MASTER, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "SLURM_NTASKS=8"]),
}


@pytest.mark.parametrize(("environ", "named"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_variables_named(environ, named):
    with pytest.raises(ConfigError) as error:
        detect(environ)
    for name in named:
        assert name in str(error.value)


def test_detect_leaves_its_argument_alone():
    environ = dict(TORCHRUN)
    detect(environ)
    assert environ == TORCHRUN


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, MPICH, {**SLURM, **MASTER}, KUBERNETES])
def test_without_launchers_leaves_no_rank(environ):
    rest = without_launchers({**environ, "PATH": "/bin", "MPIR_CVAR_DEBUG_SUMMARY": "0"})
    assert rest == {"PATH": "/bin", "MPIR_CVAR_DEBUG_SUMMARY": "0"}
    assert detect(rest).kind == "none"
