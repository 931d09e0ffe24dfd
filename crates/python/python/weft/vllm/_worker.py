"""The half of the connector that moves: one agent a worker, which hands its cache off and fetches from those of others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorTransferResults
from vllm.logger import init_logger

import weft
from weft.hand_off import Ended, HandOff

from ._cache import layer, meaning, share
from ._messages import Address, Orders, Prompt, Reports
from ._options import refuse_devices

logger = init_logger(__name__)

# A step in which nothing is computed waits so long for a hand-off to end, instead of asking again at once: longer than most take, since what
# the engine does between two steps takes the core from who copies. Where only leases are held, nobody is in a hurry but the next request.
IDLE_STEP_MAX = 0.005
LEASED_STEP_MAX = 0.002


class Worker(KVConnectorBase_V1):
    def _start_moving(self) -> None:
        parallel, engine = self._vllm_config.parallel_config, self._kv_transfer_config.engine_id
        self.rank, self.ranks = parallel.rank, parallel.world_size
        self.agent = weft.Agent(self.options.agent_name(engine, self.rank, self.ranks), **self.options.agent_settings())
        # From when there is a cache on.
        self.hand_off: Any = None
        self._layers: dict[str, int] = {}
        # By hand-off: requests that wait for their blocks, and since when; and requests whose blocks are held for others.
        self._loading: dict[str, tuple[str, float]] = {}
        self._held: dict[str, str] = {}
        # What vLLM has not been told yet: how loads have ended, and which requests are not held any more. And how many leases have expired so far.
        self._ended: dict[str, Ended] = {}
        self._over: set[str] = set()
        self._reports, self._expired = Reports(), 0
        # The step under way: prompts that are pushed while it computes them; and whether it computes nothing at all.
        self._step: dict[str, Prompt] = {}
        self._idle_step = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if others := [name for name, cache in kv_caches.items() if not isinstance(cache, torch.Tensor) or cache.dim() != 4]:
            raise ValueError(f"weft.vllm moves attention caches of four dimensions, and {others[0]} is not one of them")
        refuse_devices(kv_caches)
        config, options = self._vllm_config, self.options
        memories = share(self.agent, config, kv_caches)
        places = {at: nth for nth, at in enumerate(memories)}
        layers = [layer(config, name, cache, places[cache.untyped_storage().data_ptr()]) for name, cache in kv_caches.items()]
        self._layers = {described.name: nth for nth, described in enumerate(layers)}
        self.hand_off = HandOff(
            self.agent, layers, list(memories.values()), meaning=meaning(config, next(iter(kv_caches.values()))), rank=self.rank, ranks=self.ranks,
            deadline=options.deadline, lease=options.lease, landing_bytes=options.landing_bytes, checksum=options.checksum,
        )  # fmt: skip
        logger.info("weft: worker %d of %d hands off %d layers in %d memories at %s", self.rank, self.ranks, len(layers), len(memories), self.agent.address)

    def get_handshake_metadata(self) -> Address:
        return Address(self.agent.address)

    # In the order of a step.

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks that lose their request may be overwritten when this returns."""
        assert isinstance(kv_connector_metadata, Orders)
        for name in kv_connector_metadata.preempted:
            # What is written from them is cancelled, and nothing outlives its deadline.
            self.hand_off.preempt(name, 2 * self.options.deadline)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._step = {}
        for name, prompt in connector_metadata.computed.items():
            try:
                self.hand_off.compute(name, prompt.blocks, prompt.tokens, prompt.subject.encode())
                self._step[name] = prompt
            except weft.InvalidCall as error:
                logger.warning("weft: hand-off %s is not pushed: %s", name, error)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders, hand_off, self._idle_step = self._get_connector_metadata(), self.hand_off, forward_context.attn_metadata is None
        assert isinstance(orders, Orders)
        for source in orders.wanted:
            hand_off.want_from(source, self.ranks)
        for request, (name, prompt) in orders.loads.items():
            self._loading[name] = request, time.monotonic()
            hand_off.fetch(name, prompt.blocks, prompt.tokens, prompt.subject.encode(), prompt.first)
        for name in orders.left:
            hand_off.leave(name)
        for name, (request, lease) in orders.holds.items():
            self._held[name] = request
            hand_off.offer_leased(name, lease)
        for name, stopped in orders.stopped.items():
            self._held |= {name: stopped} if stopped is not None else {}
            hand_off.stop(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps, before their request is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """What was asked to be pushed of this layer is on its way from now on. Otherwise the decode side fetches from where the layers are."""
        self._computed(self._layers.get(layer_name, -1))

    def wait_for_save(self) -> None:
        """Nobody waits: blocks that are still read are not given up."""
        self._computed(None)

    def _computed(self, nth: int | None) -> None:
        """A layer is there, or all of them."""
        for name, prompt in self._step.items() if nth != -1 else ():
            self.hand_off.computed(name, prompt.upto, nth)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        wait = 0.0
        if self._idle_step and not self._ended and not self._over and (self._loading or self._held):
            wait = IDLE_STEP_MAX if self._loading else LEASED_STEP_MAX
        while self.hand_off is not None and (event := self.hand_off.event(wait)):
            wait = 0.0
            if isinstance(event, Ended):
                self._end(event)
            elif event.name in self._held:
                self._over.add(self._held.pop(event.name))
                self._expired += event.cause == "Expired"
        self._stats.data |= {"held": len(self._held), "expired": self._expired}
        ended, self._ended, over, self._over = self._ended, {}, self._over, set()
        failed = {request for request, end in ended.items() if end.cause}
        return KVConnectorTransferResults(finished_sending=over, finished_recving=set(ended), failed_recving=failed)

    def _end(self, ended: Ended) -> None:
        request, since = self._loading.pop(ended.name, ("", 0.0))
        if not request:
            # It was left before there were blocks for it.
            return
        ended = replace(ended, seconds=time.monotonic() - since)
        self._ended[request], self._reports.ended[request] = ended, [ended]
        self._stats.add(ended)
        if ended.cause:
            logger.warning("weft: request %s is computed here, after %.1f ms: %s: %s", request, 1e3 * ended.seconds, ended.cause, ended.reason)
        else:
            logger.info("weft: request %s: %d bytes over %s in %.1f ms", request, ended.nbytes, "+".join(ended.transports), 1e3 * ended.seconds)

    def build_connector_worker_meta(self) -> Reports | None:
        reports, self._reports = self._reports, Reports()
        return reports if reports.ended else None

    def shutdown(self) -> None:
        # A scheduler has neither.
        for each in ("hand_off", "agent"):
            if (own := getattr(self, each, None)) is not None:
                own.close()
