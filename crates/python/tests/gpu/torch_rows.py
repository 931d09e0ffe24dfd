"""Fused norms, tokens to experts, and symmetric tensors, from torch on a GPU: run by the bundle of `cargo xtask gpu-test`.

Every rank is a process; all of them are on one GPU, with MPS where it can be started. `python torch_rows.py` runs all of it, `python torch_rows.py NAME RANKS` one, as `python torch_rows.py bench 4`.
"""

import os
import pathlib
import signal
import sys
import time

from torch_cuda import main

HERE = pathlib.Path(__file__).resolve()
EPSILON = 1e-6


def drawn(size, rows, hidden, dtype, seed):
    """What all ranks bring, and what is the same on all: the same everywhere."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = [torch.randn(shape, device="cuda", generator=generator) for shape in [(size, rows, hidden), (rows, hidden), (hidden,)]]
    return [tensor.to(dtype) for tensor in made]


def summed(every, residual):
    """In the order of the ranks, in f32, rounded once."""
    total = every[0].float()
    for row in every[1:]:
        total = total + row.float()
    return (total + residual.float()).to(residual.dtype)


def normed(after, weight):
    wide = after.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def norms(rank, size):
    import torch
    import torch.distributed as dist

    import weft
    import weft.torch

    made = {output: weft.torch.FusedNorm(epsilon=EPSILON, output=output, scale=0.02) for output in ("same", "fp8", "fp8_by_row")}
    assert made["same"].prepare(), dist.group.WORLD.device_reason
    seed = 0
    # By packets and in bulk, in one piece and in several; rows that lie at multiples of eight bytes of fp8 and not of sixteen.
    shapes = [(1, 8), (3, 24), (1, 7168), (16, 4096), (64, 7168), (513, 2056), (2049, 7168), (6001, 7168), (37, 16_384)]
    for rows, hidden in shapes:
        for dtype in (torch.bfloat16, torch.float16):
            seed += 1
            every, residual, weight = drawn(size, rows, hidden, dtype, seed)
            after = summed(every, residual)
            exact = normed(after, weight)
            for output, norm in made.items():
                got, residual_out, *scales = norm(every[rank].clone(), residual, weight)
                what = (rows, hidden, dtype, output)
                assert torch.equal(residual_out, after), what
                if output == "same":
                    torch.testing.assert_close(got.double(), exact, rtol=0.01, atol=0.01, msg=str(what))
                    continue
                if output == "fp8":
                    wide, exact_here = got.double() * 0.02, exact.clamp(-8.96, 8.96)
                else:
                    torch.testing.assert_close(scales[0].double(), (exact.abs().amax(-1) / 448), rtol=1e-4, atol=1e-8, msg=str(what))
                    wide, exact_here = got.double() * scales[0][:, None].double(), exact
                torch.testing.assert_close(wide, exact_here, rtol=0.07, atol=0.02, msg=str(what))
    # What lies askew is copied first; three dimensions are rows too.
    every, residual, weight = drawn(size, 12, 72, torch.bfloat16, 99)
    askew = torch.empty(12 * 72 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(3, 4, 72).copy_(every[rank].view(3, 4, 72))
    got, after = made["same"](askew, residual.view(3, 4, 72), weight)
    assert got.shape == (3, 4, 72) and torch.equal(after.view(12, 72), summed(every, residual))
    for wrong in [
        lambda: made["same"](residual[:, :71].contiguous(), residual[:, :71].contiguous(), weight[:71]),
        lambda: made["same"](residual.float(), residual.float(), weight.float()),
        lambda: made["same"](residual, residual, weight.cpu()),
    ]:
        try:
            wrong()
        except weft.InvalidCall as error:
            print("refused:", error)
        else:
            raise AssertionError("it was taken")


def symmetric(rank, size):
    """Calls on memory that all ranks reach: the same results, and nothing is copied."""
    import torch
    import torch.distributed as dist

    import weft
    import weft.torch

    count = 3_000_000
    mine = weft.torch.symmetric_empty(count, dtype=torch.float32)
    gathered = weft.torch.symmetric_empty(size, count, dtype=torch.float32)
    for turn in range(20):
        mine.fill_(rank + turn)
        dist.all_reduce(mine)
        dist.all_gather_into_tensor(gathered, mine)
        assert (gathered == sum(range(size)) + size * turn).all(), turn
    every, residual, weight = drawn(size, 3000, 4096, torch.bfloat16, 5)
    x = weft.torch.symmetric_empty(3000, 4096, dtype=torch.bfloat16)
    x.copy_(every[rank])
    _, after = weft.torch.FusedNorm(epsilon=EPSILON)(x, residual, weight)
    assert torch.equal(after, summed(every, residual)) and torch.equal(x, every[rank])
    assert weft.torch.symmetric_empty(0, 3).shape == (0, 3)
    try:
        weft.torch.symmetric_empty(100 + rank)
    except weft.GpuError as error:
        print("refused:", error)
    else:
        raise AssertionError("ranks disagreed, and nobody noticed")
    # Nobody is harmed by that.
    dist.all_reduce(mine)
    # The tensor may be the last that is left of its group.
    group = dist.new_group()
    last = weft.torch.symmetric_empty(1000, group=group)
    last.fill_(7)
    dist.all_reduce(last, group=group)
    torch.cuda.synchronize()
    dist.destroy_process_group(group)
    assert (last == 7 * size).all()


def captured(rank, size):
    """In graphs, replayed with other numbers; and compiled, between products of matrices."""
    import torch
    import torch.distributed as dist

    import weft.torch

    norm = weft.torch.FusedNorm(epsilon=EPSILON)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x = torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)
            norm(x, x, x[0])
    except RuntimeError as refused:
        assert "cannot be captured" in str(refused), refused
    else:
        raise AssertionError("kernels were loaded in a capture")
    torch.cuda.synchronize()
    norm.prepare()
    for rows in (4, 1500):
        every, residual, weight = drawn(size, rows, 4096, torch.bfloat16, rows)
        x = every[rank].clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            output, after = norm(x, residual, weight)
            output, after = norm(output, after, weight)
        for turn in range(5):
            every, residual_now, _ = drawn(size, rows, 4096, torch.bfloat16, 100 * rows + turn)
            x.copy_(every[rank])
            residual.copy_(residual_now)
            graph.replay()
            first = norm(every[rank].clone(), residual_now, weight)
            second = norm(first[0], first[1], weight)
            assert torch.equal(output, second[0]) and torch.equal(after, second[1]), (rows, turn)
    with torch.no_grad():
        matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32

        def layer(x, residual):
            x, residual = norm(x @ matrix, residual, matrix[0])
            return torch.nn.functional.gelu(x @ matrix), residual * 2

        every, residual, _ = drawn(size, 64, 1024, torch.bfloat16, 6)
        plain = layer(every[rank], residual)
        for backend in ("aot_eager", "inductor"):
            compiled = torch.compile(layer, backend=backend, fullgraph=True)
            for _ in range(3):
                got = compiled(every[rank], residual)
                for one, other in zip(got, plain):
                    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
        dist.barrier()
    rows = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.weft.all_reduce_norm.default, (rows, rows, rows[0], EPSILON, "fp8_by_row", 1.0, norm._name))


class Gate:
    """Tokens of all ranks, the experts of each, and their weights: the same everywhere. Some choices are of no expert, and some tokens have one twice."""

    def __init__(self, size, tokens, hidden, experts, top_k, seed):
        import torch

        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.x = [torch.randn(n, hidden, device="cuda", generator=generator).bfloat16() for n in tokens]
        self.experts = [torch.randint(-1, experts, (n, top_k), device="cuda", generator=generator) for n in tokens]
        self.weights = [torch.rand(n, top_k, device="cuda", generator=generator) for n in tokens]
        self.factors = torch.randn(experts, device="cuda", generator=generator)

    def wanted(self, rank):
        """The sum over a token's experts of weight times factor, times the token."""
        import torch

        chosen = self.experts[rank]
        factors = torch.where(chosen >= 0, self.factors[chosen.clamp(min=0)], 0) * self.weights[rank]
        return self.x[rank].double() * factors.sum(1, keepdim=True).double()

    def check(self, rank, got, of_each, what):
        """Each of a token's parts may be off by so much of itself."""
        import torch

        chosen = self.experts[rank]
        factors = torch.where(chosen >= 0, self.factors[chosen.clamp(min=0)], 0) * self.weights[rank]
        # What is small beside the largest of its 128 is rounded to steps of that.
        most = (self.x[rank].double().abs() * of_each + 5e-5) * factors.abs().sum(1, keepdim=True).double() + 1e-6
        off = (got.double() - self.wanted(rank)).abs()
        assert (off <= most).all(), f"{what}: {(off / most).max().item() if off.numel() else 0} times what it may be off"


def wide(received, moe):
    """Rows as bf16, also where they were sent as fp8."""
    import torch

    if received.rows.dtype == torch.bfloat16:
        return received.rows
    rows = received.rows.float().unflatten(-1, (-1, 128)) * received.scales[..., None]
    return rows.flatten(-2).bfloat16()


def run_experts(moe, received, factors, compact):
    """Every expert multiplies by its factor."""
    import torch

    rows = wide(received, moe)
    if not compact:
        return (rows.float() * factors[:, None, None, None]).bfloat16()
    chosen, weights = received.row_experts, received.row_weights
    each = torch.where(chosen >= 0, factors[chosen.clamp(min=0).long()] * weights, 0)
    return (rows.float() * each.sum(1, keepdim=True)).bfloat16()


def experts(rank, size):
    import torch

    import weft
    import weft.torch

    seed = 0
    for hidden, each, top_k, most in [(8, 1, 1, 3), (264, 5, 3, 40), (1024, 4, 8, 130), (7168, 32, 8, 128)]:
        total = each * size
        for kind in ("slots", "compact"):
            for sent in ("bf16", "fp8"):
                if sent == "fp8" and hidden % 128:
                    continue
                top = min(top_k, total)
                moe = weft.torch.Moe(hidden=hidden, experts=total, top_k=top, tokens_max=most, received=kind, sent=sent)
                for turn in range(3):
                    seed += 1
                    tokens = [[most, 0, 1, most // 2][(turn + other) % 4] for other in range(size)]
                    gate = Gate(size, tokens, hidden, total, top, seed)
                    x, chosen, weights = gate.x[rank], gate.experts[rank], gate.weights[rank]
                    received = moe.dispatch(x, chosen if turn else chosen.int(), weights)
                    look(gate, received, moe, rank, size, kind == "compact")
                    own = gate.factors[rank * each : (rank + 1) * each]
                    results = run_experts(moe, received, own, kind == "compact")
                    if turn == 1:
                        moe.results.copy_(results)
                        results = moe.results
                    got = moe.combine(results, weights)
                    torch.cuda.synchronize()
                    moe.check()
                    what = f"{hidden} {each} {top} {kind} {sent} {tokens}"
                    gate.check(rank, got, 0.09 if sent == "fp8" else 0.012, what)
    over_capacity(rank, size)


def look(gate, received, moe, rank, size, compact):
    """Every row that has come is the right one, at its place."""
    import torch

    rows, each = wide(received, moe), moe.experts_here
    tolerance = 0 if received.rows.dtype == torch.bfloat16 else 0.07
    first = rank * each
    at = 0
    for source in range(size):
        chosen, x = gate.experts[source], gate.x[source]
        if compact:
            here = ((chosen >= first) & (chosen < first + each)).any(1)
            count = int(here.sum())
            assert int(received.sources[source]) == count, (source, received.sources, count)
            torch.testing.assert_close(rows[at : at + count], x[here], rtol=tolerance, atol=tolerance)
            at += count
            continue
        for expert in range(each):
            here = (chosen == first + expert).any(1)
            count = int(here.sum())
            assert int(received.counts[expert, source]) == count, (source, expert)
            torch.testing.assert_close(rows[expert, source, :count], x[here], rtol=tolerance, atol=tolerance)


def over_capacity(rank, size):
    import torch

    import weft
    import weft.torch

    moe = weft.torch.Moe(hidden=64, experts=size, top_k=1, tokens_max=8, received="compact", capacity=8)
    x = torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.ones(8, 1, device="cuda")
    # Everybody's tokens to the last rank, which has room for those of one.
    moe.dispatch(x, torch.full((8, 1), size - 1, device="cuda"), weights)
    nothing = moe.combine(moe.results, weights)
    torch.cuda.synchronize()
    try:
        moe.check()
    except weft.OverCapacity as error:
        assert (error.rank, error.needed, error.capacity) == (size - 1, 8 * size, 8), vars(error)
        print("refused:", error)
    else:
        raise AssertionError("there was no room, and nobody said so")
    assert (nothing == 0).all() and (moe.counts == 0).all()
    # Then each to its own.
    received = moe.dispatch(x * rank, torch.full((8, 1), rank, device="cuda"), weights)
    got = moe.combine(received.rows, weights)
    torch.cuda.synchronize()
    moe.check()
    assert torch.equal(got, x * rank)
    for wrong in [
        lambda: moe.dispatch(x[:, :32], torch.zeros(8, 1, device="cuda", dtype=torch.int32), weights),
        lambda: moe.dispatch(x, torch.zeros(7, 1, device="cuda", dtype=torch.int32), weights),
        lambda: moe.dispatch(x.float(), torch.zeros(8, 1, device="cuda", dtype=torch.int32), weights),
        lambda: moe.dispatch(x.repeat(2, 1), torch.zeros(16, 1, device="cuda", dtype=torch.int32), weights.repeat(2, 1)),
        lambda: moe.combine(x[:4], weights),
        lambda: weft.torch.Moe(hidden=64, experts=size + 1, top_k=1, tokens_max=8),
        lambda: weft.torch.Moe(hidden=64, experts=size, top_k=1, tokens_max=8, capacity=3),
    ]:
        try:
            wrong()
        except weft.InvalidCall as error:
            print("refused:", error)
        else:
            raise AssertionError("it was taken")


def captured_experts(rank, size):
    """Dispatch, experts and combine in a graph, replayed with other gates; and compiled."""
    import torch
    import torch.distributed as dist

    import weft.torch

    tokens, hidden, each, top_k = 32, 1024, 4, 4
    total = each * size
    for kind in ("slots", "compact"):
        moe = weft.torch.Moe(hidden=hidden, experts=total, top_k=top_k, tokens_max=tokens, received=kind)

        def layer(x, chosen, weights, factors):
            received = moe.dispatch(x, chosen, weights)
            return moe.combine(run_experts(moe, received, factors, kind == "compact"), weights) * 2

        def gate(seed):
            made = Gate(size, [tokens] * size, hidden, total, top_k, seed)
            return made, made.factors[rank * each : (rank + 1) * each]

        static, factors = gate(1)
        inputs = [static.x[rank], static.experts[rank], static.weights[rank], factors]
        layer(*inputs)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(*inputs)
        for turn in range(5):
            now, own = gate(10 + turn)
            for tensor, fresh in zip(inputs, [now.x[rank], now.experts[rank], now.weights[rank], own]):
                tensor.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            moe.check()
            now.check(rank, output / 2, 0.015, f"{kind} {turn}")
        with torch.no_grad():
            for backend in ("aot_eager", "inductor"):
                compiled = torch.compile(layer, backend=backend, fullgraph=True)
                for turn in range(3):
                    now, own = gate(20 + turn)
                    got = compiled(now.x[rank], now.experts[rank], now.weights[rank], own)
                    now.check(rank, got / 2, 0.015, f"{kind} {backend} {turn}")
            dist.barrier()


def norm_killed(rank, size):
    """Rank 1 dies while the others wait for it in a fused norm, then in a dispatch."""
    import torch
    import torch.distributed as dist

    import weft
    import weft.torch

    norm = weft.torch.FusedNorm()
    x = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
    norm(x, x, x[0])
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    at = time.monotonic()
    norm(x, x, x[0])
    torch.cuda.synchronize()
    took = time.monotonic() - at
    try:
        norm(x, x, x[0])
    except weft.CollectiveError as error:
        print(f"rank {rank}: {type(error).__name__}: {error} (rank {error.rank}, {error.cause}), after {took:.2f} s")
        assert error.rank == 1 and took < 15, (error.rank, took)
        return
    raise AssertionError(f"nothing was raised, after {took:.2f} s")


def bench(rank, size):
    """Microseconds a call in a graph, by the device's clock, medians; beside the same by calls of torch on the same group, and dispatch beside what torch takes to move rows."""
    import torch
    import torch.distributed as dist

    import weft.torch

    def time_of(call, calls=10):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        took = []
        for _ in range(5):
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) * 1000 / calls)
        return sorted(took)[2]

    norm, narrow = weft.torch.FusedNorm(), weft.torch.FusedNorm(output="fp8_by_row")
    hidden = 7168
    for rows in (1, 4, 16, 64, 256, 1024, 4096):
        x, residual, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in [(rows, hidden), (rows, hidden), (hidden,)])
        near = weft.torch.symmetric_empty(rows, hidden, dtype=torch.bfloat16)
        near.copy_(x)

        def three():
            dist.all_reduce(x)
            residual.add_(x)
            torch.nn.functional.rms_norm(residual, (hidden,), weight, EPSILON)

        told = [
            time_of(lambda: norm(x, residual, weight)),
            time_of(lambda: norm(near, residual, weight)),
            time_of(lambda: narrow(x, residual, weight)),
            time_of(three),
        ]
        if rank == 0:
            words = "  ".join(f"{took:.1f}" for took in told)
            print(f"norm, {size} ranks, {rows} rows of {hidden}, us, fused / of a symmetric tensor / to fp8 / three calls: {words}  ({told[3] / told[0]:.2f} times)", flush=True)
    for tokens, kind in [(128, "slots"), (128, "compact"), (4096, "compact")]:
        for sent in ("bf16", "fp8"):
            moe = weft.torch.Moe(hidden=hidden, experts=256, top_k=8, tokens_max=tokens, received=kind, sent=sent)
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            chosen = torch.rand(tokens, 256, device="cuda").topk(8).indices.int()
            weights = torch.rand(tokens, 8, device="cuda")
            calls = 10 if tokens < 1000 else 3
            dispatch = time_of(lambda: moe.dispatch(x, chosen, weights), calls)
            combine = time_of(lambda: moe.combine(moe.results, weights), calls)
            moe.check()
            if rank == 0:
                print(f"moe, {size} ranks, {tokens} tokens, {kind}, {sent}, us: dispatch {dispatch:.1f}, combine {combine:.1f}", flush=True)
            del moe


ALL = [
    ("norms", 2),
    ("norms", 3),
    ("norms", 8),
    ("symmetric", 2),
    ("symmetric", 4),
    ("captured", 2),
    ("experts", 2),
    ("experts", 4),
    ("experts", 8),
    ("captured_experts", 2),
    ("norm_killed", 3),
]

if __name__ == "__main__":
    sys.exit(main(globals(), ALL, HERE))
