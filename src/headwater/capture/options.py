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

    :ivar epoch_seconds: an epoch with rows is sealed when it is this old, at the next transaction boundary.
    :ivar epoch_rows: … or has this many rows.
    :ivar epoch_bytes: … or this many bytes.
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
