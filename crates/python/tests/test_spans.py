"""Which bytes, in all the ways that Python has to say it."""

import numpy as np
import pytest

import weft
from pair import BLOCK, published, two_agents


@pytest.fixture(scope="module")
def pages():
    with two_agents("shared_memory") as (target, initiator, peer):
        source = np.repeat(np.arange(16, dtype=np.uint8), BLOCK)
        kept = published(target, "pages", source)
        array = np.zeros_like(source)
        yield array, lambda spans: peer.read(initiator.register(array), peer.region("pages"), spans).wait()
        del kept


@pytest.mark.parametrize(
    "spans",
    [
        [(5 * BLOCK, BLOCK), (2 * BLOCK, BLOCK)],
        [[5 * BLOCK, BLOCK], [2 * BLOCK, BLOCK]],
        ((5 * BLOCK, BLOCK), (2 * BLOCK, BLOCK)),
        iter([(5 * BLOCK, BLOCK), (2 * BLOCK, BLOCK)]),
        [np.array([5 * BLOCK, BLOCK]), (np.int32(2 * BLOCK), BLOCK)],
        (BLOCK, [5, 2]),
        (BLOCK, (5, 2)),
        (np.int64(BLOCK), range(2, 6, 3)),
        (BLOCK, iter([5, 2])),
        *[np.array([[5 * BLOCK, BLOCK], [2 * BLOCK, BLOCK]], kind) for kind in ("i8", "i4", "u8", "u4", "u2", ">i8")],
        *[(BLOCK, np.array([5, 2], kind)) for kind in ("i8", "i4", "u8", "u4", "u2", "u1", ">i4")],
        np.array([[5 * BLOCK, 0, BLOCK, 0], [2 * BLOCK, 0, BLOCK, 0]])[:, ::2],
    ],
    ids=lambda spans: type(spans).__name__,
)
def test_ways_to_say_blocks_5_and_2(pages, spans):
    array, read = pages
    array[:] = 0
    assert read(spans).bytes == 2 * BLOCK
    assert sorted(np.unique(array)) == [0, 2, 5]
    assert (array[5 * BLOCK : 6 * BLOCK] == 5).all() and (array[2 * BLOCK : 3 * BLOCK] == 2).all()


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        "text",
        b"bytes",
        1.5,
        [1, 2],
        [(1, 2, 3)],
        [(1,)],
        [("a", "b")],
        [(-1, 2)],
        [(2**64, 1)],
        [(2**64 - 1, 2)],
        (BLOCK, 3),
        (BLOCK, "text"),
        (BLOCK, [-1]),
        (BLOCK, [1.5]),
        (BLOCK, [2**63]),
        (BLOCK, np.array([-1])),
        (BLOCK, np.array([1.0])),
        (BLOCK, np.array([[1, 2]])),
        np.array([1, 2]),
        np.array([[1, 2, 3]]),
        np.array([[-1, 2]]),
        np.array([[0.0, 1.0]]),
        [(0, 17 * BLOCK)],
    ],
    ids=repr,
)
def test_what_says_nothing_is_an_invalid_call(pages, wrong):
    _, read = pages
    with pytest.raises(weft.InvalidCall) as error:
        read(wrong)
    assert isinstance(error.value, ValueError) and str(error.value)
