from __future__ import annotations

def receive(
    get_copy_data: int,
    consume_input: int,
    free: int,
    connection: int,
    socket: int,
    patience_ms: int,
    size: int,
    /,
) -> tuple[int, bytes]: ...
