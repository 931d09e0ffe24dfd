"""Weft's side, through its Python package, with its default settings."""

import contextlib
import os
import sys
import time

import weft
import workload
from workload import Region, orders, serve

SECRET = "the secret of the comparison"
PATIENCE = 10.0


def agent(name, case):
    # On one host shared memory comes first by itself; to measure TCP there, it is the only one allowed.
    return weft.Agent(name, secret=SECRET, transports=case.transport)


def region_of(me, case):
    """A region and its registration: memory that Weft allocated, or memory that it did not."""
    nbytes = case.block * case.batch
    if case.memory == "mapped":
        memory = me.allocate(nbytes)
        return Region(nbytes, memory), memory
    region = Region(nbytes)
    return region, me.register(region.memory)


def target(case, control):
    me = agent("target", case)
    region, memory = region_of(me, case)
    me.publish("blocks", memory, read=True, write=True)
    while True:
        unknown = serve(region, case, control)
        if unknown is None:
            continue
        kind, rest = unknown
        if kind == "hello":
            control.send(me.address)
        elif kind == "echo":
            control.send(True)
            for _ in range(rest[0]):
                notification = me.notification(PATIENCE)
                notification.peer.notify(notification.payload)
        elif kind == "quit":
            control.send(True)
            os._exit(0)


@contextlib.contextmanager
def initiate(case, control):
    me = agent("initiator", case)
    region, memory = region_of(me, case)
    peer = me.connect(control.ask("hello"))
    remote = peer.region("blocks", PATIENCE)
    here, there = orders(case)
    prepare = peer.prepare_read if case.op == "READ" else peer.prepare_write
    prepared = prepare(memory, remote, local_spans=(case.block, here), spans=(case.block, there))

    def once():
        begin = time.perf_counter_ns()
        prepared.post().wait()
        return time.perf_counter_ns() - begin

    yield region, once


def initiate_notification(case, control):
    me = agent("initiator", case)
    peer = me.connect(control.ask("hello"))
    control.ask("echo", workload.ROUND_TRIPS)
    times = []
    for _ in range(workload.ROUND_TRIPS):
        begin = time.perf_counter_ns()
        peer.notify(b"x" * 32)
        me.notification(PATIENCE)
        times.append(time.perf_counter_ns() - begin)
    return workload.summary(times[50:])


def initiate_start(case, control):
    """From nothing to the first byte: the agent, the peer, one transfer. Loading the library is not counted."""
    address = control.ask("hello")
    region = Region(case.block)
    begin = time.perf_counter_ns()
    me = agent("initiator", case)
    memory = me.register(region.memory)
    peer = me.connect(address)
    peer.read(memory, peer.region("blocks", PATIENCE), [(0, case.block)]).wait()
    return {"us": (time.perf_counter_ns() - begin) / 1e3}


def initiate_idle(case, control):
    me = agent("initiator", case)
    peer = me.connect(control.ask("hello"))
    peer.region("blocks", PATIENCE)
    seconds = max(case.seconds, workload.IDLE_SECONDS_MIN)
    before = workload.cpu_seconds()
    time.sleep(seconds)
    return {"cores": round((workload.cpu_seconds() - before) / seconds, 5)}


if __name__ == "__main__":
    workload.main(sys.modules[__name__])
    os._exit(0)
