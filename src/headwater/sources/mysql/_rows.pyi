from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Column = tuple[Any, Any, Any, int, int]

def decode(
    block: bytes | bytearray | memoryview, size: int, columns: bytes, allocate: Callable[[int], Any], /
) -> tuple[int, int, int, list[_Column]]: ...
def walk(block: bytes | bytearray | memoryview, start: int, size: int, /) -> tuple[int, int]: ...
