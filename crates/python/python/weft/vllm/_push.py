"""Push mode, the prefill side: what has been computed of a prompt is written to whoever has made room for it, layer by layer.

The decode side says where there is room (`reserve`), at any time; vLLM says which layers of which tokens are computed. Whichever comes later
starts a write, and a write that has landed, checksum and all, is told to the decode side (`landed`). All state belongs to one thread, which runs
a loop of `asyncio`: while the engine computes the next layer, it posts, and hears from others how posts have ended. No byte of a block is read after
`ended` has said that it may be given to somebody else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import weft

from ._description import Description, Mismatch, Source, dense, legs
from ._partner import Partner, Partners, left

logger = logging.getLogger(__name__)

# So many hand-offs that are over are remembered, to be able to answer those who still ask for them.
OVER_MAX = 4096

# Nobody makes room for more blocks, or waits longer, whatever a message says.
BLOCKS_MAX = 1 << 22
SECONDS_MAX = 86400.0

# That somebody has left is remembered so long, for a prompt that nobody has begun to compute.
LEFT_SECONDS = 600.0

REGION_SECONDS = 2.0

# A decode side that is not described by then gets nothing.
ABOUT_SECONDS = 10.0

# Threads that wait for the writes to one place, of all that there are.
WAITERS_EACH = 4

# So many hand-offs are known at a time, those included that only a decode side has spoken of.
OUTGOING_MAX = 8192

# So many writes are waited for at a time, a thread each. The others are under way too.
WRITES_MAX = 32


@dataclass(frozen=True)
class Computed:
    """What a step of the engine computes of a prompt that is pushed."""

    request: str
    # All that the request has, in the order of its tokens.
    blocks: list[int]
    # Tokens that are there after the step, and that the prompt has.
    after: int
    tokens: int
    digest: str


@dataclass
class _Flight:
    """A write under way: these layers, up to this token."""

    layers: list[str]
    upto: int
    transfer: weft.Transfer
    landed: bool = False
    cancelled: bool = False
    following: asyncio.Task[None] | None = None


@dataclass
class _Target:
    """Room that one worker of the decode side has made."""

    partner: Partner
    region: weft.Region
    place: Description
    # Which heads of which layers this worker has to write.
    shares: dict[str, list[tuple[int, int]]]
    blocks: list[int]
    first: int
    end: int
    tokens: int
    digest: str
    readers: int
    seconds: float
    posted: dict[str, int] = field(default_factory=dict)
    landed: dict[str, int] = field(default_factory=dict)
    flights: list[_Flight] = field(default_factory=list)
    bytes: int = 0
    transport: str = ""
    # Threads that wait for its writes.
    waiters: int = 0
    # Nothing more is written to it; what is under way still has to end.
    over: bool = False

    @property
    def reader(self) -> str:
        return str(self.partner.peer.name)

    @property
    def complete(self) -> bool:
        return all(upto >= self.end for upto in self.landed.values())

    def say(self, kind: str, **more: Any) -> None:
        said = {"kind": kind, "region": self.region.name, **more}
        try:
            self.partner.peer.notify(json.dumps(said, separators=(",", ":")).encode())
        except (weft.Error, Mismatch) as error:
            # It finds out by its deadline.
            logger.debug("weft: %s was not told of a push: %s", self.partner.address, error)


@dataclass
class _Outgoing:
    """A hand-off: a prompt, once it is computed here, and who wants it."""

    prompt: Computed | None = None
    # Up to which token each layer may be read.
    ready: dict[str, int] = field(default_factory=dict)
    targets: dict[str, _Target] = field(default_factory=dict)
    # Those who want no more of it, and of how many.
    served: dict[str, int] = field(default_factory=dict)


class Loop:
    """A thread with a loop of `asyncio`."""

    def __init__(self, name: str) -> None:
        self.asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.asyncio.run_forever, name=name, daemon=True)
        self._thread.start()

    def soon(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.asyncio.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # Closed: there is nobody left to whom it could matter.
            logger.debug("weft: %r came after the end", call)

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.asyncio).result()

    def close(self) -> None:
        self.soon(self.asyncio.stop)
        self._thread.join()
        self.asyncio.close()


class Pushes:
    """Public methods are for vLLM's thread and for the one that hears notifications; the others run on the loop."""

    def __init__(
        self,
        loop: Loop,
        pool: ThreadPoolExecutor,
        partners: Partners,
        description: Description,
        memories: Sequence[weft.Memory],
        served: Callable[[str, str, int], None],
        checksum: bool = True,
    ) -> None:
        self._loop, self._pool, self._partners = loop, pool, partners
        self._description, self._memories = description, memories
        self._served, self._checksum = served, checksum
        self._outgoing: dict[str, _Outgoing] = {}
        # Hand-offs that are over, and why.
        self._over: OrderedDict[str, str] = OrderedDict()
        self._writers = ThreadPoolExecutor(WRITES_MAX, "weft-write")
        self._ending: set[asyncio.Task[None]] = set()
        # What vLLM's thread knows: the step under way, and requests with their hand-offs until the end.
        self._step: dict[str, Computed] = {}
        self._hand_offs: dict[str, str] = {}
        self._stopping: set[str] = set()
        self._fenced: set[str] = set()

    # In the order of a step.

    def preempt(self, hand_offs: Iterable[str]) -> None:
        """Waits until nothing is read of the blocks of these any more. They will be computed again."""
        self._loop.wait(self._fence(list(hand_offs)))

    def compute(self, step: dict[str, Computed]) -> None:
        """Begins a step.

        What vLLM has of a prompt in its prefix cache may be computed in this very step, by another request. So of a layer nothing of a prompt
        is taken to be there before a step in which the prompt takes part has computed that layer.
        """
        self._step = step
        for hand_off, computed in step.items():
            self._hand_offs[computed.request] = hand_off
        if step:
            self._loop.soon(self._begin, step)

    def computed(self, layer: str | None = None) -> None:
        """A layer of the step is there, or all of them."""
        if self._step:
            self._loop.soon(self._ready, self._step, layer)
        if layer is None:
            self._step = {}

    def request(self, hand_off: str) -> str | None:
        """Which request computes it."""
        return next((request for request, name in list(self._hand_offs.items()) if name == hand_off), None)

    def ended(self, request: str, why: str) -> bool:
        """Whether nothing of a request's blocks will be read any more. Asking ends what is under way, and does not wait for it."""
        hand_off = self._hand_offs.get(request)
        if hand_off is None:
            return True
        if request not in self._stopping:
            self._stopping.add(request)
            self._loop.soon(self._begin_stop, hand_off, request, why)
        if request not in self._fenced:
            return False
        self._fenced.discard(request)
        self._stopping.discard(request)
        del self._hand_offs[request]
        return True

    def close(self) -> None:
        self._writers.shutdown(wait=False, cancel_futures=True)

    def refuse(self, hand_off: str, why: str) -> None:
        """Of a hand-off nothing will ever be computed."""
        self._loop.soon(self._begin_stop, hand_off, "", why)

    # What decode sides say.

    def reserve(self, said: dict[str, Any], peer: weft.Peer) -> None:
        """Room has been made. Raises `KeyError`, `TypeError` or `ValueError` where that makes no sense."""
        first, end, tokens = int(said["first"]), int(said["end"]), int(said["tokens"])
        blocks, seconds, readers = int(said["blocks"]), float(said["seconds"]), int(said["readers"])
        sensible = 0 <= first < end <= tokens and 0 < blocks <= BLOCKS_MAX and 0 < seconds <= SECONDS_MAX and readers > 0
        if not sensible:
            raise ValueError("a reservation that cannot be")
        hand_off = str(said["hand_off"])
        if not said["shares"]:
            # Others write all that it needs.
            self.give_up(hand_off, str(peer.name), readers)
            return
        shares = [
            (int(low), int(high), None if layers is None else [int(nth) for nth in layers]) for low, high, layers in said["shares"]
        ]

        def prepared() -> _Target:
            deadline = time.monotonic() + min(seconds, ABOUT_SECONDS)
            partner = self._partners.of(peer)
            theirs = partner.description(self._description, deadline)
            place, nbytes = dense(theirs, blocks)
            # It was published before it was spoken of: what is not there any more does not come.
            region = peer.region(str(said["region"]), timeout=min(left(deadline), REGION_SECONDS))
            if region.nbytes < nbytes:
                raise Mismatch(f"{peer.name} has made room of {region.nbytes} bytes for {nbytes}")
            names = list(theirs.layers)
            mine: dict[str, list[tuple[int, int]]] = {}
            for low, high, layers in shares:
                for name in names if layers is None else [names[nth] for nth in layers]:
                    if name not in self._description.layers:
                        raise Mismatch(f"{peer.name} asks for {name}, which is not here")
                    mine.setdefault(name, []).append((low, high))
            tokens_of_block = {layer.tokens for layer in theirs.layers.values()}
            if len(tokens_of_block) != 1:
                raise Mismatch(f"the layers of {peer.name} have blocks of different sizes")
            before = first // tokens_of_block.pop()
            if before + blocks > BLOCKS_MAX:
                raise Mismatch(f"{peer.name} asks for a prompt of more than {BLOCKS_MAX} blocks")
            # Blocks before the first token are never looked at.
            return _Target(
                partner, region, place, mine, [0] * before + list(range(blocks)), first, end, tokens, str(said["digest"]), readers, seconds,
                dict.fromkeys(mine, first), dict.fromkeys(mine, first),
            )  # fmt: skip

        def prepare() -> None:
            try:
                target = prepared()
            except Exception as error:  # Whatever it is, the decode side need not wait for it.
                report = logger.warning if isinstance(error, (Mismatch, weft.Error, IndexError)) else logger.exception
                report("weft: nothing is pushed to %s: %s", peer.name, error)
                refusal = {"kind": "failed", "region": str(said["region"]), "why": f"{type(error).__name__}: {error}"}
                try:
                    peer.notify(json.dumps(refusal).encode())
                except weft.Error:
                    logger.debug("weft: %s is gone", peer.name)
                self.give_up(hand_off, str(peer.name), readers)
                return
            self._loop.soon(self._accept, hand_off, target)

        self._pool.submit(prepare)

    def give_up(self, hand_off: str, reader: str, readers: int) -> None:
        """A decode side wants no more of it."""
        self._loop.soon(self._leave, hand_off, reader, readers)

    # On the loop.

    def _begin(self, step: dict[str, Computed]) -> None:
        for hand_off, computed in step.items():
            outgoing = self._outgoing.setdefault(hand_off, _Outgoing())
            outgoing.prompt = computed
            for reader, readers in outgoing.served.items():
                self._served(computed.request, reader, readers)
            outgoing.served.clear()
            for target in outgoing.targets.values():
                self._compare(outgoing, target)

    def _ready(self, step: dict[str, Computed], layer: str | None) -> None:
        for hand_off, computed in step.items():
            outgoing = self._outgoing.get(hand_off)
            if outgoing is None or outgoing.prompt is not computed:
                # It was stopped, or preempted and begun again.
                continue
            for name in [layer] if layer is not None else self._description.layers:
                outgoing.ready[name] = computed.after
            self._advance(outgoing)

    def _accept(self, hand_off: str, target: _Target) -> None:
        if hand_off in self._over:
            target.say("failed", why=self._over[hand_off])
            return
        outgoing = self._expected(hand_off)
        if outgoing is None:
            target.say("failed", why="too many hand-offs wait for their prompts here")
            return
        if target.reader in outgoing.targets or target.reader in outgoing.served:
            target.say("failed", why="this hand-off has been asked for before")
            return
        outgoing.targets[target.reader] = target
        if outgoing.prompt is None:
            self._loop.asyncio.call_later(LEFT_SECONDS, self._forget, hand_off)
        else:
            self._compare(outgoing, target)
            self._advance(outgoing)

    def _expected(self, hand_off: str) -> _Outgoing | None:
        """One that a decode side speaks of, perhaps before its prompt is known; `None` if there are too many."""
        known = self._outgoing.get(hand_off)
        if known is None and len(self._outgoing) < OUTGOING_MAX:
            known = self._outgoing[hand_off] = _Outgoing()
        return known

    def _forget(self, hand_off: str) -> None:
        """A prompt that has not come in time does not come."""
        outgoing = self._outgoing.get(hand_off)
        if outgoing is not None and outgoing.prompt is None:
            del self._outgoing[hand_off]

    def _compare(self, outgoing: _Outgoing, target: _Target) -> None:
        prompt = outgoing.prompt
        assert prompt is not None, "it is called when there is one"
        if not target.over and (target.tokens, target.digest) != (prompt.tokens, prompt.digest):
            self._fail(outgoing, target, f"the prompt has {prompt.tokens} tokens here and {target.tokens} there, or others")

    def _advance(self, outgoing: _Outgoing) -> None:
        """Writes what is there, is wanted and has not been written."""
        for target in outgoing.targets.values():
            together: dict[tuple[int, int], list[str]] = {}
            for name, begin in target.posted.items() if not target.over else ():
                upto = min(outgoing.ready.get(name, 0), target.end)
                if upto < target.end:
                    # What is packed together goes when all of it is there.
                    upto -= upto % self._description.layers[name].granule
                if upto > begin:
                    together.setdefault((begin, upto), []).append(name)
            for (begin, upto), names in together.items():
                if not target.over:
                    self._post(outgoing, target, names, begin, upto)

    def _post(self, outgoing: _Outgoing, target: _Target, names: list[str], begin: int, upto: int) -> None:
        assert outgoing.prompt is not None, "nothing is ready of a prompt that is not known"
        wanted = [Source(0, name, heads) for name in names for heads in target.shares[name]]
        try:
            pieces = legs(self._description, target.place, wanted, outgoing.prompt.blocks, target.blocks, (begin, upto))
            pairs = [(self._memories[mine], near, target.region, far) for mine, near, _, far in pieces]
            transfer = target.partner.peer.transfer("write", pairs, deadline=target.seconds, checksum=self._checksum)
        except Exception as error:  # Whatever is wrong with its place, the others of this step go on.
            self._fail(outgoing, target, f"{type(error).__name__}: {error}")
            return
        target.posted.update(dict.fromkeys(names, upto))
        flight = _Flight(names, upto, transfer)
        target.flights.append(flight)
        flight.following = self._loop.asyncio.create_task(self._follow(outgoing, target, flight))

    async def _follow(self, outgoing: _Outgoing, target: _Target, flight: _Flight) -> None:
        try:
            summary = await self._end(target, flight.transfer)
        except weft.Error as error:
            # It stays where it is: what was posted after it is not told, because there is a hole before it.
            if not flight.cancelled:
                self._fail(outgoing, target, f"{type(error).__name__}: {error}")
            return
        flight.landed = True
        target.bytes += summary.bytes
        target.transport = summary.transport
        fresh: dict[int, list[str]] = {}
        # Writes of a layer may overtake each other: what is told has no holes.
        while target.flights and target.flights[0].landed:
            first = target.flights.pop(0)
            for name in first.layers:
                target.landed[name] = first.upto
                fresh.setdefault(first.upto, []).append(name)
        if target.over:
            return
        order = {name: nth for nth, name in enumerate(target.place.layers)}
        for upto, names in fresh.items():
            layers = [order[name] for name in names]
            target.say("landed", upto=upto, layers=layers, bytes=target.bytes, transport=target.transport)
        if target.complete:
            self._serve(outgoing, target)

    async def _end(self, target: _Target, transfer: weft.Transfer) -> weft.Summary:
        """Whoever waits moves bytes itself, beside the agent's own thread. But nobody who stands still may hold all who wait."""
        if target.waiters >= WAITERS_EACH:
            return await transfer
        target.waiters += 1
        try:
            return await self._loop.asyncio.run_in_executor(self._writers, transfer.wait)
        finally:
            target.waiters -= 1

    def _serve(self, outgoing: _Outgoing, target: _Target) -> None:
        """Has nothing more to do for a target."""
        target.over = True
        if outgoing.prompt is None:
            outgoing.served[target.reader] = target.readers
        else:
            self._served(outgoing.prompt.request, target.reader, target.readers)

    def _fail(self, outgoing: _Outgoing, target: _Target, why: str) -> None:
        if target.over:
            return
        logger.warning("weft: a push to %s failed: %s", target.reader, why)
        target.say("failed", why=why)
        self._serve(outgoing, target)
        self._cancel(target)

    def _leave(self, hand_off: str, reader: str, readers: int) -> None:
        if hand_off in self._over:
            return
        outgoing = self._expected(hand_off)
        if outgoing is None:
            return
        target = outgoing.targets.get(reader)
        if target is not None:
            self._serve(outgoing, target)
            self._cancel(target)
        elif outgoing.prompt is not None:
            self._served(outgoing.prompt.request, reader, readers)
        else:
            outgoing.served[reader] = readers
            self._loop.asyncio.call_later(LEFT_SECONDS, self._forget, hand_off)

    def _cancel(self, target: _Target) -> list[asyncio.Task[None]]:
        for flight in target.flights:
            flight.cancelled = True
            flight.transfer.cancel()
        return [flight.following for flight in target.flights if flight.following is not None]

    async def _fence(self, hand_offs: list[str]) -> None:
        ending: list[asyncio.Task[None]] = []
        fenced = []
        for hand_off in hand_offs:
            if outgoing := self._outgoing.get(hand_off):
                outgoing.ready = {}
                fenced.extend(outgoing.targets.values())
                ending.extend(task for target in outgoing.targets.values() for task in self._cancel(target))
        if ending:
            await asyncio.wait(ending)
        for target in fenced:
            # What was on the way has to go again.
            target.posted = dict(target.landed)
            target.flights.clear()

    def _begin_stop(self, hand_off: str, request: str, why: str) -> None:
        task = self._loop.asyncio.create_task(self._stop(hand_off, request, why))
        # The loop itself holds tasks only weakly.
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop(self, hand_off: str, request: str, why: str) -> None:
        self._over[hand_off] = why
        if len(self._over) > OVER_MAX:
            self._over.popitem(last=False)
        outgoing = self._outgoing.get(hand_off)
        if outgoing is not None:
            await self._fence([hand_off])
            self._outgoing.pop(hand_off, None)
            for target in outgoing.targets.values():
                if not target.over:
                    target.over = True
                    target.say("failed", why=why)
        if request:
            self._fenced.add(request)
