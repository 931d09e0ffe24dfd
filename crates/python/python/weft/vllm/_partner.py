"""Workers of other engines, as a worker of this one knows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import weft

from ._description import MAX_BYTES, Description, Mismatch


class Partner:
    """A worker of another engine, for as long as one session with it lasts. Its calls wait, up to a deadline; threads share it."""

    def __init__(self, agent: weft.Agent, address: str, peer: weft.Peer | None = None) -> None:
        self.address = address
        self._agent = agent
        self._lock = threading.Lock()
        # One that came to us is known by its session alone.
        self._peer = peer
        self._description: Description | None = None
        self._regions: dict[str, weft.Region] = {}
        # Rooms for a word each, as many as were needed at a time.
        self._rooms: list[weft.Memory] = []

    @property
    def peer(self) -> weft.Peer:
        if self._peer is None:
            raise Mismatch(f"nobody is connected at {self.address}")
        return self._peer

    @property
    def connected(self) -> bool:
        return self._peer is not None and self._peer.connected

    @property
    def gone(self) -> bool:
        return self._peer is not None and not self._peer.connected

    def connect(self, deadline: float) -> None:
        with self._alone(deadline):
            if self._peer is None:
                self._peer = self._agent.connect(self.address, timeout=left(deadline))

    def description(self, mine: Description, deadline: float) -> Description:
        """What the partner holds, read once, and checked against what is here."""
        with self._alone(deadline):
            if self._description is None:
                region = self.peer.region("about", timeout=left(deadline))
                if region.nbytes > MAX_BYTES:
                    raise Mismatch(f"the description of {self.peer.name} is {region.nbytes} bytes long")
                room = self._agent.allocate(region.nbytes)
                self.peer.read(room, region, deadline=left(deadline), checksum=True).wait()
                description = Description.from_bytes(bytes(memoryview(room).cast("B")[: region.nbytes]))
                room.release()
                self._description = description
            mine.check(self._description)
            return self._description

    def region(self, name: str, deadline: float) -> weft.Region:
        """A region that lives as long as the partner."""
        with self._alone(deadline):
            if name not in self._regions:
                self._regions[name] = self.peer.region(name, timeout=left(deadline))
            return self._regions[name]

    def word(self, region: str, offset: int, deadline: float) -> int:
        """A word of one of its regions, as it is now."""
        table = self.region(region, deadline)
        try:
            room = self._rooms.pop()
        except IndexError:
            room = self._agent.allocate(8)
        # A room that is not given back, because the read failed, may still be written to.
        self.peer.read(room, table, [(offset, 8)], local_spans=[(0, 8)], deadline=left(deadline), checksum=True).wait()
        word = room.read_word(0)
        self._rooms.append(room)
        return word

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """Who has more time may be waiting for the partner already."""
        if not self._lock.acquire(timeout=left(deadline)):
            raise weft.TimedOut(f"others still wait for {self.address}")
        try:
            yield
        finally:
            self._lock.release()


class Partners:
    """All whom a worker knows: by their address, or by their name where they came to us. Threads share it.

    Nobody says when a session ends, so that who is gone is forgotten when the next one comes: there are never more than were there at a time.
    """

    def __init__(self, agent: weft.Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._known: dict[str, Partner] = {}

    def __len__(self) -> int:
        return len(self._known)

    def at(self, address: str, deadline: float) -> Partner:
        """Who listens there, connected by the deadline."""
        partner = self._find(address, None)
        try:
            partner.connect(deadline)
        except weft.Error:
            with self._lock:
                if self._known.get(address) is partner and not partner.connected:
                    del self._known[address]
            raise
        return partner

    def of(self, peer: weft.Peer) -> Partner:
        """Who came to us."""
        return self._find(str(peer.name), peer)

    def _find(self, key: str, peer: weft.Peer | None) -> Partner:
        with self._lock:
            known = self._known.get(key)
            if known is None or known.gone:
                self._known = {other: partner for other, partner in self._known.items() if not partner.gone}
                known = self._known[key] = Partner(self._agent, key, peer)
            return known


def left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
