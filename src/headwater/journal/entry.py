"""The values of a journal: ids, an entry, the head token of a segment, the durability levels, the limits.

Ids of sessions and segments are UUIDv7, lower case with hyphens: their string order is creation order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from uuid_utils import uuid7

from headwater.journal.errors import InvalidEntryError, InvalidNameError

RESERVED = frozenset({"v", "seq", "ts", "kind", "batch", "key", "crc"})
"""Names that the line format uses itself: no field of an entry may have one."""

SEGMENT_START = "segment_start"
"""The kind of a segment's first entry; its `session_id` and `segment_id` must be those of the path."""

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
_HEAD = re.compile(r"(\d+)-([0-9a-f]{8})", re.ASCII)


def new_id() -> str:
    """A new id, above all that this process generated before."""
    return str(uuid7())


def is_id(text: str) -> bool:
    """Is *text* a UUID in canonical spelling?"""
    return _CANONICAL.fullmatch(text) is not None


def check_id(text: str, what: str) -> str:
    """*text* itself.

    :raises InvalidNameError: when it is not a lower-case hyphenated UUID.
    """
    if not is_id(text):
        raise InvalidNameError(
            f"Received {what} `{text}`; valid is a lower-case hyphenated UUID.",
            next_step="Create one with headwater.journal.entry.new_id().",
        )
    return text


@dataclass(frozen=True, slots=True)
class Head:
    """Where a segment ends: seq of the newest entry and its chained checksum.

    Two segments with an equal head hold the same entries. An empty segment is at seq 0.
    The text form is `12-0a1b2c3d`.
    """

    seq: int
    crc: int

    def __str__(self) -> str:
        return f"{self.seq}-{self.crc:08x}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """:raises InvalidEntryError: when *text* is not of the form `12-0a1b2c3d`."""
        match = _HEAD.fullmatch(text)
        if match is None:
            raise InvalidEntryError(f"Received head `{text}`; valid is SEQ-CRC such as 12-0a1b2c3d.")
        return cls(int(match[1]), int(match[2], 16))


EMPTY = Head(0, 0)
"""The head of a segment without entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One state transition: one line of a segment.

    :param kind: what happened, in snake_case. The store keeps kinds that it does not know.
    :param fields: JSON values under names outside :data:`RESERVED`.
    :param ts: Unix milliseconds; the store's clock when None.

    The rest is set by the store and does not count for equality: `seq` (from 1, gapless), `crc`
    (chained), `key` (idempotency key), `batch` (number and size when it was appended in a batch).
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    ts: int | None = None
    seq: int = field(default=0, compare=False)
    crc: int = field(default=0, compare=False)
    key: str | None = field(default=None, compare=False)
    batch: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def head(self) -> Head:
        """The head of the segment right after this entry."""
        return Head(self.seq, self.crc)


class Durability(enum.StrEnum):
    """What `append` promises on return; a killed process loses nothing at any level. See docs/formats/journal.md."""

    NONE = "none"
    FLUSH = "flush"
    FSYNC = "fsync"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one append; `line_bytes` is the format's own bound, which a reader relies on."""

    entry_bytes: int = 16 << 20
    batch_bytes: int = 64 << 20
    line_bytes: int = field(default=64 << 20, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.entry_bytes <= self.line_bytes or not 0 < self.batch_bytes <= self.line_bytes:
            raise InvalidEntryError(f"Received limits {self}; valid is 1 … {self.line_bytes} bytes.")


@dataclass(frozen=True, slots=True)
class Truncation:
    """What `truncate` did: the head now, and where the removed bytes were saved (None: nothing removed)."""

    head: Head
    saved: str | None


@dataclass(frozen=True, slots=True)
class Rewound:
    """In the stream of `follow`: the entries after `seq` that it gave before were truncated."""

    seq: int
