"""A Postgres sink has what its source has, exactly, whatever comes between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.postgres import NEWEST, VERSIONS, Database, PostgresServer
from tests.servers.proxy import CommitLosingProxy
from tests.store.sinks.file_sinks import INSERT, ORDERS, Feed, many_changes, order

from headwater.databases.secret_files import in_file
from headwater.sinks import sql_sink
from headwater.sinks.errors import (
    SinkInputError,
    SinkLoginRefused,
    SinkRowError,
    SinkSchemaError,
    SinkUnreachable,
    SinkUnwritable,
    StagedLost,
)
from headwater.sinks.open import open_sink
from headwater.sinks.postgres import SESSIONS, PostgresSink
from headwater.sinks.sink import Mode
from headwater.sources.table import SpecialValues

from .sql_checks import VALUES, check_errors, check_lost_commits, check_types, typed_table
from .sql_scenarios import MakeSink, SqlScenarios, rows_of

Servers = Callable[[int], PostgresServer]


@pytest.fixture
def database(postgres_servers: Servers) -> Iterator[Database]:
    with postgres_servers(NEWEST).database() as made:
        yield made
        SESSIONS.close()


@pytest.fixture
def make(database: Database) -> MakeSink:
    def sink(**options: Any) -> PostgresSink:
        return PostgresSink(database.dsn, **options)

    return sink


@pytest.fixture
def execute(database: Database) -> Callable[..., Any]:
    return database.execute


@pytest.fixture
def relations(database: Database) -> Callable[[], list[str]]:
    def names() -> list[str]:
        rows = database.execute("SELECT relname FROM pg_class WHERE relname ~ '^s[0-9a-f]{16}_'")
        return [name for (name,) in rows]

    return names


class TestPostgresSink(SqlScenarios):
    """All scenarios."""


def test_a_server_that_crashes_between_stage_and_commit_loses_no_row() -> None:
    """Staged rows are in unlogged tables, which a crash empties."""
    with PostgresServer() as server, server.database() as database:
        sink = PostgresSink(database.dsn)
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)))
        token, batch = feed.token(2), many_changes(np.arange(10, 50_010), INSERT)
        staged = sink.stage_changes(ORDERS, token, iter([batch]), None)
        SESSIONS.close()
        server.kill9()
        server.start()
        with pytest.raises(StagedLost, match="has 0 of the 50,000 rows that were staged"):
            sink.commit(ORDERS, token, [staged])
        assert sink.committed(ORDERS, "q", "b1").epoch == 1
        assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter([batch]), None)])
        assert sum(rows.num_rows for rows in sink.shown(ORDERS, ["id"])) == 50_001
        SESSIONS.close()


@pytest.mark.parametrize("inline", [sql_sink.INLINE_BYTES, 0], ids=["inline", "staged"])
def test_a_commit_whose_answer_is_lost_is_found_and_not_repeated(
    database: Database, relations: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(sql_sink, "INLINE_BYTES", inline)
    port = database.server.port
    with CommitLosingProxy("127.0.0.1", port) as proxy:
        sink = PostgresSink(database.dsn.replace(f":{port}/", f":{proxy.port}/"), mode=Mode.CHANGES)
        check_lost_commits(sink, proxy, relations)
        SESSIONS.close()


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_older_servers(version: int, postgres_servers: Servers) -> None:
    with postgres_servers(version).database() as database:
        sink = PostgresSink(database.dsn)
        SqlScenarios().test_unavailable_columns_keep_what_the_mirror_has(lambda **_: sink)
        SESSIONS.close()


TYPES = typed_table(
    flag=(pa.bool_(), "boolean"),
    small=(pa.int16(), "smallint"),
    tiny=(pa.uint8(), "tinyint unsigned"),
    huge=(pa.uint64(), "bigint unsigned"),
    real=(pa.float32(), "real"),
    double=(pa.float64(), "double precision"),
    amount=(pa.decimal128(38, 10), "numeric(38,10)"),
    wide=(pa.decimal256(60, 20), "numeric(60,20)"),
    number=(pa.string(), "numeric"),
    text=(pa.string(), "text"),
    bytes=(pa.binary(), "bytea"),
    day=(pa.date32(), "date"),
    clock=(pa.time64("us"), "time without time zone"),
    nanos=(pa.timestamp("ns"), "datetime2(7)"),
    moment=(pa.timestamp("us", tz="UTC"), "timestamp with time zone"),
    local=(pa.timestamp("us"), "timestamp without time zone"),
    free=(pa.string(), "timestamp without time zone", {"special_values": SpecialValues.TEXT}),
    guid=(pa.string(), "uuid"),
    doc=(pa.string(), "json"),
    docb=(pa.string(), "jsonb"),
    span=(pa.string(), "interval"),
    numbers=(pa.list_(pa.int32()), "integer[]"),
    words=(pa.list_(pa.string()), "text[]"),
    ids=(pa.list_(pa.string()), "uuid[]"),
    blobs=(pa.list_(pa.binary()), "bytea[]"),
    prices=(pa.list_(pa.decimal128(12, 4)), "numeric(12,4)[]"),
    times=(pa.list_(pa.timestamp("us", tz="UTC")), "timestamptz[]"),
    nested=(pa.list_(pa.list_(pa.int64())), "array"),
    record=(pa.struct([("a", pa.int64()), ("b", pa.decimal128(9, 2)), ("c", pa.binary())]), "struct"),
    map=(pa.map_(pa.string(), pa.float64()), "map"),
)

FULL = {
    **VALUES,
    "double": 0.1,
    "text": 'quote " comma , line\nbreak \\ backslash \r\t ünï 🦆 {x} NULL',
    "doc": '{"a": 1.00, "a":  2}',
    "docb": '{"a": 1.00, "b": [1, 2, null]}',
    "span": "1 year 2 mons -3 days",
    "words": ["", None, "NULL", 'a"b', "c\\d", "e,f", "{g}", " h "],
    "ids": ["6ec0bd7f-11c0-43da-975e-2a8ad9ebae0b"],
}
EMPTY = {
    "text": "",
    "number": "NaN",
    "bytes": b"",
    "real": float("nan"),
    "double": float("-inf"),
    "words": [],
    "numbers": [],
    "free": "0044-03-15 00:00:00 BC",
    "docb": "null",
    "map": [],
}


def test_values_of_every_type_come_back_as_they_were(make: MakeSink, database: Database) -> None:
    check_types(make(), TYPES, FULL, **EMPTY)
    found = dict(
        database.execute("SELECT column_name, udt_name FROM information_schema.columns WHERE table_name = 'typed'")
    )
    shown = ("huge", "wide", "number", "clock", "guid", "doc", "docb", "moment", "words", "nested")
    assert [found[name] for name in shown] == (
        ["numeric", "numeric", "numeric", "time", "uuid", "json", "jsonb", "timestamptz", "_text", "jsonb"]
    )


def test_text_with_the_character_zero_is_refused(make: MakeSink) -> None:
    sink = make()
    feed = Feed(sink)
    with pytest.raises(SinkRowError, match="character 0"):
        feed.changes(1, (INSERT, order(1, "a\0b")))
    rows = pa.Table.from_pylist([order(1, "fine"), order(2, "a\0b"), order(3)], ORDERS.schema)
    assert [place for place, _ in sink.refused(ORDERS, rows)] == [1]


def test_a_value_that_does_not_fit_a_column_of_somebody_else(make: MakeSink, database: Database) -> None:
    database.execute(
        "CREATE TABLE public.orders (id bigint PRIMARY KEY, status varchar(3), total numeric(10,2), other int)"
    )
    sink = make()
    Feed(sink).changes(1, (INSERT, order(1, "abc")))
    with pytest.raises(SinkRowError, match=r"too long for type character varying\(3\)"):
        Feed(sink).changes(2, (INSERT, order(2, "abcd")))
    assert rows_of(sink) == [order(1, "abc")]


def test_a_table_without_a_unique_key_is_refused(make: MakeSink, database: Database) -> None:
    database.execute("CREATE TABLE public.orders (id bigint, status text, total numeric(10,2))")
    with pytest.raises(SinkSchemaError, match="CREATE UNIQUE INDEX"):
        Feed(make()).changes(1, (INSERT, order(1)))


def test_tables_may_be_in_a_schema_of_their_own(make: MakeSink, database: Database) -> None:
    sink = make(schema="Mirror", table="{schema}_{table}", own_schema="of us")
    Feed(sink).changes(1, (INSERT, order(1)))
    assert database.execute('SELECT id FROM "Mirror".public_orders') == [(1,)]
    assert database.execute('SELECT epoch FROM "of us".tokens') == [(1,)]


@pytest.mark.parametrize(
    "statement",
    [
        'CREATE SCHEMA "new"',
        "CREATE SCHEMA headwater",
        'CREATE SCHEMA "new" CREATE TABLE orders (id bigint PRIMARY KEY, status text, total numeric(10,2))',
    ],
)
def test_what_another_session_creates_meanwhile_is_used(statement: str, make: MakeSink, database: Database) -> None:
    sink = make(schema="new")
    feed = Feed(sink)
    token = feed.token(1)
    staged = feed.stage_changes(token, [(INSERT, order(1))])
    with ThreadPoolExecutor(1) as threads:
        with database.connect() as other, other.transaction():
            other.execute(statement.encode())
            commit = threads.submit(sink.commit, ORDERS, token, [staged])
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            while database.value(waits) == 0:
                time.sleep(0.01)
        assert commit.result(60)
    assert rows_of(sink) == [order(1)]


def test_errors_name_the_next_step_and_never_the_password(database: Database) -> None:
    nowhere = PostgresSink("postgresql://postgres:hush-hush@127.0.0.1:1/none")
    denied = PostgresSink(database.server.dsn(database.name, password="hush-hush"))
    check_errors(nowhere, denied, PostgresSink("mysql://x"))
    with pytest.raises(SinkInputError, match="table"):
        PostgresSink(database.dsn, table="one")
    with pytest.raises(SinkInputError, match="on_drop"):
        open_sink("postgres", dsn=database.dsn, on_drop="no")


def test_a_rotated_password_is_read_from_its_file_for_the_next_session(database: Database, tmp_path: Path) -> None:
    role, file = database.role("writer", "SUPERUSER"), tmp_path / "out.dsn"
    file.write_text(database.dsn_of(role))
    sink = PostgresSink(in_file(file))
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    database.execute(
        f"ALTER ROLE \"{role}\" PASSWORD 'another'",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'",
    )
    with pytest.raises(SinkUnreachable):  # the session that was open
        feed.changes(2, (INSERT, order(2)))
    with pytest.raises(SinkLoginRefused, match="password authentication failed"):
        feed.changes(2, (INSERT, order(2)))
    file.write_text(database.server.dsn(database.name, user=role, password="another"))
    assert feed.changes(2, (INSERT, order(2)))
    assert rows_of(sink) == [order(1), order(2)]
    SESSIONS.close()


def test_a_user_without_rights_is_told_what_to_grant(database: Database) -> None:
    sink = PostgresSink(database.dsn_of(database.role("reader")))
    with pytest.raises(SinkUnwritable, match="GRANT CREATE ON DATABASE"):
        sink.check()


def test_a_server_that_was_restarted_is_connected_to_again(start_postgres: Callable[..., PostgresServer]) -> None:
    server = start_postgres()
    with server.database() as database:
        sink = PostgresSink(database.dsn)
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)))
        server.restart()
        with pytest.raises(SinkUnreachable):
            feed.changes(2, (INSERT, order(2)))
        assert feed.changes(2, (INSERT, order(2)))
        assert rows_of(sink) == [order(1), order(2)]
        SESSIONS.close()
