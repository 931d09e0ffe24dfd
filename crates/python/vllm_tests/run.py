"""Prefill, decode and router as real processes: `run.py --weft PATH_OF_THE_COMMAND [--only NAME]…`. Called by `cargo xtask vllm-test`.

Every case compares tokens at temperature 0 with those of a single instance that knows nothing of Weft.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import found  # noqa: E402
import pushed  # noqa: E402
from instances import Process, complete, engine, free_port, get, metric, post, tokens_of, weft_connector  # noqa: E402
from relay import Relay  # noqa: E402
from tiny_model import make  # noqa: E402

DEADLINE = 4.0
LEASE = 8.0
# A prompt is computed again within this much more than the deadline of a hand-off, on a slow machine.
RECOMPUTE_MAX = 60.0


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 300) for _ in range(chance.randrange(20, 900))] for _ in range(count)]


def with_shared_prefix(count: int) -> list[list[int]]:
    chance = random.Random(5)
    prefix = [chance.randrange(4, 300) for _ in range(400)]
    return [prefix + [chance.randrange(4, 300) for _ in range(chance.randrange(5, 200))] for _ in range(count)]


@dataclass
class Bench:
    """What the cases share."""

    weft: str
    model: Path
    logs: Path
    started: list[Process] = field(default_factory=list)
    expected: dict[str, list[int]] = field(default_factory=dict)

    def start(self, *processes: Process) -> None:
        for process in processes:
            self.started.append(process.start())
        for process in processes:
            process.wait()

    def router(self, prefill: list[Process], decode: list[Process], *more: str) -> Process:
        port = free_port()
        command = [self.weft, "serve", "router", "--listen", f"127.0.0.1:{port}", *more]
        for instance in prefill:
            command += ["--prefill", instance.url]
        for instance in decode:
            command += ["--decode", instance.url]
        router = Process("router", command, port, self.logs / "router.log")
        self.start(router)
        return router

    def instance(self, name: str, *arguments: str, **options: Any) -> Process:
        connector = weft_connector(**{"deadline": DEADLINE, "lease": LEASE, **options})
        return engine(sys.executable, self.model, name, self.logs, connector, *arguments)

    def check(self, prompt: list[int], answer: dict[str, Any]) -> None:
        want, got = self.expected[str(prompt)], tokens_of(answer)
        if got != want[: len(got)]:
            raise AssertionError(f"a prompt of {len(prompt)} tokens gave {got}, and a single instance {want}")

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        self.started.clear()


def handed_off(answer: dict[str, Any]) -> dict[str, Any] | None:
    """What the answer says of its hand-off, where there was one that succeeded."""
    said = (answer.get("kv_transfer_params") or {}).get("weft")
    return said if said and "recomputed_because" not in said else None


def blocks_in_use(instance: Process) -> float:
    """The share of the KV cache that somebody has, once the instance has had a moment to give back what is over."""
    for _ in range(100):
        used = metric(instance.url, "vllm:kv_cache_usage_perc")
        if used == 0.0:
            return used
        time.sleep(0.2)
    return used


def same_tokens(bench: Bench) -> str:
    """50 prompts, 8 at a time, streaming or not, and 12 with a shared prefix."""
    prefill, decode = bench.instance("prefill"), bench.instance("decode")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    asked = prompts(50) + with_shared_prefix(12)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(router.url, prompt), asked))
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    told = [said for said in map(handed_off, answers) if said]
    ways = sorted({said["transport"] for said in told})
    assert len(told) >= 50, f"only {len(told)} of {len(asked)} prompts were handed off"
    used = blocks_in_use(prefill), blocks_in_use(decode)
    assert used == (0.0, 0.0), f"blocks in use afterwards: {used}"
    milliseconds = sorted(said["hand_off_ms"] for said in told)
    counts = [line for line in get(f"{router.url}/metrics").splitlines() if line.startswith("weft_router_requests")]
    print("\n".join(counts))
    return (
        f"{len(asked)} prompts, {len(told)} handed off over {'/'.join(ways)}, median {milliseconds[len(milliseconds) // 2]:.1f} ms; "
        f"blocks in use afterwards: {used[0]:.0%} and {used[1]:.0%}"
    )


def aborted(bench: Bench) -> str:
    """Requests whose clients leave: before the decode side is asked, and in mid-answer."""
    prefill, decode = bench.instance("prefill"), bench.instance("decode")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    asked = prompts(6)
    for prompt in asked[:3]:
        # The prompt is computed, and nobody comes for it: the lease frees it.
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        post(f"{prefill.url}/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
    for prompt in asked[3:]:
        try:
            complete_for(router.url, prompt, 0.05)
        except OSError:
            pass
    time.sleep(LEASE + 1)
    for prompt in asked:
        bench.check(prompt, complete(router.url, prompt))
    used = blocks_in_use(prefill), blocks_in_use(decode)
    assert used == (0.0, 0.0), f"blocks in use afterwards: {used}"
    expired = metric(prefill.url, "vllm:weft_leases_expired")
    assert expired >= 3, f"{expired} leases expired"
    return f"{expired:.0f} leases expired; blocks in use afterwards: {used[0]:.0%} and {used[1]:.0%}"


def complete_for(url: str, prompt: list[int], seconds: float) -> None:
    """Asks, and leaves."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 500, "temperature": 0, "stream": True}
    post(f"{url}/v1/completions", body, seconds)


def chunked_and_preempted(bench: Bench) -> str:
    """Prompts computed in pieces of 128 tokens, and a decode side with so few blocks that it preempts."""
    prefill = bench.instance("prefill", "--max-num-batched-tokens", "128", "--enable-chunked-prefill")
    decode = bench.instance("decode", "--num-gpu-blocks-override", "24")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    asked = prompts(20, seed=1)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(router.url, prompt), asked))
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    preempted = metric(decode.url, "vllm:num_preemptions_total")
    return f"{len(asked)} prompts, {preempted:.0f} preemptions"


def killed(bench: Bench) -> str:
    """SIGKILL of the prefill side between its answer and the decode side's fetch, and in mid-flow; then a restart."""
    return _without_prefill(bench, signal.SIGKILL)


def stopped(bench: Bench) -> str:
    """The same with SIGSTOP: nothing is closed, nothing answers."""
    return _without_prefill(bench, signal.SIGSTOP)


def _without_prefill(bench: Bench, number: int) -> str:
    prefill = bench.instance("prefill")
    decode = bench.instance("decode")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode], "--prefill-timeout", "5")
    asked = prompts(12)
    # Prompts whose blocks are on the prefill side, and for which the decode side comes too late.
    origins = []
    for prompt in asked[:4]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = post(f"{prefill.url}/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
        origins.append(answer["kv_transfer_params"])
    with ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        flow = [pool.submit(complete, router.url, prompt) for prompt in asked[4:]]
        time.sleep(0.3)
        prefill.signal(number)
        late = [
            pool.submit(complete, decode.url, prompt, kv_transfer_params=origin)
            for prompt, origin in zip(asked[:4], origins, strict=True)
        ]
        answers = [future.result() for future in late + flow]
        took = time.monotonic() - began
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    assert took < DEADLINE + RECOMPUTE_MAX, f"{took:.1f} s"
    recomputed = [answer for answer in answers if handed_off(answer) is None]
    reasons = {
        reason
        for answer in recomputed
        for reason in ((answer.get("kv_transfer_params") or {}).get("weft") or {}).get("recomputed_because", [])
    }
    used = blocks_in_use(decode)
    assert used == 0.0, f"blocks in use on the decode side: {used:.0%}"
    for reason in sorted(reasons):
        print(f"  {reason}")
    # It comes back at the same address, to a decode side that was never restarted.
    prefill.kill()
    prefill.start().wait()
    wait_until_up(router, prefill)
    again = [complete(router.url, prompt) for prompt in prompts(6, seed=2)]
    for prompt, answer in zip(prompts(6, seed=2), again, strict=True):
        bench.check(prompt, answer)
    resumed = sum(handed_off(answer) is not None for answer in again)
    assert resumed == 6, f"{resumed} of 6 were handed off after the restart"
    return (
        f"{len(asked)} answered in {took:.1f} s, {len(recomputed)} of them computed by the decode side; blocks in use there: {used:.0%}; "
        f"after the restart {resumed} of 6 handed off"
    )


def wait_until_up(router: Process, instance: Process) -> None:
    for _ in range(600):
        said = json.loads(get(f"{router.url}/weft/instances"))
        if all(one["up"] for one in said if one["url"] == instance.url):
            return
        time.sleep(0.1)
    raise AssertionError("the router did not see the instance come back")


def flipped(bench: Bench) -> str:
    """A bit flipped on the wire is found: what was damaged once is sent again, and what is damaged each time is computed here."""
    tcp = {"agent": {"transports": "tcp"}}
    prefill, decode = bench.instance("prefill", **tcp), bench.instance("decode", **tcp)
    bench.start(prefill, decode)
    relay: Relay | None = None
    found = 0
    # Of the first prompt nothing is damaged, of the second one chunk, of the others all.
    for prompt, damage in zip(prompts(4), (0, 1, 1000, 1000), strict=True):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = post(f"{prefill.url}/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
        origin = answer["kv_transfer_params"]
        if relay is None:
            relay = Relay(host_and_port(origin["weft"]["addresses"][0]))
        relay.damage = damage
        origin["weft"]["addresses"] = [f"127.0.0.1:{relay.port}"]
        answer = complete(decode.url, prompt, kv_transfer_params=origin)
        bench.check(prompt, answer)
        said = (answer.get("kv_transfer_params") or {}).get("weft") or {}
        for reason in said.get("recomputed_because", []):
            print(f"  {reason}")
            found += 1
    assert relay is not None
    assert found == 2, f"{found} prompts were computed again"
    return f"{relay.damaged} chunks damaged; {found} prompts computed again, none served wrong"


def host_and_port(address: str) -> tuple[str, int]:
    """Of the way over TCP among those that an agent's address lists."""
    for way in address.split(","):
        transport, _, where = way.partition(":")
        if transport == "tcp":
            host, _, port = where.rpartition(":")
            return host, int(port)
    raise AssertionError(f"no way over TCP in {address!r}")


def other_degrees(bench: Bench) -> str:
    """Prefill on two ranks for decode on one, and the reverse."""
    said = []
    for name, prefill_ranks, decode_ranks in (("2 → 1", 2, 1), ("1 → 2", 1, 2)):
        prefill = bench.instance("prefill", "--tensor-parallel-size", str(prefill_ranks))
        decode = bench.instance("decode", "--tensor-parallel-size", str(decode_ranks))
        bench.start(prefill, decode)
        router = bench.router([prefill], [decode])
        asked = prompts(6)
        answers = [complete(router.url, prompt, tokens=4) for prompt in asked]
        told = sum(handed_off(answer) is not None for answer in answers)
        right = sum(tokens_of(answer) == bench.expected[str(prompt)][:4] for prompt, answer in zip(asked, answers, strict=True))
        assert told == 6, f"{name}: {told} of 6 handed off"
        said.append(f"{name}: {told} of 6 handed off, {right} of 6 with the tokens of one rank")
        bench.stop()
    return "; ".join(said)


def mismatched(bench: Bench) -> str:
    """Two models with different shapes refuse each other by name."""
    other = bench.model.parent / "other"
    if not (other / "config.json").exists():
        make(str(other), layers=2)
    prefill = engine(
        sys.executable, other, "prefill", bench.logs, weft_connector(deadline=DEADLINE, lease=LEASE)
    )
    decode = bench.instance("decode")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    prompt = prompts(1)[0]
    answer = complete(router.url, prompt)
    bench.check(prompt, answer)
    reasons = answer["kv_transfer_params"]["weft"]["recomputed_because"]
    assert any("layers" in reason for reason in reasons), reasons
    print(f"  {reasons[0]}")
    return "refused, and computed by the decode side"


def idle(bench: Bench) -> str:
    """Two connected instances that have nothing to do use no CPU to speak of."""
    prefill, decode = bench.instance("prefill"), bench.instance("decode")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    complete(router.url, prompts(1)[0])
    time.sleep(2)
    before = prefill.cpu_seconds(), decode.cpu_seconds()
    time.sleep(10)
    used = prefill.cpu_seconds() - before[0], decode.cpu_seconds() - before[1]
    return f"CPU in 10 s: prefill {used[0]:.2f} s, decode {used[1]:.2f} s"


CASES: dict[str, Callable[[Bench], str]] = {
    case.__name__: case
    for case in (same_tokens, aborted, chunked_and_preempted, killed, stopped, flipped, other_degrees, mismatched, idle, *pushed.CASES, *found.CASES)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", required=True, help="the weft command")
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the instances go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(arguments.weft, model, logs)
        failed = 0
        try:
            reference = engine(sys.executable, model, "alone", logs, None)
            bench.start(reference)
            every = prompts(50) + with_shared_prefix(12) + prompts(6, seed=2)
            with ThreadPoolExecutor(8) as pool:
                for prompt, answer in zip(every, pool.map(lambda p: complete(reference.url, p), every), strict=True):
                    bench.expected[str(prompt)] = tokens_of(answer)
            bench.stop()
            print(f"a single instance has answered {len(every)} prompts", flush=True)
            for name in arguments.only or CASES:
                began = time.monotonic()
                try:
                    said = CASES[name](bench)
                    print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
                    for process in bench.started:
                        print(f"--- the end of {process.log}\n{process.log.read_text(errors='replace')[-4000:]}", flush=True)
                finally:
                    bench.stop()
        finally:
            bench.stop()
        print(f"{len(arguments.only or CASES) - failed} passed, {failed} failed")
        return 1 if failed else 0


if __name__ == "__main__":
    # Threads that wait for an instance that is gone must not keep the process.
    threading.stack_size(1 << 20)
    sys.exit(main())
