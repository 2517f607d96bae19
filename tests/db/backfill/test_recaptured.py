"""Tables that are captured anew with other columns, types or another key: what the sinks have of them afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.db.backfill.shops import POSTGRES, Shop, only, running
from tests.db.capture.running import RunningCapture
from tests.here import Here
from tests.sampled import SOAK
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import NEWEST, PostgresServer

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.capture.renewal import renew
from headwater.pipeline.sink_state import let_back
from headwater.pipeline.verify.mirrors import SinkMirror
from headwater.sinks import mysql, postgres
from headwater.sinks.delivery import read_parked
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Mode, Sink
from headwater.sinks.types import conform, sink_schema
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable

pytestmark = pytest.mark.db


class IntoSink:
    """One query into one sink, staged and committed as the tasks of Spark do it."""

    def __init__(self, capture: RunningCapture, name: str, sink: Sink, tables: Sequence[str], **options: Any) -> None:
        self.capture, self.sink = capture, sink
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": name, "tables": tuple(tables)}
            | {"keyed": sink.mode is Mode.MIRROR, "takes_columns": True, "split_rows": 30}
            | options
        )
        self.open()

    def open(self) -> None:
        self._loop = DeliveryLoop(Delivery(self.options, self.sink), Here())

    def batch(self, timeout: float = 0.2) -> bool:
        if not self._loop.plan(timeout):
            return False
        self._loop.deliver()
        return True

    def finish(self, seconds: float = 60.0) -> None:
        """Until everything that the source has committed by now is delivered, and history with it."""
        end = time.monotonic() + seconds
        self.capture.catch_up()
        while self.batch() or not self._loop.planner.is_history_done():
            assert time.monotonic() < end, self._loop.planner.status()
        assert read_parked(self.options.state_location, self.options.query) == {}

    def rows(self, table: SourceTable) -> pa.Table:
        schema = sink_schema(table)
        return pa.Table.from_batches(self.sink.shown(table, schema.names), schema)

    def assert_equal(self, table: SourceTable) -> None:
        expected = conform(self.capture.selected(table), sink_schema(table))
        found, wanted = (sorted(map(repr, rows.to_pylist())) for rows in (self.rows(table), expected))
        assert found == wanted, (self.sink.name, table.full_name)

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def places(
    tmp_path: Path, postgres_servers: Callable[[int], PostgresServer], mysql_servers: Callable[[str], MariaDbServer]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Where each kind of sink is."""
    server = mysql_servers("mariadb")
    with postgres_servers(NEWEST).database() as database, server.fresh():
        yield {
            "delta": {"path": str(tmp_path / "delta")},
            "iceberg": {"warehouse": str(tmp_path / "iceberg")},
            "postgres": {"dsn": database.dsn},
            "mysql": {"dsn": server.dsn, "database": "mirror"},
        }
        postgres.SESSIONS.close()
        mysql.SESSIONS.close()


@contextmanager
def sinks(
    capture: RunningCapture, places: dict[str, dict[str, Any]], tables: Sequence[str], mode: Mode = Mode.MIRROR
) -> Iterator[list[IntoSink]]:
    """A query into each kind of sink."""
    made = [
        IntoSink(capture, f"{kind}-{mode.value}", open_sink(kind, mode=mode, **options), tables)
        for kind, options in places.items()
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def tables_of(capture: RunningCapture, names: Sequence[str]) -> list[SourceTable]:
    """As they are now."""
    source = open_source(capture.database.dsn, spill=capture.folder / "unused")
    try:
        return source.tables(names)
    finally:
        source.close()


CASES = {
    "doubled": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int, at timestamp)",
        "INSERT INTO {} SELECT n, n, '2024-05-31 10:00:00.123456' FROM generate_series(1, 60) n",
        "ALTER TABLE {} ALTER COLUMN v TYPE int USING v * 2, ALTER COLUMN at TYPE timestamp(0)",
    ),
    "retyped": (
        """
        CREATE TABLE {} (id int PRIMARY KEY, digits numeric(10,4), doc json, exact int, fixed bigint, said int,
          told timestamptz, bytes bytea, list int[], number text, small bigint, array_text text, other int)
        """,
        """
        INSERT INTO {} SELECT n, n + 0.1234, '{{"b":  1, "a": 2}}', n, n, n, now(), 'abc', ARRAY[n], n, n, ARRAY[n], n
        FROM generate_series(1, 60) n
        """,
        """
        ALTER TABLE {} ALTER digits TYPE numeric(10,1), ALTER doc TYPE jsonb, ALTER exact TYPE numeric,
          ALTER fixed TYPE numeric(20,2), ALTER said TYPE text, ALTER told TYPE text, ALTER bytes TYPE text,
          ALTER list TYPE text, ALTER number TYPE int USING number::int, ALTER small TYPE smallint,
          ALTER array_text TYPE int[] USING array_text::int[], DROP other, ADD other text DEFAULT 'new'
        """,
    ),
    "other_key": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int NOT NULL, w text)",
        "INSERT INTO {} SELECT n, 1000 - n, 'w' FROM generate_series(1, 60) n",
        "ALTER TABLE {} DROP CONSTRAINT other_key_pkey, ADD PRIMARY KEY (v), ALTER id DROP NOT NULL",
    ),
    "key_text": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int)",
        "INSERT INTO {} SELECT n, n FROM generate_series(1, 60) n",
        "ALTER TABLE {} ALTER COLUMN id TYPE text",
    ),
    "again": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int, w text)",
        "INSERT INTO {} SELECT n, n, 'w' FROM generate_series(1, 60) n",
        """
        DROP TABLE {};
        CREATE TABLE {} (w timestamp, v text, code uuid PRIMARY KEY);
        INSERT INTO {} SELECT '2024-05-31', 'v' || n, lpad(to_hex(n), 32, '0')::uuid FROM generate_series(1, 40) n
        """,
    ),
    "exchanged": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int, w text, x int, y int, z int, a text)",
        "INSERT INTO {} SELECT n, n, 'w' || n, n, -n, n * 3, 'a' || n FROM generate_series(1, 60) n",
        """
        ALTER TABLE {} RENAME v TO t; ALTER TABLE {} RENAME w TO v; ALTER TABLE {} RENAME t TO w;
        ALTER TABLE {} RENAME x TO t; ALTER TABLE {} RENAME y TO x; ALTER TABLE {} RENAME t TO y;
        ALTER TABLE {} RENAME z TO b; ALTER TABLE {} RENAME a TO z
        """,
    ),
    "no_key": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int); ALTER TABLE {} REPLICA IDENTITY FULL",
        "INSERT INTO {} SELECT n, n FROM generate_series(1, 60) n",
        "ALTER TABLE {} DROP CONSTRAINT no_key_pkey, ALTER id DROP NOT NULL; INSERT INTO {} VALUES (1, 1)",
    ),
}


def _run(shop: Shop, names: Iterable[str], step: int) -> None:
    for name in names:
        statement = CASES[name][step]
        shop.execute(statement.format(*[name] * statement.count("{}")))


@only(POSTGRES)
def test_mirrors_equal_a_source_that_was_captured_anew(
    shop: Shop, tmp_path: Path, places: dict[str, dict[str, Any]]
) -> None:
    names = [f"public.{name}" for name in CASES]
    _run(shop, CASES, 0)
    _run(shop, CASES, 1)
    with running(shop, tmp_path, *names) as capture, sinks(capture, places, names) as queries:
        for query in queries:
            query.finish()
        _run(shop, CASES, 2)
        assert not renew(str(capture.store), names)
        shop.execute("UPDATE doubled SET v = -1 WHERE id < 20", "DELETE FROM exchanged WHERE id < 30")
        tables = tables_of(capture, names)
        for query in queries:
            query.finish()
            for table in tables:
                query.assert_equal(table)
    retyped = tables[list(CASES).index("retyped")]
    there = pa.schema(DeltaTable(f"{places['delta']['path']}/public.retyped").schema().to_arrow())
    assert {name: there.field(name).type for name in retyped.schema.names} == {
        one.name: one.type for one in sink_schema(retyped)
    }
    with psycopg.connect(places["postgres"]["dsn"]) as session:
        found = session.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attnum > 0 "
            "AND attrelid = 'public.retyped'::regclass"
        ).fetchall()
    kinds: dict[str, str] = dict(found)
    assert [kinds[name] for name in ("digits", "doc", "number", "small", "array_text")] == [
        "numeric(10,1)",
        "jsonb",
        "integer",
        "smallint",
        "integer[]",
    ]


ADDED = {
    "plain": ["ALTER TABLE {} ADD c int DEFAULT 7"],
    "renamed": ["ALTER TABLE {} ADD c int DEFAULT 7", "ALTER TABLE {} RENAME c TO d"],
    "dropped": ["ALTER TABLE {} ADD c int DEFAULT 7", "ALTER TABLE {} DROP c"],
    "twice": [
        "ALTER TABLE {} ADD c int DEFAULT 7",
        "ALTER TABLE {} RENAME c TO d",
        "ALTER TABLE {} ADD c int DEFAULT 8",
    ],
}


@only(POSTGRES)
def test_columns_that_come_with_a_value_are_read_whatever_they_are_called_by_then(
    shop: Shop, tmp_path: Path, places: dict[str, dict[str, Any]]
) -> None:
    names = [f"public.{name}" for name in ADDED]
    for name in ADDED:
        shop.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v int)",
            f"INSERT INTO {name} SELECT n, n FROM generate_series(1, 20) n",
        )
    with (
        running(shop, tmp_path, *names) as capture,
        sinks(capture, places, names) as queries,
        sinks(capture, of_kinds(moved(places), "delta"), names, Mode.HISTORY) as histories,
        sinks(capture, of_kinds(moved(moved(places)), "postgres"), names, Mode.CHANGES) as changes,
    ):
        for query in (*queries, *histories, *changes):
            query.finish()
        for number in range(3):
            for name, statements in ADDED.items():
                if number < len(statements):
                    shop.execute(statements[number].format(name), f"INSERT INTO {name} VALUES ({100 + number}, 1)")
            capture.catch_up()
        tables = tables_of(capture, names)
        for query in queries:
            query.finish()
            for table in tables:
                query.assert_equal(table)
        for query in (*histories, *changes):
            query.finish()
            for table in tables:
                mirror = SinkMirror(query.sink).read(table, table.schema.names)
                shown = [row for batch in mirror for row in batch.to_pylist()]
                assert sorted(map(repr, shown)) == sorted(map(repr, capture.selected(table).to_pylist()))


@only(POSTGRES)
def test_a_re_read_begins_versions_of_what_differs_and_is_marked_in_changes(
    shop: Shop, tmp_path: Path, places: dict[str, dict[str, Any]]
) -> None:
    """Rows that vanished while nobody captured are closed; nothing tells of them in changes."""
    shop.execute(
        "CREATE TABLE same (id int PRIMARY KEY, v int)",
        "CREATE TABLE digits (id int PRIMARY KEY, v numeric(10,4))",
        "CREATE TABLE texts (id int PRIMARY KEY, v int, w text)",
        "CREATE TABLE keys (id int PRIMARY KEY, v int NOT NULL)",
        "INSERT INTO same SELECT n, n FROM generate_series(1, 20) n",
        "INSERT INTO digits SELECT n, n + CASE WHEN n > 15 THEN 0.25 ELSE 0 END FROM generate_series(1, 20) n",
        "INSERT INTO texts SELECT n, n, 'w' FROM generate_series(1, 20) n",
        "INSERT INTO keys SELECT n, -n FROM generate_series(1, 20) n",
    )
    names = [f"public.{name}" for name in ("same", "digits", "texts", "keys")]
    with (
        running(shop, tmp_path, *names) as capture,
        sinks(capture, of_kinds(places, "delta", "iceberg", "postgres"), names, Mode.HISTORY) as histories,
        sinks(capture, of_kinds(moved(places), "delta", "mysql"), names, Mode.CHANGES) as changes,
    ):
        for query in (*histories, *changes):
            query.finish()
        shop.execute("UPDATE texts SET v = 5 WHERE id = 3", "UPDATE keys SET v = -300 WHERE id = 3")
        capture.catch_up()
        capture.stop()
        shop.execute(
            "ALTER TABLE same ALTER v TYPE int USING CASE WHEN id > 15 THEN -v ELSE v END",
            "ALTER TABLE digits ALTER v TYPE numeric(7,1)",
            "ALTER TABLE texts ALTER v TYPE text",
            "ALTER TABLE keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (v)",
            "DELETE FROM same WHERE id = 1",
        )
        assert renew(str(capture.store), names)
        capture.start()
        same, digits, texts, keys = tables_of(capture, names)
        for query in histories:
            query.finish()
            for table in (same, digits, texts, keys):
                shown = [*table.schema.names, "_is_current", "_valid_to"]
                found = [row for batch in query.sink.shown(table, shown) for row in batch.to_pylist()]
                current = [{name: row[name] for name in table.schema.names} for row in found if row["_is_current"]]
                expected = conform(capture.selected(table), sink_schema(table)).to_pylist()
                assert sorted(map(repr, current)) == sorted(map(repr, expected)), (query.sink.name, table.full_name)
                closed = {row["id"] for row in found if not row["_is_current"]}
                differ = {1, *range(16, 21)} if table is same else set(range(1, 21))
                assert closed == differ, (query.sink.name, table.full_name)
        for query in changes:
            query.finish()
            for table in (same, digits, texts, keys):
                shown = ["id", "v", "_change_type"]
                found = [row for batch in query.sink.shown(table, shown) for row in batch.to_pylist()]
                kinds = Counter((row["_change_type"]) for row in found)
                count = 19 if table is same else 20
                changed = {} if table in (same, digits) else {"update_postimage": 1}
                assert kinds == {"insert": 20, "reread": count} | changed, (query.sink.name, table.full_name)


def of_kinds(places: dict[str, dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    """Some kinds in each mode: all of them in all modes take long."""
    return {kind: options for kind, options in places.items() if kind in kinds or SOAK}


def moved(places: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Places beside *places*."""
    own = {kind: {"table": f"{places[kind].get('table', '{table}')}_moved"} for kind in ("postgres", "mysql")}
    lakes = {kind: {key: f"{value}_moved" for key, value in places[kind].items()} for kind in ("delta", "iceberg")}
    return {kind: options | own.get(kind, {}) | lakes.get(kind, {}) for kind, options in places.items()}


@only(POSTGRES)
def test_a_table_that_cannot_be_changed_is_parked_alone_and_comes_back(
    shop: Shop, tmp_path: Path, places: dict[str, dict[str, Any]]
) -> None:
    """At the target somebody has made a view on it."""
    shop.execute(
        "CREATE TABLE a (id int PRIMARY KEY, v int)",
        "CREATE TABLE b (id int PRIMARY KEY, v int)",
        "INSERT INTO a VALUES (1, 1), (2, 2)",
        "INSERT INTO b VALUES (1, 1)",
    )
    names = ["public.a", "public.b"]
    with running(shop, tmp_path, *names) as capture, sinks(capture, of_kinds(places, "postgres"), names) as queries:
        (query,) = (one for one in queries if one.sink.name.startswith("postgres"))
        query.finish()
        with psycopg.connect(places["postgres"]["dsn"], autocommit=True) as session:
            session.execute("CREATE VIEW seen AS SELECT v FROM public.a")
            shop.execute("ALTER TABLE a ALTER v TYPE text USING 'x' || v", "UPDATE b SET v = 2")
            assert not renew(str(capture.store), ["public.a"])
            shop.execute("UPDATE b SET v = 3", "DELETE FROM a WHERE id = 1")
            capture.catch_up()
            while query.batch():
                pass
            (parked,) = read_parked(query.options.state_location, query.options.query).items()
            assert parked[0] == "public.a"
            assert "column used by a view" in parked[1].reason
            query.assert_equal(tables_of(capture, ["public.b"])[0])
            session.execute("DROP VIEW seen")
        query.close()
        assert let_back(query.options.store, query.options.state_location, query.options.query) == ["public.a"]
        query.open()
        shop.execute("UPDATE b SET v = 4")
        query.finish()
        for table in tables_of(capture, names):
            query.assert_equal(table)
