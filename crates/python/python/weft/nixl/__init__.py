"""NIXL's Python API without NIXL: its agents are Weft's.

    import weft.nixl

    weft.nixl.install()     # from here on, `import nixl` is this module

Nothing is put in NIXL's place unless somebody asks: by `install`, or, for vLLM and SGLang, which load it themselves, by the variable `WEFT_NIXL=1`. Both
ends of a transfer have to be agents of this module: what they say of themselves to each other is not what NIXL's agents say.
"""

import os
import sys

from . import _api, _bindings, _memory, logging
from ._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "install",
    "install_where_asked",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

# As NIXL's own package has them.
_utils = _memory

_VARIABLE = "WEFT_NIXL"
_YES = ("1", "true", "on", "yes")
_NO = ("", "0", "false", "off", "no")


def install() -> None:
    """Has `import nixl`, and what is below it, give this module, in this process. Whoever has imported NIXL itself already would go on with that, so
    that is an error; a second call is none."""
    here = sys.modules[__name__]
    modules = {
        "nixl": here,
        "nixl._api": _api,
        "nixl._bindings": _bindings,
        "nixl._utils": _memory,
        "nixl.logging": logging,
    }
    there = [name for name, module in modules.items() if sys.modules.get(name, module) is not module]
    if there:
        raise ImportError(f"NIXL itself has been imported already ({', '.join(there)}): weft.nixl.install() has to come before")
    sys.modules.update(modules)


def install_where_asked() -> None:
    """The entry point of vLLM and SGLang: installs where `WEFT_NIXL` says so."""
    said = os.environ.get(_VARIABLE, "").strip().lower()
    if said in _YES:
        install()
    elif said not in _NO:
        raise ValueError(f"{_VARIABLE} = {said!r} is neither of {', '.join(_YES)} nor of {', '.join(filter(None, _NO))}")
