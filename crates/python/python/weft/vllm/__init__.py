"""vLLM's KV caches over Weft: disaggregated prefill and decode.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "WeftConnector", "kv_connector_module_path": "weft.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The prefill side holds the blocks of a finished prompt under a lease and says where they are; the decode side fetches them one-sidedly, whatever
its own tensor parallelism, and computes the prompt itself where anything at all goes wrong.
"""

from ._connector import WeftConnector

__all__ = ["WeftConnector"]
