"""Ctrl-C: every call that waits is over at once, and what it had begun is given up."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

# Longer than anything here takes, and far shorter than the hour that the calls are told to wait for.
LONG = 60

PRELUDE = """
import asyncio, os, signal, socket, sys, threading, time
import numpy as np, weft

SECRET = "the secret of the tests"
HOUR = 3600.0

def agent(name, **settings):
    return weft.Agent(name, secret=SECRET, deadline=HOUR, **settings)

def pair(**settings):
    target, initiator = agent("target", **settings), agent("initiator", **settings)
    return target, initiator, initiator.connect(target.address)

def silent():
    # Somebody who listens, and never says a word.
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, "127.0.0.1:%d" % listener.getsockname()[1]

def group(size):
    job = "interrupt-%d" % os.getpid()
    agents = [agent(f"rank-{rank}", rendezvous="process", rendezvous_job=job) for rank in range(size)]
    joined = [None] * size
    def join(rank):
        joined[rank] = weft.Communicator(agents[rank], "all", rank, size, timeout=60)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return joined
"""

# What waits, and how to come to it. Each ends with `wait`, which is called when everything else is ready.
WAITS = {
    "Agent.connect": """
        here, (listener, address) = agent("here"), silent()
        wait = lambda: here.connect(address)
        def after():
            # Nothing of the attempt is left: who listened sees its connections end.
            listener.settimeout(30)
            connection, _ = listener.accept()
            connection.settimeout(30)
            while connection.recv(4096): pass
    """,
    "Agent.connect_named": """
        here = agent("here", rendezvous="process")
        wait = lambda: here.connect_named("nobody has this name")
    """,
    "Agent.connect_named by a directory": """
        import tempfile
        here = agent("here", rendezvous="dir:" + tempfile.mkdtemp())
        wait = lambda: here.connect_named("nobody has this name")
    """,
    "Agent.connect_named by the environment": """
        with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        here = agent("here", rendezvous="env", rendezvous_port_offset=0)
        wait = lambda: here.connect_named("nobody has this name")
    """,
    "Agent": """
        with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
        os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        wait = lambda: agent("waits for rank 0", rendezvous="env")
    """,
    "Peer.region": """
        target, initiator, peer = pair()
        wait = lambda: peer.region("nobody publishes this")
    """,
    "Peer.wait_for_transport": """
        target, initiator, peer = pair()
        wait = lambda: peer.wait_for_transport("pigeons")
    """,
    "Memory.release": """
        target, initiator, peer = pair()
        memory = target.allocate(4096)
        target.publish("lent", memory)
        borrowed = peer.borrow(peer.region("lent"), lease=HOUR)
        wait = lambda: memory.release(HOUR)
    """,
    "Agent.notification": """
        here = agent("here")
        wait = lambda: here.notification()
    """,
    "Communicator, for a name": """
        here = agent("here", rendezvous="process")
        wait = lambda: weft.Communicator(here, "all", 1, 2, timeout=HOUR)
    """,
    "Communicator, for a hello": """
        here = agent("here", rendezvous="process")
        wait = lambda: weft.Communicator(here, "all", 0, 2, timeout=HOUR)
    """,
    "Communicator.from_env": """
        with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        wait = lambda: weft.Communicator.from_env(timeout=HOUR, secret=SECRET)
    """,
    "Communicator.barrier": """
        first, second = group(2)
        wait = lambda: first.barrier(deadline=HOUR)
        def after():
            # The other rank is told, and waits for no deadline.
            try:
                # What the first had sent before it gave up may be enough for one call.
                for _ in range(2): second.barrier(deadline=HOUR)
            except weft.CollectiveError as error:
                assert error.rank == 0 and error.cause == "withdrew", error
            else:
                assert False, "nobody told the second"
    """,
    "Communicator.all_reduce": """
        first, second = group(2)
        data = np.zeros(1 << 20, np.float32)
        wait = lambda: first.all_reduce(data, deadline=HOUR)
    """,
    "Communicator.receive": """
        first, second = group(2)
        data = np.zeros(16, np.uint8)
        wait = lambda: first.receive(data, 1, deadline=HOUR)
    """,
    "Communicator.split": """
        first, second = group(2)
        wait = lambda: first.split(0)
    """,
    "Communicator.shrink": """
        first, second = group(2)
        wait = lambda: first.shrink(HOUR)
    """,
    "Communicator.grow": """
        first, second = group(2)
        wait = lambda: first.grow("larger", 3)
    """,
    "Pending.wait": """
        first, second = group(2)
        pending = first.barrier(deadline=HOUR, wait=False)
        wait = pending.wait
        def after():
            second.barrier(deadline=60)
            pending.wait(60)
    """,
    "Agent.connect_async": """
        here, (listener, address) = agent("here"), silent()
        async def connect(): await here.connect_async(address)
        wait = lambda: asyncio.run(connect())
    """,
    "Peer.region_async": """
        target, initiator, peer = pair()
        async def region(): await peer.region_async("nobody publishes this")
        wait = lambda: asyncio.run(region())
    """,
}

EPILOGUE = """
threading.Thread(target=lambda: (time.sleep(0.3), print("waiting", flush=True)), daemon=True).start()
try:
    wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
if "after" in globals():
    after()
print("done", flush=True)
"""


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_the_wait(what):
    script = PRELUDE + textwrap.dedent(WAITS[what]) + EPILOGUE
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout.readline() == "waiting\n"
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=LONG)[0]
    finally:
        process.kill()
        process.wait()
    assert rest == "interrupted\ndone\n", rest
    assert process.returncode == 0
    assert time.monotonic() - begun < LONG


def test_an_interrupted_wait_in_another_thread_is_not_the_main_ones_business():
    """Signals come to the main thread alone: a wait in another one goes on."""
    script = PRELUDE + textwrap.dedent("""
        target, initiator, peer = pair()
        found = []
        waiting = threading.Thread(target=lambda: found.append(peer.region("late")))
        waiting.start()
        print("waiting", flush=True)
        try:
            while True: time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        target.publish("late", target.allocate(8))
        waiting.join()
        print(found[0].name, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LONG)[0] == "late\n"
    finally:
        process.kill()
        process.wait()


# While one thread waits and asks the interpreter now and then, nothing that another thread or a handler does may need what it holds.
BESIDE = {
    "a handler of a signal that uses the agent": """
        target, initiator, peer = pair()
        def handler(*_):
            initiator.register(np.zeros(16))
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            peer.region("nobody publishes this", timeout=HOUR)
        except KeyboardInterrupt:
            print("done")
    """,
    "memory that is collected by another thread": """
        target, initiator, peer = pair()
        def wait():
            try: peer.region("nobody publishes this", timeout=2.0)
            except weft.Error: pass
        waiter = threading.Thread(target=wait)
        waiter.start()
        while waiter.is_alive():
            for _ in range(50): initiator.register(np.zeros(16))
        print("done")
    """,
    "a group that is asked how far it is": """
        first, second = group(2)
        def wait():
            try: first.barrier(deadline=2.0)
            except weft.CollectiveError: pass
        waiter = threading.Thread(target=wait)
        waiter.start()
        while waiter.is_alive():
            first.calls_ended
        print("done")
    """,
}


@pytest.mark.parametrize("what", BESIDE)
def test_a_wait_holds_nothing_that_others_need(what):
    script = PRELUDE + textwrap.dedent(BESIDE[what]) + "\nos._exit(0)\n"
    told = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True, timeout=LONG)
    assert (told.stdout, told.returncode) == ("done\n", 0), told.stderr
