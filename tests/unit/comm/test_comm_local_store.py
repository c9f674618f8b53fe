"""The store at which ranks of the local spawn meet."""

from __future__ import annotations

import os

import pytest
from descriptors import open_descriptors

from a2a.comm import resolve
from a2a.comm.local_store import LocalStore, LocalStoreServer
from a2a.errors import ConfigError


@pytest.fixture
def server():
    served = LocalStoreServer()
    yield served
    served.close()


def test_verbs_are_those_of_a_torch_store(server):
    one, other = LocalStore(server.address, timeout_s=60), LocalStore(server.address, timeout_s=60)
    assert not one.check(["a"])
    one.set("a", b"\x00\xff")
    other.set("b", b"")
    assert one.check(["a", "b"])
    assert not one.check(["a", "c"])
    assert other.multi_get(["b", "a"]) == [b"", b"\x00\xff"]
    assert other.get("a") == b"\x00\xff"
    assert [one.add("n", 2), other.add("n", 3)] == [2, 5]
    assert one.delete_key("a")
    assert not one.delete_key("a")
    assert not other.check(["a"])


def test_a_client_that_leaves_disturbs_nobody(server):
    stays = LocalStore(server.address, timeout_s=60)
    leaves = LocalStore(server.address, timeout_s=60)
    leaves.set("a", b"1")
    del leaves
    assert stays.get("a") == b"1"


def test_end_of_the_server_is_seen():
    served = LocalStoreServer()
    client = LocalStore(served.address, timeout_s=60)
    served.close()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.check(["a"])
    with pytest.raises(ConnectionRefusedError):
        LocalStore(served.address, timeout_s=60)
    environ = {"RANK": "0", "WORLD_SIZE": "2", "A2A_LOCAL_STORE": served.address}
    with pytest.raises(ConfigError, match="A2A_LOCAL_STORE"):
        resolve(None, timeout_s=1, environ=environ)


def test_asking_for_what_nobody_gave_ends_only_the_one_that_asks(server):
    stays, asks = LocalStore(server.address, timeout_s=60), LocalStore(server.address, timeout_s=60)
    with pytest.raises(ConnectionResetError):
        asks.get("never given")
    assert not stays.check(["never given"])


def test_other_users_are_refused(server, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError):
        LocalStore(server.address, timeout_s=60)


def test_descriptors_stay_flat():
    before = open_descriptors()
    for _ in range(3):
        served = LocalStoreServer()
        clients = [LocalStore(served.address, timeout_s=60) for _ in range(4)]
        clients[0].set("a", b"1")
        del clients
        served.close()
    assert open_descriptors() == before
