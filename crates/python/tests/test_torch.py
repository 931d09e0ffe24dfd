"""torch.distributed with the backend weft, beside Gloo. The ranks are processes that run torch_ranks.py."""

import pathlib
import subprocess
import sys

import pytest

from needs import needs

needs("torch")

HERE = pathlib.Path(__file__).parent


def on_ranks(name, size, folder, *arguments, dead=()):
    store = folder / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "torch_ranks.py", name, str(rank), str(size), store, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (process, output) in enumerate(zip(ranks, told)):
        if rank not in dead:
            assert process.returncode == 0, f"rank {rank}:\n{output}"
            assert "left at the end" not in output, f"rank {rank}:\n{output}"
    return told


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["collectives", "shapes", "grouped", "messages"])
def test_as_gloo_does(name, size, tmp_path):
    on_ranks(name, size, tmp_path)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "dtensor"])
def test_training(name, tmp_path):
    on_ranks(name, 2, tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_norms_of_sums(size, tmp_path):
    on_ranks("norms", size, tmp_path)


def test_checkpoint(tmp_path):
    on_ranks("checkpoint", 2, tmp_path, str(tmp_path / "checkpoint"))


def test_leaving_without_destroying_the_group(tmp_path):
    on_ranks("leaving", 2, tmp_path)


def test_a_rank_that_forks(tmp_path):
    on_ranks("forked", 2, tmp_path)


def test_a_killed_rank_is_named(tmp_path):
    told = on_ranks("killed", 4, tmp_path, dead={1})
    assert all("rank 1" in told[rank] for rank in (0, 2, 3))


def test_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, torch.distributed as dist, weft.torch\n"
        "dist.init_process_group('weft')\n"
        "tensor = torch.ones(2)\n"
        "dist.all_reduce(tensor)\n"
        "assert tensor.tolist() == [2.0, 2.0]\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    subprocess.run(command, check=True, timeout=180)
