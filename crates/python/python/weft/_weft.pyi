"""The compiled part of the package."""

from collections.abc import Awaitable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

__version__: str

class _DlPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Pairs of an offset and a length, or a block size and the indices of blocks. `None` is everything, from the start.
_Spans: TypeAlias = Iterable[Sequence[int]] | tuple[int, Iterable[int]] | None
# `bytearray`, `mmap`, `memoryview`, NumPy arrays, torch tensors in host memory, …
_Buffer: TypeAlias = Any | _DlPack

class Agent:
    """Registers memory, publishes it, connects to other agents and moves bytes.

    Keywords are settings, with an underscore for the dot: `tcp_connections=2`. One that does not exist raises
    `SettingsError`, which names the nearest one that does.
    """

    def __new__(
        cls, name: str, *, listen: str | None = None, secret: str | None = None, **settings: object
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str:
        """Where other agents reach this one, as one string for `connect`."""
    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected now, whoever came to whom."""
    @property
    def metrics(self) -> str:
        """The metrics as Prometheus reads them; empty unless `metrics_listen` is set."""
    def allocate(self, nbytes: int) -> Memory:
        """Memory that Weft allocates: zeroed, and mapped by peers on this host instead of copied through the kernel."""
    def register(self, object: _Buffer, writable: bool = True) -> Memory:
        """Registers an object's memory without copying it. The object is kept alive."""
    def publish(self, name: str, memory: Memory, read: bool = True, write: bool = False) -> None:
        """Lets peers reach memory under a name."""
    def withdraw(self, name: str) -> None:
        """Takes a published name back. Peers are refused from now on."""
    def connect(self, address: str, timeout: float | None = None) -> Peer:
        """Connects to an agent by its `address`, or by `host:port`."""
    def connect_named(self, name: str, timeout: float = 30.0) -> Peer:
        """Connects to an agent by its name, looked up through the rendezvous."""
    def connect_async(self, address: str, timeout: float | None = None) -> Awaitable[Peer]: ...
    def notification(self, timeout: float | None = None) -> Notification | None:
        """The next notification, from whichever peer; `None` where none comes in time."""
    def notification_async(self) -> Awaitable[Notification]: ...
    def close(self) -> None:
        """Stops the agent. Transfers under way end with an error."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Memory:
    """Memory that an agent has registered. It has the buffer protocol: `numpy.frombuffer(memory)`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def mappable(self) -> bool:
        """Whether peers on this host can map it instead of copying through the kernel."""
    @property
    def writable(self) -> bool: ...
    def release(self, timeout: float = 10.0) -> None:
        """Withdraws and releases the memory; afterwards no peer touches it."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Peer:
    """A connected agent: one session with one life of it. When that ends, connect again."""

    @property
    def name(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def transports(self) -> list[str]:
        """The transports that carry transfers to this peer now."""
    @property
    def region_names(self) -> list[str]: ...
    def region(self, name: str, timeout: float = 10.0) -> Region:
        """A region by the name that the peer publishes it under, waiting for that if need be."""
    def region_async(self, name: str, timeout: float = 10.0) -> Awaitable[Region]: ...
    def read(
        self,
        local: Memory,
        remote: Region,
        spans: _Spans = None,
        *,
        local_spans: _Spans = None,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Transfer:
        """From the remote region into local memory.

        `spans` says which bytes of the remote region, `local_spans` which of the local memory; what is said of one side
        holds for both unless the other is described too. `notify` is delivered to the peer after the bytes are in place.
        """
    def prepare_read(
        self,
        local: Memory,
        remote: Region,
        spans: _Spans = None,
        *,
        local_spans: _Spans = None,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Prepared:
        """The same as `read`, checked now and posted later, as often as wanted."""
    def write(
        self,
        local: Memory,
        remote: Region,
        spans: _Spans = None,
        *,
        local_spans: _Spans = None,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Transfer:
        """From local memory into the remote region."""
    def prepare_write(
        self,
        local: Memory,
        remote: Region,
        spans: _Spans = None,
        *,
        local_spans: _Spans = None,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Prepared:
        """The same as `write`, checked now and posted later, as often as wanted."""
    def notify(self, payload: bytes) -> None:
        """Sends a notification, which arrives once."""
    def borrow(self, remote: Region, lease: float = 60.0) -> Borrowed:
        """Maps a region of a peer on this host, for `lease` seconds. Nothing is copied."""
    def disconnect(self) -> None: ...

class Region:
    """A region that a peer has published."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

class Prepared:
    """A checked transfer that can be posted again and again."""

    @property
    def nbytes(self) -> int: ...
    def post(self) -> Transfer: ...

class Transfer:
    """A transfer under way. It goes on by itself; dropping it does not end it.

    `await transfer` gives its summary. Cancelling whoever awaits it does not cancel the transfer: `cancel` does.
    """

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
    def wait(self, timeout: float | None = None) -> Summary:
        """Waits for the end, which comes at the deadline at the latest; with `timeout`, no longer than that."""
    def poll(self) -> Summary | None:
        """The summary, or `None` while it is under way. Raises if the transfer failed."""
    def cancel(self) -> None:
        """Ends it early. Its memory is free for other use once `wait` returns."""
    def __await__(self) -> Generator[Any, None, Summary]: ...

class Summary:
    """How a transfer that succeeded went."""

    @property
    def bytes(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def transport(self) -> str: ...

class Borrowed:
    """A peer's region, mapped read-only: `numpy.frombuffer(borrowed)`. The lease is given back with the last reference."""

    @property
    def nbytes(self) -> int: ...
    @property
    def held(self) -> bool:
        """Whether the lease still holds."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Notification:
    """What a peer has told this agent."""

    @property
    def peer(self) -> Peer: ...
    @property
    def payload(self) -> bytes: ...

class Error(Exception):
    """What any call of Weft can raise."""

class TransferError(Error):
    """A transfer ended without success. The ranges are (leg, first byte, one past the last byte)."""

    peer: str
    transport: str
    cause: str
    bytes_done: int
    bytes_total: int
    done: list[tuple[int, int, int]]
    undone: list[tuple[int, int, int]]

class Expired(TransferError): ...
class Cancelled(TransferError): ...
class Refused(TransferError): ...
class PathLost(TransferError): ...
class ChecksumMismatch(TransferError): ...

class PeerLost(Error):
    """The session is over: connect again."""

    peer: str
    cause: str

class ConnectError(Error): ...
class TimedOut(Error): ...
class Full(Error): ...
class InvalidCall(Error): ...
class NotBorrowable(Error): ...
class LeaseEnded(Error): ...
class StillInUse(Error): ...
class SettingsError(Error): ...
class RendezvousError(Error): ...
class SystemError(Error): ...
class Stopped(Error): ...
