"""Snapshot: the rows of a table as Arrow batches, by ``COPY … TO STDOUT``.

The server sends each row whole in one message, so a block of messages is a block of whole rows, also where values have
line breaks. This thread takes messages from the socket, another parses the block before: both cost about the same, and
the server's own work goes on meanwhile. At most :data:`BLOCKS_AHEAD` blocks are held beside the one that is being read.
"""

from __future__ import annotations

import ctypes
import functools
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, Self

import psycopg
import pyarrow as pa
from psycopg import errors as pg
from psycopg import pq, sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from headwater import compiled
from headwater.sources.errors import SnapshotExpired, SourceNotFound
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.csv import read_csv
from headwater.sources.table import SourceColumn, SourceTable

Receive = Callable[[int, int, int, int, int, int, int], tuple[int, bytes]]
Full = Generator[bytes, None, bytes]

_TLS_PATIENCE_MS: Final = 20
_PATIENCE_MS: Final = 500
_ENDED, _FAILED, _BROKEN = -1, -2, -3
_FUNCTIONS: Final = ("PQgetCopyData", "PQconsumeInput", "PQfreemem")


def compiled_receive() -> Receive | None:
    """The compiled code, where it was built and is wanted."""
    if not compiled.is_wanted():
        return None
    try:
        from headwater.sources.postgres._receive import receive
    except ImportError:
        return None
    return receive


@functools.cache
def libpq_functions() -> tuple[int, int, int] | None:
    """Where the libpq of psycopg has what the compiled code calls; ``None`` where that cannot be told.

    They are looked for in the library of psycopg's own that is linked with it: a process may have several libpq, and a
    connection belongs to one of them.
    """
    library = getattr(sys.modules.get(pq.PGconn.__module__), "__file__", None)
    if library is None or library.endswith(".py"):
        return None
    try:
        loaded = ctypes.CDLL(library)
        found = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (OSError, AttributeError):
        return None
    get_copy_data, consume_input, free = found
    return (get_copy_data, consume_input, free) if get_copy_data and consume_input and free else None


class CopyReader:
    """Reads what one ``COPY … TO STDOUT`` sends, in blocks of whole messages, over *connection* alone.

    Where it was compiled, and psycopg has a libpq whose functions can be found, the messages of a block are taken and
    joined by compiled code, without an object for each and without holding other threads back. Else Python takes them
    one by one, which costs three times as much. Both give the same blocks, but for where one ends.

    :param check_answers: called with the seconds for which nothing has come, twice a second.
    """

    def __init__(self, connection: PGconn, check_answers: Callable[[float], None] = lambda _: None) -> None:
        self._connection = connection
        self._check_answers = check_answers
        self._heard_at = time.monotonic()
        # libpq may leave a part of a TLS record behind, of which the socket tells nothing
        self._patience = _TLS_PATIENCE_MS if connection.ssl_in_use else _PATIENCE_MS
        self._input, self._output = select.poll(), select.poll()
        self._input.register(connection.socket, select.POLLIN)
        self._output.register(connection.socket, select.POLLIN | select.POLLOUT)

    def blocks(self, statement: bytes, size: int) -> Iterator[bytes]:
        """The messages, joined to blocks of *size* bytes or a little more.

        :raises psycopg.Error: the server's, or the connection's.
        """
        self._start(statement)
        receive, functions = compiled_receive(), libpq_functions()
        address = getattr(self._connection, "pgconn_ptr", None)
        if receive is None or functions is None or address is None:
            rest = yield from self._taken(size)
        else:
            rest = yield from self._received(functools.partial(receive, *functions, address), size)
        results = []
        while True:
            while self._connection.is_busy():  # get_result would wait itself, and let no other thread run meanwhile
                self._wait()
            if (result := self._connection.get_result()) is None:
                break
            results.append(result)
        for result in results:
            if result.status != ExecStatus.COMMAND_OK:
                raise error_from_result(result)
        if rest:
            yield rest

    def _received(self, receive: Callable[[int, int, int], tuple[int, bytes]], size: int) -> Full:
        """The full blocks; the rest is returned."""
        connection, held = self._connection, b""
        status = 0
        while status != _ENDED:
            status, block = receive(connection.socket, self._patience, size - len(held))
            held = held + block if held else block
            self._came(bool(block))
            if status == _FAILED:
                raise psycopg.OperationalError(connection.error_message.decode(errors="replace"))
            if status == _BROKEN:
                connection.consume_input()  # raises, with what is wrong
            if len(held) >= size:
                yield held
                held, self._heard_at = b"", time.monotonic()
        return held

    def _taken(self, size: int) -> Full:
        """The same. What one read of the socket gave is joined first: many small messages that live long cost more."""
        get_copy_data, pieces, held = self._connection.get_copy_data, list[bytes](), 0
        messages: list[memoryview] = []
        length = 0
        while length >= 0:
            length, message = get_copy_data(1)
            if length > 0:
                messages.append(message)
                continue
            pieces.append(b"".join(messages))
            messages.clear()
            held += len(pieces[-1])
            if held >= size:
                yield b"".join(pieces)
                pieces, held, self._heard_at = [], 0, time.monotonic()
            if length == 0:
                self._wait()
        return b"".join(pieces)

    def _start(self, statement: bytes) -> None:
        connection = self._connection
        connection.send_query(statement)
        while connection.flush():
            self._came(bool(self._output.poll(self._patience)))
            connection.consume_input()
        while connection.is_busy():
            self._wait()
        result = connection.get_result()
        assert result is not None
        if result.status != ExecStatus.COPY_OUT:
            while connection.get_result() is not None:
                pass
            raise error_from_result(result)

    def _wait(self) -> None:
        """Until something may have come."""
        self._came(bool(self._input.poll(self._patience)))
        self._connection.consume_input()

    def _came(self, something: bool) -> None:
        now = time.monotonic()
        if something:
            self._heard_at = now
        elif now > self._heard_at:
            self._check_answers(now - self._heard_at)


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
