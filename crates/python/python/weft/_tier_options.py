"""What tiers of engines are told beside what the engine tells them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

import weft

_Options = TypeVar("_Options")

# Another owner of the directory may be on its way out when an engine is restarted.
OWNER_GOES_WITHIN = 15.0


def parse(kind: type[_Options], given: Mapping[str, Any], who: str) -> _Options:
    """Options of a data class: those without a default have to be there, and unknown ones are refused with the nearest that is known."""
    known = {option.name: option for option in fields(kind)}  # type: ignore[arg-type]
    for key in given.keys() - known.keys():
        near = get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        raise ValueError(f"{who} has no option {key!r}; {hint}")
    for key, option in known.items():
        needed = option.default.__class__.__name__ == "_MISSING_TYPE" and option.default_factory.__class__.__name__ == "_MISSING_TYPE"
        if needed and not given.get(key):
            raise ValueError(f'{who} needs {key!r}: the engine does not tell it, and blocks of another must not be served. Say "none" where there is nothing to say')
    return kind(**given)


def scales(told: str, dtype: str, who: str) -> str:
    """What the scales of a cache come from: that has to be said for a cache of eight bits or fewer."""
    if told:
        return told
    if any(bits in dtype for bits in ("8", "4")):
        raise ValueError(f"{who} needs 'scales' for a KV cache of {dtype}: what its scales come from")
    return "none"


def opened(agent: weft.Agent, block_bytes: int, directory: str, capacity: int, *, extent: int = 0, **more: Any) -> weft.Store:
    """A store of blocks of one part. Another owner of the directory has some seconds to go."""
    extent = extent or max(block_bytes, min(1 << 30, capacity))
    patience = time.monotonic() + OWNER_GOES_WITHIN
    while True:
        try:
            return weft.Store(agent, {"kv": block_bytes}, directory=directory, capacity=capacity, extent=extent, **more)
        except weft.InvalidCall as error:
            if "in use" not in str(error) or time.monotonic() > patience:
                raise
            time.sleep(0.25)
