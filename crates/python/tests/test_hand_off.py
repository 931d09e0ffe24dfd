"""Hand-offs between real agents, with arrays in the place of an engine's cache."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

import weft
from pair import SECRET
from weft.hand_off import Desk, Ended, Free, HandOff, Layer, Lease, Origin, Push

BLOCKS, HEADS, ELEMENTS, TOKENS = 16, 4, 8, 20
PATIENCE = 60.0


class Worker:
    def __init__(self, name, rank=0, ranks=1, block=4, transport="shared_memory", granule=1, **options):
        self.agent = weft.Agent(name, secret=SECRET, transports=transport)
        self.block, self.heads = block, (rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        heads = self.heads[1] - self.heads[0]
        self.caches = [np.zeros((BLOCKS, heads, block, ELEMENTS), np.uint16) for _ in range(2)]
        unit = granule * ELEMENTS * 2
        pages = weft.Pages(
            blocks=BLOCKS, tokens=block // granule, heads=self.heads, parts=1, unit_bytes=unit, base=0, part_stride=0,
            block_stride=heads * block * ELEMENTS * 2, token_stride=unit, head_stride=block * ELEMENTS * 2,
        )  # fmt: skip
        layers = [Layer(f"layer.{nth}", pages, memory=nth, granule=granule) for nth in range(2)]
        memories = [self.agent.register(cache) for cache in self.caches]
        self.hand_off = HandOff(self.agent, layers, memories, meaning={"model": "tiny"}, rank=rank, ranks=ranks, **options)

    def fill(self, blocks, upto=TOKENS, layers=(0, 1)):
        for layer in layers:
            for token in range(upto):
                self.caches[layer][blocks[token // self.block], :, token % self.block] = expected(layer, token)[slice(*self.heads)]

    def check(self, blocks):
        for layer, cache in enumerate(self.caches):
            for token in range(TOKENS):
                got = cache[blocks[token // self.block], :, token % self.block]
                assert (got == expected(layer, token)[slice(*self.heads)]).all(), (layer, token)

    def event(self):
        return self.hand_off.event(PATIENCE)

    def close(self):
        self.hand_off.close()
        self.agent.close()


def expected(layer, token):
    return (1000 * layer + 100 * token + np.arange(HEADS * ELEMENTS)).reshape(HEADS, ELEMENTS).astype(np.uint16)


@contextlib.contextmanager
def workers(*made):
    try:
        yield made
    finally:
        for worker in made:
            worker.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_what_is_offered_is_fetched(transport):
    with workers(Worker("holder", transport=transport), Worker("reader", block=8, transport=transport)) as (holder, reader):
        there, here = [3, 9, 4, 1, 0], [8, 1, 15]
        holder.fill(there)
        ticket = holder.hand_off.offer("one", there, TOKENS, b"prompt")
        name = reader.hand_off.want(ticket, b"prompt")
        assert (name, holder.hand_off.held, reader.hand_off.wanted) == ("one", 1, 1)
        reader.hand_off.fetch(name, here, TOKENS)
        ended = reader.event()
        assert (ended.name, ended.reason, ended.transports) == ("one", None, (transport,))
        assert ended.nbytes == 2 * TOKENS * HEADS * ELEMENTS * 2
        reader.check(here)
        assert holder.event() == Free("one", "Served", "everybody has it")
        assert holder.hand_off.held == 0


def push(holder, there, chunks=(8, TOKENS), name="one", about=b"prompt"):
    """As an engine does: each chunk layer by layer, and in the end it is offered too."""
    holder.hand_off.compute(name, there, TOKENS, about)
    for upto in chunks:
        for layer in range(2):
            # Only now is it there: what was read before its time would be zeros.
            holder.fill(there, upto, (layer,))
            holder.hand_off.computed(name, upto, layer)
    holder.hand_off.offer(name, there, TOKENS, about)


@pytest.mark.parametrize(("holding", "reading"), [(2, 1), (1, 2), (4, 2)])
def test_layers_are_pushed_to_another_number_of_ranks(holding, reading):
    holders = [Worker(f"holder-{rank}", rank, holding) for rank in range(holding)]
    readers = [Worker(f"reader-{rank}", rank, reading, block=8) for rank in range(reading)]
    with workers(*holders, *readers):
        there, here = [3, 9, 4, 1, 0], [8, 1, 15]
        for reader in readers:
            reader.hand_off.want_from(Push("one", [holder.agent.address for holder in holders]), reading)
            reader.hand_off.fetch("one", here, TOKENS, about=b"prompt")
        for holder in holders:
            push(holder, there)
        for reader in readers:
            assert reader.event().cause is None
            reader.check(here)
        for holder in holders:
            assert holder.event() == Free("one", "Served", "everybody has it")


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_what_is_packed_comes_in_chunks_that_cut_it(transport):
    both = {"granule": 4, "transport": transport}
    with workers(Worker("holder", **both), Worker("reader", **both)) as (holder, reader):
        there, here = [3, 9, 4, 1, 0], [8, 1, 15, 2, 7]
        reader.hand_off.want_from(Push("one", [holder.agent.address]))
        reader.hand_off.fetch("one", here, TOKENS, about=b"prompt")
        push(holder, there, chunks=(3, 6, 19, TOKENS))
        assert reader.event().transports == (transport,)
        reader.check(here)


def test_a_desk_decides_for_all_ranks():
    """It gives the lease out, writes the ticket, and takes that of another engine."""
    holders, readers = [[Worker(f"{name}-{rank}", rank, 2) for rank in range(2)] for name in ("holder", "reader")]
    with workers(*holders, *readers):
        desk, there, here = Desk(secret=SECRET), [3, 9, 4, 1, 0], [8, 1, 15, 2, 7]
        lease = desk.lease(PATIENCE)
        for holder in holders:
            holder.fill(there)
            holder.hand_off.offer_leased("one", lease)
        ticket = desk.write(Origin("one", [holder.agent.address for holder in holders], there, TOKENS, lease), b"prompt")
        origin = Desk(secret=SECRET).open(ticket, b"prompt")
        for reader in readers:
            reader.hand_off.want_from(origin, readers=2)
            reader.hand_off.fetch("one", here, TOKENS)
        for reader in readers:
            assert reader.event().cause is None
            reader.check(here)
        for holder in holders:
            assert holder.event().cause == "Served"


def test_a_lease_that_a_rank_refuses_is_believed_by_nobody():
    with workers(Worker("holder"), Worker("reader")) as (holder, reader):
        desk = Desk(secret=SECRET)
        holder.hand_off.stop("one")
        assert holder.event().cause == "Stopped"
        lease = desk.lease(PATIENCE)
        holder.hand_off.offer_leased("one", lease)
        refused = holder.event()
        assert refused.cause == "Refused" and "used before" in refused.why
        holder.hand_off.stop("one")
        assert holder.event().cause == "Refused"
        reader.hand_off.want_from(Origin("one", [holder.agent.address], [1], 4, lease))
        reader.hand_off.fetch("one", [2], 4)
        assert reader.event().cause == "GivenUp"


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_what_comes_too_late_touches_nothing(transport):
    with workers(Worker("holder", transport=transport), Worker("reader", transport=transport, deadline=0.5)) as (holder, reader):
        here = [8, 1, 15, 2, 7]
        reader.hand_off.want_from(Push("one", [holder.agent.address]))
        reader.hand_off.fetch("one", here, TOKENS, about=b"prompt")
        assert reader.event().cause == "Late"
        # The blocks are another request's by now.
        for cache in reader.caches:
            cache[here] = 4711
        push(holder, [3, 9, 4, 1, 0])
        assert holder.event().cause == "Served"
        assert all((cache[here] == 4711).all() for cache in reader.caches)


def test_left_while_nobody_answers():
    """Somebody listens there who never says a word: unless it is left, the hand-off lasts until its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent, workers(Worker("reader", transport="tcp")) as (reader,):
        reader.hand_off.want_from(Push("one", [f"127.0.0.1:{silent.getsockname()[1]}"]))
        reader.hand_off.fetch("one", [8], 4, about=b"prompt")
        connecting, _ = silent.accept()
        reader.hand_off.leave("one")
        assert reader.event().cause == "Aborted"
        connecting.close()


def test_room_is_given_to_one_after_the_other():
    with workers(Worker("holder"), Worker("reader", landing_bytes=1)) as (holder, reader):
        there, here = [3, 9, 4, 1, 0], [8, 1, 15, 2, 7]
        for nth in range(4):
            reader.hand_off.want_from(Push(f"p{nth}", [holder.agent.address]))
            reader.hand_off.fetch(f"p{nth}", here, TOKENS, about=b"prompt")
        for nth in range(4):
            push(holder, there, name=f"p{nth}")
        assert [reader.event().cause for _ in range(4)] == [None] * 4
        reader.check(here)


class Relay:
    """A wire that flips a bit in large chunks of what comes from the far end, so many times."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.to, self.damage, self.damaged = self.listener.getsockname()[1], port, 0, 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
                threading.Thread(target=self.carry, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self.carry, args=(far, near, True), daemon=True).start()

    def carry(self, here, there, flips):
        with contextlib.suppress(OSError):
            while chunk := bytearray(here.recv(1 << 16)):
                if flips and len(chunk) >= 1024 and self.damaged < self.damage:
                    self.damaged += 1
                    chunk[len(chunk) // 2] ^= 0x10
                there.sendall(chunk)
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("damage", [1, 1_000_000])
def test_what_is_damaged_is_sent_again_or_not_believed(damage, pushes):
    with workers(Worker("holder", transport="tcp"), Worker("reader", transport="tcp")) as (holder, reader):
        there, here = [3, 9, 4, 1, 0], [8, 1, 15, 2, 7]
        relay = Relay(int(holder.agent.address.rpartition(":")[2]))
        address = f"127.0.0.1:{relay.port}"
        if pushes:
            reader.hand_off.want_from(Push("one", [address]))
            relay.damage = damage
            reader.hand_off.fetch("one", here, TOKENS, about=b"prompt")
            push(holder, there, chunks=(TOKENS,))
        else:
            holder.fill(there)
            lease = Lease(0, time.time_ns() & ~1, PATIENCE)
            holder.hand_off.offer_leased("one", lease)
            reader.hand_off.want_from(Origin("one", [address], there, TOKENS, lease))
            relay.damage = damage
            reader.hand_off.fetch("one", here, TOKENS)
        ended = reader.event()
        assert relay.damaged > 0
        # The relay leaves short pieces as they are, so where nothing else comes through whole, they may.
        assert damage > 1 or ended.cause is None, ended
        if ended.cause is None:
            reader.check(here)


def test_a_prompt_that_is_not_handed_off_says_why():
    with workers(Worker("holder", lease=0.2), Worker("reader", deadline=20.0)) as (holder, reader):
        holder.hand_off.offer("forgotten", [1], 4, b"prompt")
        assert holder.event() == Free("forgotten", "Expired", "nobody came for it in time")
        reader.hand_off.want_from(Push("other", [holder.agent.address]))
        holder.hand_off.compute("other", [1], 4, b"one prompt")
        reader.hand_off.fetch("other", [2], 4, about=b"another")
        assert "the prompt there is another one" in reader.event().reason
        holder.hand_off.preempt("other")
        holder.hand_off.stop("other")
        assert holder.event() == Free("other", "Stopped", "the request was given up there")
        reader.hand_off.want_from(Push("left", [holder.agent.address]))
        reader.hand_off.leave("left")
        assert reader.event() == Ended("left", "Aborted", "nobody here wants it any more", 0, 0.0, ())
        assert reader.hand_off.event(0.0) is None


def test_what_cannot_even_be_wanted_ends_like_everything_else():
    with workers(Worker("reader")) as (reader,):
        reader.hand_off.want_from(Push("nowhere", []))
        assert reader.hand_off.event(0.0) is None
        reader.hand_off.fetch("nowhere", [1], 4)
        assert reader.event().cause == "Invalid"
        reader.hand_off.want_from(Push("twice", [reader.agent.address]))
        reader.hand_off.want_from(Push("twice", [reader.agent.address]))
        reader.hand_off.fetch("twice", [1], 4)
        assert reader.event().cause == "Repeated"
        with pytest.raises(weft.InvalidCall, match="no such hand-off"):
            reader.hand_off.fetch("nowhere", [1], 4)


def test_tickets_are_believed_once_and_for_their_prompt_alone():
    with workers(Worker("holder"), Worker("reader")) as (holder, reader):
        ticket = holder.hand_off.offer("one", [1], 4, b"prompt")
        with pytest.raises(weft.NotBelieved) as refused:
            reader.hand_off.want(ticket, b"another")
        assert refused.value.reason == "about another"
        with pytest.raises(weft.NotBelieved) as refused:
            reader.hand_off.want(ticket[:-1] + bytes([ticket[-1] ^ 1]), b"prompt")
        assert refused.value.reason == "forged"
        reader.hand_off.want(ticket, b"prompt")
        with pytest.raises(weft.InvalidCall, match="used before"):
            reader.hand_off.want(ticket, b"prompt")


def test_what_is_closed_hands_nothing_off():
    with workers(Worker("holder")) as (holder,):
        holder.hand_off.close()
        with pytest.raises(weft.InvalidCall, match="closed"):
            holder.hand_off.offer("one", [1], 4, b"prompt")
