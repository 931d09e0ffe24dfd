"""vLLM's KV caches over Weft: disaggregated prefill and decode.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "WeftConnector", "kv_connector_module_path": "weft.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

How prompts are handed off, fetched or pushed (`"mode": "push"`), is `weft.hand_off`. Where anything at all goes wrong, the decode side computes the prompt itself,
and says why.

For vLLM's OffloadingConnector, which keeps blocks in memory and in tiers behind it, there are `WeftTier`, a tier on `weft.Store`, and `WeftPolicy`, who leaves memory.
"""

from typing import Any

__all__ = ["WeftConnector", "WeftPolicy", "WeftTier"]


def __getattr__(name: str) -> Any:
    # Only who asks for one of them needs vLLM.
    if name == "WeftConnector":
        from ._connector import WeftConnector

        return WeftConnector
    if name == "WeftTier":
        from ._tier import WeftTier

        return WeftTier
    if name == "WeftPolicy":
        from ._policy import WeftPolicy

        return WeftPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
