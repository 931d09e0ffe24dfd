"""A schedule of one's own: three ranks sum along a chain and hand the result back, as a list of what each rank does in each step.

`weft.Schedule.from_json` proves it before anything runs: that it ends, that nothing is read too early, and that every contribution is
counted exactly once. A version that forgets a contribution is refused with the rank, the step and the op.
"""

import array
import json
import threading

import weft


def send(to):
    return {"send": {"to": to, "slice": {"buffer": "output", "first": 0, "count": 1}}}


def receive(rank):
    return {"receive": {"from": rank, "slice": {"buffer": "output", "first": 0, "count": 1}}}


def add(rank):
    piece = {"buffer": "output", "first": 0, "count": 1}
    return {"receive-reduce": {"from": rank, "with": piece, "into": piece}}


def chain():
    # In place: the output holds the input. Ranks 2 and 1 hand their sums down, and rank 0 hands the result up.
    return {
        "name": "chain",
        "problem": {"collective": "all-reduce", "ranks": 3, "in_place": True},
        "ranks": [
            [[], [add(1)], [send(1)], []],
            [[add(2)], [send(0)], [receive(0)], [send(2)]],
            [[send(1)], [], [], [receive(1)]],
        ],
    }


def run(rank, schedule, results):
    with weft.Agent(f"chain-{rank}", secret="example", rendezvous="process", rendezvous_job="chain") as agent:
        group = weft.Communicator(agent, "chain", rank, 3)
        data = array.array("f", [rank + 1.0] * 4)
        group.all_reduce(data, algorithm=schedule)
        results[rank] = list(data)
        group.barrier()


def main():
    wrong = chain()
    wrong["ranks"][1][0] = []  # Rank 1 no longer takes what rank 2 sends.
    try:
        weft.Schedule.from_json(json.dumps(wrong))
        refused = False
    except weft.InvalidCall:
        refused = True
    schedule = weft.Schedule.from_json(json.dumps(chain()))
    results = [None] * 3
    threads = [threading.Thread(target=run, args=(rank, schedule, results)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused and results == [[6.0] * 4] * 3, results
    print(f"by the schedule {schedule.name} every rank has {results[0][0]}; one that forgets a contribution is refused")


if __name__ == "__main__":
    main()
