"""The log of a Delta table: what it says of one version, and which epoch that is. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from headwater.stream.epoch import PHYSICAL_SHIFT

FEED: Final = "delta.enableChangeDataFeed"


def epoch_of(version: int) -> int:
    """The epoch of a version."""
    return (version + 1) << PHYSICAL_SHIFT


def version_of(epoch: int) -> int:
    """The newest version whose epoch is not after *epoch*; -1 before the first."""
    return (epoch >> PHYSICAL_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Commit:
    """What the log of the table says of one version.

    :ivar added: files that came with new rows. :ivar removed: files whose rows went. :ivar changes: files that tell
        the changes; where there are any, the others say nothing.
    :ivar feed: whether the change data feed is on from here on; ``None``: as before.
    """

    time_ms: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    feed: bool | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Those that the change data feed is read from."""
        return self.changes or (*self.added, *self.removed)

    @classmethod
    def read(cls, text: str) -> Commit:
        time_ms, feed = 0, None
        found: dict[str, list[str]] = {"add": [], "remove": [], "cdc": []}
        for line in text.splitlines():
            for kind, action in json.loads(line).items() if line.strip() else ():
                if kind == "commitInfo":
                    time_ms = int(action.get("inCommitTimestamp") or action.get("timestamp") or 0)
                elif kind == "metaData":
                    feed = str(action.get("configuration", {}).get(FEED, "false")).lower() == "true"
                elif kind == "cdc" or (kind in found and action.get("dataChange", True)):
                    found[kind].append(unquote(action["path"]))
        return cls(time_ms, tuple(found["add"]), tuple(found["remove"]), tuple(found["cdc"]), feed)
