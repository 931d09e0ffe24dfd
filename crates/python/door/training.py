"""What the doors of training stacks share: ranks that are processes, first over Gloo, then over Weft; what each tells; and what becomes of the others when one is killed or stopped.

A case is a generator: it makes its model from the numbers of its rank, and gives a loss for every step, for as long as it is asked. A script hands its cases to `main`. Losses must be
Gloo's to the last bit, unless its case says that more than two ranks are added up somewhere, where the order of an addition is each backend's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator

STEPS = 5
# Of a process group in cases with faults: what a frozen rank costs the others, at the most.
DEADLINE_S = 12
# What only a hang takes.
PATIENCE_S = 600


@dataclasses.dataclass
class Case:
    """Something to train, by so many ranks."""

    train: Callable[[], Iterator[float]]
    ranks: int = 2
    # How far losses may differ from Gloo's, as a part of them.
    tolerance: float = 0.0
    # Whether it is also tried with a rank that is killed and one that is stopped.
    faults: bool = False
    # Losses are compared with those of this case instead of its own over Gloo: one process, say.
    like: str | None = None


# A rank.


def _count(counts: dict[str, int]) -> None:
    """Counts what Weft is called for. That a default group is Weft's does not say that anything went through it."""
    from weft.torch import _backend, _messages

    call, send = _backend.Calls._call, _messages.Box.send

    def counted_call(self, *arguments, **keywords):
        counts["collectives"] += 1
        return call(self, *arguments, **keywords)

    def counted_send(self, *arguments, **keywords):
        counts["messages"] += 1
        return send(self, *arguments, **keywords)

    _backend.Calls._call, _messages.Box.send = counted_call, counted_send


def _be_a_rank(case: Case, backend: str, steps: int, told: pathlib.Path) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    counts = {"collectives": 0, "messages": 0}
    if backend == "weft":
        import weft.torch

        _count(counts)
        weft.torch.register()
    limit = DEADLINE_S if steps == 0 else PATIENCE_S
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit))
    rank = dist.get_rank()
    losses: list[float] = []
    progress = told / f"steps.{rank}"
    try:
        for loss in case.train():
            losses.append(float(loss))
            progress.write_text(str(len(losses)))
            if len(losses) == steps:
                break
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split())[:200]
        (told / f"failed.{rank}").write_text(f"{type(error).__name__}: {message}")
        # Nothing that is under way matters any more, and interpreters that end wait for threads.
        os._exit(3)
    # Names differ from backend to backend, where a stack makes groups of its own.
    groups = sorted({dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map})
    (told / f"told.{rank}").write_text(json.dumps({"losses": losses, "groups": groups, **counts}))
    dist.barrier()
    dist.destroy_process_group()


def _enter(name: str, backend: str, steps: int, told: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    log = os.open(pathlib.Path(told) / f"log.{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The script, which this process has under another name than the one that it was started by.
    cases = sys.modules["__main__"].CASES
    _be_a_rank(cases[name], backend, steps, pathlib.Path(told))


# Whoever starts them.


CONTEXT = multiprocessing.get_context("forkserver")
# Before anything of torch's is imported.
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Ranks:
    """The processes of one run. Each is a fork of one that has imported everything and done nothing yet."""

    def __init__(self, name: str, case: Case, backend: str, steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="training-")
        self.told = pathlib.Path(self._folder.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
            "LOCAL_SIZE": str(case.ranks),
        }
        self.processes = [
            CONTEXT.Process(
                target=_enter,
                args=(name, backend, steps, self._folder.name, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            )
            for rank in range(case.ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def log(self, rank: int) -> str:
        return (self.told / f"log.{rank}").read_text()[-3000:]

    def results(self) -> list[dict]:
        """What every rank has told, when all have ended well."""
        until = time.monotonic() + PATIENCE_S
        for rank, process in enumerate(self.processes):
            process.join(max(1.0, until - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} did not end in {PATIENCE_S} s:\n{self.log(rank)}"
            if process.exitcode != 0:
                failed = self.told / f"failed.{rank}"
                said = failed.read_text() if failed.exists() else f"exit code {process.exitcode}"
                raise AssertionError(f"rank {rank}: {said}\n{self.log(rank)}")
        return [json.loads((self.told / f"told.{rank}").read_text()) for rank in range(len(self.processes))]

    def wait_for_steps(self, wanted: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            steps = [self.told / f"steps.{rank}" for rank in range(len(self.processes))]
            if all(step.exists() and int(step.read_text() or 0) >= wanted for step in steps):
                return
            for rank, process in enumerate(self.processes):
                assert process.exitcode is None, f"rank {rank} ended before its time:\n{self.log(rank)}"
            time.sleep(0.05)
        raise AssertionError(f"{wanted} steps took more than {PATIENCE_S} s:\n{self.log(0)}")


def _compared(name: str, cases: dict[str, Case]) -> str:
    case = cases[name]
    other = case.like or name
    with Ranks(other, cases[other], "gloo", STEPS) as ranks:
        theirs = ranks.results()
    with Ranks(name, case, "weft", STEPS) as ranks:
        ours = ranks.results()
    worst = 0.0
    for rank, mine in enumerate(ours):
        expected = theirs[rank % len(theirs)]["losses"]
        assert len(mine["losses"]) == STEPS == len(expected)
        assert mine["collectives"] + mine["messages"] > 0, f"rank {rank} called Weft for nothing"
        for loss, want in zip(mine["losses"], expected):
            # Neither NaN nor a model that does not learn is equal to anything.
            assert abs(loss) < 1e6, mine["losses"]
            worst = max(worst, abs(loss - want) / max(abs(want), 1e-30))
    assert worst <= case.tolerance, f"losses differ by {worst:.1e} of them: {ours[0]['losses']}, {theirs[0]['losses']}"
    first = ours[0]["losses"]
    assert len(set(first)) > 1, f"nothing was learnt: {first}"
    equal = "equal to the last bit" if worst == 0 else f"within {worst:.0e}"
    calls = f"{ours[0]['collectives']} collectives and {ours[0]['messages']} messages of rank 0"
    return f"{case.ranks} ranks, losses {first[0]:.4f} to {first[-1]:.4f}, {equal}; {calls}; groups of {', '.join(ours[0]['groups'])}"


def _broken(name: str, case: Case, number: signal.Signals) -> str:
    """The last rank is killed or stopped in the midst of steps: all others must fail, by themselves and in time."""
    with Ranks(name, case, "weft", 0) as ranks:
        ranks.wait_for_steps(2)
        victim = case.ranks - 1
        os.kill(ranks.processes[victim].pid, number)
        began = time.monotonic()
        took = 0.0
        for rank in range(victim):
            # Beside the deadline: what a call that had begun just before still has, and a machine with other work.
            limit = 2 * DEADLINE_S + 30
            ranks.processes[rank].join(limit)
            assert ranks.processes[rank].exitcode is not None, f"rank {rank} still waits after {limit} s:\n{ranks.log(rank)}"
            took = max(took, time.monotonic() - began)
            failed = ranks.told / f"failed.{rank}"
            assert failed.exists(), f"rank {rank} ended without an error:\n{ranks.log(rank)}"
        said = (ranks.told / "failed.0").read_text()
    return f"{case.ranks} ranks: after {took:.1f} s rank 0 has {said}"


def main(about: str, cases: dict[str, Case], versions: Callable[[], str], packages: list[str]) -> int:
    CONTEXT.set_forkserver_preload([*packages, "torch.distributed", "weft.torch"])
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="one of the cases; several times for several")
    arguments = parser.parse_args()
    work: dict[str, Callable[[], str]] = {}
    for name, case in cases.items():
        work[name] = lambda name=name: _compared(name, cases)
        if case.faults:
            work[f"{name}_killed"] = lambda name=name, case=case: _broken(name, case, signal.SIGKILL)
            work[f"{name}_frozen"] = lambda name=name, case=case: _broken(name, case, signal.SIGSTOP)
    unknown = [name for name in arguments.only or [] if name not in work]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {', '.join(work)}")
    names = arguments.only or list(work)
    failed = 0
    for name in names:
        began = time.monotonic()
        try:
            said = work[name]()
            print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
    print(f"{len(names) - failed} of {len(names)} cases passed, {versions()}", flush=True)
    return 1 if failed else 0
