"""The same prompts handed off by vLLM's NixlConnector and by ours, in turn, between the same instances: `compare.py --weft PATH_OF_THE_COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from bench import Bench, prompts, wait_until_up  # noqa: E402
from instances import Process, complete, core, engine, free_port, tokens_of  # noqa: E402
from tiny_model import make  # noqa: E402

# What is asked of ours: at most so much of what it takes the other.
MOST = 0.7


@dataclass
class Side:
    """One connector: a prefill side, a decode side and the router between them."""

    name: str
    into: Path
    instances: list[Process] = field(default_factory=list)
    router: Process | None = None
    seen: dict[Path, int] = field(default_factory=dict)
    resumed: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def start(self, bench: Bench, model: Path) -> None:
        for nth, role in enumerate(("producer", "consumer")):
            connector: dict[str, Any] = {
                "kv_connector": self.name, "kv_connector_module_path": "timed", "kv_role": f"kv_{role}", "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
            }  # fmt: skip
            instance = engine(sys.executable, model, f"{self.name}-{role}", bench.logs, connector)
            instance.cores = core(nth)
            instance.env["PYTHONPATH"] += os.pathsep + str(HERE)
            instance.env["TIMED_INTO"] = str(self.into)
            instance.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            self.instances.append(instance)
        self.into.mkdir(parents=True)
        bench.start(*self.instances)
        self.resume(bench)

    def pause(self) -> None:
        """Takes no CPU from the other side, though it be by polling."""
        for instance in self.instances:
            instance.signal(signal.SIGSTOP)

    def resume(self, bench: Bench) -> None:
        for instance in self.instances:
            instance.signal(signal.SIGCONT)
            instance.wait()
        # A router that has seen them stand still is in doubt for a while.
        if self.router is not None:
            self.router.kill()
        self.router = bench.router([self.instances[0]], [self.instances[1]])
        for instance in self.instances:
            wait_until_up(self.router, instance)
        # Two ends that stood still may take each other for dead, and find out by the first hand-off.
        self.resumed += 1
        for prompt in prompts(2, seed=1000 + self.resumed, tokens=(600, 1500)):
            complete(self.router.url, prompt)
        self.read("before")

    def add(self, what: str, values: list[float]) -> None:
        self.figures.setdefault(what, []).extend(values)

    def read(self, way: str) -> None:
        """What the clocks have written since the last time."""
        for path in self.into.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            for line in lines[self.seen.get(path, 0) :]:
                for what, value in json.loads(line).items():
                    if what == "own":
                        self.add(f"{way} own", own_seconds(value))
                    else:
                        self.add(f"{way} {what}", [value])
            self.seen[path] = len(lines)

    def cpu_seconds(self) -> float:
        return sum(instance.cpu_seconds() for instance in self.instances)


def own_seconds(data: dict[str, Any]) -> list[float]:
    """What a connector says itself of how long transfers took."""
    if "transfer_duration" in data:
        return [post + moved for post, moved in zip(data["post_duration"], data["transfer_duration"], strict=True)]
    return list(data.get("seconds", []))


def first_token(url: str, prompt: list[int]) -> float:
    """How long the first token of a streamed answer takes."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    began = time.monotonic()
    took = 0.0
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data:") and not took:
                took = time.monotonic() - began
    return took


def measure(side: Side, asked: list[list[int]], way: str, at_a_time: int) -> None:
    assert side.router is not None
    before = side.cpu_seconds()
    url = side.router.url
    with ThreadPoolExecutor(at_a_time) as pool:
        side.add(f"{way} first token", list(pool.map(lambda prompt: first_token(url, prompt), asked)))
    side.add(f"{way} CPU a prompt", [(side.cpu_seconds() - before) / len(asked)])
    side.read(way)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", required=True, help="the weft command")
    parser.add_argument("--logs", type=Path, help="where the logs of the instances go")
    parser.add_argument("--prompts", type=int, default=20, help="how many prompts a round, of 600 to 1,500 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "model"
        make(str(model), hidden=64 * arguments.kv_heads, layers=arguments.layers, heads=arguments.kv_heads, kv_heads=arguments.kv_heads)
        bench = Bench(arguments.weft, model, logs)
        sides = [Side("NixlConnector", Path(scratch) / "nixl"), Side("WeftConnector", Path(scratch) / "weft")]
        try:
            answers = []
            for side in sides:
                side.start(bench, model)
                answers.append(begin(side))
                idle(side)
                side.pause()
            assert answers[0] == answers[1], f"{sides[0].name} {answers[0]}, {sides[1].name} {answers[1]}"
            print("both sides give the same tokens", flush=True)
            for nth in range(arguments.rounds):
                for way, at_a_time in (("1 at a time", 1), ("4 at a time", 4)):
                    asked = prompts(arguments.prompts, seed=100 + 10 * nth + at_a_time, tokens=(600, 1500))
                    # Each goes first every other time.
                    for side in sides if nth % 2 else reversed(sides):
                        side.resume(bench)
                        measure(side, asked, way, at_a_time)
                        side.pause()
                        ready, failed = (side.figures.get(f"{way} {what}", []) for what in ("ready", "failed"))
                        took = f"{1e3 * statistics.median(ready):.1f} ms" if ready else "nothing"
                        print(f"round {nth + 1}, {way}: {side.name}, {len(ready)} handed off, {len(failed)} failed, {took}", flush=True)
            bytes_a_token = 2 * 2 * 64 * arguments.kv_heads * arguments.layers
            return report(sides, bytes_a_token)
        finally:
            bench.stop()


def begin(side: Side) -> list[list[int]]:
    """Makes the connections, sees that prompts are handed off, and says which tokens come of it."""
    assert side.router is not None
    answers = [tokens_of(complete(side.router.url, prompt)) for prompt in prompts(4, seed=99, tokens=(600, 1500))]
    before = len(side.figures.get("before ready", []))
    side.read("before")
    handed_off = len(side.figures.get("before ready", [])) - before
    assert handed_off == 4, f"{side.name} handed {handed_off} of 4 prompts off"
    return answers


def idle(side: Side) -> None:
    time.sleep(3)
    before = side.cpu_seconds()
    time.sleep(10)
    side.add("idle CPU", [(side.cpu_seconds() - before) / 10])


def report(sides: list[Side], bytes_a_token: int) -> int:
    theirs, ours = (side.figures for side in sides)
    print(f"prompts of 600 to 1,500 tokens, {bytes_a_token / 1024:.0f} KiB of KV cache a token")
    print(f"{'':40}  {'NIXL median':>12} {'p90':>8}  {'Weft median':>12} {'p90':>8}  {'ratio':>6}")
    missed = 0
    for what, unit, scale, required in [
        row
        for way in ("1 at a time", "4 at a time")
        for row in (
            (f"{way} ready", "ms", 1e3, True),
            (f"{way} waited", "ms", 1e3, False),
            (f"{way} own", "ms", 1e3, False),
            (f"{way} first token", "ms", 1e3, False),
            (f"{way} CPU a prompt", "ms", 1e3, False),
        )
    ] + [("idle CPU", "% of a core", 100, False)]:
        left, right = theirs.get(what, []), ours.get(what, [])
        if not left or not right:
            print(f"{what:40}  nothing was measured: {len(left)} and {len(right)}")
            missed += required
            continue
        ratio = statistics.median(right) / statistics.median(left) if statistics.median(left) else float("nan")
        reached = not required or ratio <= MOST
        missed += not reached
        shown = [f"{scale * statistics.median(some):12.2f} {scale * p90(some):8.2f}" for some in (left, right)]
        print(f"{f'{what} ({unit})':40}  {shown[0]}  {shown[1]}  {ratio:6.2f}  {'' if reached else f'MISSED: at most {MOST}'}")
        print(json.dumps({"what": what, "nixl": left, "weft": right}), file=sys.stderr)
    for side in sides:
        failed = sum(len(values) for what, values in side.figures.items() if what.endswith("at a time failed"))
        print(f"{side.name}: {failed} hand-offs failed")
    return 1 if missed else 0


def p90(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


if __name__ == "__main__":
    # Whoever ends this ends the instances too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
