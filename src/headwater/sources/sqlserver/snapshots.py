"""SqlServerSnapshots: reads tables of SQL Server at a number of their log; see :class:`.offset.SqlServerMark`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import IO, Final, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidKey, SourceNotFound
from headwater.sources.key_conditions import printed_range, where
from headwater.sources.key_places import DigitOrder, Digits, numbers, ranked_together
from headwater.sources.position_snapshots import PositionSnapshots, table_changed
from headwater.sources.splits import Cut, KeyRange, PartsProgress
from headwater.sources.sqlserver.catalog import CatalogTable, read_table
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.export import SqlServerSnapshot, borrow, give_back, with_session
from headwater.sources.sqlserver.key_columns import DECIMALS, INTEGERS, KeyColumn, key_list, key_texts, read_key
from headwater.sources.sqlserver.names import TableName, literal
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset
from headwater.sources.sqlserver.server import Server, log_end
from headwater.sources.sqlserver.types import BINARIES, TEXTS, selected
from headwater.sources.sqlserver.values import broken_texts_named, column_of, forgiven_texts, texts_of
from headwater.sources.table import SourceColumn, SourceTable

_T = TypeVar("_T")


class SqlServerKeyOrder(DigitOrder):
    """The order of one table's keys. It can be pickled.

    Whole numbers and decimals are compared here. The order of texts is that of their collation, that of a
    ``uniqueidentifier`` and of bytes the server's own: it ranks the distinct values of a batch, together with those of
    the cuts, in one statement per column.
    """

    def __init__(self, dsn: Dsn, table: SourceTable, key: Sequence[KeyColumn]) -> None:
        self._dsn, self._table, self._key = dsn, table, tuple(key)

    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        column = self._key[place]
        if keys.null_count:
            raise InvalidKey(self._table.full_name, column.name, column.type_text, "a key is null.")
        if column.kind.name in INTEGERS:
            of_keys = keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
            return [(of_keys, np.array([int(text) for text in texts], np.int64))]
        if column.kind.name in DECIMALS and pa.types.is_decimal(keys.type):
            cuts = pa.array([Decimal(text) for text in texts], keys.type)
            return list(zip(numbers(keys), numbers(cuts), strict=True))
        return ranked_together(texts_of(keys), pa.array(texts, pa.string()), partial(self._ranked, column))

    def _ranked(self, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
        return with_session(self._dsn, lambda session: _rank(session, column, values))


def read_order(dsn: Dsn, table: SourceTable) -> SqlServerKeyOrder:
    """The order of the keys of *table*. :raises SourceNotFound: there is no such table."""
    name = TableName(table.namespace, table.name)
    key = with_session(dsn, lambda session: read_key(read_table(session, name), table))
    return SqlServerKeyOrder(dsn, table, key)


def _rank(session: Session, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
    """The place of each value among them all, equal ones the same."""
    sent = literal(json.dumps(values.to_pylist(), ensure_ascii=False))
    rows = session.ask(
        f"SELECT CONVERT(int, j.[key]) AS n, DENSE_RANK() OVER (ORDER BY {column.typed('j.[value]')}) AS place"
        f" FROM OPENJSON({sent}) AS j"
    )
    found = np.zeros(len(values), np.int64)
    for row in rows:
        found[int(row["n"])] = int(row["place"])
    return found


def _read_range(session: Session, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as cuts have them; see :func:`~headwater.sources.key_conditions.printed_range`."""
    key = read_key(read_table(session, TableName(table.namespace, table.name)), table)
    return printed_range(
        table,
        part,
        key,
        lambda column, value: _text(session, column, value),
        session.ask,
    )


def _text(session: Session, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    if column.kind.name in TEXTS:
        return value
    if column.kind.name in BINARIES:
        try:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
        except ValueError:
            return None
    tried = f"TRY_CONVERT({column.type_text}, {literal(value)})"
    told = session.ask(f"SELECT {column.text_of(tried)} AS v")[0]["v"]
    return None if told is None else str(told)


BLOCK_ROWS: Final = 8_192


class SqlServerParts:
    """One read of *columns* of the rows of *parts*, as they are when they are read, along the index of the key.

    Where the database allows it, they are read in a transaction of snapshot isolation: one moment, and no session waits
    for another. Otherwise by statements that wait for what others are changing: a row that is changed meanwhile may be
    read before, after, twice or not at all, so the rows are put aside until the end and the position is taken after it;
    the log then has each of those rows again (:mod:`headwater.backfill.cdc.rewind`).

    ========================  ====================================  ================================================
    database                  read                                  :attr:`high`
    ========================  ====================================  ================================================
    ALLOW_SNAPSHOT_ISOLATION  one moment, as it streams             the end of the log after the moment
    otherwise                 put aside in a file first             the end of the log after the last row
    ========================  ====================================  ================================================

    The log has to come to that position, for which the capture job must look several times: so there is one for all
    parts. The rows of each come in key order, and after a break reads go on behind the last one (:attr:`progress`).

    :ivar high: the rows show nothing that committed after this place.
    :ivar progress: how far the rows were given.
    :ivar isolation: how they are read, for people.
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
        self._types: dict[str, str] = {}
        self._aside: IO[bytes] | None = None
        self._put: list[int] = []
        self._session = borrow(dsn)
        try:
            self._is_snapshot = Server.ask(self._session).allows_snapshots
            self.isolation = "snapshot" if self._is_snapshot else "read committed"
            self.high = SqlServerOffset(self._begin())
        except SourceNotFound:
            self.close()
            raise table_changed(table, "was dropped, or lost a column") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transaction. Closing twice is fine."""
        if self._aside is not None:
            self._aside.close()
        self._aside = None
        if self._is_read:
            give_back(self._session)
        else:
            self._session.close()  # rows are on their way that nobody takes

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, part by part, each in key order.

        :raises SourceUnreachable: the connection broke. :raises SpecialValue: see :mod:`.values`.
        """
        width = len(self._columns)
        for part in map(self._told, self._parts) if self._is_snapshot else self._put_aside():
            for rows in part:
                texts = [rows.column(place)[-1].as_py() for place in range(width, rows.num_columns)]
                yield rows.select(range(width))
                self.progress.reach(Cut(tuple(texts), after=True))
            self.progress.end_part()
        self._is_read = True

    def _begin(self) -> Lsn:
        """The place after which nothing is shown."""
        if self._is_snapshot:
            self._session.run("SET TRANSACTION ISOLATION LEVEL SNAPSHOT; BEGIN TRANSACTION;")
            self._key = read_key(self._checked(), self._table)
            # the moment is that of the first row that is looked at
            self._session.ask(f"SELECT TOP (1) 1 AS [one] FROM {self._name.sql}")
            return log_end(self._session)
        self._key = read_key(self._checked(), self._table)
        self._aside = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this
        writer = None
        for part in self._parts:
            self._put.append(0)
            for rows in self._told(part):
                if writer is None:
                    writer = pa.ipc.new_stream(self._aside, rows.schema)
                writer.write_batch(rows)
                self._put[-1] += 1
        if writer is not None:
            writer.close()
        self._is_read = True
        return log_end(self._session)

    def _put_aside(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """The rows of each part."""
        assert self._aside is not None
        self._aside.seek(0)
        if not any(self._put):
            yield from (iter(()) for _ in self._put)
            return
        with pa.ipc.open_stream(self._aside) as reader:
            for batches in self._put:
                yield (reader.read_next_batch() for _ in range(batches))

    def _told(self, part: KeyRange) -> Iterator[pa.RecordBatch]:
        """The rows as the server gives them: the columns, then the texts of the key."""
        there = [column for column in self._columns if not column.dropped]
        asked = [replace(column, source_type=self._types[column.name]) for column in there]
        chosen = ", ".join(f"{selected(column)} AS [c{place}]" for place, column in enumerate(asked))
        statement = (
            f"SELECT {chosen + ', ' if chosen else ''}{key_texts(self._key)} FROM {self._name.sql}"
            f"{where(part, self._key)} ORDER BY {key_list(self._key)}"
        )
        texts = [SourceColumn(f"k{place}", pa.string(), "nvarchar(4000)", 0) for place in range(len(self._key))]
        schema = pa.schema([*(column.field for column in self._columns), *(column.field for column in texts)])
        key = [self._table.column(column.name) for column in self._key]
        with broken_texts_named(self._table, [*asked, *key]):
            for block in self._session.columns(statement, BLOCK_ROWS, forgiven_texts(self._table, asked)):
                made = (
                    column_of(self._table, column, values, self._dsn.ticks)
                    for column, values in zip([*asked, *texts], block, strict=True)
                )
                arrays = [
                    pa.nulls(len(block[0]), column.type) if column.dropped else next(made) for column in self._columns
                ]
                yield pa.RecordBatch.from_arrays([*arrays, *made], schema=schema)

    @property
    def _name(self) -> TableName:
        return TableName(self._table.namespace, self._table.name)

    def _checked(self) -> CatalogTable:
        """What the catalog says. :raises SnapshotExpired: another table."""
        catalog = read_table(self._session, self._name)
        if catalog.id != self._table.source_id:
            raise table_changed(self._table, "was made anew")
        for column in self._columns:
            if column.dropped:
                continue
            found = catalog.column(column.name)
            if found is None or found.number != column.field_id:
                raise table_changed(self._table, f"has no column {column.name!r} any more")
            if not pa.types.is_string(column.type) and found.type.arrow(self._dsn.ticks) != column.type:
                raise table_changed(self._table, f"has another type of column {column.name!r}")
            self._types[column.name] = str(found.type)  # change tables have some types under another name
        return catalog


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
        return with_session(self._dsn, lambda session: _read_range(session, table, part))

    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> SqlServerParts:
        return SqlServerParts(self._dsn, table, parts, columns)
