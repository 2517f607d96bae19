"""SqlServerSnapshots: reads tables of SQL Server at a number of their log; see :mod:`.mark`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headwater.sources.later_parts import read_later
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.sqlserver.connection import Dsn
from headwater.sources.sqlserver.export import SqlServerSnapshot
from headwater.sources.sqlserver.key_order import SqlServerKeyOrder, read_order, with_session
from headwater.sources.sqlserver.key_range import printed_range
from headwater.sources.sqlserver.parts import SqlServerParts
from headwater.sources.table import SourceTable


class SqlServerSnapshots:
    """The snapshots of one database; see :class:`~headwater.sources.snapshots.UnsharedSnapshots`.

    :param dsn: ``sqlserver://user:password@host:1433/database``.
    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        self._dsn = Dsn(dsn)
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"SqlServerSnapshots({str(self._dsn)!r})"

    def export(self) -> SqlServerSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return SqlServerSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> SqlServerKeyOrder:
        """The order of its keys."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def open_parts(
        self, table: SourceTable, parts: Sequence[KeyRange], *, columns: Sequence[str] | None = None
    ) -> SqlServerParts:
        """The rows of *parts* as they are now; see :class:`~headwater.sources.snapshots.LaterParts`."""
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        return SqlServerParts(self._dsn, table, parts, wanted)

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
