"""The A2A_* variables: each known one is honoured, nothing else is let pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from a2a.env import Env
from a2a.errors import ConfigError


def test_defaults():
    assert Env.read({}) == Env(startup_timeout_s=300.0, timeout_s=30.0, transport=None, local_store=None)
    assert Env.read({"A2A_TIMEOUT_S": "", "A2A_TRANSPORT": " ", "PATH": "/bin"}) == Env()


def test_values():
    read = Env.read({"A2A_STARTUP_TIMEOUT_S": "1.5", "A2A_TIMEOUT_S": "2", "A2A_TRANSPORT": "host"})
    assert read == Env(startup_timeout_s=1.5, timeout_s=2.0, transport="host")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1s", "1e7"])
def test_bad_seconds(text):
    with pytest.raises(ConfigError, match="A2A_TIMEOUT_S"):
        Env.read({"A2A_TIMEOUT_S": text})


@pytest.mark.parametrize(("text", "read"), [("1", "1"), ("0", None), ("", None), (" 1 ", "1"), ("shared", "shared")])
def test_switch(text, read):
    assert Env.read({"A2A_INSTALL_FLASHINFER": text}).install_flashinfer == read


@pytest.mark.parametrize("text", ["yes", "2", "true"])
def test_bad_switch(text):
    with pytest.raises(ConfigError, match="A2A_INSTALL_FLASHINFER"):
        Env.read({"A2A_INSTALL_FLASHINFER": text})


def test_unknown_variable_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"A2A_TIMEOUT(?!_).*A2A_TIMEOUT_S.*"):
        Env.read({"A2A_TIMEOUT": "1"})


def test_reads_the_process_environment_at_the_call():
    code = "import os, a2a.env as e; os.environ['A2A_TIMEOUT_S'] = '7'; print(e.Env.read().timeout_s)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.split() == ["7.0"]
