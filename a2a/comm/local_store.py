"""comm/local_store: a key-value store between the processes that the local spawn starts.

Owns a unix socket of the parent and the few operations that comm/store asks of a store. Refuses other users'
processes, and to know what the keys mean.

Why not a TCPStore here as well: torch looks up the names of both ends of each connection, on loopback too, and where
name servers are slow or lose datagrams each lookup can take seconds; ranks of one machine need no network at all.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid
from multiprocessing import connection
from typing import Any, Final

_PEER_CREDENTIALS: Final = struct.Struct("3i")
_BACKLOG: Final = 512


class LocalStoreServer:
    """Serves until `close`, on a thread of this process. `address` is what a `LocalStore` connects to."""

    def __init__(self) -> None:
        # In the abstract namespace a socket has no file, so a killed parent leaves nothing behind.
        self.address = f"a2a-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_BACKLOG)
        self._closing, self._close = os.pipe()
        self._values: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self._serve, name="a2a local store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the service and its connections."""
        os.write(self._close, b"x")
        self._thread.join()
        self._listener.close()
        os.close(self._closing)
        os.close(self._close)

    def _serve(self) -> None:
        clients: list[connection.Connection] = []
        while True:
            for ready in connection.wait([self._closing, self._listener, *clients]):
                if ready == self._closing:
                    for client in clients:
                        client.close()
                    return
                if ready is self._listener:
                    accepted, _ = self._listener.accept()
                    if _is_same_user(accepted):
                        clients.append(connection.Connection(accepted.detach()))
                    else:
                        accepted.close()
                elif isinstance(ready, connection.Connection):
                    try:
                        ready.send(self._answer(*ready.recv()))
                    except (EOFError, OSError, KeyError):
                        # Gone, or asking for what nobody gave: its own error, not the others'.
                        clients.remove(ready)
                        ready.close()

    def _answer(self, verb: str, keys: list[str], content: Any) -> Any:
        if verb == "set":
            self._values[keys[0]] = content
            return None
        if verb == "get":
            return [self._values[key] for key in keys]
        if verb == "check":
            return all(key in self._values for key in keys)
        if verb == "add":
            total = int(self._values.get(keys[0], b"0")) + content
            self._values[keys[0]] = str(total).encode()
            return total
        return self._values.pop(keys[0], None) is not None  # "delete"


class LocalStore:
    """One process's connection to a `LocalStoreServer`, with a torch Store's verbs.

    Raises:
        ConnectionResetError, BrokenPipeError: the server has ended, or has not answered for `timeout_s`.
    """

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            client.connect("\0" + address)
            if not _is_same_user(client):
                raise PermissionError(f"the store at {address} belongs to another user")
        except BaseException:
            client.close()
            raise
        self._connection = connection.Connection(client.detach())
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`; an older one is gone."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """The value of a key that `check` has found."""
        value: bytes = self._ask("get", [key])[0]
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that `check` has found, in one question."""
        values: list[bytes] = self._ask("get", keys)
        return values

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there; waits for none."""
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; its new value."""
        return int(self._ask("add", [key], amount))

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", [key]))

    def _ask(self, verb: str, keys: list[str], content: Any = None) -> Any:
        with self._lock:
            try:
                self._connection.send((verb, keys, content))
                if not self._connection.poll(self._timeout_s):
                    raise ConnectionResetError("the process that serves the local store does not answer")
                return self._connection.recv()
            except EOFError as error:
                raise ConnectionResetError("the process that serves the local store has ended") from error


def _is_same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
