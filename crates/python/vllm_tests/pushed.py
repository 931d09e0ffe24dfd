"""Cases of push mode: the prefill side writes each layer to the decode side while it computes the next."""

from __future__ import annotations

import signal
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from bench import (
    AT_LEISURE,
    DEADLINE,
    RECOMPUTE_MAX,
    Bench,
    answer_all,
    no_block_in_use,
    prompts,
    reasons,
    wait_until_up,
    with_shared_prefix,
)
from instances import Process, administer, complete, metric, post


def pushed(bench: Bench) -> str:
    """50 prompts, 8 at a time, and 12 with a shared prefix, which the prefill side has in its cache after the first."""
    asked = prompts(50) + with_shared_prefix(12)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode = bench.instance("prefill", mode="push", **AT_LEISURE), bench.instance("decode", **AT_LEISURE)
    bench.alone(prefill, decode)
    router = bench.router([prefill], [decode])
    answers = answer_all(router.url, asked)
    told = bench.check_all(asked, answers)
    for reason in reasons(answers):
        print(f"  {reason}")
    arranged = arranged_by(router)
    assert len(told) >= 50, f"only {len(told)} of {len(asked)} prompts were handed off"
    # Until the first answer the router does not know that the prefill side pushes.
    assert arranged >= 50, f"the router arranged for {arranged} pushes"
    milliseconds = sorted(said["hand_off_ms"] for said in told)
    ways = sorted({said["transport"] for said in told})
    return (
        f"{len(asked)} of {len(asked)} prompts with the tokens of a single instance, {len(told)} handed off over {'/'.join(ways)}, {arranged} of them pushed; "
        f"median {milliseconds[len(milliseconds) // 2]:.1f} ms, the computation of the prompt included; {no_block_in_use(prefill, decode)}"
    )


def pushed_in_chunks(bench: Bench) -> str:
    """Prompts computed in pieces of 128 tokens, and among them some whose clients leave."""
    asked = prompts(20)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill = bench.instance("prefill", "--max-num-batched-tokens", "128", "--enable-chunked-prefill", mode="push")
    decode = bench.instance("decode")
    bench.alone(prefill, decode)
    router = bench.router([prefill], [decode])
    complete(router.url, asked[0])

    def leave(nth: int) -> bool:
        body = {"model": "tiny", "prompt": prompts(50)[40 + nth], "max_tokens": 500, "temperature": 0, "ignore_eos": True}
        try:
            post(f"{router.url}/v1/completions", body, 0.05 * (1 + nth))
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        leaving = [pool.submit(leave, nth) for nth in range(8)]
        answers = answer_all(router.url, asked)
        left = sum(future.result() for future in leaving)
    told = len(bench.check_all(asked, answers))
    for reason in reasons(answers):
        print(f"  {reason}")
    arranged = arranged_by(router)
    assert min(told, arranged) >= len(asked) * 3 // 4, f"{told} of {len(asked)} handed off, {arranged} pushes arranged: {reasons(answers)}"
    assert left, "nobody left in between"
    return f"{told} of {len(asked)} handed off, {arranged} pushes arranged, {left} clients left; {no_block_in_use(prefill, decode)}"


def pushed_to_other_degrees(bench: Bench) -> str:
    """Prefill on two ranks for decode on one, and the reverse. In 32 bits, in which the order of a sum does not change a token."""
    asked = prompts(10)
    bench.ask_alone([(prompt, 16) for prompt in asked], "float32")
    said = []
    for name, prefill_ranks, decode_ranks in (("2 → 1", 2, 1), ("1 → 2", 1, 2)):
        prefill = bench.instance("prefill", "--dtype", "float32", "--tensor-parallel-size", str(prefill_ranks), mode="push", **AT_LEISURE)
        decode = bench.instance("decode", "--dtype", "float32", "--tensor-parallel-size", str(decode_ranks), **AT_LEISURE)
        bench.alone(prefill, decode)
        router = bench.router([prefill], [decode])
        answers = answer_all(router.url, asked, 2)
        told = len(bench.check_all(asked, answers, "float32"))
        assert told == len(asked), f"{name}: {told} of {len(asked)} handed off: {reasons(answers)}"
        arranged = arranged_by(router)
        assert arranged >= 7, f"{name}: the router arranged for {arranged} pushes"
        said.append(f"{name}: {told} of {len(asked)} handed off, {arranged} of them pushed, all with the tokens of one rank, {no_block_in_use(prefill, decode)}")
    return "; ".join(said)


def pushed_and_killed(bench: Bench) -> str:
    """SIGKILL of the prefill side in mid-push; then a restart."""
    return _without_prefill(bench, signal.SIGKILL)


def pushed_and_stopped(bench: Bench) -> str:
    """The same with SIGSTOP: nothing is closed, nothing answers."""
    return _without_prefill(bench, signal.SIGSTOP)


def _without_prefill(bench: Bench, number: int) -> str:
    # A short one, and long ones in small chunks: when the first is answered, the others are on their way for hundreds of steps.
    # In 32 bits, in which it does not change a token in how many pieces a long prompt is computed.
    # There are so few that without the signal all would be there long before the deadline.
    asked, fresh = prompts(1, tokens=(20, 60)) + prompts(4, seed=3, tokens=(1200, 1500)), prompts(6, seed=2)
    bench.ask_alone([(prompt, 16) for prompt in asked + fresh], "float32")
    in_chunks = ("--max-num-batched-tokens", "32", "--enable-chunked-prefill")
    prefill = bench.instance("prefill", "--dtype", "float32", *in_chunks, mode="push")
    decode = bench.instance("decode", "--dtype", "float32")
    bench.alone(prefill, decode)
    router = bench.router([prefill], [decode], "--prefill-timeout", "5")
    complete(router.url, fresh[0])
    with ThreadPoolExecutor(len(asked)) as pool:
        began = time.monotonic()
        flow = [pool.submit(complete, router.url, asked[0])]
        time.sleep(0.03)
        flow += [pool.submit(complete, router.url, prompt) for prompt in asked[1:]]
        wait(flow, return_when=FIRST_COMPLETED)
        prefill.signal(number)
        answers = [future.result() for future in flow]
        took = time.monotonic() - began
    without = len(asked) - len(bench.check_all(asked, answers, "float32"))
    assert took < DEADLINE + RECOMPUTE_MAX, f"{took:.1f} s"
    assert without, "nothing was on its way when the signal came"
    for reason in reasons(answers):
        print(f"  {reason}")
    used = no_block_in_use(decode)
    failed = metric(decode.url, "vllm:weft_hand_offs_failed_total")
    prefill.kill()
    prefill.start().wait()
    wait_until_up(router, prefill)
    before = arranged_by(router)
    again = [complete(router.url, prompt) for prompt in fresh]
    resumed = len(bench.check_all(fresh, again, "float32"))
    arranged = arranged_by(router) - before
    # The first of them is in the decode side's cache already.
    assert resumed >= 5, f"{resumed} of 6 were handed off after the restart"
    assert arranged >= 5, f"{arranged} of 6 were pushed after the restart"
    return (
        f"{len(asked)} of {len(asked)} answered in {took:.1f} s, {without} of them without a hand-off, {failed:.0f} hand-offs failed on the decode side; {used}; "
        f"after the restart {resumed} of 6 handed off, {arranged} of them pushed; {no_block_in_use(prefill, decode)}"
    )


def arranged_by(router: Process) -> int:
    """How many prompts the router had pushed."""
    for line in administer(router, "/metrics").splitlines():
        if line.startswith('weft_router_requests_total{how="pushed"}'):
            return int(line.rsplit(" ", 1)[1])
    return 0


CASES = (pushed, pushed_in_chunks, pushed_and_killed, pushed_and_stopped, pushed_to_other_degrees)
