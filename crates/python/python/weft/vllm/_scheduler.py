"""The half of the connector that decides: which prompts are fetched, which blocks are held, and what clients are told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ._description import Mismatch
from ._messages import KEY, SLOTS, Address, HandOff, Lease, Load, Orders, Origin, Reports, summary
from ._options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class Scheduler:
    def __init__(self, config: VllmConfig, engine: str, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.addresses: list[str] = []
        self._orders = Orders()
        # As decode side: requests whose prompt is elsewhere, until it has been fetched or given up; and how many of their tokens are here.
        self._wanted: dict[str, Origin] = {}
        self._computed: dict[str, int] = {}
        # Requests that have had their one attempt. A second one would ask for blocks that may be gone.
        self._tried: set[str] = set()
        self._told: dict[str, list[HandOff]] = {}
        # As prefill side: slots that nobody uses, and which request has which.
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[str, int] = {}
        # Stamps only grow, also over restarts of the scheduler, so that a word of an earlier request never looks like a later one.
        self._stamp = time.time_ns()
        self._renewed = time.monotonic()

    def set_addresses(self, metadata: dict[tuple[int, int], Address]) -> None:
        self.addresses = [metadata[rank].address for rank in sorted(metadata)]

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        try:
            self._wanted[request.request_id] = Origin.from_params(params)
        except Mismatch as mismatch:
            logger.error("weft: request %s is computed here: %s", request.request_id, mismatch)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        origin = self._wanted.get(request.request_id)
        if origin is None or request.request_id in self._tried:
            return 0, False
        there = min(origin.tokens, request.num_prompt_tokens)
        missing = there - computed
        if missing <= self.options.fetch_min_tokens:
            return 0, False
        self._computed[request.request_id] = computed
        return missing, True

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        name = request.request_id
        origin = self._wanted.get(name)
        if origin is None or name in self._tried:
            return
        self._tried.add(name)
        if external == 0:
            # All of it is here already: the other side need not hold its blocks.
            self._orders.releases.append(self._wanted.pop(name))
            return
        first = self._computed.pop(name, 0)
        self._orders.loads[name] = Load(origin, list(blocks.get_block_ids()[0]), (first, first + external))

    def orders(self, output: SchedulerOutput) -> Orders:
        now = time.monotonic()
        if self._wanted and now - self._renewed > self.options.lease / 4:
            self._renewed = now
            self._orders.renewals.extend(self._wanted.values())
        orders, self._orders = self._orders, Orders()
        return orders

    def on_output(self, output: KVConnectorOutput) -> None:
        reports = output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            for request, hand_offs in reports.hand_offs.items():
                self._told.setdefault(request, []).extend(hand_offs)
        for request in output.finished_recving or ():
            self._wanted.pop(request, None)
        for request in output.finished_sending or ():
            slot = self._slots.pop(request, None)
            if slot is not None:
                self._free_slots.append(slot)

    def on_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        name, params = request.request_id, request.kv_transfer_params or {}
        origin = self._wanted.pop(name, None)
        if origin is not None and name not in self._tried:
            # It ended before it was ever scheduled.
            self._orders.releases.append(origin)
        self._computed.pop(name, None)
        self._tried.discard(name)
        hand_offs = self._told.pop(name, None)
        if not params.get("do_remote_decode"):
            return False, {KEY: summary(hand_offs)} if hand_offs else None
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not completed or not blocks or not self.addresses:
            return False, None
        if not self._free_slots:
            logger.error("weft: %d requests are held for others already; %s is not", SLOTS, name)
            return False, None
        self._stamp = max(self._stamp + 2, time.time_ns())
        lease = Lease(self._free_slots.pop(), self._stamp, self.options.lease)
        self._slots[name] = lease.slot
        self._orders.holds[name] = lease
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        origin = Origin(self.engine, name, self.addresses, list(blocks), tokens, lease)
        return True, origin.to_params()
