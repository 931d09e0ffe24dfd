"""What is shown, a function each. A case says in one line what it counted, or raises."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import contract as interface
from bench import (
    AT_LEISURE,
    DEADLINE,
    LEASE,
    RECOMPUTE_MAX,
    Bench,
    answer_all,
    handed_off,
    host_and_port,
    no_block_in_use,
    opened,
    prefill_only,
    prompts,
    reasons,
    resealed,
    wait_until_up,
    with_shared_prefix,
)
from instances import administer, complete, engine, metric, post, tokens_of, weft_connector
from relay import Relay
from tiny_model import make
from weft.routed import VERSION


def contract(bench: Bench) -> str:
    """The interface that is installed is the one that weft.vllm was written for."""
    verdict, moved = interface.check()
    assert not moved, "\n  ".join([verdict, *moved])
    return verdict


def same_tokens(bench: Bench) -> str:
    """50 prompts, 8 at a time, and 12 with a shared prefix."""
    asked = prompts(50) + with_shared_prefix(12)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode, router = bench.pair()
    answers = answer_all(router.url, asked)
    told = bench.check_all(asked, answers)
    ways = sorted({said["transport"] for said in told})
    assert len(told) >= 50, f"only {len(told)} of {len(asked)} prompts were handed off"
    milliseconds = sorted(said["hand_off_ms"] for said in told)
    counts = [line for line in administer(router, "/metrics").splitlines() if line.startswith("weft_router_requests")]
    print("\n".join(f"  {line}" for line in counts))
    return (
        f"{len(asked)} of {len(asked)} prompts with the tokens of a single instance, {len(told)} handed off over {'/'.join(ways)}, "
        f"median {milliseconds[len(milliseconds) // 2]:.1f} ms; {no_block_in_use(prefill, decode)}"
    )


def aborted(bench: Bench) -> str:
    """Requests whose clients leave: before the decode side is asked, and in mid-answer."""
    asked = prompts(8)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode, router = bench.pair()
    expired = metric(prefill.url, "vllm:weft_leases_expired")
    for prompt in asked[:3]:
        # The prompt is computed, and nobody comes for it: the lease frees it.
        prefill_only(prefill, prompt)
    gave_up = 0
    for nth, prompt in enumerate(asked[3:]):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
        try:
            # In prefill, in the hand-off, in decode: wherever it is by then.
            post(f"{router.url}/v1/completions", body, 0.03 * 2**nth)
        except OSError:
            gave_up += 1
    time.sleep(LEASE + 1)
    # Whatever was given up, the blocks it had hold nothing that is taken for something else now.
    bench.check_all(asked, answer_all(router.url, asked))
    used = no_block_in_use(prefill, decode)
    expired = metric(prefill.url, "vllm:weft_leases_expired") - expired
    assert gave_up >= 3, f"only {gave_up} clients left before they were answered"
    assert expired >= 3, f"{expired} leases expired"
    return f"3 prompts never fetched, {gave_up} clients gone in between; {expired:.0f} leases expired after {LEASE:.0f} s; then {len(asked)} of {len(asked)} right; {used}"


def idle(bench: Bench) -> str:
    """Two connected instances that have nothing to do use no CPU to speak of."""
    prefill, decode, router = bench.pair()
    assert handed_off(complete(router.url, prompts(1, seed=9)[0])), "nothing was handed off"
    time.sleep(3)
    before = prefill.cpu_seconds(), decode.cpu_seconds(), router.cpu_seconds()
    time.sleep(10)
    after = prefill.cpu_seconds(), decode.cpu_seconds(), router.cpu_seconds()
    used = [then - now for then, now in zip(after, before, strict=True)]
    assert max(used) < 2.0, f"CPU in 10 s: {used}"
    return f"CPU in 10 s: prefill {used[0]:.2f} s, decode {used[1]:.2f} s, router {used[2]:.2f} s"


def decode_restarted(bench: Bench) -> str:
    """The decode side killed in mid-flow: what was held for it is freed, and when it is back hand-offs go on with the same prefill side."""
    asked = prompts(8) + prompts(6, seed=2)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode, router = bench.pair()
    with ThreadPoolExecutor(8) as pool:
        flow = [pool.submit(complete, router.url, prompt) for prompt in asked[:8]]
        time.sleep(0.3)
        decode.kill()
        # The router answers by what is left where it can; a client whose answer was under way may be told of an error.
        failed = sum(future.exception() is not None for future in flow)
        for prompt, future in zip(asked, flow, strict=False):
            if future.exception() is None:
                bench.check(prompt, future.result())
    freed = no_block_in_use(prefill)
    decode.start().wait()
    wait_until_up(router, decode)
    again = answer_all(router.url, asked[8:], 2)
    resumed = len(bench.check_all(asked[8:], again))
    assert resumed == 6, f"{resumed} of 6 were handed off after the restart: {reasons(again)}"
    return f"{8 - failed} of 8 answered without it, {failed} told of an error; {freed}; after its restart {resumed} of 6 handed off"


def killed(bench: Bench) -> str:
    """SIGKILL of the prefill side between its answer and the decode side's fetch, and in mid-flow; then a restart."""
    # Those that nobody had computed. What was computed may still be read from memory that outlives its process.
    return _without_prefill(bench, signal.SIGKILL, "auto", least=4)


def stopped(bench: Bench) -> str:
    """The same with SIGSTOP: nothing is closed, nothing answers. Over TCP, because shared memory can be read of a process that stands still."""
    return _without_prefill(bench, signal.SIGSTOP, "tcp", least=8)


def _without_prefill(bench: Bench, number: int, over: str, least: int) -> str:
    """`least`: so many have to be computed by the decode side."""
    asked, later = prompts(12, seed=10 + number), prompts(6, seed=40 + number)
    bench.ask_alone([(prompt, 16) for prompt in asked + later])
    prefill, decode, router = bench.pair(over)
    # Prompts whose blocks are on the prefill side, and for which the decode side comes too late.
    origins = [prefill_only(prefill, prompt) for prompt in asked[:4]]
    with ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        flow = [pool.submit(complete, router.url, prompt) for prompt in asked[4:8]]
        time.sleep(0.1)
        prefill.signal(number)
        flow += [pool.submit(complete, router.url, prompt) for prompt in asked[8:]]
        late = [
            pool.submit(complete, decode.url, prompt, kv_transfer_params=origin)
            for prompt, origin in zip(asked[:4], origins, strict=True)
        ]
        answers = [future.result() for future in late + flow]
        took = time.monotonic() - began
    bench.check_all(asked, answers)
    assert took < DEADLINE + RECOMPUTE_MAX, f"{took:.1f} s"
    recomputed = [answer for answer in answers if handed_off(answer) is None]
    assert len(recomputed) >= least, f"only {len(recomputed)} were computed by the decode side"
    for reason in reasons(recomputed):
        print(f"  {reason}")
    used = no_block_in_use(decode)
    # It comes back at the same address, to a decode side that was never restarted.
    prefill.kill()
    prefill.start().wait()
    wait_until_up(router, prefill)
    again = answer_all(router.url, later, 1)
    resumed = len(bench.check_all(later, again))
    assert resumed == 6, f"{resumed} of 6 were handed off after the restart: {reasons(again)}"
    return (
        f"{len(answers)} of {len(asked)} answered in {took:.1f} s (deadline of a hand-off {DEADLINE:.0f} s), {len(recomputed)} computed by the decode side; "
        f"{used}; after the restart {resumed} of 6 handed off; {no_block_in_use(prefill, decode)}"
    )


def chunked_and_preempted(bench: Bench) -> str:
    """Prompts computed in pieces of 128 tokens, and a decode side with so few blocks that it preempts."""
    asked = prompts(12, seed=3, tokens=(100, 400))
    bench.ask_alone([(prompt, 300) for prompt in asked])
    prefill = bench.instance("prefill", "--max-num-batched-tokens", "128", "--enable-chunked-prefill", **AT_LEISURE)
    decode = bench.instance("decode", "--num-gpu-blocks-override", "18", **AT_LEISURE)
    bench.alone(prefill, decode)
    router = bench.router([prefill], [decode])
    answers = answer_all(router.url, asked, tokens=300)
    told = len(bench.check_all(asked, answers))
    preempted = metric(decode.url, "vllm:num_preemptions_total")
    assert preempted > 0, "nothing was preempted"
    chunks = sum(-(-len(prompt) // 128) for prompt in asked)
    return (
        f"{len(asked)} of {len(asked)} prompts with the tokens of a single instance, {told} handed off, computed in about {chunks} pieces, "
        f"{preempted:.0f} preemptions; {no_block_in_use(prefill, decode)}"
    )


def flipped(bench: Bench) -> str:
    """A bit flipped on the wire is found: what was damaged once is sent again, and what is damaged each time is computed here."""
    asked = prompts(4)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode, _ = bench.pair("tcp")
    relay: Relay | None = None
    found = 0
    # Of the first prompt nothing is damaged, of the second one chunk, of the others all.
    for prompt, damage in zip(asked, (0, 1, 1000, 1000), strict=True):
        origin = prefill_only(prefill, prompt)
        if relay is None:
            relay = Relay(host_and_port(opened(origin, prompt).addresses[0]))
        relay.damage = damage
        answer = complete(decode.url, prompt, kv_transfer_params=resealed(origin, prompt, addresses=[f"127.0.0.1:{relay.port}"]))
        bench.check(prompt, answer)
        for reason in reasons([answer]):
            print(f"  {reason}")
            found += 1
    assert relay is not None
    assert found == 2, f"{found} prompts were computed again"
    return f"{relay.damaged} chunks damaged; {found} prompts computed by the decode side, 0 of {len(asked)} served wrong; {no_block_in_use(prefill, decode)}"


def forged(bench: Bench) -> str:
    """Parameters that clients have made up, changed, heard from others or used before: the decode side believes none of them, and computes."""
    asked = prompts(8)
    bench.ask_alone([(prompt, 16) for prompt in asked])
    prefill, decode, _ = bench.pair()
    failed = metric(decode.url, "vllm:weft_hand_offs_failed_total")
    sealed = [prefill_only(prefill, prompt) for prompt in asked[:3]]
    unsealed = {"version": VERSION, **vars(opened(sealed[0], asked[0])), "lease": [0, 2**63, 60.0]}
    changed = {**sealed[0], "weft": {**sealed[0]["weft"], "origin": sealed[0]["weft"]["origin"][:-8] + "AAAAAAA="}}
    offer = {"version": VERSION, "push": {"hand_off": "mine", "addresses": unsealed["addresses"]}}
    tries = [
        ("unsealed", asked[0], {"do_remote_prefill": True, "weft": unsealed}),
        ("forged", asked[0], changed),
        ("about another", asked[3], sealed[1]),
        ("unsealed", asked[4], {"do_remote_prefill": True, "weft": offer}),
        ("", asked[2], sealed[2]),
        ("used", asked[2], sealed[2]),
    ]
    for expected, prompt, params in tries:
        answer = complete(decode.url, prompt, kv_transfer_params=params)
        bench.check(prompt, answer)
        why = reasons([answer])
        assert why == [] if not expected else [reason.startswith(f"NotBelieved({expected})") for reason in why] == [True], (expected, why)
    # What is no object at all vLLM may stumble over itself, before anybody else sees it. Where it reaches the connector, it does not end the engine.
    try:
        bench.check(asked[5], complete(decode.url, asked[5], vllm_xargs={"kv_transfer_params": "anything"}))
        refusals = 6
    except HTTPError as error:
        assert error.code == 500, error
        refusals = 5
    bench.check(asked[6], complete(decode.url, asked[6]))
    refused = metric(decode.url, "vllm:weft_hand_offs_failed_total") - failed
    assert refused == refusals, f"{refused} refusals were counted"
    used = no_block_in_use(decode)
    return f"{refusals} of {refusals} sets of parameters not believed and counted, the one that was handed off; 0 of 8 served wrong; {used}"


def other_degrees(bench: Bench) -> str:
    """Prefill on two ranks for decode on one, and the reverse. In 32 bits, in which the order of a sum does not change a token."""
    asked = prompts(10)
    bench.ask_alone([(prompt, 16) for prompt in asked], "float32")
    said = []
    for name, prefill_ranks, decode_ranks in (("2 → 1", 2, 1), ("1 → 2", 1, 2)):
        prefill = bench.instance("prefill", "--dtype", "float32", "--tensor-parallel-size", str(prefill_ranks), **AT_LEISURE)
        decode = bench.instance("decode", "--dtype", "float32", "--tensor-parallel-size", str(decode_ranks), **AT_LEISURE)
        bench.alone(prefill, decode)
        router = bench.router([prefill], [decode])
        answers = answer_all(router.url, asked, 2)
        told = sum(handed_off(answer) is not None for answer in answers)
        assert told == len(asked), f"{name}: {told} of {len(asked)} handed off: {reasons(answers)}"
        wrong = [nth for nth, answer in enumerate(answers) if tokens_of(answer) != bench.expected[str(asked[nth]), "float32"][:16]]
        assert not wrong, f"{name}: prompts {wrong} have other tokens than on one rank"
        said.append(f"{name}: {told} of {len(asked)} handed off, all with the tokens of one rank, {no_block_in_use(prefill, decode)}")
    return "; ".join(said)


def mismatched(bench: Bench) -> str:
    """Two models with different shapes refuse each other by name."""
    other = bench.model.parent / "other"
    if not (other / "config.json").exists():
        make(str(other), layers=2)
    prompt = prompts(1)[0]
    bench.ask_alone([(prompt, 16)])
    prefill = engine(sys.executable, other, "prefill", bench.logs, weft_connector(deadline=DEADLINE, lease=LEASE))
    decode = bench.instance("decode")
    bench.alone(prefill, decode)
    router = bench.router([prefill], [decode])
    answer = complete(router.url, prompt)
    bench.check(prompt, answer)
    why = reasons([answer])
    assert any("layers" in reason for reason in why), why
    print(f"  {why[0]}")
    return f"refused, and computed by the decode side; {no_block_in_use(prefill, decode)}"


# Those that share their instances come first and together.
CASES: dict[str, Callable[[Bench], str]] = {
    case.__name__: case
    for case in (
        contract,
        same_tokens,
        aborted,
        idle,
        decode_restarted,
        killed,
        stopped,
        flipped,
        forged,
        chunked_and_preempted,
        other_degrees,
        mismatched,
    )
}
# What a single instance is asked before them, so that it need not be started for each.
ASKED = [(prompt, 16) for prompt in prompts(50) + with_shared_prefix(12) + prompts(6, seed=2)]
ASKED += [(prompt, 16) for number in (signal.SIGKILL, signal.SIGSTOP) for prompt in prompts(12, seed=10 + number) + prompts(6, seed=40 + number)]
ASKED += [(prompt, 300) for prompt in prompts(12, seed=3, tokens=(100, 400))]
