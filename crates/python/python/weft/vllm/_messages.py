"""What travels between scheduler, workers and engines beside the KV cache itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ._description import VERSION, Mismatch
from ._landing import Awaited
from ._push import Computed

# The key under which a request's parameters hold what is said here.
KEY = "weft"


@dataclass(frozen=True)
class Lease:
    """The right to read a request's blocks: as long as the word in the slot is not past the stamp, the bytes are the request's."""

    slot: int
    stamp: int
    seconds: float


@dataclass(frozen=True)
class Origin:
    """Where the KV cache of a prompt is to be had: what the prefill side answers, and the decode side is asked with."""

    engine: str
    request: str
    addresses: list[str]
    blocks: list[int]
    tokens: int
    lease: Lease

    def to_params(self, mode: str) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            KEY: {
                "version": VERSION,
                # For the router, which may arrange for the next prompt to be pushed.
                "mode": mode,
                "engine": self.engine,
                "request": self.request,
                "addresses": self.addresses,
                "blocks": self.blocks,
                "tokens": self.tokens,
                "lease": [self.lease.slot, self.lease.stamp, self.lease.seconds],
            },
        }

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Origin:
        """Raises `Mismatch` where they say nothing, or nothing that this version understands. They come from outside."""
        said = _said(params)
        try:
            slot, stamp, seconds = said["lease"]
            origin = cls(
                str(said["engine"]),
                str(said["request"]),
                [str(address) for address in said["addresses"]],
                [int(block) for block in said["blocks"]],
                int(said["tokens"]),
                Lease(int(slot), int(stamp), float(seconds)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Mismatch(f"the parameters of the hand-off cannot be read: {error!r}") from error
        if not origin.addresses or not 0 <= origin.lease.slot < SLOTS or origin.tokens < 0 or min(origin.blocks, default=0) < 0:
            raise Mismatch("the parameters of the hand-off make no sense")
        return origin


@dataclass(frozen=True)
class Push:
    """A hand-off that was arranged beforehand: both sides are asked with its name, and the decode side with where the prefill side is."""

    hand_off: str
    addresses: list[str]

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Push | None:
        """`None` where nothing was arranged. Raises `Mismatch` where what was cannot be understood."""
        if not isinstance(params.get(KEY), dict) or "push" not in params[KEY]:
            return None
        said = _said(params)["push"]
        try:
            push = cls(str(said["hand_off"]), [str(address) for address in said.get("addresses", [])])
        except (AttributeError, KeyError, TypeError) as error:
            raise Mismatch(f"the parameters of the hand-off cannot be read: {error!r}") from error
        if not 0 < len(push.hand_off) <= 256:
            raise Mismatch("the hand-off has no name")
        return push


def _said(params: dict[str, Any]) -> dict[str, Any]:
    said = params.get(KEY)
    if not isinstance(said, dict):
        raise Mismatch("the request asks for a remote prefill, but says nothing of where it is")
    if said.get("version") != VERSION:
        raise Mismatch(f"the other side speaks version {said.get('version')!r} of the hand-off, this side {VERSION}")
    return said


# How many requests an engine can hold for others at a time.
SLOTS = 1 << 16


@dataclass
class Load:
    """Bring the tokens of a prompt from an origin into blocks of this engine."""

    origin: Origin
    blocks: list[int]
    tokens: tuple[int, int]


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler wants of its workers in a step."""

    loads: dict[str, Load] = field(default_factory=dict)
    holds: dict[str, Lease] = field(default_factory=dict)
    # Requests elsewhere that nobody here will read any more, and those that somebody here still waits for.
    releases: list[Origin] = field(default_factory=list)
    renewals: list[Origin] = field(default_factory=list)
    # Of pushed prompts, as prefill side: what this step computes, by hand-off; which hand-offs lose their blocks now and are computed again;
    # requests that ended without being computed whole, which are reported as sent; and hand-offs of which nothing will be computed.
    computed: dict[str, Computed] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    # As decode side: prompts that are awaited, and those that are not any more; hand-offs elsewhere that nobody here waits for, or still does.
    awaited: dict[str, Awaited] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    left: list[Push] = field(default_factory=list)
    expected: list[Push] = field(default_factory=list)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where a worker's agent is."""

    address: str


@dataclass
class HandOff:
    """How one worker's share of a hand-off went."""

    seconds: float
    bytes: int
    transport: str
    failure: str | None = None


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What workers tell their scheduler: hand-offs that have ended, by request, one of each worker."""

    hand_offs: dict[str, list[HandOff]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, Reports):
            for request, hand_offs in other.hand_offs.items():
                self.hand_offs.setdefault(request, []).extend(hand_offs)
        return self


def summary(hand_offs: list[HandOff]) -> dict[str, Any]:
    """What a client is told of a hand-off."""
    failures = sorted({hand_off.failure for hand_off in hand_offs if hand_off.failure})
    return {
        "hand_off_ms": round(1e3 * max(hand_off.seconds for hand_off in hand_offs), 3),
        "bytes": sum(hand_off.bytes for hand_off in hand_offs),
        "transport": "+".join(sorted({hand_off.transport for hand_off in hand_offs if hand_off.transport})),
        **({"recomputed_because": failures} if failures else {}),
    }
