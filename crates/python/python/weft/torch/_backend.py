"""The collectives of a process group, as torch calls them.

Every call ends in one call of `Communicator._raw` with addresses and lengths. Tensors that do not lie as the call needs them are copied before
or after; what follows a call that is under way is done by whoever first sees that it has ended.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft

from ._device import STAGED, Devices
from ._tensors import (
    _ALL_GATHER,
    _ALL_REDUCE,
    _ALL_TO_ALL,
    _BARRIER,
    _BROADCAST,
    _DATATYPES,
    _GATHER,
    _NOTHING,
    _PLAIN,
    _REDUCE,
    _REDUCE_SCATTER,
    _SCATTER,
    _SUM,
    _U8,
    _alike,
    _both_ways,
    _counts,
    _deal_out,
    _gathered,
    _operator,
    _place,
    _scattered,
    _source,
    _target,
)
from ._work import Completions, Work


class Calls:
    """One rank of a process group, whatever torch takes it for."""

    def __init__(self, home, communicator: weft.Communicator, agents: Sequence[str], name: str, timeout: float) -> None:
        rank, size = communicator.rank, communicator.size
        self._home = home
        self._communicator = communicator
        self._raw = communicator._raw
        self._name = name
        self._rank, self._size = rank, size
        self._deadline = timeout
        self._options = c10d.Backend.Options("weft", timedelta(seconds=timeout))
        self._completions = Completions()
        self._messages = home.mailroom.box(name, rank, agents)
        self._devices = Devices(communicator, home.crowd(size), timeout)
        self._number = 0

    # What torch asks about the backend.

    def getBackendName(self) -> str:
        return "weft"

    def name(self) -> str:
        return "weft"

    @property
    def device_reason(self) -> str | None:
        """Why calls on tensors of GPUs go through host memory, where all of them do; None before the first."""
        return self._devices.reason

    @property
    def options(self) -> c10d.Backend.Options:
        return self._options

    # torch asks a Python backend for these again and again until it answers itself.

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    @property
    def supports_shrinking(self) -> bool:
        return False

    @property
    def supports_reconfigure(self) -> bool:
        return False

    @property
    def supports_window(self) -> bool:
        return False

    def split(self, store, ranks: list[int], options) -> "Backend | None":
        from ._rendezvous import connect

        if self._rank not in ranks:
            return None
        timeout = options._timeout.total_seconds() if options is not None else self._deadline
        name = getattr(options, "group_name", "") or "split"
        return connect(store, ranks.index(self._rank), len(ranks), name, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._deadline = timeout.total_seconds()
        self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _wait_for_pending_works(self) -> None:
        pass

    def shutdown(self) -> None:
        self._completions.close()
        self._messages.close()
        self._devices.close()
        self._raw = _destroyed
        self._communicator = None
        self._home = None

    def abort(self) -> None:
        self._devices.abort()
        self.shutdown()

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts) -> Work | None:
        (tensor,) = tensors
        dtype = tensor.dtype
        operator = _operator(opts, dtype)
        if tensor.is_cuda and (done := self._devices.all_reduce(tensor, operator, opts.asyncOp)) is not STAGED:
            return done
        if tensor.is_contiguous() and tensor.is_cpu and dtype in _PLAIN:
            place = (tensor.data_ptr(), tensor.nbytes)
            return self._call(_ALL_REDUCE, place, place, dtype, operator, 0, opts.asyncOp, tensors)
        flat, after = _both_ways(tensor)
        place = _place(flat)
        return self._call(_ALL_REDUCE, place, place, dtype, operator, 0, opts.asyncOp, tensors, after, flat)

    def allreduce_coalesced(self, tensors: list[Tensor], opts) -> Work | None:
        dtype = tensors[0].dtype
        operator = _operator(opts, dtype)
        if any(tensor.dtype != dtype for tensor in tensors):
            raise TypeError("tensors that are reduced together must have one dtype")
        if tensors[0].is_cuda:
            done = self._devices.all_reduce_together(tensors, operator, opts.asyncOp)
            if done is not STAGED:
                return done
        flat = torch.cat([_source(tensor).reshape(-1) for tensor in tensors])
        place = _place(flat)
        after = _deal_out(flat, tensors)
        return self._call(_ALL_REDUCE, place, place, dtype, operator, 0, opts.asyncOp, tensors, after, flat)

    def allreduce_sparse(self, tensors: list[Tensor], opts) -> Work | None:
        raise NotImplementedError("weft does not reduce sparse tensors")

    def broadcast(self, tensors: list[Tensor], opts) -> Work | None:
        (tensor,) = tensors
        dtype = tensor.dtype
        if tensor.is_cuda and (done := self._devices.broadcast(tensor, opts.rootRank, opts.asyncOp)) is not STAGED:
            return done
        if tensor.is_contiguous() and tensor.is_cpu and dtype in _PLAIN:
            place = (tensor.data_ptr(), tensor.nbytes)
            return self._call(_BROADCAST, place, _NOTHING, dtype, _SUM, opts.rootRank, opts.asyncOp, tensors)
        flat, after = _both_ways(tensor)
        return self._call(
            _BROADCAST, _place(flat), _NOTHING, dtype, _SUM, opts.rootRank, opts.asyncOp, tensors, after, flat
        )

    def reduce(self, tensors: list[Tensor], opts) -> Work | None:
        (tensor,) = tensors
        source = _source(tensor)
        operator = _operator(opts, tensor.dtype)
        if opts.rootRank != self._rank:
            place, after, flat = _NOTHING, None, None
        else:
            flat = torch.empty_like(source)
            place, after = _place(flat), _deal_out(flat, tensors)
        keep = (source, flat)
        return self._call(
            _REDUCE, _place(source), place, tensor.dtype, operator, opts.rootRank, opts.asyncOp, tensors, after, keep
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts) -> Work | None:
        (tensor,), (outputs,) = inputs, outputs
        self._one_each(outputs)
        counts = _counts(outputs)
        if tensor.is_cuda and counts is None and outputs[0].numel() == tensor.numel():
            for output in outputs:
                _alike(output, tensor)
            if (done := self._devices.all_gather(outputs, tensor, opts.asyncOp)) is not STAGED:
                return done
        source = _source(tensor)
        place, flat, after = _gathered(outputs, tensor.dtype)
        keep = (source, flat)
        return self._call(
            _ALL_GATHER, _place(source), place, tensor.dtype, _SUM, 0, opts.asyncOp, outputs, after, keep, counts
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts) -> Work | None:
        _alike(output, tensor)
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        if tensor.is_cuda and (done := self._devices.all_gather([output], tensor, opts.asyncOp)) is not STAGED:
            return done
        source = _source(tensor)
        flat, after = _target(output)
        keep = (source, flat)
        return self._call(
            _ALL_GATHER, _place(source), _place(flat), tensor.dtype, _SUM, 0, opts.asyncOp, [output], after, keep
        )

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts) -> Work | None:
        # By rank: the tensors of that rank.
        each = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._in_turn(opts, [lambda o=o, i=i: self.allgather([o], [i], opts) for o, i in zip(each, inputs)])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts) -> Work | None:
        return self._in_turn(
            opts, [lambda o=o, i=i: self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts) -> Work | None:
        (tensor,) = inputs
        source = _source(tensor)
        if opts.rootRank != self._rank:
            place, flat, after, outputs = _NOTHING, None, None, []
        else:
            (outputs,) = outputs
            self._one_each(outputs)
            for output in outputs:
                _alike(output, tensor, size=True)
            place, flat, after = _gathered(outputs, tensor.dtype)
        keep = (source, flat)
        return self._call(
            _GATHER, _place(source), place, tensor.dtype, _SUM, opts.rootRank, opts.asyncOp, outputs, after, keep
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts) -> Work | None:
        (output,) = outputs
        target, after = _target(output)
        if opts.rootRank != self._rank:
            place, flat = _NOTHING, None
        else:
            (inputs,) = inputs
            self._one_each(inputs)
            for tensor in inputs:
                _alike(output, tensor, size=True)
            place, flat = _scattered(inputs)
        keep = (target, flat)
        return self._call(
            _SCATTER, place, _place(target), output.dtype, _SUM, opts.rootRank, opts.asyncOp, outputs, after, keep
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts) -> Work | None:
        (output,), (inputs,) = outputs, inputs
        self._one_each(inputs)
        operator = _operator(opts, output.dtype)
        if output.is_cuda and _counts(inputs) is None and inputs[0].numel() == output.numel():
            for tensor in inputs:
                _alike(output, tensor)
            done = self._devices.reduce_scatter(output, inputs, operator, opts.asyncOp)
            if done is not STAGED:
                return done
        target, after = _target(output)
        place, flat = _scattered(inputs)
        keep = (target, flat)
        return self._call(
            _REDUCE_SCATTER,
            place,
            _place(target),
            output.dtype,
            operator,
            0,
            opts.asyncOp,
            outputs,
            after,
            keep,
            _counts(inputs),
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts) -> Work | None:
        _alike(output, tensor)
        operator = _operator(opts, output.dtype)
        if output.numel() * self._size != tensor.numel():
            raise ValueError("input tensor must be the same size as output size times world size")
        if output.is_cuda:
            done = self._devices.reduce_scatter(output, [tensor], operator, opts.asyncOp)
            if done is not STAGED:
                return done
        source = _source(tensor)
        target, after = _target(output)
        keep = (source, target)
        return self._call(
            _REDUCE_SCATTER,
            _place(source),
            _place(target),
            output.dtype,
            operator,
            0,
            opts.asyncOp,
            [output],
            after,
            keep,
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts) -> Work | None:
        return self._in_turn(
            opts, [lambda o=o, i=i: self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts
    ) -> Work | None:
        _alike(output, tensor)
        sent = received = None
        if output_splits or input_splits:
            sent, received = self._splits(tensor, input_splits), self._splits(output, output_splits)
        elif tensor.numel() != output.numel() or (tensor.numel() and tensor.size(0) % self._size):
            raise ValueError("Tensor's dim 0 does not divide equally across group size")
        elif tensor.is_cuda and (done := self._devices.all_to_all(output, tensor, opts.asyncOp)) is not STAGED:
            return done
        source = _source(tensor)
        target, after = _target(output)
        keep = (source, target)
        return self._call(
            _ALL_TO_ALL,
            _place(source),
            _place(target),
            tensor.dtype,
            _SUM,
            0,
            opts.asyncOp,
            [output],
            after,
            keep,
            sent,
            received,
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts) -> Work | None:
        self._one_each(outputs)
        self._one_each(inputs)
        dtype = inputs[0].dtype
        source, flat = _scattered(inputs)
        target, gathered, after = _gathered(outputs, dtype)
        sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        keep = (flat, gathered)
        return self._call(
            _ALL_TO_ALL, source, target, dtype, _SUM, 0, opts.asyncOp, outputs, after, keep, sent, received
        )

    def barrier(self, opts=None) -> Work | None:
        asynchronous = opts is None or opts.asyncOp
        if self._devices.team is not None:
            return self._devices.barrier(asynchronous)
        return self._call(_BARRIER, _NOTHING, _NOTHING, torch.uint8, _SUM, 0, asynchronous, [])

    def monitored_barrier(self, opts, wait_all_ranks: bool = False) -> None:
        timeout = opts.timeout.total_seconds()
        self._raw(_BARRIER, _NOTHING, _NOTHING, _U8, _SUM, 0, timeout if timeout > 0 else self._deadline)

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> c10d.Work:
        (tensor,) = tensors
        return self._messages.send(_source(tensor), to, tag, self._deadline)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> c10d.Work:
        (tensor,) = tensors
        target, after = _target(tensor)
        return self._messages.receive(target, source, tag, self._deadline, after)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> c10d.Work:
        (tensor,) = tensors
        target, after = _target(tensor)
        return self._messages.receive(target, None, tag, self._deadline, after)

    # How all of that is done.

    def _call(
        self,
        kind: int,
        source: tuple[int, int],
        target: tuple[int, int],
        dtype: torch.dtype,
        operator: int,
        root: int,
        asynchronous: bool,
        results: list[Tensor],
        after: Callable[[], None] | None = None,
        keep: object = None,
        counts: list[int] | None = None,
        received: list[int] | None = None,
    ) -> Work | None:
        datatype, times = _DATATYPES.get(dtype) or (_U8, dtype.itemsize)
        if times != 1:
            counts, received = ([times * n for n in c] if c is not None else None for c in (counts, received))
        self._number += 1
        if not asynchronous:
            self._raw(
                kind, source, target, datatype, operator, root, self._deadline, None, counts, received
            )
            if after is not None:
                after()
            return None
        pending = self._raw(
            kind, source, target, datatype, operator, root, self._deadline, (results, keep), counts, received
        )
        return Work(pending, results, after, self._completions)

    def _in_turn(self, opts, calls: list[Callable[[], Work | None]]) -> Work | None:
        """Several calls as one. They run in order, so that the last ends last."""
        works = [call() for call in calls]
        if not opts.asyncOp:
            return None
        last = works[-1]
        if not isinstance(last, Work):
            # On a stream the last ends last by itself.
            last._results = [result for work in works for result in work._results]
            return last
        earlier = [work for work in works[:-1] if work is not None]
        follows = last._after

        def after() -> None:
            for work in earlier:
                work.wait()
            if follows is not None:
                follows()

        last._after = after
        last._results = [result for work in works for result in work._results]
        return last

    def _one_each(self, tensors: list[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"a list of {self._size} tensors is needed, one for each rank, not {len(tensors)}")

    def _splits(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """Elements for each rank, from numbers of rows."""
        rows = tensor.size(0)
        if not splits:
            if rows % self._size:
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError("Split sizes doesn't match total dim 0 size")
        row = tensor.numel() // rows if rows else 0
        return [row * split for split in splits]


def _destroyed(*_arguments: object) -> None:
    raise dist.DistBackendError("the process group has been destroyed")


def _has_backends() -> bool:
    """Before torch 2.14 a backend cannot be written in Python; a process group can, and does all of it then."""
    try:

        class Probe(c10d.Backend):
            pass

        Probe(0, 1)
    except TypeError:
        return False
    return True


HAS_BACKENDS = _has_backends()

if HAS_BACKENDS:

    class Backend(Calls, c10d.Backend):
        """One rank of a process group, as a backend that torch's dispatcher finds."""

        def __init__(self, *arguments) -> None:
            communicator = arguments[1]
            c10d.Backend.__init__(self, communicator.rank, communicator.size)
            Calls.__init__(self, *arguments)

else:
    Backend = Calls
