"""SGLang's HiCache storage on a store: its interface, hit rules and batches; pages come back after a restart."""

import inspect
from types import SimpleNamespace

import pytest

from needs import needs

needs("sglang")

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer,
)  # fmt: skip

from weft.sglang import WeftStorage  # noqa: E402

PAGE, LAYERS, WIDTH = 16, 2, 64
# What SGLang may call of a storage backend, as it was when this was written. A method that is new is a question to answer.
CALLED = {
    "batch_exists", "batch_exists_v2", "batch_get", "batch_get_v1", "batch_get_v2", "batch_set", "batch_set_v1", "batch_set_v2", "clear", "exists", "get",
    "get_stats", "on_host_pools_registered", "register_mem_host_pool_v2", "register_mem_pool_host", "set",
}  # fmt: skip


class Pool:
    """A host pool, as far as storage sees one: pages of tokens, or one state a page."""

    layout = "layer_first"

    def __init__(self, tokens: int, page_size: int = PAGE) -> None:
        self.page_size = page_size
        self.data = torch.randn(LAYERS, tokens, WIDTH).to(torch.bfloat16)

    def get_dummy_flat_data_page(self):
        return torch.zeros(LAYERS * self.page_size * WIDTH, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        return self.data[:, index : index + self.page_size].flatten()

    def set_from_flat_data_page(self, index, page):
        self.data[:, index : index + self.page_size] = page.reshape(LAYERS, self.page_size, WIDTH)


def config(path, **changed):
    told = {
        "directory": str(path), "capacity": {"kv": 4 << 20, "mamba": 1 << 20}, "extent": 1 << 20, "revision": "r", "quantisation": "none", "tenant": "a",
        **changed.pop("weft", {}),
    }  # fmt: skip
    fields = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=False, model_name="m/m", extra_config={"weft": told},
    )  # fmt: skip
    return HiCacheStorageConfig(**{**fields, **changed})


@pytest.fixture
def opened(tmp_path):
    made = []

    def open(pools=None, **changed):
        storage = WeftStorage(config(tmp_path / "kv", **changed), {})
        made.append(storage)
        for name, pool in (pools or {"kv": Pool(1024)}).items():
            storage.register_mem_pool_host(pool) if name == "kv" else storage.register_mem_host_pool_v2(pool, PoolName(name))
        storage.on_host_pools_registered()
        return storage

    yield open
    for storage in made:
        storage.close()


def keys(count, first=0):
    return [f"{number:064x}" for number in range(first, first + count)]


def indices(pages, page_size=PAGE):
    return torch.tensor([page * page_size + token for page in pages for token in range(page_size)])


def differences(base, ours):
    """Where a backend of ours is not called as it was written for."""
    methods = {name for name, member in vars(base).items() if callable(member) and not name.startswith("_")}
    lines = [f"SGLang may call {name}, which is new" for name in sorted(methods - CALLED)]
    lines += [f"SGLang no longer calls {name}" for name in sorted(CALLED - methods)]
    for name in sorted(methods & CALLED & set(vars(ours))):
        takes, called = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (ours, base))
        if takes != called:
            lines.append(f"{name} takes {takes}, and is called with {called}")
    return lines


def test_the_interface_is_the_one_that_we_were_written_for():
    assert differences(HiCacheStorage, WeftStorage) == []
    was = {name: member for name, member in vars(HiCacheStorage).items() if not name.startswith("_")}
    methods = {**was, "batch_get_v3": lambda self: None, "batch_exists": lambda self, hashes: 0}
    methods.pop("clear")
    moved = SimpleNamespace(**methods)
    assert differences(moved, WeftStorage) == [
        "SGLang may call batch_get_v3, which is new",
        "SGLang no longer calls clear",
        "batch_exists takes ['self', 'keys', 'extra_info'], and is called with ['self', 'hashes']",
    ]


def test_pages_come_back_after_a_restart_by_every_way_of_asking(opened):
    pool = Pool(1024)
    was = pool.data.clone()
    storage = opened({"kv": pool})
    assert storage.batch_set_v1(keys(4), indices([3, 4, 5, 6]), HiCacheStorageExtraInfo()) == [True] * 4
    assert storage.batch_set(keys(2, 4), [pool.get_data_page(7 * PAGE), pool.get_data_page(8 * PAGE)])
    assert storage.set(keys(1, 6)[0], pool.get_data_page(9 * PAGE))
    storage.close()
    again = opened({"kv": pool})
    assert again.batch_exists([*keys(7), "0" * 63 + "x"]) == 7 and again.exists(keys(1)[0]) and not again.exists("nothing")
    pool.data.zero_()
    assert again.batch_get_v1(keys(5), indices([10, 11, 12, 13, 14])) == [True] * 5
    for n in range(5):
        assert torch.equal(pool.data[:, (10 + n) * PAGE : (11 + n) * PAGE], was[:, (3 + n) * PAGE : (4 + n) * PAGE])
    got = again.batch_get([*keys(2, 5), "nothing"], [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert got[2] is None and torch.equal(got[1].reshape(LAYERS, PAGE, WIDTH), was[:, 9 * PAGE : 10 * PAGE])
    assert again.get("nothing") is None


def test_pools_have_hit_rules(opened):
    kv, states = Pool(1024), Pool(64, page_size=1)
    storage = opened({"kv": kv, "mamba": states})
    every, some = keys(6), keys(6)[2:4]
    done = storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=indices(range(6)), keys=every), PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([8, 9]), keys=some)])
    assert done == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True] * 2}

    def hit(policy, asked=None):
        return storage.batch_exists_v2(every, [PoolTransfer(PoolName.MAMBA, keys=asked, hit_policy=policy)])

    whole = hit(PoolHitPolicy.TRAILING_PAGES, ["x"])
    assert (whole.kv_hit_pages, whole.restorable_prefix_pages) == (4, [3, 4])
    assert hit(PoolHitPolicy.TRAILING_PAGES, ["x", "y"]).restorable_prefix_pages == [4]
    assert hit(PoolHitPolicy.ALL_PAGES).kv_hit_pages == 0
    assert storage.batch_exists_v2(every).kv_hit_pages == 6
    was = states.data.clone()
    states.data.zero_()
    got = storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([20, 21, 22]), keys=[*some, "nothing"])])
    assert got == {PoolName.MAMBA: [True, True, False]} and torch.equal(states.data[:, 20:22], was[:, 8:10])


def test_damage_is_a_miss_and_other_weights_are_no_hit(opened, tmp_path):
    pool = Pool(1024)
    storage = opened({"kv": pool})
    storage.batch_set_v1(keys(4), indices(range(4)))
    storage.close()
    other = opened({"kv": pool}, weft={"revision": "s"})
    assert other.batch_exists(keys(4)) == 0
    other.close()
    [data] = (tmp_path / "kv").rglob("ext-00000.data")
    wanted = pool.get_data_page(2 * PAGE).view(torch.uint8).numpy().tobytes()
    at = data.read_bytes().find(wanted[:64])
    with data.open("r+b") as file:
        file.seek(at + 50)
        file.write(bytes([wanted[50] ^ 1]))
    again = opened({"kv": pool})
    assert again.batch_get_v1(keys(4), indices([20, 21, 22, 23])) == [True, True, False, True]
    assert again.batch_exists(keys(4)) == 2


def test_what_is_not_told_is_a_refusal(opened):
    with pytest.raises(ValueError, match="needs 'revision'"):
        opened(weft={"revision": ""})
    with pytest.raises(ValueError, match="capacity for the pool 'mamba'"):
        opened({"kv": Pool(64), "mamba": Pool(64, 1)}, weft={"capacity": 4 << 20})
    with pytest.raises(ValueError, match="one owner"):
        opened(is_mla_model=True, tp_size=2)
