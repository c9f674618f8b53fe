"""What counts as a communicator, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from a2a.comm import Comm, resolve
from a2a.errors import ConfigError, Unsupported


class Threes:
    """A caller's own group of three, of which this is rank 1."""

    def __init__(self, rank: object = 1, size: object = 3):
        self.rank, self.size, self.roots = rank, size, []

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def allgather(self, obj):
        return [obj] * 3

    def bcast(self, obj, root=0):
        self.roots.append(root)
        return f"from {root}"

    def barrier(self):
        self.roots.append("barrier")

    def Split(self, color, key=0):
        return Threes(0, 1)


def test_own_object():
    own = Threes()
    comm = resolve(own, timeout_s=1)
    assert isinstance(comm, Comm)
    assert (comm.Get_rank(), comm.Get_size()) == (1, 3)
    assert comm.allgather("x") == ["x"] * 3
    assert comm.bcast("x", root=2) == "from 2"
    comm.barrier()
    assert own.roots == [2, "barrier"]
    assert comm.Split(0).Get_size() == 1
    with pytest.raises(ConfigError, match="inside the group"):
        comm.bcast("x", root=3)
    with pytest.raises(ConfigError, match="color"):
        comm.Split(-1)


def test_resolved_group_is_itself():
    comm = resolve(Threes(), timeout_s=1)
    assert resolve(comm, timeout_s=1) is comm


def test_all_missing_verbs_are_listed():
    class Half:
        def Get_rank(self):
            return 0

        barrier = None

    with pytest.raises(ConfigError, match="Half without Get_size, allgather, bcast, barrier, Split"):
        resolve(Half(), timeout_s=1)
    with pytest.raises(ConfigError, match="int without"):
        resolve(3, timeout_s=1)


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 3), ("0", 3), (0, 0), (0, None), (0.0, 3)])
def test_answers_that_cannot_be(rank, size):
    with pytest.raises(ConfigError, match="Get_"):
        resolve(Threes(rank, size), timeout_s=1)


def test_gathered_objects_are_counted():
    class Two(Threes):
        def allgather(self, obj):
            return [obj] * 2

    class Single(Threes):
        def allgather(self, obj):
            return 7

    for wrong in (Two(), Single()):
        with pytest.raises(ConfigError, match="allgather"):
            resolve(wrong, timeout_s=1).allgather("x")


def test_split_must_give_a_new_object():
    class Same(Threes):
        def Split(self, color, key=0):
            return self

    with pytest.raises(ConfigError, match="new object"):
        resolve(Same(), timeout_s=1).Split(0)


def test_group_of_one():
    comm = resolve(None, timeout_s=1, environ={"RANK": "0", "WORLD_SIZE": "1"})
    sent = {"a": [1]}
    (got,) = comm.allgather(sent)
    assert got == sent
    assert got["a"] is not sent["a"], "a group of one copies, as a larger one would"
    assert comm.bcast(sent) == sent
    comm.barrier()
    assert comm.Split(3).Get_size() == 1
    with pytest.raises(ConfigError, match="inside the group"):
        comm.bcast(sent, root=1)


def test_nobody_started_this():
    with pytest.raises(ConfigError, match=r"torchrun.*Slurm"):
        resolve(None, timeout_s=1, environ={})
    with pytest.raises(ConfigError, match="batch script"):
        resolve(None, timeout_s=1, environ={"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})


def test_no_place_to_meet():
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        resolve(None, timeout_s=1, environ={"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_deadline_is_a_time(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        resolve(Threes(), timeout_s=timeout_s)


def test_absent_mpi4py_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(Unsupported, match=r"pip install 'a2a\[mpi\]'"):
        resolve(None, timeout_s=1, environ={"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_nothing_is_imported_before_it_is_chosen():
    code = """
import sys
from a2a.comm import resolve
resolve(None, timeout_s=1, environ={"RANK": "0", "WORLD_SIZE": "1"})
print([name for name in ("mpi4py", "a2a.comm.process_group", "a2a.comm.store", "a2a.comm.mpi") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"
