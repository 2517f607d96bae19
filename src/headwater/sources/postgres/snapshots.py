"""PostgresSnapshots: reads parts of tables inside exported snapshots, over connections that may break.

A read whose connection broke enters the snapshot once more and runs the same statement, with the same plan: no parallel
workers, no scans that start in the middle. What was given before comes again; its checksums are compared and it is
passed over, and the read goes on after it. Where they differ the order changed, and nothing is made up:
:class:`SnapshotExpired`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from time import sleep
from typing import Final

import pyarrow as pa
from psycopg import errors as pg
from psycopg import sql

from headwater.errors import TransientError
from headwater.log_store.chunk_codec import checksum
from headwater.sources.errors import InvalidRange, SnapshotExpired
from headwater.sources.postgres.binary import MOST_TEXT, TEXT, BinaryRows, compiled_decode
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType, TypeKind
from headwater.sources.postgres.connection import Connection, Dsn, server_errors
from headwater.sources.postgres.export import PostgresSnapshot
from headwater.sources.postgres.key_columns import KeyColumn, condition, read_key
from headwater.sources.postgres.key_order import PostgresKeyOrder, read_order, with_session
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.snapshot import BATCH_BYTES, CsvRows, RowFormat, SnapshotSession, copy_statement, parsed
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.system.retry import Retries


def printed_range(session: Connection, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table* as a person named it, its values as the server prints them.

    A person writes keys as she likes (``+5``, an uuid in capitals, ``today``). What the server cannot read is rejected
    before anything is planned with it: a query that has such a range in its state could never go on.

    :raises InvalidRange: a value is none of its column's type, or the range ends before it begins.
    """
    key = read_key(session, read_table(session, TableName(table.namespace, table.name)), table.key_columns)
    start, end = (None if cut is None else _printed(session, table, cut, key) for cut in (part.start, part.end))
    if start is not None and end is not None and not _is_ascending(session, start, end, key):
        raise InvalidRange(
            f"The range of keys of {table.full_name} ends before it begins.", next_step="Name the smaller key first."
        )
    return KeyRange(start, end)


def _printed(session: Connection, table: SourceTable, cut: Cut, key: Sequence[KeyColumn]) -> Cut:
    if len(cut.values) > len(key):
        raise InvalidRange(
            f"The key of {table.full_name} has {len(key)} columns; received {len(cut.values)} values.",
            next_step=f"Give a value for each of {', '.join(column.name for column in key)}, in this order.",
        )
    values = []
    for value, column in zip(cut.values, key, strict=False):
        query = sql.SQL("SELECT pg_catalog.format('%s', {})").format(_value(value, column))
        try:
            row = session.execute(query).fetchone()
        except pg.DataError:
            raise InvalidRange(
                f"Key column {column.name!r} of {table.full_name} is of type {column.type_sql}; a value is not.",
                next_step=f"Write it as Postgres reads {column.type_sql}.",
            ) from None
        assert row is not None
        values.append(str(row[0]))
    return Cut(tuple(values), cut.after)


def _is_ascending(session: Connection, start: Cut, end: Cut, key: Sequence[KeyColumn]) -> bool:
    """As far as both have values: a cut without a column's value lies before or after all of them."""
    count = min(len(start.values), len(end.values))
    begins = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_value(value, column), sql.Identifier(column.name))
        for value, column in zip(start.values[:count], key, strict=False)
    )
    is_before = condition(SplitKind.KEY, KeyRange(end=Cut(end.values[:count], after=True)), key)
    assert is_before is not None
    row = session.execute(sql.SQL("SELECT {} FROM (SELECT {}) begins").format(is_before, begins)).fetchone()
    return row == (True,)


def _value(text: str, column: KeyColumn) -> sql.Composed:
    collate = (
        sql.SQL("") if column.collation is None else sql.SQL(" COLLATE {}").format(sql.Identifier(*column.collation))
    )
    return sql.SQL("{}::{}{}").format(sql.Literal(text), sql.SQL(column.type_sql), collate)


# pg_class and pg_inherits are read as the snapshot shows them; functions look at what is there now.
_CHANGED: Final = """
WITH RECURSIVE shown (oid) AS (
  SELECT %(oid)s::oid UNION ALL
  SELECT i.inhrelid FROM shown s JOIN pg_catalog.pg_inherits i ON i.inhparent = s.oid WHERE %(partitioned)s
), present (oid) AS (
  SELECT p.relid FROM pg_catalog.pg_partition_tree(%(oid)s::oid) p WHERE %(partitioned)s
  UNION SELECT pg_catalog.to_regclass(%(name)s)
)
SELECT shown.oid::bigint AS shown, present.oid::bigint AS present
FROM shown FULL JOIN present ON shown.oid = present.oid
LEFT JOIN pg_catalog.pg_class c ON c.oid = shown.oid
WHERE shown.oid IS NULL OR present.oid IS NULL
   OR COALESCE(pg_catalog.pg_relation_filenode(c.oid), 0) <> c.relfilenode
"""


_LOCK_TIMEOUT: Final = "SET lock_timeout = '20s'"


class PartSession(SnapshotSession):
    """A session that reads parts of a table in a snapshot, after making sure that it can.

    Rows are shown as the snapshot has them, but a statement finds the table, columns and file as they are *now*:

    * a file that TRUNCATE or a rewriting ALTER TABLE left is gone for old snapshots too: they see an empty table;
    * a table that was dropped and created again, a partition that was attached or detached, columns that exchanged
      names, are others.

    So the table is locked first, as every read of it does, and what the snapshot's catalog shows is compared with what
    the server has now: until the lock is released with the transaction, neither can change. Partitions can be attached
    meanwhile, so this is asked again at the end.

    :param snapshot: ``None`` reads as of its own beginning.
    :raises SnapshotExpired: it is gone.
    """

    def __init__(self, dsn: Dsn, snapshot: str | None) -> None:
        self._catalog: CatalogTable | None = None
        super().__init__(dsn, snapshot)
        with server_errors(dsn):
            self._session.execute(_LOCK_TIMEOUT)
            if snapshot is None:
                self._session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def prepare(
        self, table: SourceTable, kind: SplitKind, part: KeyRange, columns: Sequence[SourceColumn]
    ) -> tuple[bytes, RowFormat]:
        """The statement that reads *columns* of *part*, and the format of what it gives.

        The table stays as it is until the session is closed.

        :raises SnapshotExpired: it is not what it was in the snapshot. :raises SourceNotFound: it was not there.
        """
        with server_errors(self._dsn):
            catalog = self._catalog = read_table(self._session, TableName(table.namespace, table.name))
            if table.source_id not in (None, catalog.oid):
                raise _changed(table, "was dropped and made anew")
            oids = self._lock(table, catalog, [column for column in columns if not column.dropped])
            self._require_same_files(table, catalog)
            key = read_key(self._session, catalog, table.key_columns) if kind is SplitKind.KEY and part != _ALL else ()
        where, form = condition(kind, part, key), _format(table, columns, oids)
        return copy_statement(table, form, where, partitioned=catalog.is_partitioned).as_bytes(self._session), form

    def require_unchanged(self, table: SourceTable) -> None:
        """After the read: that it was of what the snapshot shows. :raises SnapshotExpired: it was not."""
        assert self._catalog is not None
        with server_errors(self._dsn):
            self._require_same_files(table, self._catalog)

    def _lock(self, table: SourceTable, catalog: CatalogTable, columns: Sequence[SourceColumn]) -> list[int]:
        """By a read of no rows, whose description tells which columns the names mean now; the types that are sent."""
        statement = sql.SQL("SELECT {} FROM {} LIMIT 0").format(
            sql.SQL(", ").join(sql.Identifier(column.name) for column in columns), sql.SQL(catalog.from_sql)
        )
        try:
            result = self._session.execute(statement).pgresult
        except (pg.UndefinedTable, pg.UndefinedColumn):
            raise _changed(table, "was dropped, or lost a column") from None
        assert result is not None
        shown = {column.number: column for column in catalog.columns}
        for place, column in enumerate(columns):
            was = shown.get(column.field_id)
            if result.ftable(place) != catalog.oid or result.ftablecol(place) != column.field_id or was is None:
                raise _changed(table, f"has another column {column.name!r}")
            if was.type.kind is not TypeKind.DOMAIN and (result.ftype(place), result.fmod(place)) != (
                was.type.oid,
                was.typmod,
            ):
                raise _changed(table, f"has another type of column {column.name!r}")
        return [_sent_as(shown[column.field_id].type, result.ftype(place)) for place, column in enumerate(columns)]

    def _require_same_files(self, table: SourceTable, catalog: CatalogTable) -> None:
        facts = {"oid": catalog.oid, "partitioned": catalog.is_partitioned, "name": catalog.name.sql}
        with self._session.cursor() as cursor:
            if cursor.execute(_CHANGED.encode(), facts).fetchone() is not None:
                raise _changed(table, "was truncated, rewritten or made anew, or its partitions changed")


_ALL: Final = KeyRange()


def _sent_as(shown: CatalogType, oid: int) -> int:
    """The type *oid* as its values are sent: of an enum, the labels."""
    while shown.base is not None:
        shown = shown.base
    return TEXT if shown.kind is TypeKind.ENUM and shown.oid == oid else oid


def _format(table: SourceTable, columns: Sequence[SourceColumn], oids: Sequence[int]) -> RowFormat:
    """Binary where compiled code reads it and it costs less, else csv.

    :param oids: of the columns that were not dropped.
    """
    decode = compiled_decode()
    if decode is None:
        return CsvRows(table, columns)
    present = iter(oids)
    binary = BinaryRows(decode, table, columns, [None if column.dropped else next(present) for column in columns])
    return binary if binary.text_share <= MOST_TEXT else CsvRows(table, columns)


def _changed(table: SourceTable, what: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"Table {table.full_name} {what} since the snapshot was taken, which no longer shows it as it was.",
        next_step="Take a new snapshot.",
    )


CHANGED_TRIES: Final = 3


class PostgresSnapshots:
    """The snapshots of one database; see :class:`~headwater.sources.snapshots.SnapshotSource`.

    :param dsn: a libpq connection string.
    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        self._dsn = Dsn(dsn)
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"PostgresSnapshots({str(self._dsn)!r})"

    def export(self) -> PostgresSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return PostgresSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> PostgresKeyOrder:
        """The order of its keys. :raises UnsupportedTable: they have none."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as the source prints them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot*; see :class:`~headwater.sources.snapshots.SnapshotSource`."""
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        reading = _Reading(self._dsn, table, kind, part, snapshot, wanted)
        with contextlib.closing(reading.blocks(batch_bytes)) as blocks:
            yield from parsed(blocks)


class _Reading:
    """One read, over as many connections as it takes."""

    def __init__(
        self,
        dsn: Dsn,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        columns: Sequence[SourceColumn],
    ) -> None:
        self._dsn, self._table, self._kind, self._part = dsn, table, kind, part
        self._snapshot, self._columns = snapshot, columns
        self._given: list[tuple[int, int]] = []

    def blocks(self, size: int) -> Generator[tuple[RowFormat, bytes]]:
        """Whole rows and their format, about *size* bytes at a time.

        :raises SnapshotExpired: the snapshot is gone, or does not show the table as it was.
        :raises SourceUnreachable: the connection broke again and again.
        """
        retries, changes = Retries(sleep=sleep), 0
        while True:
            try:
                with PartSession(self._dsn, self._snapshot) as session:
                    statement, form = session.prepare(self._table, self._kind, self._part, self._columns)
                    for block in self._after_given(session.blocks(statement, size)):
                        yield form, block
                        self._given.append((len(block), checksum(block)))
                        retries.progressed()
                    session.require_unchanged(self._table)
                    return
            except SnapshotExpired:
                changes += 1
                if self._snapshot is not None or self._given or changes == CHANGED_TRIES:
                    raise
            except TransientError as error:
                if self._given and self._snapshot is None:
                    raise
                retries.wait_after(error)

    def _after_given(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """*blocks* without what was given before."""
        held = b""
        for length, expected in self._given:
            while len(held) < length and (more := next(blocks, b"")):
                held += more
            if len(held) < length or checksum(held[:length]) != expected:
                raise SnapshotExpired(
                    f"Table {self._table.full_name} came in another order when its read was tried again.",
                    next_step="Take a new snapshot.",
                )
            held = held[length:]
        if held:
            yield held
        yield from blocks
