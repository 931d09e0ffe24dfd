"""Coroutines of what the compiled part begins."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def awaited(begin: Callable[[], Awaitable[T]]) -> T:
    """What `begin` gives, begun when this is first awaited."""
    return await begin()
