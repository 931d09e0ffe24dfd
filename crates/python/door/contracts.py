"""What Weft's doors take for granted of the programs they lead into: `contracts.py DOOR` compares what is written down with what is installed, and says what has moved before
anything fails in a way that has to be understood first. `--source DIR` looks at an unpacked wheel or a checkout instead; `--record` writes it down anew.

What vLLM is asked for by weft.vllm is compared by its own tests (`crates/python/vllm_tests/contract.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from interface import NOWHERE, Source, differences  # noqa: E402

RECORDS = Path(__file__).with_name("contracts")


@dataclass(frozen=True)
class Door:
    """What one door asks for. Of classes that are implemented here everything counts, since what is new may have to be implemented; of others what is used."""

    package: str
    distributions: tuple[str, ...]
    whole: tuple[str, ...] = ()
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Functions and constants.
    said: tuple[str, ...] = ()
    # Modules, and what they hold an agent of NIXL's in: every method that they call on it has to be one of weft.nixl's.
    agents: dict[str, str] = field(default_factory=dict)


SGLANG, LMCACHE, DYNAMO, TRTLLM = "sglang.srt", "lmcache.v1", "dynamo.vllm", "tensorrt_llm._torch.pyexecutor.connectors"

DOORS: dict[str, Door] = {
    "sglang": Door(
        package="sglang",
        distributions=("sglang",),
        parts={
            f"{SGLANG}.plugins.hook_registry:HookRegistry": ("register", "apply_hooks"),
            f"{SGLANG}.plugins.hook_registry:HookType": ("AFTER", "AROUND"),
            f"{SGLANG}.disaggregation.utils:TransferBackend": ("NIXL",),
            f"{SGLANG}.disaggregation.utils:KVClassType": ("KVARGS", "MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER"),
            f"{SGLANG}.disaggregation.nixl.conn:NixlKVManager": ("__init__", "transfer_worker", "_post_xfer", "_await_handles"),
            f"{SGLANG}.environ:Envs": ("SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"),
        },
        said=(
            f"{SGLANG}.plugins:GENERAL_PLUGINS_GROUP",
            f"{SGLANG}.plugins:load_plugins",
            f"{SGLANG}.arg_groups.choices:DISAGG_TRANSFER_BACKEND_CHOICES",
            f"{SGLANG}.arg_groups.choices:add_disagg_transfer_backend_choices",
            f"{SGLANG}.disaggregation.utils:get_kv_class",
        ),
        agents={f"{SGLANG}.disaggregation.nixl.conn": "self.agent"},
    ),
    "dynamo": Door(
        package="dynamo",
        distributions=("ai-dynamo",),
        whole=(f"{DYNAMO}.kv_connector_protocols:KvConnectorProtocol", f"{DYNAMO}.kv_connector_protocols:NixlConnectorProtocol"),
        said=(f"{DYNAMO}.kv_connector_protocols:KV_CONNECTOR_PROTOCOLS", f"{DYNAMO}.kv_connector_protocols:make_kv_connector_protocol"),
    ),
    "lmcache": Door(
        package="lmcache",
        distributions=("lmcache",),
        whole=(
            f"{LMCACHE}.distributed.transfer_channel.abstract:TransferChannelContext",
            f"{LMCACHE}.distributed.transfer_channel.abstract:TransferChannelClient",
            f"{LMCACHE}.distributed.transfer_channel.abstract:TransferChannelServer",
            f"{LMCACHE}.distributed.transfer_channel.api:TransferChannelReadResult",
            f"{LMCACHE}.distributed.transfer_channel.api:TransferChannelAddress",
            f"{LMCACHE}.distributed.internal_api:L1MemoryDesc",
        ),
        parts={
            f"{LMCACHE}.distributed.transfer_channel.impl.nixl_impl:NixlTransferChannelContext": (
                "__init__", "_connect", "register_client", "get_transfer_channel_client", "remove_transfer_channel_client",
            ),
            f"{LMCACHE}.distributed.transfer_channel.impl.nixl_impl:NixlTransferChannelClient": (
                "__init__", "submit_read", "query_read_status", "close", "self._ctx", "self._remote_agent_name", "self._remote_handle", "self._tasks", "self._lock",
            ),
            f"{LMCACHE}.transfer_channel.nixl_channel:NixlChannel": ("__init__", "batched_read", "batched_write", "lazy_init_peer_connection"),
        },
        said=(
            f"{LMCACHE}.distributed.transfer_channel.factory:register_transfer_channel_factory",
            f"{LMCACHE}.distributed.transfer_channel.factory:create_transfer_channel_context",
            f"{LMCACHE}.distributed.transfer_channel.impl.nixl_impl:_load_nixl",
            f"{LMCACHE}.transfer_channel:CreateTransferChannel",
        ),
        agents={f"{LMCACHE}.transfer_channel.nixl_channel": "self.nixl_agent", f"{LMCACHE}.distributed.transfer_channel.impl.nixl_impl": "agent"},
    ),
    "trtllm": Door(
        package="tensorrt_llm",
        distributions=("tensorrt-llm", "tensorrt_llm"),
        whole=(
            f"{TRTLLM}.kv_cache_connector:KvCacheConnectorWorker",
            f"{TRTLLM}.kv_cache_connector:KvCacheConnectorScheduler",
            f"{TRTLLM}.kv_cache_connector:SchedulerOutput",
            f"{TRTLLM}.kv_cache_connector:RequestData",
        ),
        # What one configures it by.
        parts={"tensorrt_llm.llmapi.llm_args:KvCacheConnectorConfig": ("connector_module", "connector_scheduler_class", "connector_worker_class")},
    ),
}  # fmt: skip


def surface(door: Door, source: Source) -> dict[str, Any]:
    """What a program offers of all that."""
    found: dict[str, Any] = {}
    for name in door.whole:
        members = source.members(name)
        # What begins with two underscores is Python's, but for the constructor.
        found[name] = NOWHERE if members is None else {one: said for one, said in members.items() if not one.startswith("__") or one == "__init__"}
    for name, parts in door.parts.items():
        members = source.members(name)
        found[name] = NOWHERE if members is None else {one: members[one] for one in parts if one in members}
    for name in door.said:
        found[name] = source.said(name)
    for module, holder in door.agents.items():
        calls = source.called_on(module, holder)
        found[f"{module}: {holder}"] = NOWHERE if calls is None else dict.fromkeys(calls, "called")
    return found


def untaken(door: Door, found: dict[str, Any]) -> list[str]:
    """What a program calls on an agent of NIXL's, and an agent of weft.nixl does not have."""
    from weft.nixl import nixl_agent

    lines = []
    for module, holder in door.agents.items():
        calls = found[f"{module}: {holder}"]
        lines += [f"{module} calls {holder}.{call}, which weft.nixl does not have" for call in calls if isinstance(calls, dict) and not hasattr(nixl_agent, call)]
    return lines


def check(name: str, source: Source, version: str) -> tuple[str, list[str]]:
    """What has moved since it was written down."""
    door, recorded = DOORS[name], json.loads((RECORDS / f"{name}.json").read_text())
    found = surface(door, source)
    lines = differences(recorded, found) + untaken(door, found)
    things = sum(len(was) if isinstance(was, dict) else 1 for was in recorded.values()) - 1
    return f"{door.distributions[0]} {version}, written for {recorded['version']}: {things} things compared, {len(lines)} differ", lines


def version_of(door: Door) -> str:
    for name in door.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "of unknown version"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=list(DOORS))
    parser.add_argument("--source", type=Path, help="an unpacked wheel or a checkout, instead of what is installed")
    parser.add_argument("--version", help="what to call that")
    parser.add_argument("--record", action="store_true", help="write down what is there")
    arguments = parser.parse_args()
    door = DOORS[arguments.door]
    source = Source(arguments.source) if arguments.source else Source.installed(door.package)
    if source is None:
        print(f"{door.distributions[0]} is not installed; --source names where its source is", file=sys.stderr)
        return 2
    version = arguments.version or version_of(door)
    if arguments.record:
        (RECORDS / f"{arguments.door}.json").write_text(json.dumps({"version": version, **surface(door, source)}, indent=1, sort_keys=True) + "\n")
        return 0
    verdict, moved = check(arguments.door, source, version)
    print("\n".join([*moved, verdict]))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
