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

from ._description import VERSION, Description, Layer, Meaning, Mismatch, legs, sources
from ._landing import Landed, Landings, PushAborted, PushFailed, PushLate, Surroundings
from ._leases import Leases
from ._messages import Address, HandOff, Load, Orders, Reports
from ._options import Options
from ._origin import Origin
from ._partner import Partners, left
from ._push import Loop, Pushes
from ._stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# The transport whose bytes never leave the host's memory.
WITHIN = "shared_memory"

# How many hand-offs wait at a time. Each is a thread that sleeps until its transfer has ended.
HAND_OFFS_MAX = 32

# A step in which nothing is computed waits so long for a hand-off to end, instead of asking again at once: longer than most take, since what
# the engine does between two steps takes the core from who copies. Where only leases are held, nobody is in a hurry but the next request.
IDLE_STEP_MAX = 0.005
LEASED_STEP_MAX = 0.002

# What may go wrong with a hand-off without being a mistake of this package.
EXPECTED = (Mismatch, PushAborted, PushFailed, PushLate, weft.Error)


class Worker:
    def __init__(self, config: VllmConfig, engine: str, options: Options) -> None:
        self.config = config
        self.engine = engine
        self.options = options
        parallel = config.parallel_config
        self.rank, self.ranks = parallel.rank, parallel.world_size
        self.agent = weft.Agent(options.agent_name(engine, self.rank, self.ranks), **options.agent_settings())
        self.description: Description | None = None
        self._memories: list[weft.Memory] = []
        self._about: weft.Memory | None = None
        self._partners = Partners(self.agent)
        self._pool = ThreadPoolExecutor(HAND_OFFS_MAX, "weft-hand-off")
        # Guards everything below, and tells an idle step that something has ended.
        self._changed = threading.Condition()
        self._leases = Leases(self.agent)
        self._ended: dict[str, HandOff] = {}
        self._reports = Reports()
        self._stats = Stats()
        self._under_way = 0
        self._idle_step = False
        # Of pushed prompts: the two sides, from when there is a cache on; and requests that end before they are whole.
        self._loop = Loop("weft-push")
        self._push_pool = ThreadPoolExecutor(HAND_OFFS_MAX, "weft-push")
        self._caches: dict[str, torch.Tensor] = {}
        self._pushes: Pushes | None = None
        self._landings: Landings | None = None
        self._stopped: set[str] = set()
        self.agent.publish("leases", self._leases.table)
        threading.Thread(target=self._listen, name="weft-inbox", daemon=True).start()

    # What vLLM calls, in the order of a step.

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Publishes the cache, and the description by which others find their way in it."""
        shared = self._share(caches)
        regions: dict[int, int] = {}
        layers: dict[str, Layer] = {}
        for name, cache in caches.items():
            if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
                raise ValueError(f"weft.vllm moves attention caches of four dimensions, and {name} is not one of them")
            storage = cache.untyped_storage()
            region = regions.setdefault(storage.data_ptr(), len(regions))
            if region == len(self._memories):
                memory = shared.get(storage.data_ptr())
                if memory is None:
                    memory = self.agent.register(torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage))
                self._memories.append(memory)
                self.agent.publish(f"kv/{region}", memory)
            layers[name] = self._layer(cache, region)
        self.description = Description(self.engine, self.rank, self.ranks, self._meaning(caches), layers)
        text = self.description.to_bytes()
        # Memory that nobody holds is withdrawn.
        self._about = self.agent.allocate(len(text))
        memoryview(self._about).cast("B")[:] = text
        self.agent.publish("about", self._about)
        self._caches = caches
        around = Surroundings(
            self.agent, self._partners, self.description, self.ranks, self._settle, self._on_landed,
            self.options.deadline, self.options.landing_bytes,
        )  # fmt: skip
        self._pushes = Pushes(
            self._loop, self._push_pool, self._partners, self.description, self._memories, self._on_served, bool(self.options.checksum)
        )
        self._landings = Landings(self._loop, self._push_pool, around)
        logger.info(
            "weft: worker %d of %d publishes %d layers in %d regions at %s", self.rank, self.ranks, len(layers), len(regions), self.agent.address
        )

    def _share(self, caches: dict[str, torch.Tensor]) -> dict[int, weft.Memory]:
        """Moves caches in ordinary memory to where others on this host can map them, which is much faster than having the kernel copy. They
        hold nothing yet, and vLLM sees the same tensors. Says where they are now, by the address of their storage.
        """
        layers = self.config.compilation_config.static_forward_context
        moved: dict[int, weft.Memory] = {}
        tensors = {name: cache for name, cache in caches.items() if isinstance(cache, torch.Tensor)}
        for address in {cache.untyped_storage().data_ptr() for cache in tensors.values()}:
            together = {name: cache for name, cache in tensors.items() if cache.untyped_storage().data_ptr() == address}
            # A layer that computes on another tensor of the same storage would be left behind.
            if any(cache.device.type != "cpu" or getattr(layers.get(name), "kv_cache", None) is not cache for name, cache in together.items()):
                continue
            memory = self.agent.allocate(next(iter(together.values())).untyped_storage().nbytes())
            # Now, and not while the first prompts are computed or fetched, the kernel finds pages for it.
            storage = torch.frombuffer(memoryview(memory).cast("B"), dtype=torch.uint8).zero_().untyped_storage()
            with torch.inference_mode():
                for cache in together.values():
                    cache.set_(storage, cache.storage_offset(), cache.size(), cache.stride())
            moved[storage.data_ptr()] = memory
        return moved

    def handshake(self) -> Address:
        return Address(self.agent.address)

    def preempt(self, orders: Orders) -> None:
        """Blocks that lose their request may be overwritten when this returns."""
        if orders.preempted and self._pushes:
            self._pushes.preempt(orders.preempted)

    def begin(self, orders: Orders) -> None:
        """Before anything is computed."""
        if self._pushes:
            self._pushes.compute(orders.computed)

    def saved(self, layer: str) -> None:
        """A layer has been computed."""
        if self._pushes:
            self._pushes.computed(layer)

    def end(self) -> None:
        """All layers have been computed."""
        if self._pushes:
            self._pushes.computed()

    def start(self, orders: Orders, computes: bool) -> None:
        with self._changed:
            for request, lease in orders.holds.items():
                self._leases.hold(request, lease)
            self._under_way += len(orders.loads) + len(orders.awaited)
            self._stopped.update(orders.stopped)
            self._idle_step = not computes
        for request, load in orders.loads.items():
            self._pool.submit(self._hand_off, request, load)
        for origin in orders.releases:
            self._pool.submit(self._tell, origin, "done")
        for origin in orders.renewals:
            self._pool.submit(self._tell, origin, "renew")
        if self._pushes is None or self._landings is None:
            return
        for hand_off in orders.refused:
            self._pushes.refuse(hand_off, "the request ended before it was computed")
        for request, awaited in orders.awaited.items():
            self._landings.expect(request, awaited)
        for request in orders.aborted:
            self._landings.abort(request)
        for push in orders.left:
            self._push_pool.submit(self._tell_all, push.addresses, {"kind": "done", "hand_off": push.hand_off})
        for push in orders.expected:
            self._push_pool.submit(self._tell_all, push.addresses, {"kind": "renew", "hand_off": push.hand_off})

    def results(self) -> KVConnectorTransferResults:
        with self._changed:
            over = self._over()
            if self._idle_step and not over and not self._ended and (self._under_way or len(self._leases) or self._stopped):
                self._changed.wait(IDLE_STEP_MAX if self._under_way else LEASED_STEP_MAX)
                over = self._over()
            ended, self._ended = self._ended, {}
            for request, hand_off in ended.items():
                self._reports.hand_offs[request] = [hand_off]
                self._stats.add(hand_off)
            self._stats.hold(len(self._leases), self._leases.expired)
        failed = {request for request, hand_off in ended.items() if hand_off.failure}
        return KVConnectorTransferResults(finished_sending=over, finished_recving=set(ended), failed_recving=failed)

    def _over(self) -> set[str]:
        """Requests whose blocks are not read by anybody any more."""
        over = self._leases.over(self._push_ended)
        stopped = {request for request in self._stopped if self._push_ended(request, "the request was aborted there")}
        self._stopped -= stopped
        return over | stopped

    def _push_ended(self, request: str, why: str) -> bool:
        return self._pushes is None or self._pushes.ended(request, why)

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
        self._push_pool.shutdown(wait=False, cancel_futures=True)
        if self._pushes:
            self._pushes.close()
        self.agent.close()
        self._loop.close()

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
                self._hear(json.loads(heard.payload), heard.peer)
            except Exception as error:  # Whatever it is, others go on being heard.
                logger.warning("weft: %s said something that cannot be understood: %r", heard.peer.name, error)

    def _hear(self, said: dict[str, Any], peer: weft.Peer) -> None:
        """Raises `KeyError`, `TypeError` or `ValueError` where it makes no sense."""
        kind, name = str(said["kind"]), str(peer.name)
        if kind in ("landed", "failed"):
            if self._landings:
                self._landings.hear(said, name)
        elif kind == "reserve":
            if self._pushes:
                self._pushes.reserve(said, peer)
        elif "hand_off" in said:
            if self._pushes and kind == "done":
                self._pushes.give_up(str(said["hand_off"]), name, int(said["readers"]))
            elif self._pushes and kind == "renew" and (request := self._pushes.request(str(said["hand_off"]))):
                with self._changed:
                    self._leases.renew(request)
        else:
            request = str(said["request"])
            with self._changed:
                if kind == "done":
                    self._leases.done(request, name, int(said["readers"]))
                    self._changed.notify_all()
                elif kind == "renew":
                    self._leases.renew(request)

    def _on_served(self, request: str, reader: str, readers: int) -> None:
        with self._changed:
            self._leases.done(request, reader, readers)
            self._changed.notify_all()

    # As decode side.

    def _on_landed(self, request: str, landed: Landed) -> None:
        error = landed.failure
        if error is None:
            hand_off = HandOff(landed.seconds, landed.bytes, landed.transport)
            logger.info(
                "weft: request %s: %d bytes were pushed over %s in %.1f ms", request, landed.bytes, landed.transport, 1e3 * landed.seconds
            )
        else:
            hand_off = HandOff(landed.seconds, 0, "", f"{type(error).__name__}: {error}")
            logger.warning(
                "weft: request %s is computed here, after %.1f ms: %s", request, 1e3 * landed.seconds, hand_off.failure,
                exc_info=None if isinstance(error, EXPECTED) else error,
            )  # fmt: skip
        with self._changed:
            self._under_way -= 1
            self._ended[request] = hand_off
            self._changed.notify_all()

    def _settle(self, name: str, landed: memoryview, blocks: list[int]) -> None:
        """Copies what has landed of a layer to its blocks."""
        cache = self._caches[name]
        whole = torch.frombuffer(landed, dtype=torch.uint8).view(cache.dtype).view(len(blocks), *cache.shape[1:])
        cache[torch.tensor(blocks)] = whole

    def _hand_off(self, request: str, load: Load) -> None:
        began = time.monotonic()
        origin = load.origin
        failure: Exception | None = None
        try:
            moved, transport = self._fetch(load, began + self.options.deadline)
            hand_off = HandOff(time.monotonic() - began, moved, transport)
        except Exception as error:  # A request must never wait for a thread that is gone.
            failure = error
            hand_off = HandOff(time.monotonic() - began, 0, "", f"{type(error).__name__}: {error}")
        with self._changed:
            self._under_way -= 1
            self._ended[request] = hand_off
            self._changed.notify_all()
        # The request goes on by now; what remains is for others. Whether it was read or not, nobody here will read it again.
        self._tell(origin, "done")
        if failure is None:
            logger.info(
                "weft: request %s: %d tokens (%d bytes) from engine %s over %s in %.1f ms",
                request, load.tokens[1] - load.tokens[0], moved, origin.engine, transport, 1e3 * hand_off.seconds,
            )  # fmt: skip
            return
        # What is not expected is a mistake of this package, and told with where it happened.
        logger.warning(
            "weft: request %s is computed here, after %.1f ms: %s", request, 1e3 * hand_off.seconds, hand_off.failure,
            exc_info=None if isinstance(failure, (Mismatch, weft.Error)) else failure,
        )  # fmt: skip

    def _fetch(self, load: Load, deadline: float, *, checked: bool = False) -> tuple[int, str]:
        assert self.description is not None
        origin = load.origin
        partners = [self._partners.at(address, deadline) for address in origin.addresses]
        descriptions = [partner.description(self.description, deadline) for partner in partners]
        wanted = sources(self.description, descriptions)
        transfers = []
        for nth, (partner, description) in enumerate(zip(partners, descriptions, strict=True)):
            here = [source for source in wanted if source.worker == nth]
            if not here:
                continue
            pieces = legs(self.description, description, here, load.blocks, origin.blocks, load.tokens)
            pairs = [
                (self._memories[mine], near, partner.region(f"kv/{theirs}", deadline), far) for mine, near, theirs, far in pieces
            ]
            within = self.options.checksum == "wire" and partner.peer.transports[:1] == [WITHIN]
            check = checked or (bool(self.options.checksum) and not within)
            transfer = partner.peer.transfer("read", pairs, deadline=left(deadline), checksum=check)
            transfers.append((partner, transfer, check))
        summaries = [transfer.wait() for _, transfer, _ in transfers]
        if self.options.checksum and any(
            done.transport != WITHIN and not check for done, (_, _, check) in zip(summaries, transfers, strict=True)
        ):
            # What was to stay within the host went another way after all.
            return self._fetch(load, deadline, checked=True)
        for partner, _, _ in transfers:
            if partner.word("leases", 8 * origin.lease.slot, deadline) > origin.lease.stamp:
                raise Mismatch(f"engine {origin.engine} gave the blocks of {origin.request} up before all of them were read")
        return sum(done.bytes for done in summaries), "+".join(sorted({done.transport for done in summaries}))

    def _tell(self, origin: Origin, kind: str) -> None:
        self._tell_all(origin.addresses, {"kind": kind, "request": origin.request})

    def _tell_all(self, addresses: list[str], said: dict[str, Any]) -> None:
        """Tells every worker of an engine something about a request. A worker that cannot be told finds out by its lease."""
        text = json.dumps({**said, "readers": self.ranks}, separators=(",", ":")).encode()
        for address in addresses:
            try:
                self._partners.at(address, time.monotonic() + self.options.deadline).peer.notify(text)
            except (Mismatch, weft.Error) as error:
                # It holds blocks for longer than it need.
                logger.warning("weft: %s was not told %s: %s", address, said, error)

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
