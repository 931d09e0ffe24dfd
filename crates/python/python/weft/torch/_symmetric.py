"""Tensors that the kernels of all ranks reach."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ._groups import calls_of
from ._norm import _device


def symmetric_empty(
    *shape: int,
    dtype: torch.dtype | None = None,
    device: torch.device | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """A tensor in memory that all ranks of a group have as much of, and that their kernels reach: collectives and fused norms work on it where it lies, and copy nothing.

    Every rank calls it, with the same shape, before all of them go on. The memory is given back with the group, not with the tensor. Raises `weft.GpuError` where the ranks cannot be a team.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    place = _device(device)
    memory = calls_of(group)._devices.symmetric(place, max(1, math.prod(shape) * dtype.itemsize))
    flat = torch.as_tensor(memory, device=place)
    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
