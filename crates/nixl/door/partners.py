"""Two processes with a NIXL agent each, for the tests behind NIXL's door: this one, and a target that does what it is told.

Where `WEFT_NIXL` says so, the agents are those of `weft.nixl`, and NIXL need not be there.
"""

import ctypes
import multiprocessing
import os
import signal
import time

import numpy as np

LONG = 60.0


def environment(backend, transport):
    """Has both processes use one transport; UCX by its own variables, Weft by its settings."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    if transport == "tcp":
        os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    if backend == "WEFT" and transport is not None:
        os.environ["WEFT_TRANSPORTS"] = transport


def agent(name, backend, parameters):
    if os.environ.get("WEFT_NIXL"):
        import weft.nixl

        weft.nixl.install_where_asked()
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(backends=[]))
    made.create_backend(backend, parameters if backend == "WEFT" else {})
    return made


class Region:
    """Bytes that are registered."""

    def __init__(self, of, nbytes, fill=0):
        self.agent = of
        self.bytes = np.full(nbytes, fill, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.register()

    def register(self):
        self.registered = self.agent.register_memory(self.agent.get_reg_descs([(self.address, self.bytes.nbytes, 0, "")], "DRAM"))

    def deregister(self):
        self.agent.deregister_memory(self.registered)

    def descriptors(self, spans=None):
        spans = spans or [(0, self.bytes.nbytes)]
        return self.agent.get_xfer_descs([(self.address + begin, length, 0) for begin, length in spans], "DRAM")


def target(pipe, backend, transport, parameters, nbytes):
    environment(backend, transport)
    me = agent("target", backend, parameters)
    region = Region(me, nbytes)
    others = []
    while True:
        what, *rest = pipe.recv()
        answer = None
        if what == "hello":
            answer = (me.get_agent_metadata(), region.address)
        elif what == "fill":
            region.bytes[:] = np.arange(nbytes, dtype=np.uint32).astype(np.uint8) if rest[0] is None else rest[0]
        elif what == "bytes":
            answer = region.bytes.tobytes()
        elif what == "reuse":
            # The same bytes for something else, as a memory pool would have it.
            region.deregister()
            region.bytes[:] = rest[0]
            others.append(Region(me, 4096))
            region.register()
        elif what == "notifications":
            answer, end = {}, time.time() + rest[1]
            while sum(map(len, answer.values())) < rest[0] and time.time() < end:
                for sender, messages in me.get_new_notifs().items():
                    answer.setdefault(sender, []).extend(messages)
                time.sleep(0.001)
        elif what == "know":
            answer = me.add_remote_agent(rest[0])
        elif what == "notify":
            me.send_notif(*rest)
        elif what == "quit":
            pipe.send(None)
            os._exit(0)
        pipe.send(answer)


class Pair:
    """Both of them. A target that is frozen outlives whoever started it, so all are to be ended."""

    made = []

    def __init__(self, backend, transport=None, nbytes=1 << 20, **parameters):
        environment(backend, transport)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, backend, transport, parameters, nbytes)
        self.process = context.Process(target=target, args=arguments, daemon=True)
        self.process.start()
        Pair.made.append(self)
        theirs.close()
        self.backend = backend
        self.agent = agent("initiator", backend, parameters)
        self.region = Region(self.agent, nbytes)
        metadata, self.address = self.ask("hello")
        self.peer = self.agent.add_remote_agent(metadata).decode()

    def ask(self, *question):
        self.pipe.send(question)
        if not self.pipe.poll(LONG):
            raise TimeoutError(f"the target does not answer {question}")
        return self.pipe.recv()

    def theirs(self, spans=None):
        spans = spans or [(0, self.region.bytes.nbytes)]
        return self.agent.get_xfer_descs([(self.address + begin, length, 0) for begin, length in spans], "DRAM")

    def describe(self, op, message=b"", spans=None):
        return self.agent.initialize_xfer(op, self.region.descriptors(spans), self.theirs(spans), self.peer, message)

    def finish(self, handle, within=LONG):
        """How it ended, and after how long; PROC where it has not."""
        begin = time.monotonic()
        try:
            state = self.agent.transfer(handle)
            while state == "PROC" and time.monotonic() - begin < within:
                state = self.agent.check_xfer_state(handle)
        except Exception as error:
            state = type(error).__name__
        return state, time.monotonic() - begin

    def freeze(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        with open(f"/proc/{self.process.pid}/stat") as stat:
            while stat.read().rpartition(")")[2].split()[0] != "T":
                stat.seek(0)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def look(self):
        """The target's bytes as they are, without its help."""
        libc = ctypes.CDLL(None, use_errno=True)
        found = np.empty_like(self.region.bytes)

        class Span(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

        here = Span(found.ctypes.data, found.nbytes)
        there = Span(self.address, found.nbytes)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        got = libc.process_vm_readv(self.process.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != found.nbytes:
            raise OSError(ctypes.get_errno(), "the target's memory cannot be looked at")
        return found

    @staticmethod
    def end_all():
        for pair in Pair.made:
            if pair.process.is_alive():
                pair.kill()
