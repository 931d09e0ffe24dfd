"""Instances of vLLM and the router as processes of their own, and how to talk to them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_MAX = 1800.0

# With which the routers of this run are administered.
ADMIN_TOKEN = os.urandom(16).hex()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "no_amx"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "WEFT_ADMIN_TOKEN": ADMIN_TOKEN,
        # Compiling vLLM and torch anew takes longer than everything else that a start does.
        "PYTHONDONTWRITEBYTECODE": "",
    }


@dataclass
class Process:
    """A server that is killed, with all its children, when the test is over."""

    name: str
    command: list[str]
    port: int
    log: Path
    env: dict[str, str] = field(default_factory=environment)
    # The cores that it may run on, if not all.
    cores: set[int] | None = None
    # Where a router is administered.
    admin: str = ""
    popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Process:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=self._take_cores
            )
        return self

    def _take_cores(self) -> None:
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)

    def wait(self) -> Process:
        began = time.monotonic()
        while time.monotonic() - began < START_MAX:
            assert self.popen is not None
            if self.popen.poll() is not None:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name} ended with {self.popen.returncode}:\n{tail}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return self
            except urllib.error.HTTPError:
                # A router whose instances are not up yet.
                return self
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} did not start within {START_MAX:.0f} s; see {self.log}")

    def signal(self, number: int) -> None:
        """To the process and all its children."""
        assert self.popen is not None
        os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        if self.popen is not None:
            try:
                self.signal(signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.popen.wait()
            self.popen = None

    def cpu_seconds(self) -> float:
        """Of the process and its children so far."""
        assert self.popen is not None
        ticks, group = 0, str(self.popen.pid)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[2] == group:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def core(nth: int) -> set[int]:
    """One of the cores there are. The processes of vLLM wait for each other by `sched_yield`: instances that share cores hold each other up by seconds."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[nth % len(cores)]}


def engine(
    python: str, model: Path, name: str, logs: Path, connector: dict[str, Any] | None, *arguments: str
) -> Process:
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny",
        "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8", *arguments,
    ]  # fmt: skip
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    return Process(name, command, port, logs / f"{name}.log")


def weft_connector(**options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "WeftConnector",
        "kv_connector_module_path": "weft.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }


def post(url: str, body: dict[str, Any], limit: float = 300.0) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return str(answer.read().decode())


def administer(router: Process, path: str) -> str:
    """What the router says to whoever administers it."""
    return get(router.admin + path, Authorization=f"Bearer {ADMIN_TOKEN}")


def metric(url: str, name: str) -> float:
    """The sum over all labels of a metric."""
    lines = [line for line in get(f"{url}/metrics").splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def label(url: str, name: str, key: str) -> str:
    """What a metric that says something by its labels says."""
    found = re.search(rf'^{name}{{.*\b{key}="([^"]*)"', get(f"{url}/metrics"), re.MULTILINE)
    if found is None:
        raise AssertionError(f"{url} says nothing of {key} in {name}")
    return found.group(1)


def complete(url: str, prompt: list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    return post(f"{url}/v1/completions", body)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
