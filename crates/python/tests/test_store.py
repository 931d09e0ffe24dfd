"""A store of KV blocks: what is put comes back, or is a miss."""

import asyncio

import numpy as np
import pytest

import weft

BLOCK = 64 << 10
FIELDS = dict(
    model="m", revision="r", tokenizer="t", dtype="bf16", quantisation="none", scales="none",
    layout="nhd", block_tokens=16, lora="none", positions="rope", tenant="a",
)


@pytest.fixture
def agent():
    with weft.Agent("store") as agent:
        yield agent


def opened(agent, path, **more):
    return weft.Store(agent, {"kv": BLOCK}, directory=path / "kv", capacity=16 << 20, extent=8 << 20, **more)


def payload(count):
    return np.random.default_rng(7).integers(0, 256, count * BLOCK, dtype=np.uint8)


def test_what_is_put_comes_back_also_after_a_restart(agent, tmp_path):
    space, wanted = weft.Space(**FIELDS), payload(8)
    ids = space.chain(list(range(8 * 16)))
    with opened(agent, tmp_path, memory=8 << 20) as store:
        assert store.put(space, agent.register(wanted), ids).wait() == [3] * 8
        assert store.match_prefix(ids) == 8
    with opened(agent, tmp_path) as store:
        assert store.match_prefix([*ids, space.key(b"other")]) == 8
        found = np.zeros_like(wanted)
        assert store.get(agent.register(found), ids).wait(timeout=60) == [BLOCK] * 8
        assert (found == wanted).all()
        assert store.get(agent.register(found), [space.key(b"none")]).wait() == [0]
        tier = store.stat()["tiers"][0]
        assert (tier["recovered"], tier["hits"], tier["wrong"], tier["aside"]) == (8, 8, 0, None)


def test_answers_can_be_awaited(agent, tmp_path):
    space, wanted = weft.Space(**FIELDS), payload(2)

    async def there_and_back(store):
        ids = [space.key(b"one"), space.key(b"two")]
        assert await store.put(space, agent.register(wanted), ids, chained=False) == [1, 1]
        found = np.zeros_like(wanted)
        # The other way around.
        assert await store.get(agent.register(found), ids, offsets=[BLOCK, 0]) == [BLOCK, BLOCK]
        assert (found[:BLOCK] == wanted[BLOCK:]).all() and (found[BLOCK:] == wanted[:BLOCK]).all()

    with opened(agent, tmp_path) as store:
        asyncio.run(there_and_back(store))


def test_torch_tensors_are_memory_too(agent, tmp_path):
    torch = pytest.importorskip("torch")
    space = weft.Space(**FIELDS)
    wanted = torch.arange(BLOCK // 2, dtype=torch.float16)
    with opened(agent, tmp_path) as store:
        assert store.put(space, agent.register(wanted), [space.key(b"t")]).wait() == [1]
        found = torch.zeros_like(wanted)
        assert store.get(agent.register(found), [space.key(b"t")]).wait() == [BLOCK]
        assert torch.equal(found, wanted)


def test_holds_evictions_and_purges(agent, tmp_path):
    space = weft.Space(**FIELDS)
    ids = space.chain(list(range(4 * 16)))
    with opened(agent, tmp_path) as store:
        store.put(space, agent.register(payload(4)), ids).wait()
        with store.hold(ids[:2]) as held:
            assert held.count == 2
            assert store.evict(ids) == 2
        erased, left = store.purge("a").wait()
        assert erased >= 2 and left == 0
        assert store.match_prefix(ids) == 0


def test_what_cannot_be_is_refused_by_name(agent, tmp_path):
    with pytest.raises(weft.InvalidCall, match="the nearest is `dtype`"):
        weft.Space(**{**FIELDS, "dtypes": "x"})
    with pytest.raises(weft.InvalidCall, match="lora"):
        weft.Space(**{name: value for name, value in FIELDS.items() if name != "lora"})
    with pytest.raises(weft.InvalidCall, match="below one extent"):
        weft.Store(agent, {"kv": BLOCK}, directory=tmp_path / "small", capacity=1 << 20, extent=8 << 20)
    with opened(agent, tmp_path) as store:
        with pytest.raises(weft.InvalidCall, match="in use"):
            opened(agent, tmp_path)
        with pytest.raises(weft.InvalidCall, match="sixteen bytes"):
            store.match_prefix([b"short"])
    with pytest.raises(weft.InvalidCall, match="closed"):
        store.match_prefix([])
    with pytest.raises(weft.InvalidCall, match="not of"):
        weft.Store(agent, {"kv": 2 * BLOCK}, directory=tmp_path / "kv", capacity=16 << 20, extent=8 << 20)
