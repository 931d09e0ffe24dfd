"""Weft as LMCache's second level: `lmcache_tier.py [--only CASE]…`. Called by `cargo xtask door-test lmcache`.

LMCache's own adapter is made from the line that a user writes, and driven as its server drives it: through its three descriptors. A process of its own writes, is killed, and
another reads. Then LMCache's bench runs on it, with its comparison of every byte.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 256 << 10
COUNT = 24


def line(directory: Path, **more: Any) -> dict[str, Any]:
    params = {
        "directory": str(directory), "capacity": 64 << 20, "block_bytes": CHUNK, "revision": "r", "dtype": "bfloat16", "chunk_tokens": 256,
        "quantisation": "none", "tenant": "tests", **more,
    }  # fmt: skip
    return {"type": "native_plugin", "module_path": "weft.lmcache", "class_name": "WeftConnector", "adapter_params": params}


def adapter(given: dict[str, Any]) -> Any:
    from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig, _create_native_plugin_l2_adapter

    return _create_native_plugin_l2_adapter(NativePluginL2AdapterConfig.from_dict(given))


class Chunk:
    """As much of LMCache's memory object as its adapter looks at."""

    def __init__(self, fill: int) -> None:
        self.bytes = (ctypes.c_ubyte * CHUNK)()
        pattern = bytes((fill * 31 + n) % 256 for n in range(4096))
        ctypes.memmove(self.bytes, pattern * (CHUNK // 4096), CHUNK)
        self.byte_array = memoryview(self.bytes)

    def wipe(self) -> Chunk:
        ctypes.memset(self.bytes, 0, CHUNK)
        return self


def keys(count: int = COUNT) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(chunk_hash=bytes([n]) * 32, model_name="m/m", kv_rank=0) for n in range(count)]


def awaited(fd: int, ask: Callable[[], Any]) -> Any:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        select.select([fd], [], [], 1.0)
        said = ask()
        if said is not None and said != {}:
            return said
    raise AssertionError("nothing for a minute")


def set_bits(bitmap: Any, count: int) -> list[int]:
    return [n for n in range(count) if bitmap.test(n)]


def store(tier: Any) -> None:
    task = tier.submit_store_task(keys(), [Chunk(n) for n in range(COUNT)])
    result = awaited(tier.get_store_event_fd(), tier.pop_completed_store_tasks)[task]
    assert result.is_successful(), result


def look_up(tier: Any) -> list[int]:
    task = tier.submit_lookup_and_lock_task(keys(), {})
    found = awaited(tier.get_lookup_and_lock_event_fd(), lambda: tier.query_lookup_and_lock_result(task))
    tier.submit_unlock(keys())
    return set_bits(found, COUNT)


def load(tier: Any) -> list[int]:
    chunks = [Chunk(n).wipe() for n in range(COUNT)]
    task = tier.submit_load_task(keys(), chunks)
    loaded = set_bits(awaited(tier.get_load_event_fd(), lambda: tier.query_load_result(task)), COUNT)
    for n in loaded:
        assert bytes(chunks[n].bytes) == bytes(Chunk(n).bytes), f"chunk {n} came back as something else"
    return loaded


def elsewhere(directory: Path, do: str) -> str:
    """In a process of its own, which `kill -9` may end."""
    ran = subprocess.run([sys.executable, __file__, "--do", do, "--directory", str(directory)], capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, -9), f"{do} ended with {ran.returncode}: {ran.stderr[-3000:]}"
    return ran.stdout.strip().rpartition("\n")[2]


def do(what: str, directory: Path) -> None:
    import os
    import signal

    tier = adapter(line(directory))
    if what == "store-and-die":
        store(tier)
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({"found": look_up(tier), "loaded": load(tier)}), flush=True)
    tier.close()


def restart(directory: Path) -> str:
    """Written, killed with -9, read by another."""
    elsewhere(directory, "store-and-die")
    said = json.loads(elsewhere(directory, "load"))
    assert said == {"found": list(range(COUNT)), "loaded": list(range(COUNT))}, said
    return f"{COUNT} of {COUNT} chunks after kill -9 of the process that wrote them, byte for byte"


def damage(directory: Path) -> str:
    elsewhere(directory, "store-and-die")
    data = directory / "ext-00000.data"
    with data.open("r+b") as file:
        for slot in (2, 7):
            file.seek(slot * CHUNK + 1000)
            byte = file.read(1)
            file.seek(slot * CHUNK + 1000)
            file.write(bytes([byte[0] ^ 8]))
    said = json.loads(elsewhere(directory, "load"))
    assert len(said["loaded"]) == COUNT - 2, said
    again = json.loads(elsewhere(directory, "load"))
    assert len(again["found"]) == COUNT - 2, "what was found damaged is not found again"
    return f"two chunks damaged in the files: {COUNT - 2} of {COUNT} loaded, none wrong, and the two are not found again"


def delete(directory: Path) -> str:
    tier = adapter(line(directory))
    try:
        store(tier)
        tier.delete(keys()[::-1][:4])
        found = look_up(tier)
    finally:
        tier.close()
    assert found == list(range(COUNT - 4)), found
    return "four deleted, and not found"


def other_length(directory: Path) -> str:
    """A chunk of another length is an error that says what to do, not a hang."""
    tier = adapter(line(directory, block_bytes=CHUNK // 2))
    try:
        task = tier.submit_store_task(keys(1), [Chunk(0)])
        result = awaited(tier.get_store_event_fd(), tier.pop_completed_store_tasks)[task]
        failed = not result.is_successful()
    finally:
        tier.close()
    assert failed, result
    return "a chunk of another length is refused"


def missing_field(directory: Path) -> str:
    given = line(directory)
    del given["adapter_params"]["revision"]
    try:
        adapter(given)
    except ValueError as error:
        assert "WeftConnector needs 'revision'" in str(error), error
        return str(error)
    raise AssertionError("it was made without the weights' revision")


def altered(directory: Path) -> str:
    """The contract: what LMCache asks of a native client, by its source; and that a change of it is noticed."""
    import inspect

    from lmcache.v1.distributed.l2_adapters import native_connector_l2_adapter, native_plugin_l2_adapter

    source = inspect.getsource(native_plugin_l2_adapter) + inspect.getsource(native_connector_l2_adapter)
    moved = contract(source)
    assert not moved, moved
    assert contract(source.replace("drain_completions", "take_completions")) == ["LMCache asks for take_completions, which there is not", "LMCache no longer calls drain_completions"]
    assert contract(source.replace("submit_batch_get(key_strings, memviews)", "submit_batch_get(key_strings, memviews, 0)")) != []
    return "LMCache calls what there is, as it is called"


def contract(source: str) -> list[str]:
    import re

    from weft.lmcache import WeftConnector

    calls = set(re.findall(r"self\._client\.(\w+)\(([^()]*)\)", source)) | {(name, "") for name in re.findall(r"native_client\.(\w+)\(\)", source)}
    takes = {
        "event_fd": {""}, "submit_batch_set": {"key_strings, memviews"}, "submit_batch_get": {"key_strings, memviews"},
        "submit_batch_exists": {"key_strings"}, "submit_batch_delete": {"key_strings"}, "drain_completions": {""}, "close": {""},
    }  # fmt: skip
    moved = [f"LMCache asks for {name}, which there is not" for name, _ in sorted(calls) if not hasattr(WeftConnector, name)]
    moved += [f"LMCache calls {name}({how})" for name, how in sorted(calls) if name in takes and how not in takes[name]]
    return moved + [f"LMCache no longer calls {name}" for name in takes if name not in {name for name, _ in calls}]


def bench(directory: Path) -> str:
    """`lmcache bench l2`, which compares every byte."""
    given = json.dumps(line(directory, capacity=256 << 20))
    command = [
        sys.executable, "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "bench", "l2", "--l2-adapter", given, "--num-keys", "16", "--data-size-kb", str(CHUNK >> 10), "--rounds", "3", "--no-skip-verify",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    text = ran.stdout + ran.stderr
    assert ran.returncode == 0, text[-3000:]
    assert "mismatch" not in text.lower(), text[-3000:]
    told = [words.strip() for words in ran.stdout.splitlines() if "GB/s" in words or "throughput" in words.lower() or "verif" in words.lower()]
    return "; ".join(told[:8]) or "it ended well"


CASES: dict[str, Callable[[Path], str]] = {
    case.__name__: case for case in (altered, missing_field, restart, damage, delete, other_length, bench)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do:
        do(arguments.do, arguments.directory)
        return 0
    names = arguments.only or list(CASES)
    failed = 0
    target = Path(__file__).parents[3] / "target"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        for name in names:
            began, directory = time.monotonic(), Path(scratch) / name
            try:
                said = CASES[name](directory)
                print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{len(names) - failed} of {len(names)} cases passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
