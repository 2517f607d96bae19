"""Unchanged TOAST values: an update does not carry large values that it left alone; they are read again by key.

What is read is the value of now, not of the update: if it changed since, the change follows in the stream and carries
it. If the row is gone by now its value cannot be known; it is null, ``_unavailable`` names the column, and the delete
follows in the stream. A table with REPLICA IDENTITY FULL needs none of this: the server sends the old row.

The table and its columns are found by number: by name it might be another one by now.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import errors as pg
from psycopg import sql

from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.csv import read_texts
from headwater.sources.postgres.decoder import RawRows
from headwater.sources.table import SourceColumn, SourceTable

KEYS_AT_ONCE = 1000
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


def complete(raw: RawRows, table: SourceTable, sql_session: SqlSession) -> tuple[list[pa.Array], pa.StringArray]:
    """The columns of *raw*, with values that the server left out read by key, and what could not be known.

    :raises SourceUnreachable: the server did not answer.
    """
    columns = [column.text for column in raw.columns]
    masks = {place: column.unchanged for place, column in enumerate(raw.columns) if column.unchanged is not None}
    if not masks:
        return columns, pa.nulls(len(raw.ops), pa.string())
    rows = np.flatnonzero(np.logical_or.reduce(list(masks.values())))
    wanted = [table.columns[place] for place in masks]
    values, found = _read(
        table, [columns[place].take(pa.array(rows)) for place in table.key_places], wanted, sql_session
    )
    for (place, mask), read in zip(masks.items(), values, strict=True):
        columns[place] = pc.replace_with_mask(columns[place], pa.array(mask), read.filter(pa.array(mask[rows])))
    return columns, _unavailable([column.name for column in wanted], list(masks.values()), rows, found)


def _read(
    table: SourceTable, keys: list[pa.Array], wanted: list[SourceColumn], sql_session: SqlSession
) -> tuple[list[pa.Array], NDArray[np.bool_]]:
    """The values of *wanted* of the rows with these keys, each in its place, and whether the row is there."""
    pieces = []
    for start in range(0, len(keys[0]), KEYS_AT_ONCE):
        part = [key.slice(start, KEYS_AT_ONCE) for key in keys]
        with sql_session() as session:
            pieces.append(_read_some(table, part, wanted, session))
    whole = pa.concat_tables(pieces).combine_chunks()
    found = pc.equal(whole.column(0), "t").to_numpy(zero_copy_only=False)
    return [column.combine_chunks() for column in whole.columns[1:]], found


def _read_some(
    table: SourceTable, keys: list[pa.Array], wanted: list[SourceColumn], connection: Connection
) -> pa.Table:
    key_columns = [table.column(name) for name in table.key_columns]
    text = BytesIO()
    try:
        now = ask(connection, _NAMES, [table.source_id])
        numbers = [str(column.field_id) for column in (*key_columns, *wanted)]
        if not now or not now[0].columns.keys() >= set(numbers):
            return _nothing(len(keys[0]), len(wanted))
        query = _query(now[0], keys, key_columns, wanted)
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            for block in copy:
                text.write(block)
    except (pg.UndefinedTable, pg.UndefinedColumn):  # dropped or renamed since: as if every row were gone
        return _nothing(len(keys[0]), len(wanted))
    return read_texts(table.full_name, text.getvalue(), len(wanted) + 1)


def _query(now: Any, keys: list[pa.Array], key_columns: list[SourceColumn], wanted: list[SourceColumn]) -> sql.Composed:
    """*now*: the names of the table and of its columns as they are."""
    labels = [sql.Identifier(f"k{place}") for place in range(len(keys))]
    names = {column.field_id: sql.Identifier(now.columns[str(column.field_id)]) for column in (*key_columns, *wanted)}
    return sql.SQL(
        "COPY (SELECT t.tableoid IS NOT NULL, {values} FROM unnest({keys}) WITH ORDINALITY AS k({labels}, n)"
        " LEFT JOIN {only}{table} t ON {match} ORDER BY k.n) TO STDOUT (FORMAT csv)"
    ).format(
        values=sql.SQL(", ").join(sql.SQL("t.{}").format(names[column.field_id]) for column in wanted),
        keys=sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(key.to_pylist())) for key in keys),
        labels=sql.SQL(", ").join(labels),
        only=sql.SQL("" if now.partitioned else "ONLY "),
        table=sql.Identifier(now.namespace, now.name),
        match=sql.SQL(" AND ").join(
            sql.SQL("t.{} {} k.{}::{}").format(
                names[column.field_id], _equality(now, column), label, sql.SQL(column.source_type)
            )
            for column, label in zip(key_columns, labels, strict=True)
        ),
    )


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
