"""Workers of other engines, as a worker of this one knows them."""

from __future__ import annotations

import threading
import time

import weft

from ._description import MAX_BYTES, Description, Mismatch


class Partner:
    """A worker of another engine, connected again when it has come back. Its calls wait, up to a deadline; threads share it."""

    def __init__(self, agent: weft.Agent, address: str, peer: weft.Peer | None = None) -> None:
        self.address = address
        self._agent = agent
        self._lock = threading.Lock()
        # One that came to us is known by its session alone.
        self._peer = peer
        self._description: Description | None = None
        self._regions: dict[str, weft.Region] = {}

    @property
    def peer(self) -> weft.Peer:
        if self._peer is None:
            raise Mismatch(f"nobody is connected at {self.address}")
        return self._peer

    @property
    def connected(self) -> bool:
        return self._peer is not None and self._peer.connected

    def connect(self, deadline: float) -> None:
        with self._lock:
            if self.connected:
                return
            self._description, self._regions = None, {}
            self._peer = self._agent.connect(self.address, timeout=left(deadline))

    def description(self, mine: Description, deadline: float) -> Description:
        """What the partner holds, read once a connection, and checked against what is here."""
        with self._lock:
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
        with self._lock:
            if name not in self._regions:
                self._regions[name] = self.peer.region(name, timeout=left(deadline))
            return self._regions[name]

    def word(self, region: str, offset: int, deadline: float) -> int:
        """A word of one of its regions, as it is now."""
        table = self.region(region, deadline)
        room = self._agent.allocate(8)
        self.peer.read(room, table, [(offset, 8)], local_spans=[(0, 8)], deadline=left(deadline), checksum=True).wait()
        word = room.read_word(0)
        room.release()
        return word


def left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
