"""A tier of vLLM's OffloadingConnector on `weft.Store`: blocks outlive the engine, within a budget, and what comes back is what was put.

vLLM's scheduler calls all of this, and none of it waits: errands are handed to `weft.Porter`, whose thread moves and sums bytes, and what has ended is asked for once a
step. Whether a block is there is answered from the index in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality, LookupResult, Medium, OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext, get_offload_group_idx,
)  # fmt: skip
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import weft
from weft import _tier_options

logger = init_logger(__name__)

# Events that wait for vLLM to take them, which it does once a step.
EVENTS_MAX = 1 << 17
# Requests of which it is remembered what could not be read.
FAILED_MAX = 4096


@dataclass(frozen=True)
class TierOptions:
    """What stands beside `type` and `module_path` in a secondary tier. Without a default: what vLLM does not tell a tier, and what must be equal for a cache to serve."""

    # Where the blocks are, and how many bytes of them at most.
    directory: str
    capacity: int
    # The weights' revision, or anything else that changes with them.
    revision: str
    # How the weights are quantised while the engine runs; "none" where they are as they were loaded.
    quantisation: str
    # Whose blocks these are.
    tenant: str
    # What the scales of an 8-bit KV cache come from; it has to be said for such a cache only.
    scales: str = ""
    durability: str = "process"
    policy: str = "adaptive"
    deadline: float = 30.0
    extent: int = 0
    # Bytes that wait to be written or read at most; what does not fit is not stored, and counted.
    queue: int = 4 << 30
    enable_kv_events: bool = False
    locality: str = "LOCAL"
    # Settings of the agent, as `weft.Agent` takes them.
    agent: dict[str, Any] = field(default_factory=dict)


def namespace(config: Any, row_bytes: int, options: TierOptions) -> dict[str, object]:
    """The fields of the namespace, from what vLLM tells a tier and from the options. A field of vLLM's that is empty is a refusal."""
    told = {"model": config.model.name, "dtype": config.model.dtype, "tokens_per_hash": config.cache.tokens_per_hash, "kv_cache_layout": config.kv_cache_layout}
    for name, value in told.items():
        if not value and name != "kv_cache_layout":
            raise ValueError(f"vLLM does not tell {name}, without which blocks of another could be served")
    scales = _tier_options.scales(options.scales, str(config.model.dtype), "WeftTier")
    parallel = config.parallel
    # Where vLLM says that bytes do not depend on the ranks, engines of different parallelism share them.
    ranks = [1, 1, 1, 1]
    if not (parallel.is_parallelism_agnostic or config.replicated_layout):
        ranks = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    layout = {
        "engine": "vllm", "row": row_bytes, "blocks_per_chunk": config.cache.blocks_per_chunk, "tp_pp_pcp_dcp": ranks,
        "canonical": config.canonical_layout, "replicated": config.replicated_layout, "kv_cache_layout": config.kv_cache_layout,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return {
        "model": told["model"], "revision": options.revision, "dtype": told["dtype"], "quantisation": options.quantisation, "scales": scales,
        "layout": f"vllm-{digest}", "block_tokens": told["tokens_per_hash"], "tenant": options.tenant,
        # vLLM's hashes are of token ids, and of the LoRA that a request uses; positions belong to the model.
        "tokenizer": "token-ids", "lora": "in-the-hash", "positions": "of-the-model",
    }  # fmt: skip


class WeftTier(SecondaryTierManager):
    """`secondary_tiers: [{"type": "WeftTier", "module_path": "weft.vllm", "directory": …, "capacity": …, "revision": …, "quantisation": …, "tenant": …}]`."""

    medium = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        parsed = _tier_options.parse(TierOptions, options, "WeftTier")
        self.locality = Locality(parsed.locality)
        config = offloading_spec.config
        self._row = self.block_size_bytes
        space = weft.Space(**namespace(config, self._row, parsed))
        directory = parsed.directory
        if config.parallel.data_parallel_size > 1:
            # A directory has one owner, and each replica of an engine is one.
            directory = f"{directory}/replica-{config.parallel.data_parallel_index}"
        self._events = parsed.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        if parsed.enable_kv_events and not self._events:
            logger.warning("enable_kv_events of tier %s comes to nothing: KV cache events are off", tier_type)
        self._agent = weft.Agent(f"vllm-tier-{config.engine_id}"[:80], **{"transports": "shared_memory", **parsed.agent})
        self._store = _tier_options.opened(
            self._agent, self._row, directory, parsed.capacity, extent=parsed.extent, durability=parsed.durability, policy=parsed.policy,
            deadline=parsed.deadline, events=EVENTS_MAX if self._events else 0,
        )  # fmt: skip
        self._memory = self._agent.register(primary_kv_view)
        self._porter = weft.Porter(self._store, space, queue=parsed.queue, events=self._events)
        # Asked for each block of each request.
        self._has = self._porter.has
        self._jobs: dict[int, tuple[OffloadKey, ...]] = {}
        self._of_request: dict[int, str] = {}
        self._seen: dict[str, dict[OffloadKey, None]] = {}
        self._last: dict[tuple[str, int], OffloadKey] = {}
        self._failed: dict[str, set[OffloadKey]] = {}
        found = self._store.stat()["tiers"][0]
        logger.info("WeftTier %s: %s blocks of %s bytes found, room for %s", directory, found["recovered"], self._row, found["slots"])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = req_context.req_id
        if not self._has(key) or (self._failed and key in self._failed.get(request, ())):
            return LookupResult.MISS
        seen = self._seen.get(request)
        if seen is None:
            seen = self._seen[request] = {}
        seen[key] = None
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = tuple(job_metadata.keys)
        request, group = job_metadata.req_context.req_id, get_offload_group_idx(keys[0]) if keys else 0
        last = self._last.get((request, group))
        if last is None and (seen := self._seen.get(request)):
            # What comes after a hit follows the last block of it.
            last = next((key for key in reversed(seen) if get_offload_group_idx(key) == group), None)
        row = self._row
        self._begin(job_metadata, keys)
        self._porter.put(job_metadata.job_id, self._memory, keys, [row * chunk for chunk in job_metadata.chunk_ids.tolist()], after=last)
        if keys:
            self._last[request, group] = keys[-1]

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = tuple(job_metadata.keys)
        row = self._row
        self._begin(job_metadata, keys)
        self._of_request[job_metadata.job_id] = job_metadata.req_context.req_id
        self._porter.get(job_metadata.job_id, self._memory, keys, [row * chunk for chunk in job_metadata.chunk_ids.tolist()])

    def _begin(self, job: TransferJob, keys: tuple[OffloadKey, ...]) -> None:
        self._jobs[job.job_id] = keys

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job, done, moved, seconds, why in self._porter.ended():
            keys = self._jobs.pop(job)
            request = self._of_request.pop(job, None)
            whole = all(done)
            successful = None
            if request is not None and not whole:
                # What could not be read is not asked for again by this request: vLLM would go on asking, and never compute it.
                failed = [key for key, there in zip(keys, done, strict=True) if not there]
                if len(self._failed) < FAILED_MAX or request in self._failed:
                    self._failed.setdefault(request, set()).update(failed)
                successful = tuple(key for key, there in zip(keys, done, strict=True) if there) or None
                logger.warning("WeftTier: %s of %s blocks could not be read, and are computed again%s", len(failed), len(keys), f": {why}" if why else "")
            elif not whole:
                logger.debug("WeftTier: %s of %s blocks are not stored: %s", done.count(False), len(keys), why)
            results.append(JobResult(job, whole, successful, seconds, moved))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return
        events, lost, _ = self._porter.events()
        if lost:
            logger.warning("WeftTier: %s KV events were lost, because nobody took them", lost)
        at = 0
        while at < len(events):
            stored, keys = events[at][1], []
            while at < len(events) and events[at][1] == stored:
                keys.append(OffloadKey(events[at][0]))
                at += 1
            yield OffloadingEvent(keys=keys, medium=self.medium, removed=not stored, locality=self.locality)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        seen = self._seen.setdefault(req_context.req_id, {})
        for key in keys:
            seen[key] = None

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = req_context.req_id
        self._failed.pop(request, None)
        chains: dict[int, list[OffloadKey]] = {}
        for key in self._seen.pop(request, ()):
            chains.setdefault(get_offload_group_idx(key), []).append(key)
        for group, chain in chains.items():
            self._porter.used(chain)
            self._last.pop((request, group), None)
        for known in [known for known in self._last if known[0] == request]:
            del self._last[known]

    def drain_jobs(self) -> None:
        # Each of its transfers has a deadline, so this ends.
        while not self._porter.drain(1.0):
            logger.info("WeftTier: waiting for %s jobs", len(self._jobs))

    def shutdown(self) -> None:
        self._porter.close()
        # vLLM unmaps its memory next, and could not while it is held here.
        self._memory.release()
        del self._memory
        self._store.close()
        self._agent.close()
