"""Times collectives of torch.distributed, one JSON object a line, with the fields that `weft bench collective --json` prints.

    torch_collective.py --backend gloo --ranks 2 --ops allreduce,allgather --sizes 1024,65536 --seconds 0.5 --repeats 3

A size is that of the larger of a rank's buffers. The seconds are for all repeats of a point together. A repeat takes as long as its
slowest rank; percentiles are those of rank 0.
"""

import argparse
import json
import os
import tempfile
import time

PERIOD = 7
TRIALS = 5
CALLS_MIN, CALLS_MAX = 3, 1 << 20


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default="allreduce,allgather,reduce_scatter,alltoall")
    parser.add_argument("--sizes", default="1024,65536,1048576")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


class Point:
    """A collective with its tensors, and what must come out."""

    def __init__(self, torch, dist, op, size, own, ranks):
        share = size // 4 // ranks
        whole = share * ranks

        def terms(rank, start, count):
            return torch.arange(start, start + count).remainder(PERIOD).float() + (rank + 1)

        def sums(start, count):
            return sum(terms(rank, start, count) for rank in range(ranks))

        mine = terms(own, 0, whole)
        if op == "allreduce":
            # In torch this one is in place. The result is looked at after the first call only.
            self.output, self.expected = mine.clone(), sums(0, whole)
            self.call = lambda: dist.all_reduce(self.output)
        elif op == "allgather":
            self.output, block = torch.zeros(whole), mine[:share].clone()
            self.expected = torch.cat([terms(rank, 0, share) for rank in range(ranks)])
            self.call = lambda: dist.all_gather_into_tensor(self.output, block)
        elif op == "reduce_scatter":
            self.output, self.expected = torch.zeros(share), sums(own * share, share)
            self.call = lambda: dist.reduce_scatter_tensor(self.output, mine)
        elif op == "alltoall":
            self.output = torch.zeros(whole)
            self.expected = torch.cat([terms(rank, own * share, share) for rank in range(ranks)])
            self.call = lambda: dist.all_to_all_single(self.output, mine)
        elif op == "broadcast":
            self.output, self.expected = (mine.clone() if own == 0 else torch.zeros(whole)), terms(0, 0, whole)
            self.call = lambda: dist.broadcast(self.output, 0)
        else:
            raise SystemExit(f"no collective {op} here")
        self.in_place = op == "allreduce"


def largest(torch, dist, value):
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def measure(torch, dist, backend, op, size, own, arguments):
    ranks = arguments.ranks
    point = Point(torch, dist, op, size, own, ranks)
    point.call()
    correct = torch.equal(point.output, point.expected)
    if point.in_place:
        # Summed over and over, anything but zero becomes infinite.
        point.output.zero_()
    least = 1e9
    for _ in range(TRIALS):
        dist.barrier()
        start = time.perf_counter()
        point.call()
        least = min(least, time.perf_counter() - start)
    calls = int(arguments.seconds / arguments.repeats / largest(torch, dist, least))
    calls = max(CALLS_MIN, min(CALLS_MAX // arguments.repeats, calls))
    times, means = [], []
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(arguments.repeats):
        dist.barrier()
        start = last = time.perf_counter()
        for _ in range(calls):
            point.call()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        means.append(largest(torch, dist, (last - start) / calls))
    wall = time.perf_counter() - begin
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(used)
    wrong = largest(torch, dist, float(not correct))
    if own == 0:
        times.sort()
        median = sorted(means)[len(means) // 2]
        share = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1}.get(op, (ranks - 1) / ranks)
        line = {
            "bench": "coll",
            "impl": f"{backend}-torch{torch.__version__}",
            "op": op,
            "dtype": "f32",
            "bytes": size,
            "ranks": ranks,
            "iters": calls,
            "us_med": median * 1e6,
            "us_min": min(means) * 1e6,
            "us_runs": [mean * 1e6 for mean in means],
            "p50_us": times[len(times) // 2] * 1e6,
            "p99_us": times[len(times) * 99 // 100] * 1e6,
            "algbw_GBps": size / median / 1e9,
            "busbw_GBps": size / median / 1e9 * share,
            "ok": not wrong,
            "cpu_cores": float(used) / wall,
        }
        print(json.dumps(line), flush=True)


def rank(own, arguments, meeting_place):
    import torch
    import torch.distributed as dist

    if arguments.backend == "weft":
        import weft.torch  # noqa: F401  (registers the backend)
    torch.set_num_threads(1)
    dist.init_process_group(
        arguments.backend, init_method=f"file://{meeting_place}", rank=own, world_size=arguments.ranks
    )
    for op in arguments.ops.split(","):
        for size in arguments.sizes.split(","):
            measure(torch, dist, arguments.backend, op, int(size), own, arguments)
    dist.destroy_process_group()


def main():
    import multiprocessing

    arguments = parse()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        place = os.path.join(directory, "meeting-place")
        processes = [context.Process(target=rank, args=(own, arguments, place)) for own in range(arguments.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
