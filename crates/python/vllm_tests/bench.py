"""What the cases share: instances that are started when they are first needed, prompts, and what a single instance answered to them."""

from __future__ import annotations

import base64
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instances import Process, administer, complete, core, engine, free_port, label, metric, post, tokens_of, weft_connector
from weft.hand_off import Desk, Origin
from weft.routed import answer
from weft.vllm._subject import subject

# Of cases in which a side dies, stands still or is left, so that they need not last long.
DEADLINE = 4.0
LEASE = 8.0
# Of the others, in which everything has to be handed off, however slow the machine is.
AT_LEISURE = {"deadline": 120.0, "lease": 120.0, "agent": {"silence_max": "60s"}}
# A prompt is computed again within this much more than the deadline of a hand-off, on a slow machine.
RECOMPUTE_MAX = 60.0


def prompts(count: int, seed: int = 1, tokens: tuple[int, int] = (20, 900)) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 300) for _ in range(chance.randrange(*tokens))] for _ in range(count)]


def with_shared_prefix(count: int) -> list[list[int]]:
    chance = random.Random(5)
    prefix = [chance.randrange(4, 300) for _ in range(400)]
    return [prefix + [chance.randrange(4, 300) for _ in range(chance.randrange(5, 200))] for _ in range(count)]


@dataclass
class Bench:
    weft: str
    model: Path
    logs: Path
    started: list[Process] = field(default_factory=list)
    # What a single instance answered, by prompt and dtype.
    expected: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    # The instances that cases share, and over what they hand off.
    _pair: tuple[Process, Process, Process] | None = None
    _over: str = ""

    def start(self, *processes: Process) -> None:
        for process in processes:
            self.started.append(process.start())
        for process in processes:
            process.wait()

    def pair(self, over: str = "auto") -> tuple[Process, Process, Process]:
        """Prefill, decode and router with nothing special about them, which cases share. Whoever has killed one brings it back."""
        if self._pair is None or self._over != over:
            self.stop()
            agent = {} if over == "auto" else {"agent": {"transports": over}}
            prefill, decode = self.instance("prefill", **agent), self.instance("decode", **agent)
            self.start(prefill, decode)
            self._pair = prefill, decode, self.router([prefill], [decode], "--prefill-timeout", "5")
            self._over = over
        return self._pair

    def alone(self, *processes: Process) -> None:
        """Starts these, where the shared ones have to make room."""
        self.stop()
        self.start(*processes)

    def router(self, prefill: list[Process], decode: list[Process], *more: str) -> Process:
        port, admin = free_port(), free_port()
        command = [self.weft, "serve", "router", "--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}", *more]
        for instance in prefill:
            command += ["--prefill", instance.url]
        for instance in decode:
            command += ["--decode", instance.url]
        router = Process("router", command, port, self.logs / "router.log", admin=f"http://127.0.0.1:{admin}")
        self.start(router)
        return router

    def instance(self, name: str, *arguments: str, **options: Any) -> Process:
        connector = weft_connector(**{"deadline": DEADLINE, "lease": LEASE, **options})
        instance = engine(sys.executable, self.model, name, self.logs, connector, *arguments)
        if "--tensor-parallel-size" not in arguments:
            instance.cores = core(int(name == "decode"))
        return instance

    def ask_alone(self, asked: list[tuple[list[int], int]], dtype: str = "bfloat16") -> None:
        """Has a single instance that knows nothing of Weft answer prompts, each with so many tokens."""
        missing = [(prompt, tokens) for prompt, tokens in asked if len(self.expected.get((str(prompt), dtype), [])) < tokens]
        if not missing:
            return
        self.stop()
        reference = engine(sys.executable, self.model, "alone", self.logs, None, "--dtype", dtype)
        self.start(reference)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda one: complete(reference.url, one[0], one[1]), missing)
            for (prompt, _), answer in zip(missing, answers, strict=True):
                self.expected[str(prompt), dtype] = tokens_of(answer)
        self.stop()

    def check(self, prompt: list[int], answer: dict[str, Any], dtype: str = "bfloat16") -> None:
        want, got = self.expected[str(prompt), dtype], tokens_of(answer)
        # A single instance may have been asked for more, and nobody for less.
        if len(got) < min(TOKENS, len(want)) or got != want[: len(got)]:
            raise AssertionError(f"a prompt of {len(prompt)} tokens gave {got}, and a single instance {want}")

    def check_all(self, asked: list[list[int]], answers: list[dict[str, Any]], dtype: str = "bfloat16") -> list[dict[str, Any]]:
        """Checks every answer, and returns what they say of the hand-offs that succeeded."""
        for prompt, answer in zip(asked, answers, strict=True):
            self.check(prompt, answer, dtype)
        return [said for said in map(handed_off, answers) if said]

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        self.started.clear()
        self._pair = None


# The fewest tokens that a prompt is answered with.
TOKENS = 16


def answer_all(url: str, asked: list[list[int]], at_a_time: int = 8, **more: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, **more), asked))


def prefill_only(instance: Process, prompt: list[int]) -> dict[str, Any]:
    """The first of the two steps: what the prefill side says of where the prompt now is."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = post(f"{instance.url}/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
    return dict(answer["kv_transfer_params"])


def opened(origin: dict[str, Any], prompt: list[int]) -> Origin:
    """What the prefill side has sealed. Only who has its secret can look: as the tests can, who are the same user."""
    return Desk().open(base64.b64decode(origin["weft"]["origin"]), _about(prompt).encode())


def resealed(origin: dict[str, Any], prompt: list[int], **changed: Any) -> dict[str, Any]:
    """What the prefill side would say if it were elsewhere."""
    return answer(Desk(), replace(opened(origin, prompt), **changed), _about(prompt), "pull")


def _about(prompt: list[int]) -> str:
    about = subject(SimpleNamespace(prompt_token_ids=prompt, prompt_embeds=None, mm_features=[], lora_request=None, cache_salt=None))
    assert about is not None, "there are tokens"
    return about


def handed_off(answer: dict[str, Any]) -> dict[str, Any] | None:
    """What the answer says of its hand-off, where there was one that succeeded."""
    said = (answer.get("kv_transfer_params") or {}).get("weft")
    return said if said and "recomputed_because" not in said else None


def reasons(answers: list[dict[str, Any]]) -> list[str]:
    """Why prompts were computed by the decode side."""
    said = [(answer.get("kv_transfer_params") or {}).get("weft") or {} for answer in answers]
    return sorted({reason for one in said for reason in one.get("recomputed_because", [])})


def no_block_in_use(*instances: Process) -> str:
    """Says how many blocks are in use, once instances have had a moment to give back what is over, and insists that it is none."""
    lines = []
    for instance in instances:
        total = int(label(instance.url, "vllm:cache_config_info", "num_gpu_blocks"))
        for _ in range(150):
            used = round(metric(instance.url, "vllm:kv_cache_usage_perc") * total)
            if used == 0:
                break
            time.sleep(0.2)
        lines.append(f"{instance.name} {used} of {total}")
        assert used == 0, f"blocks in use afterwards: {lines[-1]}"
    return f"blocks in use afterwards: {', '.join(lines)}"


def wait_until_up(router: Process, instance: Process) -> None:
    for _ in range(600):
        said = json.loads(administer(router, "/weft/instances"))
        if [one["up"] for one in said if one["url"] == instance.url] == [True]:
            return
        time.sleep(0.1)
    raise AssertionError("the router did not see the instance come back")


def host_and_port(address: str) -> tuple[str, int]:
    """Of the way over TCP among those that an agent's address lists."""
    for way in address.split(","):
        transport, _, where = way.partition(":")
        if transport == "tcp":
            host, _, port = where.rpartition(":")
            return host, int(port)
    raise AssertionError(f"no way over TCP in {address!r}")
