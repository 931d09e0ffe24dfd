"""Prefill, decode and router as real processes: `run.py --weft PATH_OF_THE_COMMAND [--only NAME]…`. Called by `cargo xtask vllm-test`.

Every case compares tokens at temperature 0 with those of a single instance that knows nothing of Weft.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench  # noqa: E402
from cases import ASKED, CASES  # noqa: E402
from found import CASES as FOUND  # noqa: E402
from pushed import CASES as PUSHED  # noqa: E402
from tiny_model import make  # noqa: E402

CASES.update({case.__name__: case for case in (*PUSHED, *FOUND)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", required=True, help="the weft command")
    parser.add_argument("--only", action="append", choices=list(CASES), help="only these cases")
    parser.add_argument("--logs", type=Path, help="where the logs of the instances go")
    arguments = parser.parse_args()
    began = time.monotonic()
    names = [name for name in CASES if name in (arguments.only or CASES)]
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "tiny"
        make(str(model))
        bench = Bench(arguments.weft, model, logs)
        failed = 0
        try:
            if len(names) > 2:
                bench.ask_alone(ASKED)
                print(f"a single instance has answered {len(bench.expected)} prompts", flush=True)
            for name in names:
                failed += not run(bench, name)
        finally:
            bench.stop()
    print(f"{len(names) - failed} of {len(names)} cases passed in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


def run(bench: Bench, name: str) -> bool:
    began = time.monotonic()
    try:
        said = CASES[name](bench)
        print(f"ok      {name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
        return True
    except Exception as error:
        print(f"FAILED  {name} ({time.monotonic() - began:.0f} s): {type(error).__name__}: {error}", flush=True)
        for process in bench.started:
            print(f"--- the end of {process.log}\n{process.log.read_text(errors='replace')[-4000:]}", flush=True)
        # The next case must not suffer from what this one left.
        bench.stop()
        return False


if __name__ == "__main__":
    # Whoever ends this ends the instances too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
