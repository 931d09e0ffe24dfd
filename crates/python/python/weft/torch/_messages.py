"""Messages between two ranks of a process group, matched by source and tag.

Calls of a communicator run one after the other, and messages must not: `irecv` before `isend` on both sides is ordinary. So they go by the
agent's notifications, small ones within, large ones read by the receiver from where they lie.
"""

import ctypes
import hashlib
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft

# What it is, the group, the rank that sends, the tag, a number for the answer, and how many bytes.
_HEAD = struct.Struct("<B16sIqQQ")
_WHOLE, _OFFER, _TAKEN = range(3)
# Larger messages are read from where they lie.
_SMALL = 2048
# How often a wait looks whether the other rank still lives.
_LOOK = 0.1


class Message(c10d.Work):
    """A message under way."""

    def __init__(self, box: "Box", tensor: Tensor, other: int | None, tag: int, what: str, limit: float, after=None):
        super().__init__()
        self.box, self.tensor, self.other, self.tag, self.after = box, tensor, other, tag, after
        self.memory: weft.Memory | None = None
        self.source: int | None = None
        self._what = what
        self._until = time.monotonic() + limit
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        self._lock = threading.Lock()

    def end(self, error: Exception | None = None) -> None:
        if error is None and self.after is not None:
            try:
                self.after()
            except Exception as failure:
                error = failure
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        until = self._until
        if timeout:
            until = min(until, time.monotonic() + timeout.total_seconds())
        self.box.room.check_process()
        while not self._ended.wait(min(_LOOK, max(0.0, until - time.monotonic()))):
            self.box.check(self.other, self._what)
            if time.monotonic() >= until:
                raise dist.DistBackendError(f"timed out waiting for {self._what}")
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return [self.tensor]

    def source_rank(self) -> int:
        return -1 if self.source is None else self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        self.box.room.check_process()
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if not self._ended.is_set():
                    return self._future
            else:
                return self._future
        self._settle(self._future)
        return self._future

    def _settle(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result([self.tensor])
        else:
            future.set_exception(self._error)


class Box:
    """The messages of one group."""

    def __init__(self, room: "Mailroom", name: str, rank: int, agents: Sequence[str]) -> None:
        self.room = room
        self.key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        self.rank = rank
        self._agents = list(agents)
        self._peers: dict[int, weft.Peer] = {}
        # Messages that nobody has asked for yet, and receives that nothing has come for yet.
        self.unexpected: list[tuple[int, int, Callable[[Message], None], int]] = []
        self.wanted: list[Message] = []

    def send(self, tensor: Tensor, to: int, tag: int, limit: float) -> Message:
        message = Message(self, tensor, to, tag, f"rank {to} to receive what rank {self.rank} sends", limit)
        self.room.send(self, message)
        return message

    def receive(self, tensor: Tensor, source: int | None, tag: int, limit: float, after) -> Message:
        whom = "any rank" if source is None else f"rank {source}"
        message = Message(self, tensor, source, tag, f"{whom} to send to rank {self.rank}", limit, after)
        self.room.receive(self, message)
        return message

    def peer(self, rank: int) -> weft.Peer:
        peer = self._peers.get(rank)
        if peer is None:
            found = (peer for peer in self.room.agent.peers if peer.name == self._agents[rank])
            peer = next(found, None)
            if peer is None:
                raise dist.DistBackendError(f"rank {rank} is gone")
            self._peers[rank] = peer
        return peer

    def check(self, rank: int | None, what: str) -> None:
        self.room.check_process()
        if rank is not None and rank != self.rank and not self.peer(rank).connected:
            raise dist.DistBackendError(f"rank {rank} was lost while waiting for {what}")

    def close(self) -> None:
        if not self.room.is_here():
            return
        self.room.forget(self)
        for message in self.wanted:
            message.end(dist.DistBackendError("the process group has been destroyed"))


class Threads:
    """Threads that end once the agent is closed, and are waited for then.

    One that is still there when the interpreter ends is ended in the middle of whatever it does, and the process with it.
    """

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(self, do: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                do(*arguments)
            finally:
                self._running.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="weft-torch", daemon=True)
        self._running.add(thread)
        thread.start()
        return thread

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in list(self._running):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


class Mailroom:
    """Sorts what comes to an agent by group, source and tag."""

    def __init__(self, agent: weft.Agent) -> None:
        self.agent = agent
        self._process = os.getpid()
        self._boxes: dict[bytes, Box] = {}
        # What comes for groups that this rank has not joined yet.
        self._early: list[tuple[weft.Peer, bytes]] = []
        self._offers: dict[int, Message] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self.threads = Threads()

    def is_here(self) -> bool:
        """Whether this is the process that made it, and not a forked child, which has none of its threads and perhaps a lock that nobody gives back."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        if not self.is_here():
            raise weft.Forked("this process group was made before a fork, and belongs to the process that made it")

    def box(self, name: str, rank: int, agents: Sequence[str]) -> Box:
        box = Box(self, name, rank, agents)
        with self._lock:
            self._boxes[box.key] = box
            early, self._early = self._early, []
        for peer, payload in early:
            self._sort(peer, payload)
        return box

    def forget(self, box: Box) -> None:
        with self._lock:
            self._boxes.pop(box.key, None)

    def send(self, box: Box, message: Message) -> None:
        self._listen()
        tensor, to = message.tensor, message.other
        size = tensor.nbytes
        if to == box.rank:
            raise ValueError("a rank cannot send to itself")
        peer = box.peer(to)
        number = next(self._numbers)
        if size <= _SMALL:
            payload = ctypes.string_at(tensor.data_ptr(), size) if size else b""
            peer.notify(_HEAD.pack(_WHOLE, box.key, box.rank, message.tag, number, size) + payload)
            message.end()
            return
        agent = self.agent
        message.memory = agent.register(_bytes(tensor), writable=False)
        with self._lock:
            self._offers[number] = message
        agent.publish(f"message-{number}", message.memory)
        peer.notify(_HEAD.pack(_OFFER, box.key, box.rank, message.tag, number, size))

    def receive(self, box: Box, message: Message) -> None:
        self._listen()
        with self._lock:
            for at, (source, tag, deliver, _) in enumerate(box.unexpected):
                if tag == message.tag and message.other in (None, source):
                    del box.unexpected[at]
                    break
            else:
                box.wanted.append(message)
                return
        message.source = source
        deliver(message)

    def _listen(self) -> None:
        self.check_process()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = self.threads.start(_listen, weakref.ref(self))

    def _sort(self, peer: weft.Peer, payload: bytes) -> None:
        kind, key, source, tag, number, size = _HEAD.unpack_from(payload)
        if kind == _TAKEN:
            with self._lock:
                message = self._offers.pop(number, None)
            if message is not None:
                _let_go(self.agent, number, message)
                message.end()
            return
        if kind == _WHOLE:
            content = payload[_HEAD.size :]

            def deliver(message: Message) -> None:
                if _fits(message, size):
                    ctypes.memmove(message.tensor.data_ptr(), content, size)
                    message.end()
        else:

            def deliver(message: Message) -> None:
                if _fits(message, size):
                    self.threads.start(self._read, peer, message, key, number)

        with self._lock:
            box = self._boxes.get(key)
            if box is None:
                self._early.append((peer, payload))
                return
            for at, message in enumerate(box.wanted):
                if message.tag == tag and message.other in (None, source):
                    del box.wanted[at]
                    break
            else:
                box.unexpected.append((source, tag, deliver, size))
                return
        message.source = source
        deliver(message)

    def _read(self, peer: weft.Peer, message: Message, key: bytes, number: int) -> None:
        try:
            memory = self.agent.register(_bytes(message.tensor))
            taken = _HEAD.pack(_TAKEN, key, message.box.rank, message.tag, number, 0)
            peer.read(memory, peer.region(f"message-{number}"), notify=taken).wait()
            memory.release()
            message.end()
        except Exception as error:
            message.end(dist.DistBackendError(f"receiving from rank {message.source} failed: {error}"))


def _listen(room: "weakref.ref[Mailroom]") -> None:
    while (here := room()) is not None:
        agent = here.agent
        # A room that only this thread remembers is of no use to anybody.
        del here
        try:
            told = agent.notification(timeout=1.0)
        except weft.Stopped:
            return
        here = room()
        if told is not None and here is not None:
            try:
                here._sort(told.peer, told.payload)
            except struct.error:
                pass  # Not one of ours.


def _let_go(agent: weft.Agent, number: int, message: Message) -> None:
    agent.withdraw(f"message-{number}")
    message.memory.release()
    message.memory = None


def _fits(message: Message, size: int) -> bool:
    if size == message.tensor.nbytes:
        return True
    given, source = message.tensor.nbytes, message.source
    message.end(dist.DistBackendError(f"rank {source} sent {size} bytes to be received into {given}"))
    return False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
