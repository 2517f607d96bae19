from __future__ import annotations

def decode(
    data: bytes | bytearray | memoryview, columns: bytes, most: int, /
) -> tuple[int, int, int, list[tuple[bytes, bytes, bytes | None]]]: ...
