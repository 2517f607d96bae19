"""How a capture behaves, with defaults that suit most databases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headwater.sources.evolution import SchemaPolicy


class OnRewrite(Enum):
    """What happens to a table that must be read again: its rows or columns changed in a way that no log tells."""

    REREAD = "reread"  # by itself, beside the changes of the other tables
    STOP = "stop"  # the table stops until `headwater resnapshot` is run


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of a capture.

    :ivar epoch_seconds: the most that a change waits for the seal of its epoch under load, while the store is fast;
        nothing after a quiet spell. An epoch ends at a transaction boundary.
    :ivar epoch_rows: an epoch with this many rows is sealed earlier,
    :ivar epoch_bytes: … or with this many bytes.
    :ivar heartbeat_seconds: how often a heartbeat is written to an idle source.
    :ivar schema_check_seconds: how often the source's catalog is compared with the captured tables.
    :ivar on_rewrite: what happens to a table whose rows changed without being logged.
    :ivar retry_seconds: the longest pause between two attempts to reach the source or the store.
    """

    epoch_seconds: float = 0.2
    epoch_rows: int = 100_000
    epoch_bytes: int = 64 << 20
    heartbeat_seconds: float = 10.0
    schema_check_seconds: float = 10.0
    on_rewrite: OnRewrite = OnRewrite.REREAD
    retry_seconds: float = 30.0
    schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE
