"""Runs the examples `fused` and `moe`, and puts the same by torch beside them, on the same card in the same run.

    python3 crates/gpu/examples/beside.py target/release/examples/fused target/release/examples/moe

Ranks of one card, so each of torch's steps is done once for every rank, in branches of one graph, and everything is in the device's memory before. Microseconds a call, medians by events.
"""

import re
import subprocess
import sys

import torch

REPEATS = 5


def timed(step, calls=5):
    """A graph of `calls` steps, replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    return median(graph.replay) / calls


def median(run):
    took = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1e3)
    return sorted(took[1:])[REPEATS // 2]


def branches(ranks, work):
    """One stream for each rank, all after the present one and joined with it again."""
    streams = [torch.cuda.Stream() for _ in range(ranks)]

    def step():
        now = torch.cuda.current_stream()
        for rank, stream in enumerate(streams):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                work(rank)
            now.wait_stream(stream)

    return step


def add_and_norm(ranks, rows, hidden):
    """What comes after the all-reduce: residual and RMSNorm."""
    made = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, residual = ([made(rows, hidden) for _ in range(ranks)] for _ in range(2))
    weight = made(hidden)

    def work(rank):
        residual[rank].add_(x[rank])
        torch.nn.functional.rms_norm(residual[rank], (hidden,), weight, 1e-6)

    return timed(branches(ranks, work))


def fused(program):
    said = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(said, end="")
    print("ranks rows hidden: fused; all-reduce by Weft + add + rms_norm by torch; times as fast")
    line = re.compile(r"fused (\d+) (\d+) (\d+): ([\d.]+), .*; ([\d.]+); [\d.]+, ")
    for found in line.finditer(said):
        ranks, rows, hidden = (int(found[nth]) for nth in (1, 2, 3))
        own, alone = float(found[4]), float(found[5])
        rest = add_and_norm(ranks, rows, hidden)
        print(f"{ranks} {rows} {hidden}: {own:.2f}; {alone:.2f} + {rest:.2f}; {(alone + rest) / own:.2f}", flush=True)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    for program in sys.argv[1:]:
        fused(program)
