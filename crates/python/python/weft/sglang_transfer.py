"""SGLang's prefill and decode apart over Weft, by Weft's own name:

    python -m sglang.launch_server … --disaggregation-mode prefill --disaggregation-transfer-backend weft

SGLang loads this by its entry points for plug-ins (`sglang.srt.plugins`), in every process of its. What an engine asks of a means to transfer, its own for NIXL does: rooms, pages, other
degrees of parallelism, states. This is that one with agents of `weft.nixl`, so NIXL is not needed; the name alone says so, and no variable has to be set. Both ends must have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["NAME", "register"]

NAME = "weft"

_UTILS = "sglang.srt.disaggregation.utils"
# By which SGLang's back end for NIXL is told which of NIXL's to take.
_BACKEND = "SGLANG_DISAGGREGATION_NIXL_BACKEND"


def register() -> None:
    """Makes the name known. SGLang says in its log where this fails, goes on without, and then knows no transfer backend of that name."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if getattr(getattr(utils, "TransferBackend", None), "NIXL", None) is None or not callable(getattr(utils, "get_kv_class", None)):
        raise ImportError("this SGLang has another interface for transfer backends than weft.sglang_transfer was written for; SGLang 0.5.23 has the right one")
    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])
    # An unknown name is asked for here, and a known one never: wherever SGLang treats its back end for NIXL specially, it treats this one so.
    HookRegistry.register(f"{_UTILS}.TransferBackend._missing_", _named, HookType.AROUND)


def _named(original: Callable[[Any], Any], value: Any) -> Any:
    if value != NAME:
        return original(value)
    from sglang.srt.disaggregation.utils import TransferBackend

    from . import nixl

    # Before SGLang imports NIXL, which it does once it knows the back end.
    nixl.install()
    os.environ.setdefault(_BACKEND, "WEFT")
    return TransferBackend.NIXL
