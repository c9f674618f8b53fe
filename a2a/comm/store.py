"""comm/store: the group of ranks that a launcher's variables name, over a torch TCPStore.

Owns the meeting at MASTER_ADDR:MASTER_PORT (for ranks of the local spawn: at the store of the process that started
them), object collectives over a store, and the split of any group. Refuses to touch the default process group and to
leave keys behind.

A collective ends on the group's keeper (the rank that serves the store, or rank 0 where a launcher serves it) only
after every other rank has read; the keeper then drops the keys. So the rank that serves may exit as soon as its own
last collective returns: the others need nothing more from it. A part of the group that leaves that rank out gets a
store of its own.
"""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import time
import uuid
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from a2a.comm.launcher import Launcher
from a2a.comm.local_store import LocalStore
from a2a.comm.protocol import PHASE, Comm, Deadline, SingleComm, check_color, check_root
from a2a.errors import ConfigError, MismatchError, PeerLost

_STAGGER_S = 0.004
_LAST_STAGGER_S = 0.5
_BROKEN = (DistError, ConnectionResetError, BrokenPipeError)
"""What a store raises once its server is gone; not OSError, which this package's own deadline errors are too."""
_ROOT_KEY = "a2a"
_ABSENT = "look at what that rank does, or raise startup_timeout_s"


class StoreComm:
    """`size` ranks that share `store`, with all their keys under `prefix`. Every wait has `timeout_s`.

    `server` is the rank of the group whose process serves the store, None where it is no process of the ranks.
    """

    def __init__(
        self, store: Store | LocalStore, prefix: str, rank: int, size: int, *, server: int | None, timeout_s: float
    ) -> None:
        self._store = store
        self._server = server
        self._keeper = 0 if server is None else server
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._num_collectives = 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        mine = pickle.dumps(obj)
        call = self._next_call()
        given = [f"{call}/given/{rank}" for rank in range(self._size)]
        gathered = f"{call}/gathered"
        try:
            _put(self._store, given[self._rank], mine)
            if self._rank == self._keeper:
                self._wait({rank: given[rank] for rank in range(self._size)})
                parts = self._store.multi_get(given)
                _put(self._store, gathered, pickle.dumps(parts))
                self._drop_when_read(call, [*given, gathered])
            else:
                self._wait({self._keeper: gathered}, blame={rank: given[rank] for rank in range(self._size)})
                parts = pickle.loads(self._store.get(gathered))
                _put(self._store, f"{call}/read/{self._rank}", b"")
        except _BROKEN as error:
            raise self._lost() from error
        return [pickle.loads(part) for part in parts]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        check_root(root, self._size, self._rank)
        call = self._next_call()
        given = f"{call}/given/{root}"
        try:
            if self._rank == root:
                content = pickle.dumps(obj)
                _put(self._store, given, content)
            else:
                self._wait({root: given})
                content = self._store.get(given)
            if self._rank == self._keeper:
                self._drop_when_read(call, [given])
            else:
                _put(self._store, f"{call}/read/{self._rank}", b"")
        except _BROKEN as error:
            raise self._lost() from error
        return pickle.loads(content)

    def barrier(self) -> None:
        self.allgather(None)

    def Split(self, color: int, key: int = 0) -> Comm:
        check_color(color, self._rank)
        entries = self.allgather((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(entries) if c == color)
        ranks = [r for _, r in members]
        shares = {c: self._server is None or entries[self._server][0] == c for c, _ in entries}
        if not all(shares.values()):
            # Collective over the whole group, so all take this way when one part needs it.
            return split(self, color, key, timeout_s=self._timeout_s)
        if len(ranks) == 1:
            return SingleComm()
        server = None if self._server is None else ranks.index(self._server)
        prefix = f"{self._prefix}/{self._num_collectives}/{color}"
        return StoreComm(
            self._store, prefix, ranks.index(self._rank), len(ranks), server=server, timeout_s=self._timeout_s
        )

    def _next_call(self) -> str:
        self._num_collectives += 1
        return f"{self._prefix}/{self._num_collectives}"

    def _drop_when_read(self, call: str, keys: list[str]) -> None:
        read = {rank: f"{call}/read/{rank}" for rank in range(self._size) if rank != self._keeper}
        self._wait(read)
        for key in [*keys, *read.values()]:
            self._store.delete_key(key)

    def _wait(self, keys: dict[int, str], blame: dict[int, str] | None = None) -> None:
        # Asking in a loop, not the store's own wait: that one cannot be interrupted and logs every expiry as a fault.
        deadline = Deadline(self._timeout_s, self._rank)
        while not self._store.check(list(keys.values())):
            if not deadline.pause():
                suspects = {**(blame or {}), **keys}
                absent = [rank for rank, key in (blame or keys).items() if not self._store.check([key])]
                raise deadline.expired(absent[0] if absent else next(iter(suspects)), _ABSENT)

    def _lost(self) -> PeerLost:
        return PeerLost(rank=self._rank, peer=self._keeper, phase=PHASE, round=0)


def meet(launcher: Launcher, *, timeout_s: float) -> Comm:
    """All ranks that `launcher` names, met at its master address. Collective, with `timeout_s` for each wait.

    Objects built one after the other meet under keys of their own, so they never mix.

    Raises:
        ConfigError: no master address or port, or a port that another program holds.
        MismatchError: a rank that counts another number of ranks than rank 0 does.
        PeerTimeout: a rank that did not come.
    """
    rank, size = launcher.rank, launcher.size
    if rank is None or size is None:
        raise ConfigError(what="launcher", got=launcher.kind, wanted="one that gives a rank and a size")
    if size == 1:
        return SingleComm()
    root = f"{_ROOT_KEY}/{launcher.attempt}"
    deadline = Deadline(timeout_s, rank)
    server = None if launcher.store_is_served or launcher.local_store is not None else 0
    while True:
        store = _open(launcher, rank, server, timeout_s, deadline)
        try:
            session, session_key = _agree(store, root, rank, size, deadline)
            break
        except _BROKEN as error:
            # Rank 0's store for an earlier object may go away under a rank that is already at the next one.
            if rank == server or not deadline.pause():
                raise PeerLost(rank=rank, peer=0, phase=PHASE, round=0) from error
    comm = StoreComm(store, f"{_ROOT_KEY}/{session}", rank, size, server=server, timeout_s=timeout_s)
    try:
        comm.barrier()
    finally:
        if rank == 0:
            store.delete_key(session_key)
    return comm


def split(comm: Comm, color: int, key: int, *, timeout_s: float) -> Comm:
    """The ranks of `comm` that gave this `color`, ordered by (key, rank), over a store that its first rank serves.

    Collective over `comm`, which is used for two gathers and left alone.
    """
    rank = comm.Get_rank()
    check_color(color, rank)
    entries = comm.allgather((color, key, _network_identity()))
    members = sorted((k, r) for r, (c, k, _) in enumerate(entries) if c == color)
    ranks = [r for _, r in members]
    one_network = len({entries[r][2] for r in ranks}) == 1
    store: TCPStore | None = None
    meeting: tuple[str, int, str] | None = None
    if rank == ranks[0] and len(ranks) > 1:
        store = _serve(0, timeout_s, rank)
        meeting = ("127.0.0.1" if one_network else _own_address(), store.port, uuid.uuid4().hex)
    meetings = comm.allgather(meeting)
    if len(ranks) == 1:
        return SingleComm()
    address, port, session = meetings[ranks[0]]
    if store is None:
        store = _connect(address, port, Deadline(timeout_s, rank), rank)
    part = StoreComm(store, f"{_ROOT_KEY}/{session}", ranks.index(rank), len(ranks), server=0, timeout_s=timeout_s)
    # The rank that serves may let go of the group at once, so all are connected before it gets it.
    part.barrier()
    return part


def _put(store: Any, key: str, value: bytes) -> None:
    # The store takes bytes; its type stub in torch 2.13 admits text alone.
    store.set(key, value)


def _open(
    launcher: Launcher, rank: int, server: int | None, timeout_s: float, deadline: Deadline
) -> Store | LocalStore:
    if launcher.local_store is not None:
        try:
            return LocalStore(launcher.local_store, timeout_s=timeout_s)
        except OSError as error:
            raise ConfigError(
                what="A2A_LOCAL_STORE",
                got=launcher.local_store,
                wanted="the socket of the process that started this rank, still running",
                change=f"unset it, or let the local spawn set it ({error})",
                rank=rank,
            ) from error
    address, port = launcher.master_address, launcher.master_port
    if address is None or port is None:
        raise ConfigError(
            what="MASTER_ADDR and MASTER_PORT",
            got=f"address {address!r}, port {port!r}",
            wanted=f"both, equal on all ranks: {launcher.kind} starts {launcher.size} ranks and not where they meet",
            rank=rank,
        )
    return _serve(port, timeout_s, rank) if rank == server else _connect(address, port, deadline, rank)


def _agree(store: Store | LocalStore, root: str, rank: int, size: int, deadline: Deadline) -> tuple[str, str]:
    turn = store.add(f"{root}/turn/{rank}", 1)
    key = f"{root}/session/{turn}"
    if rank == 0:
        session = uuid.uuid4().hex
        _put(store, key, pickle.dumps((session, size)))
        return session, key
    while not store.check([key]):
        if not deadline.pause():
            raise deadline.expired(0, _ABSENT)
    session, keeper_size = pickle.loads(store.get(key))
    if keeper_size != size:
        raise MismatchError(
            what="the number of ranks the launcher started",
            values={0: keeper_size, rank: size},
            change="set the same size variable on every rank",
        )
    return session, key


def _serve(port: int, timeout_s: float, rank: int) -> TCPStore:
    try:
        # multi_tenant: a process group that this process makes at the same port shares the server.
        return TCPStore(
            "localhost",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=port != 0,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except _BROKEN as error:
        raise ConfigError(
            what="MASTER_PORT",
            got=port,
            wanted="a port on which rank 0 can listen",
            change=f"choose another ({str(error).splitlines()[0]})",
            rank=rank,
        ) from error


def _connect(address: str, port: int, deadline: Deadline, rank: int) -> TCPStore:
    # Torch looks up the names of both ends of each connection, even on loopback; many ranks that ask at the same
    # instant lose datagrams to some name servers, and then wait for seconds. So they come one after the other.
    time.sleep(min(_STAGGER_S * rank, _LAST_STAGGER_S))
    # A plain socket first: the store's own attempts to connect log a stack trace each while rank 0 is still starting.
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.05, deadline.left_s())):
                pass
            return TCPStore(
                address,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=max(1.0, deadline.left_s())),
            )
        except (OSError, DistError) as error:
            if not deadline.pause():
                raise deadline.expired(
                    0, f"nothing answers at {address}:{port} ({error}); see that rank 0 runs there"
                ) from error


def _network_identity() -> tuple[str, str, int]:
    # Containers of one machine share its boot id, and may share a name, yet not always the loopback interface.
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return socket.gethostname(), boot_id, os.stat("/proc/self/ns/net").st_ino


def _own_address() -> str:
    # Connecting a datagram socket sends nothing; the kernel answers with the address of the interface it would use.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
