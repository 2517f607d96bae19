"""A sink in MariaDB or MySQL has what its source has, exactly, whatever comes between.

By default each test runs on one of both, in turn; in a soak on both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.sampled import share
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FAMILY
from tests.servers.proxy import CommitLosingProxy
from tests.store.sinks.file_sinks import DELETE, INSERT, ORDERS, Feed, many_changes, order, table_of

from headwater.sinks import sql_sink
from headwater.sinks.errors import SinkInputError, SinkRowError, SinkSchemaError, SinkUnreachable
from headwater.sinks.mysql import SESSIONS, MySqlSink
from headwater.sinks.mysql_session import address
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Mode
from headwater.sources.table import SpecialValues

from .sql_checks import VALUES, check_errors, check_lost_commits, check_types, typed_table
from .sql_scenarios import MakeSink, SqlScenarios, rows_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        families = share(FAMILY, zlib.crc32(metafunc.function.__name__.encode()), len(FAMILY))
        metafunc.parametrize("server", families, indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, mysql_servers: Callable[[str], MariaDbServer]) -> Iterator[MariaDbServer]:
    server = mysql_servers(request.param)
    server.execute("SET GLOBAL local_infile = ON")
    yield server
    SESSIONS.close()


@pytest.fixture
def make(server: MariaDbServer) -> Iterator[MakeSink]:
    def sink(**options: Any) -> MySqlSink:
        return MySqlSink(server.dsn, **options)

    with server.fresh():
        yield sink
        SESSIONS.close()


@pytest.fixture
def execute(server: MariaDbServer) -> Callable[..., Any]:
    return server.execute


@pytest.fixture
def relations(server: MariaDbServer) -> Callable[[], list[str]]:
    def names() -> list[str]:
        rows = server.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_name RLIKE '^s[0-9a-f]{16}_'"
        )
        return [name for (name,) in rows]

    return names


class TestMySqlSink(SqlScenarios):
    """All scenarios."""


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize("inline", [sql_sink.INLINE_BYTES, 0], ids=["inline", "staged"])
def test_a_commit_whose_answer_is_lost_is_found_and_not_repeated(
    server: MariaDbServer, relations: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(sql_sink, "INLINE_BYTES", inline)
    place = address(server.dsn)
    with CommitLosingProxy(place.host, place.port) as proxy:
        plain = server.dsn.replace(f":{place.port}/", f":{proxy.port}/") + "?ssl_mode=disabled"  # the proxy reads it
        sink = MySqlSink(plain, mode=Mode.CHANGES)
        check_lost_commits(sink, proxy, relations)
        SESSIONS.close()


TYPES = typed_table(
    flag=pa.bool_(),
    small=pa.int16(),
    tiny=pa.uint8(),
    medium=pa.uint32(),
    huge=pa.uint64(),
    real=pa.float32(),
    double=pa.float64(),
    amount=pa.decimal128(38, 10),
    precise=pa.decimal128(38, 36),
    wide=(pa.decimal256(60, 20), "numeric(60,20)"),
    number=(pa.string(), "numeric"),
    text=pa.string(),
    bytes=pa.binary(),
    day=pa.date32(),
    clock=pa.time64("us"),
    nanos=pa.timestamp("ns"),
    moment=pa.timestamp("us", tz="UTC"),
    local=pa.timestamp("us"),
    free=(pa.string(), "timestamp without time zone", {"special_values": SpecialValues.TEXT}),
    guid=(pa.string(), "uuid"),
    doc=(pa.string(), "jsonb"),
    numbers=pa.list_(pa.int32()),
    words=pa.list_(pa.string()),
    blobs=pa.list_(pa.binary()),
    prices=pa.list_(pa.decimal128(12, 4)),
    times=pa.list_(pa.timestamp("us", tz="UTC")),
    nested=pa.list_(pa.list_(pa.int64())),
    record=pa.struct([("a", pa.int64()), ("b", pa.decimal128(9, 2)), ("c", pa.binary())]),
    map=pa.map_(pa.string(), pa.float64()),
)

FULL = {
    **VALUES,
    "medium": (1 << 32) - 1,
    "double": 1.7976931348623157e308,
    "precise": Decimal("-1.000000000000000000000000000000000001"),
    "text": "quote ' \" comma , line\nbreak \\ backslash \\N \r\t zero \0 ünï 🦆 ",
    "doc": '{"a": 1.00, "b": [1, 2, null]}',
    "words": ["", None, "NULL", 'a"b', "c\\d", "e,f", "\0\n"],
}
EMPTY = {"text": "", "number": "NaN", "bytes": b"", "double": 5e-324, "words": [], "numbers": [], "map": []}


def test_values_of_every_type_come_back_as_they_were(make: MakeSink, server: MariaDbServer) -> None:
    check_types(make(), TYPES, FULL, **EMPTY)
    found = dict(
        server.execute("SELECT column_name, data_type FROM information_schema.columns WHERE table_name='typed'")
    )
    shown = ("huge", "wide", "number", "clock", "guid", "moment", "words", "precise")
    assert [found[name] for name in shown] == (
        ["bigint", "decimal", "longtext", "time", "varchar", "datetime", "longtext", "longtext"]
    )


def test_everything_also_without_local_files(make: MakeSink, server: MariaDbServer) -> None:
    server.execute("SET GLOBAL local_infile = OFF")
    try:
        check_types(make(), TYPES, FULL)
    finally:
        server.execute("SET GLOBAL local_infile = ON")


def test_keys_of_text_and_bytes(make: MakeSink) -> None:
    table = table_of({"a": pa.string(), "b": pa.binary(), "n": pa.int64(), "v": pa.string()}, key=("a", "b", "n"))
    sink = make()
    feed = Feed(sink, table)
    keys = [("x", b"\0", 1), ("x ", b"\0", 1), ("X", b"\0", 1), ("ü", b"", 1), ("u", b"", 1), ("x" * 380, b"\0", 1)]
    rows = [{"a": a, "b": b, "n": n, "v": repr((a, b))} for a, b, n in keys]
    feed.changes(1, *((INSERT, row) for row in rows))
    assert rows_of(sink, table) == sorted(rows, key=lambda row: (row["a"], row["b"], row["n"]))
    feed.changes(2, *((DELETE, row) for row in rows[1:]))
    assert rows_of(sink, table) == rows[:1]
    with pytest.raises(SinkRowError, match="too long") as caught:
        feed.changes(3, (INSERT, {"a": "y" * 2000, "b": b"", "n": 1, "v": ""}))
    assert caught.value.column == "a"


@pytest.mark.parametrize("rows", [1, 50_000])
def test_numbers_that_the_server_has_not_are_refused(rows: int, make: MakeSink) -> None:
    table = table_of({"id": pa.int64(), "f": pa.float64()})
    sink = make()
    values = np.ones(rows)
    values[-1] = np.nan
    token = Feed(sink, table).token(1)
    batch = many_changes(np.arange(rows), INSERT)
    pattern = Feed(sink, table)
    if rows == 1:
        with pytest.raises(SinkRowError) as caught:
            pattern.changes(1, (INSERT, {"id": 0, "f": float("nan")}))
    else:
        filled = {name: batch.column(name) for name in batch.schema.names if name not in ("status", "total")}
        many = pa.RecordBatch.from_pydict({**filled, "f": pa.array(values)})
        with pytest.raises(SinkRowError) as caught:
            sink.stage_changes(table, token, iter([many]), None)
    assert caught.value.column == "f"
    found = sink.refused(table, pa.table({"id": [1, 2, 3], "f": [1.0, float("inf"), 2.0]}))
    assert [place for place, _ in found] == [1]


def test_a_unique_index_of_somebody_else_refuses_and_no_other_row_changes(
    make: MakeSink, server: MariaDbServer
) -> None:
    sink = make()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "b")))
    server.execute("ALTER TABLE public.orders ADD UNIQUE one (status(100))")
    with pytest.raises(SinkRowError, match="unique"):
        feed.changes(2, (INSERT, order(3, "a")))
    assert rows_of(sink) == [order(1, "a"), order(2, "b")]


def test_a_table_without_a_unique_key_is_refused(make: MakeSink, server: MariaDbServer) -> None:
    server.execute("CREATE DATABASE public", "CREATE TABLE public.orders (id bigint, status text, total decimal(10,2))")
    with pytest.raises(SinkSchemaError, match="ADD UNIQUE"):
        Feed(make()).changes(1, (INSERT, order(1)))


def test_tables_may_be_in_a_database_of_their_own(make: MakeSink, server: MariaDbServer) -> None:
    sink = make(database="Mirror", table="{schema}_{table}", own_database="of us")
    Feed(sink).changes(1, (INSERT, order(1)))
    assert server.execute("SELECT id FROM `Mirror`.public_orders") == [(1,)]
    assert [int(epoch) for (epoch,) in server.execute("SELECT epoch FROM `of us`.tokens")] == [1]


def test_errors_name_the_next_step_and_never_the_password(server: MariaDbServer) -> None:
    nowhere = MySqlSink("mysql://root:hush-hush@127.0.0.1:1/none")
    denied = MySqlSink(server.dsn.replace(server.password, "hush-hush"))
    check_errors(nowhere, denied, MySqlSink("postgresql://x"))
    with pytest.raises(SinkInputError, match="table"):
        MySqlSink(server.dsn, table="one")
    with pytest.raises(SinkInputError, match="on_drop"):
        open_sink("mysql", dsn=server.dsn, on_drop="no")


def test_a_server_that_was_restarted_is_connected_to_again(make: MakeSink, server: MariaDbServer) -> None:
    sink = make()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    server.stop()
    with pytest.raises(SinkUnreachable):
        feed.changes(2, (INSERT, order(2)))
    server.start()
    server.execute("SET GLOBAL local_infile = ON")
    assert feed.changes(2, (INSERT, order(2)))
    assert rows_of(sink, ORDERS) == [order(1), order(2)]
