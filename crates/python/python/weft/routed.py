"""Hand-offs between engines behind a router: what one engine tells another through strangers, and what of it is believed.

A request is asked for with parameters, an object in JSON that routers pass on (`weft serve router` does) and that clients may have written. Whoever carries it may want another
user's KV cache, so that nothing in it is believed that is not under the seal of somebody who has the agents' secret (`weft.hand_off.Desk`): where a prompt is, for this very
prompt and for as long as its lease; and where the agents of an engine that pushes are, for a few minutes, since a router asks both sides at once for such a prompt.
"""

from __future__ import annotations

import base64
from typing import Any

from ._errors import NotBelieved
from .hand_off import Desk, Origin, Push

__all__ = ["KEY", "VERSION", "NotHandedOff", "answer", "pushed", "wanted"]

# Raised with every change of what is said here, or of what a description of a cache means.
VERSION = 4
# The key under which parameters hold what is said here.
KEY = "weft"
# So long an offer to push is good for. A router has a new one with every answer.
OFFER_SECONDS = 300.0
# Names of hand-offs, sealed words as text (no longer than what a seal accepts), and what is told of why there was no hand-off.
NAME_MAX = 64
TEXT_MAX = 6 << 20
REASON_MAX = 400


class NotHandedOff(Exception):
    """Why the prompt of a request is not handed off: in a word, for those who count, and in a sentence."""

    def __init__(self, cause: str, reason: str) -> None:
        # Some of it may be a client's words.
        self.cause, self.reason = cause, reason.encode("ascii", "backslashreplace").decode()[:REASON_MAX]
        super().__init__(f"{self.cause}: {self.reason}")


def answer(desk: Desk, origin: Origin, about: str, mode: str) -> dict[str, Any]:
    """What a router is answered by who holds a prompt, and asks the reader with. `mode`: "push" where the holder offers to push the next one, or "pull". Raises
    `weft.NotBelieved` where there are too many blocks for a seal."""
    # The subject is believed only where a request that never began is given up. Others compute it themselves.
    said = {"version": VERSION, "mode": mode, "subject": about, "origin": _text(desk.write(origin, about.encode()))}
    if mode == "push":
        said |= {"offer": _text(desk.offer(origin.addresses, OFFER_SECONDS)), "offer_seconds": OFFER_SECONDS}
    return {"do_remote_prefill": True, "do_remote_decode": False, KEY: said}


def wanted(desk: Desk, params: Any, about: str | None, given_up: bool = False) -> Origin | Push | None:
    """Where the prompt of a request comes from, if it comes from elsewhere. Raises `NotHandedOff` where it was to and does not.

    `about` is all that its KV cache depends on, as the engine sees it; nothing, where that cannot be told. Of a request that is only `given_up` it may be unknown.
    """
    if params and not isinstance(params, dict):
        raise _malformed("the parameters of the hand-off are no object")
    said = params.get(KEY) if params else None
    if not params or not params.get("do_remote_prefill"):
        if isinstance(said, dict) and isinstance(said.get("without"), str):
            raise NotHandedOff("NoPrefill", said["without"])
        return None
    said = _said(said)
    if given_up and isinstance(said.get("subject"), str):
        about = said["subject"]
    if about is None:
        raise _untold()
    try:
        if "push" not in said:
            return desk.open(_sealed(said.get("origin")), about.encode(errors="replace"))
        name = _name(said["push"])
        return desk.open_offer(_sealed(said["push"].get("offer")), name, OFFER_SECONDS)
    except NotBelieved as error:
        raise NotHandedOff(f"NotBelieved({error.reason})", str(error)) from error


def pushed(params: Any, about: str | None) -> str | None:
    """The name under which the prompt of a request, computed here, is to be pushed. Nothing else is believed of whoever asks for it."""
    said = params.get(KEY) if isinstance(params, dict) and params.get("do_remote_decode") else None
    if not isinstance(said, dict) or "push" not in said:
        return None
    if about is None:
        raise _untold()
    return _name(_said(said)["push"])


def _said(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise NotHandedOff("NotBelieved(unsealed)", "the request asks for a remote prefill, but says nothing of where it is")
    if said.get("version") != VERSION:
        raise NotHandedOff("Version", f"the other side speaks version {said.get('version')!r} of the hand-off, this side {VERSION}")
    return said


def _name(push: Any) -> str:
    name = push.get("hand_off") if isinstance(push, dict) else None
    if not isinstance(name, str) or not name.isascii() or not 0 < len(name) <= NAME_MAX:
        raise _malformed("the name of the hand-off cannot be read")
    return name


def _sealed(text: Any) -> bytes:
    if not isinstance(text, str):
        raise NotHandedOff("NotBelieved(unsealed)", "the parameters of the hand-off are not sealed")
    try:
        return base64.b64decode(text if len(text) <= TEXT_MAX else "?", validate=True)
    except ValueError as error:
        raise _malformed("the parameters of the hand-off cannot be read") from error


def _text(sealed: bytes) -> str:
    return base64.b64encode(sealed).decode()


def _untold() -> NotHandedOff:
    return NotHandedOff("NotTokens", "the prompt of the request is not made of tokens alone")


def _malformed(reason: str) -> NotHandedOff:
    return NotHandedOff("NotBelieved(malformed)", reason)
