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
OFFLOAD = "vllm.v1.kv_offload"

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
    f"{OFFLOAD}.tiering.base:SecondaryTierManager",
    f"{OFFLOAD}.tiering.base:TransferJob",
    f"{OFFLOAD}.tiering.base:JobResult",
    f"{OFFLOAD}.cpu.policies.base:CachePolicy",
    f"{OFFLOAD}.cpu.policies.base:ChunkStatus",
    f"{OFFLOAD}.base:LookupResult",
    f"{OFFLOAD}.base:Medium",
    f"{OFFLOAD}.base:Locality",
    f"{OFFLOAD}.base:OffloadingEvent",
    f"{OFFLOAD}.base:RequestOffloadingContext",
]
# Which of them our classes implement.
OURS = {
    "WeftConnector": f"{BASE}:KVConnectorBase_V1",
    "WeftTier": f"{OFFLOAD}.tiering.base:SecondaryTierManager",
    "WeftPolicy": f"{OFFLOAD}.cpu.policies.base:CachePolicy",
}
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
    f"{OFFLOAD}.base:ReqContext": ["req_id", "get_offload_key_position"],
    f"{OFFLOAD}.config:OffloadingConfig": ["groups", "extra_config", "engine_id", "model", "cache", "parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"],
    f"{OFFLOAD}.config:OffloadingGroupConfig": ["tokens_per_block", "layer_names", "group_id"],
    f"{OFFLOAD}.config:OffloadingModelConfig": ["name", "dtype"],
    f"{OFFLOAD}.config:OffloadingCacheConfig": ["tokens_per_hash", "blocks_per_chunk"],
    f"{OFFLOAD}.config:OffloadingParallelConfig": [
        "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_index", "data_parallel_size", "is_parallelism_agnostic",
    ],
    f"{OFFLOAD}.base:OffloadingSpec": ["self.config", "self.kv_events_config"],
    f"{OFFLOAD}.tiering.factory:SecondaryTierFactory": ["create_secondary_tier", "get_tier_class"],
    f"{OFFLOAD}.cpu.policies.factory:CachePolicyFactory": ["get_cache_policy_cls"],
}  # fmt: skip
# Read where there is one.
FUNCTIONS = [
    "vllm.v1.metrics.utils:create_metric_per_engine", "vllm.logger:init_logger",
    f"{OFFLOAD}.base:get_offload_group_idx", f"{OFFLOAD}.cpu.policies.base:order_request_keys",
]  # fmt: skip
# The first version that WeftTier and WeftPolicy were written for: of those before, nothing of OFFLOAD is written down.
TIERS_SINCE = (0, 32)


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


def to_record(source: Source, version: str) -> dict[str, Any]:
    tiers = tuple(int(part) for part in minor(version).split(".")) >= TIERS_SINCE
    found = {name: said for name, said in surface(source).items() if tiers or not name.startswith(OFFLOAD)}
    return {"version": version, **found}


def our_differences(version: str) -> list[str]:
    """Where our classes do not fit the interfaces that are installed: what they must implement, and what they implement for nobody.
    Those whose interface is not written down of that version are for others."""
    import weft.vllm

    was = recorded(version)
    lines = []
    for ours, name in OURS.items():
        base = _named(name) if name in was else None
        # Without the interface ours cannot be made at all; that it is gone is told by `compare`.
        if base is not None:
            lines += fit(getattr(weft.vllm, ours), base)
    return lines


def fit(kind: type, base: type) -> list[str]:
    lines = [f"{kind.__name__} does not implement {name}" for name in sorted(kind.__abstractmethods__)]
    # A class may have halves, each a class of its own.
    ours = kind.__mro__[: kind.__mro__.index(base)]
    for name, member in {name: member for part in ours for name, member in vars(part).items()}.items():
        if name.startswith("_") or not (callable(member) or isinstance(member, (classmethod, property))):
            continue
        if not hasattr(base, name):
            lines.append(f"{kind.__name__}.{name} overrides nothing: vLLM will not call it")
            continue
        takes, called = _parameters(getattr(kind, name)), _parameters(getattr(base, name))
        if takes != called:
            lines.append(f"{kind.__name__}.{name} takes ({', '.join(takes)}), and is called with ({', '.join(called)})")
    return lines


def compare(source: Source, version: str) -> tuple[str, list[str]]:
    """Of the source alone: nothing is imported."""
    was, found = recorded(version), surface(source)
    lines = differences(was, found)
    members = sum(len(one) if isinstance(one, dict) else 1 for one in was.values()) - 1
    return f"vLLM {version}, written for {was['version']}: {members} things compared, {len(lines)} differ", lines


def check() -> tuple[str, list[str]]:
    """Of the vLLM that is installed, with our classes beside its interfaces."""
    import vllm

    source = Source.installed("vllm")
    assert source is not None
    verdict, lines = compare(source, vllm.__version__)
    ours = our_differences(vllm.__version__)
    return f"{verdict}; of our own classes {len(ours)}", lines + ours


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


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
        (RECORDS / f"{minor(version)}.json").write_text(json.dumps(to_record(source, version), indent=1, sort_keys=True) + "\n")
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
