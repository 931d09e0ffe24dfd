"""An all-reduce inside of a jitted step of JAX: data-parallel training by two processes, through the C API. `20_jax_ffi.py [DIRECTORY WITH libweft.so]`

Needs a compiler of C++, and libweft: `cargo build -p weft-c` puts it into target/debug.
"""

import ctypes
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "target/debug").resolve()


def compile_to(target: str) -> None:
    include = ["-isystem", jax.ffi.include_dir(), "-I", HERE.parent / "crates/c/include"]
    library = ["-L", LIBRARY, "-lweft", f"-Wl,-rpath,{LIBRARY}"]
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", HERE / "c/jax_ffi.cpp", *include, *library, "-o", target], check=True)


def load(path: str) -> ctypes.CDLL:
    """Makes the function known to XLA, and joins the other ranks."""
    library = ctypes.CDLL(path)
    library.join_ranks.restype = ctypes.c_char_p
    if wrong := library.join_ranks():
        raise RuntimeError(wrong.decode())
    jax.ffi.register_ffi_target("weft_all_reduce", jax.ffi.pycapsule(library.AllReduce), platform="cpu")
    return library


def all_reduce(x, deadline_ms=10_000):
    """The sum of all ranks' `x`. Calls must come in one order on all ranks: one a step leaves XLA no choice."""
    call = jax.ffi.ffi_call("weft_all_reduce", jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True)
    return call(x, deadline_ms=deadline_ms)


@jax.jit
def step(parameters, inputs, targets, ranks):
    def loss_of(parameters):
        weights, bias = parameters
        return jnp.mean((inputs @ weights + bias - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    # All of a step in one call.
    flat, unflatten = ravel_pytree((gradients, loss))
    gradients, loss = unflatten(all_reduce(flat) / ranks)
    return [p - 0.1 * g for p, g in zip(parameters, gradients)], loss


def train(rank: int, ranks: int) -> float:
    truth = jnp.arange(8.0)
    parameters = [jnp.zeros(8), jnp.zeros(())]
    for number in range(200):
        inputs = jax.random.normal(jax.random.key(1000 * number + rank), (32, 8))
        parameters, loss = step(parameters, inputs, inputs @ truth + 1, ranks)
    return float(loss)


if __name__ == "__main__":
    if "RANK" in os.environ:
        library = load(os.environ["JAX_FFI_LIBRARY"])
        loss = train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            print(f"{os.environ['WORLD_SIZE']} ranks have learned it: {loss < 1e-3}")
        library.leave_ranks()
    else:
        with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
            probe.close()
            compile_to(f"{directory}/jax_ffi.so")
            launched = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "JAX_FFI_LIBRARY": f"{directory}/jax_ffi.so"}
            both = [subprocess.Popen([sys.executable, __file__, str(LIBRARY)], env={**launched, "RANK": rank}) for rank in "01"]
            sys.exit(max(process.wait() for process in both))
