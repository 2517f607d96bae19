"""SqlServerSnapshots: reads tables of SQL Server at a number of their log; see :mod:`.offset`."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.sources.position_snapshots import PositionSnapshots
from headwater.sources.splits import KeyRange
from headwater.sources.sqlserver.connection import Dsn
from headwater.sources.sqlserver.export import SqlServerSnapshot
from headwater.sources.sqlserver.key_order import SqlServerKeyOrder, read_order
from headwater.sources.sqlserver.key_range import printed_range
from headwater.sources.sqlserver.parts import SqlServerParts
from headwater.sources.sqlserver.sessions import with_session
from headwater.sources.table import SourceColumn, SourceTable


class SqlServerSnapshots(PositionSnapshots[Dsn, SqlServerParts]):
    """The snapshots of one database.

    :param dsn: ``sqlserver://user:password@host:1433/database``. :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        super().__init__(Dsn(dsn), lock_seconds)

    def export(self) -> SqlServerSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return SqlServerSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> SqlServerKeyOrder:
        """The order of its keys."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> SqlServerParts:
        return SqlServerParts(self._dsn, table, parts, columns)
