"""PyTorch Distributed over Weft: `torch.distributed.init_process_group("weft")`; and, for its groups, what torch has no call for: `FusedNorm`, `Moe`, `symmetric_empty`.

Importing this registers the backend, for tensors in host memory. Installed torch finds it by itself from 2.15 on; `import weft.torch` does
no harm there. The ranks find each other through the store that torch hands over, whatever the `init_method`, so `torchrun` needs nothing
else. What may be set is set by the environment, as `WEFT_LISTEN` or `WEFT_TRANSPORTS`.
"""

import torch.distributed as dist

from ._backend import Backend, Calls
from ._device import DeviceWork
from ._group import Group
from ._moe import Moe, Received
from ._norm import FusedNorm
from ._rendezvous import create
from ._symmetric import symmetric_empty
from ._work import Work

__all__ = [
    "Backend",
    "Calls",
    "DeviceWork",
    "FusedNorm",
    "Group",
    "Moe",
    "Received",
    "Work",
    "register",
    "symmetric_empty",
]


def register() -> None:
    """Makes the backend known to torch."""
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed")
    if "WEFT" not in dist.Backend._plugins:
        dist.Backend.register_backend("weft", create, extended_api=True, devices=["cpu", "cuda"])


register()
