"""The collectives of a process group, as torch calls them.

Every call ends in one call of `Communicator._raw` with addresses and lengths. Tensors that do not lie as the call needs them are copied before
or after; what follows a call that is under way is done by whoever first sees that it has ended.
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft
from weft._weft import _NUMBERS


def _numbers(which: str, *names: str) -> list[int]:
    return [_NUMBERS[which][name] for name in names]


# The numbers of `Communicator._raw`.
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BROADCAST, _REDUCE, _GATHER, _SCATTER, _ALL_TO_ALL, _BARRIER = _numbers(
    "kinds", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier"
)
_SUM, _PROD, _MIN, _MAX, _AVG, _BAND, _BOR, _BXOR = _numbers(
    "operators", "sum", "prod", "min", "max", "avg", "band", "bor", "bxor"
)
(_U8,) = _numbers("datatypes", "u8")

# The number of the datatype, and how many of them an element is.
_DATATYPES = {
    theirs: (_NUMBERS["datatypes"][ours], times)
    for theirs, ours, times in [
        (torch.float64, "f64", 1),
        (torch.float32, "f32", 1),
        (torch.float16, "f16", 1),
        (torch.bfloat16, "bf16", 1),
        (torch.float8_e4m3fn, "fp8_e4m3", 1),
        (torch.float8_e5m2, "fp8_e5m2", 1),
        (torch.int8, "i8", 1),
        (torch.int16, "i16", 1),
        (torch.int32, "i32", 1),
        (torch.int64, "i64", 1),
        (torch.uint8, "u8", 1),
        (torch.bool, "u8", 1),
        (torch.uint16, "u16", 1),
        (torch.uint32, "u32", 1),
        (torch.uint64, "u64", 1),
        (torch.complex64, "f32", 2),
        (torch.complex128, "f64", 2),
    ]
}

# By the hash of torch's operators, which is their number.
_OPERATORS = {
    hash(dist.ReduceOp(theirs)): ours
    for theirs, ours in [
        (dist.ReduceOp.SUM, _SUM),
        (dist.ReduceOp.AVG, _AVG),
        (dist.ReduceOp.PRODUCT, _PROD),
        (dist.ReduceOp.MIN, _MIN),
        (dist.ReduceOp.MAX, _MAX),
        (dist.ReduceOp.BAND, _BAND),
        (dist.ReduceOp.BOR, _BOR),
        (dist.ReduceOp.BXOR, _BXOR),
    ]
}
# A bool is 0 or 1, and must stay so.
_OPERATORS_OF_BOOL = {_SUM: _MAX, _PROD: _MIN}
_PLAIN = frozenset(kind for kind, (_, times) in _DATATYPES.items() if times == 1)
_NOTHING = (0, 0)
# How long whoever leaves waits for a thread that may have something to wait for itself.
FAREWELL = 1.0


class Work(c10d.Work):
    """A call under way."""

    def __init__(self, pending, results: list[Tensor], after: Callable[[], None] | None, completions: "_Completions"):
        super().__init__()
        self._pending = pending
        self._results = results
        self._after = after
        self._completions = completions
        self._future: torch.futures.Future | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._pending is not None:
            try:
                self._pending.wait(timeout.total_seconds() if timeout else None)
            except weft.TimedOut as error:
                raise dist.DistBackendError(str(error)) from error
        self._finish()
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        if self._pending is not None and not self._pending.done:
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        self._completions.check_process()
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        if self.is_completed():
            self._settle(future)
        else:
            self._completions.put(self, future)
        return future

    def _settle(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def _finish(self) -> None:
        """Does what follows the call, once. It has ended."""
        self._completions.check_process()
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            try:
                pending.poll()
                if self._after is not None:
                    self._after()
            except Exception as error:
                self._error = error
            self._after = None


class _Completions:
    """Futures that nobody may be waiting for: a thread does."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """A forked child has no thread that would settle anything, and perhaps a lock that nobody gives back."""
        if os.getpid() != self._process:
            raise weft.Forked("this call was made before a fork, and belongs to the process that made it")

    def put(self, work: Work, future: torch.futures.Future) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-torch", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put((work, future))

    def close(self) -> None:
        """Ends the thread. One that is still there when the interpreter ends is ended in the middle of whatever it does, and the process with it."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(FAREWELL)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, future = entry
            try:
                work.wait()
            except Exception:
                pass  # It is the work's to tell.
            work._settle(future)


class Backend(c10d.Backend):
    """One rank of a process group."""

    def __init__(self, home, communicator: weft.Communicator, agents: Sequence[str], name: str, timeout: float) -> None:
        rank, size = communicator.rank, communicator.size
        super().__init__(rank, size)
        self._home = home
        self._communicator = communicator
        self._raw = communicator._raw
        self._name = name
        self._rank, self._size = rank, size
        self._deadline = timeout
        self._options = c10d.Backend.Options("weft", timedelta(seconds=timeout))
        self._completions = _Completions()
        self._messages = home.mailroom.box(name, rank, agents)
        self._number = 0

    # What torch asks about the backend.

    def getBackendName(self) -> str:
        return "weft"

    def name(self) -> str:
        return "weft"

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
        self._raw = _destroyed
        self._communicator = None
        self._home = None

    abort = shutdown

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts) -> Work | None:
        (tensor,) = tensors
        dtype = tensor.dtype
        operator = _operator(opts, dtype)
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
        flat = torch.cat([_source(tensor).reshape(-1) for tensor in tensors])
        place = _place(flat)
        after = _deal_out(flat, tensors)
        return self._call(_ALL_REDUCE, place, place, dtype, operator, 0, opts.asyncOp, tensors, after, flat)

    def allreduce_sparse(self, tensors: list[Tensor], opts) -> Work | None:
        raise NotImplementedError("weft does not reduce sparse tensors")

    def broadcast(self, tensors: list[Tensor], opts) -> Work | None:
        (tensor,) = tensors
        dtype = tensor.dtype
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
        source = _source(tensor)
        place, flat, after = _gathered(outputs, tensor.dtype)
        counts = _counts(outputs)
        keep = (source, flat)
        return self._call(
            _ALL_GATHER, _place(source), place, tensor.dtype, _SUM, 0, opts.asyncOp, outputs, after, keep, counts
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts) -> Work | None:
        _alike(output, tensor)
        source = _source(tensor)
        flat, after = _target(output)
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
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
        source = _source(tensor)
        target, after = _target(output)
        sent = received = None
        if output_splits or input_splits:
            sent, received = self._splits(tensor, input_splits), self._splits(output, output_splits)
        elif tensor.numel() != output.numel() or (tensor.numel() and tensor.size(0) % self._size):
            raise ValueError("Tensor's dim 0 does not divide equally across group size")
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


class Group(dist.ProcessGroup):
    """A process group that has this backend only.

    Calls from Python go straight to the backend; what nobody has written out here, and what comes from torch's own C++, finds it too.
    """

    def __init__(self, store, rank: int, size: int, backend: Backend) -> None:
        super().__init__(store, rank, size)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._weft = backend

    def getBackendName(self) -> str:
        return "weft"

    def name(self) -> str:
        return "weft"


def _straight(name: str, options: type) -> None:
    """Adds a method to `Group` that skips torch's dispatcher, if it is called as torch itself calls it."""
    usual = getattr(dist.ProcessGroup, name, None)
    if usual is None:
        return  # Names have changed from version to version.
    ours = getattr(Backend, name)

    def method(self, *arguments, **keywords):
        if not keywords and arguments and type(arguments[-1]) is options:
            return ours(self._weft, *arguments)
        return usual(self, *arguments, **keywords)

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


def _destroyed(*_arguments: object) -> None:
    raise dist.DistBackendError("the process group has been destroyed")


def _operator(opts, dtype: torch.dtype) -> int:
    operator = _OPERATORS.get(hash(opts.reduceOp))
    if operator is None:
        raise ValueError(f"weft does not know {opts.reduceOp}")
    if dtype is torch.bool:
        if operator == _AVG:
            raise ValueError("bools have no average")
        return _OPERATORS_OF_BOOL.get(operator, operator)
    if operator >= _BAND and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"Cannot use {opts.reduceOp} with non-integral dtype")
    if dtype not in _DATATYPES or (dtype.is_complex and operator not in (_SUM, _AVG)):
        raise ValueError(f"weft cannot reduce {dtype} by {opts.reduceOp}")
    return operator


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _source(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose elements lie one after the other."""
    if tensor.is_contiguous() and tensor.is_cpu and tensor.dtype in _PLAIN:
        return tensor
    if tensor.layout is not torch.strided:
        raise ValueError("weft moves dense tensors only")
    if not tensor.is_cpu:
        raise ValueError(f"weft moves tensors in host memory, not on {tensor.device}")
    return tensor.resolve_conj().resolve_neg().contiguous()


def _target(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Where to receive into, and what brings it to the tensor then."""
    if tensor.is_contiguous() and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
        return tensor, None
    if tensor.layout is not torch.strided:
        raise ValueError("weft moves dense tensors only")
    if not tensor.is_cpu:
        raise ValueError(f"weft moves tensors in host memory, not on {tensor.device}")
    flat = torch.empty(tensor.shape, dtype=tensor.dtype)
    return flat, _deal_out(flat, [tensor])


def _both_ways(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Where a tensor that is read and written lies, and what brings it back."""
    flat = _source(tensor)
    return flat, None if flat is tensor else _deal_out(flat, [tensor])


def _deal_out(flat: Tensor, tensors: list[Tensor]) -> Callable[[], None]:
    def after() -> None:
        parts = flat.view(-1).split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts):
                # Whoever reads gradients may see the tensor's version; a collective is not an operation that autograd follows.
                tensor.detach().copy_(part.view(tensor.shape))

    return after


def _joined(tensors: list[Tensor]) -> tuple[int, int] | None:
    """Where the tensors lie, if it is one right after the other."""
    start = end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or not tensor.is_cpu or tensor.dtype not in _PLAIN:
            return None
        end += tensor.nbytes
    return start, end - start


def _gathered(tensors: list[Tensor], dtype: torch.dtype) -> tuple[tuple[int, int], object, Callable[[], None] | None]:
    """Where to receive a list into, what to keep meanwhile, and what brings it to the tensors then."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"Invalid usage of tensors with different dtypes: Found {tensor.dtype} and {dtype}")
        if not tensor.is_cpu:
            raise ValueError(f"weft moves tensors in host memory, not on {tensor.device}")
    place = _joined(tensors)
    if place is not None:
        return place, tensors, None
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    return _place(flat), flat, _deal_out(flat, tensors)


def _scattered(tensors: list[Tensor]) -> tuple[tuple[int, int], object]:
    """Where a list lies that is sent, and what to keep meanwhile."""
    place = _joined(tensors)
    if place is not None:
        return place, tensors
    flat = torch.cat([_source(tensor).reshape(-1) for tensor in tensors])
    return _place(flat), flat


def _counts(tensors: list[Tensor]) -> list[int] | None:
    """How many elements each has, unless all have as many."""
    counts = [tensor.numel() for tensor in tensors]
    return None if len(set(counts)) == 1 else counts


def _alike(output: Tensor, tensor: Tensor, size: bool = False) -> None:
    if output.dtype != tensor.dtype:
        raise TypeError(f"output tensor must have the same type as input tensor: {output.dtype} and {tensor.dtype}")
    if size and output.numel() != tensor.numel():
        raise ValueError(f"tensors of different sizes: {tuple(output.shape)} and {tuple(tensor.shape)}")
