"""Push mode, the decode side: room in which a prompt lands, and from which it is moved to where it belongs when it is there.

A peer that writes cannot be trusted to stop: it may be frozen in mid-copy and go on when vLLM has given the blocks to another request, and a
key that covers single blocks of every layer does not exist. So nobody else ever writes to vLLM's blocks. What is pushed lands in memory of its
own, published for this hand-off alone and released when it is over, after which a late byte is refused or lands where nobody looks. What
has landed whole, by the checksum of the bytes as they lie here, is copied to the blocks layer by layer, while the next layer is on its way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import weft

from ._description import Description, Mismatch, dense, sources
from ._partner import Partner, Partners, left
from ._push import Loop

logger = logging.getLogger(__name__)

# How often a landing that hears nothing looks whether the other side is still there.
LOOK_SECONDS = 0.2

T = TypeVar("T")


class PushFailed(Exception):
    """The other side has said that it will not come, and why."""


class PushLate(Exception):
    """Nothing has come for as long as a hand-off may take."""


class PushAborted(Exception):
    """Nobody here wants it any more."""


@dataclass(frozen=True)
class Awaited:
    """A prompt that will be pushed into blocks of this engine."""

    hand_off: str
    addresses: list[str]
    blocks: list[int]
    # From the first that is not here to the end of the prompt, which has so many.
    tokens: tuple[int, int]
    prompt_tokens: int
    digest: str


@dataclass(frozen=True)
class Landed:
    """How a landing ended."""

    seconds: float
    bytes: int
    transport: str
    failure: Exception | None


@dataclass
class _Landing:
    awaited: Awaited
    began: float
    # The last moment at which the next word has to come.
    expires: float
    region: str
    # Cancelled when nobody here wants it any more.
    bringing: asyncio.Task[None] | None = None
    words: asyncio.Queue[tuple[str, dict[str, Any]]] = field(default_factory=asyncio.Queue)
    partners: list[Partner] = field(default_factory=list)
    memory: weft.Memory | None = None
    place: Description | None = None
    # Up to which token each layer has come from each worker that has a share in it.
    upto: dict[int, dict[str, int]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    bytes: dict[str, int] = field(default_factory=dict)
    transports: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Surroundings:
    """What a landing needs of its worker."""

    agent: weft.Agent
    partners: Partners
    description: Description
    ranks: int
    # Copies what has landed of a layer to the blocks where it belongs.
    settle: Callable[[str, memoryview, list[int]], None]
    # Called once a request, from the loop.
    ended: Callable[[str, Landed], None]
    deadline: float
    landing_bytes: int


class Landings:
    """Public methods are for vLLM's thread and for the one that hears notifications; the others run on the loop."""

    def __init__(self, loop: Loop, pool: ThreadPoolExecutor, around: Surroundings) -> None:
        self._loop, self._pool, self._around = loop, pool, around
        self._by_request: dict[str, _Landing] = {}
        self._by_region: dict[str, _Landing] = {}
        # Landing places that are taken now, and who waits for some to be given back.
        self._taken = 0
        self._landing: set[asyncio.Task[None]] = set()
        self._given_back = asyncio.Event()

    def expect(self, request: str, awaited: Awaited) -> None:
        self._loop.soon(self._begin, request, awaited)

    def abort(self, request: str) -> None:
        self._loop.soon(self._abort, request)

    def hear(self, said: dict[str, Any], name: str) -> None:
        self._loop.soon(self._hear, str(said["region"]), name, said)

    # On the loop.

    def _abort(self, request: str) -> None:
        landing = self._by_request.get(request)
        if landing is not None and landing.bringing is not None:
            landing.bringing.cancel()

    def _hear(self, region: str, name: str, said: dict[str, Any]) -> None:
        # Who speaks of a landing that is over is late.
        if landing := self._by_region.get(region):
            landing.words.put_nowait((name, said))

    def _begin(self, request: str, awaited: Awaited) -> None:
        now = time.monotonic()
        landing = _Landing(awaited, now, now + self._around.deadline, f"push/{os.urandom(8).hex()}")
        self._by_request[request] = self._by_region[landing.region] = landing
        landing.bringing = self._loop.asyncio.create_task(self._bring(landing))
        task = self._loop.asyncio.create_task(self._land(request, landing, landing.bringing))
        # The loop itself holds tasks only weakly.
        self._landing.add(task)
        task.add_done_callback(self._landing.discard)

    async def _land(self, request: str, landing: _Landing, bringing: asyncio.Task[None]) -> None:
        failure: Exception | None = None
        try:
            await bringing
        except asyncio.CancelledError:
            failure = PushAborted("the request was aborted")
        except Exception as error:  # A request must never wait for what is gone.
            failure = error
        del self._by_request[request], self._by_region[landing.region]
        # Whatever comes from now on is refused, before the request goes on.
        free = await self._free(landing)
        seconds = time.monotonic() - landing.began
        self._around.ended(request, Landed(seconds, sum(landing.bytes.values()), "+".join(sorted(landing.transports)), failure))
        if failure is not None:
            await self._off_loop(self._leave, landing)
        while not free:
            await asyncio.sleep(LOOK_SECONDS)
            free = await self._free(landing)

    async def _bring(self, landing: _Landing) -> None:
        around, awaited = self._around, landing.awaited
        deadline = landing.expires
        landing.partners = [await self._off_loop(around.partners.at, address, deadline) for address in awaited.addresses]
        theirs = [await self._off_loop(partner.description, around.description, deadline) for partner in landing.partners]
        shares = self._shares(landing, theirs)
        first, end = awaited.tokens
        block = next(iter(around.description.layers.values())).tokens
        blocks = -(-end // block) - first // block
        landing.place, nbytes = dense(around.description, blocks)
        await self._take(nbytes, deadline)
        try:
            landing.memory = await self._off_loop(around.agent.allocate, nbytes)
        except BaseException:
            self._return_room(nbytes)
            raise
        # The far end reads it too, to compare checksums.
        around.agent.publish(landing.region, landing.memory, read=True, write=True)
        for nth, partner in enumerate(landing.partners):
            word = {
                "kind": "reserve", "hand_off": awaited.hand_off, "region": landing.region, "first": first, "end": end,
                "tokens": awaited.prompt_tokens, "digest": awaited.digest, "blocks": blocks, "readers": around.ranks,
                "seconds": around.deadline, "shares": shares[nth],
            }  # fmt: skip
            partner.peer.notify(json.dumps(word, separators=(",", ":")).encode())
        while len(landing.settled) < len(landing.place.layers):
            await self._take_word(landing)
            await self._settle(landing)

    def _shares(self, landing: _Landing, theirs: list[Description]) -> list[list[Any]]:
        """Which heads of which layers come from which worker; also what is to be waited for."""
        order = {name: nth for nth, name in enumerate(self._around.description.layers)}
        first = landing.awaited.tokens[0]
        layers: list[dict[tuple[int, int], list[int]]] = [{} for _ in theirs]
        for source in sources(self._around.description, theirs):
            nth = order[source.layer]
            layers[source.worker].setdefault(source.heads, []).append(nth)
            landing.upto.setdefault(nth, {})[str(landing.partners[source.worker].peer.name)] = first
        every = list(range(len(order)))
        return [[[*heads, None if which == every else which] for heads, which in one.items()] for one in layers]

    async def _take(self, nbytes: int, deadline: float) -> None:
        """Waits for its turn to have so much room. A prompt that is larger than all of it has it alone."""
        while self._taken and self._taken + nbytes > self._around.landing_bytes:
            self._given_back.clear()
            try:
                async with asyncio.timeout(left(deadline)):
                    await self._given_back.wait()
            except TimeoutError:
                raise PushLate("there was no room to land in") from None
        self._taken += nbytes

    async def _take_word(self, landing: _Landing) -> None:
        try:
            async with asyncio.timeout(min(left(landing.expires), LOOK_SECONDS)):
                name, said = await landing.words.get()
        except TimeoutError:
            for partner in landing.partners:
                if not partner.connected:
                    raise PushFailed(f"{partner.address} is gone") from None
            if time.monotonic() >= landing.expires:
                raise PushLate(f"nothing has come for {self._around.deadline:g} s") from None
            return
        if said["kind"] == "failed":
            raise PushFailed(f"{name}: {said.get('why')}")
        try:
            upto, layers = int(said["upto"]), [int(layer) for layer in said["layers"]]
            nbytes, transport = int(said["bytes"]), str(said["transport"])
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"{name} said something that cannot be understood: {error!r}") from error
        grown = [layer for layer in layers if upto > landing.upto.get(layer, {}).get(name, upto)]
        if not grown:
            return
        # It works on it, so that it may take as long again.
        landing.expires = time.monotonic() + self._around.deadline
        landing.bytes[name] = nbytes
        landing.transports.add(transport)
        for layer in grown:
            landing.upto[layer][name] = upto

    async def _settle(self, landing: _Landing) -> None:
        end = landing.awaited.tokens[1]
        whole = [nth for nth, workers in landing.upto.items() if min(workers.values()) >= end and nth not in landing.settled]
        if not whole:
            return
        moving = asyncio.ensure_future(self._off_loop(self._move, landing, whole))
        try:
            await asyncio.shield(moving)
        except asyncio.CancelledError:
            # The blocks go to somebody else when this has ended.
            await asyncio.wait([moving])
            raise
        landing.settled.update(whole)

    def _move(self, landing: _Landing, layers: list[int]) -> None:
        assert landing.place is not None and landing.memory is not None, "nothing lands before there is room"
        names = list(landing.place.layers)
        first = landing.awaited.tokens[0] // landing.place.layers[names[0]].tokens
        view = memoryview(landing.memory).cast("B")
        for nth in layers:
            layer = landing.place.layers[names[nth]]
            landed = view[layer.base : layer.base + layer.blocks * layer.block_stride]
            self._around.settle(names[nth], landed, landing.awaited.blocks[first : first + layer.blocks])

    def _leave(self, landing: _Landing) -> None:
        word = {"kind": "done", "hand_off": landing.awaited.hand_off, "readers": self._around.ranks}
        text = json.dumps(word, separators=(",", ":")).encode()
        for address in landing.awaited.addresses:
            try:
                self._around.partners.at(address, time.monotonic() + LOOK_SECONDS).peer.notify(text)
            except (weft.Error, Mismatch) as error:
                logger.debug("weft: %s was not told that nobody waits for %s: %s", address, landing.awaited.hand_off, error)

    async def _free(self, landing: _Landing) -> bool:
        """Whether nobody can touch the landing place any more. Who is frozen in mid-copy holds it until it goes on or dies, and its room is taken."""
        if landing.memory is None:
            return True
        try:
            await self._off_loop(landing.memory.release, 0.0)
        except weft.StillInUse:
            return False
        self._return_room(landing.memory.nbytes)
        return True

    def _return_room(self, nbytes: int) -> None:
        self._taken -= nbytes
        self._given_back.set()

    async def _off_loop(self, call: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.asyncio.run_in_executor(self._pool, call, *arguments)
