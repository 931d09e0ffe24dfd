"""Mooncake's side: the transfer engine over TCP, through its Python interface."""

import contextlib
import os
import sys
import time

import workload
from workload import Region, orders, serve

HOST = "127.0.0.1"


def engine():
    os.environ["MC_TCP_BIND_ADDRESS"] = HOST
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    os.environ["GLOG_minloglevel"] = "3"
    from mooncake.engine import TransferEngine

    me = TransferEngine()
    if me.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine did not start")
    return me


def registered(me, case):
    region = Region(case.block * case.batch)
    if me.register_memory(region.address, region.nbytes):
        raise RuntimeError("the memory was not registered")
    return region


def target(case, control):
    me = engine()
    region = registered(me, case)
    while True:
        unknown = serve(region, case, control)
        if unknown is None:
            continue
        kind, _ = unknown
        if kind == "hello":
            control.send((f"{HOST}:{me.get_rpc_port()}", region.address))
        elif kind == "quit":
            control.send(True)
            os._exit(0)


@contextlib.contextmanager
def initiate(case, control):
    me = engine()
    region = registered(me, case)
    peer, address = control.ask("hello")
    local, remote = orders(case)
    here = [region.address + int(index) * case.block for index in local]
    there = [address + int(index) * case.block for index in remote]
    lengths = [case.block] * case.batch
    move = me.batch_transfer_sync_read if case.op == "READ" else me.batch_transfer_sync_write

    def once():
        begin = time.perf_counter_ns()
        if move(peer, here, there, lengths):
            raise RuntimeError("the transfer failed")
        return time.perf_counter_ns() - begin

    yield region, once


if __name__ == "__main__":
    workload.main(sys.modules[__name__])
    os._exit(0)
