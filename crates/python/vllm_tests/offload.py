"""Weft as a tier of vLLM's OffloadingConnector: `offload.py [--only CASE]… [--logs DIRECTORY]`. Called by `cargo xtask door-test vllm-offload`.

Real instances of vLLM, each killed or stopped before the next begins, so that what is hit was in the tier: tokens at temperature 0 are compared with those of an instance without a
connector, and hits are counted by vLLM's own metrics. vLLM's `fs` tier does the same beside it. On a machine without a GPU vLLM's own worker cannot copy between caches and
memory, so a worker of a few lines does (`host_spec.py`); everything above it is vLLM's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from instances import Process, complete, core, engine, metric, tokens_of  # noqa: E402
from tiny_model import make  # noqa: E402

TOKENS = 12
MEMORY = 64 << 20
CAPACITY = 256 << 20


@dataclass
class Bench:
    model: Path
    logs: Path
    scratch: Path
    expected: list[list[int]] = field(default_factory=list)
    started: list[Process] = field(default_factory=list)
    count: int = 0

    def tier(self, name: str, **more: Any) -> dict[str, Any]:
        directory = str(self.scratch / name)
        if name.startswith("fs"):
            return {"type": "fs", "root_dir": directory, "n_read_threads": 4, "n_write_threads": 4, **more}
        return {
            "type": "WeftTier", "module_path": "weft.vllm", "directory": directory, "capacity": CAPACITY, "extent": 32 << 20,
            "revision": "seed-7", "quantisation": "none", "tenant": "tests", "scales": "", **more,
        }  # fmt: skip

    def instance(self, tier: dict[str, Any], *arguments: str, **extra: Any) -> Process:
        connector = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostTieringSpec", "spec_module_path": "host_spec", "cpu_bytes_to_use": MEMORY, "secondary_tiers": [tier], **extra,
            },
        }  # fmt: skip
        self.count += 1
        instance = engine(sys.executable, self.model, f"{self.count}-{tier['type']}", self.logs, connector, "--no-enable-log-requests", *arguments)
        instance.cores = core(0)
        instance.env["PYTHONPATH"] = os.pathsep.join([str(HERE), instance.env["PYTHONPATH"]])
        # Names of blocks begin with this; where it is by chance, nobody finds them after a restart.
        instance.env["PYTHONHASHSEED"] = "0"
        self.start(instance)
        return instance

    def start(self, process: Process) -> None:
        self.started.append(process.start())
        process.wait()

    def stop(self, *, kill: bool = False) -> None:
        for process in self.started:
            if process.popen is not None and not kill:
                process.signal(signal.SIGTERM)
                try:
                    process.popen.wait(60)
                except Exception:
                    pass
            process.kill()
        self.started.clear()

    def ask_alone(self) -> None:
        alone = engine(sys.executable, self.model, "alone", self.logs, None)
        alone.cores = core(0)
        self.start(alone)
        self.expected = [tokens_of(complete(alone.url, prompt, TOKENS)) for prompt in PROMPTS]
        self.stop(kill=True)

    def ask(self, instance: Process, prompts: list[int] | None = None) -> tuple[int, float]:
        """Asks for prompts, compares their tokens, and says how many tokens came from the tier, and how long the first tokens took."""
        before, began = hit_tokens(instance), time.monotonic()
        for nth in prompts if prompts is not None else range(len(PROMPTS)):
            answer = complete(instance.url, PROMPTS[nth], TOKENS)
            assert tokens_of(answer) == self.expected[nth], f"prompt {nth} gave {tokens_of(answer)}, and without a connector {self.expected[nth]}"
        return int(hit_tokens(instance) - before), time.monotonic() - began

    def settled(self, instance: Process, tier: dict[str, Any]) -> None:
        """Waits until what was offloaded is in the tier: vLLM's counter of bytes written stands still."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < 60:
            written = metric(instance.url, "vllm:kv_offload_tiering_write_bytes_total")
            if written == last and written > 0:
                return
            last = written
            # vLLM counts a step at a time, and steps when it is asked for something.
            complete(instance.url, [5, 6, 7], 1)
            time.sleep(1.0)
        raise AssertionError(f"{tier['type']} has nothing after a minute")


def hit_tokens(instance: Process) -> float:
    return metric(instance.url, "vllm:external_prefix_cache_hits_total")


def fill(bench: Bench, tier: dict[str, Any], *arguments: str, **extra: Any) -> Process:
    """An instance that has computed all prompts, and whose tier has their blocks."""
    instance = bench.instance(tier, *arguments, **extra)
    hits, _ = bench.ask(instance)
    assert hits == 0, "nothing can be hit yet"
    bench.settled(instance, tier)
    return instance


def restarted(bench: Bench, name: str, *, kill: bool) -> tuple[int, float, float]:
    tier = bench.tier(name)
    instance = fill(bench, tier)
    # Warm: in the engine's own cache.
    _, warm = bench.ask(instance)
    bench.stop(kill=kill)
    instance = bench.instance(tier)
    hits, took = bench.ask(instance)
    return hits, warm, took


def same_tokens_after_a_restart(bench: Bench) -> str:
    hits, warm, took = restarted(bench, "stopped", kill=False)
    assert hits >= FULL_TOKENS, f"{hits} tokens came from the tier, and {FULL_TOKENS} are in full blocks"
    return f"cold, warm and after a restart the same tokens; {hits} of {ALL_TOKENS} prompt tokens from the tier; {warm:.2f} s warm, {took:.2f} s from the tier"


def same_tokens_after_a_kill(bench: Bench) -> str:
    hits, _, took = restarted(bench, "killed", kill=True)
    assert hits >= FULL_TOKENS, f"{hits} tokens came from the tier, and {FULL_TOKENS} are in full blocks"
    return f"after kill -9 the same tokens; {hits} of {ALL_TOKENS} prompt tokens from the tier, in {took:.2f} s"


def a_damaged_block_is_computed_again(bench: Bench) -> str:
    tier = bench.tier("damaged")
    fill(bench, tier)
    bench.stop(kill=True)
    data = Path(tier["directory"]) / "ext-00000.data"
    flipped = flip(data, 3)
    instance = bench.instance(tier)
    hits, _ = bench.ask(instance)
    assert 0 < hits < FULL_TOKENS, f"{hits} tokens came from a tier with {flipped} damaged blocks"
    log = instance.log.read_text(errors="replace")
    assert "could not be read, and are computed again" in log, "the engine was told nothing of the damage"
    # What was computed again is stored again.
    bench.settled(instance, tier)
    bench.stop(kill=True)
    again, _ = bench.ask(bench.instance(tier))
    assert again >= FULL_TOKENS, f"{again} tokens the next time"
    return f"{flipped} blocks damaged: the same tokens, {hits} of {FULL_TOKENS} tokens from the tier, and {again} the next time"


def flip(data: Path, blocks: int) -> int:
    """Changes a byte in some slots that hold something."""
    done = 0
    with data.open("r+b") as file:
        size, step = data.stat().st_size, 4096
        last = -(1 << 30)
        for at in range(0, size, step):
            file.seek(at)
            page = file.read(64)
            if any(page) and at - last > (1 << 18):
                file.seek(at + 17)
                file.write(bytes([page[17] ^ 0x40]))
                last, done = at, done + 1
                if done == blocks:
                    break
    assert done == blocks, f"{done} slots hold something"
    return done


def another_revision_hits_nothing(bench: Bench) -> str:
    tier = bench.tier("revisions")
    fill(bench, tier)
    bench.stop(kill=True)
    hits, _ = bench.ask(bench.instance({**tier, "revision": "seed-8"}))
    assert hits == 0, f"{hits} tokens of other weights came from the tier"
    return "blocks of other weights are no hit, and the tokens the same"


def a_missing_field_is_a_refusal(bench: Bench) -> str:
    tier = bench.tier("refused")
    del tier["revision"]
    try:
        bench.instance(tier)
    except RuntimeError as error:
        log = bench.started[-1].log.read_text(errors="replace")
        assert "WeftTier needs 'revision'" in log, f"it ended for another reason: {error}"
        return "an engine that is not told the weights' revision does not start, and says what is missing"
    raise AssertionError("the engine has started without the weights' revision")


def a_tier_that_fails_costs_no_request(bench: Bench) -> str:
    """The files are cut short under a running engine."""
    tier = bench.tier("cut")
    fill(bench, tier)
    bench.stop(kill=True)
    instance = bench.instance(tier)
    for data in Path(tier["directory"]).glob("ext-*.data"):
        os.truncate(data, 0)
    hits, _ = bench.ask(instance)
    assert hits == 0, f"{hits} tokens from files without bytes"
    return "files cut to nothing under a running engine: the same tokens, none from the tier"


def the_policy_keeps_the_tokens(bench: Bench) -> str:
    """Memory that holds a fraction of the blocks, with the adaptive policy, and nothing behind it that could be hit."""
    tier = bench.tier("policy")
    instance = bench.instance(tier, eviction_policy="WeftPolicy", cache_policy_module_path="weft.vllm", cpu_bytes_to_use=6 << 20)
    for _ in range(2):
        bench.ask(instance)
    log = instance.log.read_text(errors="replace")
    assert "(WeftPolicy," in log, "the policy is another"
    return "two rounds through memory for a fraction of the blocks, the same tokens"


def beside_fs(bench: Bench) -> str:
    """vLLM's own tier of files does the same."""
    said = []
    for name in ("fs-beside", "weft-beside"):
        hits, _, took = restarted(bench, name, kill=False)
        bench.stop(kill=True)
        files = [path for path in (bench.scratch / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_blocks * 512 for path in files)
        said.append(f"{name.split('-')[0]}: {hits} tokens from the tier, {took:.2f} s, {len(files)} files, {size / 1e6:.0f} MB on disk")
    return "; ".join(said)


CASES: dict[str, Callable[[Bench], str]] = {
    case.__name__: case
    for case in (
        same_tokens_after_a_restart, same_tokens_after_a_kill, a_damaged_block_is_computed_again, another_revision_hits_nothing,
        a_missing_field_is_a_refusal, a_tier_that_fails_costs_no_request, the_policy_keeps_the_tokens, beside_fs,
    )
}  # fmt: skip
_chance = random.Random(11)
PROMPTS = [[_chance.randrange(4, 500) for _ in range(length)] for length in (300, 129, 512, 1000)]
ALL_TOKENS = sum(len(prompt) for prompt in PROMPTS)
# vLLM computes the last token of a prompt itself, and offloads whole blocks.
BLOCK_TOKENS = 128
FULL_TOKENS = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the instances go")
    parser.add_argument("--weft", help="taken for the sake of the others")
    arguments = parser.parse_args()
    names = arguments.only or list(CASES)
    failed = 0
    # On a disk, as tiers are: temporary directories may be in memory.
    target = HERE.parents[2] / "target"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(model, logs, Path(scratch))
        try:
            bench.ask_alone()
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
                bench.stop(kill=True)
        finally:
            bench.stop(kill=True)
    print(f"{len(names) - failed} of {len(names)} cases passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
