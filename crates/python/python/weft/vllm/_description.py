"""What a worker holds, so completely described that another worker can name any byte of it.

A worker publishes one description of its KV cache. From two of them either end computes which heads of which layers they have in common and
where these lie; tensor-parallel degrees, block sizes and memory layouts may differ. What may not differ is what the numbers mean: that is the
`Meaning`, and two ends that do not agree on it refuse each other by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import weft

# Raised with every change of what descriptions or messages say.
VERSION = 3

# No description is longer, whatever a peer says.
MAX_BYTES = 4 << 20


class Mismatch(Exception):
    """Two ends that cannot exchange KV caches, and why."""


@dataclass(frozen=True)
class Meaning:
    """What must be equal at both ends for the bytes to mean the same."""

    version: int
    vllm: str
    model: str
    dtype: str
    cache_dtype: str
    head_bytes: int
    kv_heads: int
    layers: int
    packing: str

    def differences(self, other: Meaning) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [f"{field} {mine[field]!r} here, {theirs[field]!r} there" for field in mine if mine[field] != theirs[field]]


@dataclass(frozen=True)
class Layer:
    """Where the blocks of a layer lie: in which published region, and at which strides."""

    region: int
    blocks: int
    # Tokens of a block, and how many of them are packed together and cannot be told apart.
    tokens: int
    granule: int
    heads: tuple[int, int]
    parts: int
    # One granule of one head of one part.
    unit_bytes: int
    base: int
    part_stride: int
    block_stride: int
    granule_stride: int
    head_stride: int

    def pages(self) -> weft.Pages:
        return weft.Pages(
            blocks=self.blocks,
            tokens=self.tokens // self.granule,
            heads=self.heads,
            parts=self.parts,
            unit_bytes=self.unit_bytes,
            base=self.base,
            part_stride=self.part_stride,
            block_stride=self.block_stride,
            token_stride=self.granule_stride,
            head_stride=self.head_stride,
        )


@dataclass(frozen=True)
class Description:
    """One worker of one engine."""

    engine: str
    rank: int
    ranks: int
    meaning: Meaning
    layers: dict[str, Layer]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Description:
        """Raises `Mismatch` where these are not the bytes of a description."""
        try:
            fields: dict[str, Any] = json.loads(text)
            layers = {
                str(name): Layer(**{**layer, "heads": (int(layer["heads"][0]), int(layer["heads"][1]))})
                for name, layer in fields["layers"].items()
            }
            for layer in layers.values():
                if not (0 < layer.granule <= layer.tokens and layer.tokens % layer.granule == 0):
                    raise ValueError(f"blocks of {layer.tokens} tokens in granules of {layer.granule}")
            meaning = Meaning(**fields["meaning"])
            return cls(str(fields["engine"]), int(fields["rank"]), int(fields["ranks"]), meaning, layers)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Mismatch(f"the peer's description of its cache cannot be read: {error!r}") from error

    def check(self, other: Description) -> None:
        """Raises `Mismatch` where the other's bytes mean something else."""
        differences = self.meaning.differences(other.meaning)
        if differences:
            raise Mismatch(
                f"engine {self.engine} and engine {other.engine} cannot exchange KV caches: {'; '.join(differences)}"
            )


def dense(description: Description, blocks: int) -> tuple[Description, int]:
    """The same layers, one after the other in a single region, each with so many blocks; and how long that region is.

    This is how a landing place is laid out. Both ends compute it, so that nothing of it travels.
    """
    layers, base = {}, 0
    for name, layer in description.layers.items():
        head = layer.tokens // layer.granule * layer.unit_bytes
        part = (layer.heads[1] - layer.heads[0]) * head
        layers[name] = replace(
            layer, region=0, blocks=blocks, base=base,
            granule_stride=layer.unit_bytes, head_stride=head, part_stride=part, block_stride=layer.parts * part,
        )  # fmt: skip
        base += blocks * layer.parts * part
    return replace(description, layers=layers), base


@dataclass(frozen=True)
class Source:
    """Heads of a layer to be had from one of several workers."""

    worker: int
    layer: str
    heads: tuple[int, int]


def sources(mine: Description, others: Sequence[Description]) -> list[Source]:
    """From which worker which heads come, so that every head comes once. Raises `Mismatch` where some come from nowhere.

    Where several hold a head, neighbours in rank are preferred to always the same one, which spreads the load.
    """
    found = []
    order = sorted(range(len(others)), key=lambda nth: (nth * mine.ranks // max(len(others), 1) != mine.rank, nth))
    for name, layer in mine.layers.items():
        wanted, end = layer.heads
        while wanted < end:
            holder = next(
                (nth for nth in order if name in others[nth].layers and _holds(others[nth].layers[name], wanted)), None
            )
            if holder is None:
                raise Mismatch(f"no worker of engine {others[0].engine if others else '?'} holds head {wanted} of {name}")
            upto = min(end, others[holder].layers[name].heads[1])
            found.append(Source(holder, name, (wanted, upto)))
            wanted = upto
    return found


def _holds(layer: Layer, head: int) -> bool:
    return layer.heads[0] <= head < layer.heads[1]


def legs(
    mine: Description,
    other: Description,
    wanted: Sequence[Source],
    my_blocks: Sequence[int],
    other_blocks: Sequence[int],
    tokens: tuple[int, int],
) -> list[tuple[int, weft.Spans, int, weft.Spans]]:
    """Which bytes of my regions are which bytes of the other's: the legs of one transfer.

    Layers that are laid out alike share what is computed, which for most models is all of them.
    """
    computed: dict[tuple[Any, ...], tuple[weft.Spans, weft.Spans]] = {}
    moved = []
    for source in wanted:
        here, there = mine.layers[source.layer], other.layers[source.layer]
        if here.granule != there.granule:
            raise Mismatch(
                f"{source.layer} packs {here.granule} tokens together in engine {mine.engine}, {there.granule} in engine {other.engine}"
            )
        key = (here, there, source.heads)
        if key not in computed:
            granules = (tokens[0] // here.granule, -(-tokens[1] // here.granule))
            computed[key] = here.pages().pair(my_blocks, there.pages(), other_blocks, granules, source.heads)
        near, far = computed[key]
        moved.append((here.region, near, there.region, far))
    return moved
