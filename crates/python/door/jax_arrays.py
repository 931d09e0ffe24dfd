"""JAX over Weft on processors: `jax_arrays.py LIBRARY [--only CASE]…`, where LIBRARY is the directory with libweft.so. Called by `cargo xtask door-test jax`."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy

import weft

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
LIBRARY = ""
DEADLINE_S = 5
SCRATCH = tempfile.TemporaryDirectory(prefix="jax-door-")


def _array(name: str, dtype: str) -> jax.Array:
    number = sum(name.encode())
    return (jnp.arange(number * 64) % 13).astype(dtype).reshape(-1, 64)


DTYPES = ["float32", "float16", "bfloat16", "int8", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"]


def _owner(pipe, stop) -> None:
    agent = weft.Agent("owner")
    arrays = {name: _array(name, name) for name in DTYPES}
    for name, array in arrays.items():
        array.block_until_ready()
        agent.publish(name, agent.register(array, writable=False))
    pipe.send(agent.address)
    stop.wait()
    # Whoever read them has changed nothing.
    pipe.send(all(bool((array == _array(name, name)).all()) for name, array in arrays.items()))


def dlpack() -> str:
    """Arrays of every kind of elements, from where JAX has them to where JAX takes them, with no copy at either end."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stop = context.Event()
    process = context.Process(target=_owner, args=(there, stop))
    process.start()
    try:
        assert here.poll(120)
        address = here.recv()
        agent = weft.Agent("reader")
        peer = agent.connect(address)
        landed = 0
        for name in DTYPES:
            theirs = peer.region(name)
            memory = agent.allocate(theirs.nbytes)
            peer.read(memory, theirs, checksum=True).wait()
            expected = _array(name, name)
            flat = numpy.frombuffer(memory, numpy.uint8).view(expected.dtype).reshape(expected.shape)
            try:
                got = jnp.from_dlpack(flat)
                landed += got.unsafe_buffer_pointer() == flat.ctypes.data
            except (RuntimeError, ValueError, TypeError, BufferError):
                # NumPy has no DLPack of its own for these.
                got = jnp.asarray(flat)
            assert got.dtype == expected.dtype and bool((got == expected).all()), name
            total = jax.jit(lambda a: a.astype("float32").sum())(got)
            assert float(total) == float(expected.astype("float32").sum()), name
        stop.set()
        assert here.poll(60) and here.recv()
    finally:
        stop.set()
        process.join(60)
        process.kill()
    assert landed >= 5, landed
    return f"{len(DTYPES)} kinds of elements read; {landed} of them used by JAX where they landed"


def read_only() -> str:
    """JAX takes its arrays for constant: nobody may write to them."""
    agent = weft.Agent("constant")
    try:
        agent.register(jnp.ones(1024))
    except weft.Error as error:
        return f"refused: {error}"
    raise AssertionError("an array of JAX's was registered for writing")


def example() -> str:
    return _says([EXAMPLES / "19_jax.py"], "4194304 bytes over shared_memory; twice their sum is 2097152")


def ffi_example() -> str:
    return _says([EXAMPLES / "20_jax_ffi.py", LIBRARY], "2 ranks have learned it: True")


def _says(command: list, wanted: str) -> str:
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == wanted, ran.stdout
    return wanted


# Three ranks that reduce what they have, step after step, until somebody is gone.
RANK = """
import importlib.util, os, sys
sys.argv = ["20_jax_ffi.py", sys.argv[1]]
spec = importlib.util.spec_from_file_location("example", os.environ["EXAMPLE"])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
import jax, jax.numpy as jnp
library = example.load(os.environ["JAX_FFI_LIBRARY"])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
step = jax.jit(lambda x: example.all_reduce(x * 2, deadline_ms=5000) + 1)
number = 0
while True:
    got = step(jnp.full((1000,), float(rank + number)))
    assert float(got[7]) == 2 * sum(other + number for other in range(ranks)) + 1, got
    number += 1
    print(number, flush=True)
"""


@functools.cache
def _compiled() -> str:
    """What the example compiles, once for all cases."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "20_jax_ffi.py")
    example = importlib.util.module_from_spec(spec)
    sys.argv[1:] = [LIBRARY]
    spec.loader.exec_module(example)
    target = f"{SCRATCH.name}/jax_ffi.so"
    example.compile_to(target)
    return target


def _broken(number: signal.Signals) -> str:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        script = pathlib.Path(folder) / "rank.py"
        script.write_text(RANK)
        environment = {
            **os.environ,
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "JAX_FFI_LIBRARY": _compiled(),
            "EXAMPLE": str(EXAMPLES / "20_jax_ffi.py"),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, script, LIBRARY],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=open(f"{folder}/errors.{rank}", "w"),
                text=True,
            )
            for rank in range(3)
        ]
        try:
            for rank in ranks:
                for _ in range(3):
                    assert rank.stdout.readline(), pathlib.Path(f"{folder}/errors.0").read_text()[-2000:]
            os.kill(ranks[2].pid, number)
            began = time.monotonic()
            for rank in ranks[:2]:
                # Whatever they still print has to go somewhere.
                rank.communicate(timeout=2 * DEADLINE_S + 30)
                assert rank.returncode != 0
            took = time.monotonic() - began
            errors = pathlib.Path(f"{folder}/errors.0").read_text().strip().splitlines()
            assert "rank 2" in errors[-1], errors[-3:]
            return f"after {took:.1f} s, ranks 0 and 1 have {errors[-1][:160]}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def killed() -> str:
    """One of three ranks is killed between or in calls of compiled programs."""
    return _broken(signal.SIGKILL)


def frozen() -> str:
    return _broken(signal.SIGSTOP)


CASES: dict[str, Callable[[], str]] = {case.__name__: case for case in (dlpack, read_only, example, ffi_example, killed, frozen)}


def main() -> int:
    global LIBRARY
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--only", action="append", choices=list(CASES))
    arguments = parser.parse_args()
    LIBRARY = str(pathlib.Path(arguments.library).resolve())
    names = arguments.only or list(CASES)
    failed = 0
    for name in names:
        began = time.monotonic()
        try:
            said = CASES[name]()
            print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
    print(f"{len(names) - failed} of {len(names)} cases passed, JAX {jax.__version__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
