"""Atomic operations on a peer's words, and the owner's own."""

import asyncio
import threading

import numpy as np
import pytest

import weft
from pair import SECRET, published


def test_both_operations(agents):
    target, _, peer = agents
    words = np.zeros(4, np.uint64)
    kept = published(target, "words", words, write=True)
    region = peer.region("words")
    assert [peer.fetch_add(region, 8, 5) for _ in range(3)] == [0, 5, 10]
    assert peer.compare_swap(region, 8, 14, 1) == 15
    assert peer.compare_swap(region, 8, 15, 2**64 - 1) == 15
    assert list(words) == [0, 2**64 - 1, 0, 0]
    assert peer.fetch_add(region, 8, 1, deadline=5) == 2**64 - 1
    assert kept.read_word(8) == 0
    assert kept.fetch_add(8, 7) == 0 and kept.compare_swap(8, 7, 9) == 7
    assert peer.fetch_add(region, 8, 0) == 9


def test_awaited(agents):
    target, _, peer = agents
    memory = target.allocate(64)
    target.publish("words", memory, write=True)

    async def work():
        region = await peer.region_async("words")
        found = await asyncio.gather(*(peer.fetch_add_async(region, 0, 1) for _ in range(200)))
        assert sorted(found) == list(range(200))
        assert await peer.compare_swap_async(region, 0, 200, 1) == 200
        with pytest.raises(weft.AtomicRefused):
            await peer.fetch_add_async(region, 4, 1)

    asyncio.run(work())
    assert memory.read_word(0) == 1


def test_threads_and_the_owner_share_a_word(agents):
    target, _, peer = agents
    memory = target.allocate(8)
    target.publish("word", memory, write=True)
    region = peer.region("word")
    found = []

    def take(call):
        found.extend([call() for _ in range(300)])

    threads = [threading.Thread(target=take, args=(lambda: peer.fetch_add(region, 0, 1),)) for _ in range(2)]
    threads.append(threading.Thread(target=take, args=(lambda: memory.fetch_add(0, 1),)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(900))
    assert memory.read_word(0) == 900


def test_refusals_carry_their_fields(agents):
    target, _, peer = agents
    kept = published(target, "read-only", np.zeros(8, np.uint64))
    writable = published(target, "words", np.zeros(8, np.uint64), write=True)
    for name, offset in [("read-only", 0), ("words", 4), ("words", 64), ("words", 2**64 - 8)]:
        with pytest.raises(weft.Refused) as refused:
            peer.fetch_add(peer.region(name), offset, 1)
        assert isinstance(refused.value, weft.AtomicRefused) and isinstance(refused.value, weft.AtomicError)
        assert refused.value.peer == "target" and refused.value.cause
        assert refused.value.transport in ("shared_memory", "tcp")
        assert refused.value.may_have_happened is False
    for offset in (4, 64):
        with pytest.raises(weft.Refused):
            writable.fetch_add(offset, 1)
    with pytest.raises(OverflowError):
        peer.fetch_add(peer.region("words"), 0, -1)
    with pytest.raises(ValueError):
        peer.fetch_add(peer.region("words"), 0, 1, deadline=-1)
    del kept


def test_read_only_memory_is_read_and_not_changed():
    with weft.Agent("owner", secret=SECRET) as agent:
        words = np.arange(4, dtype=np.uint64)
        words.flags.writeable = False
        memory = agent.register(words, writable=False)
        assert memory.read_word(16) == 2
        with pytest.raises(weft.InvalidCall):
            memory.fetch_add(16, 1)
        with pytest.raises(weft.InvalidCall):
            memory.compare_swap(16, 2, 3)
        assert list(words) == [0, 1, 2, 3]


def test_a_deadline_that_has_passed_is_certain(agents):
    target, _, peer = agents
    memory = target.allocate(8)
    target.publish("word", memory, write=True)
    with pytest.raises(weft.AtomicError) as error:
        peer.fetch_add(peer.region("word"), 0, 1, deadline=0)
    assert not error.value.may_have_happened and not isinstance(error.value, weft.OutcomeUnknown)
    assert memory.read_word(0) == 0
