"""Snapshots of a source: what the backfill needs of a database to read history beside the live changes.

The one that plans exports a snapshot and keeps it open; others, on other machines, read inside it. What a snapshot
contains is decided from the position of a change alone (:class:`SnapshotMark`), so that a change is either in the rows
that were read or comes after them: never both, never neither.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidOffset
from headwater.sources.offset import CdcOffset
from headwater.sources.splits import Cut, KeyRange, PartsProgress, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

_MARKS: Final = {
    "Citus": "headwater.sources.citus.offset:CitusMark",
    "MongoDb": "headwater.sources.mongodb.offset:MongoMark",
    "MySql": "headwater.sources.mysql.offset:MySqlMark",
    "Postgres": "headwater.sources.postgres.mark:PostgresMark",
    "SqlServer": "headwater.sources.sqlserver.offset:SqlServerMark",
}
_Offset = TypeVar("_Offset", bound=CdcOffset)


class SnapshotMark(ABC):
    """What a snapshot contains, as small as a position; decided from the ``_position`` of a change alone."""

    __slots__ = ()

    kind: ClassVar[str]
    """The key of the JSON form."""

    @property
    @abstractmethod
    def low(self) -> CdcOffset:
        """Everything that committed before it is in the snapshot."""

    @property
    @abstractmethod
    def high(self) -> CdcOffset:
        """Nothing that committed after it is in the snapshot."""

    @abstractmethod
    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """For each ``_position`` of a change: whether the snapshot has it already."""

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes that are in the source's log and that this snapshot, taken after them, does not show yet.

        A commit is in the log an instant, or with synchronous replication long, before other sessions see it.
        """
        unseen: NDArray[np.bool_] = ~self.contains(positions)
        return unseen

    @abstractmethod
    def to_fields(self) -> dict[str, Any]:
        """What JSON keeps beneath the kind."""

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """:raises InvalidOffset: a field is missing or of another kind."""

    def to_json(self) -> str:
        """One line: an object with one key, the kind of the source."""
        return json.dumps({self.kind: self.to_fields()}, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class PositionMark(SnapshotMark, Generic[_Offset]):
    """What a snapshot at one position of the log contains: everything before it and nothing after it.

    For databases in which no session can enter the snapshot of another one. The planner names a position that every
    later snapshot has passed; tasks read what is there when they read, and undo with the changes of the log what was
    committed since (:mod:`headwater.backfill.cdc.rewind`). The rows are those of the position, whoever reads them and
    when. The JSON form has the position as ``at``.
    """

    offset_type: ClassVar[type[CdcOffset]]

    at: _Offset

    @property
    def low(self) -> _Offset:
        return self.at

    @property
    def high(self) -> _Offset:
        return self.at

    def to_fields(self) -> dict[str, Any]:
        return {"at": self.at.to_fields()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        return cls(cls._position(fields.get("at")))

    @classmethod
    def _position(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise InvalidOffset(
                f"A mark of {cls.kind} has no position.", next_step="Give the text that to_json() wrote."
            )
        return cls.offset_type.from_fields(fields)


class ExportedSnapshot(Protocol):
    """A snapshot that others can read in, for as long as it is kept open. One thread."""

    @property
    def name(self) -> str:
        """What readers need to take part in it."""
        ...

    @property
    def mark(self) -> SnapshotMark: ...

    def is_open(self) -> bool:
        """Whether the source still keeps it; asks it."""
        ...

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has in this snapshot. :raises SourceNotFound: it has no such table."""
        ...

    def has_key(self, table: SourceTable) -> bool:
        """Whether the source has a key that names each row of *table*, never null, and finds rows by it."""
        ...

    def files(self, table: SourceTable) -> str:
        """Names the files that its blocks are in, with blanks between: when one of them goes its rows are elsewhere."""
        ...

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows.

        :param kind: ``None`` chooses: by key; by heap where the key is spread over the heap.
        :raises UnsupportedTable: it cannot be split in that way.
        """
        ...

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
        ...

    def close(self) -> None: ...


class KeyOrder(Protocol):
    """The order of a table's keys as its database has it. It can be pickled."""

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        """For each row of key columns: how many of the ascending *cuts* lie before it."""
        ...


class SnapshotSource(Protocol):
    """Reads the tables of one database. It can be pickled: it holds the way to the database, no connection."""

    def export(self) -> ExportedSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        ...

    def order(self, table: SourceTable) -> KeyOrder:
        """The order of its keys. :raises UnsupportedTable: it can neither be computed here nor asked for."""
        ...

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as the source prints them.

        :raises InvalidRange: a value is none of its column's type, or the range ends before it begins.
        """
        ...

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot* (``None``: as they are now), in no order.

        A connection that breaks is made anew and the read goes on after the last row that was given.

        :raises SnapshotExpired: the snapshot is gone, or no longer shows the table as it was: it must be planned anew.
        :raises SourceUnreachable: also the new connection broke.
        """
        ...


class LaterParts(Protocol):
    """One read of parts of a table in a transaction of its own, later than the snapshot that they were planned in."""

    @property
    def high(self) -> CdcOffset:
        """The rows show nothing that committed after it."""
        ...

    @property
    def progress(self) -> PartsProgress:
        """How far the rows were given."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, part by part, each in key order. :raises SourceUnreachable: the connection broke."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class UnsharedSnapshots(SnapshotSource, Protocol):
    """Of a database in which nobody can enter the snapshot of somebody else.

    Tasks read later than the snapshot that was planned in, and undo with the log what was committed since.
    """

    def open_parts(
        self, table: SourceTable, parts: Sequence[KeyRange], *, columns: Sequence[str] | None = None
    ) -> LaterParts:
        """The rows of *parts* as they are now, all at one moment.

        :raises SnapshotExpired: the table is not what it was: it must be planned anew.
        :raises SourceUnreachable: no answer.
        """
        ...


@runtime_checkable
class RemarkingSnapshots(Protocol):
    """Reads that may have something to say of a table which its rows do not show."""

    def take_remarks(self, table: SourceTable) -> list[str]:
        """What the reads of *table* in this process saw since this was last asked; no values."""
        ...


def open_snapshots(dsn: str, *, lock_seconds: float | None = None) -> SnapshotSource:
    """The snapshots of the database at *dsn*; nothing is connected yet. An empty *dsn*: there is no database.

    :param lock_seconds: how long who plans waits for a table that others have locked: then it is ``SourceBusy``.
    :raises InvalidDsn: no kind of database that can be read. :raises DriverMissing: its driver is not installed.
    """
    if not dsn:
        from headwater.sources.written import NoSnapshots

        return NoSnapshots()
    from headwater.sources.open import Family, class_of, family_of, no_family

    family = family_of(dsn)
    if family is None:
        raise no_family("read")
    kind = class_of(family, "snapshots", "Snapshots")
    made: SnapshotSource = kind(dsn) if family is Family.MONGODB else kind(dsn, lock_seconds)
    return made


def mark_from_json(text: str) -> SnapshotMark:
    """What ``SnapshotMark.to_json`` wrote, of any kind of source.

    :raises InvalidOffset: it is not such a text.
    """
    read = json.loads(text)
    kind, fields = next(iter(read.items())) if isinstance(read, dict) and len(read) == 1 else ("", {})
    if kind not in _MARKS:
        raise InvalidOffset(f"Received a mark of kind {kind!r}; valid are {', '.join(_MARKS)}.")
    module, _, name = _MARKS[kind].partition(":")
    made: Any = getattr(import_module(module), name)
    mark: SnapshotMark = made.from_fields(fields)
    return mark
