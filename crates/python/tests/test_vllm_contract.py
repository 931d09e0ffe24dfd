"""The interface that weft.vllm was written for, beside the one that is installed. Without vLLM there is nothing to compare."""

import sys
from pathlib import Path

from needs import needs

needs("vllm")
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_tests"))


def test_the_interface_is_the_one_that_we_were_written_for():
    import contract

    verdict, moved = contract.check()
    assert not moved, "\n".join([verdict, *moved])


def test_what_moves_is_named():
    import contract

    was = {"vllm": "1", "a:A": {"stays": "(self)", "goes": "(self)", "moves": "(self, a)"}, "a:f": "(x)"}
    now = {"vllm": "2", "a:A": {"stays": "(self)", "comes": "abstract (self)", "moves": "(self, b)"}, "a:f": contract.NOWHERE}
    assert contract.differences(was, now) == [
        "a:A.comes is new: abstract (self)",
        "a:A.goes is gone; it was (self)",
        "a:A.moves was (self, a), is (self, b)",
        "a:f was (x), now it is not there",
    ]
    assert contract.differences(was, {**was, "vllm": "2"}) == []


def test_a_tier_or_policy_that_does_not_fit_is_named(monkeypatch):
    import contract
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    assert contract.our_differences() == []
    # vLLM calls something else than it did, asks for something new, and no longer for something else.
    monkeypatch.setattr(SecondaryTierManager, "lookup", lambda self, keys, req_context: None)
    monkeypatch.delattr(SecondaryTierManager, "touch")
    monkeypatch.setattr(CachePolicy, "evict", lambda self, n: None)
    assert contract.our_differences() == [
        "WeftTier.lookup takes (self, key, req_context), and is called with (self, keys, req_context)",
        "WeftTier.touch overrides nothing: vLLM will not call it",
        "WeftPolicy.evict takes (self, n, protected), and is called with (self, n)",
    ]
    verdict, moved = contract.check()
    assert any("SecondaryTierManager.touch is gone" in line for line in moved), verdict
