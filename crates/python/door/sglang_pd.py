"""SGLang's prefill and decode apart, over Weft: `sglang_pd.py [--by nixl|weft] [--only CASE]… [--logs DIRECTORY]`. Called by `cargo xtask door-test sglang`.

SGLang runs on processors here, with torch's attention. By `nixl` its transfer backend is the one for NIXL, as it is; `import nixl` is Weft's module, by the variable WEFT_NIXL and SGLang's
entry points for plug-ins. By `weft` it is Weft's, by its own name (`weft.sglang_transfer`), and no variable says anything. Tokens are compared with those of a single engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VLLM_TESTS = HERE.parent / "vllm_tests"
sys.path[:0] = [str(VLLM_TESTS), str(HERE)]

import contracts  # noqa: E402
from instances import Process, free_port  # noqa: E402
from interface import Source  # noqa: E402
from tiny_model import make  # noqa: E402

# How long a transfer may take where a peer stands still, and how long a request then may.
DEADLINE = "5s"
ANSWER_MAX = 300.0
TOKENS = 24


def environment() -> dict[str, str]:
    directories = [str(HERE / "sglang_cpu"), str(VLLM_TESTS / "no_amx"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(directories),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Of a prefill side that is gone, a decode side hears by these.
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    }


# What has to be said for each way.
BY = {
    "nixl": {
        "WEFT_NIXL": "1", "SGLANG_DISAGGREGATION_NIXL_BACKEND": "WEFT", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": json.dumps({"deadline": DEADLINE}),
    },
    # The deadline is a setting of Weft's, and not what names it.
    "weft": {"WEFT_DEADLINE": DEADLINE},
}  # fmt: skip


@dataclass
class Bench:
    model: Path
    logs: Path
    expected: list[list[int]] = field(default_factory=list)
    started: list[Process] = field(default_factory=list)
    bootstrap: int = 0
    rooms: int = 1000
    by: str = "nixl"

    def server(self, name: str, *more: str, **settings: str) -> Process:
        port = free_port()
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--disable-overlap-schedule",
            "--disable-radix-cache", "--mem-fraction-static", "0.5", "--max-total-tokens", "16384", "--max-running-requests", "8", "--context-length", "2048",
            "--page-size", "64", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup", *more,
        ]  # fmt: skip
        env = environment() | BY[self.by] | {f"WEFT_{key.upper()}": value for key, value in settings.items()}
        return Process(name, command, port, self.logs / f"{name}.log", env=env)

    def start(self, *servers: Process) -> None:
        self.started += [server.start() for server in servers]
        for server in servers:
            server.wait()

    def pair(self, **settings: str) -> tuple[Process, Process]:
        self.stop()
        self.bootstrap = free_port()
        apart = ["--disaggregation-transfer-backend", self.by, "--disaggregation-bootstrap-port", str(self.bootstrap), "--disaggregation-mode"]
        prefill = self.server(f"{self.by}-prefill", *apart, "prefill", **settings)
        decode = self.server(f"{self.by}-decode", *apart, "decode", **settings)
        self.start(prefill, decode)
        return prefill, decode

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        self.started.clear()

    def ask_alone(self) -> None:
        alone = self.server("alone")
        self.start(alone)
        self.expected = [generate(alone.url, prompt)["output_ids"] for prompt in PROMPTS]
        self.stop()

    def hand_off(self, prefill: Process, decode: Process, prompt: list[int]) -> dict[str, Any]:
        """Asks both, as routers of SGLang do, and gives the decode side's answer."""
        self.rooms += 1
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap, "bootstrap_room": self.rooms}
        threading.Thread(target=ignored, args=(prefill.url, prompt, where), daemon=True).start()
        return generate(decode.url, prompt, **where)

    def check(self, nth: int, answer: dict[str, Any]) -> None:
        if answer["output_ids"] != self.expected[nth]:
            raise AssertionError(f"prompt {nth} gave {answer['output_ids']}, and a single engine {self.expected[nth]}")


def generate(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}, **more}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_MAX) as answer:
        return dict(json.load(answer))


def ignored(url: str, prompt: list[int], where: dict[str, Any]) -> None:
    """What the prefill side says is of no interest; whether it says anything is seen at the decode side."""
    try:
        generate(url, prompt, **where)
    except OSError:
        pass


def reason(error: urllib.error.HTTPError) -> str:
    """What a client is told."""
    return " ".join(error.read().decode(errors="replace").split())[:200] or "nothing"


def contract(bench: Bench) -> str:
    """The SGLang that is installed is the one that this was written for."""
    source = Source.installed("sglang")
    assert source is not None, "SGLang is not installed"
    verdict, moved = contracts.check("sglang", source, contracts.version_of(contracts.DOORS["sglang"]))
    assert not moved, "\n  ".join([verdict, *moved])
    return verdict


def same_tokens(bench: Bench) -> str:
    """Every prompt twice."""
    prefill, decode = bench.pair()
    for _ in range(2):
        for nth, prompt in enumerate(PROMPTS):
            bench.check(nth, bench.hand_off(prefill, decode, prompt))
    log = (bench.logs / f"{bench.by}-decode.log").read_text(errors="replace")
    assert "NIXL KVManager initialized with backend: WEFT" in log, "the decode side has another transfer backend"
    return f"{2 * len(PROMPTS)} of {2 * len(PROMPTS)} with the tokens of a single engine"


def without_prefill(bench: Bench, number: signal.Signals) -> str:
    """Whoever waits for a prefill side that is gone is told so, and the decode side goes on when there is one again."""
    prefill, decode = bench.pair(transports="tcp")
    bench.check(0, bench.hand_off(prefill, decode, PROMPTS[0]))
    prefill.signal(number)
    began = time.monotonic()
    try:
        answer = bench.hand_off(prefill, decode, PROMPTS[1])
        raise AssertionError(f"answered without a prefill side: {answer['output_ids']}")
    except urllib.error.HTTPError as error:
        said = f"told of an error (HTTP {error.code}: {reason(error)})"
    took = time.monotonic() - began
    urllib.request.urlopen(f"{decode.url}/health", timeout=10)
    return f"a client of the decode side is {said} after {took:.1f} s, and the decode side lives"


def killed(bench: Bench) -> str:
    return without_prefill(bench, signal.SIGKILL)


def frozen(bench: Bench) -> str:
    return without_prefill(bench, signal.SIGSTOP)


CASES: dict[str, Callable[[Bench], str]] = {case.__name__: case for case in (contract, same_tokens, killed, frozen)}
_chance = random.Random(7)
PROMPTS = [[_chance.randrange(4, 320) for _ in range(length)] for length in (300, 129, 512, 1000)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", action="append", choices=list(BY), help="only this way; both without")
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the servers go")
    arguments = parser.parse_args()
    # What is installed is the same by whichever name.
    cases = [(by, name) for by in arguments.by or BY for name in arguments.only or CASES if (by, name) != ("weft", "contract") or arguments.by == ["weft"]]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(model, logs)
        try:
            if any(name != "contract" for _, name in cases):
                bench.ask_alone()
            for by, name in cases:
                began, bench.by = time.monotonic(), by
                try:
                    said = CASES[name](bench)
                    print(f"ok      {name} by {by} ({time.monotonic() - began:.0f} s): {said}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"FAILED  {name} by {by} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
                    for process in bench.started:
                        print(f"--- the end of {process.log}\n{process.log.read_text(errors='replace')[-4000:]}", flush=True)
        finally:
            bench.stop()
    print(f"{len(cases) - failed} of {len(cases)} cases passed, SGLang {contracts.version_of(contracts.DOORS['sglang'])}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
