"""What is raised when, and what it says."""

import pickle
import threading
import time

import numpy as np
import pytest

import weft
from pair import BLOCK, SECRET, published, two_agents


def test_refusals_carry_their_fields(agents):
    target, initiator, peer = agents
    kept = published(target, "read-only", np.zeros(BLOCK, np.uint8))
    with pytest.raises(weft.Refused) as refused:
        peer.write(initiator.register(np.zeros(BLOCK, np.uint8)), peer.region("read-only")).wait()
    assert isinstance(refused.value, weft.TransferRefused) and isinstance(refused.value, weft.TransferError)
    assert refused.value.peer == "target"
    assert refused.value.transport in ("shared_memory", "tcp")
    assert refused.value.bytes_done == 0 and refused.value.bytes_total == BLOCK
    assert refused.value.undone == [(0, 0, BLOCK)] and refused.value.done == []
    del kept


def test_a_refusal_without_a_transfer_says_why():
    with two_agents("shared_memory") as (target, initiator, peer):
        memory = target.allocate(BLOCK)
        target.publish("lent", memory)
        region = peer.region("lent")
        memory.release()
        with pytest.raises(weft.Refused) as refused:
            peer.borrow(region)
        assert not isinstance(refused.value, weft.TransferError)
        assert refused.value.cause


def test_wrong_calls(agents):
    target, initiator, peer = agents
    kept = published(target, "array", np.zeros(BLOCK, np.uint8))
    local, region = initiator.register(bytearray(BLOCK)), peer.region("array")
    with pytest.raises(weft.Error):
        peer.read(local, region, [(0, 10 * BLOCK)]).wait()
    with pytest.raises(ValueError):
        peer.read(local, region, [(2**64 - 1, 2)])
    with pytest.raises(TypeError):
        peer.read(local, region, dedline=1)
    with pytest.raises(ValueError):
        peer.read(local, region, deadline=-1)
    with pytest.raises(weft.TimedOut):
        peer.region("nobody published this", timeout=0.05)
    del kept


def test_exceptions_are_pythons_own_too():
    assert issubclass(weft.TimedOut, TimeoutError)
    assert issubclass(weft.InvalidCall, ValueError)
    assert issubclass(weft.OsFailure, OSError)
    assert not any(hasattr(weft, name) for name in ("SystemError", "TimeoutError", "ValueError", "OSError"))
    for name in weft.__all__:
        kind = getattr(weft, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert issubclass(kind, weft.Error) and kind.__module__ == "weft"
            assert isinstance(pickle.loads(pickle.dumps(kind("why"))), kind)


def test_what_the_system_refuses_has_its_number():
    with weft.Agent("a", secret=SECRET) as agent:
        with pytest.raises(weft.OsFailure) as failure:
            agent.allocate(1 << 62)
        assert str(failure.value)


def test_closing_ends_a_wait_for_a_notification():
    agent = weft.Agent("a", secret=SECRET)
    ended = []

    def wait():
        with pytest.raises(weft.Stopped):
            agent.notification()
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    agent.close()
    waiting.join(10)
    assert ended
