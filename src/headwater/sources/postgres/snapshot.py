"""Snapshot: the rows of a table as Arrow batches, by ``COPY … TO STDOUT``.

The server sends each row whole in one message, so a block of messages is a block of whole rows, also where values have
line breaks. This thread takes messages from the socket, another parses the block before: both cost about the same, and
the server's own work goes on meanwhile. At most :data:`BLOCKS_AHEAD` blocks are held beside the one that is being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, Self

import pyarrow as pa
from psycopg import errors as pg
from psycopg import sql

from headwater.sources.errors import SnapshotExpired, SourceNotFound
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.copy_reader import CopyReader
from headwater.sources.postgres.csv import read_csv
from headwater.sources.table import SourceColumn, SourceTable

BATCH_BYTES: Final = 4 << 20
BLOCKS_AHEAD: Final = 2

_SETTLE: Final = """
SELECT pg_catalog.set_config(s.name, CASE s.name WHEN 'synchronize_seqscans' THEN 'off' ELSE '0' END, false)
FROM pg_catalog.pg_settings s
WHERE s.name IN ('transaction_timeout', 'idle_session_timeout', 'lock_timeout', 'synchronize_seqscans',
                 'max_parallel_workers_per_gather')
"""
_KIND: Final = """
SELECT c.relkind::text AS kind FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""


class RowFormat(Protocol):
    """How the rows of a table are sent, and read.

    :ivar name: as COPY calls it.
    """

    @property
    def name(self) -> str: ...

    @property
    def selected(self) -> sql.Composable:
        """What is selected."""
        ...

    def batches(self, data: bytes) -> list[pa.RecordBatch]:
        """The rows of whole messages.

        :raises SpecialValue: as :func:`~headwater.sources.postgres.convert.convert_column`, and so its other errors.
        :raises SourceProtocolError: these are no rows of these columns.
        """
        ...


class CsvRows:
    """Rows of *columns* of *table* as csv."""

    name = "csv"

    def __init__(self, table: SourceTable, columns: Sequence[SourceColumn]) -> None:
        self._table, self._columns = table, columns

    @property
    def selected(self) -> sql.Composable:
        return sql.SQL(", ").join(
            sql.SQL("NULL") if column.dropped else sql.Identifier(column.name) for column in self._columns
        )

    def batches(self, data: bytes) -> list[pa.RecordBatch]:
        return read_csv(self._table, data, self._columns)


def read_table(
    dsn: Dsn,
    table: SourceTable,
    *,
    columns: Sequence[str] | None = None,
    where: sql.Composable | None = None,
    snapshot: str | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The rows of *table*, over a session of its own; see :class:`SnapshotSession`."""
    with SnapshotSession(dsn, snapshot) as session:
        yield from session.read(table, columns=columns, where=where, batch_bytes=batch_bytes)


class SnapshotSession:
    """A session that reads tables; with *snapshot*, all of them as they were when that was exported.

    One thread. A read that is given up before its end closes the session.

    :param snapshot: what ``pg_export_snapshot()`` or the creation of a slot gave; its transaction must still be open.
    :raises SnapshotExpired: it is not. :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """

    def __init__(self, dsn: Dsn, snapshot: str | None = None) -> None:
        self._dsn = dsn
        self._session = connect(dsn)
        try:
            with server_errors(dsn):
                settle(self._session)
            if snapshot is not None:
                self._take_part(snapshot)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session. Closing twice is fine."""
        self._session.close()

    def _take_part(self, snapshot: str) -> None:
        with server_errors(self._dsn):
            self._session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            try:
                self._session.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
                return
            except (pg.UndefinedObject, pg.InvalidParameterValue, pg.ObjectNotInPrerequisiteState):
                pass
        raise SnapshotExpired(
            f"The exported snapshot {snapshot!r} is gone at {self._dsn}: the transaction that exported it has ended.",
            next_step="Take a new snapshot; it stays while the transaction that exports it is open.",
        )

    def read(
        self,
        table: SourceTable,
        *,
        columns: Sequence[str] | None = None,
        where: sql.Composable | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *table* in batches of about *batch_bytes* of csv, in no order.

        :param columns: which, and in which order; all by default. A column that the source dropped is null.
        :param where: a condition on its columns. Operators of extensions must be written with their schema.
        :raises SpecialValue: as :func:`~headwater.sources.postgres.convert.convert_column`, and so its other errors.
        :raises SourceNotFound: the table is gone. :raises SourceUnreachable: the connection broke.
        """
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        whole = False
        try:
            form = CsvRows(table, wanted)
            yield from parsed((form, block) for block in self.blocks(self._statement(table, form, where), batch_bytes))
            whole = True
        finally:
            if not whole:
                self.close()

    def _statement(self, table: SourceTable, form: RowFormat, where: sql.Composable | None) -> bytes:
        with server_errors(self._dsn):
            found = ask(self._session, _KIND, [table.namespace, table.name])
        if not found:
            raise SourceNotFound(
                f"The database has no table {table.full_name}.", next_step="Look whether it was dropped or renamed."
            )
        return copy_statement(table, form, where, partitioned=found[0].kind == "p").as_bytes(self._session)

    def blocks(self, statement: bytes, size: int) -> Iterator[bytes]:
        """What the COPY sends, in blocks of whole messages: *size* bytes or a little more."""
        with server_errors(self._dsn):
            yield from CopyReader(self._session.pgconn, self._session.check_answers).blocks(statement, size)


def settle(session: Connection) -> None:
    """Settings for long transactions that are idle for a while, and for scans that give rows in the same order again.

    Not every version knows all of them.
    """
    session.execute(_SETTLE)


def copy_statement(
    table: SourceTable, form: RowFormat, where: sql.Composable | None, *, partitioned: bool
) -> sql.Composed:
    """The COPY of a table's rows. Rows of tables that inherit from a plain table are not its own."""
    return sql.SQL("COPY (SELECT {} FROM {}{}{}) TO STDOUT (FORMAT {})").format(
        form.selected,
        sql.SQL("" if partitioned else "ONLY "),
        sql.Identifier(table.namespace, table.name),
        sql.SQL("") if where is None else sql.SQL(" WHERE {}").format(where),
        sql.SQL(form.name),
    )


def parsed(blocks: Iterator[tuple[RowFormat, bytes]]) -> Iterator[pa.RecordBatch]:
    """The rows of blocks, parsed by another thread while the next are taken from *blocks*."""
    pending: deque[Future[list[pa.RecordBatch]]] = deque()
    parser = ThreadPoolExecutor(1, thread_name_prefix="headwater-snapshot")
    try:
        for form, block in blocks:
            pending.append(parser.submit(form.batches, block))
            while len(pending) > BLOCKS_AHEAD or (pending and pending[0].done()):
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        parser.shutdown(cancel_futures=True)
