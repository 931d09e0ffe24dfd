"""What travels between the scheduler of an engine and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata

from weft.hand_off import Ended, Lease, Origin, Push


@dataclass
class Prompt:
    """Its blocks, in the order of its tokens, and what its KV cache depends on. To be brought: the tokens from `first` up to `tokens`. Computed here: those up to `upto`,
    after this step, of so many."""

    blocks: list[int]
    tokens: int
    subject: str
    first: int = 0
    upto: int = 0


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler wants of its workers in a step."""

    # As decode side: prompts wanted from elsewhere; those for which there are blocks now, by request, with their hand-offs; and hand-offs that nobody wants any more.
    wanted: list[Origin | Push] = field(default_factory=list)
    loads: dict[str, tuple[str, Prompt]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    # As prefill side, by hand-off: requests that are held for others; what this step computes of prompts that are pushed; which of these lose their blocks now and
    # are computed again; and which will not be whole, with their requests where these have blocks.
    holds: dict[str, tuple[str, Lease]] = field(default_factory=dict)
    computed: dict[str, Prompt] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    stopped: dict[str, str | None] = field(default_factory=dict)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where a worker's agent is."""

    address: str


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What workers tell their scheduler: how hand-offs have ended, by request, one of each worker."""

    ended: dict[str, list[Ended]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        for request, ended in other.ended.items() if isinstance(other, Reports) else ():
            self.ended.setdefault(request, []).extend(ended)
        return self


def summary(ended: list[Ended]) -> dict[str, Any]:
    """What a client is told of a hand-off."""
    failures = sorted({f"{one.cause}: {one.reason}" for one in ended if one.cause})
    return {
        "hand_off_ms": round(1e3 * max(one.seconds for one in ended), 3),
        "bytes": sum(one.nbytes for one in ended),
        "transport": "+".join(sorted({transport for one in ended for transport in one.transports})),
        **({"recomputed_because": failures} if failures else {}),
    }
