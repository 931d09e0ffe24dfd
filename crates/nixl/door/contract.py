"""Runs every function of a back end that NIXL calls, through NIXL's own Python API, between two processes and within one.

    NIXL_PLUGIN_DIR=… contract.py [BACKEND]
    WEFT_NIXL=1 contract.py                     # the same of weft.nixl, without NIXL

NIXL calls a back end's functions by number. If the numbers have moved, something here does something else than it should; `weft nixl` says which.
"""

import os
import sys

import numpy as np
from partners import Pair, Region, agent

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def what_the_back_end_says_of_itself(pair):
    """supportsRemote, supportsLocal, supportsNotif, getSupportedMems, and what NIXL reads without asking: type, parameters."""
    assert pair.backend in pair.agent.get_plugin_list()
    assert "DRAM_SEG" in pair.agent.get_backend_mem_types(pair.backend), pair.agent.get_backend_mem_types(pair.backend)
    offered = pair.agent.get_plugin_params(pair.backend)
    assert {"deadline", "checksum"} <= set(offered) and not any(offered.values()), offered
    assert pair.agent.get_backend_params(pair.backend) == {"deadline": "20s"}


@check
def reads_of_many_blocks_in_any_order(pair):
    """getConnInfo, registerMem, getPublicData, loadRemoteConnInfo, loadRemoteMD, prepXfer, postXfer, checkXfer, releaseReqH."""
    pair.ask("fill", None)
    pair.region.bytes[:] = 0
    blocks, size = 200, 4096
    order = np.random.default_rng(1).permutation(blocks)
    spans = [(i * size, size) for i in range(blocks)]
    here = pair.agent.prep_xfer_dlist("NIXL_INIT_AGENT", pair.region.descriptors(spans))
    there = pair.agent.prep_xfer_dlist(pair.peer, pair.theirs(spans))
    handle = pair.agent.make_prepped_xfer("READ", here, list(range(blocks)), there, [int(i) for i in order], b"")
    want = np.frombuffer(pair.ask("bytes"), dtype=np.uint8)[: blocks * size].reshape(blocks, size)[order].reshape(-1)
    for _ in range(3):
        pair.region.bytes[:] = 0
        assert pair.finish(handle)[0] == "DONE"
        assert (pair.region.bytes[: blocks * size] == want).all()
    pair.agent.release_xfer_handle(handle)
    pair.agent.release_dlist_handle(here)
    pair.agent.release_dlist_handle(there)


@check
def a_write_and_what_is_told_with_it(pair):
    pair.region.bytes[:] = 7
    pair.ask("fill", 0)
    handle = pair.describe("WRITE", b"written \x00 to the end")
    assert pair.finish(handle)[0] == "DONE"
    assert pair.ask("notifications", 1, 20.0) == {"initiator": [b"written \x00 to the end"]}
    assert pair.ask("bytes") == bytes([7]) * pair.region.bytes.nbytes
    pair.agent.release_xfer_handle(handle)


@check
def a_read_and_what_is_told_with_it(pair):
    handle = pair.describe("READ", b"I have it", [(0, 64), (4096, 64)])
    assert pair.finish(handle)[0] == "DONE"
    assert pair.ask("notifications", 1, 20.0) == {"initiator": [b"I have it"]}
    pair.agent.release_xfer_handle(handle)


@check
def notifications_by_themselves_both_ways(pair):
    """genNotif, getNotifs, connect."""
    pair.agent.make_connection(pair.peer)
    sent = [b"number %d " % i + b"." * (i % 50) for i in range(200)]
    for message in sent:
        pair.agent.send_notif(pair.peer, message)
    assert pair.ask("notifications", 200, 20.0) == {"initiator": sent}
    assert pair.ask("know", pair.agent.get_agent_metadata()) == b"initiator"
    pair.ask("notify", "initiator", b"and back")
    told = {}
    while not told:
        told = pair.agent.get_new_notifs()
    assert told == {"target": [b"and back"]}, told


@check
def within_one_agent(pair):
    """loadLocalMD, connect to itself."""
    other = Region(pair.agent, 8192)
    pair.region.bytes[:8192] = np.arange(8192, dtype=np.uint32).astype(np.uint8)
    here = pair.region.descriptors([(0, 8192)])
    handle = pair.agent.initialize_xfer("WRITE", here, other.descriptors(), "initiator", b"moved")
    assert pair.finish(handle)[0] == "DONE"
    assert (other.bytes == pair.region.bytes[:8192]).all()
    assert pair.agent.get_new_notifs() == {"initiator": [b"moved"]}
    pair.agent.release_xfer_handle(handle)
    other.deregister()


@check
def what_is_not_supported_is_said(pair):
    """queryMem, estimateXferCost, and descriptors that lie outside."""
    handle = pair.describe("READ")
    for ask in (lambda: pair.agent.estimate_xfer_cost(handle), lambda: pair.agent.query_memory([(0, 0, 0, "")], pair.backend, "DRAM")):
        try:
            ask()
        except Exception as error:
            assert "NOT_SUPPORTED" in str(error), error
        else:
            raise AssertionError("an answer was given")
    pair.agent.release_xfer_handle(handle)


@check
def metadata_are_given_back_and_loaded_again(pair):
    """deregisterMem, unloadMD, disconnect; and a peer that comes back after that."""
    pair.agent.remove_remote_agent(pair.peer)
    try:
        pair.describe("READ")
    except Exception:
        pass
    else:
        raise AssertionError("a transfer with an agent that was removed")
    metadata, pair.address = pair.ask("hello")
    assert pair.agent.add_remote_agent(metadata) == b"target"
    handle = pair.describe("READ")
    assert pair.finish(handle)[0] == "DONE"
    pair.agent.release_xfer_handle(handle)
    pair.region.deregister()
    pair.region.register()


@check
def parameters_that_are_none_are_refused(pair):
    for wrong in ({"deadlin": "1s"}, {"deadline": "soon"}):
        try:
            agent("wrong", pair.backend, wrong)
        except Exception as error:
            assert "BACKEND" in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")


def main():
    backend = sys.argv[1] if len(sys.argv) > 1 else "WEFT"
    pair = Pair(backend, deadline="20s")
    failed = 0
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        try:
            function(pair)
            print(f"  ok      {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"  FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    Pair.end_all()
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} hold", flush=True)
    # NIXL's threads are not waited for.
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
