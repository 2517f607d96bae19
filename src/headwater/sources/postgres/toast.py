"""Unchanged TOAST values: an update does not carry large values that it left alone; they are read again by key.

What is read is the value of now, not of the update: if it changed since, the change follows in the stream and carries
it. If the row is gone by now its value cannot be known; it is null, ``_unavailable`` names the column, and the delete
follows in the stream. A table with REPLICA IDENTITY FULL needs none of this: the server sends the old row.

The log has a transaction before other sessions see it, so nothing is read before its updates are visible: the values of
before would stay in the log for good. A lock on the table is waited for in short attempts, and never for ever.

The table and its columns are found by number: by name it might be another one by now.

On a node of a cluster a query of the table goes over all nodes, and as an outer join it would gather all of its rows.
So the shards that the node has are read, which are tables of their own, and only rows that are in none of them, because
they are gone or elsewhere by now, are looked for in the table, by an inner join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import errors as pg
from psycopg import sql

from headwater.sources.errors import TableLocked
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.csv import read_texts
from headwater.sources.postgres.decoder import RawRows
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.visibility import await_visible
from headwater.sources.table import SourceColumn, SourceTable

KEYS_AT_ONCE = 1000
LOCKED_SECONDS: Final = 15.0
"""How long a locked table is waited for. All tables wait with it, so it is read again then, and the others go on."""
# Names as they are now, and the equality of types that extensions made: it is in their schema, not in our search path.
_NAMES = """
SELECT n.nspname AS namespace, c.relname AS name, c.relkind = 'p' AS partitioned,
       (SELECT pg_catalog.jsonb_object_agg(a.attnum, a.attname) FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
       (SELECT pg_catalog.jsonb_object_agg(a.attnum, pg_catalog.jsonb_build_array(s.nspname, o.oprname))
        FROM pg_catalog.pg_attribute a
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
        JOIN pg_catalog.pg_opclass f ON f.opcintype IN (t.oid, t.typbasetype) AND f.opcdefault
        JOIN pg_catalog.pg_am m ON m.oid = f.opcmethod AND m.amname = 'btree'
        JOIN pg_catalog.pg_amop p ON p.amopfamily = f.opcfamily AND p.amopstrategy = 3
             AND p.amoplefttype = f.opcintype AND p.amoprighttype = f.opcintype
        JOIN pg_catalog.pg_operator o ON o.oid = p.amopopr
        JOIN pg_catalog.pg_namespace s ON s.oid = o.oprnamespace
        WHERE a.attrelid = c.oid AND s.nspname <> 'pg_catalog') AS equals
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
SqlSession: TypeAlias = Callable[[], AbstractContextManager[Connection]]
Shards: TypeAlias = Callable[[SourceTable], Sequence[TableName]]
"""The tables that have the rows of one on this server; none: they are in the table itself."""


def no_shards(_: SourceTable) -> Sequence[TableName]:
    """Of a server that is by itself."""
    return ()


def complete(
    raw: RawRows, table: SourceTable, sql_session: SqlSession, shards: Shards, keep_alive: Callable[[], None]
) -> tuple[list[pa.Array], pa.StringArray]:
    """The columns of *raw*, with values that the server left out read by key, and what could not be known.

    :param keep_alive: called while it waits for the transactions to be visible, or for a lock.
    :raises SourceBusy: a transaction is not visible yet. :raises TableLocked: the table stays locked.
    :raises SourceUnreachable: the server did not answer.
    """
    columns = [column.text for column in raw.columns]
    masks = {place: column.unchanged for place, column in enumerate(raw.columns) if column.unchanged is not None}
    if not masks:
        return columns, pa.nulls(len(raw.ops), pa.string())
    rows = np.flatnonzero(np.logical_or.reduce(list(masks.values())))
    wanted = [table.columns[place] for place in masks]
    keys = [columns[place].take(pa.array(rows)) for place in table.key_places]
    with sql_session() as session:
        await_visible(session, np.unique(raw.xid[rows]).tolist(), keep_alive)
    values, found = _read(table, keys, wanted, sql_session, shards, keep_alive)
    for (place, mask), read in zip(masks.items(), values, strict=True):
        columns[place] = pc.replace_with_mask(columns[place], pa.array(mask), read.filter(pa.array(mask[rows])))
    return columns, _unavailable([column.name for column in wanted], list(masks.values()), rows, found)


def _read(
    table: SourceTable,
    keys: list[pa.Array],
    wanted: list[SourceColumn],
    sql_session: SqlSession,
    shards: Shards,
    keep_alive: Callable[[], None],
) -> tuple[list[pa.Array], NDArray[np.bool_]]:
    """The values of *wanted* of the rows with these keys, each in its place, and whether the row is there."""
    pieces: list[pa.Table] = []
    placed = shards(table)
    end = time.monotonic() + LOCKED_SECONDS
    while (start := len(pieces) * KEYS_AT_ONCE) < len(keys[0]):
        part = [key.slice(start, KEYS_AT_ONCE) for key in keys]
        with sql_session() as session:
            try:
                pieces.append(_read_some(table, part, wanted, session, placed))
            except pg.LockNotAvailable:
                if time.monotonic() >= end:
                    raise TableLocked(
                        table.full_name,
                        f"another session locked it for more than {LOCKED_SECONDS:g} s, and large values must be read.",
                    ) from None
        keep_alive()
    whole = pa.concat_tables(pieces).combine_chunks()
    found = pc.equal(whole.column(0), "t").to_numpy(zero_copy_only=False)
    return [column.combine_chunks() for column in whole.columns[1:]], found


def _read_some(
    table: SourceTable,
    keys: list[pa.Array],
    wanted: list[SourceColumn],
    connection: Connection,
    shards: Sequence[TableName],
) -> pa.Table:
    now = ask(connection, _NAMES, [table.source_id])
    numbers = {str(column.field_id) for column in (*(table.column(name) for name in table.key_columns), *wanted)}
    if not now or not now[0].columns.keys() >= numbers:
        return _nothing(len(keys[0]), len(wanted))
    asking = _Asking(now[0], table, wanted)
    if not shards:
        return asking.copied(connection, asking.each(keys), len(keys[0]))
    read = asking.copied(connection, asking.each(keys, shards), len(keys[0]))
    absent = np.flatnonzero(~pc.equal(read.column(0), "t").to_numpy(zero_copy_only=False))
    if not absent.size:
        return read
    elsewhere = asking.copied(connection, asking.those_there([key.take(pa.array(absent)) for key in keys]), 0)
    return _put(read, absent, elsewhere)


def _put(read: pa.Table, absent: NDArray[np.int64], elsewhere: pa.Table) -> pa.Table:
    """*read*, with the rows of *elsewhere*, whose first column counts from one among the *absent*, in their places."""
    if not elsewhere.num_rows:
        return read
    places = absent[elsewhere.column(0).to_numpy().astype(np.int64) - 1]
    order = np.argsort(places)
    mask = np.zeros(read.num_rows, np.bool_)
    mask[places] = True
    there = pa.array(np.full(len(places), "t"), pa.string())
    given = [there, *(column.combine_chunks().take(pa.array(order)) for column in elsewhere.columns[1:])]
    columns = [
        pc.replace_with_mask(column.combine_chunks(), pa.array(mask), values)
        for column, values in zip(read.columns, given, strict=True)
    ]
    return pa.table(columns, names=read.column_names)


class _Asking:
    """Queries of rows by their keys. :param now: the names of the table and of its columns as they are."""

    def __init__(self, now: Any, table: SourceTable, wanted: list[SourceColumn]) -> None:
        keys = [table.column(name) for name in table.key_columns]
        names = {column.field_id: sql.Identifier(now.columns[str(column.field_id)]) for column in (*keys, *wanted)}
        labels = [sql.Identifier(f"k{place}") for place in range(len(keys))]
        self._name = table.full_name
        self._count = len(wanted) + 1
        self._only = sql.SQL("" if now.partitioned else "ONLY ")
        self._table = sql.Identifier(now.namespace, now.name)
        self._columns = sql.SQL(", ").join(names.values())
        self._values = sql.SQL(", ").join(sql.SQL("t.{}").format(names[column.field_id]) for column in wanted)
        self._labels = sql.SQL(", ").join(labels)
        self._match = sql.SQL(" AND ").join(
            sql.SQL("t.{} {} k.{}::{}").format(
                names[column.field_id], _equality(now, column), label, sql.SQL(column.source_type)
            )
            for column, label in zip(keys, labels, strict=True)
        )

    def each(self, keys: list[pa.Array], shards: Sequence[TableName] = ()) -> sql.Composed:
        """A row for each key, in its order: whether it is there, and its values."""
        place: sql.Composable = sql.SQL("{}{}").format(self._only, self._table)
        if shards:
            each = (
                sql.SQL("SELECT tableoid, {} FROM {}{}").format(
                    self._columns, self._only, sql.Identifier(shard.namespace, shard.name)
                )
                for shard in shards
            )
            place = sql.SQL("({})").format(sql.SQL(" UNION ALL ").join(each))
        return sql.SQL(
            "COPY (SELECT t.tableoid IS NOT NULL, {values} FROM {keys} LEFT JOIN {place} t ON {match} ORDER BY k.n)"
            " TO STDOUT (FORMAT csv)"
        ).format(values=self._values, keys=self._unnested(keys), place=place, match=self._match)

    def those_there(self, keys: list[pa.Array]) -> sql.Composed:
        """A row for each key that the table has: the place of the key, from one, and its values."""
        return sql.SQL(
            "COPY (SELECT k.n, {values} FROM {keys} JOIN {only}{table} t ON {match}) TO STDOUT (FORMAT csv)"
        ).format(values=self._values, keys=self._unnested(keys), only=self._only, table=self._table, match=self._match)

    def _unnested(self, keys: list[pa.Array]) -> sql.Composed:
        arrays = sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(key.to_pylist())) for key in keys)
        return sql.SQL("unnest({}) WITH ORDINALITY AS k({}, n)").format(arrays, self._labels)

    def copied(self, connection: Connection, query: sql.Composed, rows: int) -> pa.Table:
        """What *query* gives; *rows* that are gone where the table, or one of its columns, is no more."""
        text = BytesIO()
        try:
            with connection.cursor() as cursor, cursor.copy(query) as copy:
                for block in copy:
                    text.write(block)
        except (pg.UndefinedTable, pg.UndefinedColumn):  # dropped or renamed since; of a shard: moved or split
            return _nothing(rows, self._count - 1)
        return read_texts(self._name, text.getvalue(), self._count)


def _equality(now: Any, column: SourceColumn) -> sql.Composable:
    namespace, operator = (now.equals or {}).get(str(column.field_id), ("pg_catalog", "="))
    return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(namespace), sql.SQL(operator))


def _nothing(rows: int, columns: int) -> pa.Table:
    """As if every row were gone."""
    values = [pa.nulls(rows, pa.string()) for _ in range(columns)]
    return pa.table([pa.array(np.full(rows, "f"), pa.string()), *values], names=[str(n) for n in range(columns + 1)])


def _unavailable(
    names: list[str], masks: list[NDArray[np.bool_]], rows: NDArray[np.int64], found: NDArray[np.bool_]
) -> pa.StringArray:
    told: list[str | None] = [None] * len(masks[0])
    for row in rows[~found]:
        told[row] = ",".join(name for name, mask in zip(names, masks, strict=True) if mask[row])
    return pa.array(told, pa.string())
