"""Weft moves memory between processes, machines and storage.

    import numpy, weft

    with weft.Agent("decode") as agent:
        cache = agent.allocate(64 << 20)
        peer = agent.connect(address_of_prefill)
        summary = peer.read(cache, peer.region("kv")).wait()
        tokens = numpy.frombuffer(cache, dtype=numpy.uint8)
"""

from ._errors import (
    AtomicError,
    AtomicRefused,
    Cancelled,
    ChecksumMismatch,
    CollectiveError,
    ConnectError,
    Error,
    Expired,
    Full,
    InvalidCall,
    LeaseEnded,
    LeftOut,
    NotBorrowable,
    OsFailure,
    OutcomeUnknown,
    PathLost,
    PeerLost,
    Refused,
    RendezvousError,
    SettingsError,
    StillInUse,
    Stopped,
    TimedOut,
    TransferError,
    TransferRefused,
)
from ._weft import (
    Agent,
    Borrowed,
    Communicator,
    Memory,
    Notification,
    Peer,
    Pending,
    Prepared,
    Region,
    Schedule,
    Summary,
    Transfer,
    __version__,
)

__all__ = [
    "Agent",
    "AtomicError",
    "AtomicRefused",
    "Borrowed",
    "Cancelled",
    "ChecksumMismatch",
    "CollectiveError",
    "Communicator",
    "ConnectError",
    "Error",
    "Expired",
    "Full",
    "InvalidCall",
    "LeaseEnded",
    "LeftOut",
    "Memory",
    "NotBorrowable",
    "Notification",
    "OsFailure",
    "OutcomeUnknown",
    "PathLost",
    "Peer",
    "PeerLost",
    "Pending",
    "Prepared",
    "Refused",
    "Region",
    "RendezvousError",
    "Schedule",
    "SettingsError",
    "StillInUse",
    "Stopped",
    "Summary",
    "TimedOut",
    "Transfer",
    "TransferError",
    "TransferRefused",
    "__version__",
]
