"""`weft.nixl`: NIXL's Python API over Weft, without NIXL. What NIXL's own tests and programs ask of it is behind `cargo xtask door-test nixl`."""

import importlib.metadata
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
from needs import needs
from weft.nixl import _bindings as bindings
from weft.nixl import nixl_agent, nixl_agent_config

DOOR = pathlib.Path(__file__).parents[2] / "nixl" / "door"
MIB = 1 << 20


def agent(backend="WEFT", name=None, telemetry=False, **parameters):
    made = nixl_agent(name or str(uuid.uuid4()), nixl_agent_config(backends=[], capture_telemetry=telemetry))
    made.create_backend(backend, parameters)
    return made


class Side:
    """An agent with some memory."""

    def __init__(self, nbytes=MIB, **more):
        self.agent = agent(**more)
        self.bytes = np.zeros(nbytes, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = self.agent.register_memory([(self.address, nbytes, 0, "note")], "DRAM")

    def rows(self, spans):
        return [(self.address + offset, length, 0) for offset, length in spans]

    def descs(self, spans):
        return self.agent.get_xfer_descs(self.rows(spans), "DRAM")


@pytest.fixture(params=["shared_memory", "tcp"])
def sides(request):
    """Two agents, of which the first knows the second."""
    here, there = (Side(transports=request.param, deadline="20s") for _ in range(2))
    assert here.agent.add_remote_agent(there.agent.get_agent_metadata()) == there.agent.name.encode()
    return here, there


def finish(agent, handle, message=b""):
    state = agent.transfer(handle, message)
    while state == "PROC":
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


def told(agent, count=1):
    """So many notifications, and no more of them at that time."""
    found, end = {}, time.monotonic() + 30
    while sum(map(len, found.values())) < count and time.monotonic() < end:
        for name, messages in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(messages)
        time.sleep(0.001)
    return found


def test_blocks_of_arrays_in_any_order(sides):
    here, there = sides
    there.bytes[:] = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    count, size = 200, 4096
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(size)
    rows = lambda side: np.stack([offsets + np.uint64(side.address), np.full(count, size, np.uint64), np.zeros(count, np.uint64)], 1)
    mine = here.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here.agent.get_xfer_descs(rows(here), "DRAM"))
    theirs = here.agent.prep_xfer_dlist(there.agent.name, rows(there).astype(np.int64), "DRAM")
    order = np.random.default_rng(2).permutation(count)
    want = there.bytes[: count * size].reshape(count, size)[order].reshape(-1)
    for indices in (order.astype(np.int32), order.astype(np.int64), order.tolist()):
        here.bytes[:] = 0
        handle = here.agent.make_prepped_xfer("READ", mine, np.arange(count, dtype=np.uint32), theirs, indices, b"")
        for _ in range(2):
            finish(here.agent, handle)
        assert (here.bytes[: count * size] == want).all() and not here.bytes[count * size :].any()
        here.agent.release_xfer_handle(handle)
    # Some of them, and others than were named before.
    here.bytes[:] = 0
    finish(here.agent, here.agent.make_prepped_xfer("READ", mine, [7], theirs, [199]))
    assert (here.bytes[7 * size : 8 * size] == there.bytes[199 * size : 200 * size]).all()
    assert np.count_nonzero(here.bytes) <= size
    here.agent.release_dlist_handle(mine)
    here.agent.release_dlist_handle(theirs)


def test_blocks_at_a_stride(sides):
    here, there = sides
    there.bytes[:] = np.arange(MIB, dtype=np.uint32).astype(np.uint8)
    # Ten blocks of 64 bytes, 4,096 apart, and five that lie together.
    rows = lambda side: np.array([[side.address + 1, 64, 0, 4096, 10], [side.address + 100_000, 32, 0, 32, 5]], dtype=np.uint64)
    mine = here.agent.prep_xfer_dlist("", rows(here), "DRAM")
    theirs = here.agent.prep_xfer_dlist(there.agent.name, rows(there), "DRAM")
    finish(here.agent, here.agent.make_prepped_xfer("READ", mine, list(range(15)), theirs, list(range(15))))
    want = np.zeros(MIB, dtype=np.uint8)
    for begin, length in [(1 + 4096 * block, 64) for block in range(10)] + [(100_000, 160)]:
        want[begin : begin + length] = there.bytes[begin : begin + length]
    assert (here.bytes == want).all()
    for wrong in ([[here.address, 64, 0, 4096, 300]], [[here.address, 64, 0, 2**63, 3]], [[here.address, 1, 0, 0, 2**40]]):
        with pytest.raises((bindings.nixlNotFoundError, ValueError)):
            here.agent.prep_xfer_dlist("", np.array(wrong, dtype=np.uint64), "DRAM")


def test_a_write_is_told_once_and_after_its_bytes(sides):
    here, there = sides
    spans = [(0, MIB // 2), (MIB // 2, MIB // 2)]
    handle = here.agent.initialize_xfer("WRITE", here.descs(spans), there.descs(spans), there.agent.name, b"first \x00")
    for number, (message, want) in enumerate([(b"", b"first \x00"), (b"second", b"second"), ("third", b"third"), (b"", b"third")]):
        here.bytes[:] = number + 1
        # Nobody looks at the transfer any more, and it goes on.
        state = here.agent.transfer(handle, message)
        assert told(there.agent) == {here.agent.name: [want]}
        assert (there.bytes == number + 1).all()
        while state == "PROC":
            state = here.agent.check_xfer_state(handle)
    assert there.agent.get_new_notifs() == {}
    handle.release()


def test_notifications_by_themselves(sides):
    here, there = sides
    here.agent.make_connection(there.agent.name)
    for number in range(50):
        here.agent.send_notif(there.agent.name.encode(), b"number %d" % number, backend="WEFT")
    assert told(there.agent, 50) == {here.agent.name: [b"number %d" % number for number in range(50)]}
    # To itself, and found by a part of what is said.
    here.agent.send_notif(here.agent.name, "for the one that sent it")
    here.agent.send_notif(here.agent.name, b"and more")
    assert not here.agent.check_remote_xfer_done(here.agent.name, b"sent it")
    assert here.agent.check_remote_xfer_done(here.agent.name, b"sent it", tag_is_prefix=False)
    assert here.agent.update_notifs() == {here.agent.name: [b"and more"]}
    assert here.agent.check_remote_xfer_done(here.agent.name, b"")
    assert not here.agent.check_remote_xfer_done("nobody", b"")


def test_within_one_agent():
    side = Side()
    side.bytes[:4096] = 5
    here, there = side.descs([(0, 4096)]), side.descs([(8192, 4096)])
    finish(side.agent, side.agent.initialize_xfer("WRITE", here, there, side.agent.name, b"moved"))
    assert (side.bytes[8192:12288] == 5).all() and not side.bytes[12288:].any()
    assert side.agent.get_new_notifs() == {side.agent.name: [b"moved"]}


def test_what_is_not_registered_is_not_found(sides):
    here, there = sides
    for spans in ([(MIB - 8, 16)], [(0, 16), (MIB, 1)], [(-1, 4)]):
        with pytest.raises(bindings.nixlNotFoundError):
            here.agent.prep_xfer_dlist("", here.descs(spans))
        with pytest.raises(bindings.nixlNotFoundError):
            here.agent.prep_xfer_dlist(there.agent.name, here.agent.get_xfer_descs(there.rows(spans), "DRAM"))
    with pytest.raises(bindings.nixlNotFoundError, match="nobody"):
        here.agent.prep_xfer_dlist("nobody", here.descs([(0, 1)]))
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.deregister_memory(here.agent.get_reg_descs([(here.address, 17, 0, "")], "DRAM"))
    # Two registrations of which one ends before the other do not hide each other.
    here.agent.register_memory([(here.address + 4096, 16, 0, "")], "DRAM")
    side = here.agent.prep_xfer_dlist("", here.descs([(4096, 16), (4096, 17), (0, MIB)]))
    assert len(side._handle) == 3


def test_released_memory_is_refused(sides):
    here, there = sides
    spans = [(0, MIB)]
    handle = here.agent.initialize_xfer("WRITE", here.descs(spans), there.descs(spans), there.agent.name)
    finish(here.agent, handle)
    there.agent.deregister_memory(there.registered)
    there.bytes[:] = 9
    there.agent.register_memory(there.registered)
    with pytest.raises(bindings.nixlNotAllowedError):
        finish(here.agent, handle)
    assert (there.bytes == 9).all()
    # With what the owner says now, it is let in again.
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    handle = here.agent.initialize_xfer("WRITE", here.descs(spans), there.descs(spans), there.agent.name)
    finish(here.agent, handle)
    assert not there.bytes.any()
    # And what was given back here is not sent from any more.
    here.agent.deregister_memory(here.registered)
    with pytest.raises(bindings.nixlNotFoundError):
        here.agent.initialize_xfer("WRITE", here.descs(spans), there.descs(spans), there.agent.name)


def test_metadata_in_parts():
    here, there = agent(), Side()
    other = np.zeros(4096, dtype=np.uint8)
    second = there.agent.register_memory([(other.ctypes.data, 4096, 0, "")], "DRAM")
    first = there.registered
    with pytest.raises(bindings.nixlNotFoundError):
        # Who is not known yet is not to be found by registrations alone.
        here.add_remote_agent(there.agent.get_partial_agent_metadata(first))
    empty = there.agent.get_reg_descs([], "DRAM")
    here.add_remote_agent(there.agent.get_partial_agent_metadata(empty, inc_conn_info=True))
    assert here.check_remote_metadata(there.agent.name)
    assert not here.check_remote_metadata(there.agent.name, first.trim())
    here.add_remote_agent(there.agent.get_partial_agent_metadata(first))
    assert here.check_remote_metadata(there.agent.name.encode(), first.trim())
    assert not here.check_remote_metadata(there.agent.name, second.trim())
    here.add_remote_agent(there.agent.get_agent_metadata())
    assert here.check_remote_metadata(there.agent.name, second.trim())
    # What it says of all that it has takes the place of what it has said before.
    there.agent.deregister_memory(first)
    here.add_remote_agent(there.agent.get_agent_metadata())
    assert here.check_remote_metadata(there.agent.name, second.trim())
    assert not here.check_remote_metadata(there.agent.name, first.trim())
    here.remove_remote_agent(there.agent.name)
    assert not here.check_remote_metadata(there.agent.name)
    with pytest.raises(bindings.nixlNotFoundError):
        there.agent.get_partial_agent_metadata(there.agent.get_reg_descs([(1, 2, 0, "")], "DRAM"))
    with pytest.raises(bindings.nixlInvalidParamError):
        here.add_remote_agent(here.get_agent_metadata())


def test_metadata_from_anybody():
    here, there = agent(), Side()
    told = there.agent.get_agent_metadata()
    chance = random.Random(3)
    hostile = [told[:end] for end in range(len(told))] + [b"", b"nixl", told + b"x", told * 2]
    for _ in range(300):
        changed = bytearray(told)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        hostile.append(bytes(changed))
    refused = 0
    for one in hostile:
        try:
            here.add_remote_agent(one)
        except (bindings.nixlMismatchError, bindings.nixlInvalidParamError, bindings.nixlNotFoundError):
            refused += 1
    assert refused >= len(told)
    # What was changed and taken all the same is some agent's that nobody reaches; what was not changed is of use.
    here.add_remote_agent(told)
    mine = np.zeros(64, dtype=np.uint8)
    here.register_memory([(mine.ctypes.data, 64, 0, "")], "DRAM")
    there.bytes[:64] = 3
    local = here.get_xfer_descs([(mine.ctypes.data, 64, 0)], "DRAM")
    finish(here, here.initialize_xfer("READ", local, there.descs([(0, 64)]), there.agent.name))
    assert (mine == 3).all()


def test_an_agent_that_has_started_anew_is_another_one():
    here, name = Side(), str(uuid.uuid4())
    there = Side(name=name)
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    old = here.agent.prep_xfer_dlist(name, there.descs([(0, 64)]))
    mine = here.agent.prep_xfer_dlist("", here.descs([(0, 64)]))
    finish(here.agent, here.agent.make_prepped_xfer("READ", mine, [0], old, [0]))
    del there
    again = Side(name=name)
    again.bytes[:] = 8
    here.agent.add_remote_agent(again.agent.get_agent_metadata())
    with pytest.raises(bindings.nixlNotAllowedError):
        # The same name of a region, in another life.
        finish(here.agent, here.agent.make_prepped_xfer("READ", mine, [0], old, [0]))
    new = here.agent.prep_xfer_dlist(name, again.descs([(0, 64)]))
    finish(here.agent, here.agent.make_prepped_xfer("READ", mine, [0], new, [0]))
    assert (here.bytes[:64] == 8).all()


def test_calls_that_make_no_sense(sides):
    here, there = sides
    mine = here.agent.prep_xfer_dlist("", here.descs([(0, 8), (8, 16)]))
    theirs = here.agent.prep_xfer_dlist(there.agent.name, there.descs([(0, 8), (8, 16)]))
    ask = lambda *arguments: here.agent.make_prepped_xfer("WRITE", *arguments)
    for wrong in [(mine, [0], theirs, [1]), (mine, [0, 1], theirs, [0]), (mine, [], theirs, []), (mine, [2], theirs, [0]),
                  (theirs, [0], mine, [0]), (mine, [0], mine, [0])]:  # fmt: skip
        with pytest.raises(bindings.nixlInvalidParamError):
            ask(*wrong)
    with pytest.raises((OverflowError, ValueError)):
        ask(mine, [-1], theirs, [0])
    with pytest.raises(KeyError):
        here.agent.make_prepped_xfer("COPY", mine, [0], theirs, [0])
    handle = ask(mine, [0], theirs, [0])
    with pytest.raises(bindings.nixlNotPostedError):
        here.agent.check_xfer_state(handle)
    assert here.agent.query_xfer_backend(handle) == "WEFT"
    for unsupported in (
        lambda: here.agent.estimate_xfer_cost(handle),
        lambda: here.agent.query_memory([(0, 0, 0, "file")], "WEFT", "FILE"),
        lambda: here.agent.register_memory([(3, 4096, 0, "")], "FILE"),
        lambda: here.agent.send_local_metadata("127.0.0.1"),
        lambda: here.agent.fetch_remote_metadata("somebody"),
        lambda: here.agent.prep_mem_view(here.descs([(0, 8)])),
    ):
        with pytest.raises(bindings.nixlNotSupportedError, match="NIXL_ERR_NOT_SUPPORTED"):
            unsupported()
    for nothing in ([(0, 16, 0, "")], [(2**63 + 5, 2**63, 0, "")]):
        with pytest.raises(bindings.nixlInvalidParamError):
            here.agent.register_memory(nothing, "DRAM")


def test_back_ends_are_weft_under_whichever_name():
    assert nixl_agent("by default").backends == {"UCX": 1}
    made = agent("UCX", deadline="7s", num_threads="4")
    assert made.get_plugin_list() == ["WEFT", "UCX", "LIBFABRIC"]
    assert made.get_backend_params("UCX")["deadline"] == "7s" and "DRAM_SEG" in made.get_backend_mem_types("UCX")
    made.create_backend("WEFT", made.get_plugin_params("WEFT"))
    with pytest.raises(bindings.nixlInvalidParamError):
        made.create_backend("LIBFABRIC", {"deadline": "9s"})
    with pytest.raises(bindings.nixlInvalidParamError):
        made.create_backend("WEFT")
    with pytest.raises(bindings.nixlNotFoundError):
        made.create_backend("UVX")
    assert made.get_plugin_mem_types("UVX") == [] and made.get_backend_params("UVX") == {}
    for wrong in ({"deadlin": "3s"}, {"deadline": "soon"}, {"name": "another"}):
        with pytest.raises(bindings.nixlBackendError):
            nixl_agent("wrong", nixl_agent_config(backends=[])).create_backend("WEFT", wrong)
    with pytest.raises(bindings.nixlInvalidParamError, match="no back end"):
        nixl_agent("without", nixl_agent_config(backends=[])).get_agent_metadata()
    with pytest.raises(ValueError):
        nixl_agent("")
    with pytest.raises(TypeError):
        nixl_agent_config(sync_mode=1)


def test_telemetry_is_there_where_it_was_asked_for(monkeypatch):
    there = Side()
    spans = [(0, 4096), (8192, 64)]
    for asked, variable, wanted in [(True, None, True), (False, None, False), (False, "y", True), (True, "no", False)]:
        monkeypatch.delenv("NIXL_TELEMETRY_ENABLE", raising=False)
        if variable is not None:
            monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", variable)
        here = Side(telemetry=asked)
        here.agent.add_remote_agent(there.agent.get_agent_metadata())
        handle = here.agent.initialize_xfer("READ", here.descs(spans), there.descs(spans), there.agent.name)
        with pytest.raises(bindings.nixlNoTelemetryError):
            here.agent.get_xfer_telemetry(handle)
        finish(here.agent, handle)
        if wanted:
            said = here.agent.get_xfer_telemetry(handle)
            assert (said.totalBytes, said.descCount) == (4160, 2)
            assert 0 < said.postDuration <= said.xferDuration and abs(said.startTime / 1e6 - time.time()) < 3600
        else:
            with pytest.raises(bindings.nixlNoTelemetryError):
                here.agent.get_xfer_telemetry(handle)


def test_lists():
    made = nixl_agent("lists", nixl_agent_config(backends=[]))
    rows = [(1000, 105, 0), (2000, 30, 1)]
    listed = made.get_xfer_descs(rows, "DRAM")
    assert listed == made.get_xfer_descs(np.array(rows, dtype=np.uint64), "cpu") and made.get_xfer_descs(listed) is listed
    assert (listed.descCount(), listed[1], listed.getType()) == (2, rows[1], bindings.DRAM_SEG) and listed.index(rows[1]) == 1
    with pytest.raises(bindings.nixlNotFoundError):
        listed.index((1, 2, 3))
    listed.addDesc((7, 8, 9))
    listed[0] = (4, 5, 6)
    listed.remDesc(1)
    assert list(listed) == [(4, 5, 6), (7, 8, 9)] and listed != made.get_xfer_descs(rows, "DRAM")
    listed.clear()
    assert listed.isEmpty()
    noted = made.get_reg_descs([(*row, "note") for row in rows], "DRAM")
    assert noted[0] == (1000, 105, 0, b"note") and noted.trim() == made.get_xfer_descs(rows, "DRAM")
    assert made.get_reg_descs(np.array(rows, dtype=np.int64), "VRAM")[1] == (2000, 30, 1, b"")
    assert made.get_remote_descs([(*rows[0], "them")], "DRAM")[0] == (1000, 105, 0, "them")
    # What makes no list is none, and the log says why.
    for call in (made.get_xfer_descs, made.get_reg_descs, made.get_remote_descs):
        assert call(rows) is None and call([(1, 2)], "DRAM") is None and call("text", "DRAM") is None and call(None, "DRAM") is None
        with pytest.raises(KeyError):
            call([(1, 2, 3) if call == made.get_xfer_descs else (1, 2, 3, "")], "V-RAM")
    assert made.get_xfer_descs(noted) is None and made.get_reg_descs(listed) is None
    assert made.get_xfer_descs(np.zeros((2, 4), dtype=np.uint64), "DRAM") is None
    for wrong in (np.zeros((2, 3)), np.zeros((2, 3), dtype=np.uint32), np.zeros((2, 6), dtype=np.uint64)[:, ::2]):
        with pytest.raises(ValueError):
            made.get_xfer_descs(wrong, "DRAM")
    for wrong in ([(1, 2, 3), (1, 2)], [(1, 2, 3), [1, 2, 3]], [(1, -2, 3)], [(1, 2**64, 3)], [(1, "2", 3)]):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            made.get_xfer_descs(wrong, "DRAM")


def test_lists_as_bytes_run_nothing():
    made = nixl_agent("lists", nixl_agent_config(backends=[]))
    lists = [
        made.get_xfer_descs([(1, 2, 3), (2**64 - 1, 5, 6)], "VRAM"),
        made.get_reg_descs([(1, 2, 3, b"\x00note"), (4, 5, 6, "")], "DRAM"),
        made.get_remote_descs([(1, 2, 3, "agent")], "DRAM"),
        made.get_xfer_descs([], "DRAM"),
    ]
    chance = random.Random(4)
    for one in lists:
        said = made.get_serialized_descs(one)
        assert made.deserialize_descs(said) == one and type(made.deserialize_descs(said)) is type(one)
        assert pickle.loads(pickle.dumps(one)) == one
        for end in range(len(said)):
            with pytest.raises(bindings.nixlMismatchError):
                made.deserialize_descs(said[:end])
        for _ in range(300):
            changed = bytearray(said)
            changed[chance.randrange(len(changed))] = chance.randrange(256)
            try:
                again = made.deserialize_descs(bytes(changed))
            except bindings.nixlMismatchError:
                continue
            assert made.get_serialized_descs(again) == bytes(changed)

    class Harm:
        def __reduce__(self):
            return pytest.fail, ("it was run",)

    for hostile in (pickle.dumps(Harm()), b"", "text", None, said + b"x", said[:-8] + b"\xff" * 8):
        with pytest.raises(bindings.nixlMismatchError):
            made.deserialize_descs(hostile)


def test_tensors():
    needs("torch")
    import torch

    here, there = agent(), agent()
    mine, theirs = torch.zeros(1000), torch.arange(1000, dtype=torch.float32)
    here.register_memory(mine)
    there.register_memory([theirs])
    here.add_remote_agent(there.get_agent_metadata())
    finish(here, here.initialize_xfer("READ", here.get_xfer_descs(mine), here.get_xfer_descs([theirs]), there.name))
    assert torch.equal(mine, theirs)
    apart = torch.zeros(4, 4).t()
    for wrong in (apart, [mine, apart]):
        assert here.get_xfer_descs(wrong) is None and here.get_reg_descs(wrong) is None


@pytest.mark.skipif("VRAM_SEG" in agent().get_backend_mem_types("WEFT"), reason="there is a GPU")
def test_without_a_gpu_its_memory_is_the_hosts(sides):
    """Engines that run on processors call their caches so all the same."""
    here, there = sides
    mine, theirs = (np.full(4096, value, dtype=np.uint8) for value in (0, 6))
    for side, array in ((here, mine), (there, theirs)):
        registered = side.agent.register_memory([(array.ctypes.data, 4096, 3, "")], "VRAM")
    part = there.agent.get_partial_agent_metadata(registered)
    here.agent.add_remote_agent(part)
    local = here.agent.get_xfer_descs([(mine.ctypes.data, 4096, 3)], "VRAM")
    remote = here.agent.get_xfer_descs([(theirs.ctypes.data, 4096, 3)], "VRAM")
    assert here.agent.check_remote_metadata(there.agent.name, remote)
    finish(here.agent, here.agent.initialize_xfer("READ", local, remote, there.agent.name))
    assert (mine == 6).all()
    there.agent.deregister_memory(registered)


def python(program, tmp_path, **environment):
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=os.environ | environment
    )
    return ran.returncode, ran.stdout.strip(), ran.stderr


INSTALLED = """
import importlib.util, sys
import weft.nixl
{install}
assert importlib.util.find_spec("nixl") is not None
import nixl, nixl._api, nixl._bindings
from nixl._utils import malloc_passthru
from nixl.logging import get_logger
assert nixl._api.nixl_agent is weft.nixl.nixl_agent is nixl.nixl_agent
weft.nixl.install()
print("installed")
"""


def test_it_is_put_in_place_only_where_asked(tmp_path):
    assert python(INSTALLED.format(install="weft.nixl.install()"), tmp_path)[1] == "installed"
    asked = INSTALLED.format(install="weft.nixl.install_where_asked()")
    for said in ("1", "true", " ON"):
        assert python(asked, tmp_path, WEFT_NIXL=said)[1] == "installed"
    left = "import sys, weft.nixl; weft.nixl.install_where_asked(); print('nixl' in sys.modules)"
    for said in ("", "0", "off"):
        assert python(left, tmp_path, WEFT_NIXL=said)[1] == "False"
    code, _, text = python(left, tmp_path, WEFT_NIXL="perhaps")
    assert code == 1 and "WEFT_NIXL" in text and "perhaps" in text
    # An agent starts beside the variable, which is no setting of its.
    assert python("import weft; weft.Agent('a').close(); print('ok')", tmp_path, WEFT_NIXL="1")[1] == "ok"


def test_nixl_itself_is_not_pushed_aside(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("")
    code, _, text = python("import nixl, weft.nixl; weft.nixl.install()", tmp_path)
    assert code == 1 and "ImportError" in text and "has been imported already" in text


def test_engines_find_it_by_its_entry_points():
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        found = importlib.metadata.entry_points(group=group)
        assert [point.value for point in found if point.name == "weft_nixl"] == ["weft.nixl:install_where_asked"]


@pytest.fixture
def pair(monkeypatch):
    """A target in a process of its own, that can be frozen and killed."""
    monkeypatch.syspath_prepend(str(DOOR))
    monkeypatch.setenv("WEFT_NIXL", "1")
    for name in ("WEFT_TRANSPORTS", "NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        # The pair sets them; they are taken back afterwards.
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    for name in ("nixl", "nixl._api", "nixl._bindings", "nixl._utils", "nixl.logging"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from partners import Pair

    yield lambda transport, nbytes=8 * MIB, deadline="2s": Pair("WEFT", transport, nbytes, deadline=deadline)
    Pair.end_all()


def test_what_was_released_is_not_written_late(pair):
    two = pair("tcp", 64 * MIB)
    two.region.bytes[:] = 1
    handle = two.describe("WRITE")
    two.finish(two.describe("READ", spans=[(0, 64)]))
    two.freeze()
    two.agent.transfer(handle)
    # This waits until nobody takes anything any more, which with a frozen peer is the deadline. Others may ask after the transfer meanwhile.
    release = threading.Thread(target=two.agent.release_xfer_handle, args=(handle,))
    release.start()
    while release.is_alive():
        assert handle._handle.telemetry() is None
        release.join(0.05)
    assert "released=True" in repr(handle)
    before = two.look()
    two.region.bytes[:] = 2
    two.thaw()
    # It answers when it goes on, and has then done whatever it was going to do.
    after = np.frombuffer(two.ask("bytes"), dtype=np.uint8)
    assert not (after == 2).any() and (before == after).all()


def test_a_frozen_peer_ends_a_read_at_its_deadline(pair):
    two = pair("tcp")
    two.finish(two.describe("READ", spans=[(0, 64)]))
    handle = two.describe("READ")
    two.freeze()
    state, _ = two.finish(handle)
    assert state in ("nixlCancelledError", "nixlRemoteDisconnectError")
    two.thaw()


def test_a_frozen_peer_on_this_host_is_not_needed(pair):
    two = pair("shared_memory", deadline="30s")
    two.ask("fill", 5)
    two.finish(two.describe("READ", spans=[(0, 64)]))
    handle = two.describe("READ")
    two.freeze()
    assert two.finish(handle)[0] == "DONE" and (two.region.bytes == 5).all()
    two.thaw()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_killed_peer_is_told_of(pair, transport):
    two = pair(transport, deadline="30s")
    handle = two.describe("WRITE")
    assert two.finish(handle)[0] == "DONE"
    os.kill(two.process.pid, signal.SIGKILL)
    two.process.join()
    # What the kernel has not said yet may still seem to go well, over memory that both have.
    states = [two.finish(handle)[0]]
    end = time.monotonic() + 20
    while states[-1] == "DONE" and time.monotonic() < end:
        time.sleep(0.01)
        states.append(two.finish(handle)[0])
    assert states[-1] in ("nixlRemoteDisconnectError", "nixlNotAllowedError"), states
    two.agent.release_xfer_handle(handle)


def test_a_notification_goes_out_though_nobody_polls(pair):
    two = pair("tcp", deadline="30s")
    two.finish(two.describe("WRITE", spans=[(0, 64)]))
    # A handle that is let go of is released, which calls off what is under way.
    handle = two.describe("WRITE", b"there you are")
    two.agent.transfer(handle)
    assert two.ask("notifications", 1, 20.0) == {"initiator": [b"there you are"]}


def test_every_function_of_the_door_between_two_processes():
    """What is run through NIXL with Weft as its back end, without NIXL."""
    ran = subprocess.run(
        [sys.executable, str(DOOR / "contract.py")], capture_output=True, text=True, timeout=300, env=os.environ | {"WEFT_NIXL": "1"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "9 of 9 hold" in ran.stdout
