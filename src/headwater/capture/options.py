"""How a capture behaves, with defaults that suit most databases."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.sources.evolution import SchemaPolicy


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of a capture.

    :ivar epoch_seconds: an epoch with rows is sealed when it is this old, at the next transaction boundary.
    :ivar epoch_rows: … or has this many rows.
    :ivar epoch_bytes: … or this many bytes.
    :ivar heartbeat_seconds: how often an idle source is told to go on, and looked at.
    :ivar retry_seconds: the longest pause between two attempts to reach the source.
    """

    epoch_seconds: float = 0.2
    epoch_rows: int = 100_000
    epoch_bytes: int = 64 << 20
    heartbeat_seconds: float = 10.0
    retry_seconds: float = 30.0
    schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE
