"""What operators of torch are called for, by name: they take tensors, numbers and texts, and no groups. A text, because compilers take numbers for something that varies."""

import itertools
import weakref

import torch
import torch.distributed as dist

import weft

from ._backend import Calls

_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def calls_of(group: dist.ProcessGroup | None) -> Calls:
    """What carries out the calls of a group; of the default one, where none is named."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise weft.InvalidCall("there is no group: torch.distributed is not initialised, or this rank is no member")
    calls = getattr(group, "_weft", None)
    if calls is None:
        for device in ("cuda", "cpu"):
            try:
                calls = group._get_backend(torch.device(device))
            except RuntimeError:
                continue
            if isinstance(calls, Calls):
                break
    if not isinstance(calls, Calls):
        raise weft.InvalidCall("the group is none of weft's")
    return calls


def remember(what: object) -> str:
    """The name by which operators find it, for as long as somebody has it."""
    name = str(next(_numbers))
    _known[name] = what
    return name


def found(name: str) -> object:
    what = _known.get(name)
    if what is None:
        raise weft.InvalidCall("what this call was made for is gone")
    return what
