"""Push mode of weft.vllm between real agents, with arrays in the place of an engine's cache."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import weft
from pair import SECRET
from weft.vllm._description import Description, Layer, Meaning, Mismatch
from weft.vllm._landing import Awaited, Landings, PushAborted, PushFailed, PushLate, Surroundings
from weft.vllm._options import Options
from weft.vllm._partner import Partners
from weft.vllm._push import Computed, Loop, Pushes, _Target

LAYERS = ["layer.0", "layer.1", "layer.2"]
BLOCKS, TOKENS, HEADS, ELEMENTS = 32, 4, 4, 8
PATIENCE = 30.0


class Worker:
    """One rank of an engine: as prefill side it has numbers, as decode side zeros."""

    def __init__(self, engine, rank=0, ranks=1, *, fill=0, granule=1, deadline=PATIENCE, transport="shared_memory", landing_bytes=1 << 30):
        self.agent = weft.Agent(f"{engine}-{rank}", secret=SECRET, transports=transport)
        heads = HEADS // ranks
        self.heads = (rank * heads, (rank + 1) * heads)
        self.caches = {name: np.zeros((BLOCKS, heads, TOKENS, ELEMENTS), np.uint16) for name in LAYERS}
        self.memories = []
        layers = {}
        for nth, (name, cache) in enumerate(self.caches.items()):
            cache += fill
            self.memories.append(self.agent.register(cache))
            self.agent.publish(f"kv/{nth}", self.memories[-1])
            unit = granule * ELEMENTS * 2
            layers[name] = Layer(
                region=nth, blocks=BLOCKS, tokens=TOKENS, granule=granule, heads=self.heads, parts=1, unit_bytes=unit, base=0,
                part_stride=0, block_stride=heads * TOKENS * ELEMENTS * 2, granule_stride=unit, head_stride=TOKENS * ELEMENTS * 2,
            )  # fmt: skip
        meaning = Meaning(3, "test", "tiny", "u16", "u16", ELEMENTS * 2, HEADS, len(LAYERS), "tokens")
        self.description = Description(engine, rank, ranks, meaning, layers)
        text = self.description.to_bytes()
        self.about = self.agent.allocate(len(text))
        memoryview(self.about).cast("B")[:] = text
        self.agent.publish("about", self.about)
        self.loop, self.pool = Loop("test-push"), ThreadPoolExecutor(8)
        self.served, self.ended, self.changed = [], {}, threading.Condition()
        self.partners = Partners(self.agent)
        self.pushes = Pushes(self.loop, self.pool, self.partners, self.description, self.memories, self.on_served)
        around = Surroundings(
            self.agent, self.partners, self.description, ranks, self.settle, self.on_ended, deadline, landing_bytes,
        )  # fmt: skip
        self.landings = Landings(self.loop, self.pool, around)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        with contextlib.suppress(weft.Error):
            while True:
                heard = self.agent.notification(timeout=60)
                if heard is None:
                    continue
                said = json.loads(heard.payload)
                if said["kind"] == "reserve":
                    self.pushes.reserve(said, heard.peer)
                elif said["kind"] == "done":
                    self.pushes.give_up(said["hand_off"], heard.peer.name, said["readers"])
                else:
                    self.landings.hear(said, heard.peer.name)

    def settle(self, name, landed, blocks):
        cache = self.caches[name]
        cache[blocks] = np.frombuffer(landed, np.uint16).reshape(len(blocks), *cache.shape[1:])

    def on_served(self, request, reader, readers):
        with self.changed:
            self.served.append((request, reader, readers))
            self.changed.notify_all()

    def on_ended(self, request, landed):
        with self.changed:
            self.ended[request] = landed
            self.changed.notify_all()

    def outcome(self, request):
        with self.changed:
            assert self.changed.wait_for(lambda: request in self.ended, PATIENCE)
            return self.ended[request]

    def wait_served(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.served) >= count, PATIENCE)

    def wait_ended(self, request):
        self.wait_until(lambda: self.pushes.ended(request, "test"))

    def wait_until(self, look):
        end = time.monotonic() + PATIENCE
        while not look():
            assert time.monotonic() < end
            time.sleep(0.005)

    def close(self):
        self.agent.close()
        self.pushes.close()
        self.loop.close()
        self.pool.shutdown()


@contextlib.contextmanager
def workers(*made):
    try:
        yield made
    finally:
        for worker in made:
            worker.close()


def expected(layer, block, low, high):
    """What the prefill side holds in a block: all elements tell where they are from."""
    place = np.arange(HEADS * TOKENS * ELEMENTS, dtype=np.uint16).reshape(HEADS, TOKENS, ELEMENTS)
    return (1000 * (layer + 1) + 7 * block + place)[low:high].astype(np.uint16)


def number(worker, blocks):
    for nth, name in enumerate(LAYERS):
        for block in blocks:
            worker.caches[name][block] = expected(nth, block, *worker.heads)


def awaited(prefill, blocks, tokens, hand_off="one", prompt=None, digest="d"):
    return Awaited(hand_off, [worker.agent.address for worker in prefill], blocks, tokens, prompt or tokens[1], digest)


def arrived(decode, theirs, mine, tokens, first=0):
    """Every token of every head is where it belongs."""
    for nth, name in enumerate(LAYERS):
        for token in range(first, tokens):
            got = decode.caches[name][mine[token // TOKENS]][:, token % TOKENS]
            want = expected(nth, theirs[token // TOKENS], *decode.heads)[:, token % TOKENS]
            assert (got == want).all(), (name, token)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_layers_arrive_as_they_are_computed(transport):
    theirs, mine, tokens = [3, 9, 4], [8, 1, 30], 11
    with workers(Worker("p", transport=transport), Worker("d", transport=transport)) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        step = {"one": Computed("request", theirs, tokens, tokens, "d")}
        prefill.pushes.compute(step)
        for nth, name in enumerate(LAYERS):
            # Only now is it there: what was read before its time would be zeros.
            for block in theirs:
                prefill.caches[name][block] = expected(nth, block, *prefill.heads)
            prefill.pushes.computed(name)
        prefill.pushes.computed()
        landed = decode.outcome("r")
        assert landed.failure is None, landed
        assert (landed.bytes, landed.transport) == (len(LAYERS) * HEADS * tokens * ELEMENTS * 2, transport)
        arrived(decode, theirs, mine, tokens)
        prefill.wait_served(1)
        assert prefill.served == [("request", decode.agent.name, 1)]
        prefill.wait_ended("request")


def test_the_order_does_not_matter_and_what_is_here_is_not_sent():
    theirs, mine, tokens = [0, 1, 2, 3], [4, 5, 6, 7], 16
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        number(prefill, theirs)
        # All of it is in the prefill side's cache, and computed before anybody has asked for it.
        prefill.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
        prefill.pushes.computed()
        decode.landings.expect("r", awaited([prefill], mine, (8, tokens)))
        landed = decode.outcome("r")
        assert (landed.failure, landed.bytes) == (None, len(LAYERS) * HEADS * 8 * ELEMENTS * 2)
        arrived(decode, theirs, mine, tokens, first=8)
        assert not decode.caches[LAYERS[0]][mine[0]].any()


def test_chunks_and_what_is_packed():
    theirs, mine, tokens = [5, 6, 7], [1, 2, 3], 10
    with workers(Worker("p", granule=TOKENS), Worker("d", granule=TOKENS)) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        for before, after in ((0, 3), (3, 6), (6, 10)):
            prefill.pushes.compute({"one": Computed("request", theirs[: -(-after // TOKENS)], after, tokens, "d")})
            number(prefill, theirs[: -(-after // TOKENS)])
            for name in LAYERS:
                prefill.pushes.computed(name)
            prefill.pushes.computed()
        assert decode.outcome("r").failure is None
        arrived(decode, theirs, mine, tokens)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (4, 2)])
def test_other_degrees(prefill_ranks, decode_ranks):
    theirs, mine, tokens = [9, 2], [0, 1], 8
    prefill = [Worker("p", rank, prefill_ranks) for rank in range(prefill_ranks)]
    decode = [Worker("d", rank, decode_ranks) for rank in range(decode_ranks)]
    with workers(*prefill, *decode):
        for worker in prefill:
            number(worker, theirs)
            worker.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
            worker.pushes.computed()
        for worker in decode:
            worker.landings.expect("r", awaited(prefill, mine, (0, tokens)))
        for worker in decode:
            landed = worker.outcome("r")
            assert landed.failure is None, landed
            arrived(worker, theirs, mine, tokens)
        for worker in prefill:
            # Every worker hears of every reader, also of one for which it has nothing.
            worker.wait_served(decode_ranks)
            assert {reader for _, reader, _ in worker.served} == {reader.agent.name for reader in decode}


def test_a_prefill_side_that_dies_in_the_middle():
    theirs, mine, tokens = [3, 9], [8, 1], 8
    prefill = Worker("p")
    with workers(Worker("d")) as (decode,):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        number(prefill, theirs)
        prefill.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
        prefill.pushes.computed(LAYERS[0])
        while not decode.caches[LAYERS[0]].any():
            time.sleep(0.005)
        prefill.close()
        landed = decode.outcome("r")
        assert isinstance(landed.failure, PushFailed), landed
        assert landed.seconds < PATIENCE
        decode.wait_until(lambda: decode.landings._taken == 0)


def test_aborted_by_the_prefill_side():
    theirs, mine, tokens = [3, 9], [8, 1], 8
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        number(prefill, theirs)
        prefill.pushes.compute({"one": Computed("request", theirs, 4, tokens, "d")})
        prefill.pushes.computed()
        prefill.wait_ended("request")
        landed = decode.outcome("r")
        assert isinstance(landed.failure, PushFailed) and "test" in str(landed.failure)
        # Whoever comes later is told at once.
        decode.landings.expect("again", awaited([prefill], mine, (0, tokens)))
        assert isinstance(decode.outcome("again").failure, PushFailed)


def test_aborted_by_the_decode_side():
    theirs, mine, tokens = [3, 9], [8, 1], 8
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        decode.landings.abort("r")
        assert isinstance(decode.outcome("r").failure, PushAborted)
        # The prefill side begins later, and need not hold anything for it.
        prefill.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
        prefill.pushes.computed()
        prefill.wait_served(1)
        prefill.wait_ended("request")
        assert not any(cache.any() for cache in decode.caches.values())


def test_aborted_while_nobody_answers():
    """Somebody listens there who never says a word: without the abort, the hand-off would last until its deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent, workers(Worker("d", transport="tcp", deadline=5.0)) as (decode,):
        asked = Awaited("one", [f"127.0.0.1:{silent.getsockname()[1]}"], [8, 1], (0, 8), 8, "d")
        decode.landings.expect("r", asked)
        connecting, _ = silent.accept()
        decode.landings.abort("r")
        assert isinstance(decode.outcome("r").failure, PushAborted)
        connecting.close()


def test_aborted_while_there_is_no_room():
    whole = len(LAYERS) * HEADS * TOKENS * ELEMENTS * 2
    with workers(Worker("p"), Worker("d", landing_bytes=whole)) as (prefill, decode):
        decode.landings.expect("first", awaited([prefill], [0], (0, TOKENS), hand_off="h0"))
        decode.wait_until(lambda: decode.landings._taken == whole)
        decode.landings.expect("second", awaited([prefill], [1], (0, TOKENS), hand_off="h1"))
        decode.landings.abort("second")
        assert isinstance(decode.outcome("second").failure, PushAborted)
        # The first one never noticed.
        number(prefill, [0])
        prefill.pushes.compute({"h0": Computed("p0", [0], TOKENS, TOKENS, "d")})
        prefill.pushes.computed()
        assert decode.outcome("first").failure is None
        decode.wait_until(lambda: decode.landings._taken == 0)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_what_comes_too_late_touches_nothing(transport):
    theirs, mine, tokens = [3, 9], [8, 1], 8
    with workers(Worker("p", transport=transport), Worker("d", transport=transport, deadline=0.5)) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        assert isinstance(decode.outcome("r").failure, PushLate)
        # The blocks are another request's by now.
        for cache in decode.caches.values():
            cache[mine] = 4711
        number(prefill, theirs)
        prefill.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
        prefill.pushes.computed()
        prefill.wait_served(1)
        prefill.wait_ended("request")
        assert all((cache[mine] == 4711).all() for cache in decode.caches.values())


def test_a_writer_who_ignores_all_is_refused():
    """The key of a landing place is worth nothing when the hand-off is over."""
    with workers(Worker("p"), Worker("d", deadline=0.5)) as (prefill, decode):
        reserved = threading.Event()
        kept = {}

        def reserve(said, peer):
            kept.update(said=said, peer=peer, region=peer.region(said["region"]))
            reserved.set()

        prefill.pushes.reserve = reserve
        decode.landings.expect("r", awaited([prefill], [8, 1], (0, 8)))
        assert reserved.wait(PATIENCE)
        assert isinstance(decode.outcome("r").failure, PushLate)
        mine = prefill.agent.allocate(64)
        with pytest.raises(weft.Error):
            kept["peer"].write(mine, kept["region"], [(0, 64)]).wait()
        # And the blocks themselves were never open to anybody.
        with pytest.raises(weft.Refused):
            kept["peer"].write(mine, kept["peer"].region("kv/0"), [(0, 64)]).wait()


def test_preempted_and_computed_again_elsewhere():
    mine, tokens = [8, 1], 8
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        decode.landings.expect("r", awaited([prefill], mine, (0, tokens)))
        number(prefill, [3])
        prefill.pushes.compute({"one": Computed("request", [3], 4, tokens, "d")})
        prefill.pushes.computed()
        prefill.pushes.preempt(["one"])
        # Its blocks are another's at once.
        for cache in prefill.caches.values():
            cache[3] = 4711
        theirs = [3, 20] if decode.caches[LAYERS[0]].any() else [10, 20]
        number(prefill, [10, 20])
        prefill.pushes.compute({"one": Computed("request", [10, 20], tokens, tokens, "d")})
        prefill.pushes.computed()
        assert decode.outcome("r").failure is None
        for nth, name in enumerate(LAYERS):
            first = decode.caches[name][mine[0]]
            assert any((first == expected(nth, block, 0, HEADS)).all() for block in (3, 10)), theirs
            assert (decode.caches[name][mine[1]] == expected(nth, 20, 0, HEADS)).all()


class Write:
    """A transfer that ends when the test says so."""

    def __init__(self):
        self.over, self.result = threading.Event(), None

    def wait(self):
        assert self.over.wait(PATIENCE)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def cancel(self):
        pass

    def end(self, result):
        self.result = result
        self.over.set()


class Deaf:
    """A peer that is written to and told of it, both on paper."""

    name = "deaf"

    def __init__(self):
        self.writes, self.said = [], []

    def transfer(self, *_, **__):
        self.writes.append(Write())
        return self.writes[-1]

    def notify(self, payload):
        self.said.append(json.loads(payload))


def test_what_has_landed_behind_a_hole_is_not_told():
    with workers(Worker("p", fill=7)) as (prefill,):
        pushes, peer = prefill.pushes, Deaf()
        summary = type("Summary", (), {"bytes": 1, "transport": "paper"})
        region = type("Room", (), {"name": "room"})
        first = LAYERS[0]
        target = _Target(
            type("Partner", (), {"peer": peer, "address": "paper"}), region, prefill.description, {first: [prefill.heads]}, [0, 1], 0, 8, 8, "d", 1,
            PATIENCE, {first: 0}, {first: 0},
        )  # fmt: skip

        async def run(call, *arguments):
            call(*arguments)

        def on_loop(call, *arguments):
            prefill.loop.wait(run(call, *arguments))

        on_loop(pushes._accept, "one", target)
        for after in (4, 8):
            step = {"one": Computed("r", [0, 1], after, 8, "d")}
            on_loop(pushes._begin, step)
            on_loop(pushes._ready, step, first)
        early, late = peer.writes
        fence = threading.Thread(target=pushes.preempt, args=(["one"],))
        fence.start()
        early.end(weft.Error("cancelled"))
        time.sleep(0.1)
        late.end(summary)
        fence.join(PATIENCE)
        assert not fence.is_alive()
        assert peer.said == [] and target.landed == {first: 0} == target.posted


def test_another_prompt_is_refused():
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        prefill.pushes.compute({"one": Computed("request", [3, 9], 8, 8, "other")})
        prefill.pushes.computed()
        decode.landings.expect("r", awaited([prefill], [8, 1], (0, 8)))
        landed = decode.outcome("r")
        assert isinstance(landed.failure, PushFailed) and "the prompt has 8 tokens" in str(landed.failure)
        assert not any(cache.any() for cache in decode.caches.values())


def test_another_model_is_refused_by_name():
    with workers(Worker("p"), Worker("d")) as (prefill, decode):
        object.__setattr__(decode.description, "meaning", Meaning(3, "test", "other", "u16", "u16", 16, HEADS, 3, "tokens"))
        decode.landings.expect("r", awaited([prefill], [8, 1], (0, 8)))
        failure = decode.outcome("r").failure
        assert isinstance(failure, Mismatch) and "'other'" in str(failure) and "'tiny'" in str(failure)


def test_room_is_given_to_one_after_the_other():
    whole = len(LAYERS) * HEADS * TOKENS * ELEMENTS * 2
    with workers(Worker("p"), Worker("d", landing_bytes=whole)) as (prefill, decode):
        number(prefill, range(6))
        for nth in range(6):
            decode.landings.expect(f"r{nth}", awaited([prefill], [nth], (0, TOKENS), hand_off=f"h{nth}"))
        for nth in range(6):
            prefill.pushes.compute({f"h{nth}": Computed(f"p{nth}", [nth], TOKENS, TOKENS, "d")})
            prefill.pushes.computed()
        for nth in range(6):
            assert decode.outcome(f"r{nth}").failure is None
            arrived(decode, [nth], [nth], TOKENS)


def test_room_that_somebody_still_holds_is_given_to_nobody():
    """The prefill side stays in the landing place of a hand-off that is over, as one does that is frozen in mid-copy."""
    whole = len(LAYERS) * HEADS * TOKENS * ELEMENTS * 2
    with workers(Worker("p"), Worker("d", deadline=1.0, landing_bytes=whole)) as (prefill, decode):
        held, inside = [], threading.Event()
        reserve = prefill.pushes.reserve

        def stay(said, peer):
            held.append(peer.borrow(peer.region(said["region"])))
            inside.set()

        prefill.pushes.reserve = stay
        decode.landings.expect("late", awaited([prefill], [0], (0, TOKENS), hand_off="h0"))
        assert inside.wait(PATIENCE)
        # Nobody's blocks wait for that.
        assert isinstance(decode.outcome("late").failure, PushLate)
        decode.landings.expect("next", awaited([prefill], [1], (0, TOKENS), hand_off="h1"))
        refused = decode.outcome("next").failure
        assert isinstance(refused, PushLate) and "no room" in str(refused)
        assert decode.landings._taken == whole
        held.pop().release()
        decode.wait_until(lambda: decode.landings._taken == 0)
        prefill.pushes.reserve = reserve
        number(prefill, [2])
        prefill.pushes.compute({"h2": Computed("p2", [2], TOKENS, TOKENS, "d")})
        prefill.pushes.computed()
        decode.landings.expect("last", awaited([prefill], [2], (0, TOKENS), hand_off="h2"))
        assert decode.outcome("last").failure is None
        arrived(decode, [2], [2], TOKENS)


def test_partners_that_are_gone_are_forgotten():
    with workers(Worker("d")) as (decode,):
        for nth in range(4):
            with workers(Worker(f"p{nth}")) as (prefill,):
                number(prefill, [0])
                decode.landings.expect(f"r{nth}", awaited([prefill], [1], (0, TOKENS), hand_off=f"h{nth}"))
                prefill.pushes.compute({f"h{nth}": Computed("request", [0], TOKENS, TOKENS, "d")})
                prefill.pushes.computed()
                assert decode.outcome(f"r{nth}").failure is None
                prefill.wait_served(1)
                assert (len(decode.partners), len(prefill.partners)) == (1, 1)
                partner = decode.partners.at(prefill.agent.address, time.monotonic() + PATIENCE)
            decode.wait_until(lambda partner=partner: partner.gone)
            address = partner.address
        with pytest.raises(weft.Error):
            decode.partners.at(address, time.monotonic() + 0.5)
        assert len(decode.partners) == 0


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
                if flips and len(chunk) >= 2048 and self.damaged < self.damage:
                    self.damaged += 1
                    chunk[len(chunk) // 2] ^= 0x10
                there.sendall(chunk)
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("damage", [1, 1_000_000])
def test_what_is_damaged_is_sent_again_or_not_believed(damage):
    theirs, mine = list(range(BLOCKS)), list(range(BLOCKS))
    tokens = BLOCKS * TOKENS
    with workers(Worker("p", transport="tcp"), Worker("d", transport="tcp")) as (prefill, decode):
        port = int(prefill.agent.address.rpartition(":")[2])
        relay = Relay(port)
        number(prefill, theirs)
        relay.damage = damage
        asked = Awaited("one", [f"127.0.0.1:{relay.port}"], mine, (0, tokens), tokens, "d")
        decode.landings.expect("r", asked)
        prefill.pushes.compute({"one": Computed("request", theirs, tokens, tokens, "d")})
        prefill.pushes.computed()
        landed = decode.outcome("r")
        assert relay.damaged > 0
        if damage == 1:
            assert landed.failure is None, landed
            arrived(decode, theirs, mine, tokens)
        else:
            assert isinstance(landed.failure, PushFailed) and "Checksum" in str(landed.failure)
            assert not any(cache.any() for cache in decode.caches.values())


def test_names_by_which_routers_find_an_engine():
    options = Options.parse({"mode": "push", "etcd": "http://e:2379", "prefix": "job", "url": "http://a:8100/", "role": "prefill"})
    # As the router's own test has it.
    assert options.agent_name("engine", 0, 2) == "vllm/3/push/prefill/0/2/http://a:8100"
    assert options.agent_settings() == {"listen": "127.0.0.1:0", "rendezvous": "etcd:http://e:2379", "rendezvous_job": "job"}
    assert Options.parse({}).agent_name("engine", 0, 2) == "vllm-engine-0"
    for wrong in ({"etcd": "http://e:2379"}, {"url": "http://a:1", "role": "both"}, {"mode": "shove"}, {"deadline": 0}, {"modes": "push"}):
        with pytest.raises(ValueError):
            Options.parse(wrong)
    with pytest.raises(ValueError, match="too long"):
        Options.parse({"url": "http://" + 80 * "a", "role": "plain"}).agent_name("engine", 0, 1)
