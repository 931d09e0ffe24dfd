"""The examples run as they are, and say what they say."""

import os
import pathlib
import subprocess
import sys

import pytest

from needs import KNOWN, leave_out, needs

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
NO_GPU = "torch finds no GPU here"
SAYS = {
    "10_torch_tensor.py": "4194304 bytes over shared_memory; the last element is 1048575",
    "11_asyncio.py": "prefill says b'request 17'; block 42 holds 7",
    "12_torch_ddp.py": "2 ranks over weft have learned it",
    "14_hand_off.py": "the blocks of prompt 1 are free: everybody has it",
    "15_torch_cuda.py": "2 ranks over weft agree: True",
    "16_torch_rows_cuda.py": "2 ranks: every token doubled by its experts: True",
    "18_store.py": "put 8 blocks, in memory and in files\nfound 8 blocks of 8, and they are what was put",
    "19_jax.py": "4194304 bytes over shared_memory; twice their sum is 2097152",
    "20_jax_ffi.py": "2 ranks have learned it: True",
    "13_own_schedule.py": "by the schedule chain every rank has 6.0; one that forgets a contribution is refused",
}


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name, tmp_path):
    if "torch" in name:
        needs("torch")
    if "jax" in name:
        needs("jax")
    if "cuda" in name:
        import torch

        if not torch.cuda.is_available():
            leave_out("gpu", __file__, NO_GPU)
            pytest.skip(f"{KNOWN}{NO_GPU}")
    # The secret of the user lies under this directory.
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "ddp" in name or "cuda" in name else []
    ran = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / name], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == SAYS[name]
