"""The package as a user meets it: two agents, here in one process or in two, over both transports."""

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
from needs import needs
from pair import BLOCK, SECRET, published, two_agents


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


class Pinned(Tensor):
    """What torch says of `pin_memory=True`: host memory, under the name of a device."""

    def __init__(self, array, kind=3):
        super().__init__(array)
        self.kind = kind

    def __dlpack__(self, **_):
        capsule, find = super().__dlpack__(), ctypes.pythonapi.PyCapsule_GetPointer
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # Behind the address of the data is what kind of device it is on.
        ctypes.c_int32.from_address(find(capsule, b"dltensor") + 8).value = self.kind
        return capsule

    def __dlpack_device__(self):
        return (self.kind, 0)


def test_pinned_host_memory_is_the_hosts(agents):
    target, initiator, peer = agents
    kept = published(target, "pinned", np.arange(1000, dtype=np.float32))
    tensor = Pinned(np.zeros(1000, np.float32))
    memory = initiator.register(tensor)
    assert memory.device is None
    peer.read(memory, peer.region("pinned")).wait()
    assert tensor.array[999] == 999
    with pytest.raises(ValueError, match="host memory or on a CUDA device"):
        initiator.register(Pinned(np.zeros(10, np.float32), kind=8))
    del kept


def test_torch(agents):
    needs("torch")
    import torch

    target, initiator, peer = agents
    kept = published(target, "torch", torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100))
    tensor = torch.zeros((10, 100), dtype=torch.bfloat16)
    peer.read(initiator.register(tensor), peer.region("torch")).wait()
    assert tensor[9, 99] == torch.tensor(999, dtype=torch.bfloat16)
    with pytest.raises(weft.InvalidCall, match="contiguous"):
        initiator.register(tensor.t())
    indices = torch.tensor([3, 1])
    peer.read(initiator.register(torch.zeros(1000, dtype=torch.bfloat16)), peer.region("torch"), (200, indices)).wait()
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


def test_the_end_of_with_gives_the_lease_back():
    with two_agents("shared_memory") as (target, initiator, peer):
        memory = target.allocate(BLOCK)
        target.publish("lent", memory)
        with peer.borrow(peer.region("lent")) as borrowed:
            view = memoryview(borrowed)
            with pytest.raises(weft.StillInUse):
                memory.release(0.05)
        assert not borrowed.held and len(borrowed) == BLOCK
        with pytest.raises(weft.LeaseEnded):
            memoryview(borrowed)
        # The pages are there for as long as somebody may look at them.
        assert view[0] == 0
        view.release()
        memory.release()


def test_several_legs_make_one_transfer(agents):
    target, initiator, peer = agents
    layers = [np.full(BLOCK * 4, layer, np.uint8) for layer in range(1, 4)]
    kept = [published(target, f"layer {index}", layer, write=True) for index, layer in enumerate(layers)]
    regions = [peer.region(f"layer {index}") for index in range(3)]
    arrays = [np.zeros(BLOCK * 4, np.uint8) for _ in range(3)]
    locals_ = [initiator.register(array) for array in arrays]
    legs = [
        (locals_[0], None, regions[0], None),
        (locals_[1], [(0, BLOCK)], regions[1], [(BLOCK, BLOCK)]),
        (locals_[2], None, regions[2], (BLOCK, [3])),
    ]
    summary = peer.transfer("read", legs, checksum=True).wait()
    assert summary.bytes == 6 * BLOCK
    assert arrays[0].sum() == 4 * BLOCK and arrays[1].sum() == 2 * BLOCK and arrays[2][3 * BLOCK :].sum() == 3 * BLOCK
    for array in arrays:
        array[:] = 9
    prepared = peer.prepare_transfer("write", iter(legs), deadline=10)
    assert prepared.nbytes == 6 * BLOCK
    prepared.post().wait()
    assert layers[0].min() == 9 and layers[1][BLOCK] == 9 and layers[1][0] == 2
    for wrong in ["sideways", "Read"]:
        with pytest.raises(weft.InvalidCall):
            peer.transfer(wrong, legs)
    for wrong in [[], [(locals_[0], regions[0])], [(regions[0], None, locals_[0], None)]]:
        with pytest.raises(weft.InvalidCall):
            peer.transfer("read", wrong)
    with pytest.raises(TypeError):
        peer.transfer("read", legs, local_spans=[(0, 1)])
    del kept


def test_what_an_agent_and_a_region_say_of_themselves(agents):
    target, initiator, peer = agents
    kept = published(target, "both", np.zeros(BLOCK, np.uint8), write=True), published(target, "read", bytearray(BLOCK))
    both, read = peer.region("both"), peer.region("read")
    assert both.readable and both.writable and read.readable and not read.writable
    assert 0 < target.epoch < initiator.epoch
    assert initiator.settings["deadline"] == "30s" and initiator.settings["tcp.connections"] == "2"
    assert SECRET not in initiator.settings.values()
    peer.wait_for_transport(initiator.settings["transports"])
    with pytest.raises(weft.TimedOut):
        peer.wait_for_transport("pigeons", timeout=0.05)
    del kept


def test_the_deadline_of_the_agent_is_the_timeout_that_nobody_gave():
    with weft.Agent("a", secret=SECRET) as a, weft.Agent("b", secret=SECRET, deadline=0.2) as b:
        with pytest.raises(weft.TimedOut):
            b.connect(a.address, timeout=10).region("nobody published this")


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
