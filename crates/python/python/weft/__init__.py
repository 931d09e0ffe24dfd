"""Weft moves memory between processes, machines and storage.

    import numpy, weft

    with weft.Agent("decode") as agent:
        cache = agent.allocate(64 << 20)
        peer = agent.connect(address_of_prefill)
        summary = peer.read(cache, peer.region("kv")).wait()
        tokens = numpy.frombuffer(cache, dtype=numpy.uint8)
"""

from ._weft import (
    Agent,
    Borrowed,
    Cancelled,
    ChecksumMismatch,
    ConnectError,
    Error,
    Expired,
    Full,
    InvalidCall,
    LeaseEnded,
    Memory,
    NotBorrowable,
    Notification,
    PathLost,
    Peer,
    PeerLost,
    Prepared,
    Refused,
    Region,
    RendezvousError,
    SettingsError,
    StillInUse,
    Stopped,
    Summary,
    SystemError,
    TimedOut,
    Transfer,
    TransferError,
    __version__,
)

__all__ = [
    "Agent",
    "Borrowed",
    "Cancelled",
    "ChecksumMismatch",
    "ConnectError",
    "Error",
    "Expired",
    "Full",
    "InvalidCall",
    "LeaseEnded",
    "Memory",
    "NotBorrowable",
    "Notification",
    "PathLost",
    "Peer",
    "PeerLost",
    "Prepared",
    "Refused",
    "Region",
    "RendezvousError",
    "SettingsError",
    "StillInUse",
    "Stopped",
    "Summary",
    "SystemError",
    "TimedOut",
    "Transfer",
    "TransferError",
    "__version__",
]
