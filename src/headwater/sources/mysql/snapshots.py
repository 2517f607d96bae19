"""MySqlSnapshots: reads tables of MySQL and MariaDB at a position of their log; see :class:`.offset.MySqlMark`."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidKey, UnsupportedTable
from headwater.sources.key_conditions import printed_range
from headwater.sources.key_places import DigitOrder, Digits, byte_ranks, numbers, ranked_together
from headwater.sources.mysql.catalog import CatalogTable, read_table
from headwater.sources.mysql.connection import Connection, Dsn, ask, server_errors, version_of
from headwater.sources.mysql.key_columns import FLOATS, INTEGERS, NUMBERED, KeyColumn, read_key
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.offset import MySqlMark
from headwater.sources.mysql.parts import MySqlParts, borrow, give_back, with_session
from headwater.sources.mysql.places import seen_place
from headwater.sources.mysql.server import Server
from headwater.sources.mysql.splitting import page_end, plan_splits
from headwater.sources.mysql.types import ADDRESSES, BINARIES, source_column
from headwater.sources.position_snapshots import PositionSnapshot, PositionSnapshots, with_columns
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_RANKS_SINCE: Final = {"MySQL": (8, 0, 4), "MariaDB": (10, 6, 0)}
_SORTED_BYTES: Final = 16_384
_LONGEST: Final = 3_072
"""Bytes of the longest key that an index takes; characters have at most so many."""
_T = TypeVar("_T")


class MySqlKeyOrder(DigitOrder):
    """The order of one table's keys. It can be pickled.

    Numbers, times, bytes, enums and sets are compared here. The order of texts is that of their collation, and of
    addresses the server's own: it ranks the distinct values of a batch, together with those of the cuts, in one
    statement per column.
    """

    def __init__(self, dsn: Dsn, table: SourceTable, key: Sequence[KeyColumn]) -> None:
        self._dsn, self._table, self._key = dsn, table, tuple(key)

    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        column = self._key[place]
        if keys.null_count:
            raise InvalidKey(self._table.full_name, column.name, column.type_text, "a key is null.")
        if _is_asked(column, self._table):
            return ranked_together(keys, pa.array(texts, pa.string()), partial(self._ranked, column))
        if column.labels:
            distinct = keys.dictionary_encode()
            found = np.array([column.number(label) for label in distinct.dictionary.to_pylist()], np.uint64)
            own = found[distinct.indices.to_numpy(zero_copy_only=False)] if len(found) else np.empty(0, np.uint64)
            return [(own, np.array([int(text) for text in texts], np.uint64))]
        cuts = pa.array([_value(text, column, keys.type) for text in texts], keys.type)
        if pa.types.is_string(keys.type) or pa.types.is_binary(keys.type):
            return byte_ranks(keys, cuts)
        if pa.types.is_boolean(keys.type):
            keys, cuts = keys.cast(pa.int8()), cuts.cast(pa.int8())
        return list(zip(numbers(keys), numbers(cuts), strict=True))

    def _ranked(self, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
        return with_session(self._dsn, lambda session: _rank(session, self._table, column, values))


def read_order(dsn: Dsn, table: SourceTable) -> MySqlKeyOrder:
    """The order of the keys of *table*. :raises SourceNotFound: there is no such table."""
    name = TableName(table.namespace, table.name)
    key = with_session(dsn, lambda session: read_key(read_table(session, name), table))
    return MySqlKeyOrder(dsn, table, key)


def _is_asked(column: KeyColumn, table: SourceTable) -> bool:
    if column.kind in ADDRESSES:
        return True
    if column.charset is not None:
        return not column.labels
    # as text, times of more than a day are in no order
    return column.kind == "time" and pa.types.is_string(table.column(column.name).type)


def _value(text: str, column: KeyColumn, kind: pa.DataType) -> Any:
    """The value of a cut as Python has those of the column."""
    if pa.types.is_boolean(kind):
        return text != "0"
    if pa.types.is_binary(kind):
        if column.kind == "bit":
            return int(text).to_bytes((int(column.type_text.strip("bit()")) + 7) // 8, "big")
        return bytes.fromhex(text)
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_date32(kind):
        return dt.date.fromisoformat(text[:10])
    if pa.types.is_timestamp(kind):
        made = dt.datetime.fromisoformat(text)
        return made.replace(tzinfo=dt.UTC) if kind.tz else made
    if pa.types.is_time64(kind):
        return dt.time.fromisoformat(text)
    return text


# -- compared by the database ----------------------------------------------------------------------------------------


def _rank(session: Connection, table: SourceTable, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
    """The place of each value among them all, equal ones the same."""
    version = version_of(session)
    if version.number < _RANKS_SINCE[version.family]:
        since = ".".join(str(part) for part in _RANKS_SINCE[version.family])
        raise UnsupportedTable(
            table.full_name,
            f"{version} cannot be asked for the order of its key column {column.name!r}.",
            next_step=f"Read its history from {version.family} {since} or later.",
        )
    ask(session, f"SET SESSION max_sort_length = {_SORTED_BYTES}")
    if column.charset is not None:
        typed = f"CONVERT(v USING {column.charset}) COLLATE {column.collation}"
    elif column.kind in ADDRESSES:
        typed = f"CAST(v AS {column.kind})"
    else:
        typed = "CAST(v AS TIME(6))"
    rows = ask(
        session,
        f"SELECT n, DENSE_RANK() OVER (ORDER BY {typed}) AS place FROM JSON_TABLE(%s, '$[*]' COLUMNS "
        f"(n FOR ORDINALITY, v VARCHAR({_LONGEST}) CHARACTER SET utf8mb4 PATH '$')) AS sent",
        [json.dumps(values.to_pylist())],
    )
    found = np.zeros(len(values), np.int64)
    for row in rows:
        found[int(row["n"]) - 1] = int(row["place"])
    return found


def _read_range(session: Connection, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as cuts have them; see :func:`~headwater.sources.key_conditions.printed_range`."""
    key = read_key(read_table(session, TableName(table.namespace, table.name)), table)
    return printed_range(
        table,
        part,
        key,
        lambda column, value: _text(session, column, value),
        lambda statement: ask(session, statement),
    )


def _text(session: Connection, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    try:
        if column.kind in INTEGERS or column.kind in ("bit", "year"):
            return str(int(value))
        if column.kind in NUMBERED:
            number = int(value) if value.isdigit() else column.number(value)
            return str(number) if number else None
        if column.kind in ("decimal", "numeric") or column.kind in FLOATS:
            float(value)
            return value.strip().lstrip("+")
        if column.kind in BINARIES:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
    except ValueError:
        return None
    if column.charset is not None:
        return value
    kind = column.kind if column.kind in ADDRESSES or column.kind == "date" else "DATETIME(6)"
    found = ask(
        session, f"SELECT CAST(CAST(%s AS {'TIME(6)' if column.kind == 'time' else kind}) AS CHAR) AS v", [value]
    )
    told = found[0]["v"]
    return None if told is None else str(told)


class MySqlSnapshot(PositionSnapshot[Connection, CatalogTable, MySqlMark]):
    """A place. One thread.

    :param lock_seconds: how long a question waits for a locked table, which then is ``SourceBusy``; ``None``: until it
        is free.
    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceBusy: see :mod:`.places`.
    """

    def __init__(self, dsn: Dsn, lock_seconds: float | None = None) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn, self._lock_seconds = dsn, lock_seconds
        self._session: Connection | None = None
        try:
            with self._asked() as session:
                self._mark = MySqlMark(seen_place(session, Server.ask(session)))
        except BaseException:
            self.close()
            raise

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has now, those that came new at the end.

        :raises SourceNotFound: the server has no such table.
        """
        catalog = self._catalog(table)
        known = {column.name: column for column in table.columns}
        following = max(column.field_id for column in table.columns) + 1
        columns = []
        for column in catalog.columns:
            was = known.get(column.name)
            columns.append(
                source_column(
                    column.name,
                    column.type_text,
                    following if was is None else was.field_id,
                    nullable=column.nullable,
                    special_values=SpecialValues.STOP if was is None else was.special_values,
                    tinyint1_is_boolean=self._dsn.tinyint1_is_boolean,
                )
            )
            following += was is None
        return with_columns(table, columns)

    def close(self) -> None:
        """Let the session go. Closing twice is fine."""
        if self._session is not None:
            give_back(self._dsn, self._session)
        self._session = None

    def _ping(self, session: Connection) -> None:
        ask(session, "SELECT 1")

    def _read(self, session: Connection, table: SourceTable) -> CatalogTable:
        name = TableName(table.namespace, table.name)
        ask(session, f"SELECT 1 FROM {name.sql} LIMIT 0")  # who has locked it holds who plans, not the tasks
        return read_table(session, name)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Connection]:
        if self._session is None or not self._session.open:
            self._session = borrow(self._dsn)
            seconds = "DEFAULT" if self._lock_seconds is None else max(1, round(self._lock_seconds))
            with server_errors(self._dsn):
                ask(self._session, f"SET SESSION lock_wait_timeout = {seconds}")
        with server_errors(self._dsn):
            yield self._session


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
        return with_session(self._dsn, lambda session: _read_range(session, table, part))

    def _open(self, table: SourceTable, parts: Sequence[KeyRange], columns: Sequence[SourceColumn]) -> MySqlParts:
        return MySqlParts(self._dsn, table, parts, columns)
