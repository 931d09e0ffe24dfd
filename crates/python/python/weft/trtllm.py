"""KV blocks of TensorRT-LLM in a store of Weft's: prompts, or beginnings of prompts, that were computed before are not computed again, not even after a restart.

    # my_connector.py, which the engine finds by its name
    import weft.trtllm

    Scheduler, Worker = weft.trtllm.connector(memory=8 << 30, directory="/nvme/kv", capacity=400 << 30)

    # the engine's options
    kv_connector_config:
      connector_module: my_connector
      connector_scheduler_class: Scheduler
      connector_worker_class: Worker

**Written against TensorRT-LLM's main branch (its commit 035ab91), and not run with it**: its interface is stood in for by tests. For one rank.

TensorRT-LLM has no way back once it was told that tokens are there. So blocks are read, with their checksums, before it is told: what it hears of lies in host memory already.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy
import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker

from ._weft import Agent, Memory, Space, Store

__all__ = ["connector"]

logger = logging.getLogger(__name__)

# What an engine is told that says nothing of it.
_BLOCK_TOKENS = 32
# Names of blocks are made anew for salts that have not been seen for so many others.
_SALTS_MAX = 256


@dataclass
class _Orders:
    """What the scheduler wants of the worker in a step: blocks that lie in slots of the staging memory, to where they go; and blocks to be kept, each with its id, the id before it, and
    its salt."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[bytes, bytes | None, int, str]] = field(default_factory=list)


@dataclass
class _Request:
    """A request: the ids of its full blocks, what was read for it, and how many blocks were looked after."""

    salt: str
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    # Slots that hold its next blocks, from this one on.
    staged: list[int] = field(default_factory=list)
    first: int = 0
    kept: int = 0


class _Shared:
    """What both halves have, in one process: the store, and host memory for blocks on their way."""

    def __init__(self, staging_blocks: int, settings: dict[str, Any], fields: dict[str, object]) -> None:
        self._settings, self._fields, self._staging_blocks = settings, fields, staging_blocks
        self._spaces: OrderedDict[str, Space] = OrderedDict()
        self.block_tokens = _BLOCK_TOKENS
        # From when there is a cache on.
        self.store: Store | None = None
        self.agent: Agent | None = None
        self.staging: Memory | None = None
        self.host = torch.empty(0, dtype=torch.uint8)
        self.block_bytes = 0
        self.free: list[int] = []

    def fit(self, llm_args: Any) -> None:
        """Looks at how the engine is set up."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            if (ranks := getattr(llm_args, name, 1) or 1) > 1:
                raise ValueError(f"weft.trtllm is for one rank, and {name} is {ranks}")
        if getattr(llm_args, "revision", None):
            self._fields = {"revision": str(llm_args.revision), **self._fields}
        for name in ("revision", "quantisation", "scales"):
            if not self._fields.get(name):
                raise ValueError(f'weft.trtllm needs {name!r}: the engine does not tell it, and blocks of another must not be served; say "none" where there is nothing to say')
        cache = getattr(llm_args, "kv_cache_config", None)
        self.block_tokens = getattr(cache, "tokens_per_block", None) or _BLOCK_TOKENS
        self._fields = {
            "model": str(getattr(llm_args, "model", "none")), "tokenizer": "none", "dtype": str(getattr(cache, "dtype", "auto")), "lora": "none", "positions": "none", **self._fields,
        }  # fmt: skip

    def open(self, cache: torch.Tensor) -> None:
        self.block_bytes = cache[0].numel() * cache.element_size()
        # Where the same numbers mean something else, nothing is found.
        self._fields |= {"layout": f"trtllm {list(cache.shape[1:])} {cache.dtype}"}
        self.agent = Agent("trtllm")
        self.store = Store(self.agent, {"kv": self.block_bytes}, **self._settings)
        self.staging = self.agent.allocate(self._staging_blocks * self.block_bytes)
        self.host = torch.from_numpy(numpy.frombuffer(memoryview(self.staging).cast("B"), dtype=numpy.uint8)).view(self._staging_blocks, self.block_bytes)
        self.free = list(range(self._staging_blocks))

    def space(self, salt: str) -> Space:
        if salt not in self._spaces:
            self._spaces[salt] = Space(**self._fields, block_tokens=self.block_tokens, tenant=f"salt {salt}" if salt else "none")
            if len(self._spaces) > _SALTS_MAX:
                self._spaces.popitem(last=False)
        self._spaces.move_to_end(salt)
        return self._spaces[salt]


class _Scheduler(KvCacheConnectorScheduler):
    _shared: _Shared

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._shared.fit(llm_args)
        self._requests: dict[int, _Request] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        shared, size = self._shared, self._shared.block_tokens
        self._let_go(request.request_id)
        if shared.store is None or not _of_tokens_alone(request):
            # Nor is it kept.
            return 0, False
        known = self._requests[request.request_id] = _Request(str(getattr(request, "cache_salt", None) or ""))
        if num_computed_tokens % size:
            return 0, False
        tokens = list(request.get_tokens(0))
        # One token is left to be computed, or there would be nothing to go on with.
        ids = shared.space(known.salt).chain(tokens)[: (len(tokens) - 1) // size]
        first = num_computed_tokens // size
        there = min(shared.store.match_prefix(ids) - first, len(shared.free))
        if there <= 0:
            return 0, False
        slots = [shared.free.pop() for _ in range(there)]
        assert shared.staging is not None
        read = shared.store.get(shared.staging, ids[first : first + there], offsets=[slot * shared.block_bytes for slot in slots]).wait()
        # Those before the first that was not there after all.
        right = next((nth for nth, nbytes in enumerate(read) if nbytes != shared.block_bytes), there)
        shared.free += slots[right:]
        known.staged, known.first = slots[:right], first
        return right * size, False

    def _let_go(self, name: int) -> None:
        """Of what was read and not asked for."""
        if known := self._requests.pop(name, None):
            self._shared.free += known.staged

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Where the blocks are is said with the step."""

    def build_connector_meta(self, scheduler_output: Any) -> _Orders:
        orders, size = _Orders(), self._shared.block_tokens
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            known = self._requests.get(data.request_id)
            if known is None:
                continue
            known.tokens += data.new_tokens
            known.blocks += data.new_block_ids
            # What was computed before this step does not count what is loaded in it.
            done = data.computed_position + len(known.staged) * size
            for slot, block in zip(known.staged, known.blocks[known.first :], strict=False):
                orders.loads.append((slot, block))
            if known.staged:
                known.kept, known.staged = known.first + len(known.staged), []
            full = min(done + data.num_scheduled_tokens, len(known.tokens)) // size
            if full > known.kept and full <= len(known.blocks):
                ids = self._shared.space(known.salt).chain(known.tokens[: full * size])
                orders.saves += [(ids[nth], ids[nth - 1] if nth else None, known.blocks[nth], known.salt) for nth in range(known.kept, full)]
                known.kept = full
        return orders

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._let_go(request.request_id)
        # What is kept was copied by the end of its step.
        return False


class _Worker(KvCacheConnectorWorker):
    _shared: _Shared

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._cache = torch.empty(0)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        if kv_cache_tensor.dim() < 2 or not kv_cache_tensor[0].is_contiguous():
            raise ValueError("weft.trtllm moves caches whose blocks are contiguous, one after the other")
        self._cache = kv_cache_tensor
        self._shared.open(kv_cache_tensor)

    def _block(self, nth: int) -> torch.Tensor:
        return self._cache[nth].view(-1).view(torch.uint8)

    def start_load_kv(self, stream: Any) -> None:
        orders = self.get_connector_meta()
        for slot, block in orders.loads if isinstance(orders, _Orders) else ():
            self._block(block).copy_(self._shared.host[slot])
            self._shared.free.append(slot)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """All layers of a block are loaded before the step."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Blocks are kept whole, after the step."""

    def wait_for_save(self, stream: Any) -> None:
        orders, shared = self.get_connector_meta(), self._shared
        saves = list(orders.saves) if isinstance(orders, _Orders) else []
        if not saves or shared.store is None or shared.staging is None:
            return
        stream.synchronize()
        while saves and shared.free:
            batch = [saves.pop(0) for _ in range(min(len(saves), len(shared.free)))]
            slots = [shared.free.pop() for _ in batch]
            try:
                answers = []
                for slot, (name, parent, block, salt) in zip(slots, batch, strict=True):
                    shared.host[slot].copy_(self._block(block))
                    put = shared.store.put(shared.space(salt), shared.staging, [name], offsets=[slot * shared.block_bytes], parent=parent)
                    answers.append(put)
                for answer in answers:
                    answer.wait()
            finally:
                shared.free += slots
        if saves:
            logger.warning("%d blocks are not kept: all of the staging memory is in use", len(saves))

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[list[int], list[int]]:
        # Nothing is under way between steps.
        return [], []


def _of_tokens_alone(request: Any) -> bool:
    """Whether the tokens of a prompt and its salt are all that its cache depends on."""
    return not any(getattr(request, name, None) for name in ("lora_task_id", "multimodal_hashes", "multimodal_embedding", "prompt_embedding_table"))


def connector(*, staging_blocks: int = 256, space: dict[str, object] | None = None, **store: Any) -> tuple[type, type]:
    """The two classes that the engine is told of, over a store that `store` says how to open, as `weft.Store` has it. `staging_blocks` is how much host memory is for blocks on their
    way. `space` has fields of `weft.Space` that the engine's options do not tell."""
    shared = _Shared(staging_blocks, store, dict(space or {}))
    return type("WeftScheduler", (_Scheduler,), {"_shared": shared}), type("WeftWorker", (_Worker,), {"_shared": shared})
