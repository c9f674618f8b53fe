"""The doctor on machines that lack things."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from a2a.bench import doctor
from a2a.bench.doctor import diagnose, find_mpiexec
from a2a.bench.sweep import Sweep, _device
from a2a.comm.protocol import SingleComm
from a2a.config import model_preset


def _texts(diagnosis: doctor.Diagnosis) -> dict[str, str]:
    return {each.topic: each.text for each in diagnosis.findings}


def test_without_mpi_numba_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name == "torch" else None)
    monkeypatch.setattr(doctor, "find_mpiexec", lambda: None)
    diagnosis = diagnose()
    texts = _texts(diagnosis)
    assert diagnosis.chosen == "host"
    assert "not installed" in texts["MPI"] and "none found" in texts["mpiexec"] and "numba" in texts["host sums"]
    assert texts["versions"].endswith("torch 1.0")


def test_without_memory_files_no_transport_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    diagnosis = diagnose()
    assert diagnosis.transports["host"] and "Function not implemented" in diagnosis.transports["host"][-1]
    assert diagnosis.chosen != "host"


def test_a_descriptor_that_does_not_pass_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHILD", "raise SystemExit('seccomp says no')")
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 5)
    finding = doctor._descriptors()
    assert finding.ok is False and "seccomp says no" in finding.text


def test_mpiexec_beside_this_python_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert find_mpiexec() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").write_text("#!/bin/sh\n")
    assert find_mpiexec() is None
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
    assert find_mpiexec() == str(tmp_path / "bin" / "mpiexec")


def test_conflicting_launchers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert "WORLD_SIZE" in _texts(diagnose())["launcher"]


@pytest.mark.parametrize(
    ("variable", "value", "chosen", "why"),
    [
        ("A2A_TRANSPORT", "host", "host", "A2A_TRANSPORT names it"),
        ("A2A_TRANSPORT", "auto", "host", "the first of"),
        ("A2A_TRANSPORT", "ether", None, "A2A_TRANSPORT=ether is none of"),
        ("A2A_TIMEOUT", "3", None, "A2A_TIMEOUT"),
    ],
)
def test_the_choice_is_what_an_object_would_take(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, chosen: str | None, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(variable, value)
    diagnosis = diagnose()
    assert diagnosis.chosen == chosen and why in _texts(diagnosis)["auto would choose"]


def test_a_named_transport_that_cannot_serve_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("A2A_TRANSPORT", "nvlink")
    assert diagnose().chosen is None


def test_rows_lie_where_the_named_transport_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs, too."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("A2A_TRANSPORT", "host")
    sweep = Sweep(
        preset=model_preset("olmoe-1b-7b"), tokens=(1,), wire_formats=("bf16",), routings=("uniform",),
        row_orders=("compact",), payloads_in_workspace=(True,), peers=(), rounds=1, transport="auto",
        modes=("eager",), seed=0, num_sms=None, rounds_per_graph=None,
    )  # fmt: skip
    assert _device(sweep, SingleComm()).type == "cpu"
