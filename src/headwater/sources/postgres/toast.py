"""Unchanged TOAST values: an update does not carry large values that it left alone; they are read again by key.

What is read is the value of now, not of the update: if it changed since, the change follows in the stream and carries
it. If the row is gone by now its value cannot be known; it is null, ``_unavailable`` names the column, and the delete
follows in the stream. A table with REPLICA IDENTITY FULL needs none of this: the server sends the old row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import errors as pg
from psycopg import sql
from pyarrow import csv

from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.decoder import RawRows
from headwater.sources.table import SourceTable

KEYS_AT_ONCE = 1000
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
    names = [table.columns[place].name for place in masks]
    values, found = _read(
        table, [columns[place].take(pa.array(rows)) for place in table.key_places], names, sql_session
    )
    for (place, mask), read in zip(masks.items(), values, strict=True):
        columns[place] = pc.replace_with_mask(columns[place], pa.array(mask), read.filter(pa.array(mask[rows])))
    return columns, _unavailable(names, list(masks.values()), rows, found)


def _read(
    table: SourceTable, keys: list[pa.Array], names: list[str], sql_session: SqlSession
) -> tuple[list[pa.Array], NDArray[np.bool_]]:
    """The values of *names* of the rows with these keys, each in its place, and whether the row is there."""
    pieces = []
    for start in range(0, len(keys[0]), KEYS_AT_ONCE):
        part = [key.slice(start, KEYS_AT_ONCE) for key in keys]
        with sql_session() as session:
            pieces.append(_read_some(table, part, names, session))
    whole = pa.concat_tables(pieces).combine_chunks()
    found = pc.equal(whole.column(0), "t").to_numpy(zero_copy_only=False)
    return [column.combine_chunks() for column in whole.columns[1:]], found


def _read_some(table: SourceTable, keys: list[pa.Array], names: list[str], connection: Connection) -> pa.Table:
    key_columns = [table.column(name) for name in table.key_columns]
    labels = [sql.Identifier(f"k{place}") for place in range(len(keys))]
    query = sql.SQL(
        "COPY (SELECT t.tableoid IS NOT NULL, {values} FROM unnest({keys}) WITH ORDINALITY AS k({labels}, n)"
        " LEFT JOIN {table} t ON {match} ORDER BY k.n) TO STDOUT (FORMAT csv)"
    ).format(
        values=sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(name)) for name in names),
        keys=sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(key.to_pylist())) for key in keys),
        labels=sql.SQL(", ").join(labels),
        table=sql.Identifier(table.namespace, table.name),
        match=sql.SQL(" AND ").join(
            sql.SQL("t.{} = k.{}::{}").format(sql.Identifier(column.name), label, sql.SQL(column.source_type))
            for column, label in zip(key_columns, labels, strict=True)
        ),
    )
    labels_of_values = [f"v{place}" for place in range(len(names))]
    text = BytesIO()
    try:
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            for block in copy:
                text.write(block)
    except (pg.UndefinedTable, pg.UndefinedColumn):  # dropped or renamed since: as if every row were gone
        nothing = pa.nulls(len(keys[0]), pa.string())
        gone = pa.array(np.full(len(keys[0]), "f"), pa.string())
        return pa.table([gone, *(nothing for _ in names)], names=["found", *labels_of_values])
    text.seek(0)
    return csv.read_csv(
        text,
        read_options=csv.ReadOptions(column_names=["found", *labels_of_values], use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types={name: pa.string() for name in ("found", *labels_of_values)},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _unavailable(
    names: list[str], masks: list[NDArray[np.bool_]], rows: NDArray[np.int64], found: NDArray[np.bool_]
) -> pa.StringArray:
    told: list[str | None] = [None] * len(masks[0])
    for row in rows[~found]:
        told[row] = ",".join(name for name, mask in zip(names, masks, strict=True) if mask[row])
    return pa.array(told, pa.string())
