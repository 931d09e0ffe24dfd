"""Cases of push mode: the prefill side writes each layer to the decode side while it computes the next."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from instances import complete, get, metric

if TYPE_CHECKING:
    from run import Bench


def pushed(bench: Bench) -> str:
    """50 prompts, 8 at a time, and 12 with a shared prefix, which the prefill side has in its cache after the first."""
    from run import blocks_in_use, handed_off, prompts, with_shared_prefix

    prefill, decode = bench.instance("prefill", mode="push"), bench.instance("decode", mode="push")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    asked = prompts(50) + with_shared_prefix(12)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(router.url, prompt), asked))
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    told = [said for said in map(handed_off, answers) if said]
    _say_why(answers)
    used = blocks_in_use(prefill), blocks_in_use(decode)
    by_router = _pushed_by_router(router.url)
    in_log = decode.log.read_text(errors="replace").count("bytes were pushed over")
    assert len(told) >= 50, f"only {len(told)} of {len(asked)} prompts were handed off"
    # The first ones come before the router knows that the prefill side pushes.
    assert by_router >= 50, f"the router arranged for {by_router} pushes"
    assert used == (0.0, 0.0), f"blocks in use afterwards: {used}"
    milliseconds = sorted(said["hand_off_ms"] for said in told)
    return (
        f"{len(asked)} prompts, {len(told)} handed off, {by_router} of them arranged as pushes, {in_log} pushed by the log; "
        f"median {milliseconds[len(milliseconds) // 2]:.1f} ms with the computation of the prompt; "
        f"blocks in use afterwards: {used[0]:.0%} and {used[1]:.0%}"
    )


def pushed_in_chunks(bench: Bench) -> str:
    """Prompts computed in pieces of 128 tokens, and aborted ones among them."""
    from run import blocks_in_use, complete_for, handed_off, prompts

    prefill = bench.instance("prefill", "--max-num-batched-tokens", "128", "--enable-chunked-prefill", mode="push")
    decode = bench.instance("decode", mode="push")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode])
    asked = prompts(20)
    complete(router.url, asked[0])
    with ThreadPoolExecutor(12) as pool:
        leaving = [pool.submit(complete_for, router.url, prompt, 0.05 * (1 + nth)) for nth, prompt in enumerate(prompts(50)[40:])]
        answers = list(pool.map(lambda prompt: complete(router.url, prompt), asked))
        left = sum(isinstance(future.exception(), OSError) for future in leaving)
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    _say_why(answers)
    told = sum(handed_off(answer) is not None for answer in answers)
    used = blocks_in_use(prefill), blocks_in_use(decode)
    assert used == (0.0, 0.0), f"blocks in use afterwards: {used}"
    return f"{told} of {len(asked)} handed off, {left} clients left; blocks in use afterwards: {used[0]:.0%} and {used[1]:.0%}"


def pushed_and_killed(bench: Bench) -> str:
    """SIGKILL of the prefill side in mid-push; then a restart."""
    from run import DEADLINE, RECOMPUTE_MAX, blocks_in_use, handed_off, prompts, wait_until_up

    # Small chunks, so that prompts are on their way for a while.
    prefill = bench.instance("prefill", "--max-num-batched-tokens", "64", "--enable-chunked-prefill", mode="push")
    decode = bench.instance("decode", mode="push")
    bench.start(prefill, decode)
    router = bench.router([prefill], [decode], "--prefill-timeout", "5")
    asked = prompts(12)
    complete(router.url, asked[0])
    with ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        flow = [pool.submit(complete, router.url, prompt) for prompt in asked]
        # Pushes have begun when somebody has heard of them.
        time.sleep(0.4)
        prefill.signal(signal.SIGKILL)
        answers = [future.result() for future in flow]
        took = time.monotonic() - began
    for prompt, answer in zip(asked, answers, strict=True):
        bench.check(prompt, answer)
    assert took < DEADLINE + RECOMPUTE_MAX, f"{took:.1f} s"
    recomputed = sum(handed_off(answer) is None for answer in answers)
    _say_why(answers)
    used = blocks_in_use(decode)
    assert used == 0.0, f"blocks in use on the decode side: {used:.0%}"
    prefill.kill()
    prefill.start().wait()
    wait_until_up(router, prefill)
    before = _pushed_by_router(router.url)
    fresh = prompts(6, seed=2)
    again = [complete(router.url, prompt) for prompt in fresh]
    for prompt, answer in zip(fresh, again, strict=True):
        bench.check(prompt, answer)
    resumed = sum(handed_off(answer) is not None for answer in again)
    arranged = _pushed_by_router(router.url) - before
    failed = metric(decode.url, "vllm:weft_hand_offs_failed_total")
    assert resumed == 6, f"{resumed} of 6 were handed off after the restart"
    assert arranged >= 5, f"{arranged} of 6 were pushed after the restart"
    return (
        f"{len(asked)} answered in {took:.1f} s, {recomputed} of them without a hand-off ({failed:.0f} failed on the decode side); "
        f"blocks in use there: {used:.0%}; after the restart {resumed} of 6 handed off, {arranged} of them pushed"
    )


def _pushed_by_router(url: str) -> int:
    for line in get(f"{url}/metrics").splitlines():
        if line.startswith('weft_router_requests_total{how="pushed"}'):
            return int(line.rsplit(" ", 1)[1])
    return 0


def _say_why(answers: list[dict[str, Any]]) -> None:
    reasons = {
        reason
        for answer in answers
        for reason in ((answer.get("kv_transfer_params") or {}).get("weft") or {}).get("recomputed_because", [])
    }
    for reason in sorted(reasons):
        print(f"  {reason}")


CASES = (pushed, pushed_in_chunks, pushed_and_killed)
