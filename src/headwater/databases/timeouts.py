"""How long a database may be silent: one default for every family."""

from __future__ import annotations

from typing import Final

TIMEOUT_SECONDS: Final = 60.0
"""A server that is silent for this long counts as unreachable, also while the network takes our bytes."""
_LEAST_CONNECT_SECONDS: Final = 2
_MOST_CONNECT_SECONDS: Final = 10


def connect_seconds(timeout: float) -> int:
    """How long to wait for a new connection, so that it fails within half of *timeout*."""
    return max(_LEAST_CONNECT_SECONDS, min(_MOST_CONNECT_SECONDS, round(timeout / 2)))
