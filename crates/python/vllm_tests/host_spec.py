"""What stands in for vLLM's worker of its OffloadingConnector on machines without a GPU: caches are in host memory already, and are copied by plain copies.

vLLM's own worker copies by CUDA. Tiers, policies, the scheduler's half and the memory that tiers read are vLLM's as they are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    def __init__(self, caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        if blocks_per_chunk != 1:
            raise ValueError("one block a chunk, on machines without a GPU")
        self._region, self._finished = region, []
        self._pairs = []
        for cache in caches.tensors:
            blocks = cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            self._pairs.append((blocks, region.create_next_worker_view(cache.page_size_bytes)))

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, store: bool) -> bool:
        began, moved = time.monotonic(), 0
        for block, chunk in zip(blocks.tolist(), chunks.tolist(), strict=True):
            for cache, memory in self._pairs:
                if store:
                    memory[chunk].copy_(cache[block])
                else:
                    cache[block].copy_(memory[chunk])
                moved += cache.shape[1]
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - began))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> HostWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
