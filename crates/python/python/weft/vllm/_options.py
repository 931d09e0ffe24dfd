"""What may be set, by `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from weft.routed import VERSION

# What a place where agents find each other accepts.
NAME_BYTES_MAX = 80


@dataclass(frozen=True)
class Options:
    """Durations are in seconds."""

    # What the engine offers as prefill side: prompts are fetched from it, or pushed. As decode side it does what the prefill side offers.
    mode: str = "pull"
    # How long blocks are held for a decode side that says nothing, and how long a hand-off may take before the prompt is computed here instead.
    lease: float = 60.0
    deadline: float = 30.0
    # How many bytes of pushed prompts may be on their way to a worker at a time.
    landing_bytes: int = 4 << 30
    # Prompts with no more tokens to fetch are computed here.
    fetch_min_tokens: int = 0
    # Whether bytes are compared at both ends.
    checksum: bool = True
    # Where routers find the engine: etcd and prefix as `weft serve router` takes them, where the engine is, and what it is asked for.
    etcd: str = ""
    prefix: str = "default"
    url: str = ""
    role: str = ""
    # Settings of the agent, as `weft.Agent` takes them.
    agent: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        known = {option.name for option in fields(cls)}
        for key in given.keys() - known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"weft.vllm has no option {key!r}; {hint}")
        options = cls(**given)
        if options.mode not in ("pull", "push"):
            raise ValueError(f'weft.vllm: mode is "pull" or "push", not {options.mode!r}')
        if (options.url or options.role or options.etcd) and not (options.url and options.role in ("prefill", "decode", "plain")):
            raise ValueError('weft.vllm: to be found, an engine needs a url, as "http://host:8100", and a role: "prefill", "decode" or "plain"')
        if not isinstance(options.checksum, bool):
            raise ValueError(f"weft.vllm: checksum is true or false, not {options.checksum!r}")
        if options.lease <= 0 or options.deadline <= 0:
            raise ValueError("weft.vllm: lease and deadline are durations in seconds, more than 0")
        return options

    def agent_name(self, engine: str, rank: int, ranks: int) -> str:
        """By which the agent of a worker is known. Routers understand the name of one that wants to be found."""
        if not self.url:
            return f"vllm-{engine}-{rank}"
        name = f"vllm/{VERSION}/{self.mode}/{self.role}/{rank}/{ranks}/{self.url.rstrip('/')}"
        if len(name.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"weft.vllm: {name!r} is too long for a name, which has at most {NAME_BYTES_MAX} bytes")
        return name

    def agent_settings(self) -> dict[str, Any]:
        found = {"rendezvous": f"etcd:{self.etcd}", "rendezvous_job": self.prefix} if self.etcd else {}
        return {"listen": "127.0.0.1:0", **found, **self.agent}


def refuse_devices(caches: Mapping[str, Any]) -> None:
    """Caches have to be in host memory: what is pushed of others would be read before the device has computed it, since nothing here waits for its streams yet."""
    for name, cache in caches.items():
        if cache.device.type != "cpu":
            raise ValueError(f"weft.vllm moves caches in host memory, and {name} is on {cache.device}")


def refuse_shared_tokens(parallel: Any) -> None:
    """Ranks may share the heads of a cache out, but not its tokens: descriptions of caches say nothing of that, and bytes of other tokens would be fetched."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(parallel, name, 1)) > 1:
            raise ValueError(f"weft.vllm moves caches whose ranks have all tokens of their heads, and {name} is {ranks}")
