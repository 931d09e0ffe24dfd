"""vLLM's own NixlConnector over Weft: `through_nixl.py --by weft.nixl` or `--by nixl`. Called by `cargo xtask door-test vllm-nixl`.

By `weft.nixl`, `import nixl` is Weft's module, as the variable WEFT_NIXL has it, and NIXL is not there. By `nixl` it is NIXL, with Weft as its back end. A prompt goes
the two steps that routers of vLLM go. Every case compares tokens at temperature 0 with those of a single instance without a connector.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from instances import Process, complete, core, engine, free_port, metric, tokens_of  # noqa: E402
from tiny_model import make  # noqa: E402

# How long a transfer may take where a peer stands still.
DEADLINE = "4s"
# How long a prompt may take that the decode side has to compute after all, on a slow machine.
RECOMPUTE_MAX = 120.0
TOKENS = 16


@dataclass
class Bench:
    by: str
    model: Path
    logs: Path
    expected: dict[str, list[int]] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)

    def instance(self, role: str, **settings: str) -> Process:
        connector = {
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"backends": ["WEFT"]},
        }  # fmt: skip
        instance = engine(sys.executable, self.model, f"{self.by}-{role}", self.logs, connector)
        instance.cores = core(int(role == "decode"))
        instance.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        instance.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        if self.by == "weft.nixl":
            instance.env["WEFT_NIXL"] = "1"
        instance.env |= {f"WEFT_{name.upper()}": value for name, value in settings.items()}
        return instance

    def start(self, *processes: Process) -> None:
        self.started += [process.start() for process in processes]
        for process in processes:
            process.wait()

    def pair(self, **settings: str) -> tuple[Process, Process]:
        self.stop()
        prefill, decode = self.instance("prefill", **settings), self.instance("decode", **settings)
        self.start(prefill, decode)
        return prefill, decode

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        self.started.clear()

    def ask_alone(self, asked: list[list[int]]) -> None:
        alone = engine(sys.executable, self.model, "alone", self.logs, None)
        self.start(alone)
        with ThreadPoolExecutor(8) as pool:
            for prompt, answer in zip(asked, pool.map(lambda prompt: complete(alone.url, prompt, TOKENS), asked), strict=True):
                self.expected[str(prompt)] = tokens_of(answer)
        self.stop()

    def check(self, prompt: list[int], answer: dict[str, Any]) -> None:
        want, got = self.expected[str(prompt)], tokens_of(answer)
        if got != want:
            raise AssertionError(f"a prompt of {len(prompt)} tokens gave {got}, and a single instance {want}")


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random tokens, enough for some blocks of a cache."""
    chance = random.Random(seed)
    return [[chance.randrange(4, 300) for _ in range(chance.randrange(150, 900))] for _ in range(count)]


def prefilled(prefill: Process, prompt: list[int]) -> dict[str, Any]:
    """The first step: where the prompt's blocks are."""
    asks: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    asks |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return dict(complete(prefill.url, prompt, 1, kv_transfer_params=asks)["kv_transfer_params"])


def decoded(decode: Process, prompt: list[int], where: dict[str, Any]) -> dict[str, Any]:
    return complete(decode.url, prompt, TOKENS, kv_transfer_params=where)


def moved(decode: Process) -> tuple[float, float]:
    """Transfers that the decode side has counted, and those that failed. It counts them when it logs, every few seconds."""
    time.sleep(12)
    failed = metric(decode.url, "vllm:nixl_num_failed_transfers_total")
    return metric(decode.url, "vllm:nixl_bytes_transferred_count"), failed


def same_tokens(bench: Bench) -> str:
    """12 prompts, 4 at a time."""
    prefill, decode = bench.pair()

    def both(prompt: list[int]) -> dict[str, Any]:
        return decoded(decode, prompt, prefilled(prefill, prompt))

    with ThreadPoolExecutor(4) as pool:
        for prompt, answer in zip(SAME, pool.map(both, SAME), strict=True):
            bench.check(prompt, answer)
    count, failed = moved(decode)
    # Each by a transfer of its own, and none computed again.
    assert (count, failed) == (len(SAME), 0), f"{count:.0f} transfers counted, {failed:.0f} failed"
    before = [one.cpu_seconds() for one in (prefill, decode)]
    time.sleep(10)
    idle = [one.cpu_seconds() - was for one, was in zip((prefill, decode), before, strict=True)]
    return (
        f"{len(SAME)} of {len(SAME)} with the tokens of a single instance, {count:.0f} transfers, none failed; "
        f"CPU of idle instances in 10 s: {idle[0]:.2f} and {idle[1]:.2f} s"
    )


def killed(bench: Bench) -> str:
    """SIGKILL of the prefill side between its answer and the decode side's fetch."""
    return without_prefill(bench, KILLED, signal.SIGKILL, "shared_memory,tcp")


def frozen(bench: Bench) -> str:
    """The same with SIGSTOP, over TCP: over shared memory nobody would notice."""
    return without_prefill(bench, FROZEN, signal.SIGSTOP, "tcp")


def without_prefill(bench: Bench, asked: list[list[int]], number: signal.Signals, over: str) -> str:
    prefill, decode = bench.pair(transports=over, deadline=DEADLINE)
    # The two have met before.
    bench.check(asked[0], decoded(decode, asked[0], prefilled(prefill, asked[0])))
    held = [(prompt, prefilled(prefill, prompt)) for prompt in asked[1:]]
    prefill.signal(number)
    began = time.monotonic()
    with ThreadPoolExecutor(len(held)) as pool:
        answers = list(pool.map(lambda one: decoded(decode, *one), held))
    took = time.monotonic() - began
    for (prompt, _), answer in zip(held, answers, strict=True):
        bench.check(prompt, answer)
    assert took < RECOMPUTE_MAX, f"{took:.1f} s"
    count, failed = moved(decode)
    assert count == 1, f"{count:.0f} transfers succeeded, of which one could"
    return f"{len(held)} of {len(held)} answered in {took:.1f} s, computed by the decode side, with the tokens of a single instance; {failed:.0f} failed transfers counted"


CASES: dict[str, Callable[[Bench], str]] = {case.__name__: case for case in (same_tokens, killed, frozen)}
SAME, KILLED, FROZEN = prompts(12, 1), prompts(5, 2), prompts(5, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", required=True, choices=("weft.nixl", "nixl"))
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the instances go")
    arguments = parser.parse_args()
    is_there = importlib.util.find_spec("nixl") is not None
    assert is_there == (arguments.by == "nixl"), f"NIXL is {'' if is_there else 'not '}installed here"
    assert arguments.by != "nixl" or os.environ.get("NIXL_PLUGIN_DIR"), "NIXL_PLUGIN_DIR, as `weft nixl` prints it"
    names = arguments.only or list(CASES)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(arguments.by, model, logs)
        try:
            bench.ask_alone(SAME + KILLED + FROZEN)
            for name in names:
                began = time.monotonic()
                try:
                    said = CASES[name](bench)
                    print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
                    for process in bench.started:
                        print(f"--- the end of {process.log}\n{process.log.read_text(errors='replace')[-4000:]}", flush=True)
        finally:
            bench.stop()
    print(f"{len(names) - failed} of {len(names)} cases passed, by {arguments.by}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    # Whoever ends this ends the instances too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
