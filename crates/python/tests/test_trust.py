"""What is believed of the parameters that routers and clients bring, with the real seals and with requests like those of vLLM."""

import base64
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import weft
from pair import SECRET
from weft import routed
from weft.hand_off import Desk, Lease, Origin, Push
from weft.routed import KEY, VERSION, NotHandedOff, answer
from weft.vllm._subject import subject

SETTINGS = {"secret": SECRET, "listen": "127.0.0.1:0"}


def desk(secret=SECRET):
    return Desk(**{**SETTINGS, "secret": secret})


def request(tokens=(1, 2, 3), params=None, **more):
    made = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    return SimpleNamespace(request_id="r", prompt_token_ids=list(tokens), kv_transfer_params=params, **{**made, **more})


def origin(**changed):
    made = {"hand_off": "held", "addresses": ["tcp:127.0.0.1:1"], "blocks": [3, 4], "tokens": 3, "lease": Lease(7, time.time_ns(), 60.0)}
    return Origin(**{**made, **changed})


def params(asked, mode="pull", secret=SECRET, **changed):
    """As a prefill side that was asked the same would answer."""
    return answer(desk(secret), origin(**changed), subject(asked), mode)


def wanted(at, asked):
    return routed.wanted(at, asked.kv_transfer_params, subject(asked), getattr(asked, "abort_immediately", False))


def pushed(asked):
    return routed.pushed(asked.kv_transfer_params, subject(asked))


def cause(asked, at=None):
    with pytest.raises(NotHandedOff) as refused:
        wanted(at or desk(), asked)
    return refused.value.cause


def test_what_the_prefill_side_sealed_is_believed():
    asked = request()
    asked.kv_transfer_params = json.loads(json.dumps(params(asked)))
    believed = wanted(desk(), asked)
    assert (believed.addresses, believed.blocks, believed.tokens) == (["tcp:127.0.0.1:1"], [3, 4], 3)
    assert (believed.lease.slot, believed.hand_off) == (7, "held")


def test_parameters_that_nobody_sealed_are_refused():
    """As clients could write them, when nothing was sealed: addresses, blocks and a stamp that no lease ever passes."""
    written = {"version": VERSION, "hand_off": "r", "addresses": ["tcp:10.0.0.1:1"], "blocks": [0, 1], "tokens": 3, "lease": [0, 2**63, 60.0]}
    assert cause(request(params={"do_remote_prefill": True, KEY: written})) == "NotBelieved(unsealed)"
    assert cause(request(params={"do_remote_prefill": True})) == "NotBelieved(unsealed)"
    push = {"version": VERSION, "push": {"hand_off": "h", "addresses": ["tcp:10.0.0.1:1"]}}
    assert cause(request(params={"do_remote_prefill": True, KEY: push})) == "NotBelieved(unsealed)"


@pytest.mark.parametrize("anything", ["x", 7, ["do_remote_prefill"], 0.5])
def test_parameters_that_are_no_object_do_not_end_the_engine(anything):
    """vLLM takes what a client calls `vllm_xargs` for parameters too, strings and numbers among it."""
    assert cause(request(params=anything)) == "NotBelieved(malformed)"


def test_forged_by_another_secret():
    asked = request()
    asked.kv_transfer_params = params(asked, secret="a secret of somebody else")
    assert cause(asked) == "NotBelieved(forged)"


def test_every_altered_byte_is_found():
    asked, ours = request(), desk()
    sealed = params(asked)
    raw = base64.b64decode(sealed[KEY]["origin"])
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 0x40
        sealed[KEY]["origin"] = base64.b64encode(altered).decode()
        asked.kv_transfer_params = sealed
        assert cause(asked, ours) == "NotBelieved(forged)"
    for text in ("", "?", "A" * 7, "ü", "\ud800", "A" * (routed.TEXT_MAX + 1)):
        sealed[KEY]["origin"] = text
        assert cause(asked, ours) == "NotBelieved(malformed)"


def test_words_beside_the_seal_mean_nothing():
    asked = request()
    asked.kv_transfer_params = params(asked)
    asked.kv_transfer_params[KEY].update(addresses=["tcp:10.0.0.1:1"], blocks=[9], lease=[0, 2**63, 1e9], subject="another")
    assert wanted(desk(), asked).blocks == [3, 4]


def test_expired():
    asked = request()
    asked.kv_transfer_params = params(asked, lease=Lease(7, time.time_ns(), 0.01))
    time.sleep(0.02)
    assert cause(asked) == "NotBelieved(expired)"


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": (1, 2, 4)},
        {"tokens": (1, 2)},
        {"cache_salt": "theirs"},
        {"lora_request": SimpleNamespace(lora_name="theirs")},
        {"mm_features": [SimpleNamespace(mm_hash="picture", identifier="i", mm_position=SimpleNamespace(offset=0, length=2))]},
    ],
)
def test_replayed_for_another_request(other):
    """One that has heard what another user's request was asked with gets none of that user's KV cache by it."""
    theirs, mine = request(**other), request()
    mine.kv_transfer_params = params(theirs)
    assert cause(mine) == "NotBelieved(about another)"


def test_used_twice():
    asked, ours = request(), desk()
    asked.kv_transfer_params = params(asked)
    assert wanted(ours, asked) is not None
    assert cause(asked, ours) == "NotBelieved(used)"


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": Lease(7, 2**63, 60.0)},
        {"lease": Lease(7, time.time_ns() + 3600 * 10**9, 60.0)},
        {"lease": Lease(1 << 16, 1, 60.0)},
        {"lease": Lease(7, 1, 100_000.0)},
        {"addresses": []},
        {"addresses": [""]},
        {"tokens": 1 << 40},
        {"hand_off": ""},
        {"hand_off": "x" * 65},
    ],
)
def test_what_makes_no_sense_is_refused_whoever_sealed_it(wrong):
    asked = request()
    asked.kv_transfer_params = params(asked, **wrong)
    assert cause(asked) == "NotBelieved(malformed)"


def test_a_prompt_that_is_not_only_tokens_is_not_handed_off():
    asked = request(prompt_embeds=object())
    assert subject(asked) is None
    asked.kv_transfer_params = params(request())
    assert cause(asked) == "NotTokens"


def test_an_offer_to_push_is_sealed_too():
    asked = request()
    said = params(asked, mode="push")[KEY]
    assert said["mode"] == "push" and said["offer_seconds"] > 0

    def arranged(offer, hand_off="one"):
        push = {"hand_off": hand_off, "offer": offer, "addresses": ["tcp:10.0.0.1:1"]}
        return request(params={"do_remote_prefill": True, KEY: {"version": VERSION, "push": push}})

    ours = desk()
    assert wanted(ours, arranged(said["offer"])) == Push("one", ["tcp:127.0.0.1:1"])
    assert cause(arranged(said["offer"]), ours) == "NotBelieved(used)"
    # An origin is no offer, nor an offer an origin.
    assert cause(arranged(said["origin"])) == "NotBelieved(forged)"
    asked.kv_transfer_params = {"do_remote_prefill": True, KEY: {"version": VERSION, "origin": said["offer"]}}
    assert cause(asked) == "NotBelieved(forged)"
    for name in ("", "x" * 65, "ü", "\ud800", 7, None):
        assert cause(arranged(said["offer"], name)) == "NotBelieved(malformed)"


def test_the_prefill_side_takes_nothing_but_a_name():
    push = {"version": VERSION, "push": {"hand_off": "one"}}
    assert pushed(request(params={"do_remote_decode": True, KEY: push})) == "one"
    assert pushed(request(params={"do_remote_decode": True})) is None
    assert pushed(request(params={KEY: push})) is None
    with pytest.raises(NotHandedOff, match="NotTokens"):
        pushed(request(params={"do_remote_decode": True, KEY: push}, prompt_embeds=object()))
    for wrong in ([], "one", {"hand_off": 1 << 70}):
        with pytest.raises(NotHandedOff):
            pushed(request(params={"do_remote_decode": True, KEY: {"version": VERSION, "push": wrong}}))


def test_another_version_is_named():
    asked = request(params={"do_remote_prefill": True, KEY: {"version": 2}})
    with pytest.raises(NotHandedOff, match="^Version: the other side speaks version 2"):
        wanted(desk(), asked)


def test_one_that_is_given_up_before_it_began_is_released():
    """vLLM puts such a request in with a prompt of its own, so that what is held for it can be given back."""
    refused = request(tokens=(0,), abort_immediately=True)
    refused.kv_transfer_params = params(request())
    assert wanted(desk(), refused).hand_off == "held"
    refused.kv_transfer_params[KEY]["subject"] = "\ud800"
    assert cause(refused) == "NotBelieved(about another)"


def test_a_router_without_a_prefill_side_says_so():
    """Its words go to logs and answers: what a client has written in their place is short, and nothing but characters."""
    assert wanted(desk(), request(params={KEY: {"version": VERSION}})) is None
    with pytest.raises(NotHandedOff, match="^NoPrefill: no prefill instance is up$"):
        wanted(desk(), request(params={KEY: {"without": "no prefill instance is up"}}))
    with pytest.raises(NotHandedOff) as refused:
        wanted(desk(), request(params={KEY: {"without": "\ud800ü" * 1000}}))
    assert refused.value.cause == "NoPrefill"
    assert refused.value.reason.isascii() and len(refused.value.reason) <= routed.REASON_MAX


def test_a_desk_needs_the_settings_of_agents():
    with pytest.raises(weft.SettingsError):
        Desk(sekret=SECRET)
    ours = desk()
    lease = ours.lease(60.0)
    assert lease.seconds == 60.0 and lease.stamp % 2 == 0
    held = replace(origin(), lease=lease)
    assert desk().open(ours.write(held, b"about"), b"about") == held
    ours.give_back(lease)
    assert ours.lease(1.0).slot == lease.slot


def test_a_seal_is_of_its_label_and_its_secret():
    mine = weft.Seal("label", secret=SECRET)
    sealed = mine.close(b"words", b"about", 60)
    assert mine.open(sealed, b"about") == b"words"
    for other, about, why in (
        (weft.Seal("another", secret=SECRET), b"about", "forged"),
        (weft.Seal("label", secret="a secret of others"), b"about", "forged"),
        (mine, b"something else", "about another"),
    ):
        with pytest.raises(weft.NotBelieved) as refused:
            other.open(sealed, about)
        assert refused.value.reason == why
    with pytest.raises(weft.NotBelieved) as refused:
        mine.open(b"", b"")
    assert refused.value.reason == "malformed"
    with pytest.raises(weft.SettingsError):
        weft.Seal("label", sekret=SECRET)
