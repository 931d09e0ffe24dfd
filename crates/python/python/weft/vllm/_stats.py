"""What the connector counts, for vLLM's log and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from ._messages import HandOff


def _nothing() -> dict[str, Any]:
    return {"seconds": [], "bytes": [], "transports": {}, "failures": {}, "held": 0, "expired": 0}


@dataclass
class Stats(KVConnectorStats):
    data: dict[str, Any] = field(default_factory=_nothing)

    def add(self, hand_off: HandOff) -> None:
        if hand_off.failure:
            self.fail(hand_off.failure.partition(":")[0])
            return
        self.data["seconds"].append(hand_off.seconds)
        self.data["bytes"].append(hand_off.bytes)
        self.data["transports"][hand_off.transport] = self.data["transports"].get(hand_off.transport, 0) + 1

    def fail(self, kind: str, times: int = 1) -> None:
        self.data["failures"][kind] = self.data["failures"].get(kind, 0) + times

    def hold(self, held: int, expired: int) -> None:
        self.data["held"], self.data["expired"] = held, expired

    def reset(self) -> None:
        self.data = _nothing()

    def is_empty(self) -> bool:
        return not (self.data["seconds"] or self.data["failures"] or self.data["held"] or self.data["expired"])

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key in ("seconds", "bytes"):
            self.data[key] = self.data[key] + other.data[key]
        for key in ("transports", "failures"):
            for name, count in other.data[key].items():
                self.data[key][name] = self.data[key].get(name, 0) + count
        for key in ("held", "expired"):
            self.data[key] = max(self.data[key], other.data[key])
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, moved = self.data["seconds"], sum(self.data["bytes"])
        total = sum(seconds)
        return {
            "Hand-offs": len(seconds),
            "Hand-off avg (ms)": round(1e3 * total / len(seconds), 3) if seconds else 0,
            "Hand-off max (ms)": round(1e3 * max(seconds), 3) if seconds else 0,
            "Hand-off MB/s": round(moved / total / 1e6, 1) if total else 0,
            "Hand-offs failed": sum(self.data["failures"].values()),
            "Requests held": self.data["held"],
            "Leases expired": self.data["expired"],
            **{f"Over {name}": count for name, count in sorted(self.data["transports"].items())},
        }


class Metrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:  # type: ignore[no-untyped-def]
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def per_engine(metric):  # type: ignore[no-untyped-def]
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._seconds = per_engine(
            self._histogram_cls(
                name="vllm:weft_hand_off_seconds",
                documentation="How long KV hand-offs took.",
                buckets=[0.0005 * 2**n for n in range(17)],
                labelnames=labelnames,
            )
        )
        self._bytes = per_engine(
            self._counter_cls(name="vllm:weft_hand_off_bytes", documentation="Bytes of KV handed off.", labelnames=labelnames)
        )
        # These have a label more: which transport, which failure.
        self._by_transport = self._counter_cls(
            name="vllm:weft_hand_offs", documentation="KV hand-offs, by transport.", labelnames=[*labelnames, "transport"]
        )
        self._by_failure = self._counter_cls(
            name="vllm:weft_hand_offs_failed",
            documentation="KV hand-offs after which the prompt was computed here, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._held = per_engine(
            self._gauge_cls(
                name="vllm:weft_requests_held", documentation="Requests whose blocks are held for others.", labelnames=labelnames
            )
        )
        self._expired = per_engine(
            self._gauge_cls(
                name="vllm:weft_leases_expired", documentation="Held requests that nobody came for in time.", labelnames=labelnames
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for seconds in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        self._bytes[engine_idx].inc(sum(transfer_stats_data["bytes"]))
        for transport, count in transfer_stats_data["transports"].items():
            self._by_transport.labels(*labels, transport).inc(count)
        for reason, count in transfer_stats_data["failures"].items():
            self._by_failure.labels(*labels, reason).inc(count)
        self._held[engine_idx].set(transfer_stats_data["held"])
        self._expired[engine_idx].set(transfer_stats_data["expired"])
