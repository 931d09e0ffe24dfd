"""One side of `cargo xtask compare store`: `store_peer.py {weft|lmcache|memmove|crc} [--disk] --directory DIRECTORY --seconds S`. Prints a line of JSON for each row.

Each side does the same work: blocks from memory of the caller into the store, and back into memory of the caller, all bytes touched before. LMCache is driven as its own
engines drive it: allocate, copy in, submit; get, copy out, release.
"""

import argparse
import json
import os
import random
import shutil
import time

ROWS = [(4 << 10, 1), (64 << 10, 64), (1 << 20, 64)]


def timed(call, seconds, floor=8):
    times, until = [], time.perf_counter() + seconds
    call()
    while len(times) < floor or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    times.sort()
    return times[len(times) // 2] * 1e6


def tell(op, block, batch, us, **more):
    print(json.dumps({"op": op, "block": block, "batch": batch, "us": us, "gigabytes_per_sec": block * batch / us / 1e3, **more}), flush=True)


def weft_side(arguments):
    import numpy
    import weft

    fields = ["model", "revision", "tokenizer", "dtype", "quantisation", "scales", "layout", "lora", "positions", "tenant"]
    space = weft.Space(**dict.fromkeys(fields, "bench"), block_tokens=16)
    with weft.Agent("bench-store", transports="shared_memory") as agent:
        for block, batch in ROWS:
            if arguments.disk and batch == 1:
                continue
            directory = os.path.join(arguments.directory, "weft-tier")
            where = {"directory": directory, "capacity": 2 << 30, "extent": 1 << 30} if arguments.disk else {"memory": 512 << 20}
            with weft.Store(agent, {"kv": block}, promote=False, **where) as store:
                memory = agent.register(numpy.frombuffer(random.Random(1).randbytes(block * batch), numpy.uint8).copy())
                count = 0

                def name(number):
                    return space.key(number.to_bytes(8, "little"))

                def put():
                    nonlocal count
                    ids = [name(count + n) for n in range(batch)]
                    count += batch
                    assert all(store.put(space, memory, ids).wait())

                tell("put", block, batch, timed(put, arguments.seconds))
                chains = [[name(first + n) for n in range(batch)] for first in range(0, count, batch)]
                chains = [chain for chain in chains if store.match_prefix(chain) == batch]
                chance = random.Random(2)

                def get_chain():
                    assert all(store.get(memory, chance.choice(chains)).wait())

                tell("get", block, batch, timed(get_chain, arguments.seconds), chains=len(chains))
                if arguments.disk:
                    flat = [id for chain in chains for id in chain]

                    def get_scattered():
                        assert all(store.get(memory, chance.sample(flat, batch)).wait())

                    tell("get scattered", block, batch, timed(get_scattered, arguments.seconds))
            shutil.rmtree(directory, ignore_errors=True)


def lmcache_side(arguments):
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="CRITICAL", PYTHONHASHSEED="0")
    import asyncio
    import threading

    import torch

    torch.set_num_threads(1)
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    size, more = 512 << 20, {}
    if arguments.disk:
        directory = os.path.join(arguments.directory, "lmcache")
        os.makedirs(directory, exist_ok=True)
        more = {"local_disk": directory, "max_local_disk_size": 2.0, "extra_config": {"use_odirect": True}}
    config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=size / 2**30, **more)
    cpu = LocalCPUBackend(config, memory_allocator=MixedMemoryAllocator(size))
    target = cpu
    if arguments.disk:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        target = LocalDiskBackend(config, loop, cpu)
    count = 0
    for block, batch in ROWS:
        if arguments.disk and batch == 1:
            continue
        sources = [torch.randint(0, 255, (block,), dtype=torch.uint8) for _ in range(batch)]
        targets = [torch.zeros(block, dtype=torch.uint8) for _ in range(batch)]
        shape = torch.Size([2, 1, 1, block // 2])

        def put(keys):
            made = []
            for source in sources:
                one = cpu.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD)
                one.tensor.view(-1).copy_(source)
                made.append(one)
            if arguments.disk:
                done, left, lock = threading.Event(), [len(keys)], threading.Lock()

                def one_done(_):
                    with lock:
                        left[0] -= 1
                        if left[0] == 0:
                            done.set()

                target.batched_submit_put_task(keys, made, on_complete_callback=one_done)
                assert done.wait(120)
            else:
                target.batched_submit_put_task(keys, made)
            for one in made:
                one.ref_count_down()

        def get(keys):
            for one, place in zip(target.batched_get_blocking(keys), targets, strict=True):
                if not arguments.disk:
                    place.copy_(one.tensor.view(-1))
                one.ref_count_down()

        times = {"put": [], "get": []}
        until = time.perf_counter() + 2 * arguments.seconds
        while time.perf_counter() < until or len(times["put"]) < 8:
            keys = [CacheEngineKey("bench", 1, 0, count + n, torch.uint8) for n in range(batch)]
            count += batch
            for op, call in (("put", put), ("get", get)):
                began = time.perf_counter()
                call(keys)
                times[op].append(time.perf_counter() - began)
            if not arguments.disk:
                assert torch.equal(targets[-1], sources[-1])
            for key in keys:
                target.remove(key)
        for op, all_times in times.items():
            all_times.sort()
            tell(op, block, batch, all_times[len(all_times) // 2] * 1e6)
    os._exit(0)


def memmove_side(arguments):
    """The limit: a plain copy of as many bytes."""
    import ctypes

    for block, batch in ROWS:
        source, target = (ctypes.create_string_buffer(os.urandom(block * batch), block * batch) for _ in range(2))
        tell("copy", block, batch, timed(lambda: ctypes.memmove(target, source, block * batch), arguments.seconds / 2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["weft", "lmcache", "memmove"])
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--directory", default=".")
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    {"weft": weft_side, "lmcache": lmcache_side, "memmove": memmove_side}[arguments.side](arguments)
