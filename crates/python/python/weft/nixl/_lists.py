"""Lists of descriptors: where bytes are, by address, length and device."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Any, Self

from ._errors import nixlMismatchError, nixlNotFoundError
from ._numbers import nixl_mem_t

# What begins a list that was made into bytes; the last byte is the version.
_MAGIC = b"weft-nixl-descriptors\x01"
_HEAD = struct.Struct("<BBQ")


class _Descriptors:
    """Rows of three numbers, one after the other, so that they are handed on without a Python object for each."""

    __slots__ = ("_rows", "_type")
    # The number of a list's kind, where it is made into bytes, and how many fields a row has that is given as a tuple.
    _KIND = 0
    _FIELDS = 3

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._type = nixl_mem_t(type)
        self._rows = array("Q")
        if isinstance(descs, int):
            # So many descriptors of nothing, to be set later.
            self._rows = array("Q", bytes(24 * descs))
            self._blank(descs)
        elif isinstance(descs, list):
            for desc in descs:
                if not isinstance(desc, tuple):
                    raise TypeError("each descriptor must be a tuple")
                self.addDesc(desc)
        else:
            self._rows = _rows_of(descs, 3)
            self._blank(len(self))

    def _blank(self, count: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self._rows) // 3

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self)

    def isEmpty(self) -> bool:
        return not self._rows

    def _row(self, index: int) -> tuple[int, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no descriptor {index} among {len(self)}")
        return tuple(self._rows[3 * index : 3 * index + 3])

    def _fields(self, desc: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(desc) != self._FIELDS:
            raise ValueError(f"each descriptor must have exactly {self._FIELDS} elements")
        return desc

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._row(index)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._row(index)
        self._rows[3 * index : 3 * index + 3] = array("Q", self._fields(desc)[:3])

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._state() == other._state()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._type.name}, {len(self)} descriptors)"

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self._rows.extend(array("Q", self._fields(desc)[:3]))

    append = addDesc

    def index(self, desc: tuple[Any, ...]) -> int:
        """Where a descriptor is in the list."""
        wanted = tuple(self._fields(desc)[:3])
        for index in range(len(self)):
            if self._row(index) == wanted:
                return index
        raise nixlNotFoundError("NIXL_ERR_NOT_FOUND: no such descriptor")

    def remDesc(self, index: int) -> None:
        self._row(index)
        del self._rows[3 * index : 3 * index + 3]

    def clear(self) -> None:
        del self._rows[:]

    def print(self) -> None:
        print(repr(self))
        for desc in self:
            print(f"  {desc[1]} bytes at {desc[0]:#x}, device {desc[2]}")

    def _state(self) -> tuple[Any, ...]:
        return self._type, self._rows

    def __reduce__(self) -> tuple[Any, ...]:
        return from_bytes, (self.to_bytes(),)

    def to_bytes(self) -> bytes:
        """The list as bytes, which `from_bytes` makes a list of again. Numbers are little-endian."""
        head = _HEAD.pack(self._KIND, self._type, len(self))
        return _MAGIC + head + struct.pack(f"<{len(self._rows)}Q", *self._rows) + self._tail()

    def _tail(self) -> bytes:
        return b""

    def _take_tail(self, tail: bytes) -> bytes:
        return tail


class nixlXferDList(_Descriptors):
    """What is moved: an address, a length, a device."""

    __slots__ = ()


class _Noted(_Descriptors):
    """With something beside each descriptor."""

    __slots__ = ("_notes",)
    _FIELDS = 4

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._notes: list[bytes] = []
        super().__init__(type, descs)

    def _blank(self, count: int) -> None:
        self._notes = [b""] * count

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        note = _bytes(self._fields(desc)[3])
        super().addDesc(desc)
        self._notes.append(note)

    append = addDesc

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*self._row(index), self._notes[index])

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        note = _bytes(self._fields(desc)[3])
        super().__setitem__(index, desc)
        self._notes[index] = note

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._notes[index]

    def clear(self) -> None:
        super().clear()
        self._notes.clear()

    def _state(self) -> tuple[Any, ...]:
        return self._type, self._rows, self._notes

    def _tail(self) -> bytes:
        return b"".join(struct.pack("<I", len(note)) + note for note in self._notes)

    def _take_tail(self, tail: bytes) -> bytes:
        for number in range(len(self)):
            if len(tail) < 4:
                raise _foreign()
            (length,) = struct.unpack_from("<I", tail)
            if len(tail) - 4 < length:
                raise _foreign()
            self._notes[number] = tail[4 : 4 + length]
            tail = tail[4 + length :]
        return tail


class nixlRegDList(_Noted):
    """What is registered: an address, a length, a device, and a note that Weft has no use for."""

    __slots__ = ()
    _KIND = 1

    def trim(self) -> nixlXferDList:
        """The same without the notes."""
        trimmed = nixlXferDList(self._type)
        trimmed._rows = array("Q", self._rows)
        return trimmed


class nixlRemoteDList(_Noted):
    """What is another agent's: an address, a length, a device, and the agent's name."""

    __slots__ = ()
    _KIND = 2

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*self._row(index), self._notes[index].decode())


_KINDS: dict[int, type[_Descriptors]] = {kind._KIND: kind for kind in (nixlXferDList, nixlRegDList, nixlRemoteDList)}


def from_bytes(data: bytes) -> _Descriptors:
    """The list that `to_bytes` has made bytes of. They may come from anywhere: whatever is not such a list raises `nixlMismatchError`."""
    begin = len(_MAGIC) + _HEAD.size
    if not isinstance(data, bytes) or len(data) < begin or not data.startswith(_MAGIC):
        raise _foreign()
    kind, memory, count = _HEAD.unpack_from(data, len(_MAGIC))
    # What is not there is not made room for.
    if kind not in _KINDS or memory not in list(nixl_mem_t) or count > (len(data) - begin) // 24:
        raise _foreign()
    made = _KINDS[kind](nixl_mem_t(memory), count)
    end = begin + 24 * count
    made._rows = array("Q", struct.unpack_from(f"<{3 * count}Q", data, begin))
    if made._take_tail(data[end:]):
        raise _foreign()
    return made


def _foreign() -> nixlMismatchError:
    return nixlMismatchError("NIXL_ERR_MISMATCH: this is no list of descriptors of this version")


def _bytes(text: str | bytes | int) -> bytes:
    """A note. Numbers come in tests of NIXL's, and mean nothing."""
    return text if isinstance(text, bytes) else str(text).encode()


def _rows_of(descs: Any, columns: int) -> array[int]:
    """The numbers of an array of rows, as NumPy's are."""
    try:
        view = memoryview(descs)
    except TypeError:
        raise TypeError("descriptors are a list of tuples, or an array") from None
    if view.ndim != 2 or view.shape is None or view.shape[1] != columns:
        raise ValueError(f"descs must be a Nx{columns} array")
    # Both are what C calls long or long long, by the machine.
    if view.itemsize != 8 or view.format.lstrip("@=<") not in ("l", "L", "q", "Q"):
        raise ValueError(f"descs must be a Nx{columns} array of uint64 or int64")
    if not view.c_contiguous:
        raise ValueError("descs must be a C-contiguous array")
    rows = array("Q")
    rows.frombytes(view.tobytes())
    return rows


def strided_rows(descs: Any) -> array[int]:
    """The numbers of an array of rows of five: address, length, device, stride, count."""
    return _rows_of(descs, 5)


def is_array(descs: Any) -> bool:
    """Whether it is an array, of whichever library."""
    return hasattr(descs, "__array_interface__")
