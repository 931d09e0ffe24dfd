"""Plain memory by its address, for the programs that NIXL's `_utils` are used in: tests and examples."""

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.malloc.restype = ctypes.c_void_p
_libc.free.argtypes = [ctypes.c_void_p]
_libc.free.restype = None


def malloc_passthru(size: int) -> int:
    """Memory of so many bytes, by its address."""
    address = _libc.malloc(size)
    if not address:
        raise MemoryError(f"{size} bytes are not to be had")
    return address


def free_passthru(address: int) -> None:
    """Gives it back."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills memory with bytes that are easily told from others."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(one: int, other: int, size: int) -> None:
    """That the bytes at both addresses are the same."""
    if ctypes.string_at(one, size) != ctypes.string_at(other, size):
        raise AssertionError(f"{size} bytes at {one:#x} and at {other:#x} differ")
