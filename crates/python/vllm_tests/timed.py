"""The two connectors with a clock, for the comparison: `kv_connector_module_path` "timed", and the connector's own name.

The same moments are taken of both, where vLLM calls them, and written as lines of JSON into the directory that `TIMED_INTO` names:

- `ready`: in a worker, from the step in which a request's load is started to the step in which its blocks are reported ready, or `failed`, where
  they have to be computed;
- `waited`: in the scheduler, from the allocation of its blocks to the news that they are ready;
- `own`: what the connector itself counts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as _Nixl

from weft.vllm import WeftConnector as _Weft


class _Clock:
    """Goes before a connector in the order of its classes."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._into = (Path(os.environ["TIMED_INTO"]) / f"{os.getpid()}-{type(self).__name__}-{id(self)}.jsonl").open("a")
        self._loads: dict[str, float] = {}
        self._allocated: dict[str, float] = {}

    def _write(self, what: str, value: Any) -> None:
        print(json.dumps({what: value}), file=self._into, flush=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        orders: Any = self._get_connector_metadata()  # type: ignore[attr-defined]
        # One calls them so, the other so.
        for request in getattr(orders, "loads", None) or getattr(orders, "reqs_to_recv", None) or ():
            self._loads[request] = began
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        now = time.monotonic()
        for request in results.finished_recving:
            if request in self._loads:
                outcome = "failed" if request in (results.failed_recving or ()) else "ready"
                self._write(outcome, now - self._loads.pop(request))
        return results

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._allocated[request.request_id] = time.monotonic()
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def update_connector_output(self, connector_output: Any) -> None:
        now = time.monotonic()
        for request in connector_output.finished_recving or ():
            if request in self._allocated:
                self._write("waited", now - self._allocated.pop(request))
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()  # type: ignore[misc]
        if stats is not None:
            self._write("own", stats.data)
        return stats


class NixlConnector(_Clock, _Nixl):
    pass


class WeftConnector(_Clock, _Weft):
    pass
