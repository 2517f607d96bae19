"""Splits: parts of a table that are read by themselves, between two cuts. Pure.

A cut lies between two keys, or between two blocks of the heap; its values are texts as the source prints them, so that
they can be kept, sent and put into a statement whatever the type. Two neighbouring splits share a cut, the first has no
start and the last no end: together they cover every key that is or will be there, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SplitKind(Enum):
    """What cuts lie between.

    ``KEY``: keys of the table, so that a change tells which split it belongs to. ``HEAP``: blocks of the table's file
    (Postgres: ``ctid``), which no change tells.
    """

    KEY = "key"
    HEAP = "heap"


@dataclass(frozen=True, slots=True)
class Cut:
    """A place just before the key *values*, or just after it.

    :ivar values: the text of each key column, in key order; of a prefix of them when the others do not matter. For the
        heap: the number of the block.
    """

    values: tuple[str, ...]
    after: bool = False

    def to_json(self) -> list[Any]:
        return [list(self.values), self.after]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Cut:
        return cls(tuple(value[0]), bool(value[1]))


@dataclass(frozen=True, slots=True)
class KeyRange:
    """What lies between two cuts; ``None`` is the beginning or the end of everything."""

    start: Cut | None = None
    end: Cut | None = None

    def to_json(self) -> list[Any]:
        return [cut and cut.to_json() for cut in (self.start, self.end)]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> KeyRange:
        return cls(*(None if cut is None else Cut.from_json(cut) for cut in value))


class PartsProgress:
    """How far some ranges were read, one after the other, each in key order."""

    def __init__(self, parts: Sequence[KeyRange]) -> None:
        self._parts = tuple(parts)
        self._ended = 0
        self._cut: Cut | None = None

    def reach(self, cut: Cut) -> None:
        """All rows of the range up to *cut* were given."""
        self._cut = cut

    def end_part(self) -> None:
        """All rows of the range were given; the next one begins."""
        self._ended, self._cut = self._ended + 1, None

    @property
    def given(self) -> tuple[KeyRange, ...]:
        """What was read."""
        ended = self._parts[: self._ended]
        return ended if self._cut is None else (*ended, KeyRange(self._parts[self._ended].start, self._cut))

    @property
    def rest(self) -> tuple[KeyRange, ...]:
        """What was not."""
        rest = self._parts[self._ended :]
        return rest if self._cut is None else (KeyRange(self._cut, rest[0].end), *rest[1:])


@dataclass(frozen=True, slots=True)
class Split:
    """One split as it was planned.

    :ivar number: its place among the splits of the table, from 0.
    :ivar rows: about how many rows it has.
    :ivar empty: it had no row in the snapshot in which the splits were planned: it need not be read.
    """

    number: int
    range: KeyRange
    rows: int
    empty: bool = False


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The splits of a table, in the order of their cuts.

    :ivar kind: of all its cuts.
    :ivar rows: about how many rows the table has. :ivar size: about how many bytes.
    :ivar why: one sentence for a person: how the splits were found.
    """

    kind: SplitKind
    splits: tuple[Split, ...]
    rows: int
    size: int
    why: str
