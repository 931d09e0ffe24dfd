"""What vLLM loads: both halves of the connector, of which each process has one."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ._options import Options, refuse_shared_tokens
from ._scheduler import Scheduler
from ._stats import Metrics, Stats
from ._worker import Worker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError as missing:
    # Before vLLM 0.32 nobody asks a connector where its tokens came from. Whatever else is missing is a fault.
    if missing.name != "vllm.v1.metrics.cache_hit_source":
        raise
    CacheHitSource = None


class WeftConnector(Scheduler, Worker):
    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_shared_tokens(vllm_config.parallel_config)
        self.options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._stats = Stats()
        if role == KVConnectorRole.SCHEDULER:
            self._start_deciding()
        else:
            self._start_moving()

    def get_kv_connector_stats(self) -> Stats | None:
        # The scheduler counts what it did not even hand to its workers.
        stats, self._stats = self._stats, Stats()
        return None if stats.is_empty() else stats

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # Between two layers something is told.
        return extra_config.get("mode") == "push"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data=data) if data is not None else Stats()

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> Metrics:  # type: ignore[no-untyped-def]
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
