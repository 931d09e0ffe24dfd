"""Blocks from one LMCache process to another over Weft: `lmcache_peers.py [--only CASE]…`. Called by `cargo xtask door-test lmcache-peers`.

By `weft`, LMCache's transfer channel between servers by Weft's own name (`weft.lmcache_channel`); by `nixl`, LMCache's channels for NIXL as they are, with `weft.nixl` in NIXL's place. One
process stores, the other finds what is stored and reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_tests"))

import contracts  # noqa: E402
from instances import free_port  # noqa: E402
from interface import Source  # noqa: E402

PAGE = 64 << 10
BLOCKS = 64
# A block is some pages, as LMCache lays its objects out.
BLOCK_PAGES = 4
DEADLINE_SECONDS = 3.0
# So long a case waits for what may not hang.
HANG = 60.0


def contents(nth: int) -> bytes:
    """Of a stored block: something of its own."""
    return (hashlib.sha256(b"block %d" % nth).digest() * (BLOCK_PAGES * PAGE // 32))[: BLOCK_PAGES * PAGE]


def channel(by: str, memory: Any, url: str) -> Any:
    """LMCache's channel over a piece of memory."""
    import lmcache.v1.distributed.transfer_channel  # noqa: F401
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

    if by == "weft":
        import weft.lmcache_channel

        weft.lmcache_channel.register()
    else:
        import weft.nixl

        weft.nixl.install()
    description = L1MemoryDesc(ptr=memory.ctypes.data, size=memory.nbytes, align_bytes=PAGE)
    more = {} if by == "weft" else {"backends": ["WEFT"]}
    return create_transfer_channel_context(by, l1_memory_desc=description, listen_url=url, advertise_url=url, **more)


def keeper(by: str, url: str, pipe: multiprocessing.connection.Connection, settings: dict[str, str]) -> None:
    """Stores blocks, and says where each is, as a peer's lookup would."""
    os.environ.update(settings)
    import numpy

    memory = numpy.zeros(BLOCKS * BLOCK_PAGES * PAGE, dtype=numpy.uint8)
    context = channel(by, memory, url)
    for nth in range(BLOCKS):
        at = nth * BLOCK_PAGES * PAGE
        memory[at : at + BLOCK_PAGES * PAGE] = numpy.frombuffer(contents(nth), dtype=numpy.uint8)
    pipe.send({nth: (nth * BLOCK_PAGES * PAGE, BLOCK_PAGES * PAGE) for nth in range(BLOCKS)})
    pipe.recv()
    context.close()


class Pair:
    """One process that keeps blocks, and this one, which reads them."""

    def __init__(self, by: str, **settings: str) -> None:
        import numpy

        here = {f"WEFT_{name.upper()}": value for name, value in {"deadline": f"{DEADLINE_SECONDS:.0f}s", **settings}.items()}
        os.environ.update(here)
        urls = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=keeper, args=(by, urls[0], theirs, here), daemon=True)
        self.process.start()
        assert self.pipe.poll(HANG), "nothing was stored"
        self.stored: dict[int, tuple[int, int]] = self.pipe.recv()
        self.memory = numpy.zeros(BLOCKS * BLOCK_PAGES * PAGE, dtype=numpy.uint8)
        self.context = channel(by, self.memory, urls[1])
        self.client = self.context.get_transfer_channel_client(urls[0])

    def read(self, blocks: list[int]) -> tuple[list[bool], float]:
        """Which of them came, and after how long."""
        began = time.monotonic()
        where = self.context.get_transfer_channel_address([self.stored[nth] for nth in blocks])
        # Somewhere else than there, so that nothing is right by chance.
        to = self.context.get_transfer_channel_address([self.stored[BLOCKS - 1 - nth] for nth in blocks])
        task = self.client.submit_read(to, where)
        while not (result := self.client.query_read_status(task)).finished:
            assert time.monotonic() - began < HANG, "a read has neither come nor failed"
            time.sleep(0.001)
        return result.succeeded_mask, time.monotonic() - began

    def holds(self, nth: int) -> bool:
        at = self.stored[BLOCKS - 1 - nth][0]
        return bytes(self.memory[at : at + BLOCK_PAGES * PAGE]) == contents(nth)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.context.close()


def contract(by: str) -> str:
    """The LMCache that is installed is the one that this was written for."""
    source = Source.installed("lmcache")
    assert source is not None, "LMCache is not installed"
    verdict, moved = contracts.check("lmcache", source, contracts.version_of(contracts.DOORS["lmcache"]))
    assert not moved, "\n  ".join([verdict, *moved])
    return verdict


def store_and_hit(by: str) -> str:
    """Every block, in another order, by reads of several; over shared memory and over TCP."""
    said = []
    for over in ("shared_memory", "tcp"):
        pair = Pair(by, transports=over)
        try:
            order = sorted(range(BLOCKS), key=lambda nth: hashlib.sha256(b"%d" % nth).digest())
            for first in range(0, BLOCKS, 16):
                came, _ = pair.read(order[first : first + 16])
                assert came == [True] * 16, came
            wrong = [nth for nth in range(BLOCKS) if not pair.holds(nth)]
            assert not wrong, f"blocks {wrong} have other bytes"
            said.append(f"{BLOCKS} of {BLOCKS} over {over}")
        finally:
            pair.close()
    return f"{', '.join(said)}, bytes equal"


def killed(by: str) -> str:
    """SIGKILL of the process that keeps the blocks: a miss, and no exception."""
    pair = Pair(by, transports="tcp")
    try:
        assert pair.read([1, 2])[0] == [True, True]
        pair.process.kill()
        pair.process.join()
        came, took = pair.read([3, 4])
        assert came == [False, False], came
        return f"2 of 2 failed after {took:.1f} s, which LMCache takes for misses"
    finally:
        pair.close()


def frozen(by: str) -> str:
    """SIGSTOP, over TCP: the read ends by its deadline, and afterwards nothing is written any more."""
    pair = Pair(by, transports="tcp")
    try:
        assert pair.read([1, 2])[0] == [True, True]
        assert pair.process.pid is not None
        os.kill(pair.process.pid, signal.SIGSTOP)
        came, took = pair.read([3, 4])
        assert came == [False, False], came
        before = bytes(pair.memory)
        os.kill(pair.process.pid, signal.SIGCONT)
        time.sleep(1)
        assert bytes(pair.memory) == before, "a read that has failed went on"
        return f"2 of 2 failed after {took:.1f} s with a deadline of {DEADLINE_SECONDS:.0f} s; nothing came afterwards"
    finally:
        pair.close()


def by_nixls_name(by: str) -> str:
    """LMCache's own channel for NIXL, as it is, with weft.nixl in NIXL's place."""
    return store_and_hit("nixl")


# A context of LMCache's is one a process, so each case has one of its own.
CASES: dict[str, Callable[[str], str]] = {case.__name__: case for case in (contract, store_and_hit, killed, frozen, by_nixls_name)}


def told(name: str, pipe: multiprocessing.connection.Connection) -> None:
    try:
        pipe.send((True, CASES[name]("weft")))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    names = parser.parse_args().only or list(CASES)
    multiprocessing.set_start_method("spawn")
    failures = 0
    for name in names:
        began = time.monotonic()
        here, there = multiprocessing.Pipe()
        case = multiprocessing.Process(target=told, args=(name, there))
        case.start()
        there.close()
        try:
            well, said = here.recv() if here.poll(6 * HANG) else (False, "nothing was heard of it")
        except EOFError:
            well, said = False, "it ended without a word"
        case.kill()
        case.join()
        failures += not well
        print(f"{'ok     ' if well else 'FAILED '} {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
    print(f"{len(names) - failures} of {len(names)} cases passed, LMCache {contracts.version_of(contracts.DOORS['lmcache'])}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
