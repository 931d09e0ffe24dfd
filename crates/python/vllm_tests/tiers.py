"""vLLM's own manager of offloaded blocks with a tier behind it, without an engine: what drives tiers is vLLM's, and so is the memory that they read.

As a program it measures: `tiers.py {weft|fs} --directory DIRECTORY [--seconds S]` prints, for blocks of 64 KiB, what a store and a load of 64 blocks takes, in chains and
scattered, what 1,000 look-ups take, and how long a call of the scheduler's thread was at most, each as a line of JSON. Called by `cargo xtask compare store`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig, OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig, OffloadingParallelConfig,
)  # fmt: skip
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

BLOCK = 64 << 10


class Spec(OffloadingSpec):
    """What vLLM tells its tiers, without an engine that would have computed it."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def config(**changed: Any) -> OffloadingConfig:
    model = OffloadingModelConfig(name=changed.pop("model", "tiny"), dtype=changed.pop("dtype", "bfloat16"))
    parallel = {
        "rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "data_parallel_index": 0, "data_parallel_size": 1,
        "data_parallel_rank_local": None, "is_parallelism_agnostic": False, **changed.pop("parallel", {}),
    }  # fmt: skip
    told = {
        "groups": (OffloadingGroupConfig(tokens_per_block=16, layer_names=("0", "1"), group_id=0),), "worker_kv_bytes_per_block": BLOCK,
        "enable_kv_cache_events": True, "extra_config": {}, "engine_id": uuid.uuid4().hex[:12], "model": model,
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1), "parallel": OffloadingParallelConfig(**parallel), "kv_cache_layout": "HND", **changed,
    }  # fmt: skip
    return OffloadingConfig(**told)


def weft_tier(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "type": "WeftTier", "module_path": "weft.vllm", "directory": str(directory), "capacity": 256 << 20, "extent": 32 << 20, "revision": "r",
        "quantisation": "none", "tenant": "tests", **more,
    }  # fmt: skip


def key(number: int) -> Any:
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "little")).digest(), 0)


class Engine:
    """vLLM's managers, driven as its scheduler drives them; blocks are written and read by whoever calls this."""

    def __init__(self, tier: dict[str, Any], chunks: int = 128, policy: str = "lru", policy_path: str | None = None, **changed: Any) -> None:
        told = config(**changed)
        self.region = SharedOffloadRegion(engine_id=told.engine_id, num_chunks=chunks, rank=None, kv_bytes_per_chunk=BLOCK, cpu_page_size=BLOCK)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_chunks=chunks, mmap_region=self.region, cache_policy=policy, cache_policy_module_path=policy_path, enable_events=False
        )
        self.view = self.primary.get_kv_memoryview()
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(tier, self.view, Spec(told))
        except Exception:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.steps = 0

    def request(self, name: str) -> ReqContext:
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.steps += 1
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self) -> None:
        """Steps until no job is under way."""
        until = time.monotonic() + 60
        while self.manager.has_pending_work():
            self.step()
            if time.monotonic() > until:
                raise AssertionError("jobs are under way after a minute")
            time.sleep(0.0005)
        self.step()

    def store(self, name: str, numbers: list[int], fill: Any) -> None:
        """A request computes these blocks, and they are offloaded; `fill` writes one."""
        context, keys = self.request(name), [key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "the memory is full of what is under way"
        for one, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            fill(numbers[keys.index(one)], self.row(chunk))
        self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def row(self, chunk: int) -> memoryview:
        return self.view.cast("B")[chunk * BLOCK : (chunk + 1) * BLOCK]

    def load(self, name: str, numbers: list[int], look: Any) -> int:
        """A request asks for these blocks, as vLLM's scheduler does: as far as they are there, each is handed to `look`. Says how many."""
        context, keys = self.request(name), [key(number) for number in numbers]
        until = time.monotonic() + 60
        while True:
            found = []
            for one in keys:
                said = self.manager.lookup(one, context)
                if said is LookupResult.MISS:
                    break
                found.append(said)
            if all(said is LookupResult.HIT for said in found):
                break
            self.step()
            if time.monotonic() > until:
                raise AssertionError(f"{found} after a minute")
            time.sleep(0.0005)
        count = len(found)
        if count:
            spec = self.manager.prepare_load(keys[:count], context)
            for number, chunk in zip(numbers, spec.chunk_ids.tolist(), strict=False):
                look(number, self.row(chunk))
            self.manager.complete_load(keys[:count], context)
        self.manager.on_request_finished(context)
        self.settle()
        return count

    def forget(self) -> None:
        """The memory is empty, and the tier is as it was."""
        self.settle()
        self.manager.reset_cache()

    def stop(self) -> None:
        self.manager.shutdown()


def pattern(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK)


def fill(number: int, row: memoryview) -> None:
    row[:] = pattern(number)


def look(number: int, row: memoryview) -> None:
    assert bytes(row) == pattern(number), f"block {number} came back as something else"


class Clock:
    """How long calls of the scheduler's thread took."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        said = call(*arguments)
        self.calls.setdefault(name, []).append(time.perf_counter() - began)
        return said

    def told(self) -> dict[str, list[float]]:
        shown = {}
        for name, times in self.calls.items():
            times.sort()
            shown[name] = [times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6]
        return shown


def measure(which: str, directory: Path, seconds: float) -> None:
    """The calls of `SecondaryTierManager`, straight: 64 blocks a job, one job at a time, and no more of vLLM around it."""
    from vllm.v1.kv_offload.tiering.base import TransferJob

    import numpy as np

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    given = weft_tier(directory, capacity=2 << 30, extent=1 << 30) if which == "weft" else {"type": "fs", "root_dir": str(directory)}
    engine = Engine(given, chunks=64)
    tier, clock, jobs = engine.tier, Clock(), iter(range(1, 1 << 40))
    engine.view.cast("B")[:] = os.urandom(64 * BLOCK)
    context, places = ReqContext(req_id="bench"), np.arange(64)
    tier.on_new_request(context)

    def job(keys: list[Any], *, load: bool) -> float:
        task = TransferJob(next(jobs), keys, places, load, context)
        began = time.perf_counter()
        clock("submit_load" if load else "submit_store", tier.submit_load if load else tier.submit_store, task)
        while True:
            done = list(clock("get_finished_jobs", tier.get_finished_jobs))
            if done:
                assert done[0].job_id == task.job_id and done[0].success, done
                return time.perf_counter() - began
            time.sleep(0.00005)

    def rate(times: list[float]) -> float:
        return 64 * BLOCK * len(times) / sum(times) / 1e9

    chains: list[list[Any]] = []
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(chains) < 256:
        chains.append([key(len(chains) * 64 + n) for n in range(64)])
        times.append(job(chains[-1], load=False))
    print(json.dumps({"row": "put", "gigabytes_per_sec": rate(times)}), flush=True)
    chance = random.Random(3)
    for name in ("get in chains", "get scattered"):
        times, until = [], time.monotonic() + seconds
        flat = [one for chain in chains for one in chain]
        while time.monotonic() < until:
            keys = chance.choice(chains) if name == "get in chains" else chance.sample(flat, 64)
            times.append(job(keys, load=True))
        print(json.dumps({"row": name, "gigabytes_per_sec": rate(times)}), flush=True)
    # Each round by a request of its own: what a tier remembers of one is not what is asked about.
    flat = [one for chain in chains for one in chain]
    asked, took = (flat * 16)[:1000], []
    for turn in range(9):
        request = ReqContext(req_id=f"look-{turn}")
        tier.on_new_request(request)
        began = time.perf_counter()
        waiting = [one for one in asked if tier.lookup(one, request) is LookupResult.RETRY]
        while waiting:
            tier.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
            time.sleep(0.0002)
            waiting = [one for one in waiting if tier.lookup(one, request) is LookupResult.RETRY]
        took.append(time.perf_counter() - began)
        tier.on_request_finished(request)
    print(json.dumps({"row": "look-up of 1,000 keys", "us": sorted(took)[len(took) // 2] * 1e6}), flush=True)
    for name, (median, late) in clock.told().items():
        print(json.dumps({"row": f"scheduler's thread in {name}", "us": median, "p99_us": late}), flush=True)
    engine.stop()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=["weft", "fs"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    measure(arguments.which, arguments.directory, arguments.seconds)
    sys.exit(0)
