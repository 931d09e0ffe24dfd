"""How the ranks of a process group find each other: through the store that torch hands over."""

import json
import os
import secrets
import socket
import weakref

from torch._C._distributed_c10d import ProcessGroup

import weft

from ._backend import HAS_BACKENDS, Backend
from ._device import ranks_a_device
from ._group import Group
from ._messages import Mailroom, Threads
from ._work import FAREWELL


class Home:
    """The agent of this process in one job, shared by all its groups, and closed with the last of them."""

    def __init__(self, secret: str, store) -> None:
        name = f"torch-{os.getpid()}-{secrets.token_hex(8)}"
        listen = os.environ.get("WEFT_LISTEN") or f"{_own_address(store)}:0"
        self.secret = secret
        # Ranks leave when they are done, which is nothing to warn of.
        log = os.environ.get("WEFT_LOG", "error")
        self.agent = weft.Agent(name, listen=listen, secret=secret, log=log)
        self.mailroom = Mailroom(self.agent)
        # At the latest when the interpreter ends.
        self._ranks = 1
        self._closing = weakref.finalize(self, _leave, self.agent, self.mailroom.threads)

    def crowd(self, ranks: int) -> int:
        """How many ranks may share a GPU with this one, by the largest group that it is in."""
        self._ranks = max(self._ranks, ranks)
        return ranks_a_device(self._ranks)

    def card(self) -> str:
        return json.dumps([self.agent.name, self.agent.address, self.agent.epoch])


def _leave(agent: weft.Agent, threads: Threads) -> None:
    agent.close()
    threads.wait(FAREWELL)


# By secret. Ranks of several jobs may live in one process one after the other, and in tests even at once.
_homes: weakref.WeakValueDictionary[str, Home] = weakref.WeakValueDictionary()


def _own_address(store) -> str:
    """The address of this host on the way to the store, which other ranks come from too."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if not host or host in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, getattr(store, "port", 1) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the way.
            probe.connect(place)
            address = probe.getsockname()[0]
    except OSError:
        return "0.0.0.0"
    return f"[{address}]" if ":" in address else address


def _home(store, rank: int) -> Home:
    if rank == 0:
        # A group within a job uses the sessions that are there.
        here = (home for home in _homes.values() if home.mailroom.is_here())
        home = next(here, None) or Home(secrets.token_hex(32), store)
        _homes[home.secret] = home
        store.set("weft/secret", home.secret)
        return home
    secret = store.get("weft/secret").decode()
    home = _homes.get(secret)
    if home is None or not home.mailroom.is_here():
        home = Home(secret, store)
    _homes[secret] = home
    return home


def connect(store, rank: int, size: int, name: str, timeout: float) -> Backend:
    """Joins the group whose ranks share `store`."""
    home = _home(store, rank)
    if rank == 0:
        # Names repeat: whoever destroys its groups and begins again counts from the start.
        store.set("weft/name", f"torch/{name}/{secrets.token_hex(8)}")
    name = store.get("weft/name").decode()
    store.set(f"weft/{rank}", home.card())
    cards = [json.loads(store.get(f"weft/{other}")) for other in range(size)]
    communicator = weft.Communicator(
        home.agent,
        name,
        rank,
        size,
        members=[(address, epoch) for _, address, epoch in cards],
        timeout=timeout,
        deadline=timeout,
    )
    return Backend(home, communicator, [agent for agent, _, _ in cards], name, timeout)


def create(options, backend_options: object = None) -> Backend | ProcessGroup:
    """What torch calls for each group that this process is a member of."""
    timeout = options.timeout.total_seconds()
    rank, size = options.group_rank, options.group_size
    backend = connect(options.store, rank, size, options.group_id, timeout)
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    # A group of its own spares every call the way through torch's dispatcher. One with other backends for other devices needs that way,
    # and is named after one of those.
    beside = getattr(options, "process_group", None)
    alone = not HAS_BACKENDS or beside is None or beside.name() == "custom"
    return Group(options.store, rank, size, backend) if alone else backend
