"""MySqlParts: the rows of parts of a table, read in a transaction of its own along the index of the key.

The transaction is consistent and takes no lock but the one that every read takes: columns cannot be changed while it is
open. What it shows lies at or before :attr:`MySqlParts.high`; the rows of each part come in key order, so that after a
break the read can go on behind the last one (:attr:`MySqlParts.progress`) in another transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Self

import pyarrow as pa

from headwater.sources.errors import SourceNotFound
from headwater.sources.key_conditions import where
from headwater.sources.mysql.catalog import CatalogTable, read_table
from headwater.sources.mysql.connection import Connection, Dsn, ask, server_errors
from headwater.sources.mysql.key_columns import cut_after, key_list, read_key
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.places import place_after
from headwater.sources.mysql.result import Result
from headwater.sources.mysql.row_format import RowFormat
from headwater.sources.mysql.server import Server
from headwater.sources.mysql.sessions import borrow, give_back
from headwater.sources.mysql.splitting import from_sql
from headwater.sources.mysql.types import source_type
from headwater.sources.position_snapshots import table_changed
from headwater.sources.splits import KeyRange, PartsProgress
from headwater.sources.table import SourceColumn, SourceTable

_LOCK_SECONDS: Final = 20


class MySqlParts:
    """One read of *columns* of the rows of *parts*.

    :ivar high: the rows show nothing that committed after this place.
    :ivar progress: how far the rows were given.
    :raises SnapshotExpired: the table is not what it was. :raises SourceUnreachable: no answer.
    """

    def __init__(
        self,
        dsn: Dsn,
        table: SourceTable,
        parts: Sequence[KeyRange],
        columns: Sequence[SourceColumn],
    ) -> None:
        self._dsn, self._table, self._parts, self._columns = dsn, table, tuple(parts), tuple(columns)
        self.progress = PartsProgress(parts)
        self._is_read = False
        self._session: Connection | None = borrow(dsn)
        try:
            with server_errors(dsn):
                server = self._begin()
                self._catalog = self._checked()
                # after the table was opened: the statements that made it what it is are before this place
                self.high = place_after(self.session, server)
                self._key = read_key(self._catalog, table)
        except SourceNotFound:
            self.close()
            raise table_changed(table, "was dropped or renamed") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transaction. Closing twice is fine."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._is_read:
            give_back(self._dsn, session)
        elif session.open:
            session._force_close()  # rows are on their way that nobody takes

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, part by part, each in key order.

        :raises SourceUnreachable: the connection broke. :raises SpecialValue: see :class:`.row_format.RowFormat`.
        """
        try:
            with server_errors(self._dsn):
                for part in self._parts:
                    yield from self._rows(part)
                    self.progress.end_part()
                self._is_read = True
        except SourceNotFound:
            raise table_changed(self._table, "was dropped, or lost a column") from None

    def _rows(self, part: KeyRange) -> Iterator[pa.RecordBatch]:
        wanted = [*self._columns, *self._missing_key()]
        statement = (
            f"SELECT {RowFormat.selected(wanted)} FROM {from_sql(self._catalog)}"
            f"{where(part, self._key)} ORDER BY {key_list(self._key)}"
        )
        result = Result(self.session, statement, self._table, wanted)
        for batch in result.batches():
            last = batch.slice(batch.num_rows - 1)
            yield batch.select(range(len(self._columns)))
            self.progress.reach(cut_after(self._key, [last.column(key.name)[0].as_py() for key in self._key]))

    @property
    def session(self) -> Connection:
        """The open one."""
        assert self._session is not None
        return self._session

    def _missing_key(self) -> list[SourceColumn]:
        names = {column.name for column in self._columns}
        return [self._table.column(key.name) for key in self._key if key.name not in names]

    def _begin(self) -> Server:
        ask(self.session, f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}")
        ask(self.session, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        server = Server.ask(self.session)
        ask(self.session, "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        return server

    def _checked(self) -> CatalogTable:
        """What the catalog says, which stays so once a row was read. :raises SnapshotExpired: another table."""
        table = self._table
        name = TableName(table.namespace, table.name)
        ask(self.session, f"SELECT 1 FROM {name.sql} LIMIT 0")
        catalog = read_table(self.session, name)
        for column in self._columns:
            found = catalog.column(column.name)
            if column.dropped:
                continue
            if found is None:
                raise table_changed(table, f"has no column {column.name!r} any more")
            if source_type(found.type_text) != column.source_type:
                raise table_changed(table, f"has another type of column {column.name!r}")
        return catalog
