"""Tensors from actor to actor of Ray's over Weft: `ray_tensors.py [--only CASE]…`. Called by `cargo xtask door-test ray`.

Every case runs actors that are processes of their own. Figures are printed and not judged.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

# Of the agents in all actors.
os.environ.setdefault("WEFT_DEADLINE", "4s")
# Ray's workers stand behind everybody else, and on a machine with other work would never come to it.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
import torch

import weft.nixl
import weft.ray

MIB = 1 << 20


class Plain:
    """What all the actors do."""

    def make(self, numbers: int, seed: int) -> torch.Tensor:
        return torch.arange(numbers, dtype=torch.float32) * seed

    def several(self, numbers: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((numbers,), 3, dtype=torch.int64), "b": torch.ones(3, numbers, dtype=torch.bfloat16)}

    def total(self, tensor: torch.Tensor) -> tuple[int, float]:
        return tensor.numel(), float(tensor.double().sum())

    def totals(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}

    def first(self, tensor: torch.Tensor) -> float:
        return float(tensor[0])

    def number(self) -> int:
        return os.getpid()


# Ray asks for the transports of methods when classes are made.
weft.ray.register()


@ray.remote(num_cpus=0.1)
class OverWeft(Plain):
    @ray.method(tensor_transport="WEFT")
    def make(self, numbers: int, seed: int) -> torch.Tensor:
        return super().make(numbers, seed)

    @ray.method(tensor_transport="WEFT")
    def several(self, numbers: int) -> dict[str, torch.Tensor]:
        return super().several(numbers)


@ray.remote(num_cpus=0.1)
class OverNixl(Plain):
    @ray.method(tensor_transport="NIXL")
    def make(self, numbers: int, seed: int) -> torch.Tensor:
        return super().make(numbers, seed)


@ray.remote(num_cpus=0.1)
class OverStore(Plain):
    pass


def tensors() -> str:
    """Of 4 bytes to 64 MiB, and several at once."""
    source, sink = OverWeft.remote(), OverWeft.remote()
    sizes = [1, 256, 4096, MIB, 16 * MIB]
    for seed, size in enumerate(sizes, 1):
        got = ray.get(sink.total.remote(source.make.remote(size, seed)), timeout=120)
        want = float((torch.arange(size, dtype=torch.float32) * seed).double().sum())
        assert got == (size, want), f"{size} numbers gave {got}, not {want}"
    got = ray.get(sink.totals.remote(source.several.remote(1000)), timeout=120)
    assert got == {"a": 3000.0, "b": 3000.0}, got
    return f"{len(sizes)} sizes up to {4 * sizes[-1] // MIB} MiB and a dictionary of two, all right"


def by_rays_own_transport() -> str:
    """Ray's transport for NIXL as it is, with Weft's module in NIXL's place in every worker."""
    source, sink = OverNixl.remote(), OverNixl.remote()
    for seed, size in enumerate((16, MIB), 1):
        got = ray.get(sink.total.remote(source.make.remote(size, seed)), timeout=120)
        want = float((torch.arange(size, dtype=torch.float32) * seed).double().sum())
        assert got == (size, want), f"{size} numbers gave {got}, not {want}"
    return "tensor_transport=\"NIXL\" by weft.nixl: right"


def many() -> str:
    """What is fetched is given back, again and again, by the same actors."""
    source, sink = OverWeft.remote(), OverWeft.remote()
    for round in range(300):
        got = ray.get(sink.first.remote(source.make.remote(1000 + round, 1)), timeout=120)
        assert got == 0.0
    return "300 one after the other"


def owner(number: signal.Signals) -> str:
    source, sink = OverWeft.remote(), OverWeft.remote()
    # They have met.
    ray.get(sink.total.remote(source.make.remote(10, 1)), timeout=120)
    made = source.make.remote(16 * MIB, 1)
    process = ray.get(source.number.remote(), timeout=120)
    time.sleep(1)
    os.kill(process, number)
    began = time.monotonic()
    try:
        got = ray.get(sink.total.remote(made), timeout=100)
    except ray.exceptions.GetTimeoutError:
        raise AssertionError("nothing was said in 100 s") from None
    except ray.exceptions.RayError as error:
        said = f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
    else:
        said = f"all {got[0]} numbers were fetched all the same"
    finally:
        if number == signal.SIGSTOP:
            os.kill(process, signal.SIGCONT)
    # Others go on.
    other = OverWeft.remote()
    assert ray.get(sink.total.remote(other.make.remote(10, 1)), timeout=120) == (10, 45.0)
    return said


def killed() -> str:
    """The actor that holds a tensor is killed before it is fetched."""
    said = owner(signal.SIGKILL)
    assert "after" in said, said
    return said


def frozen() -> str:
    """The same with SIGSTOP. On one host its memory can be read all the same."""
    return owner(signal.SIGSTOP)


def speed() -> str:
    """From a call to what another actor makes of its tensor, beside Ray's object store: medians of 9, in ms."""
    rows = []
    for size in (MIB // 4, 4 * MIB, 16 * MIB):
        figures = []
        for kind in (OverWeft, OverStore):
            source, sink = kind.remote(), kind.remote()
            took = []
            for _ in range(10):
                began = time.monotonic()
                ray.get(sink.first.remote(source.make.remote(size, 1)), timeout=120)
                took.append(1e3 * (time.monotonic() - began))
            # The first one makes the two known to each other.
            figures.append(statistics.median(took[1:]))
        rows.append(f"{4 * size // MIB} MiB: Weft {figures[0]:.1f}, object store {figures[1]:.1f} ({figures[1] / figures[0]:.1f} ×)")
    return "; ".join(rows)


CASES: dict[str, Callable[[], str]] = {case.__name__: case for case in (tensors, by_rays_own_transport, many, killed, frozen, speed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES))
    arguments = parser.parse_args()
    environment = {name: value for name, value in os.environ.items() if name.startswith("WEFT_")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=400 * MIB,
        log_to_driver=False,
        runtime_env={"env_vars": environment, "worker_process_setup_hook": weft.nixl.install},
    )
    weft.nixl.install()
    failed = 0
    names = arguments.only or list(CASES)
    for name in names:
        began = time.monotonic()
        try:
            said = CASES[name]()
            print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
    ray.shutdown()
    print(f"{len(names) - failed} of {len(names)} cases passed, Ray {ray.__version__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
