"""What torch calls things and what `Communicator._raw` does, and where tensors lie."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

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
    """The tensor, or a copy in host memory whose elements lie one after the other."""
    if tensor.is_contiguous() and tensor.is_cpu and tensor.dtype in _PLAIN:
        return tensor
    _check(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous().cpu()


def _target(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Where to receive into, and what brings it to the tensor then."""
    if tensor.is_contiguous() and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
        return tensor, None
    _check(tensor)
    flat = torch.empty(tensor.shape, dtype=tensor.dtype)
    return flat, _deal_out(flat, [tensor])


def _check(tensor: Tensor) -> None:
    """Whether a tensor can be moved through host memory, where it does not lie as it should."""
    if tensor.layout is not torch.strided:
        raise ValueError("weft moves dense tensors only")
    if tensor.is_cpu:
        return
    if not tensor.is_cuda:
        raise ValueError(f"weft moves tensors in host memory and of CUDA, not on {tensor.device}")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("weft: this call goes through host memory, and cannot be captured in a graph")


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on its own device whose elements lie one after the other."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if tensor.layout is not torch.strided:
        raise ValueError("weft moves dense tensors only")
    return tensor.resolve_conj().resolve_neg().contiguous()


def _both_ways(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Where a tensor that is read and written lies, and what brings it back."""
    flat = _source(tensor)
    return flat, None if flat is tensor else _deal_out(flat, [tensor])


def _deal_out(flat: Tensor, tensors: list[Tensor]) -> Callable[[], None]:
    # Whoever does it later may be another thread, on another stream: what is on this one now comes before.
    ready = None
    if any(tensor.is_cuda for tensor in tensors):
        ready = torch.cuda.Event()
        ready.record()

    def after() -> None:
        if ready is not None:
            ready.synchronize()
        _deal_out_at_once(flat, tensors)

    return after


def _deal_out_at_once(flat: Tensor, tensors: list[Tensor]) -> None:
    parts = flat.view(-1).split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts):
            # Whoever reads gradients may see the tensor's version; a collective is not an operation that autograd follows.
            tensor.detach().copy_(part.view(tensor.shape))


def _joined(tensors: list[Tensor]) -> tuple[int, int] | None:
    """Where the tensors lie, all on one device or in host memory, if it is one right after the other."""
    start = end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.dtype not in _PLAIN:
            return None
        end += tensor.nbytes
    return start, end - start


def _gathered(tensors: list[Tensor], dtype: torch.dtype) -> tuple[tuple[int, int], object, Callable[[], None] | None]:
    """Where to receive a list into, what to keep meanwhile, and what brings it to the tensors then."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"Invalid usage of tensors with different dtypes: Found {tensor.dtype} and {dtype}")
        if not tensor.is_cpu:
            _check(tensor)
    place = _joined(tensors) if tensors[0].is_cpu else None
    if place is not None:
        return place, tensors, None
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    return _place(flat), flat, _deal_out(flat, tensors)


def _scattered(tensors: list[Tensor]) -> tuple[tuple[int, int], object]:
    """Where a list lies that is sent, and what to keep meanwhile."""
    place = _joined(tensors) if tensors[0].is_cpu else None
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
