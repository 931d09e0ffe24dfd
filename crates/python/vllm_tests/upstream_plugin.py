"""A plugin for pytest that has vLLM's own connector tests, unmodified, meet our connector wherever they name `NixlConnector`.

The tests make requests as NIXL's prefill side would answer them. Here these are translated, on the way in and on the way out; everything else is the
connector as it is. What counts as run against ours is a test in which at least one of ours was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from weft.hand_off import Lease, Origin
from weft.routed import answer
from weft.vllm import WeftConnector
from weft.vllm._subject import subject

# How many connectors were made since the test began, and in which tests any were.
_made = 0
_with_ours: dict[str, str] = {}


class InPlaceOfNixl(WeftConnector):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        global _made
        _made += 1
        super().__init__(*arguments, **more)
        # The workers that would say so are not part of these tests.
        self.addresses = ["tcp:127.0.0.1:1"]

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and "remote_block_ids" in params:
            address = f"tcp:{params['remote_host']}:{params['remote_port']}"
            blocks, tokens = params["remote_block_ids"], request.num_prompt_tokens
            about = subject(request)
            assert about is not None
            # As the prefill side would have sealed it.
            params["weft"] = answer(self.desk, Origin(params["remote_request_id"], [address], blocks, tokens, Lease(0, 1, 60.0)), about, "pull")["weft"]
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, block_ids)
        if held and params:
            params["remote_block_ids"] = (list(block_ids),)
        return held, params


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    outcome = "failed"
    try:
        yield
        outcome = "passed"
    finally:
        if _made:
            _with_ours[item.nodeid] = outcome


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Some fixtures make a connector, so that counting begins before them.
    global _made
    _made = 0


def pytest_configure(config: pytest.Config) -> None:
    KVConnectorFactory._registry["NixlConnector"] = lambda: InPlaceOfNixl


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("tests in which a WeftConnector was made")
    for name, outcome in _with_ours.items():
        terminalreporter.write_line(f"{outcome}  {name}")
    passed = sum(outcome == "passed" for outcome in _with_ours.values())
    terminalreporter.write_line(f"{passed} of {len(_with_ours)} passed against WeftConnector")
