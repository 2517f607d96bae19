from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Column = tuple[Any, Any, Any, int, int]

def decode(block: bytes, columns: bytes, allocate: Callable[[int], Any], /) -> tuple[int, list[_Column]]: ...
