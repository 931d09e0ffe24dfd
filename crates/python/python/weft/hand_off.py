"""Hand-offs between engines: blocks of a paged cache, from the worker that computed them to one that goes on with them.

    with weft.Agent("prefill") as agent, HandOff(agent, [Layer("layer", pages)], [memory]) as prefill:
        ticket = prefill.offer("prompt 1", blocks=[3, 9, 4], tokens=40, about=digest)     # anybody may carry it

    with weft.Agent("decode") as agent, HandOff(agent, [Layer("layer", pages)], [memory]) as decode:
        name = decode.want(ticket, about=digest)                                          # held for as long as it is waited for
        decode.fetch(name, blocks=[8, 1], tokens=40)
        ended = decode.event(timeout=30)                                                  # an `Ended`: handed off, or why not

A prompt that is not handed off always says why, and never brings wrong bytes: a reader looks, after its last byte, whether the blocks were still the
prompt's. Blocks that are held are told to be free, once: when all readers have them, when nobody came for as long as the lease, or after `stop`.

An engine of several workers has a `Desk`, wherever it decides for all of them: it gives leases out, writes tickets and opens those of others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Self

from ._errors import Error, InvalidCall, NotBelieved
from ._weft import Agent, Memory, Pages, _Desk, _HandOff

__all__ = ["Desk", "Ended", "Free", "HandOff", "Layer", "Lease", "Origin", "Push"]


@dataclass(frozen=True)
class Layer:
    """A layer of a worker's cache, in the memory of that place in the list of memories. `granule` tokens are packed together and cannot be told apart; the tokens of
    `pages` are such granules."""

    name: str
    pages: Pages
    memory: int = 0
    granule: int = 1


@dataclass(frozen=True)
class Lease:
    """The right to read a prompt's blocks: as long as the word in the slot is not past the stamp, the bytes are the prompt's."""

    slot: int
    stamp: int
    seconds: float


@dataclass(frozen=True)
class Origin:
    """Where the blocks of a prompt are to be had: one address for each worker that has a share of them."""

    hand_off: str
    addresses: list[str]
    blocks: list[int]
    tokens: int
    lease: Lease


@dataclass(frozen=True)
class Push:
    """Who computes a prompt and pushes it, under a name that both sides were told beforehand."""

    hand_off: str
    addresses: list[str]


@dataclass(frozen=True)
class Ended:
    """A prompt that was wanted here has come, or has not: then `reason` says why, and `cause` says it in a word that never changes. Nobody touches its blocks
    for this hand-off any more."""

    name: str
    cause: str | None
    reason: str | None
    nbytes: int
    seconds: float
    transports: tuple[str, ...]


@dataclass(frozen=True)
class Free:
    """The blocks of a prompt that was held here are the engine's again. `cause` says why in a word that never changes."""

    name: str
    cause: str
    why: str


class Desk:
    """Where an engine decides for all its workers. It needs no agent, only the secret that agents of these settings share."""

    def __init__(self, **settings: Any) -> None:
        self._inner = _Desk(**settings)

    def lease(self, seconds: float) -> Lease | None:
        """A lease for a prompt, which every worker is to be told by `HandOff.offer_leased`; nothing where all are in use."""
        leased = self._inner.lease(seconds)
        return None if leased is None else Lease(*leased)

    def give_back(self, lease: Lease) -> None:
        """Takes a lease back that is over at every worker."""
        self._inner.give_back(astuple(lease))

    def write(self, origin: Origin, about: bytes) -> bytes:
        """A ticket, which anybody may carry. It is good for what is `about` the same, the tokens of a prompt, say, and for as long as the lease."""
        return self._inner.write(astuple(origin), about)

    def open(self, ticket: bytes, about: bytes) -> Origin:
        """What a ticket says. Raises `weft.NotBelieved` for one that was forged, is too old, is about something else, or with which somebody has come before."""
        name, addresses, blocks, tokens, leased = self._inner.open(ticket, about)
        return Origin(name, addresses, blocks, tokens, Lease(*leased))

    def offer(self, addresses: Sequence[str], seconds: float) -> bytes:
        """An offer to push prompts, which anybody may carry for so long: where the workers are."""
        return self._inner.offer(list(addresses), seconds)

    def open_offer(self, offer: bytes, name: str, seconds: float) -> Push:
        """Who offers to push, for a hand-off whose name nobody else can come with for so long. Raises `weft.NotBelieved` as `open` does."""
        return Push(name, self._inner.open_offer(offer, name, seconds))


class HandOff:
    """One worker of an engine. `meaning` is what must be equal at both ends for the bytes to mean the same; of `ranks` workers this is one.

    Durations are in seconds: `deadline` is how long a fetch may take, or how long nothing may come of a push; `lease` is how long blocks are held for
    a reader that says nothing. `landing_bytes` is how much memory is given to prompts that are being pushed here.
    """

    def __init__(
        self, agent: Agent, layers: Sequence[Layer], memories: Sequence[Memory], *, meaning: Mapping[str, str] | None = None,
        rank: int = 0, ranks: int = 1, deadline: float = 30.0, lease: float = 60.0, landing_bytes: int = 4 << 30, checksum: bool = True,
    ) -> None:  # fmt: skip
        described = [(layer.name, layer.memory, layer.granule, layer.pages) for layer in layers]
        self._inner = _HandOff(
            agent, list((meaning or {}).items()), rank, ranks, described, list(memories), deadline, lease, landing_bytes, checksum
        )
        # What could not even be begun: what is wanted and not fetched yet, and what is to be told.
        self._refused: dict[str, Error] = {}
        self._told: deque[Ended | Free] = deque()

    # As holder.

    def offer(self, name: str, blocks: Sequence[int], tokens: int, about: bytes) -> bytes:
        """Holds the blocks of a prompt for whoever comes with the ticket, which is good for what is `about` the same: its tokens, say."""
        return self._inner.offer(name, list(blocks), tokens, about)

    def offer_leased(self, name: str, lease: Lease) -> None:
        """The same for one of several workers, whose `Desk` has given the lease out and written the ticket by now. Where that cannot be, `Free` follows at once, and
        nobody believes the ticket."""
        self._free_unless(lambda: self._inner.offer_leased(name, astuple(lease)), name)

    def compute(self, name: str, blocks: Sequence[int], tokens: int, about: bytes) -> None:
        """A step computes a prompt that readers may have made room for: again with every step, since it may have more blocks by then."""
        self._inner.compute(name, list(blocks), tokens, _digest(about))

    def computed(self, name: str, upto: int, layer: int | None = None) -> None:
        """A layer, or all of them, is there up to a token. Readers get it from now on, while the next one is computed.

        Where a GPU computes it, wait for the GPU first (`torch.cuda.current_stream().synchronize()`, or an event): bytes are read from now on, whatever is still on a
        stream. The same holds for `offer` and `offer_leased`.
        """
        self._inner.computed(name, layer, upto)

    def preempt(self, name: str, timeout: float = 30.0) -> None:
        """Waits until nothing is read from a prompt's blocks any more. They may be overwritten after this; it will be computed again."""
        self._inner.preempt(name, timeout)

    def stop(self, name: str) -> None:
        """A prompt will not be whole, or nobody is to have it any more. `Free` follows."""
        self._free_unless(lambda: self._inner.stop(name), name)

    def _free_unless(self, accepted: Callable[[], None], name: str) -> None:
        """A name that was used before holds nothing."""
        try:
            accepted()
        except InvalidCall as error:
            self._told.append(Free(name, "Refused", str(error)))

    # As reader.

    def want(self, ticket: bytes, about: bytes, readers: int = 1) -> str:
        """Somebody here waits for what a ticket names: its lease is renewed until it is fetched or left. Returns the name of the hand-off.

        Raises `weft.NotBelieved` for a ticket that was forged, is too old, or is about another prompt, and `weft.InvalidCall` for one that came before.
        """
        return self._inner.want(ticket, about, readers)

    def want_from(self, source: Origin | Push, readers: int = 1) -> None:
        """The same where a `Desk` has opened the ticket; or of a prompt that is computed elsewhere and pushed. Where that cannot be, it is told by `Ended` when the
        prompt is fetched, like everything else that goes wrong."""
        try:
            if isinstance(source, Push):
                self._inner.want_pushed(source.hand_off, source.addresses, readers)
            else:
                self._inner.want_from(astuple(source), readers)
        except Error as error:
            self._refused[source.hand_off] = error

    def fetch(self, name: str, blocks: Sequence[int], tokens: int, about: bytes = b"", first: int = 0) -> None:
        """There are blocks for a prompt of so many tokens, of which those before `first` are here: brings the others. `Ended` follows."""
        if error := self._refused.pop(name, None):
            self._told.append(Ended(name, _cause(error), str(error), 0, 0.0, ()))
            return
        self._inner.fetch(name, list(blocks), (first, tokens), tokens, _digest(about))

    def leave(self, name: str) -> None:
        """Nobody here wants a prompt any more. `Ended` follows, when nothing touches its blocks any more."""
        self._refused.pop(name, None)
        self._inner.leave(name)

    # Both.

    def event(self, timeout: float) -> Ended | Free | None:
        """What happened next; nothing where it does not in time."""
        if self._told:
            return self._told.popleft()
        told = self._inner.event(timeout)
        if told is None:
            return None
        name, ended, why, nbytes, seconds, transports = told
        cause, reason = why or (None, None)
        return Ended(name, cause, reason, nbytes, seconds, tuple(transports)) if ended else Free(name, cause or "", reason or "")

    @property
    def held(self) -> int:
        """How many prompts are held for others."""
        return self._inner.under_way()[0]

    @property
    def wanted(self) -> int:
        """How many prompts are wanted and have not ended."""
        return self._inner.under_way()[1]

    def close(self) -> None:
        """Gives up what is under way, and what is held."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cause(error: Error) -> str:
    """Why something could not be begun, in a word that never changes."""
    if isinstance(error, NotBelieved):
        return f"NotBelieved({error.reason})"
    if isinstance(error, InvalidCall):
        return error.cause or "Invalid"
    # Addresses that mean nothing, or that a short secret must not be proved at.
    return "Unreachable"


def _digest(about: bytes) -> bytes:
    return hashlib.sha256(about).digest()
