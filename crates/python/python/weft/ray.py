"""Ray Direct Transport over Weft: tensors go from actor to actor by one-sided reads, without Ray's object store and without NIXL.

    import ray, weft.ray

    weft.ray.register()     # in the process that makes the actors, before their classes are defined

    @ray.remote
    class Actor:
        @ray.method(tensor_transport="WEFT")
        def make(self): ...

What Ray asks of a transport, its own for NIXL does already: registering what is handed out, fetching, waiting, giving back. This is that one with agents of
`weft.nixl`, whose settings come from the environment (`WEFT_DEADLINE`, `WEFT_LISTEN`, …).
"""

from __future__ import annotations

import uuid
from typing import Any

import ray
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

from .nixl import nixl_agent, nixl_agent_config

__all__ = ["NAME", "WeftTensorTransport", "register"]

NAME = "WEFT"

# What is overridden, or called, below. Ray calls all of this experimental, and would go on by NIXL itself if it asked for its agent another way.
for _method in ("_make_nixl_agent", "select_backend", "actor_has_tensor_transport", "tensor_transport_backend"):
    if not callable(getattr(NixlTensorTransport, _method, None)):
        raise ImportError(
            f"Ray {ray.__version__} has another transport for NIXL than weft.ray was written for: it has no {_method}; Ray 2.60 has"
        )


class _Agent(nixl_agent):
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        super().__init__(name, config)
        self._left: set[str] = set()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Ray removes an agent that has given memory back, only to add it again with what it has now. That need not cost the session with it."""
        self._left.add(agent.decode() if isinstance(agent, bytes) else agent)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = super().add_remote_agent(metadata)
        self._left.discard(name.decode())
        while self._left:
            super().remove_remote_agent(self._left.pop())
        return name

    def initialize_xfer(  # type: ignore[override]
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes = b"", **more: Any
    ) -> Any:
        """Ray has each fetch told to its source, where nobody takes what is told: it would pile up there until senders are held back."""
        return super().initialize_xfer(operation, local_descs, remote_descs, remote_agent, **more)


class WeftTensorTransport(NixlTensorTransport):
    """Ray's transport for NIXL, over Weft."""

    def tensor_transport_backend(self) -> str:
        return NAME

    def select_backend(self) -> str:
        return NAME

    def _make_nixl_agent(self, backend: str) -> nixl_agent:
        """Of an actor, or of the driver. A name is used once: what was known of an actor that was started anew does not hold."""
        actor = ray.get_runtime_context().get_actor_id() or "driver"
        return _Agent(f"ray-{actor}-{uuid.uuid4()}", nixl_agent_config(backends=[backend]))

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether Weft is there and an agent starts: the actor is asked."""

        def starts(_: Any) -> bool:
            try:
                from ray.experimental.rdt.util import get_tensor_transport_manager

                get_tensor_transport_manager(NAME).get_nixl_agent()
            except Exception:
                return False
            return True

        return bool(ray.get(actor.__ray_call__.options(concurrency_group="_ray_system").remote(starts)))


def register(devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """Tells Ray of the transport `WEFT`, for torch's tensors in memory of these kinds."""
    import torch

    register_tensor_transport(NAME, list(devices), WeftTensorTransport, torch.Tensor)
