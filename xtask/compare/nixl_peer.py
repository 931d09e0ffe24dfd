"""NIXL's side: its Python interface, with the back end that NIXL_BACKEND names inside: UCX, tuned as it runs best here, or WEFT.

With UCX on one host neither process has a progress thread and the target polls; over TCP the target has one. A progress thread
at the initiator only takes turns with the polling caller. Weft's back end has a thread of its own, and its target need not poll.
"""

import contextlib
import os
import sys
import time

import numpy as np
import workload
from workload import Region, orders, serve


BACKEND = os.environ.get("NIXL_BACKEND", "UCX")


def environment(case):
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if BACKEND == "WEFT":
        os.environ["WEFT_TRANSPORTS"] = case.transport
    os.environ["UCX_NET_DEVICES"] = "lo"
    if case.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp,self"


def agent(name, progress_thread):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=[BACKEND]))


def descriptors(address, case):
    blocks = np.arange(case.batch, dtype=np.uint64) * np.uint64(case.block) + np.uint64(address)
    return np.stack([blocks, np.full_like(blocks, case.block), np.zeros_like(blocks)], 1)


def target(case, control):
    environment(case)
    # The figure for an idle agent is that of the default, which has a progress thread.
    progress_thread = case.transport == "tcp" or case.what == "idle" or BACKEND == "WEFT"
    me = agent("target", progress_thread)
    region = Region(case.block * case.batch)
    me.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    while True:
        if not progress_thread and not control.poll(0):
            me.get_new_notifs()
            continue
        unknown = serve(region, case, control)
        if unknown is None:
            continue
        kind, rest = unknown
        if kind == "hello":
            control.send((region.address, me.get_agent_metadata()))
        elif kind == "peer":
            me.add_remote_agent(rest[0])
            control.send(True)
        elif kind == "echo":
            control.send(True)
            echoed = 0
            while echoed < rest[0]:
                for sender, messages in me.get_new_notifs().items():
                    for message in messages:
                        me.send_notif(sender, message)
                        echoed += 1
        elif kind == "quit":
            control.send(True)
            os._exit(0)


def finish(me, handle):
    state = me.transfer(handle)
    while state == "PROC":
        state = me.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")


@contextlib.contextmanager
def initiate(case, control):
    environment(case)
    me = agent("initiator", False)
    region = Region(case.block * case.batch)
    me.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    address, metadata = control.ask("hello")
    peer = me.add_remote_agent(metadata)
    here = me.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(region.address, case), "DRAM")
    there = me.prep_xfer_dlist(peer, descriptors(address, case), "DRAM")
    local, remote = orders(case)

    def once():
        handle = me.make_prepped_xfer(case.op, here, local, there, remote, b"")
        begin = time.perf_counter_ns()
        finish(me, handle)
        took = time.perf_counter_ns() - begin
        me.release_xfer_handle(handle)
        return took

    yield region, once


def initiate_notification(case, control):
    environment(case)
    me = agent("initiator", False)
    region = Region(case.block)
    me.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    peer = me.add_remote_agent(control.ask("hello")[1])
    control.ask("peer", me.get_agent_metadata())
    control.ask("echo", workload.ROUND_TRIPS)
    times = []
    for _ in range(workload.ROUND_TRIPS):
        begin = time.perf_counter_ns()
        me.send_notif(peer, b"x" * 32)
        while not me.get_new_notifs():
            pass
        times.append(time.perf_counter_ns() - begin)
    return workload.summary(times[50:])


def initiate_start(case, control):
    """From nothing to the first byte: the agent, the peer, one transfer. Loading the library is not counted."""
    environment(case)
    import nixl._api  # noqa: F401

    address, metadata = control.ask("hello")
    region = Region(case.block)
    begin = time.perf_counter_ns()
    me = agent("initiator", False)
    me.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    peer = me.add_remote_agent(metadata)
    here = me.get_xfer_descs([(region.address, case.block, 0)], "DRAM")
    there = me.get_xfer_descs([(address, case.block, 0)], "DRAM")
    finish(me, me.initialize_xfer("READ", here, there, peer))
    return {"us": (time.perf_counter_ns() - begin) / 1e3}


def initiate_idle(case, control):
    environment(case)
    me = agent("initiator", True)
    me.add_remote_agent(control.ask("hello")[1])
    seconds = max(case.seconds, workload.IDLE_SECONDS_MIN)
    before = workload.cpu_seconds()
    time.sleep(seconds)
    return {"cores": round((workload.cpu_seconds() - before) / seconds, 4)}


if __name__ == "__main__":
    workload.main(sys.modules[__name__])
    os._exit(0)
