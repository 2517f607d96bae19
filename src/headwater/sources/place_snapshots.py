"""PlaceSnapshots: reads tables of a database at a place in its log; what is the same for every such server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import pyarrow as pa

from headwater.sources.later_parts import read_later
from headwater.sources.snapshots import LaterParts
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable

_Dsn = TypeVar("_Dsn")
_Parts = TypeVar("_Parts", bound=LaterParts)


class PlaceSnapshots(ABC, Generic[_Dsn, _Parts]):
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
        return read_later(lambda rest: self.open_parts(table, rest, columns=columns), [part])

    @abstractmethod
    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> _Parts: ...
