"""torch.distributed with the backend weft on tensors of a GPU: the part of the GPU's tests that needs torch. Run by the bundle of `cargo xtask gpu-test`.

Every rank is a process; all of them are on one GPU, with MPS where it can be started. `python torch_cuda.py` runs all of it, `python torch_cuda.py NAME RANKS` one.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta

HERE = pathlib.Path(__file__).resolve()
ODD = [1, 2, 7, 33, 1000, 4097, 65_537, 300_001, 1_000_003, 12_000_001]


def references(size, rank, count, dtype, seed):
    """What all ranks bring, the same everywhere, and this rank's own."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    if dtype.is_floating_point:
        every = torch.randn(size, count, device="cuda", generator=generator).to(dtype)
    else:
        every = torch.randint(-99, 99, (size, count), device="cuda", generator=generator).to(dtype)
    return every, every[rank].clone()


def reduced(every, op):
    """As Weft says it: in the order of the ranks, floats of two bytes in f32 and rounded once."""
    import torch
    import torch.distributed as dist

    wide = every.float() if every.dtype in (torch.float16, torch.bfloat16) else every
    total = wide[0].clone()
    for row in wide[1:]:
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total += row
        elif op == dist.ReduceOp.PRODUCT:
            total *= row
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, row)
        else:
            total = torch.maximum(total, row)
    if op == dist.ReduceOp.AVG:
        # By a tensor, since torch multiplies by the reciprocal of a number.
        total = total / torch.full_like(total, len(every))
    return total.to(every.dtype)


def team_of(dist):
    group = dist.group.WORLD
    return group._weft._devices.team


def on_kernels(dist):
    assert team_of(dist) is not None, dist.group.WORLD.device_reason


def reductions(rank, size):
    import torch
    import torch.distributed as dist

    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.int32]
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    seed = 0
    for count in ODD:
        for nth, dtype in enumerate(kinds):
            for op in ops if count < 5000 else [ops[(nth + count) % 5], ops[0]]:
                if op == dist.ReduceOp.AVG and dtype == torch.int32:
                    continue
                seed += 1
                every, own = references(size, rank, count, dtype, seed)
                dist.all_reduce(own, op)
                assert torch.equal(own, reduced(every, op)), ("all_reduce", count, dtype, op)
                wide, own = references(size, rank, count * size, dtype, seed + 1)
                output = torch.empty(count, dtype=dtype, device="cuda")
                dist.reduce_scatter_tensor(output, own, op)
                wanted = reduced(wide, op).view(size, count)[rank]
                assert torch.equal(output, wanted), ("reduce_scatter", count, dtype, op)
    on_kernels(dist)


def moves(rank, size):
    import torch
    import torch.distributed as dist

    for nth, count in enumerate(ODD):
        for dtype in [torch.uint8, torch.bfloat16, torch.int64]:
            every, own = references(size, rank, count, dtype, nth)
            output = torch.empty(size * count, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(output, own)
            assert torch.equal(output.view(size, count), every), ("all_gather", count, dtype)
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own)
            assert all(torch.equal(part, row) for part, row in zip(parts, every)), ("list", count, dtype)
            for root in {0, size - 1}:
                got = own.clone()
                dist.broadcast(got, root)
                assert torch.equal(got, every[root]), ("broadcast", count, dtype, root)
            wide, own = references(size, rank, size * count, dtype, nth + 100)
            output = torch.empty_like(own)
            dist.all_to_all_single(output, own)
            wanted = wide.view(size, size, count)[:, rank]
            assert torch.equal(output.view(size, count), wanted), ("all_to_all", count, dtype)
    # Tensors that do not lie as calls need them.
    every, _ = references(size, rank, 64 * 65, torch.float32, 7)
    askew = every[rank].clone().view(64, 65).t()
    dist.all_reduce(askew)
    assert torch.equal(askew.t().reshape(-1), reduced(every, dist.ReduceOp.SUM))
    on_kernels(dist)


def streams(rank, size):
    """Calls on several streams, in a graph, and without the host waiting for anything."""
    import torch
    import torch.distributed as dist

    warm = torch.ones(8, device="cuda")
    dist.all_reduce(warm)
    side = torch.cuda.Stream()
    for count in [100, 3_000_000]:
        every, own = references(size, rank, count, torch.float32, count)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            big = torch.randn(2048, 2048, device="cuda")
            for _ in range(20):
                big = big @ big / 64
            late = own + 0
            work = dist.all_reduce(late, async_op=True)
            at = time.monotonic()
        # The main stream comes next: it must not overtake.
        again = own.clone()
        dist.all_reduce(again)
        assert time.monotonic() - at < 5
        work.wait()
        twice = late + 0
        torch.cuda.synchronize()
        wanted = reduced(every, dist.ReduceOp.SUM)
        assert torch.equal(twice, wanted) and torch.equal(again, wanted), count
        future = dist.all_reduce(own.clone(), async_op=True).get_future()
        (result,) = future.wait()
        assert torch.equal(result, wanted)
        # Captured, with a result for each replay.
        static = own.clone()
        gathered = torch.empty(size * count, device="cuda")
        graph = torch.cuda.CUDAGraph()
        dist.barrier()
        with torch.cuda.graph(graph):
            dist.all_reduce(static)
            static.mul_(0.5)
            dist.all_gather_into_tensor(gathered, static)
        for turn in range(5):
            static.copy_(own * turn)
            graph.replay()
            torch.cuda.synchronize()
            want = reduced(every * turn, dist.ReduceOp.SUM) * 0.5
            assert torch.equal(gathered.view(size, count), want.expand(size, count)), (count, turn)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(torch.ones(4, dtype=torch.int64, device="cuda"))
        except RuntimeError as refused:
            assert "cannot be captured" in str(refused), refused
        else:
            raise AssertionError("a call through host memory was captured")
        torch.cuda.synchronize()
        dist.barrier()
    # Memory that torch gives out again at once.
    for turn in range(200):
        tensor = torch.full((300_000 + turn,), float(rank + turn), device="cuda")
        dist.all_reduce(tensor)
        total = tensor.sum(dtype=torch.float64)
        del tensor
        junk = torch.full((300_000 + turn,), -1.0, device="cuda")
        assert total.item() == (300_000 + turn) * (size * turn + size * (size - 1) / 2), turn
        del junk


def staged(rank, size):
    """What kernels do not carry goes through host memory, and is right."""
    import torch
    import torch.distributed as dist

    numbers = torch.full((1000,), rank + 1, dtype=torch.int64, device="cuda")
    dist.all_reduce(numbers)
    assert (numbers == size * (size + 1) // 2).all()
    flags = torch.tensor([rank == 0, False], device="cuda")
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False]
    doubles = torch.full((3,), 0.5, dtype=torch.float64, device="cuda")
    work = dist.all_reduce(doubles, async_op=True)
    work.wait()
    assert doubles.tolist() == [0.5 * size] * 3
    bits = torch.tensor([1 << rank], dtype=torch.int32, device="cuda")
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    one = torch.full((5,), float(rank), device="cuda")
    dist.reduce(one, 0)
    if rank == 0:
        assert one.tolist() == [size * (size - 1) / 2] * 5
    parts = [torch.empty(rank_ + 1, device="cuda") for rank_ in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device="cuda"))
    assert all((part == other).all() for other, part in enumerate(parts))
    sent = torch.arange(size * (size + 1) // 2, dtype=torch.float32, device="cuda") + 100 * rank
    got = torch.empty((rank + 1) * size, device="cuda")
    dist.all_to_all_single(got, sent, [rank + 1] * size, [other + 1 for other in range(size)])
    first = rank * (rank + 1) // 2
    wanted = [100.0 * other + first + k for other in range(size) for k in range(rank + 1)]
    assert got.tolist() == wanted
    message = torch.full((5000,), float(rank), device="cuda")
    into = torch.empty_like(message)
    works = [dist.isend(message, (rank + 1) % size), dist.irecv(into, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert (into == (rank - 1) % size).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    on_kernels(dist)


def training(rank, size):
    """DDP and FSDP2 on the GPU, beside the same steps by one process on the whole batch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.backends.cuda.matmul.allow_tf32 = False

    def model():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(256, 16)).cuda()

    def losses(net, ranks):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        told = []
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            data = torch.randn(8 * size, 64, generator=generator).cuda()
            wanted = torch.randn(8 * size, 16, generator=generator).cuda()
            data, wanted = (tensor.view(size, 8, -1)[ranks].flatten(0, 1) for tensor in (data, wanted))
            loss = (net(data) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            if len(ranks) == 1:
                dist.all_reduce(total, dist.ReduceOp.AVG)
            told.append(total.item())
        return told

    alone = losses(model(), list(range(size)))
    ddp = losses(torch.nn.parallel.DistributedDataParallel(model(), device_ids=[0]), [rank])
    assert all(abs(a - b) < 1e-4 * abs(a) for a, b in zip(alone, ddp)), (alone, ddp)
    mesh = init_device_mesh("cuda", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    sharded = losses(net, [rank])
    assert all(abs(a - b) < 1e-4 * abs(a) for a, b in zip(alone, sharded)), (alone, sharded)
    on_kernels(dist)
    if rank == 0:
        print("losses", [round(loss, 5) for loss in ddp])


def groups(rank, size):
    """Two groups of half the ranks, each with a team of its own, at the same time."""
    import torch
    import torch.distributed as dist

    half = size // 2
    own = None
    for first in (0, half):
        group = dist.new_group(list(range(first, first + half)))
        own = group if first <= rank < first + half else own
    mine = rank // half
    for turn in range(50):
        tensor = torch.full((1_000_000,), float(rank + turn), device="cuda")
        dist.all_reduce(tensor, group=own)
        whole = torch.full((100_000,), float(rank), device="cuda")
        dist.all_reduce(whole)
        ranks = range(mine * half, mine * half + half)
        assert tensor[-1].item() == sum(ranks) + half * turn and tensor[0].item() == tensor[-1].item()
        assert whole[0].item() == size * (size - 1) / 2


def killed(rank, size):
    """Rank 1 dies while the others wait for it in a kernel."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    at = time.monotonic()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    took = time.monotonic() - at
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        print(f"rank {rank}: {type(error).__name__}: {error} (rank {error.rank}, {error.cause}), after {took:.2f} s")
        assert error.rank == 1 and took < 15, (error.rank, took)
        return
    raise AssertionError(f"nothing was raised, after {took:.2f} s")


def bench(rank, size):
    """Microseconds a call, by the device's clock, 20 in a row; then in a graph."""
    import torch
    import torch.distributed as dist

    def time_of(call, graph):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        run = call
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                for _ in range(20):
                    call()
            captured.replay()
            torch.cuda.synchronize()
            dist.barrier()
            run = captured.replay
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = []
        for _ in range(5):
            begin.record()
            for _ in range(1 if graph else 20):
                run()
            end.record()
            torch.cuda.synchronize()
            best.append(begin.elapsed_time(end) * 1000 / 20)
        return sorted(best)[2]

    for shift in (10, 16, 19, 22, 25, 28):
        count = (1 << shift) // 2
        own = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
        part = torch.zeros(count // size, dtype=torch.bfloat16, device="cuda")
        other = torch.zeros_like(own)
        calls = {
            "all_reduce": lambda: dist.all_reduce(own),
            "all_gather": lambda: dist.all_gather_into_tensor(own, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, own),
            "all_to_all": lambda: dist.all_to_all_single(other, own),
        }
        told = {name: (time_of(call, False), time_of(call, True)) for name, call in calls.items()}
        if rank == 0:
            words = "  ".join(f"{name} {eager:.1f} / {graph:.1f}" for name, (eager, graph) in told.items())
            print(f"{size} ranks, {1 << shift} bytes, us called / in a graph: {words}", flush=True)


def rank_main(name, rank, size, store, tests):
    import torch
    import torch.distributed as dist

    import weft.torch  # noqa: F401

    torch.cuda.set_device(0)
    # Half of the tests name the devices.
    backend = "cpu:weft,cuda:weft" if name in ("moves", "staged") else "weft"
    # A deadline that is long for a call, and short for whoever waits for the tests.
    timeout = timedelta(seconds=12)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        tests[name](rank, size)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if "killed" not in name:
        dist.destroy_process_group()


def on_ranks(name, size, script, limit=90, dead=()):
    folder = tempfile.mkdtemp()
    at = time.monotonic()
    command = [sys.executable, str(script), "--rank", name]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), folder + "/store"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(size)
    ]
    told, well = [], True
    for rank, process in enumerate(ranks):
        try:
            words, _ = process.communicate(timeout=max(1.0, limit - (time.monotonic() - at)))
        except subprocess.TimeoutExpired:
            process.kill()
            words = process.communicate()[0] + "\nkilled: too late"
        told.append(words)
        well &= process.returncode == 0 or rank in dead
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{'ok' if well else 'FAILED'}: {name} on {size} ranks, {time.monotonic() - at:.1f} s", flush=True)
    for rank, words in enumerate(told):
        lines = [line for line in words.strip().splitlines() if "Warning" not in line]
        if lines and (not well or rank == 0 or dead):
            print("\n".join(f"  {rank}| {line}" for line in lines[-20:]), flush=True)
    return well


ALL = [
    ("reductions", 2),
    ("reductions", 3),
    ("reductions", 8),
    ("moves", 2),
    ("moves", 5),
    ("moves", 8),
    ("streams", 2),
    ("streams", 4),
    ("staged", 3),
    ("training", 2),
    ("training", 4),
    ("groups", 4),
    ("killed", 3),
]


def main(tests, every, script):
    """`tests` by name, which of them on how many ranks, and the program that has them."""
    if len(sys.argv) > 1 and sys.argv[1] == "--rank":
        name, rank, size, store = sys.argv[2:]
        rank_main(name, int(rank), int(size), store, tests)
        return 0
    folder = tempfile.mkdtemp()
    control = shutil.which("nvidia-cuda-mps-control")
    if control and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        # Processes that share a card without it take turns of two milliseconds.
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run([control, "-d"], check=False)
    else:
        control = None
    chosen = [(sys.argv[1], int(sys.argv[2]))] if len(sys.argv) > 2 else every
    failed = [name for name, size in chosen if not on_ranks(name, size, script, dead=(1,) if "killed" in name else ())]
    if control:
        subprocess.run([control], input="quit\n", text=True, check=False)
    print(f"{script.name}:", f"failed: {failed}" if failed else f"{len(chosen)} tests passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(globals(), ALL, HERE))
