"""The compiled part of the package."""

from collections.abc import Awaitable, Coroutine, Generator, Iterable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

__version__: str
# The numbers that stand for kinds, datatypes and operators in `Communicator._raw`, by their names.
_NUMBERS: dict[str, dict[str, int]]

def command(arguments: Sequence[str], again: Sequence[str]) -> int:
    """Does what a command line of `weft` asks for and returns the exit code; `again` starts the command once more."""

_Said = TypeVar("_Said")

class _DlPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Array(Protocol):
    """A NumPy array of integers, or anything else with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

# Pairs of an offset and a length, also as the rows of an array; or a block size and the indices of blocks, for which an array
# is the fast way; or what `Pages.pair` computed. `None` is everything, from the start.
_Spans: TypeAlias = Spans | Iterable[Sequence[int]] | _Array | tuple[int, Iterable[int] | _Array] | None
# `bytearray`, `mmap`, `memoryview`, NumPy arrays, torch tensors in host memory, …
_Buffer: TypeAlias = Any | _DlPack

_Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]

class Agent:
    """Registers memory, publishes it, connects to other agents and moves bytes.

    Keywords are settings, with an underscore for the dot: `tcp_connections=2`. One that does not exist raises
    `SettingsError`, which names the nearest one that does.

    A timeout, in seconds, that is not given is the setting `deadline`.

    It belongs to the process that made it. In a forked child (`multiprocessing` with the start method `fork`, `os.fork`) it, and whatever
    came from it, raises `Forked`; closing it there, or letting go of it, does nothing.
    """

    def __new__(
        cls, name: str, *, listen: str | None = None, secret: str | None = None, **settings: object
    ) -> Self: ...
    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int:
        """Which life of the agent this is: a later one of the same name has a larger number."""
    @property
    def settings(self) -> dict[str, str]:
        """The settings in force, as text, by their keys. A secret stays hidden."""
    @property
    def address(self) -> str:
        """Where other agents reach this one, as one string for `connect`."""
    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected now, whoever came to whom."""
    @property
    def metrics(self) -> str:
        """The metrics as Prometheus reads them; empty unless `metrics_listen` is set."""
    def allocate(self, nbytes: int, *, device: int | None = None) -> Memory:
        """Memory that Weft allocates: zeroed, and mapped by peers on this host instead of copied through the kernel. With `device`, of the GPU of that
        number, and not zeroed."""
    def register(self, object: _Buffer, writable: bool = True) -> Memory:
        """Registers the memory of anything with the buffer protocol, DLPack or `__cuda_array_interface__`, of the host or of a GPU, without copying it. The
        object is kept alive."""
    def copy(
        self,
        source: Memory,
        target: Memory,
        *,
        source_spans: _Spans = None,
        target_spans: _Spans = None,
        deadline: float | None = None,
        checksum: bool | None = None,
        stream: Any = None,
        commit: bool = False,
    ) -> Transfer:
        """Copies between two places of this agent, memory of the host or a GPU, files or objects: an ordinary transfer, on a `stream` after what is there now. With
        `commit`, what is written lasts when it has ended: the file has its name, and the object is there."""
    def open_file(
        self,
        path: str | PathLike[str],
        size: int | None = None,
        *,
        write: bool = True,
        direct: bool | None = None,
        sparse: bool = False,
        replace: bool = False,
        staged: bool = False,
    ) -> Memory:
        """Opens a file or a block device as a place: `copy` moves bytes between it and memory, and nobody else waits meanwhile. With `size`, a file that is not
        there, or is shorter, is made that long; `direct` says whether it goes past the page cache, by itself where the file system can. With `replace` a new
        file is written, which takes the name when a copy with `commit` has ended."""
    def open_object(
        self,
        url: str,
        size: int | None = None,
        *,
        write: bool = True,
        part_bytes: int | None = None,
        endpoint: str | None = None,
        region: str | None = None,
    ) -> Memory:
        """Opens an object, `s3://BUCKET/NAME`, as a place: `copy` moves bytes between it and memory. Without `size` the server is asked how large it is. What is
        copied to it becomes the object by a copy with `commit`, as a whole. Who serves the bucket say `endpoint` and `region`, else the settings `object_endpoint` and
        `object_region`, else the environment (`AWS_…`), which has the credentials too."""
    def publish(self, name: str, memory: Memory, read: bool = True, write: bool = False) -> None:
        """Lets peers reach memory under a name, until it is withdrawn or released or the agent is closed. Nobody has to hold the memory
        meanwhile."""
    def withdraw(self, name: str) -> None:
        """Takes a published name back. Peers are refused from now on."""
    def connect(self, address: str, timeout: float | None = None) -> Peer:
        """Connects to an agent by its `address`, or by `host:port`."""
    def connect_named(self, name: str, timeout: float | None = None) -> Peer:
        """Connects to an agent by its name, looked up through the rendezvous."""
    def connect_async(self, address: str, timeout: float | None = None) -> Coroutine[Any, Any, Peer]:
        """The same as `connect`, for `await`. Cancelling it gives the attempt up."""
    def connect_named_async(self, name: str, timeout: float | None = None) -> Coroutine[Any, Any, Peer]:
        """The same as `connect_named`, for `await`. Cancelling it gives the attempt up."""
    def notification(self, timeout: float | None = None) -> Notification | None:
        """The next notification, from whichever peer; `None` where none comes in time, which without a timeout is never."""
    def notification_async(self) -> Awaitable[Notification]:
        """The next notification, for `await`. A wait that is cancelled leaves it to the next one; closing the agent ends the
        wait with `Stopped`."""
    def close(self) -> None:
        """Stops the agent, whoever still holds something of it. Transfers under way end with an error, its communicators end and the other
        ranks are told, and what it has published is withdrawn."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Memory:
    """Memory that an agent has registered. It has the buffer protocol: `numpy.frombuffer(memory)`.

    The bytes of memory that Weft allocated are shared with forked children: what a child writes, the parent and its peers see.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def mappable(self) -> bool:
        """Whether peers on this host can map it instead of copying through the kernel."""
    @property
    def writable(self) -> bool: ...
    @property
    def kind(self) -> Literal["host", "gpu", "file", "object"]:
        """What it is."""
    @property
    def device(self) -> int | None:
        """The GPU whose memory it is, by its number; `None` for other memory."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How other libraries find memory of a GPU: `torch.as_tensor(memory, device="cuda")`."""
    def read_word(self, offset: int) -> int:
        """What the word at `offset` holds: eight bytes, little-endian, at a multiple of eight."""
    def fetch_add(self, offset: int, value: int) -> int:
        """Adds to the word at `offset`, wrapping around, and gives what it held. Atomic with the operations of all peers."""
    def compare_swap(self, offset: int, expected: int, new: int) -> int:
        """Stores `new` in the word at `offset` if it is `expected`, and gives what it held. Atomic likewise."""
    def release(self, timeout: float | None = None) -> None:
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
    def wait_for_transport(self, transport: str, timeout: float | None = None) -> None:
        """Waits until transfers can go over `transport`."""
    @property
    def region_names(self) -> list[str]:
        """The names that the peer has published so far."""
    def region(self, name: str, timeout: float | None = None) -> Region:
        """A region by the name that the peer publishes it under, waiting for that if need be."""
    def region_async(self, name: str, timeout: float | None = None) -> Coroutine[Any, Any, Region]:
        """The same as `region`, for `await`."""
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
        stream: Any = None,
    ) -> Transfer:
        """From the remote region into local memory.

        `spans` says which bytes of the remote region, `local_spans` which of the local memory; what is said of one side
        holds for both unless the other is described too. Where nothing is said of either, all of both is meant, and sizes
        that differ raise `InvalidCall`. `notify` is delivered to the peer after the bytes are in place.
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
        stream: Any = None,
    ) -> Transfer:
        """From local memory into the remote region. Otherwise as `read`.

        With a `stream` of the GPU that the local memory is of, it begins after what is on the stream now."""
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
    def transfer(
        self,
        direction: Literal["read", "write"],
        legs: Iterable[tuple[Memory, _Spans, Region, _Spans]],
        *,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Transfer:
        """A transfer of several legs, one region a layer, say: each a memory, its spans, a region, and its spans."""
    def prepare_transfer(
        self,
        direction: Literal["read", "write"],
        legs: Iterable[tuple[Memory, _Spans, Region, _Spans]],
        *,
        deadline: float | None = None,
        checksum: bool | None = None,
        notify: bytes | None = None,
    ) -> Prepared:
        """The same as `transfer`, checked now and posted later, as often as wanted."""
    def fetch_add(self, remote: Region, offset: int, value: int, *, deadline: float | None = None) -> int:
        """Adds to the word at `offset` of the remote region, wrapping around, and gives what it held.

        A word is eight bytes, little-endian, at a multiple of eight, in a region published with `read=True, write=True`. The
        operation is atomic with all others on the word, whatever way they come, and with the owner's; not with transfers.

        It is carried out once or not at all. `OutcomeUnknown` says that it was sent and that nobody knows which.
        """
    def fetch_add_async(
        self, remote: Region, offset: int, value: int, *, deadline: float | None = None
    ) -> Awaitable[int]:
        """The same, for `await`. It is posted by the call; cancelling the wait does not take it back."""
    def compare_swap(
        self, remote: Region, offset: int, expected: int, new: int, *, deadline: float | None = None
    ) -> int:
        """Stores `new` in the word at `offset` of the remote region if it is `expected`, and gives what it held: `expected`
        means that it was stored. Otherwise as `fetch_add`."""
    def compare_swap_async(
        self, remote: Region, offset: int, expected: int, new: int, *, deadline: float | None = None
    ) -> Awaitable[int]:
        """The same, for `await`."""
    def notify(self, payload: bytes) -> None:
        """Sends a notification, which arrives once."""
    def borrow(self, remote: Region, lease: float = 60.0) -> Borrowed:
        """Maps a region of a peer on this host, for `lease` seconds. Nothing is copied."""
    def borrow_async(self, remote: Region, lease: float = 60.0) -> Coroutine[Any, Any, Borrowed]:
        """The same as `borrow`, for `await`."""
    def disconnect(self) -> None:
        """Ends the session. Transfers under way end with an error."""

class Region:
    """A region that a peer has published."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readable(self) -> bool:
        """Whether this agent may read it."""
    @property
    def writable(self) -> bool:
        """Whether this agent may write to it."""
    def __len__(self) -> int: ...

class Spans:
    """Which bytes of a region, in a sequence. `len` is how many pieces they are in."""

    @property
    def nbytes(self) -> int: ...
    @property
    def runs(self) -> int:
        """Pieces at a regular stride count as one here, and travel as one."""
    def __len__(self) -> int: ...

class Seal:
    """Closes words that strangers carry, and opens those that others with the same secret have closed under the same label.

    Keywords are settings, as those of `Agent`; what counts of them is the secret. What cannot be believed raises `NotBelieved`.
    """

    def __new__(cls, label: str, **settings: object) -> Self: ...
    def close(self, words: bytes, about: bytes, seconds: float) -> bytes:
        """Seals words about something, which whoever opens them has to name, for so many seconds of the wall clock."""
    def open(self, sealed: bytes, about: bytes) -> bytes:
        """The words, where they are to be believed."""

class Space:
    """What blocks of one model and one tenant are called by.

    Keywords are the fields of a namespace, all of which must be given, `none` where there is nothing to say: model, revision, tokenizer, dtype,
    quantisation, scales, layout, block_tokens, lora, positions, tenant.
    """

    def __new__(cls, **fields: object) -> Self: ...
    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Ids of the blocks of a prompt, one for each that is full."""
    def key(self, key: bytes) -> bytes:
        """The id of the block that an engine calls by a key of its own."""

class Store:
    """Blocks of KV caches, in memory and in files of a directory, with their checksums.

    `parts` are the bytes of each named part of a block, or a pair of bytes and of how many trailing blocks it must be there. `memory` is the first tier,
    in bytes; `directory` and `capacity` are a tier of files, which gets what is put at once (`write="through"`) or what leaves memory (`"back"`), and
    whose answers outlast the process or, with `durability="power"`, the power. `events` is how many events wait to be taken, `queue` how many bytes of puts
    are under way to files at most. With `peers`, the addresses of agents that have stores of the same parts, or with `meet`, at the rendezvous of the agent's
    settings, what is not here is read from whoever has it. See docs/store.md.
    """

    def __new__(
        cls,
        agent: Agent,
        parts: dict[str, int | tuple[int, int]],
        *,
        memory: int | None = None,
        directory: str | PathLike[str] | None = None,
        capacity: int | None = None,
        extent: int | None = None,
        durability: str = "process",
        write: str = "through",
        policy: str = "adaptive",
        deadline: float | None = None,
        promote: bool = True,
        shares: dict[str, float] | None = None,
        events: int = 0,
        queue: int | None = None,
        peers: Sequence[str] | None = None,
        meet: bool = False,
    ) -> Self: ...
    def put(
        self,
        space: Space,
        memory: Memory,
        ids: Sequence[bytes],
        *,
        offsets: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
        parent: bytes | None = None,
        chained: bool = True,
    ) -> Answer[list[int]]:
        """Puts blocks from memory, which must stay as it is until the answer: for each, in which tiers it is, as bits, and 0 for nowhere. Blocks lie side by
        side unless `offsets` say where; each follows the one before it, and the first `parent`, unless they are not `chained`."""
    def get(self, memory: Memory, ids: Sequence[bytes], *, offsets: Sequence[int] | None = None) -> Answer[list[int]]:
        """Reads blocks into memory: for each how many bytes it has, and 0 for a miss, which leaves anything in its place."""
    def match_prefix(self, ids: Sequence[bytes], *, over: bool = False) -> int:
        """How many blocks of a chain, from the first on, are a hit. They count as used; `over` says that their session will not come back."""
    def hold(self, ids: Sequence[bytes]) -> Held:
        """Keeps the leading blocks of a chain that are there from leaving, until it is released, or not there any more."""
    def evict(self, ids: Sequence[bytes]) -> int:
        """Removes blocks, unless they are held or others follow them; says how many are nowhere any more."""
    def purge(self, tenant: str) -> Answer[tuple[int, int]]:
        """Removes all that a tenant has, for good: how many records were erased, and how many blocks stay because they are held."""
    def prefetch(self, ids: Sequence[bytes]) -> int:
        """Begins to read blocks from files into memory; says of how many."""
    def take_events(self, most: int = 4096) -> tuple[list[tuple[bytes, bool, int, str]], int]:
        """Which blocks have come and gone since the last time, evictions included: id, whether it is there now, the tier's number, and `"memory"` or `"files"`; and
        how many events were lost before these. Without `events` there are none."""
    def find(self, ids: Sequence[bytes]) -> Answer[list[tuple[int, list[str]]]]:
        """Who has blocks: for each in which tiers it is here, as bits, and the names of the agents that have it elsewhere."""
    def stat(self) -> dict[str, Any]:
        """What it holds and what has happened, as plain values."""
    def close(self) -> None:
        """Waits for what is under way and closes it."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

class Porter:
    """Carries batches of blocks between an engine's memory and a store, on a thread of its own: nothing here waits but `drain` and `close`.

    Blocks are called by the engine's keys, errands by numbers of the caller's. `queue` bounds the bytes that wait, `under_way` those under way; an errand that does not fit
    ends at once with nothing done. With `events` it remembers what blocks are called by.
    """

    def __new__(cls, store: Store, space: Space, *, queue: int | None = None, under_way: int | None = None, events: bool = False) -> Self: ...
    def put(self, job: int, memory: Memory, keys: Sequence[bytes], offsets: Sequence[int], *, after: bytes | None = None) -> None:
        """Puts blocks that lie at these offsets, one after the other in a prompt; the first follows `after`, where that is given."""
    def get(self, job: int, memory: Memory, keys: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Reads blocks to these offsets. Where one is not done, anything lies there."""
    def put_each(self, job: int, memories: Sequence[Memory], keys: Sequence[bytes]) -> None:
        """The same as `put`, each block from the beginning of a memory of its own."""
    def get_each(self, job: int, memories: Sequence[Memory], keys: Sequence[bytes]) -> None:
        """The same as `get`, each block to the beginning of a memory of its own."""
    def find(self, job: int, keys: Sequence[bytes]) -> None:
        """Asks which of these are there."""
    def evict(self, job: int, keys: Sequence[bytes]) -> None:
        """Removes these, unless they are held or others follow them."""
    def used(self, keys: Sequence[bytes], *, over: bool = False) -> None:
        """A request has gone through these, from its head on; `over` says that its session will not come back. Nothing is told of it."""
    def has(self, key: bytes) -> bool:
        """Whether a block is there, by what the index says now."""
    def ended(self) -> list[tuple[int, list[bool], int, float, str | None]]:
        """What has ended since the last time: number, which blocks are where they were to be, bytes, seconds, and why not all are."""
    def events(self, most: int = 4096) -> tuple[list[tuple[bytes, bool, int, str]], int, int]:
        """What has come and gone, by key, as `Store.take_events`; how many events were lost; and how many could not be named so far, because their blocks were there
        before and have not been asked for."""
    def fileno(self) -> int:
        """A descriptor that is readable when something has ended that nobody has taken."""
    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
    @property
    def refused(self) -> int:
        """Errands that ended at once because they did not fit."""
    def drain(self, timeout: float) -> bool:
        """Waits until nothing waits and nothing is under way, at most so many seconds; says whether that came about."""
    def close(self) -> None:
        """Ends what is under way; what waits comes to nothing."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

class Line:
    """Who leaves next of blocks that an engine keeps itself, by one of the store's policies."""

    def __new__(cls, blocks: int, policy: str = "adaptive") -> Self: ...
    def insert(self, key: bytes, *, pinned: bool = False) -> None:
        """A block has come, and may leave; with `pinned` it may not yet."""
    def pin(self, key: bytes, pinned: bool) -> bool:
        """It must stay, or may leave again. `False` where it is not there, or was so already."""
    def remove(self, key: bytes) -> bool:
        """It is gone for a reason of its own. `False` where it was not there."""
    def request(self, keys: Sequence[bytes], *, over: bool = False) -> None:
        """A request has gone through these, from its head on; those that are not here are passed over."""
    def leave(self, count: int, kept: Sequence[bytes]) -> list[bytes] | None:
        """So many leave, and none of the kept; `None` where there are not as many."""
    def __len__(self) -> int: ...
    @property
    def idle(self) -> int:
        """How many may leave."""

class Held:
    """Blocks that do not leave. Use it in a `with`, or release it."""

    @property
    def count(self) -> int:
        """How many blocks of the chain are held."""
    def release(self) -> None:
        """Lets them leave again; a second time it does nothing."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

class Answer(Generic[_Said]):
    """An answer of a store that is under way: wait for it, or await it."""

    def wait(self, timeout: float | None = None) -> _Said:
        """Waits for it; with `timeout`, in seconds, no longer than that."""
    @property
    def done(self) -> bool:
        """Whether it has come."""
    def __await__(self) -> Generator[Any, None, _Said]: ...

_Lease = tuple[int, int, float]
_Origin = tuple[str, list[str], list[int], int, _Lease]

class _Desk:
    """What `weft.hand_off.Desk` stands on."""

    def __new__(cls, **settings: Any) -> Self: ...
    def lease(self, seconds: float) -> _Lease | None: ...
    def give_back(self, leased: _Lease) -> None: ...
    def write(self, said: _Origin, about: bytes) -> bytes: ...
    def open(self, ticket: bytes, about: bytes) -> _Origin: ...
    def offer(self, addresses: Sequence[str], seconds: float) -> bytes: ...
    def open_offer(self, offer: bytes, name: str, seconds: float) -> list[str]: ...

class _HandOff:
    """What `weft.hand_off.HandOff` stands on."""

    def __new__(
        cls,
        agent: Agent,
        meaning: Sequence[tuple[str, str]],
        rank: int,
        ranks: int,
        layers: Sequence[tuple[str, int, int, Pages]],
        memories: Sequence[Memory],
        deadline: float,
        lease: float,
        landing_bytes: int,
        checksum: bool,
    ) -> Self: ...
    def offer(self, name: str, blocks: Sequence[int], tokens: int, about: bytes) -> bytes: ...
    def offer_leased(self, name: str, leased: _Lease) -> None: ...
    def compute(self, name: str, blocks: Sequence[int], tokens: int, digest: bytes) -> None: ...
    # Of a GPU, what is on its streams has to be waited for before.
    def computed(self, name: str, layer: int | None, upto: int) -> None: ...
    def preempt(self, name: str, timeout: float) -> None: ...
    def stop(self, name: str) -> None: ...
    def want(self, ticket: bytes, about: bytes, readers: int) -> str: ...
    def want_from(self, said: _Origin, readers: int) -> None: ...
    def want_pushed(self, name: str, addresses: Sequence[str], readers: int) -> None: ...
    def fetch(
        self, name: str, blocks: Sequence[int], tokens: tuple[int, int], prompt_tokens: int, digest: bytes
    ) -> None: ...
    def leave(self, name: str) -> None: ...
    def event(self, timeout: float) -> tuple[str, bool, tuple[str, str] | None, int, float, list[str]] | None: ...
    def under_way(self) -> tuple[int, int, int]: ...
    def close(self) -> None: ...

class Pages:
    """One layer of a paged KV cache as one end holds it: `blocks` of `tokens`, of which this end has the `heads` from the first up to
    but not including the second, `parts` (two where K and V are apart), `unit_bytes` for one token of one head of one part, and in bytes
    where the first lies and how far apart neighbours of each kind are."""

    def __new__(
        cls,
        *,
        blocks: int,
        tokens: int,
        heads: tuple[int, int],
        parts: int,
        unit_bytes: int,
        base: int,
        part_stride: int,
        block_stride: int,
        token_stride: int,
        head_stride: int,
    ) -> Self: ...
    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int:
        """How long a region must be to hold the layer."""
    def apart(self, parts: int) -> Pages:
        """The same bytes with as many parts: of a layer whose units hold K and V one behind the other, what they are apart."""
    def pair(
        self,
        blocks: Sequence[int],
        other: Pages,
        other_blocks: Sequence[int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
    ) -> tuple[Spans, Spans]:
        """The bytes of some tokens and heads of one sequence, here and at another end, for `Peer.transfer`.

        `blocks` and `other_blocks` are the sequence's from its first token on.
        """

class Prepared:
    """A checked transfer that can be posted again and again."""

    @property
    def nbytes(self) -> int: ...
    def post(self) -> Transfer:
        """Starts the transfer."""

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
    """A peer's region, mapped read-only: `numpy.frombuffer(borrowed)`.

    The end of the `with` gives the lease back, or the last reference does. Views that are still out keep it until they go.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def held(self) -> bool:
        """Whether the lease still holds and has not been given back."""
    def release(self) -> None:
        """Gives the lease back: now, or with the last view that is still out. There are no new views from now on."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Schedule:
    """A schedule of one's own for a collective, verified. All ranks of a call must give the same."""

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Reads one such as `weft explain --render json` writes. Raises `InvalidCall` with rank, step and op where it is wrong."""
    @property
    def name(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def ranks(self) -> int: ...

class Communicator:
    """One rank of a group of processes that call the same things in the same order.

    Calls of one communicator run one after the other, in the order in which they are made. Data is anything with the buffer protocol or
    DLPack in host memory, or `Memory`; `datatype` says what its elements are where the object does not (f64, f32, f16, bf16, fp8_e4m3,
    fp8_e5m2, i8 to i64, u8 to u64). `algorithm` is the name of one, with the number of portions behind a slash where there are several
    (`ring/16`), or a `Schedule`; by default the fastest by the platform file of the setting `platform` runs. With `wait=False` a call gives a `Pending` and goes on by itself; until its end nobody may touch its data.

    A call that fails raises `CollectiveError` on every rank, in that call or in its next one (`calls_ended` counts those that ended well); the group is
    of no further use then: see `shrink`.
    """

    def __new__(
        cls,
        agent: Agent,
        name: str,
        rank: int,
        size: int,
        *,
        members: Sequence[tuple[str, int]] | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        shared_memory: bool = True,
        channels: int | None = None,
    ) -> Self:
        """Joins the group `name` and waits for all its ranks, no longer than `timeout` seconds.

        They find each other through the agent's rendezvous, or by `members`: the `address` and `epoch` of each rank's agent. `deadline` is
        that of calls that name none.
        """
    @staticmethod
    def from_env(
        name: str = "world",
        *,
        agent: Agent | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        shared_memory: bool = True,
        channels: int | None = None,
        **settings: object,
    ) -> Communicator:
        """Joins all processes that a launcher has started together (torchrun, MPI, Slurm), as the rank that its variables name. All of
        them give the same name.

        Without an `agent` one is made, to which `settings` apply as they do to `Agent`; it is the attribute `agent`, and ends with the
        communicator. On one host the variables of the launcher are enough. Ranks on several hosts need the same secret too
        (`WEFT_SECRET`), and have to be told where rank 0 is (`MASTER_ADDR`, `MASTER_PORT`), unless the launcher does that.
        """
    @property
    def agent(self) -> Agent:
        """The agent that it belongs to."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def calls_ended(self) -> int:
        """How many calls have ended well on this rank. It is also the number of the first that has not, as errors tell it."""
    @property
    def calls_ended_before(self) -> int | None:
        """In a group that is what is left of another (`shrink`): how many calls of that one have ended well on every rank of this; else None.
        A rank whose old group had ended more has results that others do not have.
        """
    def all_reduce(
        self,
        data: _Buffer,
        output: _Buffer | None = None,
        *,
        op: _Op = "sum",
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        deterministic: bool = False,
        quantized: Literal["int8", "fp8_e4m3"] | None = None,
        block: Literal[32, 64, 128] = 128,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Every rank ends with the reduction of all data; in place where there is no output.

        `deterministic` chooses the algorithm by size and number of ranks alone, so that the result has the same bits wherever the ranks are.
        With `all_or_nothing` the output holds what it held before, or all of the result, at the price of memory of its size and a copy; without, it is
        partly written when the call fails, and in place the data is lost with it.
        `quantized` sends f32 as codes of eight bits, `block` of which share a scale, for sum and avg: with m the sum over all ranks of the
        greatest magnitude in an element's block, a sum is off by at most about m/127 (int8) or m/14 (fp8_e4m3). Such a call waits.
        """
    def all_gather(
        self,
        data: _Buffer,
        output: _Buffer,
        *,
        counts: Sequence[int] | None = None,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Every rank ends with all data, one after the other. `counts` are the elements of each rank, where they differ."""
    def reduce_scatter(
        self,
        data: _Buffer,
        output: _Buffer,
        *,
        op: _Op = "sum",
        counts: Sequence[int] | None = None,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Each rank ends with the reduction of everyone's block for it."""
    def broadcast(
        self,
        data: _Buffer,
        root: int = 0,
        *,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Every rank ends with the root's data, in the same place."""
    def reduce(
        self,
        data: _Buffer,
        output: _Buffer | None = None,
        root: int = 0,
        *,
        op: _Op = "sum",
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """The root ends with the reduction of all data; others give no output."""
    def gather(
        self,
        data: _Buffer,
        output: _Buffer | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """The root ends with all data, one after the other; others give no output."""
    def scatter(
        self,
        data: _Buffer | None,
        output: _Buffer,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Each rank ends with the root's block for it; others give no data."""
    def all_to_all(
        self,
        data: _Buffer,
        output: _Buffer,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        datatype: str | None = None,
        algorithm: str | Schedule | None = None,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Block *r* of rank *s* becomes block *s* of rank *r*. `sent` and `received` are elements by rank, where they differ."""
    def send(
        self,
        data: _Buffer,
        to: int,
        *,
        datatype: str | None = None,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Sends to one rank, which must `receive` as many elements."""
    def receive(
        self,
        data: _Buffer,
        source: int,
        *,
        datatype: str | None = None,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Pending | None:
        """Receives what one rank sends."""
    def barrier(self, *, deadline: float | None = None, wait: bool = True) -> Pending | None:
        """Nobody ends before everybody has begun."""
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Ranks that give the same colour form a group of their own, ordered by `key`; those that give none form none."""
    def shrink(self, timeout: float = 10.0, *, quorum: bool = True) -> Communicator:
        """After a failure, a group of those that are left. All of them must call this; whoever does not in time is left out. Where so few are left that others may go on
        elsewhere, this raises `NoQuorum`; with `quorum=False` whoever is left goes on, and that no two parts of a group do is up to the caller."""
    def grow(self, name: str, size: int) -> Communicator:
        """A group with more ranks: those of this one keep theirs, and new ones join under the same name and size."""
    def _raw(
        self,
        kind: int,
        input: tuple[int, int],
        output: tuple[int, int],
        datatype: int,
        operator: int,
        root: int,
        deadline: float,
        keep: object | None = None,
        counts: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Pending | None:
        """A collective on addresses and lengths, which the caller vouches for."""

class Conversion:
    """How tokens and heads of a sequence in one cache become those of another, computed once and run as often as one likes.

    `blocks` and `other_blocks` are the sequence's from its first token on. `elements` and `other_elements` are `"bf16"`, `"f16"`, `"f32"` or `"fp8_e4m3"`, or anything else that
    stays as it is. `scales` are what elements of fp8 are multiplied with to be the numbers that they stand for: none, one float for each part, or `Pages` of four-byte units in
    memory. What would lose some of the numbers raises `InvalidCall`, unless it is `lossy`.
    """

    def __new__(
        cls,
        pages: Pages,
        blocks: Sequence[int],
        other: Pages,
        other_blocks: Sequence[int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        *,
        elements: str = "bf16",
        other_elements: str | None = None,
        scales: Sequence[float] | Pages | None = None,
        other_scales: Sequence[float] | Pages | None = None,
        lossy: bool = False,
    ) -> Self: ...
    @property
    def nbytes_read(self) -> int:
        """Bytes of elements that are read."""
    @property
    def nbytes_written(self) -> int:
        """Bytes of elements that are written."""
    @property
    def is_move(self) -> bool:
        """Whether bytes are moved, and none of them changed."""
    def run(self, memory: Memory, other: Memory, *, scales: Memory | None = None, other_scales: Memory | None = None) -> None:
        """Converts from one memory into another, both the host's or both of one GPU, and waits until it is done. Scales that lie in memory are in the same memories, unless others
        are named."""

class _Team:
    """The ranks of a group as a team on GPUs: what `weft.torch` puts on streams. The numbers are those of `Communicator._raw`; memory and streams are the caller's to vouch for."""

    @staticmethod
    def form(
        communicator: Communicator,
        device: int,
        *,
        deadline: float,
        ranks_a_device: int = 1,
        piece_bytes: int | None = None,
    ) -> tuple[_Team | None, str]:
        """Every rank calls it. Or the reason why there can be no team, which is the same on all ranks."""
    @staticmethod
    def reduced() -> tuple[list[int], list[int]]:
        """What kernels reduce: the numbers of datatypes and of operators."""
    def call(
        self,
        kind: int,
        input: tuple[int, int],
        output: tuple[int, int],
        datatype: int,
        operator: int,
        root: int,
        stream: int,
    ) -> None:
        """Puts a collective on a stream."""
    def barrier(self, stream: int) -> None:
        """Puts a barrier on a stream."""
    def check(self) -> None:
        """Raises what has become of the team, if it is not whole any more."""
    def abort(self) -> None:
        """Ends all waits of kernels, here and soon at the other ranks. Nothing can be asked of the team afterwards."""
    def close(self) -> None:
        """Waits for the kernels of this rank, and lets go of the heaps."""

class _Symmetric:
    """Memory of this rank's device that the kernels of all ranks of a team reach."""

    @staticmethod
    def form(
        team: _Team, communicator: Communicator, nbytes: int, *, deadline: float, purpose: int = 0
    ) -> _Symmetric:
        """Every rank calls it, for as many bytes and the same purpose."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class _Norms:
    """The fused kernels of a team."""

    @staticmethod
    def load(team: _Team) -> _Norms:
        """The driver compiles the kernels, which takes it seconds the first time on a machine."""
    def call(
        self,
        rows: int,
        hidden: int,
        datatype: int,
        epsilon: float,
        scale: float,
        by_row: bool,
        input: tuple[int, int],
        residual: tuple[int, int],
        weight: tuple[int, int],
        residual_out: tuple[int, int],
        output: tuple[int, int],
        scales: tuple[int, int],
        stream: int,
    ) -> None:
        """Puts a call on a stream: with one scale where that is above zero, or one for each row."""

class _Experts:
    """Dispatch and combine for one kind of layer, with the memory that they need."""

    @staticmethod
    def form(
        team: _Team,
        communicator: Communicator,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        tokens_max: int,
        capacity: int | None,
        narrow: bool,
        deadline: float,
    ) -> _Experts:
        """Every rank calls it, with the same numbers. Without `capacity` rows are in slots."""
    def places(self) -> list[tuple[int, int]]:
        """Where rows, scales, experts and weights of rows, and results lie."""
    def dispatch(
        self,
        tokens: int,
        input: tuple[int, int],
        experts: tuple[int, int],
        weights: tuple[int, int],
        counts: tuple[int, int],
        stream: int,
    ) -> None:
        """Puts a dispatch on a stream."""
    def combine(self, weights: tuple[int, int], output: tuple[int, int], stream: int) -> None:
        """Puts a combine on a stream."""
    def check(self) -> None:
        """Raises what has become of calls that the stream has come past."""

class Pending:
    """A call under way. It goes on by itself; dropping it does not end it. `await pending` waits for its end."""

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end, which comes at the deadline at the latest; with `timeout`, no longer than that."""
    def poll(self) -> bool:
        """Whether it has ended well; `False` while it is under way. Raises if it failed."""
    def __await__(self) -> Generator[Any, None, None]: ...

class _NixlAgent:
    """What `weft.nixl` stands on: an agent of NIXL's kind. Memory is given by kind (0 of the host, 1 of devices) and rows of address, length and device,
    which the caller vouches for. What goes wrong is raised as NIXL's exceptions."""

    def __new__(cls, name: str, kind: str, parameters: Sequence[tuple[str, str]]) -> Self: ...
    @staticmethod
    def offered() -> list[str]:
        """The parameters that are offered."""
    @staticmethod
    def has_devices() -> bool: ...
    def register(self, kind: int, rows: _Array) -> None: ...
    def deregister(self, kind: int, rows: _Array) -> None: ...
    def introduction(self, part: tuple[int, _Array] | None = None, with_connection: bool = True) -> bytes:
        """What other agents have to know of this one; of some of its memory only, where that is said."""
    def meet(self, introduction: bytes) -> str:
        """Learns of another agent, and tells its name."""
    def forget(self, agent: str) -> None: ...
    def knows(self, agent: str, kind: int, rows: _Array) -> bool: ...
    def connect(self, agent: str) -> None: ...
    def side(self, agent: str | None, kind: int, rows: _Array, columns: int = 3) -> _NixlSide:
        """Looks up where descriptors lie. With five columns a row is so many blocks at a stride."""
    def ask(
        self,
        write: bool,
        here: _NixlSide,
        here_indices: Any,
        there: _NixlSide,
        there_indices: Any,
        notification: bytes | None = None,
    ) -> _NixlRequest:
        """Prepares a transfer. Without indices, it is of all descriptors."""
    def post(self, request: _NixlRequest, notification: bytes | None = None) -> bool:
        """Whether it has ended by the time of the return."""
    def check(self, request: _NixlRequest) -> bool:
        """Whether it has ended."""
    def notify(self, agent: str, message: bytes) -> None: ...
    def notifications(self) -> list[tuple[str, bytes]]:
        """All that has been told since, with who told it."""
    def close(self) -> None: ...

class _NixlSide:
    """Descriptors with the registrations that they lie in."""

    def __len__(self) -> int: ...

class _NixlRequest:
    """A transfer that was asked for."""

    def end(self) -> None:
        """Calls it off, if it is under way. Afterwards nobody touches its memory."""
    def telemetry(self) -> tuple[int, int, int, int, int] | None:
        """In microseconds: when it was posted, how long that call took, how long all of it; then its bytes, and its descriptors. None before its end."""

class Notification:
    """What a peer has told this agent."""

    @property
    def peer(self) -> Peer: ...
    @property
    def payload(self) -> bytes: ...
