"""What one engine tells another about a prompt through routers and clients, and what of it is believed.

Whoever carries these words may want another user's KV cache, so that nothing in them is believed that is not under the seal of somebody who has the
agents' secret. Where a prompt is (`Origin`) is sealed by the prefill side for this very prompt and for as long as its lease; where the
prefill side's agents are (`offer`) for a few minutes, since the router asks both sides at once for a prompt that is pushed. Every check that
the decode side makes is in `Trust`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import weft

from ._description import VERSION, Mismatch

logger = logging.getLogger(__name__)

# The key under which a request's parameters hold what is said here.
KEY = "weft"

# How many requests an engine can hold for others at a time.
SLOTS = 1 << 16

# So long an offer to push is good for. The router has a new one with every answer.
OFFER_SECONDS = 300.0

# No engine has more workers, and no prompt more blocks or tokens.
ADDRESSES_MAX = 4096
BLOCKS_MAX = 1 << 22
TOKENS_MAX = 1 << 32
HAND_OFF_MAX = 64

# Sealed words as text: no longer than what a seal accepts.
TEXT_MAX = 6 << 20

# So many hand-offs are remembered, that none is used twice.
USED_MAX = 1 << 16

# What is not believed is logged once a reason and so many seconds.
LOG_SECONDS = 60.0


class NotBelieved(Mismatch):
    """Parameters that were not sealed for this request, and what is wrong with them: forged, expired, about another, malformed, used or
    unsealed."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason

    @property
    def failure(self) -> str:
        """As hand-offs that failed are counted."""
        return f"NotBelieved({self.reason}): {self}"


@dataclass(frozen=True)
class Lease:
    """The right to read a request's blocks: as long as the word in the slot is not past the stamp, the bytes are the request's."""

    slot: int
    stamp: int
    seconds: float


@dataclass(frozen=True)
class Origin:
    """Where the KV cache of a prompt is to be had."""

    engine: str
    request: str
    addresses: list[str]
    blocks: list[int]
    tokens: int
    lease: Lease
    # The name of this hand-off alone.
    hand_off: str = ""

    def to_words(self) -> bytes:
        lease = [self.lease.slot, self.lease.stamp, self.lease.seconds]
        said = {
            "engine": self.engine, "request": self.request, "addresses": self.addresses, "blocks": self.blocks, "tokens": self.tokens,
            "lease": lease, "hand_off": self.hand_off,
        }  # fmt: skip
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def from_words(cls, words: bytes, now_ns: int) -> Origin:
        """Raises `NotBelieved` for what no prefill side says, whoever has sealed it."""
        try:
            said = json.loads(words)
            slot, stamp, seconds = said["lease"]
            lease = Lease(_number(slot, SLOTS), _number(stamp, 1 << 63), float(seconds))
            origin = cls(
                _name(said["engine"]),
                _name(said["request"]),
                _addresses(said["addresses"]),
                [_number(block, BLOCKS_MAX) for block in _list(said["blocks"], BLOCKS_MAX)],
                _number(said["tokens"], TOKENS_MAX),
                lease,
                _name(said["hand_off"], HAND_OFF_MAX),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise NotBelieved("malformed", f"the origin of a prompt cannot be read: {error!r}") from error
        # A stamp is the time at which blocks were held. One of a later time would outlive every lease.
        if not 0 < lease.seconds <= 1e6 or lease.stamp > now_ns + int(1e9 * lease.seconds):
            raise NotBelieved("malformed", "the lease of a prompt makes no sense")
        return origin


@dataclass(frozen=True)
class Push:
    """A hand-off that was arranged beforehand: both sides are asked with its name, and the decode side with where the prefill side is."""

    hand_off: str
    addresses: list[str]


class Seals:
    """What the prefill side hands out. Settings are those of its agents."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._origin = weft.Seal("vllm: where a prompt is", **settings)
        self._offer = weft.Seal("vllm: who pushes prompts", **settings)

    def params(self, origin: Origin, subject: str, mode: str) -> dict[str, Any]:
        """What the router is answered, and the decode side is asked with. Raises `weft.NotBelieved` where there are too many blocks for a seal."""
        named = replace(origin, hand_off=os.urandom(16).hex())
        said: dict[str, Any] = {
            "version": VERSION,
            "mode": mode,
            # Believed only where a request that never began is given up. Others compute it themselves.
            "subject": subject,
            "origin": _text(self._origin.close(named.to_words(), subject.encode(), origin.lease.seconds)),
        }
        if mode == "push":
            # For the router, which may arrange for the next prompt to be pushed.
            words = json.dumps({"addresses": origin.addresses}, separators=(",", ":")).encode()
            said["offer"] = _text(self._offer.close(words, b"", OFFER_SECONDS))
            said["offer_seconds"] = OFFER_SECONDS
        return {"do_remote_prefill": True, "do_remote_decode": False, KEY: said}

    def open_origin(self, text: Any, subject: str) -> Origin:
        return Origin.from_words(_opened(self._origin, text, subject.encode()), time.time_ns())

    def open_offer(self, text: Any) -> list[str]:
        words = _opened(self._offer, text, b"")
        try:
            return _addresses(json.loads(words)["addresses"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise NotBelieved("malformed", f"an offer to push cannot be read: {error!r}") from error


class Trust:
    """What a scheduler believes of the parameters of requests. What it does not believe is counted, logged, and computed here."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.seals = Seals(settings)
        # Names of hand-offs that a request has come with, and until when somebody may come with them again.
        self._used: OrderedDict[str, float] = OrderedDict()
        # Failures since they were last asked for, and when each reason was logged and how often it was not.
        self._failures: dict[str, int] = {}
        self._logged: dict[str, tuple[float, int]] = {}

    def wanted(self, request: Any) -> Origin | Push | None:
        """Where the prompt of a request comes from, if it comes from elsewhere. Raises `Mismatch` where that cannot be."""
        params = parameters(request)
        if request.kv_transfer_params and not params:
            raise NotBelieved("malformed", "the parameters of the hand-off are no object")
        if not params.get("do_remote_prefill"):
            return None
        said = _said(params)
        about = subject(request)
        if getattr(request, "abort_immediately", False) and isinstance(said.get("subject"), str):
            # It is only given up: vLLM refused it before it had read the prompt.
            about = said["subject"]
        if about is None:
            raise Mismatch("the prompt of the request is not made of tokens alone")
        if "push" in said:
            push = _push(said)
            arranged = Push(push.hand_off, self.seals.open_offer(said["push"].get("offer")))
            self._use(arranged.hand_off, OFFER_SECONDS)
            return arranged
        origin = self.seals.open_origin(said.get("origin"), about)
        self._use(origin.hand_off, origin.lease.seconds)
        return origin

    def pushed(self, request: Any) -> str | None:
        """The name under which the prompt of a request, computed here, is to be pushed. Nothing else is believed of whoever asks for it."""
        params = parameters(request)
        if not params.get("do_remote_decode") or not isinstance(params.get(KEY), dict) or "push" not in params[KEY]:
            return None
        return _push(_said(params)).hand_off

    def doubt(self, request: str, mismatch: Mismatch) -> str:
        """Counts a request whose prompt is computed here, and says as what."""
        failure = mismatch.failure if isinstance(mismatch, NotBelieved) else f"Mismatch: {mismatch}"
        kind = failure.partition(":")[0]
        self._failures[kind] = self._failures.get(kind, 0) + 1
        now = time.monotonic()
        logged, missed = self._logged.get(kind, (-LOG_SECONDS, 0))
        if now - logged >= LOG_SECONDS:
            others = f" (and {missed} before it for the same reason)" if missed else ""
            logger.error("weft: request %s is computed here: %s%s", request, failure, others)
            self._logged[kind] = (now, 0)
        else:
            self._logged[kind] = (logged, missed + 1)
        return failure

    def failures(self) -> dict[str, int]:
        """By kind, since the last time."""
        failures, self._failures = self._failures, {}
        return failures

    def _use(self, hand_off: str, seconds: float) -> None:
        now = time.monotonic()
        while self._used and (len(self._used) >= USED_MAX or next(iter(self._used.values())) < now):
            self._used.popitem(last=False)
        if hand_off in self._used:
            raise NotBelieved("used", "another request has come with the same parameters before")
        self._used[hand_off] = now + seconds


def parameters(request: Any) -> dict[str, Any]:
    """What a request was asked with. Clients may have put anything there."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def subject(request: Any) -> str | None:
    """By which both sides know that they were asked for the same KV cache: everything that it depends on. `None` where that cannot be told."""
    tokens = request.prompt_token_ids
    if not tokens or request.prompt_embeds is not None:
        return None
    pictures = [
        [feature.mm_hash or feature.identifier, feature.mm_position.offset, feature.mm_position.length] for feature in request.mm_features or ()
    ]
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    around = json.dumps([len(tokens), pictures, adapter, request.cache_salt], separators=(",", ":")).encode()
    packed = array("q", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    # Tokens last, of which it is known how many there are, so that no two requests run together into the same bytes.
    return hashlib.sha256(around + packed.tobytes()).hexdigest()


def _said(params: dict[str, Any]) -> dict[str, Any]:
    said = params.get(KEY)
    if not isinstance(said, dict):
        raise NotBelieved("unsealed", "the request asks for a remote prefill, but says nothing of where it is")
    if said.get("version") != VERSION:
        raise Mismatch(f"the other side speaks version {said.get('version')!r} of the hand-off, this side {VERSION}")
    return said


def _push(said: dict[str, Any]) -> Push:
    push = said["push"]
    try:
        return Push(_name(push["hand_off"], HAND_OFF_MAX), [])
    except (KeyError, TypeError, ValueError) as error:
        raise NotBelieved("malformed", f"the name of the hand-off cannot be read: {error!r}") from error


def _opened(seal: weft.Seal, text: Any, about: bytes) -> bytes:
    if not isinstance(text, str):
        raise NotBelieved("unsealed", "the parameters of the hand-off are not sealed")
    if len(text) > TEXT_MAX:
        raise NotBelieved("malformed", "the parameters of the hand-off are too long")
    try:
        return seal.open(base64.b64decode(text, validate=True), about)
    except weft.NotBelieved as error:
        raise NotBelieved(error.reason, str(error)) from error
    except (binascii.Error, ValueError) as error:
        raise NotBelieved("malformed", f"the parameters of the hand-off cannot be read: {error!r}") from error


def _text(sealed: bytes) -> str:
    return base64.b64encode(sealed).decode()


def _number(value: Any, end: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a number below {end}")
    return value


def _name(value: Any, longest: int = 1024) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ValueError("a name is missing, or too long")
    return value


def _list(value: Any, longest: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise ValueError("a list is missing, or too long")
    return value


def _addresses(value: Any) -> list[str]:
    addresses = [_name(address, 4096) for address in _list(value, ADDRESSES_MAX)]
    if not addresses:
        raise ValueError("there is no address")
    return addresses
