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
    return tensor_at(memory, (memory.address, math.prod(shape) * dtype.itemsize), dtype, shape, place)


class _Place:
    """How torch finds a part of memory, and keeps its owner."""

    def __init__(self, owner: object, place: tuple[int, int]) -> None:
        address, nbytes = place
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(
    owner: object, place: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """A tensor that is a view of no other: compilers take no two that are written to and share a storage."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    if not math.prod(shape):
        return tensor.view(shape) if shape != (0,) else tensor
    return tensor.set_(torch.as_tensor(_Place(owner, place), device=device).untyped_storage(), 0, shape)
