"""KV blocks of a prompt in a store of memory and files: put by one opening, found again by the next."""

import tempfile

import numpy

import weft

BLOCK, BLOCKS = 256 << 10, 8

# Everything that the bytes depend on besides the tokens. A field that is left out is an error.
SPACE = weft.Space(
    model="llama-3.1-8b", revision="0e9e39f", tokenizer="llama-3.1", dtype="bf16", quantisation="none", scales="none",
    layout="nhd", block_tokens=16, lora="none", positions="rope-500000", tenant="example",
)  # fmt: skip


def opened(agent, directory):
    return weft.Store(
        agent, {"kv": BLOCK}, memory=16 << 20, directory=directory, capacity=64 << 20, extent=32 << 20
    )


if __name__ == "__main__":
    ids = SPACE.chain(list(range(16 * BLOCKS)))
    computed = numpy.full(BLOCKS * BLOCK, 7, numpy.uint8)
    fetched = numpy.zeros_like(computed)
    with weft.Agent("engine") as agent, tempfile.TemporaryDirectory() as directory:
        with opened(agent, directory) as store:
            assert store.match_prefix(ids) == 0
            tiers = store.put(SPACE, agent.register(computed), ids).wait()
            print(f"put {tiers.count(3)} blocks, in memory and in files")
        with opened(agent, directory) as store:
            there = store.match_prefix(ids)
            assert all(store.get(agent.register(fetched), ids[:there]).wait())
            assert (fetched == computed).all()
            print(f"found {there} blocks of {len(ids)}, and they are what was put")
