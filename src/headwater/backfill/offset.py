"""QueryOffset: how far a query is. Spark keeps it as JSON and compares it as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headwater.backfill.errors import ForeignQueryOffset

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class QueryOffset:
    """The changes up to *epoch* and the history up to *plan* are delivered."""

    epoch: int
    plan: int

    def to_json(self) -> dict[str, int]:
        """Sorted keys, integers only: equal offsets are equal texts."""
        return {"e": self.epoch, "p": self.plan, "v": VERSION}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> QueryOffset:
        """:raises ForeignQueryOffset: not an offset of ours, or of a later release."""
        if value.get("v") != VERSION or not all(type(value.get(key)) is int for key in "ep"):
            raise ForeignQueryOffset(
                f"The offset of the query is of version {value.get('v')!r}; this release reads {VERSION}.",
                next_step="Use the checkpoint with the release that wrote it, or begin with a new one.",
            )
        return cls(value["e"], value["p"])
