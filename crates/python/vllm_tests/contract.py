"""What weft.vllm takes for granted of vLLM, written down for each of the minor versions that it works with: `contract.py` compares what is installed with what was written down
of that version, `--source DIR --version V` an unpacked wheel, and `--record` writes it down anew.

vLLM calls its connector interface experimental. When it moves, this says what moved, before anything fails in a way that has to be understood first. It is read from the source
(`../door/interface.py`), so that all versions can be compared where none of them is installed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "door"))

from interface import NOWHERE, Source, differences  # noqa: E402

# A file for each minor version: 0.32.json.
RECORDS = HERE / "contracts"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

# Classes of which everything counts: a method that is new here may be one that has to be implemented.
WHOLE = [
    f"{BASE}:KVConnectorBase_V1",
    f"{BASE}:KVConnectorHandshakeMetadata",
    f"{BASE}:KVConnectorMetadata",
    f"{BASE}:KVConnectorWorkerMetadata",
    f"{BASE}:KVConnectorTransferResults",
    f"{BASE}:KVConnectorRole",
    f"{METRICS}:KVConnectorStats",
    f"{METRICS}:KVConnectorPromMetrics",
    "vllm.v1.outputs:KVConnectorOutput",
]
# Of these only what is used.
PARTS = {
    "vllm.config.kv_transfer:KVTransferConfig": ["kv_connector_module_path", "kv_connector_extra_config", "engine_id", "kv_role", "kv_load_failure_policy"],
    "vllm.config.parallel:ParallelConfig": [
        "rank", "world_size", "tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    ],
    "vllm.config.model:ModelConfig": ["model", "dtype", "use_mla", "get_total_num_kv_heads", "get_total_num_hidden_layers"],
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest": ["kv_transfer_params", "return_token_ids"],
    "vllm.entrypoints.openai.completion.protocol:CompletionResponse": ["kv_transfer_params"],
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": ["kv_transfer_params"],
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ["get_block_ids"],
    "vllm.v1.request:Request": [
        "self.request_id", "self.prompt_token_ids", "self.num_prompt_tokens", "self.num_computed_tokens", "self.kv_transfer_params", "self.status",
        "self.prompt_embeds", "self.mm_features", "self.lora_request", "self.cache_salt",
    ],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
    ],
    "vllm.v1.core.sched.output:NewRequestData": ["req_id", "block_ids", "num_computed_tokens"],
    "vllm.v1.core.sched.output:CachedRequestData": ["req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"],
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ["identifier", "mm_hash", "mm_position"],
    "vllm.v1.request:RequestStatus": ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"],
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": ["P2P"],
    "vllm.forward_context:ForwardContext": ["attn_metadata"],
    "vllm.platforms.interface:Platform": ["is_cpu"],
}  # fmt: skip
# Read where there is one.
FUNCTIONS = ["vllm.v1.metrics.utils:create_metric_per_engine", "vllm.logger:init_logger"]


def surface(source: Source) -> dict[str, Any]:
    """What a vLLM offers of all that."""
    found: dict[str, Any] = {}
    for name in WHOLE:
        members = source.members(name)
        # What begins with two underscores is Python's, but for the constructor; what a constructor sets is vLLM's.
        said = {one: word for one, word in (members or {}).items() if one == "__init__" or not one.startswith(("__", "self."))}
        found[name] = NOWHERE if members is None else said
    for name, parts in PARTS.items():
        members = source.members(name)
        found[name] = NOWHERE if members is None else {part: members[part] for part in parts if part in members}
    return found | {name: source.said(name) for name in FUNCTIONS}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def recorded(version: str) -> dict[str, Any]:
    """What was written down of that minor version, or, where nothing was, of the newest."""
    own = RECORDS / f"{minor(version)}.json"
    newest = max(RECORDS.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    return dict(json.loads((own if own.is_file() else newest).read_text()))


def connector_differences() -> list[str]:
    """Where our connector does not fit the interface that is installed: what it must implement, and what it implements for nobody."""
    from weft.vllm import WeftConnector

    base = getattr(importlib.import_module(BASE), "KVConnectorBase_V1")
    lines = [f"WeftConnector does not implement {name}" for name in sorted(WeftConnector.__abstractmethods__)]
    # It has two halves, each a class of its own.
    ours = WeftConnector.__mro__[: WeftConnector.__mro__.index(base)]
    for name, member in {name: member for kind in ours for name, member in vars(kind).items()}.items():
        if name.startswith("_") or not (callable(member) or isinstance(member, (classmethod, property))):
            continue
        if not hasattr(base, name):
            lines.append(f"WeftConnector.{name} overrides nothing: vLLM will not call it")
            continue
        takes, called = _parameters(getattr(WeftConnector, name)), _parameters(getattr(base, name))
        if takes != called:
            lines.append(f"WeftConnector.{name} takes ({', '.join(takes)}), and is called with ({', '.join(called)})")
    return lines


def compare(source: Source, version: str) -> tuple[str, list[str]]:
    """Of the source alone: nothing is imported."""
    was, found = recorded(version), surface(source)
    lines = differences(was, found)
    members = sum(len(one) if isinstance(one, dict) else 1 for one in was.values()) - 1
    return f"vLLM {version}, written for {was['version']}: {members} things compared, {len(lines)} differ", lines


def check() -> tuple[str, list[str]]:
    """Of the vLLM that is installed, with our connector beside its interface."""
    import vllm

    source = Source.installed("vllm")
    assert source is not None
    verdict, lines = compare(source, vllm.__version__)
    ours = connector_differences()
    return f"{verdict}; of the connector itself {len(ours)}", lines + ours


def _parameters(function: Any) -> list[str]:
    if isinstance(function, property):
        return []
    return [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in inspect.signature(function).parameters.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="an unpacked wheel or a checkout, instead of what is installed")
    parser.add_argument("--version", help="which version that is")
    parser.add_argument("--record", action="store_true", help="write down what is there")
    arguments = parser.parse_args()
    if arguments.source and not arguments.version:
        parser.error("--source needs --version")
    if arguments.record:
        source, version = (Source(arguments.source), arguments.version) if arguments.source else _installed()
        (RECORDS / f"{minor(version)}.json").write_text(json.dumps({"version": version, **surface(source)}, indent=1, sort_keys=True) + "\n")
        return 0
    verdict, moved = compare(Source(arguments.source), arguments.version) if arguments.source else check()
    print("\n".join([*moved, verdict]))
    return 1 if moved else 0


def _installed() -> tuple[Source, str]:
    import vllm

    source = Source.installed("vllm")
    assert source is not None
    return source, vllm.__version__


if __name__ == "__main__":
    sys.exit(main())
