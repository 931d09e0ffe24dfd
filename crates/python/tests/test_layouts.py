"""Blocks of one layout and datatype that become blocks of another."""

import numpy as np
import pytest

import weft

BLOCKS, TOKENS, HEADS, ELEMENTS = 6, 16, 4, 32


def heads_first(blocks: int, tokens: int, unit: int, parts: int = 2) -> weft.Pages:
    head = tokens * unit
    block = HEADS * head
    return weft.Pages(
        blocks=blocks, tokens=tokens, heads=(0, HEADS), parts=parts, unit_bytes=unit,
        base=0, part_stride=blocks * block, block_stride=block, token_stride=unit, head_stride=head,
    )  # fmt: skip


def tokens_first(blocks: int, tokens: int, unit: int, parts: int = 2) -> weft.Pages:
    token = HEADS * unit
    block = tokens * token
    return weft.Pages(
        blocks=blocks, tokens=tokens, heads=(0, HEADS), parts=parts, unit_bytes=unit,
        base=0, part_stride=blocks * block, block_stride=block, token_stride=token, head_stride=unit,
    )  # fmt: skip


@pytest.fixture(scope="module")
def agent():
    with weft.Agent("layouts") as agent:
        yield agent


def test_blocks_of_16_tokens_turn_into_blocks_of_48(agent):
    near, far = heads_first(BLOCKS, TOKENS, 4 * ELEMENTS), tokens_first(2, 3 * TOKENS, 4 * ELEMENTS)
    source = np.random.default_rng(1).standard_normal((2, BLOCKS, HEADS, TOKENS, ELEMENTS), np.float32)
    memory, other = agent.register(source), agent.allocate(far.nbytes)
    blocks, others = [4, 0, 3, 5, 1, 2], [1, 0]
    conversion = weft.Conversion(near, blocks, far, others, (0, 96), (0, HEADS), elements="f32")
    assert conversion.is_move and conversion.nbytes_read == conversion.nbytes_written == near.nbytes
    conversion.run(memory, other)
    found = np.frombuffer(other, np.float32).reshape(2, 2, 3 * TOKENS, HEADS, ELEMENTS)
    # By sequence: part, token, head, element.
    there = source[:, blocks].transpose(0, 1, 3, 2, 4).reshape(2, 96, HEADS, ELEMENTS)
    assert (found[:, others].reshape(there.shape) == there).all()


def test_floats_become_halves_and_codes_with_scales(agent):
    near = heads_first(BLOCKS, TOKENS, 4 * ELEMENTS)
    source = np.random.default_rng(2).standard_normal((2, BLOCKS, HEADS, TOKENS, ELEMENTS), np.float32)
    memory, blocks = agent.register(source), list(range(BLOCKS))
    whole = (0, BLOCKS * TOKENS), (0, HEADS)

    halves = heads_first(BLOCKS, TOKENS, 2 * ELEMENTS)
    with pytest.raises(weft.InvalidCall, match="loses"):
        weft.Conversion(near, blocks, halves, blocks, *whole, elements="f32", other_elements="f16")
    conversion = weft.Conversion(near, blocks, halves, blocks, *whole, elements="f32", other_elements="f16", lossy=True)
    other = agent.allocate(halves.nbytes)
    conversion.run(memory, other)
    assert (np.frombuffer(other, np.float16) == source.astype(np.float16).ravel()).all()

    codes, scales = heads_first(BLOCKS, TOKENS, ELEMENTS), heads_first(BLOCKS, TOKENS, 4)
    there = weft.Conversion(
        near, blocks, codes, blocks, *whole, elements="f32", other_elements="fp8_e4m3", other_scales=scales, lossy=True
    )
    back = weft.Conversion(
        codes, blocks, near, blocks, *whole, elements="fp8_e4m3", scales=scales, other_elements="f32", lossy=True
    )
    coded, factors, again = (agent.allocate(nbytes) for nbytes in (codes.nbytes, scales.nbytes, near.nbytes))
    there.run(memory, coded, other_scales=factors)
    back.run(coded, again, scales=factors)
    decoded = np.frombuffer(again, np.float32).reshape(source.shape)
    greatest = np.abs(source).max(axis=-1, keepdims=True)
    assert (np.abs(decoded - source) <= greatest * 16 / 448 * 1.001).all() and not (decoded == source).all()


def test_what_cannot_be_is_refused(agent):
    near = heads_first(BLOCKS, TOKENS, 2 * ELEMENTS)
    whole = (0, TOKENS), (0, HEADS)
    for other, said, match in [
        (heads_first(BLOCKS, TOKENS, ELEMENTS), {}, "another model"),
        (heads_first(BLOCKS, TOKENS, 2 * ELEMENTS, parts=1), {}, "parts"),
        (near, {"elements": "f7"}, "no datatype"),
        (near, {"scales": [1.0, 1.0]}, "have no scales"),
        (near, {"other_elements": "i16"}, "no conversion"),
        (near, {"elements": "fp8_e4m3", "scales": [1.0]}, "1 scales for 2 parts"),
        (near, {"elements": "fp8_e4m3", "scales": [0.0, 1.0]}, "a scale is a number"),
    ]:
        with pytest.raises(weft.InvalidCall, match=match):
            weft.Conversion(near, [0], other, [1], *whole, **said, lossy=True)
    conversion = weft.Conversion(near, [0], near, [BLOCKS - 1], *whole)
    memory, short = agent.allocate(near.nbytes), agent.allocate(near.nbytes - 1)
    with pytest.raises(weft.Refused):
        conversion.run(memory, short)
    assert near.heads == (0, HEADS)
    packed = heads_first(BLOCKS, TOKENS, 2 * ELEMENTS, parts=1)
    assert packed.apart(2).nbytes == packed.nbytes
    with pytest.raises(weft.InvalidCall):
        packed.apart(3)
