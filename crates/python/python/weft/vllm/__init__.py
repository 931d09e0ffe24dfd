"""vLLM's KV caches over Weft: disaggregated prefill and decode.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "WeftConnector", "kv_connector_module_path": "weft.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The prefill side holds the blocks of a finished prompt under a lease and says where they are, and the decode side fetches them one-sidedly; or,
where the prefill side offers it (`"mode": "push"`), the decode side says first where there is room, and the prefill side writes every layer
there while it computes the next. Tensor parallelism may differ, and the decode side computes the prompt itself where anything at all goes wrong.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._connector import WeftConnector

__all__ = ["WeftConnector"]


def __getattr__(name: str) -> Any:
    # Only who asks for the connector needs vLLM.
    if name == "WeftConnector":
        from ._connector import WeftConnector

        return WeftConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
