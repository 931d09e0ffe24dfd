"""LMCache's second level on `weft.Store`: a native connector for its multi-process mode.

    lmcache server … --l2-adapter '{"type": "native_plugin", "module_path": "weft.lmcache", "class_name": "WeftConnector", "adapter_params":
        {"directory": "/nvme/kv", "capacity": 500000000000, "block_bytes": 4194304, "revision": "…", "dtype": "bfloat16", "chunk_tokens": 256,
         "quantisation": "none", "tenant": "a"}}'

Six methods and one descriptor are all that LMCache asks of such a connector; bytes move on the thread of a `weft.Porter`, from LMCache's own memory and into it. What comes
back is what was put, or a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import weft
from weft import _tier_options

__all__ = ["WeftConnector"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """`adapter_params`. LMCache's keys have the model's name, ranks, group, hash and salt; the rest of what must be equal has to be said."""

    directory: str
    capacity: int
    # Bytes of a chunk, which are the same for all chunks of a model: LMCache says so when it starts, and the first chunk of another length says so here.
    block_bytes: int
    revision: str
    dtype: str
    chunk_tokens: int
    quantisation: str
    tenant: str
    scales: str = ""
    layout: str = "lmcache"
    durability: str = "process"
    policy: str = "adaptive"
    deadline: float = 30.0
    extent: int = 0
    queue: int = 4 << 30
    agent: dict[str, Any] = field(default_factory=dict)


class WeftConnector:
    """What LMCache calls a native client."""

    def __init__(self, **params: Any) -> None:
        options = _tier_options.parse(Options, params, "WeftConnector")
        space = weft.Space(
            model="in-the-key", revision=options.revision, tokenizer="token-ids", dtype=options.dtype, quantisation=options.quantisation,
            scales=_tier_options.scales(options.scales, options.dtype, "WeftConnector"), layout=f"{options.layout}-{options.block_bytes}",
            block_tokens=options.chunk_tokens, lora="in-the-key", positions="of-the-model", tenant=options.tenant,
        )  # fmt: skip
        self._bytes = options.block_bytes
        self._agent = weft.Agent("lmcache-tier", **{"transports": "shared_memory", **options.agent})
        self._store = _tier_options.opened(
            self._agent, options.block_bytes, options.directory, options.capacity, extent=options.extent, durability=options.durability,
            policy=options.policy, deadline=options.deadline,
        )  # fmt: skip
        self._porter = weft.Porter(self._store, space, queue=options.queue)
        self._lock = threading.Lock()
        self._next = 0
        # Of what is under way: of how many keys LMCache wants to know; none where it asks for the whole.
        self._each: dict[int, int | None] = {}
        self._refused: dict[int, str] = {}
        self._closed = False

    def event_fd(self) -> int:
        return self._porter.fileno()

    def _number(self, each: int | None) -> int:
        with self._lock:
            self._next += 1
            self._each[self._next] = each
            return self._next

    def _carry(self, job: int, keys: Sequence[str], views: Sequence[memoryview], *, put: bool) -> int:
        named = [key.encode() for key in keys]
        wrong = next((view.nbytes for view in views if view.nbytes != self._bytes), None)
        if wrong is not None:
            self._refused[job] = f"a chunk has {wrong} bytes, and the tier's blocks have {self._bytes}: say block_bytes={wrong} and give the tier a directory of its own"
            logger.error("WeftConnector: %s", self._refused[job])
            # It ends as everything does: by the descriptor.
            self._porter.find(job, [])
            return job
        memories = [self._agent.register(view, writable=not put) for view in views]
        if put:
            self._porter.put_each(job, memories, named)
        else:
            self._porter.get_each(job, memories, named)
        return job

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        return self._carry(self._number(None), keys, views, put=True)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        return self._carry(self._number(len(keys)), keys, views, put=False)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        job = self._number(len(keys))
        self._porter.find(job, [key.encode() for key in keys])
        return job

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        job, named = self._number(len(keys)), [key.encode() for key in keys]
        # What others follow goes after them, and LMCache names them in any order.
        self._porter.evict(job, [*named, *reversed(named)])
        return job

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool] | None]]:
        told: list[tuple[int, bool, str, list[bool] | None]] = []
        for job, done, _, _, why in self._porter.ended():
            with self._lock:
                each, refused = self._each.pop(job), self._refused.pop(job, None)
            if refused is not None:
                told.append((job, False, refused, None))
            elif each is not None:
                told.append((job, True, why or "", done[:each]))
            else:
                told.append((job, all(done), why or "", None))
        return told

    def stat(self) -> dict[str, Any]:
        """What the tier holds and what has happened: `weft.Store.stat`."""
        return self._store.stat()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._porter.close()
        self._store.close()
        self._agent.close()
