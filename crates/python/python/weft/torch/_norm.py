"""All-reduce, residual and RMSNorm as one operator, `weft::all_reduce_norm`.

On a GPU it is one kernel, on the current stream, where the ranks of the group are a team; elsewhere, and for tensors in host memory, it is the three calls that it stands for.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft

from ._backend import Calls
from ._groups import calls_of, found, remember
from ._tensors import _DATATYPES, _dense, _place

_OUTPUTS = ("same", "fp8", "fp8_by_row")
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
# No scale is less: rows of zeros have one, too.
_SCALE_MIN = 1 / (_FP8_MAX * 512)
_LINE = 16


class FusedNorm:
    """`output, residual = norm(x, residual, weight)`, where `x` is this rank's part of a sum, and everything else the same on all ranks:

        residual = round(x of rank 0 + x of rank 1 + … + residual)
        output = round(residual / sqrt(mean(residual²) + epsilon) · weight)

    Rows are the last dimension, of bfloat16 or float16, a multiple of eight elements and at most 16,384 on a GPU. `output` is "same", for the elements of `x`; "fp8", for float8_e4m3fn after division by `scale`; or
    "fp8_by_row", with a scale for each row, which is then returned as well. Every rank makes the same calls. There are no gradients.

    The first call on a GPU makes the ranks a team and loads the kernels, and cannot be captured in a graph; `prepare` does it before.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        epsilon: float = 1e-6,
        output: Literal["same", "fp8", "fp8_by_row"] = "same",
        scale: float = 1.0,
    ) -> None:
        if output not in _OUTPUTS:
            raise weft.InvalidCall(f"output is one of {', '.join(_OUTPUTS)}, not {output!r}")
        if not 0 < scale < float("inf") or not 0 <= epsilon < float("inf"):
            raise weft.InvalidCall("a scale is above zero, and an epsilon not below")
        self._calls = calls_of(group)
        self._name = remember(self._calls)
        self.epsilon = epsilon
        self.output = output
        self.scale = scale

    def prepare(self, device: torch.device | int | None = None) -> bool:
        """Makes the ranks a team and loads the kernels: every rank calls it. Whether there are kernels for this group; `Group.device_reason` says why not."""
        return self._calls._devices.norms(_device(device)) is not None

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        output, residual, scales = _all_reduce_norm(
            x, residual, weight, self.epsilon, self.output, self.scale, self._name
        )
        return (output, residual, scales) if self.output == "fp8_by_row" else (output, residual)


@torch.library.custom_op("weft::all_reduce_norm", mutates_args=(), device_types=("cpu", "cuda"))
def _all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, output: str, scale: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    calls = found(group)
    assert isinstance(calls, Calls)
    _check(x, residual, weight)
    norms = calls._devices.norms(x.device) if x.is_cuda else None
    if norms is None:
        return _by_three_calls(calls, x, residual, weight, epsilon, output, scale)
    results = _results(x, output)
    x, residual, weight = (aligned(tensor) for tensor in (x, residual, weight))
    out, residual_out, scales = results
    norms.call(
        x.numel() // x.shape[-1],
        x.shape[-1],
        _DATATYPES[x.dtype][0],
        epsilon,
        scale if output == "fp8" else 0.0,
        output == "fp8_by_row",
        *(_place(tensor) for tensor in (x, residual, weight, residual_out, out, scales)),
        calls._devices.stream,
    )
    return results


@_all_reduce_norm.register_fake
def _(x, residual, weight, epsilon, output, scale, group):
    _check(x, residual, weight)
    return _results(x, output)


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise weft.InvalidCall(f"rows are of bfloat16 or float16, not {x.dtype}")
    if x.dim() == 0 or x.shape != residual.shape or tuple(weight.shape) != (x.shape[-1],):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, residual, weight))
        raise weft.InvalidCall(f"rows, a residual like them, and a weight for each column are needed, not {shapes}")
    if not x.dtype == residual.dtype == weight.dtype or not x.device == residual.device == weight.device:
        raise weft.InvalidCall("rows, residual and weight are of one dtype, on one device")


def _results(x: Tensor, output: str) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=x.dtype if output == "same" else _FP8)
    scales = x.new_empty(x.shape[:-1] if output == "fp8_by_row" else (0,), dtype=torch.float32)
    return out, x.new_empty(x.shape), scales


def _by_three_calls(
    calls: Calls, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, output: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.float().contiguous()
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    calls.allreduce([total], options)
    summed = (total + residual.float()).to(x.dtype)
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    scales = wide.new_empty(0)
    if output == "same":
        return wide.to(x.dtype), summed, scales
    if output == "fp8_by_row":
        scales = (wide.abs().amax(-1) / _FP8_MAX).clamp(min=_SCALE_MIN)
        wide = wide / scales[..., None]
    else:
        wide = wide / scale
    return wide.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8), summed, scales


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that lies as the kernels of rows want it."""
    tensor = _dense(tensor)
    return tensor if tensor.data_ptr() % _LINE == 0 else tensor.clone()


def _device(device: torch.device | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
