"""The server as the oracle: what we read, written back, must be what it was.

Arrow values are written as text into a table of the same types, and the server's binary form of both is compared: that
notices a lost sign of a zero, a trailing zero of a number, a microsecond, a blank of padding, a bound of an array.
Columns that are text here must also be the server's own text.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg.pq import Format
from tests.db.postgres.pg_types import Kind, array_text
from tests.servers.postgres import Database

from headwater.sources.events import Boundary, Changes, Stopped
from headwater.sources.postgres.connection import Connection, Dsn, connect
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.table import RESERVED_COLUMNS, SourceTable, SpecialValues

Row = Sequence[str | None]
_SENTINEL = "sentinel"


@dataclass(frozen=True)
class Column:
    """A column of a table under test."""

    name: str
    kind: Kind
    policy: SpecialValues = SpecialValues.STOP


class FollowedDatabase:
    """A database whose changes are followed by one stream, to which tables are added."""

    def __init__(self, database: Database, folder: Path, policies: Mapping[str, SpecialValues]) -> None:
        self.database = database
        self.session = connect(Dsn(database.dsn))
        self.run(f"CREATE TABLE {_SENTINEL} (id int PRIMARY KEY)")
        self.source = PostgresSource(database.dsn, spill=folder, special_values=policies)
        tables = self.source.tables([_SENTINEL])
        position, identity = self.source.begin(tables, resumed=True)
        self.stream = self.source.open(tables, position, identity)
        self._numbers = itertools.count(1)
        self.stopped: list[Stopped] = []

    def close(self) -> None:
        self.session.close()
        self.stream.close()
        self.source.close()

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.session.execute("SET search_path = public")
            self.session.execute(statement.encode())
        self.session.execute("SET search_path = ''")

    def add(self, *names: str) -> list[SourceTable]:
        """Follow more tables."""
        tables = self.source.tables(names)
        self.source.include(tables)
        for table in tables:
            self.stream.add_table(table)
        return tables

    def changes(self) -> dict[str, pa.Table]:
        """What was committed by now and not told yet, by table, with its ops in a column ``_op``."""
        number = next(self._numbers)
        self.run(f"INSERT INTO {_SENTINEL} VALUES ({number})")
        found: dict[str, list[pa.Table]] = {}
        seen, end = False, time.monotonic() + 60
        while not seen:
            assert time.monotonic() < end, "the stream did not tell what was committed"
            for event in self.stream.poll(1.0, stop_at_boundary=False):
                if isinstance(event, Changes):
                    if event.table.name == _SENTINEL:
                        seen = number in event.rows.column("id").to_pylist()
                        continue
                    event.rows.validate(full=True)
                    rows = pa.Table.from_batches([event.rows]).append_column("_op", event.ops)
                    found.setdefault(event.table.name, []).append(rows)
                elif isinstance(event, Stopped):
                    self.stopped.append(event)
                elif isinstance(event, Boundary):
                    self.stream.acknowledge(event.position)
        return {name: pa.concat_tables(parts).combine_chunks() for name, parts in found.items()}

    def snapshot(self, table: SourceTable) -> pa.Table:
        """Its rows by key."""
        batches = list(read_table(Dsn(self.database.dsn), table))
        for batch in batches:
            batch.validate(full=True)
        return by_key(pa.Table.from_batches(batches, table.schema), table)

    def check(self, table: SourceTable, rows: pa.Table, columns: Sequence[Column]) -> None:
        """*rows*, by key, are what the server has in *table*."""
        assert rows.schema.equals(table.schema, check_metadata=True)
        for column in columns:
            expected = pa.string() if column.policy is SpecialValues.TEXT else column.kind.arrow
            assert rows.schema.field(column.name).type == expected, column.kind.sql
        key = ", ".join(f'"{name}"' for name in table.key_columns)
        origin, names = f'public."{table.name}"', [column.name for column in columns]
        with scratch_table(self.session, origin, table) as twin:
            write(self.session, twin, table.schema.names, _texts(rows))
            for column in columns:
                value = f'"{column.name}"'
                plain = column.kind.plain(value) if column.policy is SpecialValues.NULL else value
                before = _binary(self.session, f"SELECT {plain} FROM {origin} ORDER BY {key}")
                after = _binary(self.session, f"SELECT {value} FROM {twin} ORDER BY {key}")
                assert before == after, (column, rows.column(column.name).to_pylist())
        shown = [name for name in names if rows.schema.field(name).type == pa.string()]
        if shown:
            listed = ", ".join(f'"{name}"' for name in shown)
            for name, texts in zip(
                shown, _shown(self.session, f"SELECT {listed} FROM {origin} ORDER BY {key}"), strict=True
            ):
                assert rows.column(name).to_pylist() == texts, name


def by_key(rows: pa.Table, table: SourceTable) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in table.key_columns]).combine_chunks()


def own(rows: pa.Table) -> pa.Table:
    """Without the log's columns."""
    return rows.select([name for name in rows.schema.names if name not in RESERVED_COLUMNS])


def write(session: Connection, table: str, names: Iterable[str], rows: Iterable[Row]) -> None:
    """Put *rows* into *table*, as texts."""
    listed = ", ".join(f'"{name}"' for name in names)
    with session.cursor().copy(f"COPY {table} ({listed}) FROM STDIN".encode()) as copy:
        for row in rows:
            copy.write_row(row)


@contextlib.contextmanager
def scratch_table(session: Connection, origin: str, table: SourceTable) -> Iterator[str]:
    """An empty table of the same types, none of them generated."""
    listed = ", ".join(f'"{name}"' for name in table.schema.names)
    session.execute(f"CREATE TEMPORARY TABLE twin AS SELECT {listed} FROM {origin} WITH NO DATA".encode())
    try:
        yield "pg_temp.twin"
    finally:
        session.execute("DROP TABLE pg_temp.twin")


def _binary(session: Connection, query: str) -> bytes:
    with session.cursor().copy(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()) as copy:
        return b"".join(bytes(block) for block in copy)


def _shown(session: Connection, query: str) -> list[list[str | None]]:
    """The server's texts, column by column."""
    result = session.cursor(binary=False).execute(query.encode()).pgresult
    assert result is not None
    assert result.fformat(0) == Format.TEXT
    columns = []
    for place in range(result.nfields):
        values = [result.get_value(row, place) for row in range(result.ntuples)]
        columns.append([None if value is None else value.decode() for value in values])
    return columns


# -- Arrow values as texts that the server reads ----------------------------------------------------------------------


def _texts(rows: pa.Table) -> Iterator[Row]:
    columns = [[_text(value) for value in column.to_pylist()] for column in rows.columns]
    return zip(*columns, strict=True)


def _text(value: Any) -> str | None:
    match value:
        case None | str():
            return value
        case bool():
            return "t" if value else "f"
        case float():
            return (
                str(value) if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
            )
        case bytes():
            return "\\x" + value.hex()
        case list():
            return array_text([_text(element) for element in value])
        case int():
            return str(value)
    return value.isoformat() if hasattr(value, "isoformat") else format(value, "f")


# -- the same, to the bit -------------------------------------------------------------------------------------------


def assert_same(found: pa.Table, expected: pa.Table) -> None:
    """Two tables are equal in every bit that a value has: NaN is NaN, and -0 is not 0."""
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.num_rows == expected.num_rows
    for field in expected.schema:
        left, right = (_chunk(table.column(field.name)) for table in (found, expected))
        assert _same(left, right), (field.name, field.type, left.to_pylist(), right.to_pylist())


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _same(left: pa.Array, right: pa.Array) -> bool:
    if pa.types.is_list(left.type):
        return pc.list_value_length(left).equals(pc.list_value_length(right)) and _same(left.flatten(), right.flatten())
    if pa.types.is_floating(left.type):
        bits = pa.int32() if left.type.bit_width == 32 else pa.int64()
        left, right = left.view(bits), right.view(bits)
    return bool(left.equals(right))
