"""Which requests a worker holds for others, and the table in which the others see it.

A reader cannot be stopped from a distance, but it can find out that it was too late. Each held request has a word in a table that everybody
may read; before its blocks are given to anybody else, the word moves past the request's stamp. A reader looks at the word after its last byte: if
the word has not moved, no byte was read too late, and if it has, the bytes are thrown away. So an expired lease, an abort or a slow
reader costs a recomputation, and never a wrong token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import weft

from ._origin import SLOTS, Lease


@dataclass
class _Held:
    lease: Lease
    expires: float
    readers: set[str] = field(default_factory=set)


class Leases:
    """The worker's side. Not shared between threads: whoever has it locks it."""

    def __init__(self, agent: weft.Agent) -> None:
        self.table = agent.allocate(8 * SLOTS)
        self._held: dict[str, _Held] = {}
        # A reader may be done before the scheduler's word has come that the request is held.
        self._early: dict[str, tuple[set[str], float]] = {}
        self._over: set[str] = set()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: str, lease: Lease) -> None:
        self._set(lease.slot, lease.stamp)
        readers, _ = self._early.pop(request, (set(), 0.0))
        self._held[request] = _Held(lease, time.monotonic() + lease.seconds, readers)

    def renew(self, request: str) -> None:
        if held := self._held.get(request):
            held.expires = time.monotonic() + held.lease.seconds

    def done(self, request: str, reader: str, readers: int) -> None:
        """One of so many readers has read what it wants."""
        held = self._held.get(request)
        if held is None:
            seen, _ = self._early.setdefault(request, (set(), time.monotonic()))
            seen.add(f"{reader}/{readers}")
            return
        held.readers.add(f"{reader}/{readers}")

    def over(self, ended: Callable[[str, str], bool]) -> set[str]:
        """The requests whose blocks nobody reads any more, each once. Those of which `ended` says otherwise have to wait."""
        now = time.monotonic()
        for request, held in list(self._held.items()):
            everybody = {int(reader.rpartition("/")[2]) for reader in held.readers}
            if any(len(held.readers) >= count for count in everybody):
                if ended(request, "everybody has it"):
                    self._end(request)
            elif now >= held.expires and ended(request, "nobody came for it in time"):
                self.expired += 1
                self._end(request)
        for request in [request for request, (_, since) in self._early.items() if now - since > 600]:
            del self._early[request]
        over, self._over = self._over, set()
        return over

    def _end(self, request: str) -> None:
        lease = self._held.pop(request).lease
        # First the word, then the blocks.
        self._set(lease.slot, lease.stamp + 1)
        self._over.add(request)

    def _set(self, slot: int, value: int) -> None:
        word = self.table.read_word(8 * slot)
        self.table.compare_swap(8 * slot, word, value)
