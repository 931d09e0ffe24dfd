"""What the connector counts, for vLLM's log and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from weft.hand_off import Ended


@dataclass
class Stats(KVConnectorStats):
    data: dict[str, Any] = field(
        default_factory=lambda: {"seconds": [], "bytes": [], "transports": {}, "failures": {}, "held": 0, "expired": 0}
    )

    def add(self, ended: Ended) -> None:
        if ended.cause is None:
            self.data["seconds"].append(ended.seconds)
            self.data["bytes"].append(ended.nbytes)
        kind, name = ("failures", ended.cause) if ended.cause else ("transports", "+".join(ended.transports))
        self.data[kind][name] = self.data[kind].get(name, 0) + 1

    def reset(self) -> None:
        self.data = Stats().data

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
            **{f"Failed, {name}": count for name, count in sorted(self.data["failures"].items())},
        }


class Metrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:  # type: ignore[no-untyped-def]
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(kind, name: str, documentation: str, *labels: str, **more):  # type: ignore[no-untyped-def]
            metric = kind(name=f"vllm:weft_{name}", documentation=documentation, labelnames=[*labelnames, *labels], **more)
            return metric if labels else create_metric_per_engine(metric, per_engine_labelvalues)

        buckets = [0.0005 * 2**n for n in range(17)]
        self._seconds = made(self._histogram_cls, "hand_off_seconds", "How long KV hand-offs took.", buckets=buckets)
        self._bytes = made(self._counter_cls, "hand_off_bytes", "Bytes of KV handed off.")
        self._by_transport = made(self._counter_cls, "hand_offs", "KV hand-offs, by transport.", "transport")
        self._by_failure = made(self._counter_cls, "hand_offs_failed", "Prompts that were computed here instead, by reason.", "reason")
        self._held = made(self._gauge_cls, "requests_held", "Requests whose blocks are held for others.")
        self._expired = made(self._gauge_cls, "leases_expired", "Held requests that nobody came for in time.")

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
