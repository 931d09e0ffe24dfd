"""What travels between the scheduler of an engine and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ._landing import Awaited
from ._origin import Lease, Origin, Push
from ._push import Computed


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
