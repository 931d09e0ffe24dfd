"""The package as a user meets it: two agents, here in one process or in two, over both transports."""

import asyncio
import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

import weft

SECRET = "the secret of the tests"
BLOCK = 4096


@contextlib.contextmanager
def two_agents(transport):
    with weft.Agent("target", secret=SECRET, transports=transport) as target:
        with weft.Agent("initiator", secret=SECRET, transports=transport) as initiator:
            yield target, initiator, initiator.connect(target.address)


@pytest.fixture(params=["shared_memory", "tcp"])
def agents(request):
    with two_agents(request.param) as pair:
        yield pair


def published(agent, name, array, **access):
    memory = agent.register(array)
    agent.publish(name, memory, **access)
    return memory


def test_read_and_write_numpy_arrays(agents):
    target, initiator, peer = agents
    source = np.arange(100_000, dtype=np.int64)
    kept = published(target, "array", source, write=True)
    destination = np.zeros_like(source)
    local = initiator.register(destination)
    summary = peer.read(local, peer.region("array"), checksum=True).wait()
    assert summary.bytes == source.nbytes
    assert summary.transport in peer.transports
    assert (destination == source).all()
    destination[:] = -7
    peer.write(local, peer.region("array")).wait()
    assert (source == -7).all()
    assert kept.nbytes == source.nbytes


def test_allocated_memory_is_a_buffer(agents):
    target, initiator, peer = agents
    there, here = target.allocate(1 << 20), initiator.allocate(1 << 20)
    assert there.mappable and len(there) == 1 << 20
    np.frombuffer(there, dtype=np.uint8)[:] = 42
    target.publish("block", there)
    peer.read(here, peer.region("block")).wait()
    assert bytes(memoryview(here)[:3]) == b"***"


def test_paged_blocks_in_any_order(agents):
    target, initiator, peer = agents
    blocks = 64
    source = np.repeat(np.arange(blocks, dtype=np.uint8), BLOCK)
    kept = published(target, "pages", source)
    destination = np.zeros_like(source)
    local = initiator.register(destination)
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    identity = np.arange(blocks)
    prepared = peer.prepare_read(local, peer.region("pages"), (BLOCK, order), local_spans=(BLOCK, identity))
    assert prepared.nbytes == source.nbytes
    for _ in range(3):
        destination[:] = 0
        prepared.post().wait()
        assert (destination.reshape(blocks, BLOCK)[:, 0] == order).all()
    pairs = [(3 * BLOCK, BLOCK), (0, 16)]
    destination[:] = 0
    peer.read(local, peer.region("pages"), pairs).wait()
    assert (destination[3 * BLOCK : 4 * BLOCK] == 3).all() and destination[4 * BLOCK :].sum() == 0
    del kept


@pytest.mark.parametrize("make", [lambda: bytearray(BLOCK), lambda: mmap.mmap(-1, BLOCK), lambda: (ctypes.c_char * BLOCK)()])
def test_anything_with_the_buffer_protocol(make):
    with two_agents("shared_memory") as (target, initiator, peer):
        kept = published(target, "buffer", np.full(BLOCK, 9, np.uint8))
        buffer = make()
        peer.read(initiator.register(buffer), peer.region("buffer")).wait()
        assert bytes(memoryview(buffer).cast("B")) == b"\x09" * BLOCK
        del kept


class Tensor:
    """What torch's tensors look like to us: DLPack and no buffer protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_without_the_buffer_protocol(agents):
    target, initiator, peer = agents
    kept = published(target, "tensor", np.arange(1000, dtype=np.float32).reshape(10, 100))
    tensor = Tensor(np.zeros((10, 100), np.float32))
    memory = initiator.register(tensor)
    peer.read(memory, peer.region("tensor")).wait()
    assert tensor.array[9, 99] == 999
    with pytest.raises(ValueError, match="contiguous"):
        initiator.register(Tensor(np.zeros((10, 100), np.float32)[:, ::2]))
    del kept


def test_torch(agents):
    torch = pytest.importorskip("torch")
    target, initiator, peer = agents
    kept = published(target, "torch", torch.arange(1000, dtype=torch.bfloat16))
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    peer.read(initiator.register(tensor), peer.region("torch")).wait()
    assert tensor[999] == torch.tensor(999, dtype=torch.bfloat16)
    del kept


def test_a_registered_object_is_kept_alive(agents):
    target, initiator, peer = agents
    array = np.full(BLOCK, 5, np.uint8)
    memory = published(target, "kept", array)
    del array
    gc.collect()
    destination = bytearray(BLOCK)
    peer.read(initiator.register(destination), peer.region("kept")).wait()
    assert destination == b"\x05" * BLOCK
    assert memory.writable


def test_what_cannot_be_registered():
    with weft.Agent("alone", secret=SECRET) as agent:
        for wrong in [np.zeros((4, 4))[:, ::2], "text", 7, bytearray()]:
            with pytest.raises(ValueError):
                agent.register(wrong)
        with pytest.raises(ValueError, match="read-only"):
            agent.register(b"bytes")
        memory = agent.register(b"bytes", writable=False)
        with pytest.raises(ValueError, match="read-only"):
            agent.publish("bytes", memory, write=True)


def test_notifications_come_after_their_data_and_once(agents):
    target, initiator, peer = agents
    array = np.zeros(1 << 16, np.uint8)
    kept = published(target, "array", array, write=True)
    peer.write(initiator.register(np.full(1 << 16, 3, np.uint8)), peer.region("array"), notify=b"written").wait()
    told = target.notification(10)
    assert told.payload == b"written" and told.peer.name == "initiator"
    assert (array == 3).all()
    told.peer.notify(b"thanks")
    assert initiator.notification(10).payload == b"thanks"
    assert target.notification(0.05) is None
    del kept


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
            await peer.write(initiator.register(np.zeros(8, np.uint8)), region)

    asyncio.run(work())
    del kept


def test_refusals_carry_their_fields(agents):
    target, initiator, peer = agents
    kept = published(target, "read-only", np.zeros(BLOCK, np.uint8))
    with pytest.raises(weft.Refused) as refused:
        peer.write(initiator.register(np.zeros(BLOCK, np.uint8)), peer.region("read-only")).wait()
    assert isinstance(refused.value, weft.TransferError)
    assert refused.value.peer == "target"
    assert refused.value.transport in ("shared_memory", "tcp")
    assert refused.value.bytes_done == 0 and refused.value.bytes_total == BLOCK
    assert refused.value.undone == [(0, 0, BLOCK)] and refused.value.done == []
    del kept


def test_wrong_calls(agents):
    target, initiator, peer = agents
    kept = published(target, "array", np.zeros(BLOCK, np.uint8))
    local, region = initiator.register(bytearray(BLOCK)), peer.region("array")
    with pytest.raises(weft.Error):
        peer.read(local, region, [(0, 10 * BLOCK)]).wait()
    with pytest.raises(ValueError):
        peer.read(local, region, [(2**64 - 1, 2)])
    with pytest.raises((ValueError, OverflowError)):
        peer.read(local, region, (BLOCK, np.array([-1])))
    with pytest.raises(TypeError):
        peer.read(local, region, dedline=1)
    with pytest.raises(ValueError):
        peer.read(local, region, deadline=-1)
    with pytest.raises(weft.TimedOut):
        peer.region("nobody published this", timeout=0.05)
    del kept


def test_settings_are_checked():
    with pytest.raises(weft.SettingsError, match="did you mean tcp.connections"):
        weft.Agent("a", secret=SECRET, tcp_conections=2)
    with pytest.raises(weft.SettingsError):
        weft.Agent("a", secret=SECRET, deadline="soon")
    with weft.Agent("a", secret=SECRET, tcp_connections=2, deadline=1.5, transports=["tcp"], checksum=True) as agent:
        assert "tcp" in agent.address and "shared_memory" not in agent.address


def test_a_wrong_secret_and_a_closed_agent():
    with weft.Agent("a", secret=SECRET) as a, weft.Agent("b", secret="another secret") as b:
        with pytest.raises(weft.ConnectError):
            b.connect(a.address, timeout=10)
    with pytest.raises(weft.Stopped):
        a.allocate(1)


def test_borrowing_copies_nothing():
    with two_agents("shared_memory") as (target, initiator, peer):
        memory = target.allocate(BLOCK)
        array = np.frombuffer(memory, dtype=np.uint8)
        array[:] = 1
        target.publish("lent", memory)
        with peer.borrow(peer.region("lent"), lease=30) as borrowed:
            seen = np.frombuffer(borrowed, dtype=np.uint8)
            assert borrowed.held and seen[0] == 1 and not seen.flags.writeable
            array[0] = 2
            assert seen[0] == 2
        kept = published(target, "foreign", np.zeros(BLOCK, np.uint8))
        with pytest.raises(weft.NotBorrowable):
            peer.borrow(peer.region("foreign"))
        del kept


def test_other_threads_run_while_one_waits():
    with weft.Agent("a", secret=SECRET) as agent:
        ticks = 0

        def wait():
            agent.notification(1.0)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while waiting.is_alive():
            ticks += 1
            time.sleep(0.001)
        assert ticks > 10


def _serve(pipe, transport):
    agent = weft.Agent("victim", secret=SECRET, transports=transport)
    memory = agent.allocate(64 << 20)
    np.frombuffer(memory, dtype=np.uint8)[:] = 7
    agent.publish("cache", memory, write=True)
    pipe.send(agent.address)
    pipe.recv()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_another_process_that_dies_or_freezes(transport, fault):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, transport), daemon=True)
    process.start()
    try:
        with weft.Agent("survivor", secret=SECRET, transports=transport) as agent:
            peer = agent.connect(ours.recv())
            region, local = peer.region("cache"), agent.allocate(64 << 20)
            peer.read(local, region).wait()
            assert np.frombuffer(local, dtype=np.uint8).min() == 7
            os.kill(process.pid, fault)
            with contextlib.suppress(weft.Error):
                # A frozen peer's memory can still be read through shared memory; everything else ends in an error, in time.
                while True:
                    peer.read(local, region, deadline=1.0).wait(10)
                    if fault == signal.SIGSTOP and transport == "shared_memory":
                        break
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
