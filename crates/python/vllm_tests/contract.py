"""What weft.vllm takes for granted of vLLM, written down: `contract.py` compares it with the installed vLLM, `contract.py --record` writes it anew.

vLLM calls its connector interface experimental. When it moves, this says what moved, before anything fails in a way that has to be understood first.
Signatures are taken from the source, so that they read the same under every Python.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("contract.json")
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
# Of these only what is used.
PARTS = {
    "vllm.config:KVTransferConfig": ["kv_connector_module_path", "kv_connector_extra_config", "engine_id", "kv_role", "kv_load_failure_policy"],
    "vllm.config:ParallelConfig": ["rank", "world_size", "tensor_parallel_size"],
    "vllm.config:ModelConfig": ["model", "dtype", "use_mla", "get_total_num_kv_heads", "get_total_num_hidden_layers"],
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
    "vllm.platforms:current_platform": ["is_cpu"],
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
# What is said of something that vLLM does not have.
NOWHERE = "not there"
FUNCTIONS = [
    "vllm.v1.metrics.utils:create_metric_per_engine", "vllm.logger:init_logger",
    f"{OFFLOAD}.base:get_offload_group_idx", f"{OFFLOAD}.cpu.policies.base:order_request_keys",
]  # fmt: skip


def surface() -> dict[str, Any]:
    """What the installed vLLM offers of all that."""
    import vllm

    found: dict[str, Any] = {"vllm": vllm.__version__}
    for name in WHOLE:
        thing = _named(name)
        found[name] = NOWHERE if thing is None else _members(thing, None)
    for name, parts in PARTS.items():
        thing = _named(name)
        found[name] = NOWHERE if thing is None else _members(thing, parts)
    for name in FUNCTIONS:
        thing = _named(name)
        found[name] = NOWHERE if thing is None else _signature(thing)
    return found


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A line for each thing that is not as it was. The version alone is no difference."""
    lines = []
    for name, was in recorded.items():
        now = found.get(name, NOWHERE)
        if name == "vllm" or was == now:
            continue
        if isinstance(was, str) or isinstance(now, str):
            lines.append(f"{name} was {was if isinstance(was, str) else 'a class'}, now it is {now if isinstance(now, str) else 'a class'}")
            continue
        for member in sorted({**was, **now}):
            if member not in now:
                lines.append(f"{name}.{member} is gone; it was {was[member]}")
            elif member not in was:
                lines.append(f"{name}.{member} is new: {now[member]}")
            elif was[member] != now[member]:
                lines.append(f"{name}.{member} was {was[member]}, is {now[member]}")
    return lines


def our_differences() -> list[str]:
    """Where our classes do not fit the interfaces that are installed: what they must implement, and what they implement for nobody."""
    from weft.vllm import WeftConnector, WeftPolicy, WeftTier

    pairs = [
        (WeftConnector, WHOLE[0]),
        (WeftTier, f"{OFFLOAD}.tiering.base:SecondaryTierManager"),
        (WeftPolicy, f"{OFFLOAD}.cpu.policies.base:CachePolicy"),
    ]
    return [line for ours, base in pairs for line in fit(ours, _named(base))]


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


def check() -> tuple[str, list[str]]:
    recorded, found = json.loads(RECORD.read_text()), surface()
    lines = differences(recorded, found) + our_differences()
    members = sum(1 if isinstance(was, str) else len(was) for was in recorded.values())
    return f"vLLM {found['vllm']}, written for {recorded['vllm']}: {members} things compared, {len(lines)} differ", lines


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def _members(thing: Any, wanted: list[str] | None) -> dict[str, str]:
    kind = thing if isinstance(thing, type) else type(thing)
    whole = wanted is None
    if wanted is None and issubclass(kind, enum.Enum):
        wanted = [entry.name for entry in kind]
    elif wanted is None:
        fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        # Dunder methods are those of dataclasses, save the constructor where somebody wrote one.
        wanted = fields + [name for name in vars(kind) if not name.startswith("__") or (name == "__init__" and not fields)]
        wanted = [name for name in wanted if not name.startswith("_abc_")]
    return {name: said for name in sorted(set(wanted)) if (said := _member(kind, name, whole)) is not None}


def _member(kind: type, name: str, whole: bool) -> str | None:
    if name.startswith("self."):
        return "set by the constructor" if f"{name}:" in (source := inspect.getsource(kind)) or f"{name} =" in source else None
    fields = getattr(kind, "__dataclass_fields__", {})
    if name in fields:
        default = fields[name].default
        told = whole and default is not dataclasses.MISSING
        return f"a field, {default!r} unless told" if told else "a field"
    member = inspect.getattr_static(kind, name, None)
    if member is None:
        return "a field" if name in getattr(kind, "__annotations__", {}) else None
    if issubclass(kind, enum.Enum) and not callable(member):
        return "a value"
    if isinstance(member, property) or not (callable(member) or isinstance(member, (classmethod, staticmethod))):
        return "a property"
    abstract = "abstract " if name in getattr(kind, "__abstractmethods__", ()) else ""
    of = "of the class " if isinstance(member, classmethod) else ""
    return f"{abstract}{of}{_signature(getattr(kind, name))}"


def _signature(function: Any) -> str:
    parsed = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    if not isinstance(parsed, ast.FunctionDef):
        return str(inspect.signature(function))
    returned = f" -> {ast.unparse(parsed.returns)}" if parsed.returns else ""
    # Whether a name is quoted says nothing.
    return f"({ast.unparse(parsed.args)}){returned}".replace("'", "").replace('"', "")


def _parameters(function: Any) -> list[str]:
    if isinstance(function, property):
        return []
    return [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in inspect.signature(function).parameters.values()]


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        RECORD.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
    else:
        verdict, moved = check()
        print("\n".join([*moved, verdict]))
        sys.exit(1 if moved else 0)
