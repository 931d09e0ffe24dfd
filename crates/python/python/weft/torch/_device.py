"""Calls on tensors of a GPU: put on the caller's current stream, done by kernels, and never waited for by the host.

The ranks of a group become a team at its first call on such tensors, by calls of the group itself, so all of them come to the same answer; what kernels do not carry is not
done here, by rules that are the same on all ranks: kinds of calls, elements and operators, never where a tensor lies.
"""

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft
from weft._weft import _Experts as Experts
from weft._weft import _Norms as Norms
from weft._weft import _Symmetric as Symmetric
from weft._weft import _Team as Team

from ._tensors import (
    _ALL_GATHER,
    _ALL_REDUCE,
    _ALL_TO_ALL,
    _BROADCAST,
    _DATATYPES,
    _REDUCE_SCATTER,
    _SUM,
    _U8,
    _deal_out_at_once,
    _dense,
    _joined,
    _place,
)

# What a call answers that goes through host memory instead.
STAGED = object()
_REDUCED, _OPERATORS = (frozenset(numbers) for numbers in Team.reduced())
# The handle of a device's current stream, without an object around it.
_stream_of = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None
# The longest sleep between two looks at the device, for those who wait on the host.
_LOOK = 0.001


class DeviceWork(c10d.Work):
    """A call that is on a stream. Waiting for it makes the current stream wait; with a timeout, the host waits."""

    def __init__(self, team: Team, device: torch.device, results: list[Tensor], deadline: float) -> None:
        super().__init__()
        self._team = team
        self._device = device
        self._results = results
        self._deadline = deadline
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))
        self._future: torch.futures.Future | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            self.see_through(timeout.total_seconds())
        else:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._team.check()
        return True

    synchronize = wait

    def see_through(self, seconds: float | None = None) -> None:
        """Waits until the device has come past the call, on the host."""
        until = time.monotonic() + (self._deadline if seconds is None else seconds)
        pause = 1e-6
        while not self._event.query():
            if time.monotonic() >= until:
                self._team.check()
                raise dist.DistBackendError("timed out waiting for the device")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)
        self._team.check()

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._team.check()
        except weft.Error as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        with self._lock:
            if self._future is None:
                # Such a future holds events of its own, of the streams that are current now; whoever waits for it has its stream wait for those.
                torch.cuda.current_stream(self._device).wait_event(self._event)
                self._future = torch.futures.Future(devices=[self._device])
                self._future.set_result(self._results)
        return self._future


class Devices:
    """A group on the GPU of this process."""

    def __init__(self, communicator: weft.Communicator, crowd: int, deadline: float) -> None:
        self._communicator = communicator
        self._crowd = crowd
        self._deadline = deadline
        self._size = communicator.size
        self._device: torch.device | None = None
        self._index = 0
        self._team: Team | None = None
        self._norms: Norms | None = None
        # Why there is no team, where there is none.
        self.reason: str | None = None

    @property
    def team(self) -> Team | None:
        return self._team

    def abort(self) -> None:
        """Ends what waits on the device, here and soon at the other ranks."""
        if self._team is not None:
            self._team.abort()

    def close(self) -> None:
        self._norms = None
        team, self._team = self._team, None
        if team is not None:
            team.close()

    def all_reduce(self, tensor: Tensor, operator: int, asynchronous: bool):
        if not self._carries(tensor, operator):
            return STAGED
        flat = _dense(tensor)
        place = _place(flat)
        self._put(_ALL_REDUCE, place, place, tensor.dtype, operator)
        if flat is not tensor:
            _deal_out_at_once(flat, [tensor])
        return self._work([tensor], asynchronous)

    def all_reduce_together(self, tensors: list[Tensor], operator: int, asynchronous: bool):
        if not self._carries(tensors[0], operator, tensors):
            return STAGED
        flat = torch.cat([_dense(tensor).reshape(-1) for tensor in tensors])
        place = _place(flat)
        self._put(_ALL_REDUCE, place, place, flat.dtype, operator)
        _deal_out_at_once(flat, tensors)
        return self._work(tensors, asynchronous)

    def broadcast(self, tensor: Tensor, root: int, asynchronous: bool):
        if not self._carries(tensor):
            return STAGED
        flat = _dense(tensor)
        place = _place(flat)
        self._put(_BROADCAST, place, place, None, _SUM, root)
        if flat is not tensor:
            _deal_out_at_once(flat, [tensor])
        return self._work([tensor], asynchronous)

    def all_gather(self, outputs: list[Tensor], tensor: Tensor, asynchronous: bool):
        """`outputs` is one for each rank, or one for all."""
        if not self._carries(tensor, others=outputs):
            return STAGED
        source = _dense(tensor)
        place, flat = _joined(outputs), None
        if place is None or overlap_askew(place, _place(source), self._communicator.rank):
            flat = tensor.new_empty(tensor.numel() * self._size)
            place = _place(flat)
        self._put(_ALL_GATHER, _place(source), place, None, _SUM)
        if flat is not None:
            _deal_out_at_once(flat, outputs)
        return self._work(outputs, asynchronous)

    def reduce_scatter(self, output: Tensor, tensors: list[Tensor], operator: int, asynchronous: bool):
        """`tensors` is one for each rank, or one for all."""
        if not self._carries(output, operator, tensors):
            return STAGED
        source, whole = _joined(tensors), None
        if source is None:
            whole = torch.cat([_dense(tensor).reshape(-1) for tensor in tensors])
            source = _place(whole)
        flat = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        if overlap_askew(source, _place(flat), self._communicator.rank):
            flat = torch.empty_like(flat)
        self._put(_REDUCE_SCATTER, source, _place(flat), output.dtype, operator)
        if flat is not output:
            _deal_out_at_once(flat, [output])
        return self._work([output], asynchronous)

    def all_to_all(self, output: Tensor, tensor: Tensor, asynchronous: bool):
        if not self._carries(tensor, others=[output]):
            return STAGED
        source = _dense(tensor)
        apart = output.is_contiguous() and not overlaps(_place(source), _place(output))
        flat = output if apart else torch.empty_like(output, memory_format=torch.contiguous_format)
        self._put(_ALL_TO_ALL, _place(source), _place(flat), None, _SUM)
        if flat is not output:
            _deal_out_at_once(flat, [output])
        return self._work([output], asynchronous)

    def barrier(self, asynchronous: bool) -> DeviceWork | None:
        """Of ranks that are a team already. Without `asynchronous` the host waits too, unless this is being captured."""
        assert self._team is not None and self._device is not None
        self._team.barrier(_stream_of(self._index))
        if not asynchronous and torch.cuda.is_current_stream_capturing():
            return None
        work = DeviceWork(self._team, self._device, [], self._deadline)
        if asynchronous:
            return work
        work.see_through()
        return None

    # What is done with rows, and memory for it.

    @property
    def stream(self) -> int:
        """The device's current stream."""
        return _stream_of(self._index)

    def norms(self, device: torch.device) -> Norms | None:
        """The fused kernels, loaded by the first who asks; none where there is no team."""
        team = self._reach(device)
        if team is not None and self._norms is None:
            _not_captured("a group's first fused norm")
            norms = Norms.load(team)
            # The driver takes its time with new kernels, and those who wait in one have a deadline.
            self._communicator.barrier(deadline=self._deadline)
            self._norms = norms
        return self._norms

    def symmetric(self, device: torch.device, nbytes: int) -> Symmetric:
        _not_captured("making memory")
        return Symmetric.form(self._needed(device), self._communicator, nbytes, deadline=self._deadline)

    def experts(self, device: torch.device, **settings) -> Experts:
        _not_captured("making memory")
        return Experts.form(self._needed(device), self._communicator, deadline=self._deadline, **settings)

    def _reach(self, device: torch.device) -> Team | None:
        if self._device is None:
            self._form(device)
        if device != self._device:
            raise ValueError(f"this rank's calls of the group are on {self._device}, and this one is on {device}")
        return self._team

    def _needed(self, device: torch.device) -> Team:
        team = self._reach(device)
        if team is None:
            raise weft.GpuError(f"the ranks of this group are no team on GPUs: {self.reason or 'it has been closed'}")
        return team

    # How all of that is done.

    def _carries(self, tensor: Tensor, operator: int | None = None, others: Sequence[Tensor] = ()) -> bool:
        """Whether kernels do this. The first call makes the ranks a team, whatever it is. `others` are the other side of the call: what
        kernels reach must all be on the device."""
        if self._device is None:
            self._form(tensor.device)
        for one in (tensor, *others):
            if one.device != self._device:
                raise ValueError(f"this rank's calls of the group are on {self._device}, and this tensor is on {one.device}")
        if self._team is None:
            return False
        if operator is None:
            return True
        datatype, times = _DATATYPES.get(tensor.dtype, (-1, 0))
        return times == 1 and tensor.dtype is not torch.bool and datatype in _REDUCED and operator in _OPERATORS

    def _form(self, device: torch.device) -> None:
        _not_captured("a group's first call on a GPU")
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._team, reason = Team.form(
            self._communicator, index, deadline=self._deadline, ranks_a_device=self._crowd
        )
        self.reason = reason or None
        self._index = index
        self._device = torch.device("cuda", index)

    def _put(
        self,
        kind: int,
        source: tuple[int, int],
        target: tuple[int, int],
        dtype: torch.dtype | None,
        operator: int,
        root: int = 0,
    ) -> None:
        assert self._team is not None
        datatype = _U8 if dtype is None else _DATATYPES[dtype][0]
        stream = _stream_of(self._index)
        self._team.call(kind, source, target, datatype, operator, root, stream)

    def _work(self, results: list[Tensor], asynchronous: bool) -> DeviceWork | None:
        if not asynchronous:
            return None
        assert self._team is not None and self._device is not None
        return DeviceWork(self._team, self._device, results, self._deadline)


def _not_captured(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"weft: {what} cannot be captured in a graph; do it before")


def ranks_a_device(ranks: int) -> int:
    """How many ranks share a GPU, where all are on as many hosts as the launcher says, or on one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    here = int(local) if local.isdigit() and int(local) > 0 else ranks
    return -(-here // max(1, torch.cuda.device_count()))


def overlaps(one: tuple[int, int], other: tuple[int, int]) -> bool:
    (start, bytes), (begin, length) = one, other
    return bytes > 0 and length > 0 and start < begin + length and begin < start + bytes


def overlap_askew(whole: tuple[int, int], part: tuple[int, int], rank: int) -> bool:
    """Whether a rank's part overlaps the whole other than where it belongs."""
    return overlaps(whole, part) and part[0] != whole[0] + rank * part[1]
