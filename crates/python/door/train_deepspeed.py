"""DeepSpeed's ZeRO, trained over Weft beside Gloo: `train_deepspeed.py [--only CASE]…`. Called by `cargo xtask door-test deepspeed`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn

from training import Case, main

WIDTH = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 8))


def zero(stage: int, dtype: str | None = None) -> Iterator[float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    # The group is there already; DeepSpeed takes it, with whatever its backend is called.
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    step = 0
    while True:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(16, WIDTH, generator=generator).to(next(iter(engine.module.parameters())).dtype)
        loss = (engine(inputs) - inputs[:, :8].sin()).float().square().mean()
        engine.backward(loss)
        engine.step()
        everywhere = loss.detach().clone()
        dist.all_reduce(everywhere)
        yield everywhere.item() / dist.get_world_size()
        step += 1


CASES = {
    "zero1": Case(lambda: zero(1)),
    "zero2": Case(lambda: zero(2), faults=True),
    "zero3": Case(lambda: zero(3), faults=True),
    "zero2_bf16": Case(lambda: zero(2, "bf16")),
}


def versions() -> str:
    from importlib.metadata import version

    return f"DeepSpeed {version('deepspeed')}, PyTorch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main(__doc__, CASES, versions, ["deepspeed"]))
