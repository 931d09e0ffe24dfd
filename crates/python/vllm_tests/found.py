"""Instances that the router finds in etcd, and that come and go while it runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from bench import DEADLINE, LEASE, Bench, no_block_in_use, prompts
from instances import Process, administer, complete, engine, free_port, get, weft_connector


def found(bench: Bench) -> str:
    """A router that is given nobody's address. The prefill side pushes once the router has heard of it, dies, and comes back."""
    assert shutil.which("etcd"), "there is no etcd"
    asked, fresh = prompts(6), prompts(6, seed=2)
    bench.ask_alone([(prompt, 16) for prompt in asked + fresh])
    bench.stop()
    client, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as data:
        command = [
            "etcd", "--data-dir", data, "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
        ]  # fmt: skip
        etcd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(lambda: get(f"{client}/health"), "etcd")
            made = []
            for role in ("prefill", "decode"):
                instance = engine(sys.executable, bench.model, role, bench.logs, None)
                options = {"mode": "push", "etcd": client, "prefix": "test", "url": instance.url, "role": role}
                connector = weft_connector(deadline=DEADLINE, lease=LEASE, **options)
                instance.command += ["--kv-transfer-config", json.dumps(connector)]
                made.append(instance)
            prefill, decode = made
            router = bench.router([], [], "--etcd", client, "--prefix", "test")
            bench.start(prefill, decode)
            _wait_for(lambda: _up(router, 2), "the router to see both instances")
            answers = [complete(router.url, prompt) for prompt in asked]
            told = len(bench.check_all(asked, answers))
            assert told == 6, f"{told} of 6 were handed off"
            prefill.signal(signal.SIGKILL)
            prefill.kill()
            _wait_for(lambda: _up(router, 1), "the router to forget the instance that died")
            bench.check(asked[0], complete(router.url, asked[0]))
            prefill.start().wait()
            _wait_for(lambda: _up(router, 2), "the router to see the instance again")
            again = [complete(router.url, prompt) for prompt in fresh]
            resumed = len(bench.check_all(fresh, again))
            assert resumed == 6, f"{resumed} of 6 were handed off after the restart"
            used = no_block_in_use(prefill, decode)
        finally:
            etcd.kill()
            etcd.wait()
    return f"{told} of 6 handed off; forgotten when it died; {resumed} of 6 handed off after it came back; {used}"


def _up(router: Process, count: int) -> bool:
    said = json.loads(administer(router, "/weft/instances"))
    return len(said) == count and all(one["up"] and not one["draining"] for one in said)


def _wait_for(look, what: str) -> None:  # type: ignore[no-untyped-def]
    for _ in range(600):
        try:
            if look():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


CASES = (found,)
