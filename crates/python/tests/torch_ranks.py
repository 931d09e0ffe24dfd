"""What each rank of a test in test_torch.py does: `torch_ranks.py NAME RANK SIZE STORE`."""

import atexit
import functools
import os
import signal
import sys
import threading
import time
from datetime import timedelta


@atexit.register
def _tell_who_is_left():
    """Called last, because it was the first to ask for it: a thread that is still there would be ended in the middle of a call."""
    left = [thread.name for thread in threading.enumerate() if thread.name == "weft-torch"]
    if left:
        print(f"left at the end: {left}")


import torch
import torch.distributed as dist

import weft
import weft.torch

REDUCIBLE = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
]
MOVABLE = [*REDUCIBLE, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


def values(rank, dtype, count=10):
    """Small whole numbers, which every type holds exactly, also summed."""
    whole = (torch.arange(count) * (rank + 2)) % 5
    return whole.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else whole.to(dtype)


def same(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype.itemsize == 1:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    assert torch.equal(ours, theirs), (ours, theirs)


def finish(work, asynchronous):
    assert (work is not None) == asynchronous
    if asynchronous:
        assert work.wait()
        assert work.is_completed() and work.is_success()


def collectives(rank, size):
    """Everything that Gloo does, beside Gloo."""
    gloo = dist.new_group(backend="gloo")

    def both(call):
        """`call(group, asynchronous)` gives tensors and what `dist` gave."""
        expected, _ = call(gloo, False)
        for asynchronous in (False, True):
            tensors, work = call(None, asynchronous)
            finish(work, asynchronous)
            for ours, theirs in zip(tensors, expected, strict=True):
                same(ours, theirs)

    for dtype in REDUCIBLE:
        for op in [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]:

            def all_reduce(group, asynchronous):
                tensor = values(rank, dtype)
                return [tensor], dist.all_reduce(tensor, op, group=group, async_op=asynchronous)

            def reduce(group, asynchronous):
                tensor = values(rank, dtype)
                work = dist.reduce(tensor, size - 1, op, group=group, async_op=asynchronous)
                if group is None and asynchronous:
                    work.wait()
                return [tensor] if rank == size - 1 else [], work

            both(all_reduce)
            both(reduce)
        if not dtype.is_floating_point:
            for op in [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]:
                both(
                    lambda group, asynchronous: (
                        lambda tensor: ([tensor], dist.all_reduce(tensor, op, group=group, async_op=asynchronous))
                    )(values(rank, dtype))
                )

    for dtype in MOVABLE:
        theirs = gloo if dtype.itemsize > 1 and dtype != torch.int16 or dtype in REDUCIBLE else None

        def moved(call, right):
            """Where Gloo has no such type, the right answer is written out."""
            for asynchronous in (False, True):
                tensors, work = call(None, asynchronous)
                finish(work, asynchronous)
                for ours, expected in zip(tensors, right, strict=True):
                    same(ours, expected)
            if theirs is not None and not dtype.is_complex:
                tensors, _ = call(theirs, False)
                for other, expected in zip(tensors, right, strict=True):
                    same(other, expected)

        everyone = [values(other, dtype) for other in range(size)]
        own = everyone[rank]

        def broadcast(group, asynchronous):
            tensor = own.clone()
            return [tensor], dist.broadcast(tensor, 1, group=group, async_op=asynchronous)

        def all_gather(group, asynchronous):
            outputs = [torch.empty_like(own) for _ in range(size)]
            return outputs, dist.all_gather(outputs, own, group=group, async_op=asynchronous)

        def all_gather_into(group, asynchronous):
            output = torch.empty(size * own.numel(), dtype=dtype)
            return [output], dist.all_gather_into_tensor(output, own, group=group, async_op=asynchronous)

        def gather(group, asynchronous):
            outputs = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
            work = dist.gather(own, outputs, 0, group=group, async_op=asynchronous)
            return outputs or [], work

        def scatter(group, asynchronous):
            output = torch.empty_like(own)
            inputs = [each.clone() for each in everyone] if rank == 0 else None
            return [output], dist.scatter(output, inputs, 0, group=group, async_op=asynchronous)

        moved(broadcast, [everyone[1]])
        moved(all_gather, everyone)
        moved(all_gather_into, [torch.cat(everyone)])
        moved(gather, everyone if rank == 0 else [])
        moved(scatter, [own])

        def all_to_all_single(group, asynchronous):
            sent = torch.cat([values(rank + 10 * other, dtype, 4) for other in range(size)])
            output = torch.empty_like(sent)
            return [output], dist.all_to_all_single(output, sent, group=group, async_op=asynchronous)

        moved(all_to_all_single, [torch.cat([values(other + 10 * rank, dtype, 4) for other in range(size)])])

    for dtype in REDUCIBLE:
        blocks = [[values(r + s, dtype, 6) for s in range(size)] for r in range(size)]
        right = functools.reduce(torch.add, [blocks[r][rank] for r in range(size)])
        for asynchronous in (False, True):
            output = torch.empty(6, dtype=dtype)
            finish(dist.reduce_scatter(output, blocks[rank], async_op=asynchronous), asynchronous)
            same(output, right)
            output = torch.empty(6, dtype=dtype)
            whole = torch.cat(blocks[rank])
            finish(dist.reduce_scatter_tensor(output, whole, async_op=asynchronous), asynchronous)
            same(output, right)


def shapes(rank, size):
    """Tensors that lie otherwise, hold nothing, or differ in size from rank to rank."""
    # Not contiguous.
    base = torch.arange(24.0).reshape(4, 6)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 1:3]):
        for asynchronous in (False, True):
            tensor = base.clone()
            finish(dist.all_reduce(view(tensor), async_op=asynchronous), asynchronous)
            right = base.clone()
            view(right).mul_(size)
            same(tensor, right)
            tensor = base.clone() if rank == 0 else torch.zeros_like(base)
            finish(dist.broadcast(view(tensor), 0, async_op=asynchronous), asynchronous)
            same(view(tensor).clone(), view(base).clone())
    outputs = [torch.empty(3, 4).t() for _ in range(size)]
    dist.all_gather(outputs, torch.arange(12.0).reshape(3, 4).t() + rank)
    for other, output in enumerate(outputs):
        same(output.contiguous(), (torch.arange(12.0).reshape(3, 4).t() + other).contiguous())
    # Nothing.
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0) for _ in range(size)], empty)
    dist.all_to_all_single(torch.empty(0), empty)
    # One element without a dimension.
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, dist.ReduceOp.AVG)
    assert scalar.item() == (size - 1) / 2
    # Bools stay bools.
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, True, False]
    # Different sizes.
    outputs = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    for other, output in enumerate(outputs):
        same(output, torch.full((other + 1,), float(other)))
    output = torch.empty(sum(other + 1 for other in range(size)), 2)
    sent = torch.full(((rank + 1) * size, 2), float(rank))
    dist.all_to_all_single(output, sent, [other + 1 for other in range(size)], [rank + 1] * size)
    same(output, torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)]))
    received = [torch.empty(other + 1) for other in range(size)]
    dist.all_to_all(received, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    for other, tensor in enumerate(received):
        same(tensor, torch.full((other + 1,), float(other)))
    # Large, through whatever way large ones go.
    large = torch.full((3_000_001,), 1.0 + rank)
    dist.all_reduce(large)
    assert torch.equal(large, torch.full_like(large, size * (size + 1) / 2))
    # What cannot be done is said, and harms nobody.
    for wrong in [
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_to_all_single(torch.empty(2 * size + 1), torch.empty(2 * size + 1)),
    ]:
        try:
            wrong()
        except (ValueError, RuntimeError):
            pass
        else:
            raise AssertionError("this should have been refused")
    dist.barrier()


def grouped(rank, size):
    """Many tensors at once, objects, futures, and groups within the group."""
    tensors = [torch.full((n,), float(rank)) for n in (1, 5, 100)]
    dist.all_reduce_coalesced(tensors)
    assert all(torch.equal(t, torch.full_like(t, size * (size - 1) / 2)) for t in tensors)
    tensors = [torch.full((n,), float(rank)) for n in (2, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, torch.full_like(t, size * (size - 1) / 2)) for t in tensors)
    outputs = [torch.empty(size * 2), torch.empty(size * 3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // size,), float(rank)))
    for output in outputs:
        assert output.tolist() == [float(r) for r in range(size) for _ in range(output.numel() // size)]
    outputs = [torch.empty(2), torch.empty(3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.ones(output.numel() * size))
    assert all(torch.equal(output, torch.full_like(output, size)) for output in outputs)

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    told = [{"a": 1}, "b"] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, 1)
    assert told == [{"a": 1}, "b"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, gathered, 0)
    assert gathered is None or gathered == [2 * other for other in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]

    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((3,), 2.0 * size))
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    for work in reversed(works):
        work.wait(timedelta(seconds=30))

    evens = dist.new_group(list(range(0, size, 2)))
    odds = dist.new_group(list(range(1, size, 2)))
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor, group=odds if rank % 2 else evens)
    assert tensor.item() == sum(range(rank % 2, size, 2))
    again = dist.new_group(backend="weft")
    dist.broadcast(tensor, 0, group=again)
    # Until torch 2.14 this is Gloo's alone.
    if weft.torch.Backend is not weft.torch.Calls:
        dist.monitored_barrier(timeout=timedelta(seconds=30))
    assert dist.get_backend() == "weft" and dist.get_backend(again) == "weft"
    dist.destroy_process_group(again)


def messages(rank, size):
    """Between two ranks, in any order."""
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 100, 5000, 2_000_000):
        came = torch.empty(count)
        # Both ends receive first.
        receiving = dist.irecv(came, preceding)
        sending = dist.isend(torch.full((count,), float(rank)), following)
        receiving.wait()
        sending.wait()
        assert torch.equal(came, torch.full((count,), float(preceding)))
    # By tag, not by order.
    sent = [dist.isend(torch.tensor([float(tag)] * 1000), following, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        came = torch.empty(1000)
        dist.recv(came, preceding, tag=tag)
        assert came[0] == tag
    [work.wait() for work in sent]
    # From whoever it comes.
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            came = torch.empty(2, dtype=torch.int64)
            source = dist.recv(came)
            assert came.tolist() == [source, source]
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([rank, rank]), 0)
    # What comes next is not to be taken for one of those.
    dist.barrier()
    came = torch.empty(3, 2).t()
    operations = [
        dist.P2POp(dist.irecv, came, preceding),
        dist.P2POp(dist.isend, torch.full((2, 3), float(rank)), following),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(came, torch.full((2, 3), float(preceding)))
    objects = [rank, "hello"] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, 1)
    if rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [0, "hello"]
    dist.barrier()


def model():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    return torch.nn.Sequential(*layers)


def train(wrapped, rank, steps=20):
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(wrapped(inputs), inputs[:, :4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank, size):
    gloo = dist.new_group(backend="gloo")
    losses = [
        train(torch.nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01), rank)
        for group in (None, gloo)
    ]
    assert losses[0] == losses[1], losses
    assert losses[0][-1] < losses[0][0]


def fsdp2(rank, size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    gloo = dist.new_group(backend="gloo")
    losses = []
    for group in (dist.group.WORLD, gloo):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        sharded = model()
        for layer in sharded:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        losses.append(train(sharded, rank))
    assert losses[0] == losses[1], losses
    assert losses[0][-1] < losses[0][0]


def dtensor(rank, size):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    left, right = torch.randn(8, 12), torch.randn(12, 6)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    turned = distribute_tensor(left, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(turned.redistribute(mesh, [Replicate()]).to_local(), left)


def checkpoint(rank, size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    saved = model()
    fully_shard(saved)
    train(saved, rank, steps=3)
    dcp.save(get_model_state_dict(saved), checkpoint_id=folder)
    loaded = model()
    fully_shard(loaded)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state)
    for ours, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        same(ours.to_local(), theirs.to_local())


def leaving(rank, size):
    """Ends with everything that has a thread behind it still there."""
    sent, received = torch.full((4096,), float(rank)), torch.empty(4096)
    work = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for each in work:
        each.wait()
    reduced = torch.ones(8)
    future = dist.all_reduce(reduced, async_op=True).get_future()
    future.wait()
    assert received[0] == (rank - 1) % size and reduced[0] == size
    threads = [thread for thread in threading.enumerate() if thread.name == "weft-torch"]
    assert threads, "there is something to leave behind"
    sys.exit(0)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor(float(index))


def forked(rank, size):
    """A rank forks, with everything that has a thread behind it there: workers that load data, and a child that tries to take part."""
    tensor = torch.ones(8)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    other = (rank + 1) % size
    sent, received = torch.full((4096,), float(rank)), torch.empty(4096)
    for each in [dist.isend(sent, other), dist.irecv(received, other)]:
        each.wait()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert sum(float(batch.sum()) for batch in loader) == 31 * 16
    # Something is under way at the fork.
    waiting = dist.irecv(received, other, tag=7)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        for call in [
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.barrier(),
            lambda: dist.send(sent, other),
            lambda: dist.recv(received, other),
            lambda: waiting.wait(),
            lambda: waiting.get_future(),
        ]:
            try:
                call()
            except weft.Forked:
                continue
            os._exit(3)
        # By the way of every interpreter.
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    dist.send(sent, other, tag=7)
    waiting.wait()
    dist.all_reduce(tensor)
    assert tensor[0] == size * size and received[0] == other


def norms(rank, size):
    """All-reduce, residual and RMSNorm as one operator, for tensors in host memory, against f64."""
    generator = torch.Generator().manual_seed(3)
    epsilon = 1e-5
    for dtype in (torch.bfloat16, torch.float16):
        for shape in [(1, 8), (5, 264), (2, 3, 1024)]:
            every = torch.randn(size, *shape, generator=generator).to(dtype)
            residual, weight = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[-1:]))
            summed = (every.float().sum(0) + residual.float()).to(dtype)
            wide = summed.double()
            exact = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
            norm = weft.torch.FusedNorm(epsilon=epsilon)
            output, after = norm(every[rank], residual, weight)
            # Sums of the same numbers in another order may be rounded to a neighbour.
            torch.testing.assert_close(after, summed)
            torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
            compiled = torch.compile(lambda *of: norm(*of)[0] * 2, backend="aot_eager", fullgraph=True)
            same(compiled(every[rank], residual, weight), output * 2)
            narrow, after, scales = weft.torch.FusedNorm(epsilon=epsilon, output="fp8_by_row")(every[rank], residual, weight)
            assert narrow.dtype == torch.float8_e4m3fn and scales.shape == shape[:-1]
            torch.testing.assert_close(scales.double(), exact.abs().amax(-1) / 448, rtol=0.02, atol=1e-9)
            torch.testing.assert_close(narrow.double() * scales[..., None].double(), exact, rtol=0.07, atol=0.02)
            narrow, _ = weft.torch.FusedNorm(epsilon=epsilon, output="fp8", scale=0.02)(every[rank], residual, weight)
            torch.testing.assert_close(narrow.double() * 0.02, exact.clamp(-8.96, 8.96), rtol=0.07, atol=0.02)
    rows, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.weft.all_reduce_norm.default, (rows, rows, weight, 1e-6, "same", 1.0, norm._name))
    for wrong in [
        lambda: norm(rows.float(), rows.float(), weight.float()),
        lambda: norm(rows, rows[:1], weight),
        lambda: norm(rows, rows, weight[:4]),
        lambda: norm(rows, rows, weight.half()),
        lambda: weft.torch.FusedNorm(output="fp4"),
        lambda: weft.torch.FusedNorm(scale=0.0),
        lambda: weft.torch.FusedNorm(dist.new_group(backend="gloo")),
        lambda: weft.torch.FusedNorm(dist.GroupMember.NON_GROUP_MEMBER),
    ]:
        try:
            wrong()
        except weft.InvalidCall:
            continue
        raise AssertionError("it was taken")
    # It may outlive its group.
    group = dist.new_group()
    late = weft.torch.FusedNorm(group)
    late(rows, rows, weight)
    dist.destroy_process_group(group)
    try:
        late(rows, rows, weight)
    except RuntimeError as error:
        assert "destroyed" in str(error), error
    else:
        raise AssertionError("a group that is gone was called")


def killed(rank, size):
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(tensor)
    except weft.CollectiveError as error:
        assert error.rank == 1 and "rank 1" in str(error), str(error)
        assert time.monotonic() - started < 30
        print(error)
        # Nothing more is to be had from this group, nor from its exit.
        os._exit(0)
    raise AssertionError("rank 1 is gone, and nobody noticed")


if __name__ == "__main__":
    name, rank, size, store, *rest = sys.argv[1:]
    rank, size = int(rank), int(size)
    torch.set_num_threads(1)
    dist.init_process_group(
        "weft", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    globals()[name](rank, size, *rest)
    dist.destroy_process_group()
