"""The half of the connector that decides: which prompts are fetched, which blocks are held, and what clients are told."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

import weft
from weft.hand_off import Desk, Ended, Lease, Origin, Push
from weft.routed import KEY, NotHandedOff, answer, pushed, wanted

from ._messages import Orders, Prompt, Reports, summary
from ._subject import subject

logger = init_logger(__name__)

# Why prompts are not handed off is logged once a cause and so many seconds: clients can bring it about.
LOG_SECONDS = 60.0


class Scheduler(KVConnectorBase_V1):
    def _start_deciding(self) -> None:
        self.addresses: list[str] = []
        self.desk = Desk(**self.options.agent_settings())
        self._orders = Orders()
        # As decode side: requests whose prompt is elsewhere, until it has come or been given up; how many of their tokens are here; those that have had
        # their one attempt, since a second one would ask for blocks that may be gone; and what clients are told in the end.
        self._wanted: dict[str, Origin | Push] = {}
        self._here: dict[str, int] = {}
        self._tried: set[str] = set()
        self._told: dict[str, list[Ended]] = {}
        # As prefill side: prompts that are pushed, with their hand-offs, and hand-offs that are held.
        self._pushed: dict[str, tuple[str, Prompt]] = {}
        self._leased: dict[str, tuple[str, Lease]] = {}
        # Until when a cause is not logged again.
        self._quiet: dict[str, float] = {}

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.addresses = [metadata[rank].address for rank in sorted(metadata)]

    def on_new_request(self, request: Any) -> None:
        name, params, about = request.request_id, request.kv_transfer_params, subject(request)
        try:
            # One that vLLM refused before it had read the prompt is only to be given up.
            if source := wanted(self.desk, params, about, getattr(request, "abort_immediately", False)):
                self._wanted[name] = source
                self._orders.wanted.append(source)
            elif hand_off := pushed(params, about):
                if hand_off in [other for other, _ in (*self._pushed.values(), *self._leased.values())]:
                    raise NotHandedOff("Repeated", f"hand-off {hand_off} is under way already")
                self._pushed[name] = hand_off, Prompt([], request.num_prompt_tokens, str(about))
        except NotHandedOff as error:
            self._told[name] = [Ended("", error.cause, error.reason, 0, 0.0, ())]
            self._stats.add(self._told[name][0])
            if (now := time.monotonic()) >= self._quiet.get(error.cause, 0.0):
                self._quiet[error.cause] = now + LOG_SECONDS
                logger.error("weft: request %s is computed here: %s", name, error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name, there = request.request_id, request.num_prompt_tokens
        source = self._wanted.get(name)
        if source is None or name in self._tried:
            return 0, False
        missing = (min(source.tokens, there) if isinstance(source, Origin) else there) - num_computed_tokens
        self._here[name] = num_computed_tokens
        return (missing, True) if missing > self.options.fetch_min_tokens else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        if name not in self._wanted or name in self._tried:
            return
        self._tried.add(name)
        first, about = self._here.pop(name, 0), subject(request)
        assert about is not None, "a prompt without one is not waited for"
        if num_external_tokens == 0:
            # The other side need not hold its blocks.
            self._orders.left.append(self._wanted.pop(name).hand_off)
            self._told[name] = [Ended("", "NotNeeded", f"{first} of {request.num_prompt_tokens} tokens were here already", 0, 0.0, ())]
            return
        prompt = Prompt(list(blocks.get_block_ids()[0]), first + num_external_tokens, about, first)
        self._orders.loads[name] = self._wanted[name].hand_off, prompt

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        if self._pushed:
            self._follow(scheduler_output)
        orders, self._orders = self._orders, Orders()
        return orders

    def _follow(self, output: Any) -> None:
        """Tells the workers what a step computes of prompts that are pushed."""
        for name in self._pushed.keys() & (output.preempted_req_ids or ()):
            hand_off, prompt = self._pushed[name]
            self._pushed[name] = hand_off, replace(prompt, blocks=[])
            self._orders.preempted.append(hand_off)
        scheduled = [(new.req_id, new.block_ids, new.num_computed_tokens, True) for new in output.scheduled_new_reqs]
        old = output.scheduled_cached_reqs
        for name, blocks, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            scheduled.append((name, blocks or ([],), computed, name in old.resumed_req_ids))
        for name, blocks, computed, anew in scheduled:
            if name in self._pushed:
                hand_off, prompt = self._pushed[name]
                upto = min(computed + output.num_scheduled_tokens.get(name, 0), prompt.tokens)
                prompt = replace(prompt, blocks=list(blocks[0]) if anew else prompt.blocks + blocks[0], upto=upto)
                self._pushed[name] = hand_off, prompt
                self._orders.computed[hand_off] = prompt

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        # Of a request that has ended meanwhile nobody asks any more.
        for name in self._wanted.keys() & (reports.ended if isinstance(reports, Reports) else ()):
            self._told.setdefault(name, []).extend(reports.ended[name])
        for name in connector_output.finished_recving or ():
            self._wanted.pop(name, None)
        for name in self._leased.keys() & (connector_output.finished_sending or ()):
            self.desk.give_back(self._leased.pop(name)[1])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        if source := self._wanted.pop(name, None):
            # It ended before its prompt came. Blocks that it has are vLLM's again when the workers have said so.
            self._orders.left.append(source.hand_off)
        self._here.pop(name, None)
        self._tried.discard(name)
        ended = self._told.pop(name, None)
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_decode"):
            return False, {KEY: summary(ended)} if ended else None
        hand_off, prompt = self._pushed.pop(name, (os.urandom(16).hex(), None))
        # A prompt that was handed off to here and goes on to others is told of like any other. What stands beside the seal means nothing to those others.
        told = summary(ended) if ended else {}
        if held := self._hold(request, block_ids, hand_off):
            return True, {**held, KEY: told | held[KEY]}
        # Blocks from which something is pushed are vLLM's again when that has ended.
        begun = prompt is not None and prompt.upto > 0
        if prompt is not None:
            self._orders.stopped[hand_off] = name if begun else None
        return begun, {KEY: told} if told else None

    def _hold(self, request: Any, blocks: list[int], hand_off: str) -> dict[str, Any] | None:
        """Holds the blocks of a request under a lease, where it was computed whole and somebody may have it. Says where they are."""
        name, about = request.request_id, subject(request)
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED) or not blocks or about is None:
            return None
        if not self.addresses or (lease := self.desk.lease(self.options.lease)) is None:
            logger.error("weft: request %s is not held for others: %s", name, "all leases are out" if self.addresses else "there are no workers")
            return None
        origin = Origin(hand_off, self.addresses, list(blocks), min(request.num_computed_tokens, request.num_prompt_tokens), lease)
        try:
            params = answer(self.desk, origin, about, self.options.mode)
        except weft.NotBelieved as error:
            logger.error("weft: request %s has %d blocks, and is not held for others: %s", name, len(blocks), error)
            self.desk.give_back(lease)
            return None
        self._leased[name], self._orders.holds[hand_off] = (hand_off, lease), (name, lease)
        return params
