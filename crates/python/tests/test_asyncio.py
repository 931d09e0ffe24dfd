"""Waiting with `await`: what comes, what is cancelled, and what is closed meanwhile."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

import weft
from pair import BLOCK, SECRET, published, two_agents


def test_asyncio(agents):
    target, initiator, peer = agents
    source = np.arange(10_000, dtype=np.int32)
    kept = published(target, "array", source)

    async def work():
        region = await peer.region_async("array")
        arrays = [np.zeros_like(source) for _ in range(8)]
        transfers = [peer.read(initiator.register(array), region) for array in arrays]
        summaries = await asyncio.gather(*transfers)
        assert all(summary.bytes == source.nbytes for summary in summaries)
        assert all((array == source).all() for array in arrays)
        asyncio.get_running_loop().call_later(0.05, peer.notify, b"hello")
        told = await asyncio.wait_for(target.notification_async(), 10)
        assert told.payload == b"hello"
        with pytest.raises(weft.Refused):
            await peer.write(initiator.register(np.zeros_like(source)), region)

    asyncio.run(work())
    del kept


def test_a_cancelled_wait_leaves_the_notification_to_the_next(agents):
    target, _, peer = agents

    async def work():
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(target.notification_async(), 0.01)
        peer.notify(b"first")
        assert (await asyncio.wait_for(target.notification_async(), 10)).payload == b"first"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(target.notification_async(), 0.01)

    asyncio.run(work())
    peer.notify(b"second")
    assert target.notification(10).payload == b"second"


def test_notifications_survive_waits_that_are_cancelled_at_any_moment(agents):
    target, _, peer = agents
    count = 300

    async def work():
        seen = []

        async def take():
            seen.append((await target.notification_async()).payload)

        sending = threading.Thread(target=lambda: [peer.notify(b"%d" % number) for number in range(count)])
        sending.start()
        turn = 0
        while len(seen) < count:
            takers = [asyncio.ensure_future(take()) for _ in range(3)]
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * (turn % 3))
            for taker in takers[: turn % 3 + 1]:
                taker.cancel()
            turn += 1
            await asyncio.wait(takers, timeout=0.005)
            for taker in takers:
                taker.cancel()
            await asyncio.gather(*takers, return_exceptions=True)
        sending.join()
        return seen

    seen = asyncio.run(asyncio.wait_for(work(), 60))
    assert sorted(seen, key=int) == [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("turns", range(4))
def test_a_wait_that_is_cancelled_after_it_was_woken_takes_nothing_with_it(agents, turns):
    target, _, peer = agents

    async def work():
        waiter = asyncio.ensure_future(target.notification_async())
        await asyncio.sleep(0.02)
        peer.notify(b"kept")
        # The event loop stands still meanwhile, and then takes so many of its turns before the wait is cancelled.
        time.sleep(0.1)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiter.cancel()
        [told] = await asyncio.gather(waiter, return_exceptions=True)
        if isinstance(told, asyncio.CancelledError):
            told = await asyncio.wait_for(target.notification_async(), 10)
        assert told.payload == b"kept"

    asyncio.run(work())


def test_closing_the_agent_ends_what_waits_for_it():
    agent = weft.Agent("closing", secret=SECRET)

    async def work():
        waiting = asyncio.ensure_future(agent.notification_async())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(agent.close)
        with pytest.raises(weft.Stopped):
            await asyncio.wait_for(waiting, 10)

    asyncio.run(work())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_cancelled_wait_does_not_keep_the_agent_alive(how):
    with weft.Agent("watcher", secret=SECRET) as watcher:
        agent = weft.Agent("short-lived", secret=SECRET)
        peer = watcher.connect(agent.address)

        async def work():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(agent.notification_async(), 0.02)

        asyncio.run(work())
        assert peer.connected
        if how == "close":
            agent.close()
        else:
            del agent, work
            gc.collect()
        # An agent that is alive stays connected; one that goes says so, and its peer needs a moment to hear it.
        with pytest.raises(weft.PeerLost):
            peer.region("never published", timeout=30)


def test_what_waits_in_a_thread_can_be_awaited():
    with two_agents("shared_memory") as (target, initiator, _):

        async def work():
            peer = await initiator.connect_async(target.address)
            memory = target.allocate(BLOCK)
            target.publish("lent", memory)
            with await peer.borrow_async(await peer.region_async("lent"), lease=30) as borrowed:
                assert borrowed.held
            with pytest.raises(weft.InvalidCall, match="rendezvous"):
                await initiator.connect_named_async("nobody", 1)

        asyncio.run(work())


def test_agents_meet_by_name_with_asyncio(tmp_path):
    async def work():
        settings = {"secret": SECRET, "rendezvous": f"dir:{tmp_path}"}
        with weft.Agent("there", **settings), weft.Agent("here", **settings) as here:
            assert (await here.connect_named_async("there")).name == "there"

    asyncio.run(work())
