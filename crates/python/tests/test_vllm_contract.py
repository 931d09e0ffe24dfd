"""The interface that weft.vllm was written for, beside the one that is installed. Without vLLM there is nothing to compare (what was written down is looked at by `test_doors.py`)."""

import sys
from pathlib import Path

import pytest
from needs import needs

needs("vllm")
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_tests"))


def test_the_interface_is_the_one_that_we_were_written_for():
    import contract

    verdict, moved = contract.check()
    assert not moved, "\n".join([verdict, *moved])


def test_a_tier_or_policy_that_does_not_fit_is_named(monkeypatch):
    import contract
    import vllm

    tier, policy = contract.OURS["WeftTier"], contract.OURS["WeftPolicy"]
    if not {tier, policy} <= set(contract.recorded(vllm.__version__)):
        pytest.skip(f"no tier was written for vLLM {vllm.__version__}")
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    assert contract.our_differences(vllm.__version__) == []
    # vLLM calls something else than it did, asks for something new, and no longer for something else.
    monkeypatch.setattr(SecondaryTierManager, "lookup", lambda self, keys, req_context: None)
    monkeypatch.delattr(SecondaryTierManager, "touch")
    monkeypatch.setattr(CachePolicy, "evict", lambda self, n: None)
    told = [
        "WeftTier.lookup takes (self, key, req_context), and is called with (self, keys, req_context)",
        "WeftTier.touch overrides nothing: vLLM will not call it",
        "WeftPolicy.evict takes (self, n, protected), and is called with (self, n)",
    ]
    assert contract.our_differences(vllm.__version__) == told
    verdict, moved = contract.check()
    assert moved[-3:] == told, verdict
