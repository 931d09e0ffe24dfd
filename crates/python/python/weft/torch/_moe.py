"""Tokens to the ranks of their experts and back, as operators `weft::moe_dispatch` and `weft::moe_combine`: one kernel each, on the current stream, without the host."""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft._weft import _Experts as Experts

from ._groups import calls_of, found, remember
from ._norm import _device, aligned
from ._symmetric import tensor_at
from ._tensors import _NOTHING, _place

# Elements that share a scale where rows are sent as fp8.
SCALED = 128


class Received(NamedTuple):
    """What a rank finds after a dispatch. It is the memory of the `Moe`, and stays until the next dispatch."""

    rows: Tensor
    """In slots: by expert of this rank, source and number. Compact: one after the other, by source and token."""
    scales: Tensor
    """Of rows that were sent as fp8: of each 128 elements."""
    counts: Tensor
    """int32. In slots: rows by expert and source. Compact: by expert."""
    sources: Tensor
    """Compact: int32, rows by source."""
    row_experts: Tensor
    """Compact: int32, which of this rank's experts each row is for, -1 for others."""
    row_weights: Tensor
    """Compact: float32, their weights, 0 for others."""


class Moe:
    """Dispatch and combine for one kind of layer. Every rank makes one, with the same numbers; layers that are alike can share it.

        received = moe.dispatch(x, experts, weights)
        results = …                                    # the experts; writing into `moe.results` spares a copy
        y = moe.combine(results, weights)

    `received="slots"` is for few tokens: a row for each expert of a token, in fixed places, and `combine` multiplies with the weights. `"compact"` is for many: a token is there once, and whoever runs
    the experts sums what they give for a row with its weights. `capacity` is how many rows a rank has room for there. Rows are bfloat16, sent as they are or as "fp8".

    The kernels are loaded and the memory is made here, which waits for all ranks and cannot be captured in a graph; the calls can. There are no gradients.
    Raises `weft.GpuError` where the ranks cannot be a team.
    """

    def __init__(
        self,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        tokens_max: int,
        received: Literal["slots", "compact"] = "slots",
        capacity: int | None = None,
        sent: Literal["bf16", "fp8"] = "bf16",
        group: dist.ProcessGroup | None = None,
        device: torch.device | int | None = None,
    ) -> None:
        if received not in ("slots", "compact") or sent not in ("bf16", "fp8"):
            raise weft.InvalidCall("rows are received in slots or compact, and sent as bf16 or fp8")
        if min(hidden, experts, top_k, tokens_max) < 1:
            raise weft.InvalidCall("hidden, experts, top_k and tokens_max are at least one")
        self._calls = calls_of(group)
        ranks = self._calls._size
        compact, narrow = received == "compact", sent == "fp8"
        if not compact and capacity is not None:
            raise weft.InvalidCall("slots have room for everything: a capacity is for compact rows")
        room = (ranks * tokens_max if capacity is None else capacity) if compact else None
        device = _device(device)
        self._experts: Experts = self._calls._devices.experts(
            device, hidden=hidden, experts=experts, top_k=top_k, tokens_max=tokens_max, capacity=room, narrow=narrow
        )
        self.hidden, self.top_k, self.tokens_max = hidden, top_k, tokens_max
        self.experts_here = experts // ranks
        self._compact = compact
        lead = (room,) if compact else (self.experts_here, ranks, tokens_max)
        beside = (*lead, top_k) if compact else (0,)
        kinds = [
            (torch.float8_e4m3fn if narrow else torch.bfloat16, (*lead, hidden)),
            (torch.float32, (*lead, hidden // SCALED) if narrow else (0,)),
            (torch.int32, beside),
            (torch.float32, beside),
            (torch.bfloat16, (*lead, hidden)),
        ]
        tensors = [
            tensor_at(self._experts, place, dtype, shape, device)
            for place, (dtype, shape) in zip(self._experts.places(), kinds)
        ]
        self.rows, self.scales, self.row_experts, self.row_weights, self.results = tensors
        count = self.experts_here + ranks if compact else self.experts_here * ranks
        self.counts = torch.zeros(count, dtype=torch.int32, device=device)
        self._name = remember(self)

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Received:
        """Sends this rank's tokens: rows `x`, for each the numbers of its experts, where what is no expert's number stands for none, and their weights."""
        _moe_dispatch(
            x, experts, weights, self.rows, self.scales, self.counts, self.row_experts, self.row_weights, self._name
        )
        here = self.experts_here
        if self._compact:
            counts, sources = self.counts[:here], self.counts[here:]
        else:
            counts, sources = self.counts.view(here, -1), self.counts[:0]
        return Received(self.rows, self.scales, counts, sources, self.row_experts, self.row_weights)

    def combine(self, results: Tensor, weights: Tensor) -> Tensor:
        """Sums what the experts gave for each token of the last dispatch. `results` lie as the received rows do; `weights` are those of the dispatch."""
        return _moe_combine(results, weights, self._name)

    def check(self) -> None:
        """Raises what has become of calls that the stream has come past: `weft.OverCapacity`, once, where a rank had no room, and `weft.CollectiveError` where one failed."""
        self._experts.check()


@torch.library.custom_op(
    "weft::moe_dispatch", mutates_args=("rows", "scales", "counts", "row_experts", "row_weights"), device_types="cuda"
)
def _moe_dispatch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    rows: Tensor,
    scales: Tensor,
    counts: Tensor,
    row_experts: Tensor,
    row_weights: Tensor,
    moe: str,
) -> None:
    of = _moe(moe)
    _check_dispatch(of, x, experts, weights)
    stream = of._calls._devices.stream
    x = aligned(x)
    experts, weights = aligned(experts.to(torch.int32)), aligned(weights.to(torch.float32))
    places = (_place(x), _place(experts), _place(weights) if of._compact else _NOTHING, _place(of.counts))
    of._experts.dispatch(x.shape[0], *places, stream)
    # A compiler may have put other tensors in the place of ours.
    ours = (of.rows, of.scales, of.counts, of.row_experts, of.row_weights)
    for own, asked in zip(ours, (rows, scales, counts, row_experts, row_weights)):
        if own.numel() and own.data_ptr() != asked.data_ptr():
            asked.copy_(own)


@_moe_dispatch.register_fake
def _(x, experts, weights, rows, scales, counts, row_experts, row_weights, moe):
    _check_dispatch(_moe(moe), x, experts, weights)


@torch.library.custom_op("weft::moe_combine", mutates_args=(), device_types="cuda")
def _moe_combine(results: Tensor, weights: Tensor, moe: str) -> Tensor:
    of = _moe(moe)
    out = _combined(of, results, weights)
    if results.data_ptr() != of.results.data_ptr() or not results.is_contiguous():
        of.results.copy_(results)
    weights = aligned(weights.to(torch.float32))
    of._experts.combine(_NOTHING if of._compact else _place(weights), _place(out), of._calls._devices.stream)
    return out


@_moe_combine.register_fake
def _(results, weights, moe):
    return _combined(_moe(moe), results, weights)


def _moe(name: str) -> Moe:
    moe = found(name)
    assert isinstance(moe, Moe)
    return moe


def _check_dispatch(of: Moe, x: Tensor, experts: Tensor, weights: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != of.hidden or x.dtype != torch.bfloat16:
        raise weft.InvalidCall(f"rows of {of.hidden} bfloat16 are sent, not {tuple(x.shape)} of {x.dtype}")
    _check_gate(of, experts, "experts")
    _check_gate(of, weights, "weights")
    if experts.shape[0] != x.shape[0] or weights.shape[0] != x.shape[0]:
        raise weft.InvalidCall("there are experts and weights for each row")
    if experts.dtype not in (torch.int32, torch.int64):
        raise weft.InvalidCall(f"experts are int32 or int64, not {experts.dtype}")
    if not x.device == experts.device == weights.device == of.rows.device:
        raise weft.InvalidCall(f"everything is on {of.rows.device}")


def _check_gate(of: Moe, gate: Tensor, what: str) -> None:
    if gate.dim() != 2 or gate.shape[1] != of.top_k:
        raise weft.InvalidCall(f"{what} are by token and choice, {of.top_k} for each, not {tuple(gate.shape)}")


def _combined(of: Moe, results: Tensor, weights: Tensor) -> Tensor:
    _check_gate(of, weights, "weights")
    if results.shape != of.results.shape or results.dtype != torch.bfloat16 or results.device != of.results.device:
        raise weft.InvalidCall(f"results are {tuple(of.results.shape)} of bfloat16, on {of.results.device}")
    return results.new_empty((weights.shape[0], of.hidden))
