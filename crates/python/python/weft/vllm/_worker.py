"""The half of the connector that moves: one agent a worker, which publishes the KV cache and fetches from others'."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

import weft

from ._description import MAX_BYTES, VERSION, Description, Layer, Meaning, Mismatch, legs, sources
from ._leases import Leases
from ._messages import Address, HandOff, Load, Orders, Origin, Reports, note
from ._options import Options
from ._stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# How many hand-offs wait at a time. Each is a thread that sleeps until its transfer has ended.
HAND_OFFS_MAX = 32

# A step in which nothing is computed waits so long for a hand-off to end, instead of asking again at once.
IDLE_STEP_MAX = 0.002


class Worker:
    def __init__(self, config: VllmConfig, engine: str, options: Options) -> None:
        self.config = config
        self.engine = engine
        self.options = options
        parallel = config.parallel_config
        self.rank, self.ranks = parallel.rank, parallel.world_size
        settings: dict[str, Any] = {"listen": "127.0.0.1:0", **options.agent}
        self.agent = weft.Agent(f"vllm-{engine}-{self.rank}", **settings)
        self.description: Description | None = None
        self._memories: list[weft.Memory] = []
        self._about: weft.Memory | None = None
        self._peers: dict[str, _Peer] = {}
        self._pool = ThreadPoolExecutor(HAND_OFFS_MAX, "weft-hand-off")
        # Guards everything below, and tells an idle step that something has ended.
        self._changed = threading.Condition()
        self._leases = Leases(self.agent)
        self._ended: dict[str, HandOff] = {}
        self._reports = Reports()
        self._stats = Stats()
        self._under_way = 0
        self._idle_step = False
        self.agent.publish("leases", self._leases.table)
        threading.Thread(target=self._listen, name="weft-inbox", daemon=True).start()

    # What vLLM calls, in the order of a step.

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Publishes the cache, and the description by which others find their way in it."""
        regions: dict[int, int] = {}
        layers: dict[str, Layer] = {}
        for name, cache in caches.items():
            if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
                raise ValueError(f"weft.vllm moves attention caches of four dimensions, and {name} is not one of them")
            storage = cache.untyped_storage()
            region = regions.setdefault(storage.data_ptr(), len(regions))
            if region == len(self._memories):
                whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
                memory = self.agent.register(whole)
                self._memories.append(memory)
                self.agent.publish(f"kv/{region}", memory)
            layers[name] = self._layer(cache, region)
        self.description = Description(self.engine, self.rank, self.ranks, self._meaning(caches), layers)
        text = self.description.to_bytes()
        # Memory that nobody holds is withdrawn.
        self._about = self.agent.allocate(len(text))
        memoryview(self._about).cast("B")[:] = text
        self.agent.publish("about", self._about)
        logger.info(
            "weft: worker %d of %d publishes %d layers in %d regions at %s", self.rank, self.ranks, len(layers), len(regions), self.agent.address
        )

    def handshake(self) -> Address:
        return Address(self.agent.address)

    def start(self, orders: Orders, computes: bool) -> None:
        with self._changed:
            for request, lease in orders.holds.items():
                self._leases.hold(request, lease)
            self._under_way += len(orders.loads)
            self._idle_step = not computes
        for request, load in orders.loads.items():
            self._pool.submit(self._hand_off, request, load)
        for origin in orders.releases:
            self._pool.submit(self._tell, origin, "done")
        for origin in orders.renewals:
            self._pool.submit(self._tell, origin, "renew")

    def results(self) -> KVConnectorTransferResults:
        with self._changed:
            over = self._leases.over()
            if self._idle_step and not over and not self._ended and (self._under_way or len(self._leases)):
                self._changed.wait(IDLE_STEP_MAX)
                over = self._leases.over()
            ended, self._ended = self._ended, {}
            for request, hand_off in ended.items():
                self._reports.hand_offs[request] = [hand_off]
                self._stats.add(hand_off)
            self._stats.hold(len(self._leases), self._leases.expired)
        failed = {request for request, hand_off in ended.items() if hand_off.failure}
        return KVConnectorTransferResults(finished_sending=over, finished_recving=set(ended), failed_recving=failed)

    def stats(self) -> Stats | None:
        with self._changed:
            stats, self._stats = self._stats, Stats()
        return None if stats.is_empty() else stats

    def reports(self) -> Reports | None:
        with self._changed:
            reports, self._reports = self._reports, Reports()
        return reports if reports.hand_offs else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.agent.close()

    # As prefill side.

    def _listen(self) -> None:
        """Hears what readers have to say. They are other machines: nothing they say may end this thread."""
        while True:
            try:
                heard = self.agent.notification(timeout=3600.0)
            except weft.Error:
                return
            if heard is None:
                continue
            try:
                said = json.loads(heard.payload)
                kind, request = str(said["kind"]), str(said["request"])
                with self._changed:
                    if kind == "done":
                        self._leases.done(request, f"{heard.peer.name}", int(said["readers"]))
                        self._changed.notify_all()
                    elif kind == "renew":
                        self._leases.renew(request)
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("weft: %s said something that cannot be understood: %r", heard.peer.name, error)

    # As decode side.

    def _hand_off(self, request: str, load: Load) -> None:
        began = time.monotonic()
        origin = load.origin
        try:
            moved, transport = self._fetch(load, began + self.options.deadline)
            hand_off = HandOff(time.monotonic() - began, moved, transport)
            logger.info(
                "weft: request %s: %d tokens (%d bytes) from engine %s over %s in %.1f ms",
                request, load.tokens[1] - load.tokens[0], moved, origin.engine, transport, 1e3 * hand_off.seconds,
            )  # fmt: skip
        except Exception as error:  # A request must never wait for a thread that is gone.
            hand_off = HandOff(time.monotonic() - began, 0, "", f"{type(error).__name__}: {error}")
            # What is not expected is a mistake of this package, and told with where it happened.
            report = logger.warning if isinstance(error, (Mismatch, weft.Error)) else logger.exception
            report("weft: request %s is computed here, after %.1f ms: %s", request, 1e3 * hand_off.seconds, hand_off.failure)
        with self._changed:
            self._under_way -= 1
            self._ended[request] = hand_off
            self._changed.notify_all()
        # Whether it was read or not, nobody here will read it again.
        self._tell(origin, "done")

    def _fetch(self, load: Load, deadline: float) -> tuple[int, str]:
        assert self.description is not None
        origin = load.origin
        peers = [self._peer(origin.engine, address, deadline) for address in origin.addresses]
        descriptions = [peer.description(self.description, deadline) for peer in peers]
        wanted = sources(self.description, descriptions)
        transfers = []
        for nth, (peer, description) in enumerate(zip(peers, descriptions, strict=True)):
            here = [source for source in wanted if source.worker == nth]
            if not here:
                continue
            pieces = legs(self.description, description, here, load.blocks, origin.blocks, load.tokens)
            pairs = [(self._memories[mine], near, peer.region(theirs, deadline), far) for mine, near, theirs, far in pieces]
            transfers.append(
                (peer, peer.peer.transfer("read", pairs, deadline=_left(deadline), checksum=self.options.checksum))
            )
        summaries = [transfer.wait() for _, transfer in transfers]
        for peer, _ in transfers:
            peer.check(origin, deadline)
        return sum(done.bytes for done in summaries), "+".join(sorted({done.transport for done in summaries}))

    def _tell(self, origin: Origin, kind: str) -> None:
        """Tells every worker of an engine about a request. A worker that cannot be told finds out by its lease."""
        text = note(kind, origin.request, readers=self.ranks)
        for address in origin.addresses:
            try:
                self._peer(origin.engine, address, time.monotonic() + self.options.deadline).peer.notify(text)
            except (Mismatch, weft.Error) as error:
                logger.debug("weft: engine %s was not told that %s is %s: %s", origin.engine, origin.request, kind, error)

    def _peer(self, engine: str, address: str, deadline: float) -> _Peer:
        with self._changed:
            found = self._peers.setdefault(address, _Peer(address))
        found.connect(self.agent, engine, deadline)
        return found

    # What this worker is.

    def _layer(self, cache: torch.Tensor, region: int) -> Layer:
        blocks, heads, tokens, _ = cache.shape
        size = cache.element_size()
        block, head, token, element = (size * stride for stride in cache.stride())
        if element != size:
            raise ValueError("weft.vllm moves caches in which the elements of a token touch")
        first = self._first_head(heads)
        base = cache.data_ptr() - cache.untyped_storage().data_ptr()
        common = {"region": region, "blocks": blocks, "tokens": tokens, "heads": (first, first + heads), "base": base}
        if not self._packed():
            unit = cache.shape[3] * size
            return Layer(
                **common, granule=1, parts=1, unit_bytes=unit,
                part_stride=0, block_stride=block, granule_stride=token, head_stride=head,
            )  # fmt: skip
        # The kernels for CPUs pack the tokens of a block, so that a block of a head is the least that can be moved.
        unit = tokens * cache.shape[3] * size
        return Layer(
            **common, granule=tokens, parts=1, unit_bytes=unit,
            part_stride=0, block_stride=block, granule_stride=unit, head_stride=head,
        )  # fmt: skip

    def _packed(self) -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def _first_head(self, heads: int) -> int:
        """Ranks share the heads out, or where there are more ranks than heads, several have the same."""
        parallel, model = self.config.parallel_config, self.config.model_config
        total, ranks = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
        rank = self.rank % ranks
        if model.use_mla or heads >= total:
            return 0
        return rank * heads if ranks <= total else rank * total // ranks

    def _meaning(self, caches: dict[str, torch.Tensor]) -> Meaning:
        from vllm import __version__

        model = self.config.model_config
        cache = next(iter(caches.values()))
        packing = "tokens"
        if self._packed():
            packing = f"cpu, {cache.shape[2]} tokens together"
        return Meaning(
            version=VERSION,
            vllm=__version__,
            model=model.model,
            dtype=str(model.dtype),
            cache_dtype=str(cache.dtype),
            head_bytes=cache.shape[3] * cache.element_size(),
            kv_heads=model.get_total_num_kv_heads(),
            layers=model.get_total_num_hidden_layers(),
            packing=packing,
        )


class _Peer:
    """A worker of another engine, connected again when it has come back."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._peer: weft.Peer | None = None
        self._description: Description | None = None
        self._regions: dict[int, weft.Region] = {}

    @property
    def peer(self) -> weft.Peer:
        if self._peer is None:
            raise Mismatch(f"nobody is connected at {self.address}")
        return self._peer

    def connect(self, agent: weft.Agent, engine: str, deadline: float) -> None:
        with self._lock:
            if self._peer is not None and self._peer.connected:
                return
            self._description, self._regions = None, {}
            self._agent = agent
            self._peer = agent.connect(self.address, timeout=_left(deadline))

    def description(self, mine: Description, deadline: float) -> Description:
        """What the peer holds, read once a connection, and checked against what is here."""
        with self._lock:
            if self._description is None:
                region = self.peer.region("about", timeout=_left(deadline))
                if region.nbytes > MAX_BYTES:
                    raise Mismatch(f"the description of {self.peer.name} is {region.nbytes} bytes long")
                room = self._agent.allocate(region.nbytes)
                self.peer.read(room, region, deadline=_left(deadline), checksum=True).wait()
                description = Description.from_bytes(bytes(memoryview(room).cast("B")[: region.nbytes]))
                room.release()
                self._description = description
            mine.check(self._description)
            return self._description

    def region(self, nth: int, deadline: float) -> weft.Region:
        with self._lock:
            if nth not in self._regions:
                self._regions[nth] = self.peer.region(f"kv/{nth}", timeout=_left(deadline))
            return self._regions[nth]

    def check(self, origin: Origin, deadline: float) -> None:
        """Raises `Mismatch` where the blocks may have been given to somebody else before the last byte was read."""
        word = self._agent.allocate(8)
        table = self.peer.region("leases", timeout=_left(deadline))
        spans = [(8 * origin.lease.slot, 8)]
        self.peer.read(word, table, spans, local_spans=[(0, 8)], deadline=_left(deadline), checksum=True).wait()
        stamp = word.read_word(0)
        word.release()
        if stamp > origin.lease.stamp:
            raise Mismatch(f"engine {origin.engine} gave the blocks of {origin.request} up before all of them were read")


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
