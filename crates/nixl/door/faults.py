"""What happens when the other end does not do as it should: WEFT beside UCX, each case in processes of its own.

    NIXL_PLUGIN_DIR=… faults.py [--only CASE] [--backends WEFT,UCX]
    WEFT_NIXL=1 faults.py --backends WEFT       # weft.nixl, without NIXL

Prints a row a case. What must hold must hold for WEFT; what UCX does is shown beside it.
"""

import argparse
import os
import subprocess
import sys
import time

from partners import Pair

DEADLINE = 3.0
PATIENCE = 12.0
MIB = 1 << 20
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def pair_of(backend, transport, nbytes=64 * MIB):
    return Pair(backend, transport, nbytes, deadline=f"{DEADLINE}s")


@case
def late_write(backend):
    """A write to a frozen peer is released. When the peer goes on, its memory stays as it was."""
    pair = pair_of(backend, "tcp")
    pair.region.bytes[:] = 1
    handle = pair.describe("WRITE")
    warm = pair.describe("READ", spans=[(0, 64)])
    pair.finish(warm)
    pair.freeze()
    state = pair.agent.transfer(handle)
    end = time.monotonic() + 0.3
    while state == "PROC" and time.monotonic() < end:
        state = pair.agent.check_xfer_state(handle)
    begin = time.monotonic()
    try:
        pair.agent.release_xfer_handle(handle)
        released = "released"
    except Exception as error:
        released = f"not released ({type(error).__name__})"
    took = time.monotonic() - begin
    before = pair.look()
    # Now it is the caller's, who puts something else there.
    pair.region.bytes[:] = 2
    pair.thaw()
    time.sleep(3.0)
    after = pair.look()
    late = int((before != after).sum())
    return late == 0 and released == "released", f"{released} after {took:.1f} s, then {late / MIB:.1f} MiB changed"


@case
def frozen_peer(backend):
    """A read from a frozen peer ends by its deadline."""
    pair = pair_of(backend, "tcp")
    warm = pair.describe("READ", spans=[(0, 64)])
    pair.finish(warm)
    handle = pair.describe("READ")
    pair.freeze()
    state, took = pair.finish(handle, PATIENCE)
    ended = state not in ("PROC", "DONE")
    return ended and took < DEADLINE + 1.5, f"{'ended' if ended else 'not ended'} after {took:.1f} s: {state}"


@case
def frozen_peer_on_this_host(backend):
    """On one host the bytes are there all the same."""
    pair = pair_of(backend, "shared_memory" if backend == "WEFT" else None)
    pair.ask("fill", 5)
    warm = pair.describe("READ", spans=[(0, 64)])
    pair.finish(warm)
    handle = pair.describe("READ")
    pair.freeze()
    state, took = pair.finish(handle, PATIENCE)
    right = state == "DONE" and bool((pair.region.bytes == 5).all())
    return right, f"{state} after {took:.1f} s"


@case
def killed_peer(backend):
    """A peer is killed while it is written to: an error, soon."""
    pair = pair_of(backend, "tcp")
    handle = pair.describe("WRITE")
    pair.finish(handle)
    state = pair.agent.transfer(handle)
    pair.kill()
    begin = time.monotonic()
    try:
        while state == "PROC" and time.monotonic() - begin < PATIENCE:
            state = pair.agent.check_xfer_state(handle)
        if state == "DONE":
            state, _ = pair.finish(handle, PATIENCE)
    except Exception as error:
        state = type(error).__name__
    took = time.monotonic() - begin
    ended = state not in ("PROC", "DONE")
    return ended and took < 1.0, f"{'ended' if ended else 'not ended'} after {took * 1e3:.0f} ms: {state}"


@case
def stale_registration(backend):
    """The owner takes memory back and uses it for something else. Who still knows it cannot change it."""
    pair = pair_of(backend, "shared_memory" if backend == "WEFT" else None, MIB)
    pair.region.bytes[:] = 1
    handle = pair.describe("WRITE")
    pair.finish(handle)
    pair.ask("reuse", 9)
    state, _ = pair.finish(handle, PATIENCE)
    changed = sum(byte != 9 for byte in pair.ask("bytes"))
    return state not in ("PROC", "DONE") and changed == 0, f"{state}, {changed} bytes of something else overwritten"


@case
def notification_without_polling(backend):
    """Who has posted a write looks at it no more. The other end hears of it all the same."""
    pair = pair_of(backend, "tcp")
    warm = pair.describe("WRITE", spans=[(0, 64)])
    pair.finish(warm)
    handle = pair.describe("WRITE", b"there you are")
    pair.agent.transfer(handle)
    told = pair.ask("notifications", 1, 5.0)
    return bool(told), "told" if told else "not told in 5 s"


def run(name, backend):
    """In a process of its own, which may hang."""
    # The interpreter's own words, and NIXL's, are not for the table.
    me = [sys.executable, __file__, "--case", name, "--backends", backend]
    try:
        ran = subprocess.run(me, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return False, "hung for 90 s, and was killed"
    for line in reversed(ran.stdout.splitlines()):
        if line.startswith(("HELD ", "FELL ")):
            return line.startswith("HELD"), line[5:]
    last = (ran.stderr.strip().splitlines() or ["nothing was said"])[-1]
    return False, f"exit code {ran.returncode}: {last}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--backends", default="WEFT,UCX")
    arguments = parser.parse_args()
    if arguments.case:
        try:
            held, note = CASES[arguments.case](arguments.backends)
            print("HELD" if held else "FELL", note, flush=True)
        finally:
            Pair.end_all()
        os._exit(0)
    fell = 0
    for name in CASES:
        if arguments.only not in name:
            continue
        for backend in arguments.backends.split(","):
            held, note = run(name, backend)
            fell += backend == "WEFT" and not held
            print(f"  {name:30} {backend:5} {'holds' if held else 'does not hold':14} {note}", flush=True)
    sys.exit(1 if fell else 0)


if __name__ == "__main__":
    main()
