"""PyTorch's own ways to train on many ranks, over Weft beside Gloo: `train_fsdp.py [--only CASE]…`. Called by `cargo xtask door-test fsdp`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from training import Case, main


class Block(nn.Module):
    """A layer of a decoder, small."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, words: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def batches() -> Iterator[torch.Tensor]:
    """Of this rank: words that follow from those before them."""
    step = 0
    while True:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        begins = torch.randint(0, 64, (4, 1), generator=generator)
        yield (begins + 3 * torch.arange(17)) % 64
        step += 1


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def steps(model: nn.Module) -> Iterator[float]:
    """Trains it, and gives the loss of all ranks together."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches():
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        everywhere = loss.detach().clone()
        dist.all_reduce(everywhere)
        yield everywhere.item() / dist.get_world_size()


def ddp() -> Iterator[float]:
    return steps(nn.parallel.DistributedDataParallel(decoder()))


def fsdp2() -> Iterator[float]:
    from torch.distributed.fsdp import fully_shard

    model = decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return steps(model)


def fsdp2_compiled() -> Iterator[float]:
    from torch.distributed.fsdp import fully_shard

    model = decoder()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    return steps(model)


def fsdp2_mixed() -> Iterator[float]:
    """Parameters travel as bfloat16, gradients as float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = decoder()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return steps(model)


def hsdp() -> Iterator[float]:
    """Shards in pairs, replicas across them: a mesh of two by two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return steps(model)


def tensor_parallel() -> Iterator[float]:
    """DTensor: columns, then rows, and the sequence between them. All ranks have the same words."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = decoder()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    while True:
        ids = (torch.randint(0, 64, (4, 1), generator=generator) + 3 * torch.arange(17)) % 64
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def pipeline() -> Iterator[float]:
    """1F1B by torch.distributed.pipelining: half of the layers on each rank, activations as messages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = decoder()
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [nn.Sequential(whole.embedding, whole.blocks[0]), nn.Sequential(whole.blocks[1], whole.head)]
    part = parts[rank]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))

    def of_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=of_words)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(6)
    while True:
        ids = (torch.randint(0, 64, (4, 1), generator=generator) + 3 * torch.arange(17)) % 64
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids[:, :-1])
        else:
            schedule.step(target=ids[:, 1:], losses=losses)
        optimizer.step()
        told = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(told, size - 1)
        yield told.item()


def _functional(backend: str) -> Iterator[float]:
    """Collectives inside of a compiled graph, with what comes before and after them."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    size = dist.get_world_size()

    def graph(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        everyone = functional.all_gather_tensor(total.sin(), 0, group)
        part = functional.reduce_scatter_tensor(everyone + 1, "sum", 0, group)
        swapped = functional.all_to_all_single(part, None, None, group)
        first = functional.broadcast(swapped, 0, group)
        return first.square().mean() + x.mean()

    compiled = torch.compile(graph, backend=backend, fullgraph=True)
    step = 0
    while True:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4 * size, 8, generator=generator)
        plain, loss = graph(x), compiled(x)
        # Compilers may add up in another order.
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
        yield loss.item()
        step += 1


def functional_aot() -> Iterator[float]:
    return _functional("aot_eager")


def functional_inductor() -> Iterator[float]:
    return _functional("inductor")


CASES = {
    "ddp": Case(ddp, faults=True),
    "fsdp2": Case(fsdp2, faults=True),
    "fsdp2_compiled": Case(fsdp2_compiled),
    "fsdp2_mixed": Case(fsdp2_mixed),
    "hsdp": Case(hsdp, ranks=4, tolerance=1e-5),
    "tensor_parallel": Case(tensor_parallel),
    "pipeline": Case(pipeline, faults=True),
    "functional_aot": Case(functional_aot),
    "functional_inductor": Case(functional_inductor),
}

if __name__ == "__main__":
    sys.exit(main(__doc__, CASES, lambda: f"PyTorch {torch.__version__}", ["torch.distributed.fsdp"]))
