"""Weft behind vLLM's own managers of offloaded blocks: what is stored comes back after a restart, and what does not come back is told."""

import sys
from pathlib import Path

import pytest

from needs import needs

needs("vllm")
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_tests"))

import tiers  # noqa: E402


@pytest.fixture
def engine():
    started = []

    def start(*arguments, **more):
        started.append(tiers.Engine(*arguments, **more))
        return started[-1]

    def stop():
        while started:
            started.pop().stop()

    start.stop = stop
    yield start
    stop()


def test_blocks_outlive_memory_and_engine(engine, tmp_path):
    numbers = list(range(24))
    one = engine(tiers.weft_tier(tmp_path / "kv"))
    one.store("a", numbers, tiers.fill)
    # They leave the memory of the engine, and come back from the tier.
    one.forget()
    assert one.load("b", [*numbers, 99], tiers.look) == 24
    engine.stop()
    again = engine(tiers.weft_tier(tmp_path / "kv"))
    assert again.load("c", numbers, tiers.look) == 24
    assert again.tier._store.stat()["tiers"][0]["recovered"] == 24


def test_blocks_of_another_revision_dtype_tenant_or_layout_are_no_hit(engine, tmp_path):
    engine(tiers.weft_tier(tmp_path / "kv")).store("a", [1, 2], tiers.fill)
    engine.stop()
    others = [
        ({"revision": "s"}, {}), ({"tenant": "other"}, {}), ({"quantisation": "fp8"}, {}), ({}, {"dtype": "float16"}), ({}, {"model": "small"}),
        ({}, {"kv_cache_layout": "NHD"}), ({}, {"parallel": {"tp_size": 2}}),
    ]  # fmt: skip
    for told, changed in others:
        other = engine(tiers.weft_tier(tmp_path / "kv", **told), **changed)
        assert other.load("b", [1, 2], tiers.look) == 0, (told, changed)
        engine.stop()
    assert engine(tiers.weft_tier(tmp_path / "kv")).load("c", [1, 2], tiers.look) == 2


def test_what_is_not_told_is_a_refusal(engine, tmp_path):
    for field in ("revision", "quantisation", "tenant", "directory", "capacity"):
        tier = tiers.weft_tier(tmp_path / "kv")
        del tier[field]
        with pytest.raises(ValueError, match=f"needs '{field}'"):
            engine(tier)
    with pytest.raises(ValueError, match="did you mean 'revision'"):
        engine(tiers.weft_tier(tmp_path / "kv", revison="r"))
    with pytest.raises(ValueError, match="needs 'scales'"):
        engine(tiers.weft_tier(tmp_path / "kv"), dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="does not tell model"):
        engine(tiers.weft_tier(tmp_path / "kv"), model="")


def test_a_damaged_block_ends_the_prefix_and_is_not_asked_for_again(engine, tmp_path):
    numbers = list(range(16))
    engine(tiers.weft_tier(tmp_path / "kv")).store("a", numbers, tiers.fill)
    engine.stop()
    data = tmp_path / "kv" / "ext-00000.data"
    at = data.read_bytes().find(tiers.pattern(5)[:64])
    with data.open("r+b") as file:
        file.seek(at + 7)
        file.write(bytes([tiers.pattern(5)[7] ^ 1]))
    again = engine(tiers.weft_tier(tmp_path / "kv", enable_kv_events=True))
    assert again.load("b", numbers, tiers.look) == 5
    removed = [event for event in again.manager.take_events() if event.removed]
    assert [event.keys for event in removed] == [[tiers.key(5)]]
    # What follows it is there, and it itself can be stored again.
    assert again.load("c", numbers[6:], tiers.look) == 10
    again.store("d", [5], tiers.fill)
    again.forget()
    assert again.load("e", numbers, tiers.look) == 16


def test_a_tier_whose_files_are_gone_costs_no_request(engine, tmp_path):
    numbers = list(range(8))
    one = engine(tiers.weft_tier(tmp_path / "kv"))
    one.store("a", numbers, tiers.fill)
    one.forget()
    for data in (tmp_path / "kv").glob("ext-*.data"):
        with data.open("r+b") as file:
            file.truncate(0)
    assert one.load("b", numbers, tiers.look) == 0
    assert not one.tier._failed, "what was remembered of a request ends with it"


def test_events_tell_what_comes_and_what_is_evicted(engine, tmp_path):
    # Room for 64 blocks or so.
    one = engine(tiers.weft_tier(tmp_path / "kv", capacity=4 << 20, extent=4 << 20, enable_kv_events=True, policy="lru"), chunks=32)
    stored, removed = set(), set()
    for round in range(8):
        one.store(f"r{round}", list(range(round * 16, round * 16 + 16)), tiers.fill)
        for event in one.manager.take_events():
            assert event.medium.value == "STORAGE" and event.locality.value == "LOCAL"
            (removed if event.removed else stored).update(event.keys)
    assert stored == {tiers.key(n) for n in range(128)}
    assert removed and removed < stored
    there = {tiers.key(n) for n in range(128) if one.tier._porter.has(tiers.key(n))}
    assert there == stored - removed


def test_the_policy_is_driven_by_vllm(engine, tmp_path):
    one = engine(tiers.weft_tier(tmp_path / "kv"), chunks=32, policy="WeftPolicy", policy_path="weft.vllm")
    for round in range(6):
        one.store(f"s{round}", list(range(round * 10, round * 10 + 10)), tiers.fill)
        assert one.load(f"l{round}", list(range(10)), tiers.look) == 10
    assert len(one.primary._policy._line) == len(one.primary._policy._chunks) <= 32
    assert one.primary._policy.evict(33, set()) is None
    one.forget()
    assert len(one.primary._policy._line) == 0
