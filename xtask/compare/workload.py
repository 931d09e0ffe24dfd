"""The one workload that every side of the comparison runs.

Two processes on one host. Each owns one region of `batch` blocks. A transfer moves all of them, in a random order that
differs between the two sides, so that no two blocks can be merged: a paged KV cache. READ pulls from the target, WRITE
pushes to it. A transfer is prepared once; what is timed is from its post until the initiator knows that it is done, and the
figure is the median. Before that one transfer is checked: every block carries a word of its own.

A side is a module with two functions: `target(case, control)` and `initiate(case, control)`. The latter is a context manager
that yields `(region, once)`, where `once()` runs one transfer and returns its nanoseconds. Other measurements (notification,
start, idle) are functions of the same names with a suffix. The result is one line of JSON on standard output.
"""

import argparse
import json
import mmap
import multiprocessing
import resource
import sys
import time

import numpy as np

WARMUPS = 5
ITERATIONS_MIN = 8
ITERATIONS_MAX = 20_000
ROUND_TRIPS = 2_000
IDLE_SECONDS_MIN = 5.0


class Region:
    """Anonymous memory, page by page touched, with a word in every block that tells it from all others."""

    def __init__(self, nbytes, memory=None):
        self.memory = mmap.mmap(-1, nbytes) if memory is None else memory
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.bytes[:] = 0
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes

    def stamp(self, block, salt):
        self._words(block)[:] = np.arange(self.nbytes // block, dtype=np.uint64) + np.uint64(salt << 32)

    def words(self, block):
        return self._words(block).copy()

    def _words(self, block):
        return self.bytes.view(np.uint64)[:: block // 8]


class Control:
    """Questions from the initiator's process to the target's."""

    def __init__(self, pipe):
        self.pipe = pipe

    def ask(self, *question):
        self.pipe.send(question)
        return self.pipe.recv()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["transfer", "notification", "start", "idle"])
    parser.add_argument("--transport", default="shared_memory", choices=["shared_memory", "tcp"])
    parser.add_argument("--op", default="READ", choices=["READ", "WRITE"])
    parser.add_argument("--block", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--memory", default="foreign", choices=["foreign", "mapped"], help="who allocated the regions")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def orders(case):
    """Which block of the initiator meets which block of the target."""
    random = np.random.default_rng(case.seed)
    return random.permutation(case.batch).astype(np.int32), random.permutation(case.batch).astype(np.int32)


def serve(region, case, control):
    """Answers the questions that every target answers, until told to stop; returns what it does not understand."""
    kind, *rest = control.recv()
    if kind == "stamp":
        region.stamp(case.block, *rest)
        control.send(True)
    elif kind == "words":
        control.send(region.words(case.block))
    else:
        return kind, rest
    return None


def verify(case, region, once, control):
    local, remote = orders(case)
    source, destination = 0xA5A5, 0x1111
    region.stamp(case.block, destination if case.op == "READ" else source)
    control.ask("stamp", source if case.op == "READ" else destination)
    once()
    here, there = region.words(case.block)[local], control.ask("words")[remote]
    return bool((here == there).all() and (here >> np.uint64(32) == source).all())


def measure(case, once):
    for _ in range(WARMUPS):
        once()
    times = []
    end = time.perf_counter() + case.seconds
    while (time.perf_counter() < end or len(times) < ITERATIONS_MIN) and len(times) < ITERATIONS_MAX:
        times.append(once())
    return times


def summary(times):
    ordered = np.sort(np.asarray(times)) / 1e3
    return {"us": round(float(np.median(ordered)), 3), "p99_us": round(float(np.quantile(ordered, 0.99)), 3), "iterations": len(times)}


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(side):
    case = arguments()
    begun = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    suffix = "" if case.what == "transfer" else f"_{case.what}"
    process = context.Process(target=getattr(side, "target" + suffix, side.target), args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    control = Control(ours)
    try:
        if case.what == "transfer":
            with side.initiate(case, control) as (region, once):
                result = {"verified": verify(case, region, once, control), **summary(measure(case, once))}
                result["gigabytes_per_second"] = round(case.block * case.batch / result["us"] / 1e3, 3)
        else:
            result = getattr(side, f"initiate_{case.what}")(case, control)
    finally:
        try:
            control.ask("quit")
        except (EOFError, OSError):
            pass
        process.join(5)
        if process.is_alive():
            process.kill()
    print(json.dumps({**vars(case), **result, "wall_s": round(time.perf_counter() - begun, 2)}), flush=True)
    # A peer's library that does not end its threads must not keep the comparison waiting.
    sys.stdout.flush()
