"""Dynamo's prefill and decode workers for vLLM, with Weft's connector, behind Dynamo's frontend: `dynamo_pd.py [--only CASE]… [--logs DIRECTORY]`. Called by `cargo xtask door-test
dynamo`.

Dynamo refuses connectors whose names it does not know. Ours goes by the name `NixlConnector`, in a module of Weft's (`weft.vllm.nixl`). What a prompt is answered is compared with what one
worker without a connector answers, behind the same frontend.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "vllm_tests"))

import contracts  # noqa: E402
from instances import Process, environment, free_port, get, metric  # noqa: E402
from interface import Source  # noqa: E402
from tiny_model import make  # noqa: E402

# How long a hand-off may take, and what is answered, on a slow machine.
DEADLINE = 5.0
ANSWER_MAX = 180.0
UP_MAX = 900.0
TOKENS = 24
CONNECTOR = {
    "kv_connector": "NixlConnector", "kv_connector_module_path": "weft.vllm.nixl", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"deadline": DEADLINE},
}  # fmt: skip


@dataclass
class Bench:
    model: Path
    logs: Path
    expected: dict[str, str] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)
    store: Path = Path()
    prefill: Process | None = None
    decode: Process | None = None
    url: str = ""

    def _process(self, name: str, command: list[str], **settings: str) -> Process:
        port = free_port()
        env = environment() | {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.store), "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONHASHSEED": "0", **settings,
        }  # fmt: skip
        return Process(name, [sys.executable, "-m", *command], port, self.logs / f"{name}.log", env=env)

    def worker(self, name: str, *more: str, connector: dict[str, Any] | None = None) -> Process:
        command = [
            "dynamo.vllm", "--model", str(self.model), "--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager",
            "--max-num-seqs", "8", *more,
        ]  # fmt: skip
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        worker = self._process(name, command)
        # Where its metrics are, and whether it is well.
        worker.port = small_port()
        worker.env["DYN_SYSTEM_PORT"] = str(worker.port)
        return worker

    def start(self, *workers: Process) -> None:
        """The frontend, and workers behind it, until it knows of a model and answers."""
        self.stop()
        self.store = Path(tempfile.mkdtemp(prefix="dynamo-", dir=self.logs))
        for worker in workers:
            worker.env["DYN_FILE_KV"] = str(self.store)
        frontend = self._process("frontend", ["dynamo.frontend", "--http-host", "127.0.0.1", "--router-mode", "round-robin"])
        frontend.command += ["--http-port", str(frontend.port)]
        self.started = [frontend, *workers]
        for process in self.started:
            process.start()
        self.url = frontend.url
        self._until(lambda: bool(json.loads(get(f"{self.url}/v1/models"))["data"]) and all(self._well(one) for one in workers), "no model is served")
        # A worker that is well may not be known to the frontend yet.
        self._until(lambda: bool(self.ask(WARM)), "nothing is answered")

    def _until(self, there: Callable[[], bool], complaint: str) -> None:
        began = time.monotonic()
        while time.monotonic() - began < UP_MAX:
            for process in self.started:
                assert process.popen is not None
                if process.popen.poll() is not None:
                    raise RuntimeError(f"{process.name} ended with {process.popen.returncode}")
            try:
                if there():
                    return
            except (OSError, ValueError, KeyError):
                pass
            time.sleep(1)
        raise RuntimeError(f"{complaint} after {UP_MAX:.0f} s; see {self.logs}")

    def _well(self, worker: Process) -> bool:
        return bool(get(f"{worker.url}/health"))

    def ask(self, prompt: list[int]) -> str:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_MAX) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def answered(self, prompt: list[int]) -> str | Exception:
        try:
            return self.ask(prompt)
        except OSError as error:
            return error

    def apart(self) -> tuple[Process, Process]:
        """Prefill and decode, in which prompts are handed off."""
        if self.prefill is None or self.decode is None or any(one.popen is None or one.popen.poll() is not None for one in (self.prefill, self.decode)):
            self.prefill = self.worker("prefill", "--disaggregation-mode", "prefill", connector=CONNECTOR)
            self.decode = self.worker("decode", "--disaggregation-mode", "decode", connector=CONNECTOR)
            self.start(self.prefill, self.decode)
            self._until(self._hands_off, "nothing is handed off")
        return self.prefill, self.decode

    def _hands_off(self) -> bool:
        assert self.decode is not None
        before = handed_off(self.decode)
        self.ask(WARM)
        return handed_off(self.decode) > before

    def ask_alone(self) -> None:
        self.start(self.worker("alone"))
        self.expected = {str(prompt): self.ask(prompt) for prompt in PROMPTS + KILLED + AFTER}
        self.stop()

    def check(self, prompt: list[int], answer: str) -> None:
        if answer != self.expected[str(prompt)]:
            raise AssertionError(f"a prompt of {len(prompt)} tokens gave {answer!r}, and one worker {self.expected[str(prompt)]!r}")

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        self.started.clear()
        shutil.rmtree(self.store, ignore_errors=True) if self.store.name.startswith("dynamo-") else None


def small_port() -> int:
    """Dynamo takes the number of this one for one of 16 bits with a sign."""
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                return int(listener.getsockname()[1])
            except OSError:
                pass


def handed_off(decode: Process) -> float:
    return metric(decode.url, "vllm:weft_hand_offs_total")


def failed(decode: Process) -> float:
    return metric(decode.url, "vllm:weft_hand_offs_failed_total")


def until_counted(decode: Process, count: float, limit: float = 40.0) -> float:
    """vLLM counts when it logs, every few seconds."""
    began = time.monotonic()
    while (now := handed_off(decode)) < count and time.monotonic() - began < limit:
        time.sleep(1)
    return now


def contract(bench: Bench) -> str:
    """The Dynamo and the vLLM that are installed are those that this was written for."""
    import contract as of_vllm

    source = Source.installed("dynamo")
    assert source is not None, "Dynamo is not installed"
    verdict, moved = contracts.check("dynamo", source, contracts.version_of(contracts.DOORS["dynamo"]))
    other, also = of_vllm.check()
    assert not moved + also, "\n  ".join([verdict, *moved, other, *also])
    return f"{verdict}; {other}"


def same_tokens(bench: Bench) -> str:
    """8 prompts, 2 at a time."""
    _, decode = bench.apart()
    before, wrong = handed_off(decode), failed(decode)
    with ThreadPoolExecutor(2) as pool:
        for prompt, answer in zip(PROMPTS, pool.map(bench.ask, PROMPTS), strict=True):
            bench.check(prompt, answer)
    count = until_counted(decode, before + len(PROMPTS)) - before
    assert count == len(PROMPTS), f"{count:.0f} of {len(PROMPTS)} were handed off"
    assert failed(decode) == wrong, f"{failed(decode) - wrong:.0f} failed"
    return f"{len(PROMPTS)} of {len(PROMPTS)} with the text of one worker, {count:.0f} handed off, none failed"


def killed(bench: Bench) -> str:
    """SIGKILL of the prefill worker with prompts on the way; then without one; then with a new one."""
    prefill, decode = bench.apart()
    with ThreadPoolExecutor(len(KILLED)) as pool:
        asked = [pool.submit(bench.answered, prompt) for prompt in KILLED]
        time.sleep(0.5)
        began = time.monotonic()
        prefill.kill()
        answers = [one.result() for one in asked]
    took = time.monotonic() - began
    right = 0
    errors: dict[str, int] = {}
    for prompt, answer in zip(KILLED, answers, strict=True):
        if isinstance(answer, str):
            bench.check(prompt, answer)
            right += 1
        else:
            said = f"HTTP {answer.code}" if isinstance(answer, urllib.error.HTTPError) else type(answer).__name__
            errors[said] = errors.get(said, 0) + 1
    # Whoever waits is told, within a bound that only a hang would miss.
    assert "TimeoutError" not in errors and took < ANSWER_MAX, (errors, took)
    # Without a prefill worker the decode worker computes prompts itself, once Dynamo knows.
    began, alone = time.monotonic(), 0
    while alone < len(AFTER) and time.monotonic() - began < ANSWER_MAX:
        answer = bench.answered(AFTER[alone])
        if isinstance(answer, str):
            bench.check(AFTER[alone], answer)
            alone += 1
        else:
            time.sleep(1)
    without = time.monotonic() - began
    assert alone == len(AFTER), f"{alone} of {len(AFTER)} answered without a prefill worker: {answer}"
    before = handed_off(decode)
    bench.started.remove(prefill)
    bench.prefill = bench.worker("prefill", "--disaggregation-mode", "prefill", connector=CONNECTOR)
    bench.prefill.env["DYN_FILE_KV"] = str(bench.store)
    bench.started.append(bench.prefill.start())
    bench._until(bench._hands_off, "nothing is handed off to a decode worker that was not restarted")
    told = ", ".join(f"{count} × {said}" for said, count in sorted(errors.items())) or "no errors"
    return (
        f"{right} of {len(KILLED)} on the way answered right, {told}, after {took:.1f} s; {alone} of {len(AFTER)} computed by the decode worker, {without:.1f} s; "
        f"after its restart {handed_off(decode) - before:.0f} handed off, to a decode worker that was not restarted"
    )


def frozen(bench: Bench) -> str:
    """SIGSTOP of the prefill worker: nobody is answered wrong, and the decode worker goes on when it is killed after all. Dynamo itself waits for it meanwhile."""
    prefill, _ = bench.apart()
    prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(bench.answered, prompt) for prompt in KILLED[:2]]
        time.sleep(20)
        waited = sum(not one.done() for one in asked)
        prefill.kill()
        answers = [one.result() for one in asked]
    for prompt, answer in zip(KILLED[:2], answers, strict=True):
        if isinstance(answer, str):
            bench.check(prompt, answer)
    right = sum(isinstance(answer, str) for answer in answers)
    bench._until(lambda: bench.ask(AFTER[0]) == bench.expected[str(AFTER[0])], "nothing is answered without a prefill worker")
    return f"{waited} of 2 waited for as long as it stood still (20 s), and {right} of 2 were answered right when it was killed; the decode worker goes on"


def _prompts(count: int, seed: int, longest: int = 900) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 300) for _ in range(chance.randrange(150, longest))] for _ in range(count)]


CASES: dict[str, Callable[[Bench], str]] = {case.__name__: case for case in (contract, same_tokens, killed, frozen)}
WARM, PROMPTS, KILLED, AFTER = [5] * 300, _prompts(8, 1), _prompts(8, 2, 1900), _prompts(3, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the workers go")
    arguments = parser.parse_args()
    names = arguments.only or list(CASES)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(model, logs)
        try:
            if names != ["contract"]:
                bench.ask_alone()
            for name in names:
                began = time.monotonic()
                try:
                    said = CASES[name](bench)
                    print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
                except Exception as error:
                    failures += 1
                    print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
                    for process in bench.started:
                        print(f"--- the end of {process.log}\n{process.log.read_text(errors='replace')[-4000:]}", flush=True)
        finally:
            bench.stop()
    print(f"{len(names) - failures} of {len(names)} cases passed, Dynamo {contracts.version_of(contracts.DOORS['dynamo'])}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    # Whoever ends this ends the workers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
