"""The connector under the name that those in front of vLLM know: Dynamo's workers, llm-d's routing sidecar and KServe speak to whatever is called `NixlConnector`, and refuse
other names, or know no protocol for them.

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "weft.vllm.nixl", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM takes the class of the module before its own of that name. Nothing of NIXL is here (`weft.nixl` is something else: NIXL's Python API).
"""

from ._connector import WeftConnector

__all__ = ["NixlConnector"]


class NixlConnector(WeftConnector):
    """What the prefill side answers is for the decode side, and goes there as it is: that is all of NIXL's protocol that they speak."""
