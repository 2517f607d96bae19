from __future__ import annotations

def gather(
    offsets: object, data: object, validity: object, start: int, rows: int, order: object, /
) -> tuple[bytes, bytes, bytes | None, int]: ...
