"""SGLang's HiCache storage on `weft.Store`: pages outlive the engine, within a budget, and what comes back is what was put.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "weft", "module_path": "weft.sglang",
        "class_name": "WeftStorage", "weft": {"directory": "/nvme/kv", "capacity": 500000000000, "revision": "…", "quantisation": "none", "tenant": "a"}}'

Each host pool has a store of its own, because its pages have a length of their own, and each rank has its directories. SGLang calls all of this on threads that may wait.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

import weft
from weft import _tier_options

__all__ = ["WeftStorage"]

logger = logging.getLogger(__name__)

# Pages of one call of SGLang's, and so of what is copied between its pools and the memory that transfers go from.
PAGES_A_CALL = 128
KV = str(PoolName.KV)


@dataclass(frozen=True)
class Options:
    """What stands in `weft` of the extra config. Without a default: what SGLang does not tell a backend."""

    directory: str
    # Bytes: of the KV pool, or of each pool by its name.
    capacity: int | dict[str, int]
    revision: str
    quantisation: str
    tenant: str
    scales: str = ""
    durability: str = "process"
    policy: str = "adaptive"
    deadline: float = 30.0
    extent: int = 0
    # Events that wait to be taken by `take_events`.
    events: int = 0
    agent: dict[str, Any] = field(default_factory=dict)

    def bytes_of(self, pool: str) -> int:
        if isinstance(self.capacity, int) and pool == KV:
            return self.capacity
        capacity = self.capacity.get(pool) if isinstance(self.capacity, dict) else None
        if not capacity:
            raise ValueError(f'WeftStorage needs a capacity for the pool {pool!r}: "capacity": {{"kv": …, "{pool}": …}}')
        return capacity


class Shelf:
    """The store of one host pool."""

    def __init__(self, agent: weft.Agent, pool: Any, name: str, config: Any, options: Options) -> None:
        page = pool.get_dummy_flat_data_page()
        self.pool, self.bytes = pool, page.numel() * page.element_size()
        # A pool of states has one index a page.
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        dtype = str(page.dtype).removeprefix("torch.")
        ranks = {key: value for key, value in vars(config).items() if key.endswith(("_rank", "_size")) or key in ("is_mla_model", "should_split_heads")}
        layout = {"engine": "sglang", "pool": name, "page": self.bytes, "layout": str(getattr(pool, "layout", "")), "ranks": ranks}
        digest = hashlib.sha256(json.dumps(layout, sort_keys=True, default=str).encode()).hexdigest()
        if not hasattr(importlib.import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed"):
            raise ImportError("weft.sglang needs SGLang 0.5.23 or later: before, its names of pages leave out adapter and salt")
        if not config.model_name:
            raise ValueError("SGLang does not tell the model's name, without which pages of another could be served")
        self.space = weft.Space(
            model=config.model_name, revision=options.revision, tokenizer="token-ids", dtype=dtype, quantisation=options.quantisation,
            scales=_tier_options.scales(options.scales, dtype, "WeftStorage"), layout=f"sglang-{digest}", block_tokens=self.page_size,
            lora="in-the-hash", positions="of-the-model", tenant=options.tenant,
        )  # fmt: skip
        rank = f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}-cp{config.attn_cp_rank}of{config.attn_cp_size}-dp{config.dp_rank}"
        self.store = _tier_options.opened(
            agent, self.bytes, str(Path(options.directory) / rank / name), options.bytes_of(name), extent=options.extent, durability=options.durability,
            policy=options.policy, deadline=options.deadline, events=options.events,
        )  # fmt: skip
        # One for what is read and one for what is written: SGLang does both at a time.
        self._stages = [agent.allocate(PAGES_A_CALL * self.bytes) for _ in range(2)]
        self._rows = [np.frombuffer(stage, np.uint8).reshape(PAGES_A_CALL, self.bytes) for stage in self._stages]
        self._locks = [threading.Lock(), threading.Lock()]

    def ids(self, keys: Sequence[str]) -> list[bytes]:
        return [self.space.key(key.encode()) for key in keys]

    def there(self, keys: Sequence[str]) -> int:
        """How many pages, from the first on, are there; they count as used."""
        return self.store.match_prefix(self.ids(keys))

    def each_there(self, keys: Sequence[str]) -> list[bool]:
        return [self.store.match_prefix([id]) == 1 for id in self.ids(keys)]

    def put(self, keys: Sequence[str], pages: Sequence[torch.Tensor], after: str | None = None) -> list[bool]:
        stored: list[bool] = []
        parent = self.space.key(after.encode()) if after else None
        with self._locks[0]:
            for first in range(0, len(keys), PAGES_A_CALL):
                some = self.ids(keys[first : first + PAGES_A_CALL])
                for row, page in zip(self._rows[0], pages[first : first + PAGES_A_CALL], strict=False):
                    flat = page.contiguous().view(-1).view(torch.uint8)
                    if flat.numel() != self.bytes:
                        raise ValueError(f"a page has {flat.numel()} bytes, and those of this pool have {self.bytes}")
                    torch.from_numpy(row).copy_(flat)
                tiers = self.store.put(self.space, self._stages[0], some, parent=parent).wait()
                stored += [tier != 0 for tier in tiers]
                parent = some[-1]
        return stored

    def get(self, keys: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Targets are flat tensors, or places in the host pool."""
        got: list[bool] = []
        with self._locks[1]:
            for first in range(0, len(keys), PAGES_A_CALL):
                some = self.ids(keys[first : first + PAGES_A_CALL])
                read = self.store.get(self._stages[1], some).wait()
                for row, bytes_there, target in zip(self._rows[1], read, targets[first : first + PAGES_A_CALL], strict=False):
                    whole = bytes_there == self.bytes
                    got.append(whole)
                    if whole and isinstance(target, torch.Tensor):
                        target.view(-1).view(torch.uint8).copy_(torch.from_numpy(row))
                    elif whole:
                        page = self.pool.get_dummy_flat_data_page()
                        page.view(torch.uint8).copy_(torch.from_numpy(row))
                        self.pool.set_from_flat_data_page(target, page)
        return got

    def places(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[int]:
        count = 0 if indices is None else indices.numel()
        if indices is None or count != len(keys) * self.page_size:
            raise ValueError(f"{count} indices for {len(keys)} pages of {self.page_size}")
        return [int(index) for index in indices.tolist()[:: self.page_size]]


class WeftStorage(HiCacheStorage):
    """A dynamic storage backend: batches with pools and hit rules (v2), batches (v1), and what was there before."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        given = (storage_config.extra_config or {}).get("weft")
        if not isinstance(given, dict):
            raise ValueError('WeftStorage is told what it needs in "weft" of the extra config: directory, capacity, revision, quantisation, tenant')
        self._options = _tier_options.parse(Options, given, "WeftStorage")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError("WeftStorage: one rank writes the pages of such a model and all read them, but a directory has one owner; run it with one rank")
        self._agent = weft.Agent(f"hicache-{storage_config.tp_rank}", **{"transports": "shared_memory", **self._options.agent})
        self._shelves: dict[str, Shelf] = {}
        self._closed = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._add(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._add(host_pool, str(host_pool_name))

    def _add(self, pool: Any, name: str) -> None:
        if name in self._shelves:
            return
        shelf = self._shelves[name] = Shelf(self._agent, pool, name, self._config, self._options)
        found = shelf.store.stat()["tiers"][0]
        logger.info("WeftStorage %s: %s pages of %s bytes found, room for %s", name, found["recovered"], shelf.bytes, found["slots"])

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._shelves[KV].there(keys)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        there = self._shelves[KV].there(keys)
        hits = {KV: there} if there else {}
        restorable = list(range(1, there + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            each = self._shelves[str(transfer.name)].each_there(keys[:there])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                until = each.index(False) if False in each else there
                allowed = set(range(1, until + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys) if transfer.keys else 1)
                allowed = {count for count in range(1, there + 1) if all(each[max(0, count - last) : count])}
            else:
                raise ValueError(f"WeftStorage knows no hit rule {transfer.hit_policy!r}")
            if allowed:
                hits[str(transfer.name)] = max(allowed)
            restorable = [count for count in restorable if count in allowed]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._by_place(str(transfer.name), transfer.keys or [], transfer.host_indices, put=False) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._by_place(str(transfer.name), transfer.keys or [], transfer.host_indices, put=True, info=extra_info) for transfer in transfers}

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._by_place(KV, keys, host_indices, put=False)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._by_place(KV, keys, host_indices, put=True, info=extra_info)

    def _by_place(self, name: str, keys: list[str], indices: torch.Tensor | None, *, put: bool, info: Any = None) -> list[bool]:
        shelf = self._shelves[name]
        places = shelf.places(keys, indices)
        if not put:
            return shelf.get(keys, places)
        before = getattr(info, "prefix_keys", None)
        return shelf.put(keys, [shelf.pool.get_data_page(place, flat=True) for place in places], before[-1] if before else None)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        shelf = self._shelves[KV]
        targets = target_locations or [shelf.pool.get_dummy_flat_data_page() for _ in keys]
        return [target if there else None for target, there in zip(targets, shelf.get(keys, targets), strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return all(self._shelves[KV].put(keys, values))

    def exists(self, key: str) -> bool:
        return self._shelves[KV].there([key]) == 1

    def clear(self) -> None:
        for shelf in self._shelves.values():
            shelf.store.purge(self._options.tenant).wait()

    def take_events(self, most: int = 4096) -> dict[str, tuple[list[tuple[bytes, bool, int, str]], int]]:
        """What has come and gone, by pool: `weft.Store.take_events`."""
        return {name: shelf.store.take_events(most) for name, shelf in self._shelves.items()}

    def stat(self) -> dict[str, dict[str, Any]]:
        """What the stores hold and what has happened, by pool: `weft.Store.stat`."""
        return {name: shelf.store.stat() for name, shelf in self._shelves.items()}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for shelf in self._shelves.values():
            shelf.store.close()
        self._agent.close()
