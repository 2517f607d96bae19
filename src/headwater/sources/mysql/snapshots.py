"""MySqlSnapshots: reads tables of MySQL and MariaDB at a place in their log; see :mod:`.mark`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headwater.sources.later_parts import read_later
from headwater.sources.mysql.connection import Dsn
from headwater.sources.mysql.export import MySqlSnapshot
from headwater.sources.mysql.key_order import MySqlKeyOrder, read_order, with_session
from headwater.sources.mysql.key_range import printed_range
from headwater.sources.mysql.parts import MySqlParts
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable


class MySqlSnapshots:
    """The snapshots of one server; see :class:`~headwater.sources.snapshots.UnsharedSnapshots`.

    :param dsn: ``mysql://user:password@host:3306/database``.
    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        self._dsn = Dsn(dsn)
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"MySqlSnapshots({str(self._dsn)!r})"

    def export(self) -> MySqlSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return MySqlSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> MySqlKeyOrder:
        """The order of its keys."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def open_parts(
        self, table: SourceTable, parts: Sequence[KeyRange], *, columns: Sequence[str] | None = None
    ) -> MySqlParts:
        """The rows of *parts* as they are now; see :class:`~headwater.sources.snapshots.LaterParts`."""
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        return MySqlParts(self._dsn, table, parts, wanted)

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
