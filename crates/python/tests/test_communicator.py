"""Groups of ranks, each with an agent and a thread of its own."""

import array
import asyncio
import concurrent.futures
import itertools
import json
import threading
import time

import pytest

import weft

JOBS = itertools.count()


def on_ranks(size, body, transports="shared_memory,tcp", shared_memory=True):
    """Calls `body` with the communicator of each rank, and gives back what it returned."""
    job = f"python-{next(JOBS)}"
    results, errors = [None] * size, []

    def run(rank):
        try:
            with weft.Agent(
                f"{job}-{rank}",
                secret="the secret of the tests",
                rendezvous="process",
                rendezvous_job=job,
                transports=transports,
            ) as agent:
                group = weft.Communicator(agent, "all", rank, size, shared_memory=shared_memory, deadline=20)
                results[rank] = body(group, agent)
                try:
                    group.barrier(deadline=5)
                except weft.CollectiveError:
                    pass  # Some tests leave a group that has failed.
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(params=["arena", "shared_memory", "tcp"])
def way(request):
    transports = "tcp" if request.param == "tcp" else "shared_memory,tcp"
    return {"transports": transports, "shared_memory": request.param == "arena"}


def ints(*values):
    return array.array("q", values)


def test_numbers_stand_for_what_their_names_say():
    kinds, operators, datatypes = (weft._weft._NUMBERS[which] for which in ("kinds", "operators", "datatypes"))

    def body(group, agent):
        def raw(kind, datatype, operator, data, root=0):
            address, length = data.buffer_info()
            place = (address, length * data.itemsize)
            group._raw(kinds[kind], place, place, datatypes[datatype], operators[operator], root, 20.0)
            return list(data)

        for operator in operators:
            for datatype, letter in [("u8", "B"), ("i64", "q"), ("f32", "f")]:
                if operator.startswith("b") and datatype == "f32":
                    continue  # The bits of floats are not what the sum of them is.
                named = array.array(letter, [6 + group.rank, 3, 1])
                numbered = array.array(letter, named)
                group.all_reduce(named, op=operator)
                assert raw("all_reduce", datatype, operator, numbered) == list(named), (operator, datatype)
        told = array.array("q", [group.rank])
        assert raw("broadcast", "i64", "sum", told, root=1) == [1]

    on_ranks(2, body)
    assert len(kinds) == 11 and len(operators) == 8 and len(datatypes) == 14


def test_every_collective(way):
    def body(group, agent):
        rank, size = group.rank, group.size
        assert repr(group) == f"<weft.Communicator, rank {rank} of {size}>"
        data = ints(rank + 1, 10)
        group.all_reduce(data)
        assert list(data) == [6, 30]
        output = ints(0, 0)
        group.all_reduce(ints(rank, -rank), output, op="max")
        assert list(output) == [2, 0]
        gathered = ints(*[0] * 3)
        group.all_gather(ints(rank * rank), gathered)
        assert list(gathered) == [0, 1, 4]
        uneven = ints(*[0] * 3)
        group.all_gather(ints(*[rank] * rank), uneven, counts=[0, 1, 2])
        assert list(uneven) == [1, 2, 2]
        block = ints(0)
        group.reduce_scatter(ints(1, 2, 3), block)
        assert list(block) == [3 * (rank + 1)]
        told = ints(7, 8) if rank == 1 else ints(0, 0)
        group.broadcast(told, 1)
        assert list(told) == [7, 8]
        total = ints(0) if rank == 2 else None
        group.reduce(ints(rank), total, 2, op="sum")
        assert total is None or list(total) == [3]
        all_of_it = ints(0, 0, 0) if rank == 0 else None
        group.gather(ints(rank), all_of_it, 0)
        assert all_of_it is None or list(all_of_it) == [0, 1, 2]
        mine = ints(0)
        group.scatter(ints(5, 6, 7) if rank == 0 else None, mine, 0)
        assert list(mine) == [5 + rank]
        turned = ints(0, 0, 0)
        group.all_to_all(ints(*(10 * rank + other for other in range(size))), turned)
        assert list(turned) == [rank, 10 + rank, 20 + rank]
        if rank == 0:
            group.send(ints(42), 2)
        if rank == 2:
            message = ints(0)
            group.receive(message, 0)
            assert list(message) == [42]
        group.barrier()

    on_ranks(3, body, **way)


def test_bits_and_datatypes():
    def body(group, agent):
        bits = bytearray([0b1100 if group.rank else 0b1010])
        for op, right in [("band", 0b1000), ("bor", 0b1110), ("bxor", 0b0110)]:
            output = bytearray(1)
            group.all_reduce(bits, output, op=op)
            assert output[0] == right
        half = bytearray(bytes.fromhex("003c"))
        group.all_reduce(half, datatype="f16")
        assert half.hex() == "0040"
        for format, value in [("f", 1.5), ("d", 1.5), ("b", 3), ("H", 9), ("i", -4), ("Q", 1 << 40)]:
            data = array.array(format, [value])
            group.all_reduce(data, op="avg")
            assert list(data) == [value]

    on_ranks(2, body)


def test_memory_that_weft_allocated():
    def body(group, agent):
        memory = agent.allocate(1 << 20)
        view = memoryview(memory).cast("f")
        view[0], view[-1] = group.rank + 1.0, 4.0
        group.all_reduce(memory, datatype="f32")
        assert (view[0], view[-1]) == (3.0, 8.0)
        frozen = agent.register(b"cannot change", writable=False)
        with pytest.raises(weft.InvalidCall, match="read-only"):
            group.all_reduce(frozen)

    on_ranks(2, body)


def test_calls_under_way():
    def body(group, agent):
        data = [ints(group.rank), ints(group.rank + 10)]
        pending = [group.all_reduce(each, wait=False) for each in data]
        for each in pending:
            each.wait(20)
            assert each.done and each.poll()
        assert [list(each) for each in data] == [[1], [21]]

        async def awaited():
            last = ints(group.rank)
            await group.all_reduce(last, wait=False)
            return list(last)

        assert asyncio.run(awaited()) == [1]

    on_ranks(2, body)


def test_split_and_the_members_of_a_group():
    def body(group, agent):
        part = group.split(group.rank % 2, key=group.size - group.rank)
        data = ints(group.rank)
        part.all_reduce(data)
        assert group.split(None) is None
        return part.rank, part.size, list(data)

    assert on_ranks(4, body) == [(1, 2, [2]), (1, 2, [4]), (0, 2, [2]), (0, 2, [4])]


def test_members_that_found_each_other():
    secret = "the secret of the tests"
    with weft.Agent("a", secret=secret) as a, weft.Agent("b", secret=secret) as b:
        members = [(agent.address, agent.epoch) for agent in (a, b)]
        results = [None, None]

        def run(rank, agent):
            group = weft.Communicator(agent, "pair", rank, 2, members=members, deadline=20)
            data = ints(rank + 1)
            group.all_reduce(data)
            results[rank] = list(data)
            group.barrier()

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate((a, b))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert results == [[3], [3]]


def test_a_wrong_call_is_named():
    def body(group, agent):
        with pytest.raises(weft.CollectiveError) as raised:
            if group.rank == 1:
                group.broadcast(ints(1, 2, 3), 0, deadline=10)
            else:
                group.all_reduce(ints(1, 2), deadline=10)
        error = raised.value
        assert isinstance(error, RuntimeError)
        assert error.cause == "wrong call"
        assert "broadcast" in str(error) and "all-reduce" in str(error)
        assert error.called is not None

    on_ranks(2, body)


def test_a_rank_that_does_not_come_is_named():
    come = threading.Event()

    def body(group, agent):
        if group.rank == 2:
            come.wait(20)
            return
        with pytest.raises(weft.CollectiveError) as raised:
            group.all_reduce(ints(1), deadline=1)
        assert (raised.value.rank, raised.value.cause) == (2, "late")
        if group.rank == 0:
            come.set()

    on_ranks(3, body)


def test_another_root_is_named_by_the_next_call(way):
    def body(group, agent):
        data = ints(group.rank)
        try:
            group.broadcast(data, 2 if group.rank == 2 else 0, deadline=2)
            group.barrier(deadline=5)
        except weft.CollectiveError as error:
            return error.rank, error.cause
        return None

    assert on_ranks(3, body, **way) == [(2, "wrong call")] * 3


def test_all_or_nothing_and_what_all_have_ended(way):
    def body(group, agent):
        data, output = ints(*[1] * 3000), ints(*[9] * 3000)
        group.all_reduce(data, output, all_or_nothing=True)
        assert set(output) == {3}
        before = group.calls_ended
        if group.rank == 2:
            time.sleep(0.6)
        with pytest.raises(weft.CollectiveError) as told:
            group.all_reduce(output, algorithm="ring", all_or_nothing=True, deadline=0.2)
        assert set(output) == {3} and group.calls_ended == before
        left = group.shrink(10)
        assert left.size == 3 and left.calls_ended_before == before and group.calls_ended_before is None
        return told.value.rank

    assert on_ranks(3, body, **way) == [2] * 3


def test_calls_that_make_no_sense():
    def body(group, agent):
        for call in [
            lambda: group.all_reduce(ints(1), op="mean"),
            lambda: group.all_reduce(ints(1), datatype="f31"),
            lambda: group.all_reduce(ints(1), algorithm="magic"),
            lambda: group.all_reduce(ints(1), ints(1, 2)),
            lambda: group.all_reduce(bytearray(3), datatype="f32"),
            lambda: group.broadcast(ints(1), 5),
            lambda: group.all_to_all(ints(1, 2), ints(1, 2), sent=[1, 1]),
            lambda: group.reduce(ints(1), None, group.rank),
            lambda: group._raw(99, (0, 0), (0, 0), 0, 0, 0, 1.0),
            lambda: group._raw(0, (0, 8), (0, 8), 0, 0, 0, 1.0),
        ]:
            with pytest.raises(weft.InvalidCall):
                call()
        data = ints(1)
        group.all_reduce(data)
        assert list(data) == [2]

    on_ranks(2, body)


def chain(ranks=2):
    """Rank 1 sends its data to rank 0, which sends the sum back."""
    piece = {"buffer": "output", "first": 0, "count": 1}
    return {
        "name": "there and back",
        "problem": {"collective": "all-reduce", "ranks": ranks, "in_place": True},
        "ranks": [
            [[{"receive-reduce": {"from": 1, "with": piece, "into": piece}}], [{"send": {"to": 1, "slice": piece}}]],
            [[{"send": {"to": 0, "slice": piece}}], [{"receive": {"from": 0, "slice": piece}}]],
        ],
    }


def test_a_schedule_of_ones_own(way):
    schedule = weft.Schedule.from_json(json.dumps(chain()))
    assert (schedule.name, schedule.collective, schedule.ranks) == ("there and back", "all-reduce", 2)

    def body(group, agent):
        data = ints(group.rank, 5)
        group.all_reduce(data, algorithm=schedule)
        group.all_reduce(data, algorithm="ring")
        return list(data)

    assert on_ranks(2, body, **way) == [[2, 20]] * 2


def test_a_schedule_that_is_wrong_is_refused():
    wrong = chain()
    wrong["ranks"][0][0] = []
    with pytest.raises(weft.InvalidCall, match="schedule"):
        weft.Schedule.from_json(json.dumps(wrong))
    with pytest.raises(weft.InvalidCall):
        weft.Schedule.from_json("not a schedule")
    with pytest.raises(weft.InvalidCall):
        weft.Schedule.from_json(json.dumps(chain(ranks=3)))


def test_the_same_bits(way):
    def body(group, agent):
        data = array.array("f", [10.0 ** (at % 9 - 4) / (group.rank + 3) for at in range(1000)])
        group.all_reduce(data, deterministic=True)
        return data.tobytes()

    assert len(set(on_ranks(3, body, **way))) == 1
    assert on_ranks(3, body, **way) == on_ranks(3, body)


@pytest.mark.parametrize(("code", "error"), [("int8", 1 / 254), ("fp8_e4m3", 1 / 28)])
def test_quantised(way, code, error):
    def body(group, agent):
        data = array.array("f", [(at % 17 - 8) * (group.rank + 1) for at in range(1000)])
        group.all_reduce(data, quantized=code, block=64, op="avg")
        return list(data)

    for result in on_ranks(3, body, **way):
        # The greatest magnitudes of the ranks' blocks are 8, 16 and 24; an average is off by a third.
        bound = error * (2 + error) * (8 + 16 + 24) / 3 * 1.001
        assert all(abs(value - (at % 17 - 8) * 2) <= bound for at, value in enumerate(result))


def test_what_is_not_quantised():
    def body(group, agent):
        data = array.array("f", [1.0] * 8)
        for options in [{"op": "max"}, {"wait": False}, {"algorithm": "ring"}, {"block": 5}]:
            with pytest.raises(weft.InvalidCall):
                group.all_reduce(data, quantized="int8", **options)
        with pytest.raises(weft.InvalidCall):
            group.all_reduce(data, quantized="int4")
        with pytest.raises(weft.InvalidCall):
            group.all_reduce(ints(1, 2), quantized="int8")

    on_ranks(1, body)


def test_messages_before_and_beside_calls(way):
    def body(group, agent):
        other, size = 1 - group.rank, 100_000
        out, back = ints(*[group.rank + 5] * size), ints(*[0] * size)
        # Both send before they receive, and one has begun something that the other has not.
        sent = group.send(out, other, wait=False)
        total = ints(group.rank)
        early = group.all_reduce(total, wait=False) if group.rank else None
        group.receive(back, other)
        sent.wait()
        assert set(back) == {6 - group.rank}
        (early or group.all_reduce(total, wait=False)).wait()
        assert list(total) == [1]

    on_ranks(2, body, **way)


def test_a_group_that_loses_a_rank_shrinks_and_grows():
    size = 3
    gone = threading.Event()
    job = f"python-grow-{next(JOBS)}"

    def agent_of(name):
        return weft.Agent(name, secret="the secret of the tests", rendezvous="process", rendezvous_job=job)

    def sum_of(group, value):
        data = ints(value)
        group.all_reduce(data)
        return data[0]

    def member(rank):
        with agent_of(f"{job}-{rank}") as agent:
            group = weft.Communicator(agent, "all", rank, size, deadline=20)
            group.barrier()
            if rank == 1:
                return None
            gone.wait()
            with pytest.raises(weft.CollectiveError) as raised:
                for _ in range(2):
                    group.barrier()
            assert raised.value.rank == 1
            left = group.shrink(timeout=20)
            assert (left.size, left.rank) == (2, rank // 2)
            assert sum_of(left, rank + 1) == 4
            grown = left.grow("grown", 3)
            return grown.rank, sum_of(grown, 10), grown.barrier()

    def newcomer():
        with agent_of(f"{job}-new") as agent:
            grown = weft.Communicator(agent, "grown", 2, 3, deadline=20)
            return grown.rank, sum_of(grown, 10), grown.barrier()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        members = [pool.submit(member, rank) for rank in range(size)]
        members[1].result()
        gone.set()
        new = pool.submit(newcomer)
        assert [members[0].result(), members[2].result(), new.result()] == [(0, 30, None), (1, 30, None), (2, 30, None)]
