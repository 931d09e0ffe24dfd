"""vLLM with Weft's connector under NIXL's name, behind the protocol of llm-d's routing sidecar, which KServe puts in front of its decode engines too:
`llm_d.py [--only CASE]… [--logs DIRECTORY]`. Called by `cargo xtask door-test llm-d`.

The engines are real and run on processors; in the sidecar's place is a program that speaks its protocol (`sidecar.py`). Tokens are compared with those of a single instance without a
connector.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
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
sys.path[:0] = [str(HERE.parent / "vllm_tests"), str(HERE)]

from instances import Process, complete, core, engine, metric, post, tokens_of  # noqa: E402
from sidecar import PREFILLER, Sidecar  # noqa: E402
from tiny_model import make  # noqa: E402

DEADLINE = 4.0
ANSWER_MAX = 300.0
TOKENS = 16
# How the agents of both sides are set up, where it does not matter.
NEAR = {"deadline": DEADLINE}
WORDS = ["The shuttle crosses the warp.", "What was computed arrives whole, or it does not arrive at all. " * 12]


def connector(**options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector", "kv_connector_module_path": "weft.vllm.nixl", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }  # fmt: skip


@dataclass
class Bench:
    model: Path
    logs: Path
    expected: dict[str, Any] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)
    sidecars: list[Sidecar] = field(default_factory=list)
    # How the pair that runs was started.
    options: dict[str, Any] | None = None

    def start(self, *processes: Process) -> None:
        self.started += [process.start() for process in processes]
        for process in processes:
            process.wait()

    def pair(self, **options: Any) -> tuple[Process, Process, Sidecar]:
        """Started as they are wanted, or those that run so already."""
        if self.options == options and all(one.popen is not None and one.popen.poll() is None for one in self.started):
            return self.started[0], self.started[1], self.sidecars[0]
        self.stop()
        self.options = options
        prefill, decode = (engine(sys.executable, self.model, name, self.logs, connector(**options)) for name in ("prefill", "decode"))
        prefill.cores, decode.cores = core(0), core(1)
        self.start(prefill, decode)
        self.sidecars.append(Sidecar(decode.url))
        return prefill, decode, self.sidecars[-1]

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        for sidecar in self.sidecars:
            sidecar.close()
        self.started.clear()
        self.sidecars.clear()
        self.options = None

    def ask_alone(self) -> None:
        alone = engine(sys.executable, self.model, "alone", self.logs, None)
        self.start(alone)
        for prompt in SAME + LATE:
            self.expected[str(prompt)] = tokens_of(complete(alone.url, prompt, TOKENS))
        for text in WORDS:
            self.expected[text] = chat(alone.url, text)
        self.stop()


def through(sidecar: Sidecar, prefill: Process | None, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Asks as a scheduler has it asked: with a prefill engine in the header, or without."""
    headers = {"Content-Type": "application/json"} | ({PREFILLER: f"127.0.0.1:{prefill.port}"} if prefill else {})
    request = urllib.request.Request(sidecar.url + path, json.dumps({"model": "tiny", "temperature": 0, **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_MAX) as answer:
        return dict(json.load(answer))


def completed(sidecar: Sidecar, prefill: Process | None, prompt: list[int], **more: Any) -> list[int]:
    return tokens_of(through(sidecar, prefill, "/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **more}))


def chat(url: str, text: str) -> str:
    body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "ignore_eos": True}
    return str(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def until_counted(decode: Process, name: str, count: float, limit: float = 40.0) -> float:
    """vLLM counts when it logs, every few seconds."""
    began = time.monotonic()
    while (now := metric(decode.url, name)) < count and time.monotonic() - began < limit:
        time.sleep(1)
    return now


HANDED_OFF, FAILED = "vllm:weft_hand_offs_total", "vllm:weft_hand_offs_failed_total"


def same_tokens(bench: Bench) -> str:
    """Completions 4 at a time, and chats, by two steps; and without a prefill engine by one."""
    prefill, decode, sidecar = bench.pair(**NEAR)
    counted = metric(decode.url, HANDED_OFF)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: completed(sidecar, prefill, prompt), SAME))
    wrong = [nth for nth, (prompt, answer) in enumerate(zip(SAME, answers, strict=True)) if answer != bench.expected[str(prompt)]]
    assert not wrong, f"prompts {wrong} have other tokens"
    for text in WORDS:
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "ignore_eos": True}
        said = through(sidecar, prefill, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
        assert said == bench.expected[text], (said, bench.expected[text])
    count = until_counted(decode, HANDED_OFF, counted + len(SAME) + len(WORDS)) - counted
    assert count == len(SAME) + len(WORDS), f"{count:.0f} were handed off"
    assert completed(sidecar, None, LATE[0]) == bench.expected[str(LATE[0])]
    return f"{len(SAME)} completions and {len(WORDS)} chats right, {count:.0f} handed off; right without a prefill engine too"


def forged(bench: Bench) -> str:
    """What a client writes where the sidecar looks at nothing: without the header, its parameters reach the decode engine."""
    _, decode, sidecar = bench.pair(**NEAR)
    failed = metric(decode.url, FAILED)
    theirs = {"do_remote_prefill": True, "weft": {"version": 4, "origin": "AAAA"}}
    assert completed(sidecar, None, LATE[1], kv_transfer_params=theirs) == bench.expected[str(LATE[1])]
    count = until_counted(decode, FAILED, failed + 1) - failed
    assert count == 1, f"{count:.0f} counted"
    return "not believed, counted, and computed by the decode engine"


def killed(bench: Bench) -> str:
    """SIGKILL of the prefill engine between the two steps; then the sidecar is asked to go by it all the same."""
    said = gone_between(bench, signal.SIGKILL, NEAR)
    prefill, sidecar = bench.started[0], bench.sidecars[0]
    sidecar.between = lambda: None
    try:
        completed(sidecar, prefill, LATE[1])
        raise AssertionError("answered by a prefill engine that is dead")
    except urllib.error.HTTPError as error:
        assert error.code == 502, error.code
    return f"{said}; asked for again it is 502, as llm-d has it"


def frozen(bench: Bench) -> str:
    """The same with SIGSTOP, over TCP: over shared memory nobody would notice."""
    return gone_between(bench, signal.SIGSTOP, NEAR | {"agent": {"transports": "tcp"}})


def gone_between(bench: Bench, number: signal.Signals, options: dict[str, Any]) -> str:
    prefill, decode, sidecar = bench.pair(**options)
    before = metric(decode.url, FAILED)
    assert completed(sidecar, prefill, LATE[0]) == bench.expected[str(LATE[0])]
    sidecar.between = lambda: prefill.signal(number)
    began = time.monotonic()
    answer = completed(sidecar, prefill, LATE[2])
    took = time.monotonic() - began
    assert answer == bench.expected[str(LATE[2])] and took < ANSWER_MAX
    count = until_counted(decode, FAILED, before + 1) - before
    assert count == 1, f"{count:.0f} failed hand-offs counted"
    return f"answered in {took:.1f} s, computed by the decode engine, with the tokens of a single instance; 1 failed hand-off counted"


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 300) for _ in range(chance.randrange(150, 900))] for _ in range(count)]


CASES: dict[str, Callable[[Bench], str]] = {case.__name__: case for case in (same_tokens, forged, killed, frozen)}
SAME, LATE = prompts(8, 1), prompts(3, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the engines go")
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
    print(f"{len(names) - failures} of {len(names)} cases passed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    # Whoever ends this ends the engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
