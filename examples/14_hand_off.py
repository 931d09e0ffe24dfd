"""Blocks of a prompt, from the process that computed them to another one that goes on with them. There is no engine around."""

import multiprocessing

import numpy

import weft
from weft.hand_off import HandOff, Layer

SHAPE = (64, 16, 4, 128)  # blocks, tokens of a block, heads, elements


def worker(name):
    agent = weft.Agent(name, secret="of two processes")
    cache = numpy.zeros(SHAPE, numpy.uint16)
    blocks, tokens, heads, unit = *SHAPE[:3], 2 * SHAPE[3]
    pages = weft.Pages(
        blocks=blocks, tokens=tokens, heads=(0, heads), parts=1, unit_bytes=unit, base=0, part_stride=0,
        block_stride=tokens * heads * unit, token_stride=heads * unit, head_stride=unit,
    )  # fmt: skip
    return cache, HandOff(agent, [Layer("layer", pages)], [agent.register(cache)], meaning={"model": "example"})


def decode(ticket):
    cache, hand_off = worker("decode")
    name = hand_off.want(ticket, b"the tokens")
    hand_off.fetch(name, blocks=[8, 1, 5], tokens=40)
    ended = hand_off.event(timeout=30)
    assert ended.reason is None and (cache[[8, 1]] == 7).all()
    hand_off.close()


if __name__ == "__main__":
    cache, prefill = worker("prefill")
    cache[:] = 7
    ticket = prefill.offer("prompt 1", blocks=[3, 9, 4], tokens=40, about=b"the tokens")
    process = multiprocessing.get_context("spawn").Process(target=decode, args=(ticket,))
    process.start()
    free = prefill.event(timeout=60)
    process.join()
    print(f"the blocks of {free.name} are free: {free.why}")
