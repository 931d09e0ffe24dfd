"""The store's policies as one of vLLM's: who leaves the memory that vLLM offloads to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

import weft


class WeftPolicy(CachePolicy):
    """`eviction_policy: "WeftPolicy"`, `cache_policy_module_path: "weft.vllm"`: ranks blocks by the rule that has had the most hits lately."""

    policy = "adaptive"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._line = weft.Line(max(1, cache_capacity), self.policy)

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        # A chunk that is being written, or read, may not leave: vLLM says when it may.
        self._line.insert(key, pinned=chunk.ref_cnt != 0)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._line.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._line.request(list(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        # They are counted when they come.
        return

    def on_request_finished(
        self, key_groups: Sequence[Sequence[OffloadKey]], insertion_only_keys: set[OffloadKey], reused_keys: set[OffloadKey], req_context: ReqContext
    ) -> None:
        self._line.request(order_request_keys(key_groups, req_context))

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        gone = self._line.leave(n, list(protected)) if n else []
        return None if gone is None else [(OffloadKey(key), self._chunks.pop(OffloadKey(key))) for key in gone]

    def clear(self) -> None:
        self._chunks.clear()
        self._line = weft.Line(max(1, self.cache_capacity), self.policy)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._line.pin(key, False)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._line.pin(key, True)

