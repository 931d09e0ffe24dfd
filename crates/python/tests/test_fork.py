"""Forked children of a process with agents: by os.fork, by multiprocessing, by whatever loads data."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback

import numpy as np
import pytest

import weft
from pair import SECRET, published, two_agents

# Nothing here takes long, unless it hangs.
PATIENCE = 60


def in_child(work):
    """Runs `work` in a forked child, which must end by itself and without an exception."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Held:
    """What an application holds."""

    def __init__(self, stack, transport):
        self.target, self.initiator, self.peer = stack.enter_context(two_agents(transport))
        self.source = np.arange(50_000, dtype=np.int64)
        self.kept = published(self.target, "array", self.source, write=True)
        self.destination = np.zeros_like(self.source)
        self.local = self.initiator.register(self.destination)
        self.region = self.peer.region("array")
        self.prepared = self.peer.prepare_read(self.local, self.region)
        self.transfer = self.prepared.post()
        self.transfer.wait()

    def use(self):
        self.destination[:] = 0
        self.peer.read(self.local, self.region).wait()
        assert (self.destination == self.source).all()
        self.peer.write(self.local, self.region, notify=b"written").wait()
        assert self.target.notification(timeout=PATIENCE).payload == b"written"
        assert self.peer.connected


@pytest.fixture(params=["shared_memory", "tcp"])
def held(request):
    with contextlib.ExitStack() as stack:
        yield Held(stack, request.param)


def test_a_child_that_closes_and_collects_everything_leaves_its_parent_alone(held):
    def work():
        held.transfer.cancel()
        held.target.close()
        held.initiator.close()
        held.__dict__.clear()
        gc.collect()

    for _ in range(3):
        in_child(work)
        held.use()
    held.local.release()
    held.kept.release()


def test_every_call_in_a_child_raises_forked(held):
    with held.target.allocate(4096) as word:
        held.target.publish("word", word, write=True)
        place = held.peer.region("word")
        calls = [
            lambda: held.initiator.name,
            lambda: held.initiator.address,
            lambda: held.initiator.peers,
            lambda: held.initiator.metrics,
            lambda: held.initiator.settings,
            lambda: held.initiator.allocate(4096),
            lambda: held.initiator.register(bytearray(10)),
            lambda: held.initiator.publish("again", held.local),
            lambda: held.target.withdraw("array"),
            lambda: held.initiator.connect("127.0.0.1:1"),
            lambda: held.initiator.notification(timeout=PATIENCE),
            lambda: held.initiator.notification(),
            lambda: held.peer.connected,
            lambda: held.peer.transports,
            lambda: held.peer.region_names,
            lambda: held.peer.region("array"),
            lambda: held.peer.read(held.local, held.region),
            lambda: held.peer.write(held.local, held.region),
            lambda: held.prepared.post(),
            lambda: held.peer.notify(b"hello"),
            lambda: held.peer.fetch_add(place, 0, 1),
            lambda: held.peer.compare_swap(place, 0, 0, 1),
            lambda: held.peer.borrow(place),
            lambda: held.peer.disconnect(),
            lambda: held.transfer.wait(),
            lambda: held.transfer.poll(),
            lambda: held.local.release(),
            lambda: held.local.fetch_add(0, 1),
            lambda: held.local.read_word(0),
        ]

        def work():
            for call in calls:
                with pytest.raises(weft.Forked):
                    call()
            assert issubclass(weft.Forked, weft.Error)
            assert held.transfer.done

            async def awaited():
                with pytest.raises(weft.Forked):
                    await held.transfer
                with pytest.raises(weft.Forked):
                    await held.initiator.notification_async()
                with pytest.raises(weft.Forked):
                    await held.peer.region_async("array")

            asyncio.run(awaited())
            # Leaving their blocks, and their representations, are no errors.
            with held.initiator, held.local:
                repr(held.__dict__)

        in_child(work)
    held.use()


# What workers find in the memory that they have from their parent.
samples = None


def sample(number):
    gc.collect()
    return int(samples[number])


def test_workers_read_what_weft_allocated():
    global samples
    with weft.Agent("loader", secret=SECRET) as agent:
        samples = np.frombuffer(agent.allocate(1 << 20), dtype=np.int64)
        samples[:] = np.arange(samples.size) ** 2
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(sample, range(100)) == [number**2 for number in range(100)]

        def work():
            # It is the parent's memory, not a copy.
            samples[0] = -1

        in_child(work)
        assert samples[0] == -1
        samples = None


def process_of_its_own(address, told):
    """The target of multiprocessing: an agent that was made after the fork."""
    with weft.Agent(f"worker-{os.getpid()}", secret=SECRET) as agent:
        peer = agent.connect(address)
        array = np.zeros(50_000, dtype=np.int64)
        memory = agent.register(array)

        async def awaited():
            await peer.read(memory, peer.region("array"))

        asyncio.run(awaited())
        told.put(int(array.sum()))


def test_multiprocessing_with_agents_made_after_the_fork(held):
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    # Event loops of the parent have a thread, which the children do not.
    asyncio.run(awaited(held.prepared))
    workers = [context.Process(target=process_of_its_own, args=(held.target.address, told)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [told.get(timeout=PATIENCE) for _ in workers] == [held.source.sum()] * 2
    for worker in workers:
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    held.use()


async def awaited(prepared):
    return await prepared.post()


def test_a_borrowed_view_stays_readable_and_gives_nothing_back():
    with two_agents("shared_memory") as (target, initiator, peer):
        memory = target.allocate(4096)
        memoryview(memory)[:4] = b"lent"
        target.publish("lent", memory)
        borrowed = peer.borrow(peer.region("lent"))
        view = memoryview(borrowed)

        def work():
            assert bytes(view[:4]) == b"lent"
            assert not borrowed.held
            with pytest.raises(weft.Forked):
                memoryview(borrowed)
            view.release()
            borrowed.release()

        in_child(work)
        assert borrowed.held and bytes(view[:4]) == b"lent"
        view.release()
        borrowed.release()


def test_communicators_go_on_though_a_child_drops_its_copy():
    agents = [weft.Agent(f"rank-{rank}", rendezvous="process", secret=SECRET) for rank in range(2)]
    ranks = [None, None]

    def join(rank):
        ranks[rank] = weft.Communicator(agents[rank], "forked", rank, 2)

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    waiting = ranks[0].barrier(wait=False)

    def work():
        for call in [
            lambda: ranks[0].barrier(),
            lambda: ranks[1].all_reduce(np.ones(8, dtype=np.float32)),
            lambda: ranks[0].split(0),
            lambda: waiting.wait(),
            lambda: waiting.poll(),
        ]:
            with pytest.raises(weft.Forked):
                call()
        assert (ranks[0].rank, ranks[0].size) == (0, 2)
        ranks.clear()
        agents.clear()
        gc.collect()

    in_child(work)
    ranks[1].barrier()
    waiting.wait(PATIENCE)
    ranks.clear()
    for agent in agents:
        agent.close()


SCRIPT = """
    import os, sys, weft

    held = []
    for transport in ("shared_memory", "tcp"):
        target = weft.Agent("target", secret="a secret for the tests", transports=transport, log="off")
        initiator = weft.Agent("initiator", secret="a secret for the tests", transports=transport, log="off")
        memory = target.allocate(1 << 16)
        target.publish("memory", memory)
        peer = initiator.connect(target.address)
        local = initiator.allocate(1 << 16)
        peer.read(local, peer.region("memory")).wait()
        held += [target, initiator, memory, peer, local]
    child = os.fork()
    if child == 0:
        sys.exit(7)  # By the way of every interpreter: exit functions, destructors, modules taken apart.
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    assert peer.connected
    peer.read(local, peer.region("memory")).wait()
    print("the parent goes on")
"""


def test_the_interpreter_of_a_child_ends_as_any_other(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-X", "faulthandler", str(script)]
    run = subprocess.run(command, timeout=2 * PATIENCE, capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert run.stdout == "the parent goes on\n" and run.stderr == ""


