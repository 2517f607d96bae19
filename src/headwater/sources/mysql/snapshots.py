"""MySqlSnapshots: reads tables of MySQL and MariaDB at a place in their log; see :mod:`.offset`."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.sources.mysql.connection import Dsn
from headwater.sources.mysql.export import MySqlSnapshot
from headwater.sources.mysql.key_order import MySqlKeyOrder, read_order
from headwater.sources.mysql.key_range import printed_range
from headwater.sources.mysql.parts import MySqlParts
from headwater.sources.mysql.sessions import with_session
from headwater.sources.position_snapshots import PositionSnapshots
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceColumn, SourceTable


class MySqlSnapshots(PositionSnapshots[Dsn, MySqlParts]):
    """The snapshots of one server.

    :param dsn: ``mysql://user:password@host:3306/database``. :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        super().__init__(Dsn(dsn), lock_seconds)

    def export(self) -> MySqlSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return MySqlSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> MySqlKeyOrder:
        """The order of its keys."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> MySqlParts:
        return MySqlParts(self._dsn, table, parts, columns)
