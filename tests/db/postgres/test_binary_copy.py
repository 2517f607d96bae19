"""Snapshots read by COPY BINARY: every value, every error and every resumed read is what csv gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Context

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.db.postgres.oracle import assert_same, by_key, write
from tests.db.postgres.pg_types import BASE, Kind, array_of, kinds_of
from tests.db.postgres.test_snapshot import described
from tests.servers.postgres import VERSIONS, Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.sources.errors import SourceError, SpecialValue, UndecodableValue
from headwater.sources.postgres.binary import BinaryRows, compiled_decode
from headwater.sources.postgres.connection import Connection, Dsn, connect
from headwater.sources.postgres.snapshot import BATCH_BYTES, read_table
from headwater.sources.postgres.snapshots import PartSession, PostgresSnapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues

pytestmark = pytest.mark.skipif(compiled_decode() is None, reason="the compiled code was not built")

ALL = KeyRange()
_WIDE = Context(prec=80)
EDGE_COLUMNS = 60
EXAMPLES = 400 if "HEADWATER_SOAK" in os.environ else 20
POLICIES = (SpecialValues.STOP, SpecialValues.NULL, SpecialValues.TEXT)


@pytest.fixture(autouse=True)
def binary_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read by binary, however many of their columns are sent as text."""
    monkeypatch.setattr("headwater.sources.postgres.snapshots.MOST_TEXT", 1.0)


@pytest.fixture(scope="module", params=VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def typed(
    request: pytest.FixtureRequest, postgres_servers: Callable[[int], PostgresServer]
) -> Iterator[tuple[Database, Connection, list[Kind]]]:
    """A database with all types in it."""
    with postgres_servers(request.param).database() as database, connect(Dsn(database.dsn)) as session:
        session.execute("SET search_path = public")
        yield database, session, kinds_of(session)


def by_binary(database: Database, table: SourceTable, batch_bytes: int = BATCH_BYTES) -> list[pa.RecordBatch]:
    with PartSession(Dsn(database.dsn), None) as session:
        assert isinstance(session.prepare(table, SplitKind.HEAP, ALL, table.columns)[1], BinaryRows)
    batches = list(PostgresSnapshots(database.dsn).read(table, SplitKind.HEAP, ALL, None, batch_bytes=batch_bytes))
    for batch in batches:
        batch.validate(full=True)
    return batches


def sorted_rows(batches: Sequence[pa.RecordBatch], table: SourceTable) -> pa.Table:
    return by_key(pa.Table.from_batches(batches, table.schema), table)


def assert_as_csv(database: Database, table: SourceTable) -> pa.Table:
    expected = sorted_rows(list(read_table(Dsn(database.dsn), table)), table)
    assert_same(sorted_rows(by_binary(database, table), table), expected)
    assert_same(sorted_rows(by_binary(database, table, batch_bytes=1), table), expected)
    return expected


def errors_of(database: Database, table: SourceTable) -> tuple[SourceError, SourceError]:
    with pytest.raises(SourceError) as by_csv:
        list(read_table(Dsn(database.dsn), table))
    with pytest.raises(SourceError) as found:
        by_binary(database, table)
    return found.value, by_csv.value


@pytest.mark.parametrize("policy", POLICIES)
def test_every_type_at_its_edges(typed: tuple[Database, Connection, list[Kind]], policy: SpecialValues) -> None:
    database, session, kinds = typed
    kinds = [kind for kind in kinds if kind.special or policy is SpecialValues.STOP]
    for part in range(0, len(kinds), EDGE_COLUMNS):
        columns = {f"c{place}": kind for place, kind in enumerate(kinds[part : part + EDGE_COLUMNS])}
        values = [
            (*kind.edges, *(() if policy is SpecialValues.STOP else kind.special), None) for kind in columns.values()
        ]
        rows = [[str(row), *(those[row % len(those)] for those in values)] for row in range(max(map(len, values)) + 1)]
        listed = ", ".join(f"{name} {kind.sql}" for name, kind in columns.items())
        session.execute(f"CREATE TABLE public.t (id int PRIMARY KEY, {listed})".encode())
        write(session, "public.t", ["id", *columns], rows)
        policies = {f"public.t.{name}": policy for name in columns}
        found = assert_as_csv(database, described(database, "t", special_values=policies))
        assert found.num_rows == len(rows)
        session.execute("DROP TABLE public.t")


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_random_values_of_every_type(typed: tuple[Database, Connection, list[Kind]], data: st.DataObject) -> None:
    database, session, kinds = typed
    columns = {f"c{place}": kind for place, kind in enumerate(data.draw(st.lists(st.sampled_from(kinds), min_size=8)))}
    row = st.tuples(*(st.none() | kind.values(special=True) for kind in columns.values()))
    rows = [[str(place), *values] for place, values in enumerate(data.draw(st.lists(row, min_size=1, max_size=8)))]
    listed = ", ".join(f"{name} {kind.sql}" for name, kind in columns.items())
    session.execute(f"CREATE TABLE public.t (id int PRIMARY KEY, {listed})".encode())
    try:
        write(session, "public.t", ["id", *columns], rows)
        policies = {f"public.t.{name}": data.draw(st.sampled_from(POLICIES[1:])) for name in columns}
        assert assert_as_csv(database, described(database, "t", special_values=policies)).num_rows == len(rows)
    finally:
        session.execute("DROP TABLE public.t")


NUMBERS = [
    0, 1, -1, 9, 10, 99, 100, 999, 1000, 9999, 10_000, 10_001, 99_990_000, 100_000_000, 10**16 - 1, 10**16, 10**16 + 1,
    10**20, 10**32 - 1, 10**32, 10**37, 10**38 - 1, int("1234567890" * 4) // 100,
    10002000300040005000600070008000,
]  # fmt: skip


@pytest.mark.parametrize("digits", [1, 4, 5, 17, 18, 19, 37, 38])
def test_decimals_of_every_scale(newest_postgres: Database, digits: int) -> None:
    scales = range(digits + 1)
    listed = ", ".join(f"c{scale} numeric({digits},{scale})" for scale in scales)
    newest_postgres.execute(f"CREATE TABLE t (id int PRIMARY KEY, {listed})")
    numbers = [sign * number for number in NUMBERS if number < 10**digits for sign in (1, -1)]
    for row, number in enumerate(numbers):
        values = ", ".join(f"{number} * numeric '1e-{scale}'" for scale in scales)
        newest_postgres.execute(f"INSERT INTO t VALUES ({row}, {values})")
    found = assert_as_csv(newest_postgres, described(newest_postgres, "t"))
    for scale in scales:
        assert [int(value.scaleb(scale, _WIDE)) for value in found.column(f"c{scale}").to_pylist()] == numbers


def test_special_values_are_the_same_errors(newest_postgres: Database) -> None:
    special = [(kind.sql, value) for kind in BASE for value in kind.special]
    special += [(array_of(kind).sql, value) for kind in BASE[:2] for value in array_of(kind).special]
    for type_name, value in special:
        newest_postgres.execute(f"CREATE TABLE t (id int PRIMARY KEY, v {type_name})")
        with newest_postgres.connect() as session:
            session.execute("INSERT INTO t VALUES (1, NULL), (2, %s)", [value])
        found, expected = errors_of(newest_postgres, described(newest_postgres, "t"))
        assert isinstance(found, SpecialValue)
        assert str(found) == str(expected)
        newest_postgres.execute("DROP TABLE t")


@pytest.mark.parametrize("policy", [SpecialValues.STOP, SpecialValues.NULL])
def test_c23_special_keys_are_the_same_errors(newest_postgres: Database, policy: SpecialValues) -> None:
    """Scenario C23."""
    for type_name, value in (("date", "infinity"), ("timestamptz", "0044-03-15 BC"), ("numeric(4,2)", "NaN")):
        newest_postgres.execute(f"CREATE TABLE t (k {type_name} PRIMARY KEY)", f"INSERT INTO t VALUES ('{value}')")
        table = described(newest_postgres, "t", special_values={"public.t.k": policy})
        found, expected = errors_of(newest_postgres, table)
        assert type(found) is type(expected)
        assert str(found) == str(expected)
        newest_postgres.execute("DROP TABLE t")


def test_infinite_values_are_named_before_far_ones(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v date)", "INSERT INTO t VALUES (1, '10000-01-01'), (2, 'infinity')"
    )
    found, expected = errors_of(newest_postgres, described(newest_postgres, "t"))
    assert str(found) == str(expected)


def test_a_description_of_other_types_is_read_as_csv_reads_it(newest_postgres: Database) -> None:
    """Values that the described type has are taken, others are errors, whatever the type is by now."""
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a bigint, b numeric(10,4), c text, d int, e char(5), f inet, g bool)",
        "INSERT INTO t VALUES (1, 7, 1.5, '2024-01-01', 4, 'x', '10.0.0.1', true)",
    )
    described_as = {
        "a": pa.int16(), "b": pa.decimal128(3, 1), "c": pa.date32(), "d": pa.string(), "g": pa.string(),
    }  # fmt: skip
    table = described(newest_postgres, "t")
    columns = [replace(column, type=described_as.get(column.name, column.type)) for column in table.columns]
    table = replace(table, columns=tuple(columns))
    (row,) = assert_as_csv(newest_postgres, table).to_pylist()
    assert (row["a"], row["d"], row["e"], row["f"], row["g"]) == (7, "4", "x    ", "10.0.0.1", "t")
    for change in ("a = 100000", "b = 1.25", "b = 100", "c = 'no date'"):
        newest_postgres.execute(f"UPDATE t SET {change}")
        found, expected = errors_of(newest_postgres, table)
        assert isinstance(found, UndecodableValue)
        assert str(found) == str(expected)
        newest_postgres.execute("UPDATE t SET a = 7, b = 1.5, c = '2024-01-01'")


def test_a_dropped_column_is_null(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a bigint, b text, c int[])", "INSERT INTO t VALUES (1, 2, 'b', '{3}')"
    )
    table = described(newest_postgres, "t")
    newest_postgres.execute("ALTER TABLE t DROP COLUMN a, DROP COLUMN c")
    columns = [replace(column, dropped=column.name in "ac") for column in table.columns]
    (row,) = assert_as_csv(newest_postgres, replace(table, columns=tuple(columns))).to_pylist()
    assert row == {"id": 1, "a": None, "b": "b", "c": None}


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_text_of_other_encodings(newest_postgres: Database, encoding: str) -> None:
    name = f"{newest_postgres.name}_{encoding.lower()}"
    newest_postgres.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {encoding} LOCALE 'C'")
    other = Database(newest_postgres.server, name)
    text = "größe" if encoding == "LATIN1" else "日本"
    try:
        with connect(Dsn(other.dsn)) as session:
            session.execute("SET search_path = public")
            session.execute(f"CREATE TYPE mood AS ENUM ('{text}')".encode())
            session.execute("CREATE TABLE t (id int PRIMARY KEY, a text, b jsonb, c mood, d text[], e name, f json)")
            values = f"""'{text}', '"{text}"', '{text}', ARRAY['{text}'], '{text}', '"{text}"'"""
            session.execute(f"INSERT INTO t VALUES (1, {values})".encode())
        (row,) = assert_as_csv(other, described(other, "t")).to_pylist()
        assert row == {"id": 1, "a": text, "b": f'"{text}"', "c": text, "d": [text], "e": text, "f": f'"{text}"'}
    finally:
        newest_postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_text_that_is_no_utf8_is_the_same_error(newest_postgres: Database) -> None:
    name = f"{newest_postgres.name}_ascii"
    newest_postgres.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING SQL_ASCII LOCALE 'C'")
    other = Database(newest_postgres.server, name)
    try:
        other.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", r"INSERT INTO t VALUES (1, E'\xff')")
        found, expected = errors_of(other, described(other, "t"))
        assert str(found) == str(expected)
    finally:
        newest_postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_m21_rows_of_many_types_go_on_where_they_were_cut(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n numeric(18,4), v text, a int[], at timestamptz)",
        "INSERT INTO t SELECT i, i * 1.25, repeat('x', i % 2000), ARRAY[i, NULL], now()"
        " FROM generate_series(1, 40000) i",
    )
    table = described(postgres, "t")
    with TcpProxy("127.0.0.1", postgres.server.port) as proxy, PostgresSnapshots(postgres.dsn).export() as snapshot:
        source = PostgresSnapshots(postgres.dsn.replace(f":{postgres.server.port}/", f":{proxy.port}/"))
        found = []
        reading = source.read(table, SplitKind.HEAP, ALL, snapshot.name, batch_bytes=50_000)
        broken = 0
        for batch in reading:
            found.append(batch)
            if broken < min(proxy.accepted, 3):
                broken += 1
                proxy.cut()
        assert proxy.accepted >= 3
        whole = PostgresSnapshots(postgres.dsn).read(table, SplitKind.HEAP, ALL, snapshot.name)
        assert pa.Table.from_batches(found).equals(pa.Table.from_batches(whole))


def test_an_empty_table_has_no_batches(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    assert by_binary(newest_postgres, described(newest_postgres, "t")) == []


def test_python_alone_reads_csv(newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    table = described(newest_postgres, "t")
    expected = by_binary(newest_postgres, table)
    monkeypatch.setenv("HEADWATER_PURE", "1")
    with PartSession(Dsn(newest_postgres.dsn), None) as session:
        statement, form = session.prepare(table, SplitKind.HEAP, ALL, table.columns)
    assert form.name == "csv"
    assert b"csv" in statement
    assert list(PostgresSnapshots(newest_postgres.dsn).read(table, SplitKind.HEAP, ALL, None)) == expected


def test_csv_is_read_where_it_costs_less(newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    newest_postgres.execute(
        "CREATE TABLE few (id int PRIMARY KEY, a text, b numeric, c time, d int[], e date, f uuid)",
        "CREATE TABLE many (id int PRIMARY KEY, a text, b numeric, c time, d int[])",
    )
    for name, expected in (("few", "binary"), ("many", "csv")):
        table = described(newest_postgres, name)
        with PartSession(Dsn(newest_postgres.dsn), None) as session:
            assert session.prepare(table, SplitKind.HEAP, ALL, table.columns)[1].name == expected
