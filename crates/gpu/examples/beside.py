"""Runs the examples `fused` and `moe`, and puts the same by torch beside them, on the same card in the same run.

    python3 crates/gpu/examples/beside.py target/release/examples/fused target/release/examples/moe

Ranks of one card, so each of torch's steps is done once for every rank, in branches of one graph, and everything is in the device's memory before. Microseconds a call, medians by events.
"""

import os
import re
import subprocess
import sys

import torch

REPEATS = 5


def timed(step, calls=5):
    """A graph of `calls` steps, replayed."""
    torch.cuda.synchronize()
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
    x, residual = ([made(rows, hidden) for _ in range(ranks)] for _ in range(2))
    weight = made(hidden)

    def work(rank):
        residual[rank].add_(x[rank])
        torch.nn.functional.rms_norm(residual[rank], (hidden,), weight, 1e-6)

    return timed(branches(ranks, work))


def fused(program):
    said = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(said, end="")
    print("ranks rows hidden: fused; all-reduce by Weft + add and rms_norm by torch, for all ranks (times as fast), for one rank as if the others took no time (times as fast)")
    line = re.compile(r"fused (\d+) (\d+) (\d+): ([\d.]+), .*; ([\d.]+); [\d.]+, ")
    for found in line.finditer(said):
        ranks, rows, hidden = (int(found[nth]) for nth in (1, 2, 3))
        own, alone = float(found[4]), float(found[5])
        rest, one = add_and_norm(ranks, rows, hidden), add_and_norm(1, rows, hidden)
        times = [f"{took:.2f} ({(alone + took) / own:.2f})" for took in (rest, one)]
        print(f"{ranks} {rows} {hidden}: {own:.2f}; {alone:.2f} + {', '.join(times)}", flush=True)


def made(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Tokens:
    """Of all ranks: their rows, and eight of 256 experts for each."""

    def __init__(self, ranks, tokens, hidden=7168, experts=256, top_k=8):
        self.ranks, self.tokens, self.hidden, self.experts, self.top_k = ranks, tokens, hidden, experts, top_k
        self.each = experts // ranks
        self.x = [made(tokens, hidden) for _ in range(ranks)]
        self.chosen = [torch.rand(tokens, experts, device="cuda").topk(top_k).indices for _ in range(ranks)]
        self.weights = [torch.rand(tokens, top_k, device="cuda") for _ in range(ranks)]
        self.out = [made(tokens, hidden) for _ in range(ranks)]


def compact(of):
    """A token once for a rank. Which tokens go where has to be known on the host, so this cannot be captured; `moves` is what is left when it is known already."""
    room = of.ranks * of.tokens
    everything = made(of.ranks * room, of.hidden)
    received = everything.split(room)

    def route():
        found, counts = [], []
        for rank in range(of.ranks):
            to = torch.zeros(of.ranks, of.tokens, dtype=torch.bool, device="cuda").scatter_(0, (of.chosen[rank] // of.each).t(), True)
            counts.append(to.sum(1))
            found.append(to.nonzero()[:, 1])
        counts = torch.stack(counts).tolist()
        begins = [0] * of.ranks
        moves = []
        for rank in range(of.ranks):
            at = 0
            for peer, count in enumerate(counts[rank]):
                moves.append((rank, peer, found[rank][at : at + count], received[peer][begins[peer] : begins[peer] + count]))
                at += count
                begins[peer] += count
        return moves

    known = route()
    by_rank = [[move for move in known if move[0] == rank] for rank in range(of.ranks)]

    def send(rank):
        for source, _, tokens, rows in by_rank[rank]:
            torch.index_select(of.x[source], 0, tokens, out=rows)

    def add(rank):
        of.out[rank].zero_()
        for source, _, tokens, rows in by_rank[rank]:
            of.out[source].index_add_(0, tokens, rows)

    def whole():
        for source, _, tokens, rows in route():
            torch.index_select(of.x[source], 0, tokens, out=rows)

    bags = []
    for rank in range(of.ranks):
        tokens = torch.cat([tokens for _, _, tokens, _ in by_rank[rank]])
        begins = [(rows.data_ptr() - everything.data_ptr()) // (2 * of.hidden) for _, _, _, rows in by_rank[rank]]
        rows = torch.cat([torch.arange(len(rows), device="cuda") + begin for begin, (_, _, _, rows) in zip(begins, by_rank[rank])])
        order = tokens.argsort(stable=True)
        counts = torch.bincount(tokens, minlength=of.tokens)
        bags.append((rows[order], counts.cumsum(0) - counts))

    def bag(rank):
        torch.nn.functional.embedding_bag(bags[rank][0], everything, bags[rank][1], mode="sum")

    return {
        "dispatch": median(whole),
        "dispatch, places known": timed(branches(of.ranks, send), 3),
        "combine by index_add, places known": timed(branches(of.ranks, add), 3),
        "combine by embedding_bag, places known and all ranks' rows one tensor": timed(branches(of.ranks, bag), 3),
    }


def slots(of):
    """A row for each expert of a token, at places that are found without the host: all ranks' memory is one tensor, which it only is on one card."""
    received = made(of.experts * of.ranks * of.tokens, of.hidden)
    which = torch.arange(of.tokens, device="cuda").repeat_interleave(of.top_k)
    places = [None] * of.ranks

    def route(rank):
        chosen = of.chosen[rank].flatten()
        before = torch.nn.functional.one_hot(chosen, of.experts).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
        places[rank] = (chosen * of.ranks + rank) * of.tokens + before

    def send(rank):
        route(rank)
        received.index_copy_(0, places[rank], of.x[rank].index_select(0, which))

    def add(rank):
        rows = received.index_select(0, places[rank]).view(of.tokens, of.top_k, of.hidden)
        torch.bmm(of.weights[rank].bfloat16()[:, None], rows, out=of.out[rank][:, None])

    def bag(rank):
        at = places[rank].view(of.tokens, of.top_k)
        torch.nn.functional.embedding_bag(at, received, mode="sum", per_sample_weights=of.weights[rank].bfloat16())

    found = {"dispatch": timed(branches(of.ranks, send))}
    for name, work in {"combine by bmm": add, "combine by embedding_bag": bag}.items():
        try:
            found[name] = timed(branches(of.ranks, work))
        except RuntimeError as error:
            print(f"{name}: {error}")
    return found


def moe(program):
    said = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(said, end="")
    print("by torch: ranks tokens layout; microseconds, and times of Weft's")
    line = re.compile(r"moe (\d+) (\d+) (\w+) bf16: .*dispatch ([\d.]+),.*combine ([\d.]+),")
    for found in line.finditer(said):
        ranks, tokens, layout = int(found[1]), int(found[2]), found[3]
        own = {"dispatch": float(found[4]), "combine": float(found[5])}
        of = Tokens(ranks, tokens)
        for name, took in (slots if layout == "slots" else compact)(of).items():
            print(f"{ranks} {tokens} {layout}: {name} {took:.1f}, {took / own[name.split()[0].rstrip(',')]:.2f}", flush=True)
        del of
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for program in sys.argv[1:]:
        {"fused": fused, "moe": moe}[os.path.basename(program)](program)
