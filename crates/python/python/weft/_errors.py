"""What Weft raises. `except weft.Error` catches all of it; who thinks in Python's own exceptions catches those."""


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


class Refused(Error):
    """The owner of the memory, or the agent itself, said no."""

    cause: str


class TransferRefused(TransferError, Refused):
    """The target of a transfer said no."""


class Expired(TransferError):
    """The deadline passed."""


class Cancelled(TransferError):
    """The caller cancelled it."""


class PathLost(TransferError):
    """The path was lost and there was no other."""


class ChecksumMismatch(TransferError):
    """The bytes at the two ends differ."""


class AtomicError(Error):
    """An atomic operation brought no answer. Unless `may_have_happened`, it was certainly not carried out."""

    peer: str
    transport: str
    cause: str
    may_have_happened: bool


class AtomicRefused(AtomicError, Refused):
    """The owner of the word said no."""


class OutcomeUnknown(AtomicError):
    """It was sent, and whether it was carried out is not known. It is never repeated to find out."""


class PeerLost(Error):
    """The session is over: connect again."""

    peer: str
    cause: str


class CollectiveError(Error, RuntimeError):
    """A collective failed. Ranks for which it was over are told in their next call. The group is of no further use: `shrink` makes a new one."""

    rank: int
    """The rank that is to blame."""
    cause: str
    """lost, late, wrong call, withdrew or broken."""
    step: int
    called: str | None
    """What this rank had called."""
    others: list[tuple[int, str]]
    """What other ranks had called, as far as it was known."""


class LeftOut(Error):
    """The ranks that are left have gone on without this one."""


class NoQuorum(Error):
    """Too few ranks are left: others that are not known to be dead may go on elsewhere."""

    missing: list[int]
    """Those that are out of reach, and not known to be dead."""
    needed: int
    """How many ranks would have had to be left."""


class ConnectError(Error):
    """No session came about."""


class TimedOut(Error, TimeoutError):
    """What was waited for did not happen in time."""


class Full(Error):
    """Too much is under way already: try again later."""


class InvalidCall(Error, ValueError):
    """The call makes no sense as it is. Of a hand-off, `cause` says it in a word that never changes."""

    cause: str | None = None


class GpuError(Error):
    """A GPU, its driver or its memory did not do what was asked; the text says what is missing."""


class OverCapacity(Error):
    """A rank was to receive more rows than it has room for. The call sent nothing, on any rank, and those after it are not harmed."""

    rank: int
    needed: int
    capacity: int


class NotBorrowable(Error):
    """The region cannot be mapped."""


class LeaseEnded(Error):
    """The lease is over."""


class StillInUse(Error):
    """A peer is still inside the memory."""


class SettingsError(Error):
    """A setting is unknown or has a value that makes no sense."""


class RendezvousError(Error):
    """The place where agents find each other failed."""


class OsFailure(Error, OSError):
    """The operating system refused something; `errno` says what, where it gave a number."""


class NotBelieved(Error):
    """Sealed words that nobody with the secret has written so, for this, and not too long ago."""

    reason: str
    """forged, expired, about another, malformed, or used: somebody has come with them before."""


class Stopped(Error):
    """The agent has been closed."""


class Forked(Error, RuntimeError):
    """It was made before a fork, and belongs to the process that made it: make an agent after the fork."""


# Users know them, and pickle finds them, as `weft.Expired` and so on.
for _name, _class in list(globals().items()):
    if isinstance(_class, type):
        _class.__module__ = "weft"
