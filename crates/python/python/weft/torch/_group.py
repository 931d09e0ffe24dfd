"""A process group that has no backend but Weft's.

Calls from Python go straight to it. From torch 2.14 on it also stands behind torch's dispatcher, where what nobody has written out here, and what comes from torch's own C++, finds it.
Before, a process group in Python is all that torch takes from others: C++ calls the methods below.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ._backend import HAS_BACKENDS, Calls

_DEVICES = ("cpu", "cuda")


class Group(dist.ProcessGroup):
    """One rank of it."""

    def __init__(self, store, rank: int, size: int, backend: Calls) -> None:
        if HAS_BACKENDS:
            super().__init__(store, rank, size)
            self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            for device in _DEVICES:
                self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        else:
            super().__init__(rank, size)
        self._weft = backend
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return "weft"

    def name(self) -> str:
        return "weft"

    @property
    def device_reason(self) -> str | None:
        """Why calls on tensors of GPUs go through host memory, where all of them do; None before the first."""
        return self._weft.device_reason


def _straight(name: str, options: type) -> None:
    """Adds a method to `Group` that skips torch's dispatcher, if it is called as torch itself calls it."""
    usual = getattr(dist.ProcessGroup, name, None)
    if usual is None:
        return  # Names have changed from version to version.
    ours = getattr(Calls, name)

    def method(self, *arguments, **keywords):
        if not keywords and arguments and type(arguments[-1]) is options:
            return ours(self._weft, *arguments)
        if HAS_BACKENDS:
            return usual(self, *arguments, **keywords)
        # Nothing but us: whoever leaves the options out wants the usual ones, by position or by name.
        opts = keywords.pop("opts", None)
        if options is int:
            return ours(self._weft, *arguments, **keywords)
        return ours(self._weft, *arguments, *keywords.values(), options() if opts is None else opts)

    method.__name__ = name
    setattr(Group, name, method)


for _name, _options in {
    "allreduce": c10d.AllreduceOptions,
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
    "allgather": c10d.AllgatherOptions,
    "all_gather_single": c10d.AllgatherOptions,
    "_allgather_base": c10d.AllgatherOptions,
    "all_gather_single_coalesced": c10d.AllgatherOptions,
    "allgather_into_tensor_coalesced": c10d.AllgatherOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "reduce_scatter_single": c10d.ReduceScatterOptions,
    "_reduce_scatter_base": c10d.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": c10d.ReduceScatterOptions,
    "reduce_scatter_tensor_coalesced": c10d.ReduceScatterOptions,
    "all_to_all_single": c10d.AllToAllOptions,
    "alltoall_base": c10d.AllToAllOptions,
    "alltoall": c10d.AllToAllOptions,
    "barrier": c10d.BarrierOptions,
    "send": int,
    "recv": int,
    "recv_anysource": int,
}.items():
    _straight(_name, _options)


class _Alone:
    """What torch asks of a process group that is its own backend."""

    def _get_backend(self, device: torch.device) -> Calls:
        return self._weft

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in _DEVICES]

    # torch keeps names in backends, of which there are none.

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def _set_timeout(self, timeout: timedelta) -> None:
        self._weft.set_timeout(timeout)

    _set_default_timeout = _set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing is gained by it: calls are on their way as soon as they are made."""

    def _end_coalescing(self, device: torch.device) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._weft._get_sequence_number_for_group()

    def _wait_for_pending_works(self) -> None:
        pass

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        opts = c10d.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self._weft.monitored_barrier(opts, wait_all_ranks)

    def shutdown(self) -> None:
        self._weft.shutdown()

    abort = shutdown


if not HAS_BACKENDS:
    for _name, _method in vars(_Alone).items():
        if not _name.startswith("__"):
            setattr(Group, _name, _method)
