"""Snapshots that are one position of the log: what is the same for every such database.

A snapshot keeps no transaction open: its position is enough to read at, however long it takes and whoever begins anew.
Nothing is locked and nothing old is kept at the server. Tasks read later than the snapshot was planned; a read that
broke goes on after the last key that it gave (:class:`~headwater.sources.snapshots.UnsharedSnapshots`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Generic, Self, TypeVar

import pyarrow as pa

from headwater.errors import HeadwaterError, TransientError
from headwater.sources.errors import SnapshotExpired
from headwater.sources.snapshots import LaterParts, SnapshotMark
from headwater.sources.splits import Cut, KeyRange, SplitKind, SplitPlan
from headwater.sources.table import SourceColumn, SourceTable
from headwater.system.retry import Retries

_Dsn = TypeVar("_Dsn")
_Parts = TypeVar("_Parts", bound=LaterParts)
_Session = TypeVar("_Session")
_Catalog = TypeVar("_Catalog")
_Mark = TypeVar("_Mark", bound=SnapshotMark)


class PositionSnapshot(ABC, Generic[_Session, _Catalog, _Mark]):
    """A position. One thread. Those who implement it set :attr:`_mark`.

    :param plan_splits: splits of about so many rows of a table. :param page_end: see :meth:`page_end`.
    """

    _mark: _Mark

    def __init__(
        self,
        plan_splits: Callable[[_Session, SourceTable, _Catalog, int, SplitKind | None], SplitPlan],
        page_end: Callable[[_Session, SourceTable, _Catalog, KeyRange, int], Cut | None],
    ) -> None:
        self._plan_splits, self._page_end = plan_splits, page_end
        self._catalogs: dict[tuple[str, str], _Catalog] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What readers need: the position."""
        return self._mark.to_json()

    @property
    def mark(self) -> _Mark:
        """What it contains."""
        return self._mark

    def is_open(self) -> bool:
        """Whether the server answers."""
        try:
            with self._asked() as session:
                self._ping(session)
        except HeadwaterError:
            return False
        return True

    def has_key(self, table: SourceTable) -> bool:
        """Whether it has: no table is captured that has none."""
        return True

    def files(self, table: SourceTable) -> str:
        """Nothing: no range is one of blocks."""
        return ""

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows.

        :raises UnsupportedTable: it cannot be split in that way. :raises SourceNotFound: there is no such table.
        """
        catalog = self._catalog(table)
        with self._asked() as session:
            return self._plan_splits(session, table, catalog, split_rows, kind)

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
        catalog = self._catalog(table)
        with self._asked() as session:
            return self._page_end(session, table, catalog, part, rows)

    def _catalog(self, table: SourceTable) -> _Catalog:
        """What the catalog said when it was asked first. :raises SourceNotFound: there is no such table."""
        name = table.namespace, table.name
        if name not in self._catalogs:
            with self._asked() as session:
                self._catalogs[name] = self._read(session, table)
        return self._catalogs[name]

    # -- what each server does in its own way ------------------------------------------------------------------------

    @abstractmethod
    def table(self, table: SourceTable) -> SourceTable:
        """See :class:`~headwater.sources.snapshots.ExportedSnapshot`."""

    @abstractmethod
    def close(self) -> None:
        """Let the session go. Closing twice is fine."""

    @abstractmethod
    def _asked(self) -> AbstractContextManager[_Session]:
        """The session for questions; one that broke is opened again."""

    @abstractmethod
    def _ping(self, session: _Session) -> None: ...

    @abstractmethod
    def _read(self, session: _Session, table: SourceTable) -> _Catalog: ...


class PositionSnapshots(ABC, Generic[_Dsn, _Parts]):
    """The snapshots of one database; see :class:`~headwater.sources.snapshots.UnsharedSnapshots`.

    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    """

    def __init__(self, dsn: _Dsn, lock_seconds: float | None) -> None:
        self._dsn = dsn
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._dsn)!r})"

    def open_parts(
        self, table: SourceTable, parts: Sequence[KeyRange], *, columns: Sequence[str] | None = None
    ) -> _Parts:
        """The rows of *parts* as they are now; see :class:`~headwater.sources.snapshots.LaterParts`."""
        return self._open(table, parts, table.columns if columns is None else [table.column(name) for name in columns])

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* as they are now, whichever *snapshot*; after a break those that follow as they are then.

        :raises SourceUnreachable: the connection broke again and again. :raises SnapshotExpired: another table.
        """
        return _read_later(lambda rest: self.open_parts(table, rest, columns=columns), [part])

    @abstractmethod
    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> _Parts: ...


def with_columns(table: SourceTable, columns: Sequence[SourceColumn]) -> SourceTable:
    """*table* with *columns*, those that are new at the end; a column that is not among them is dropped."""
    now = {column.field_id: column for column in columns}
    kept = [
        now.pop(column.field_id) if column.field_id in now else replace(column, dropped=True)
        for column in table.columns
    ]
    return replace(table, columns=(*kept, *now.values()))


def _read_later(
    open_parts: Callable[[Sequence[KeyRange]], LaterParts], parts: Sequence[KeyRange]
) -> Iterator[pa.RecordBatch]:
    """The rows of *parts* as they are now; after a break those that follow as they are then.

    :raises SourceUnreachable: the connection broke again and again. :raises SnapshotExpired: another table.
    """
    retries = Retries()
    while True:
        reached = None
        try:
            with closing(open_parts(parts)) as reading:
                for batch in reading.batches():
                    yield batch
                    retries.progressed()
                    reached = reading
            return
        except SnapshotExpired:
            raise
        except TransientError as error:
            retries.wait_after(error)
            if reached is not None:
                parts = reached.progress.rest


def table_changed(table: SourceTable, what: str) -> SnapshotExpired:
    """*table* is not what it was when its parts were planned."""
    return SnapshotExpired(
        f"Table {table.full_name} {what} since the snapshot was taken.", next_step="Take a new snapshot."
    )
