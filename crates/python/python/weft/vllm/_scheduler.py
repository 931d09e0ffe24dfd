"""The half of the connector that decides: which prompts are fetched, which blocks are held, and what clients are told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

import weft

from ._description import Mismatch
from ._landing import Awaited
from ._messages import Address, HandOff, Load, Orders, Reports, summary
from ._options import Options
from ._origin import KEY, SLOTS, Lease, Origin, Push, Trust, parameters, subject
from ._push import Computed
from ._stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass
class _Pushed:
    """A prompt that is computed here and pushed elsewhere."""

    hand_off: str
    tokens: int
    digest: str
    blocks: list[int] = field(default_factory=list)
    begun: bool = False


class Scheduler:
    def __init__(self, config: VllmConfig, engine: str, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.addresses: list[str] = []
        self._trust = Trust(options.agent_settings())
        self._orders = Orders()
        # As decode side: requests whose prompt is elsewhere, until it has been fetched or given up; and how many of their tokens are here.
        self._wanted: dict[str, Origin | Push] = {}
        self._computed: dict[str, int] = {}
        # Requests that have had their one attempt. A second one would ask for blocks that may be gone.
        self._tried: set[str] = set()
        self._told: dict[str, list[HandOff]] = {}
        # As prefill side: slots that nobody uses, and which request has which.
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self._pushed: dict[str, _Pushed] = {}
        # Stamps only grow, also over restarts of the scheduler, so that a word of an earlier request never looks like a later one.
        self._stamp = time.time_ns()
        self._renewed = time.monotonic()

    def set_addresses(self, metadata: dict[tuple[int, int], Address]) -> None:
        self.addresses = [metadata[rank].address for rank in sorted(metadata)]

    def on_new_request(self, request: Request) -> None:
        name = request.request_id
        try:
            if wanted := self._trust.wanted(request):
                self._wanted[name] = wanted
            elif hand_off := self._trust.pushed(request):
                if any(pushed.hand_off == hand_off for pushed in self._pushed.values()):
                    raise Mismatch(f"hand-off {hand_off} is under way already")
                if (digest := subject(request)) is None:
                    raise Mismatch("the prompt of the request is not made of tokens alone")
                self._pushed[name] = _Pushed(hand_off, request.num_prompt_tokens, digest)
        except Mismatch as mismatch:
            self._told[name] = [HandOff(0.0, 0, "", self._trust.doubt(name, mismatch))]

    def stats(self) -> Stats | None:
        """Of what workers never hear of."""
        stats = Stats()
        for kind, times in self._trust.failures().items():
            stats.fail(kind, times)
        return None if stats.is_empty() else stats

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        origin = self._wanted.get(request.request_id)
        if origin is None or request.request_id in self._tried:
            return 0, False
        there = request.num_prompt_tokens
        if isinstance(origin, Origin):
            there = min(origin.tokens, there)
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
            self._release(self._wanted.pop(name))
            return
        first = self._computed.pop(name, 0)
        here, tokens = list(blocks.get_block_ids()[0]), (first, first + external)
        if isinstance(origin, Origin):
            self._orders.loads[name] = Load(origin, here, tokens)
        else:
            digest = subject(request)
            assert digest is not None, "a prompt without one is not waited for"
            self._orders.awaited[name] = Awaited(origin.hand_off, origin.addresses, here, tokens, request.num_prompt_tokens, digest)

    def orders(self, output: SchedulerOutput) -> Orders:
        now = time.monotonic()
        if self._wanted and now - self._renewed > self.options.lease / 4:
            self._renewed = now
            for origin in self._wanted.values():
                if isinstance(origin, Origin):
                    self._orders.renewals.append(origin)
                else:
                    self._orders.expected.append(origin)
        if self._pushed:
            self._follow(output)
        orders, self._orders = self._orders, Orders()
        return orders

    def _follow(self, output: SchedulerOutput) -> None:
        """Tells the workers what a step computes of prompts that are pushed."""
        for name in output.preempted_req_ids or ():
            if pushed := self._pushed.get(name):
                pushed.blocks = []
                self._orders.preempted.append(pushed.hand_off)
        scheduled = [(new.req_id, new.block_ids, new.num_computed_tokens, True) for new in output.scheduled_new_reqs]
        old = output.scheduled_cached_reqs
        for name, blocks, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            scheduled.append((name, blocks or ([],), computed, name in old.resumed_req_ids))
        for name, blocks, computed, anew in scheduled:
            pushed = self._pushed.get(name)
            if pushed is None:
                continue
            pushed.blocks = list(blocks[0]) if anew else pushed.blocks + blocks[0]
            pushed.begun = True
            after = min(computed + output.num_scheduled_tokens.get(name, 0), pushed.tokens)
            self._orders.computed[pushed.hand_off] = Computed(name, list(pushed.blocks), after, pushed.tokens, pushed.digest)

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
        name, params = request.request_id, parameters(request)
        origin = self._wanted.pop(name, None)
        if origin is not None and name not in self._tried:
            # It ended before it was ever scheduled.
            self._release(origin)
        elif isinstance(origin, Push):
            # It ended while it was waited for. Its blocks are vLLM's again when the worker has said so.
            self._orders.aborted.append(name)
        self._computed.pop(name, None)
        self._tried.discard(name)
        hand_offs = self._told.pop(name, None)
        if not params.get("do_remote_decode"):
            return False, {KEY: summary(hand_offs)} if hand_offs else None
        pushed = self._pushed.pop(name, None)
        held = self._hold(request, blocks)
        return (self._stop(name, pushed), None) if held is None else (True, held)

    def _hold(self, request: Request, blocks: list[int]) -> dict[str, Any] | None:
        """Holds the blocks of a request under a lease, where it was computed whole and somebody may have it. Says where they are."""
        name, about = request.request_id, subject(request)
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not completed or not blocks or not self.addresses or about is None:
            return None
        if not self._free_slots:
            logger.error("weft: %d requests are held for others already; %s is not", SLOTS, name)
            return None
        self._stamp = max(self._stamp + 2, time.time_ns())
        lease = Lease(self._free_slots[-1], self._stamp, self.options.lease)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        origin = Origin(self.engine, name, self.addresses, list(blocks), tokens, lease)
        try:
            params = self._trust.seals.params(origin, about, self.options.mode)
        except weft.NotBelieved as error:
            logger.error("weft: request %s has %d blocks, and is not held for others: %s", name, len(blocks), error)
            return None
        self._slots[name] = self._free_slots.pop()
        self._orders.holds[name] = lease
        return params

    def _stop(self, name: str, pushed: _Pushed | None) -> bool:
        """Ends the pushing of a prompt that will not be whole. Whether its blocks have to wait for that."""
        if pushed is None:
            return False
        if pushed.begun:
            self._orders.stopped.append(name)
        else:
            self._orders.refused.append(pushed.hand_off)
        return pushed.begun

    def _release(self, origin: Origin | Push) -> None:
        if isinstance(origin, Origin):
            self._orders.releases.append(origin)
        else:
            self._orders.left.append(origin)
