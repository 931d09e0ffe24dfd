"""By which two engines know that they were asked for the same KV cache."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from typing import Any


def subject(request: Any) -> str | None:
    """A digest of everything that the KV cache of a request's prompt depends on. `None` where that cannot be told."""
    tokens = request.prompt_token_ids
    if not tokens or request.prompt_embeds is not None:
        return None
    pictures = [[one.mm_hash or one.identifier, one.mm_position.offset, one.mm_position.length] for one in request.mm_features or ()]
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    around = json.dumps([len(tokens), pictures, adapter, request.cache_salt], separators=(",", ":")).encode()
    packed = array("q", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    # Tokens last, of which it is known how many there are, so that no two requests run together into the same bytes.
    return hashlib.sha256(around + packed.tobytes()).hexdigest()
