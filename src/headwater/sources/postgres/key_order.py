"""PostgresKeyOrder: where keys lie between cuts, in the order that the database has.

Numbers, times, uuids, bytes and texts of bytewise collations are compared here. The order of everything else (locales,
enums, citext, addresses, ranges, …) is the server's alone: it is asked to rank the distinct values of a batch, together
with those of the cuts, in one statement per column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import sql

from headwater.sources.errors import InvalidKey, UnsupportedTable
from headwater.sources.key_places import DigitOrder, Digits, byte_ranks, numbers, ranked_together
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.connection import Connection, Dsn, connect, server_errors
from headwater.sources.postgres.convert import convert_column
from headwater.sources.postgres.key_columns import KeyColumn, read_key
from headwater.sources.postgres.names import TableName
from headwater.sources.table import SourceColumn, SourceTable
from headwater.system.pool import Pool

_UUID: Final = 2950
_TEXTS: Final = frozenset((19, 25, 1043))  # name, text, varchar: bytewise where their collation is
_T = TypeVar("_T")


class PostgresKeyOrder(DigitOrder):
    """The order of one table's keys. It can be pickled.

    :param asked: for each key column what the server is asked by, or ``None`` where it is compared here.
    :raises UnsupportedTable: a key column is an array.
    """

    def __init__(self, dsn: Dsn, table: SourceTable, asked: Sequence[KeyColumn | None]) -> None:
        self._dsn, self._table, self._asked = dsn, table, tuple(asked)
        self._columns = [table.column(name) for name in table.key_columns]
        for column in self._columns:
            if pa.types.is_nested(column.type):
                raise UnsupportedTable(table.full_name, f"its key column {column.name!r} is an array.")

    @property
    def is_local(self) -> bool:
        """Whether the database need not be asked."""
        return not any(self._asked)

    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        column, asked = self._columns[place], self._asked[place]
        cuts = pa.array(texts, pa.string())
        values = cuts if asked else convert_column(self._table, column, cuts)
        if values.null_count or keys.null_count:
            raise InvalidKey(self._table.full_name, column.name, column.source_type, "a key is null.")
        if asked is not None:
            return ranked_together(keys, values, partial(self._ranked, asked))
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            return byte_ranks(keys, values)
        return list(zip(numbers(keys), numbers(values), strict=True))

    def _ranked(self, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
        return with_session(self._dsn, lambda session: _rank(session, column, values))


def read_order(dsn: Dsn, table: SourceTable) -> PostgresKeyOrder:
    """The order of the keys of *table*; of texts, after asking the database how they are compared.

    :raises UnsupportedTable: they have no order. :raises SourceNotFound: there is no such table.
    """
    columns = [table.column(name) for name in table.key_columns]
    if not any(pa.types.is_string(column.type) and column.source_type != "uuid" for column in columns):
        return PostgresKeyOrder(dsn, table, [None] * len(columns))
    name = TableName(table.namespace, table.name)
    key = with_session(dsn, lambda session: read_key(session, read_table(session, name), table.key_columns))
    return PostgresKeyOrder(
        dsn,
        table,
        [None if _is_local(column, described) else column for column, described in zip(key, columns, strict=True)],
    )


# -- compared here ---------------------------------------------------------------------------------------------------


def _is_local(column: KeyColumn, described: SourceColumn) -> bool:
    if not pa.types.is_string(described.type):
        return True
    return column.type == _UUID or (column.type in _TEXTS and column.bytewise)


# -- compared by the database ----------------------------------------------------------------------------------------

_POOL: Final[Pool[Connection]] = Pool(lambda session: not session.closed, Connection.close)


def with_session(dsn: Dsn, question: Callable[[Connection], _T]) -> _T:
    """The answer over a session, which is opened again when it breaks."""

    def asked(session: Connection) -> _T:
        with server_errors(dsn):
            return question(session)

    return _POOL.ask(dsn.conninfo(), lambda: connect(dsn), asked)


def _rank(session: Connection, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
    """The place of each value among them all, equal ones the same."""
    quoted = pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"')
    whole = pa.ListArray.from_arrays(pa.array([0, len(quoted)], pa.int32()), quoted)
    text = '{"' + pc.binary_join(whole, '","')[0].as_py() + '"}'
    collate = (
        sql.SQL("") if column.collation is None else sql.SQL(" COLLATE {}").format(sql.Identifier(*column.collation))
    )
    query = sql.SQL(
        "SELECT pg_catalog.string_agg(r.rank::text, ',' ORDER BY r.n) FROM (SELECT pg_catalog.dense_rank() OVER"
        " (ORDER BY w.v::{}{}) AS rank, w.n FROM unnest({}::text[]) WITH ORDINALITY w (v, n)) r"
    ).format(sql.SQL(column.type_sql), collate, sql.Placeholder())
    row = session.execute(query, [text]).fetchone()
    assert row is not None
    return np.array(row[0].split(","), np.int64)
