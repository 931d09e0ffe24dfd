"""What weft.vllm believes of the parameters that routers and clients bring, with the real seals and without an engine."""

import base64
import json
import logging
import time
from types import SimpleNamespace

import pytest

import weft
from pair import SECRET
from weft.vllm import _origin
from weft.vllm._description import VERSION, Mismatch
from weft.vllm._origin import KEY, Lease, NotBelieved, Origin, Push, Seals, Trust, subject

SETTINGS = {"secret": SECRET, "listen": "127.0.0.1:0"}


def request(tokens=(1, 2, 3), params=None, **more):
    made = {"prompt_embeds": None, "mm_features": [], "lora_request": None, "cache_salt": None}
    return SimpleNamespace(request_id="r", prompt_token_ids=list(tokens), kv_transfer_params=params, **{**made, **more})


def origin(**changed):
    made = {
        "engine": "e", "request": "held", "addresses": ["tcp:127.0.0.1:1"], "blocks": [3, 4], "tokens": 3,
        "lease": Lease(7, time.time_ns(), 60.0),
    }  # fmt: skip
    return Origin(**{**made, **changed})


def params(asked, mode="pull", secret=SECRET, **changed):
    """As a prefill side that was asked the same would answer."""
    return Seals({**SETTINGS, "secret": secret}).params(origin(**changed), subject(asked), mode)


def reason(asked):
    with pytest.raises(NotBelieved) as refused:
        Trust(SETTINGS).wanted(asked)
    return refused.value.reason


def test_what_the_prefill_side_sealed_is_believed():
    asked = request()
    asked.kv_transfer_params = json.loads(json.dumps(params(asked)))
    believed = Trust(SETTINGS).wanted(asked)
    assert (believed.addresses, believed.blocks, believed.tokens) == (["tcp:127.0.0.1:1"], [3, 4], 3)
    assert believed.lease.slot == 7 and len(believed.hand_off) == 32


def test_parameters_that_nobody_sealed_are_refused():
    """As clients could write them, when nothing was sealed: addresses, blocks and a stamp that no lease ever passes."""
    written = {
        "version": VERSION, "engine": "e", "request": "r", "addresses": ["tcp:10.0.0.1:1"], "blocks": [0, 1], "tokens": 3,
        "lease": [0, 2**63, 60.0],
    }  # fmt: skip
    assert reason(request(params={"do_remote_prefill": True, KEY: written})) == "unsealed"
    assert reason(request(params={"do_remote_prefill": True})) == "unsealed"
    push = {"version": VERSION, "push": {"hand_off": "h", "addresses": ["tcp:10.0.0.1:1"]}}
    assert reason(request(params={"do_remote_prefill": True, KEY: push})) == "unsealed"


@pytest.mark.parametrize("anything", ["x", 7, ["do_remote_prefill"], 0.5])
def test_parameters_that_are_no_object_do_not_end_the_engine(anything):
    """vLLM takes what a client calls `vllm_xargs` for parameters too, strings and numbers among it."""
    assert reason(request(params=anything)) == "malformed"


def test_forged_by_another_secret():
    asked = request()
    asked.kv_transfer_params = params(asked, secret="a secret of somebody else")
    assert reason(asked) == "forged"


def test_every_altered_byte_is_found():
    asked = request()
    sealed = params(asked)
    raw = base64.b64decode(sealed[KEY]["origin"])
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 0x40
        sealed[KEY]["origin"] = base64.b64encode(altered).decode()
        asked.kv_transfer_params = sealed
        assert reason(asked) == "forged"
    for text in ("", "?", "A" * 7, "ü", "A" * (_origin.TEXT_MAX + 1)):
        sealed[KEY]["origin"] = text
        assert reason(asked) == "malformed"


def test_words_beside_the_seal_mean_nothing():
    asked = request()
    asked.kv_transfer_params = params(asked)
    asked.kv_transfer_params[KEY].update(addresses=["tcp:10.0.0.1:1"], blocks=[9], lease=[0, 2**63, 1e9], subject="another")
    assert Trust(SETTINGS).wanted(asked).blocks == [3, 4]


def test_expired():
    asked = request()
    asked.kv_transfer_params = params(asked, lease=Lease(7, time.time_ns(), 0.01))
    time.sleep(0.02)
    assert reason(asked) == "expired"


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
    assert reason(mine) == "about another"


def test_used_twice():
    asked = request()
    asked.kv_transfer_params = params(asked)
    trust = Trust(SETTINGS)
    assert trust.wanted(asked) is not None
    with pytest.raises(NotBelieved) as refused:
        trust.wanted(asked)
    assert refused.value.reason == "used"


def test_what_was_used_is_forgotten_with_its_lease_and_bounded(monkeypatch):
    trust = Trust(SETTINGS)
    asked = request()
    monkeypatch.setattr(_origin, "USED_MAX", 4)
    for _ in range(9):
        asked.kv_transfer_params = params(asked)
        trust.wanted(asked)
    assert len(trust._used) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": Lease(7, 2**63, 60.0)},
        {"lease": Lease(7, 2**63 - 1, 60.0)},
        {"lease": Lease(1 << 16, 1, 60.0)},
        {"lease": Lease(-1, 1, 60.0)},
        {"lease": Lease(7, True, 60.0)},
        {"addresses": []},
        {"addresses": [7]},
        {"blocks": [-1]},
        {"blocks": [1.5]},
        {"blocks": "34"},
        {"tokens": -1},
        {"engine": ""},
    ],
)
def test_what_makes_no_sense_is_refused_whoever_sealed_it(wrong):
    asked = request()
    asked.kv_transfer_params = params(asked, **wrong)
    assert reason(asked) == "malformed"


def test_a_prompt_that_is_not_only_tokens_is_not_handed_off():
    asked = request(prompt_embeds=object())
    assert subject(asked) is None
    asked.kv_transfer_params = params(request())
    with pytest.raises(Mismatch, match="tokens alone"):
        Trust(SETTINGS).wanted(asked)


def test_an_offer_to_push_is_sealed_too():
    asked = request()
    said = params(asked, mode="push")[KEY]
    assert said["mode"] == "push" and said["offer_seconds"] > 0

    def arranged(offer, hand_off="one"):
        push = {"hand_off": hand_off, "offer": offer, "addresses": ["tcp:10.0.0.1:1"]}
        return request(params={"do_remote_prefill": True, KEY: {"version": VERSION, "push": push}})

    trust = Trust(SETTINGS)
    assert trust.wanted(arranged(said["offer"])) == Push("one", ["tcp:127.0.0.1:1"])
    with pytest.raises(NotBelieved, match="came|come"):
        trust.wanted(arranged(said["offer"]))
    # An origin is no offer, nor an offer an origin.
    assert reason(arranged(said["origin"])) == "forged"
    asked.kv_transfer_params = {"do_remote_prefill": True, KEY: {"version": VERSION, "origin": said["offer"]}}
    assert reason(asked) == "forged"
    for name in ("", "x" * 65, 7, None):
        assert reason(arranged(said["offer"], name)) == "malformed"


def test_the_prefill_side_takes_nothing_but_a_name():
    trust = Trust(SETTINGS)
    push = {"version": VERSION, "push": {"hand_off": "one"}}
    assert trust.pushed(request(params={"do_remote_decode": True, KEY: push})) == "one"
    assert trust.pushed(request(params={"do_remote_decode": True})) is None
    assert trust.pushed(request(params={KEY: push})) is None
    for wrong in ([], "one", {"hand_off": 1 << 70}):
        with pytest.raises(NotBelieved):
            trust.pushed(request(params={"do_remote_decode": True, KEY: {"version": VERSION, "push": wrong}}))


def test_another_version_is_named():
    asked = request(params={"do_remote_prefill": True, KEY: {"version": 2}})
    with pytest.raises(Mismatch, match="speaks version 2"):
        Trust(SETTINGS).wanted(asked)


def test_one_that_is_given_up_before_it_began_is_released():
    """vLLM puts such a request in with a prompt of its own, so that what is held for it can be given back."""
    refused = request(tokens=(0,), abort_immediately=True)
    refused.kv_transfer_params = params(request())
    assert Trust(SETTINGS).wanted(refused).request == "held"


def test_what_is_not_believed_is_counted_and_logged_once(caplog):
    trust = Trust(SETTINGS)
    asked = request()
    with caplog.at_level(logging.ERROR):
        for nth in range(5):
            asked.kv_transfer_params = params(asked, secret=f"a secret of somebody else {nth}")
            with pytest.raises(NotBelieved) as refused:
                trust.wanted(asked)
            assert trust.doubt("r", refused.value).startswith("NotBelieved(forged): ")
        trust.doubt("r", Mismatch("versions"))
    assert trust.failures() == {"NotBelieved(forged)": 5, "Mismatch": 1}
    assert trust.failures() == {}
    assert [record.message.partition(":")[2][:40] for record in caplog.records] == [
        " request r is computed here: NotBelieved",
        " request r is computed here: Mismatch: v",
    ]


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
