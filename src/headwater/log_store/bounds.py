"""What a log has forgotten: delivered and truncated, or dropped by retention."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.state import Field, FieldType, TableSchema
from headwater.stream import Epoch

BOUNDS = TableSchema(
    "log_bounds",
    1,
    key=(Field("log", FieldType.TEXT),),
    value=(Field("gone", FieldType.UINT), Field("dropped", FieldType.UINT)),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The newest epoch that is gone, and the newest that went undelivered, by retention."""

    gone: Epoch
    dropped: Epoch
