"""A store of KV blocks: what is put comes back, or is a miss."""

import asyncio
import select

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


def test_what_comes_and_goes_is_told_with_its_tier(agent, tmp_path):
    space = weft.Space(**FIELDS)
    ids = space.chain(list(range(3 * 16)))
    with opened(agent, tmp_path, memory=8 << 20, events=8) as store:
        store.put(space, agent.register(payload(3)), ids).wait()
        events, lost = store.take_events()
        assert lost == 0 and sorted((tier, kind, there) for _, there, tier, kind in events) == [(0, "memory", True)] * 3 + [(1, "files", True)] * 3
        assert {id for id, *_ in events} == set(ids)
        assert store.evict(ids) == 3
        gone, lost = store.take_events(2)
        assert [there for _, there, *_ in gone] == [False, False] and lost == 0
        assert len(store.take_events()[0]) == 4
        # Who does not take them is told how many were lost.
        store.put(space, agent.register(payload(3)), ids).wait()
        store.evict(ids)
        events, lost = store.take_events()
        assert len(events) == 8 and lost == 4
    with opened(agent, tmp_path) as store:
        store.put(space, agent.register(payload(3)), ids).wait()
        assert store.take_events() == ([], 0)


def errands(porter):
    assert porter.drain(60) and porter.idle
    return {job: (done, why) for job, done, _, _, why in porter.ended()}


def test_a_porter_carries_blocks_by_their_keys_and_nobody_waits(agent, tmp_path):
    space, wanted, keys = weft.Space(**FIELDS), payload(6), [bytes([n]) * 36 for n in range(6)]
    memory, places = agent.register(wanted), [n * BLOCK for n in range(6)]
    with opened(agent, tmp_path, events=64) as store, weft.Porter(store, space, events=True) as porter:
        assert not porter.has(keys[0])
        porter.put(7, memory, keys, places)
        assert select.select([porter], [], [], 60)[0], "it says when something has ended"
        assert errands(porter) == {7: ([True] * 6, None)}
        assert not select.select([porter], [], [], 0)[0]
        assert porter.has(keys[5]) and not porter.has(b"other")
        events, lost, unnamed = porter.events()
        assert sorted(events) == [(key, True, 0, "files") for key in keys] and (lost, unnamed) == (0, 0)
        found = np.zeros_like(wanted)
        porter.get(1, agent.register(found), [*keys[::-1], b"other"][:6], places)
        porter.find(2, [keys[3], b"other"])
        told = errands(porter)
        assert told[1][0] == [True] * 6 and told[2][0] == [True, False]
        assert (found.reshape(6, -1) == wanted.reshape(6, -1)[::-1]).all()
        # Each block in a memory of its own.
        apart = [np.zeros(BLOCK, np.uint8) for _ in range(2)]
        porter.get_each(3, [agent.register(one) for one in apart], [keys[4], b"other"])
        done, why = errands(porter)[3]
        assert done == [True, False] and (apart[0] == wanted[4 * BLOCK : 5 * BLOCK]).all()
        porter.used(keys)
        porter.evict(4, keys[::-1])
        # What others follow goes after them.
        assert errands(porter)[4][0][0] and {key for key, there, *_ in porter.events()[0] if not there} >= {keys[5]}
    with pytest.raises(weft.InvalidCall, match="closed"):
        porter.has(keys[0])


def test_a_porter_refuses_what_does_not_fit_and_names_what_failed(agent, tmp_path):
    space, wanted = weft.Space(**FIELDS), payload(4)
    memory = agent.register(wanted)
    with opened(agent, tmp_path) as store, weft.Porter(store, space, queue=2 * BLOCK) as porter:
        porter.put(1, memory, [b"a", b"b", b"c"], [0, BLOCK, 2 * BLOCK])
        done, why = errands(porter)[1]
        assert done == [False] * 3 and "no more fit" in why and porter.refused == 1
        porter.put(2, memory, [b"a", b"b"], [0, 4 * BLOCK])
        done, why = errands(porter)[2]
        assert done == [False, False] and why, "outside of the memory"
        with pytest.raises(weft.InvalidCall, match="2 keys, and 1 offsets"):
            porter.put(3, memory, [b"a", b"b"], [0])
        porter.put(4, memory, [b"x" * 1025], [0])
        done, why = errands(porter)[4]
        assert done == [False] and "1025" in why


def test_damage_is_a_miss_to_a_porter_and_the_rest_comes(agent, tmp_path):
    space, wanted, keys = weft.Space(**FIELDS), payload(4), [b"%d" % n for n in range(4)]
    places = [n * BLOCK for n in range(4)]
    with opened(agent, tmp_path, events=16) as store, weft.Porter(store, space, events=True) as porter:
        porter.put(1, agent.register(wanted), keys, places)
        errands(porter)
        porter.events()
        data = tmp_path / "kv" / "ext-00000.data"
        bytes_there = data.read_bytes()
        at = bytes_there.find(wanted[2 * BLOCK : 2 * BLOCK + 64].tobytes())
        with data.open("r+b") as file:
            file.seek(at + 100)
            file.write(bytes([bytes_there[at + 100] ^ 1]))
        found = np.zeros_like(wanted)
        porter.get(2, agent.register(found), keys, places)
        assert errands(porter)[2][0] == [True, True, False, True]
        assert not porter.has(keys[2])
        assert porter.events()[0] == [(keys[2], False, 0, "files")]


def test_a_line_says_who_leaves(agent):
    line = weft.Line(8, "lru")
    keys = [b"%d" % n for n in range(6)]
    for key in keys:
        line.insert(key, pinned=True)
    assert line.leave(1, []) is None
    for key in keys:
        assert line.pin(key, False)
    line.request([*keys, b"other"])
    assert line.leave(2, [keys[5]]) == [keys[4], keys[3]]
    assert line.leave(4, [keys[5]]) is None and len(line) == 4 and line.idle == 4
    assert line.remove(keys[0]) and not line.remove(keys[0])
    with pytest.raises(weft.InvalidCall, match="no policy"):
        weft.Line(8, "mru")
