"""Events of real binlogs: what transactions, statements and tables say of themselves, in every form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest
from tests.db.mysql.binlog_reading import (
    DECODERS,
    closed_file,
    columns_of,
    decode,
    events_of,
    packets_of,
    plan_of,
    rows_events_of,
)
from tests.servers.mariadb import MariaDbServer

from headwater.sources.errors import SourceMisconfigured, SourceProtocolError, SpecialValue
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import (
    EventType,
    FormatDescription,
    Gtid,
    MariaDbGtid,
    MariaDbGtidList,
    PreviousGtids,
    Query,
    Rotate,
    RowsEvent,
    RowsQuery,
    TableMapEvent,
    TransactionPayload,
    Xid,
)
from headwater.sources.mysql.charsets import decode_text, single_byte_table
from headwater.sources.mysql.connection import Dsn, connect
from headwater.sources.mysql.server import Server, log_position
from headwater.sources.mysql.stream import BinlogStream
from headwater.sources.table import SpecialValues

MULTIPLE = ("big5", "cp932", "eucjpms", "euckr", "gb18030", "gb2312", "gbk", "sjis", "ujis")
WIDE = {"ucs2": "utf-16-be", "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be"}


only_mysql = pytest.mark.parametrize("server", ["mysql"], indirect=True)
only_mariadb = pytest.mark.parametrize("server", ["mariadb"], indirect=True)


@contextmanager
def setting(server: MariaDbServer, **values: str) -> Iterator[None]:
    """Global settings of the server, as they were afterwards."""
    before = {name: server.execute(f"SELECT @@GLOBAL.{name}")[0][0] for name in values}
    server.execute(*(f"SET GLOBAL {name} = {value}" for name, value in values.items()))
    try:
        yield
    finally:
        server.execute(
            *(
                f"SET GLOBAL {name} = '{value}'" if isinstance(value, str) else f"SET GLOBAL {name} = {value}"
                for name, value in before.items()
            )
        )


def run(server: MariaDbServer, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements in the database ``shop``, in a file of their own."""
    server.execute("FLUSH BINARY LOGS")
    return server.execute("USE shop", *statements)


def kinds(server: MariaDbServer) -> list[type]:
    return [type(event) for event in events_of(closed_file(server))]


def test_a_transaction_begins_with_its_gtid_and_ends_with_its_xid(server: MariaDbServer) -> None:
    run(server, "CREATE TABLE t (a int primary key, b varchar(10))", "INSERT INTO t VALUES (1, 'x')")
    events = list(events_of(closed_file(server)))
    described = events[0]
    assert isinstance(described, FormatDescription)
    assert described.is_mariadb == (server.kind == "MariaDB")
    assert described.server_version.split("-")[0] == server.execute("SELECT version()")[0][0].split("-")[0]
    assert isinstance(events[-1], Rotate)
    ddl = next(event for event in events if isinstance(event, Query))
    assert (ddl.database, ddl.sql) == ("shop", "CREATE TABLE t (a int primary key, b varchar(10))")
    tail = [type(event) for event in events[-6:-1]]
    if server.kind == "MariaDB":
        assert tail == [MariaDbGtid, RowsQuery, TableMapEvent, RowsEvent, Xid]
        gtids = [event for event in events if isinstance(event, MariaDbGtid)]
        assert gtids[-1].text == server.execute("SELECT @@gtid_binlog_pos")[0][0]
        assert (gtids[0].is_standalone, gtids[0].is_ddl, gtids[-1].is_standalone) == (True, True, False)
    else:
        assert tail == [Gtid, Query, TableMapEvent, RowsEvent, Xid]
        gtid = events[-6]
        assert isinstance(gtid, Gtid)
        executed = server.execute("SELECT @@gtid_executed")[0][0].replace("\n", "")
        assert executed.endswith(f"-{gtid.number}")
        assert executed.startswith(str(gtid.uuid))
        assert gtid.transaction_size == sum(event.header.size for event in events[-6:-1])
        assert gtid.commit_time is not None


def test_a_file_tells_what_came_before_it(server: MariaDbServer) -> None:
    run(server, "CREATE TABLE t (a int primary key)", "INSERT INTO t VALUES (1)")
    run(server)
    events = list(events_of(closed_file(server)))
    if server.kind == "MariaDB":
        (listed,) = (event for event in events if isinstance(event, MariaDbGtidList))
        last = "-".join(map(str, listed.gtids[-1]))
        assert last == server.execute("SELECT @@gtid_binlog_pos")[0][0]
    else:
        (before,) = (event for event in events if isinstance(event, PreviousGtids))
        shown = server.execute("SELECT @@gtid_executed")[0][0].replace("\n", "")
        told = ",".join(
            f"{uuid}:" + ":".join(f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in ranges)
            for (uuid, _tag), ranges in before.intervals.items()
        )
        assert told == shown


@only_mysql
def test_tagged_gtids_are_read(server: MariaDbServer) -> None:
    run(
        server,
        "CREATE TABLE t (a int primary key)",
        "SET gtid_next = 'AUTOMATIC:some_tag'",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO t VALUES (2)",
        "SET gtid_next = 'AUTOMATIC'",
    )
    gtids = [event for event in events_of(closed_file(server)) if isinstance(event, Gtid)]
    uuid = server.execute("SELECT @@server_uuid")[0][0]
    assert [gtid.text for gtid in gtids[1:]] == [f"{uuid}:some_tag:{number}" for number in (1, 2)]
    assert gtids[1].commit_time is not None
    run(server)
    (before,) = (event for event in events_of(closed_file(server)) if isinstance(event, PreviousGtids))
    assert {tag: ranges for (_, tag), ranges in before.intervals.items()}["some_tag"] == ((1, 3),)


def test_table_maps_tell_what_full_metadata_has(server: MariaDbServer) -> None:
    invisible = "INVISIBLE" if server.kind == "MySQL" else ""
    run(
        server,
        f"""CREATE TABLE t (a int unsigned, b varchar(10) character set latin1, c enum('x','ä') character set utf8mb4,
            d set('p','q') character set latin1, e decimal(20,3) unsigned, f point, g int {invisible}, h varbinary(3),
            i bigint not null, primary key (i, a))""",
        "INSERT INTO t (a, i) VALUES (1, 2)",
    )
    (event,) = (event for event in events_of(closed_file(server)) if isinstance(event, TableMapEvent))
    columns = {column.name: column for column in event.table.columns}
    assert list(columns) == list("abcdefghi")
    assert (event.table.database, event.table.name) == ("shop", "t")
    assert event.table.primary_key == (8, 0)
    assert [columns[name].unsigned for name in "aegi"] == [True, True, False, False]
    assert columns["b"].collation == 8
    assert columns["c"].labels == (b"x", "ä".encode())
    assert columns["d"].labels == (b"p", b"q")
    assert (columns["e"].size, columns["e"].scale) == (20, 3)
    assert columns["f"].geometry == 1
    assert columns["h"].collation == 63
    assert (columns["a"].nullable, columns["b"].nullable) == (False, True)
    if server.kind == "MySQL":
        assert [column.visible for column in event.table.columns].count(False) == 1
        assert columns["g"].visible is False


def test_updates_and_deletes_have_both_images(server: MariaDbServer) -> None:
    run(
        server,
        "CREATE TABLE t (a int primary key, b varchar(10))",
        "INSERT INTO t VALUES (1, 'x'), (2, NULL)",
        "UPDATE t SET b = 'y', a = a + 10",
        "DELETE FROM t",
    )
    events = rows_events_of(closed_file(server), "t")
    for make in DECODERS:
        rows = decode(make, events, plan_of(events[0].table))
        assert rows.ops.tolist() == [1, 1, 4, 3, 4, 3, 2, 2]
        assert rows.seq.tolist() == list(range(8))
        values = columns_of(rows, events[0].table)
        # InnoDB moves a key beyond others first, so the order of the two updates is the server's
        assert sorted(values["a"][2:6:2]) == [1, 2]
        assert values["a"][:2] == [1, 2]
        assert [after - before for before, after in zip(values["a"][2:6:2], values["a"][3:7:2], strict=True)] == [
            10,
            10,
        ]
        assert values["b"][3:7:2] == ["y", "y"]
        assert sorted(values["a"][6:]) == [11, 12]


def test_generated_and_invisible_columns_have_their_values(server: MariaDbServer) -> None:
    run(
        server,
        """CREATE TABLE t (a int primary key, b int, v int GENERATED ALWAYS AS (b * 2) VIRTUAL,
            s int GENERATED ALWAYS AS (b * 3) STORED, i int INVISIBLE DEFAULT 4)""",
        "INSERT INTO t (a, b) VALUES (1, 5)",
        "UPDATE t SET b = 6",
    )
    events = rows_events_of(closed_file(server), "t")
    wanted = {"a": [1, 1, 1], "b": [5, 5, 6], "v": [10, 10, 12], "s": [15, 15, 18], "i": [4, 4, 4]}
    for make in DECODERS:
        assert columns_of(decode(make, events, plan_of(events[0].table)), events[0].table) == wanted


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_images_that_lack_columns_are_completed_from_the_image_before(server: MariaDbServer, image: str) -> None:
    run(
        server,
        "CREATE TABLE t (a int primary key, b varchar(10), c int, d text)",
        f"SET SESSION binlog_row_image = '{image}'",
        "INSERT INTO t (a, b, d) VALUES (1, 'x', 'long')",
        "UPDATE t SET c = 5",
        "DELETE FROM t",
    )
    events = rows_events_of(closed_file(server), "t")
    for make in DECODERS:
        rows = decode(make, events, plan_of(events[0].table))
        values = columns_of(rows, events[0].table)
        missing = {
            told.name: [] if column is None or column.missing is None else column.missing.nonzero()[0].tolist()
            for told, column in zip(events[0].table.columns, rows.columns, strict=True)
        }
        assert values["a"] == [1, 1, 1, 1]
        assert values["c"][2] == 5
        assert missing["a"] == []
        if image == "MINIMAL":
            assert missing["b"] == [1, 2, 3]
            assert 2 not in missing["c"]
        else:
            assert missing["d"] == [1, 2, 3]
            assert values["b"] == ["x"] * 4


def test_compressed_transactions_and_events_are_inflated(server: MariaDbServer) -> None:
    statements = [
        "CREATE TABLE t (a int primary key, b varchar(500))",
        "INSERT INTO t VALUES (1, repeat('x', 400)), (2, repeat('y', 400))",
        "UPDATE t SET b = repeat('z', 400)",
        "DELETE FROM t",
    ]
    if server.kind == "MySQL":
        run(server, "SET SESSION binlog_transaction_compression = ON", *statements)
    else:
        with setting(server, log_bin_compress="ON", log_bin_compress_min_len="10"):
            run(server, *statements)
    path = closed_file(server)
    types = {packet[4] for packet in packets_of(path)}
    if server.kind == "MySQL":
        assert EventType.TRANSACTION_PAYLOAD in types
        assert any(isinstance(event, TransactionPayload) for event in events_of(path))
    else:
        assert {165, 166, 167, 168} <= types
    events = rows_events_of(path, "t")
    ddl = [event.sql for event in events_of(path) if isinstance(event, Query) and event.sql.startswith("CREATE")]
    assert ddl == [statements[0]]
    for make in DECODERS:
        rows = decode(make, events, plan_of(events[0].table))
        assert rows.ops.tolist() == [1, 1, 4, 3, 4, 3, 2, 2]
        values = columns_of(rows, events[0].table)["b"]
        assert values == ["x" * 400, "y" * 400, "x" * 400, "z" * 400, "y" * 400, "z" * 400, "z" * 400, "z" * 400]


def test_events_without_checksums_are_read(server: MariaDbServer) -> None:
    with setting(server, binlog_checksum="'NONE'"):
        run(server, "CREATE TABLE t (a int primary key)", "INSERT INTO t VALUES (1)")
        path = closed_file(server)
    events = list(events_of(path))
    assert isinstance(events[0], FormatDescription)
    assert not events[0].has_checksums
    rows = rows_events_of(path, "t")
    assert columns_of(decode(DECODERS[0], rows, plan_of(rows[0].table)), rows[0].table) == {"a": [1]}


def test_checksums_may_be_switched_while_a_stream_runs(server: MariaDbServer) -> None:
    server.execute("CREATE TABLE shop.t (a int primary key)")
    with closing(connect(Dsn(server.dsn))) as session:
        asked = Server.ask(session)
        start = log_position(session, asked)
    stream = BinlogStream.open(Dsn(server.dsn), start, asked.identity() | {"replica": 3_000_000_001})
    server.execute("INSERT INTO shop.t VALUES (1)")
    with setting(server, binlog_checksum="'NONE'"):
        server.execute("INSERT INTO shop.t VALUES (2)", "FLUSH BINARY LOGS", "INSERT INTO shop.t VALUES (3)")
    server.execute("INSERT INTO shop.t VALUES (4)")
    decoder, formats, rows = EventDecoder(), list[bool](), list[RowsEvent]()
    deadline = time.monotonic() + 30
    with closing(stream):
        while len(rows) < 4 and time.monotonic() < deadline:
            for packet in stream.read(1000, 1 << 20, 1.0):
                event = decoder.feed(packet)
                if isinstance(event, FormatDescription):
                    formats.append(event.has_checksums)
                elif isinstance(event, RowsEvent):
                    rows.append(event)
    assert formats == [True, False, False, True]
    decoded = [columns_of(decode(DECODERS[0], [event], plan_of(event.table)), event.table)["a"] for event in rows]
    assert decoded == [[1], [2], [3], [4]]


def test_a_flipped_bit_is_seen(server: MariaDbServer) -> None:
    run(server, "CREATE TABLE t (a int primary key)", "INSERT INTO t VALUES (1)")
    decoder = EventDecoder()
    for packet in packets_of(closed_file(server)):
        if packet[4] in (EventType.WRITE_ROWS_V1, EventType.WRITE_ROWS_V2):
            with pytest.raises(SourceProtocolError, match="checksum"):
                decoder.feed(packet[:-6] + bytes([packet[-6] ^ 1]) + packet[-5:])
            return
        decoder.feed(packet)
    pytest.fail("there were no rows")


@only_mysql
def test_parts_of_json_documents_are_made_whole(server: MariaDbServer) -> None:
    document = (
        '{"a": [1, 2, {"deep": "x"}], "b": {"key with \\\\"quotes\\\\"": 1.5, "n": null}, "long": "' + "y" * 300 + '"}'
    )
    changes = [
        "JSON_SET(j, '$.a[0]', 100)",
        "JSON_REPLACE(j, '$.a[2].deep', 'changed', '$.long', 'short')",
        "JSON_REMOVE(j, '$.a[1]')",
        "JSON_SET(j, '$.new', CAST('[1, {\"x\": true}]' AS JSON))",
        "JSON_REMOVE(j, '$.b')",
        "JSON_SET(j, '$.a[0]', CAST(12.50 AS DECIMAL(10,2)))",
        "JSON_SET(j, '$.d', CAST('2020-01-02 03:04:05.678' AS DATETIME(6)))",
    ]
    wanted = []
    run(
        server,
        "CREATE TABLE t (a int primary key, j json, k json, b varchar(20))",
        f"INSERT INTO t VALUES (1, '{document}', '[1, 2]', 'x')",
    )
    with server.connect(database="shop") as session, session.cursor() as cursor:
        cursor.execute("SET SESSION binlog_row_value_options = 'PARTIAL_JSON'")
        for change in changes:
            cursor.execute(f"UPDATE t SET j = {change}, k = JSON_SET(k, '$[0]', a), b = 'y'")
            cursor.execute("SELECT j FROM t")
            row = cursor.fetchone()
            assert row is not None
            wanted.append(row[0])
    path = closed_file(server)
    assert EventType.PARTIAL_UPDATE_ROWS in {packet[4] for packet in packets_of(path)}
    events = rows_events_of(path, "t")
    for make in DECODERS:
        rows = decode(make, events, plan_of(events[0].table))
        assert columns_of(rows, events[0].table)["j"][2::2] == wanted


@only_mysql
def test_parts_of_json_documents_without_the_document_are_refused_with_the_fix(server: MariaDbServer) -> None:
    run(
        server,
        "CREATE TABLE t (a int primary key, j json)",
        f'INSERT INTO t VALUES (1, \'{{"a": 1, "b": "{"y" * 300}"}}\')',
        "SET SESSION binlog_row_value_options = 'PARTIAL_JSON', binlog_row_image = 'MINIMAL'",
        "UPDATE t SET j = JSON_SET(j, '$.a', 2)",
    )
    with pytest.raises(SourceMisconfigured, match="binlog_row_value_options"):
        list(events_of(closed_file(server)))


@only_mysql
def test_json_holds_values_of_sql_types_as_the_server_prints_them(server: MariaDbServer) -> None:
    run(
        server,
        "CREATE TABLE t (a int primary key, j json)",
        """INSERT INTO t VALUES (1, JSON_ARRAY(CAST('-1.50' AS DECIMAL(65,30)), CAST('2020-02-03' AS DATE),
            CAST('-12:30:01.5' AS TIME(6)), TIMESTAMP'9999-12-31 23:59:59.999999', x'00ff', REPEAT(x'41', 200), 1e15,
            1e-15, -0e0, 18446744073709551615, true, null, 'a\\nb', POINT(1, 2), CAST('838:59:59' AS TIME), b'101'))""",
        "INSERT INTO t VALUES (2, 'null'), (3, NULL), (4, '[]'), (5, '{}'), (6, '\"\"')",
        "INSERT INTO t VALUES (7, JSON_OBJECT('k', REPEAT('long', 20000), 'bb', JSON_ARRAY(1)))",
    )
    wanted = [row[0] for row in server.execute("SELECT j FROM shop.t ORDER BY a")]
    events = rows_events_of(closed_file(server), "t")
    for make in DECODERS:
        assert columns_of(decode(make, events, plan_of(events[0].table)), events[0].table)["j"] == wanted


def test_special_values_follow_the_policy_of_their_column(server: MariaDbServer) -> None:
    run(
        server,
        "SET sql_mode = ''",
        "CREATE TABLE t (a int primary key, d date, h time, b tinyint(1))",
        "INSERT INTO t VALUES (1, '0000-00-00', '-1:00:00', 2), (2, '2020-01-01', '10:00:00', 1)",
    )
    events = rows_events_of(closed_file(server), "t")
    table = events[0].table
    flags = {"b": pa.bool_()}
    for make in DECODERS:
        for name, policy in (("d", SpecialValues.STOP), ("h", SpecialValues.STOP), ("b", SpecialValues.STOP)):
            types = {other: pa.string() for other in "dhb" if other != name} | ({} if name != "b" else flags)
            with pytest.raises(SpecialValue, match="special-values") as refused:
                decode(make, events, plan_of(table, special=policy, types=types))
            assert refused.value.column == name
        values = columns_of(decode(make, events, plan_of(table, special=SpecialValues.NULL, types=flags)), table)
        assert [values[name][0] for name in "dhb"] == [None] * 3
        assert None not in [values[name][1] for name in "dhb"]


@only_mariadb
def test_times_in_the_layout_of_old_servers_are_read(server: MariaDbServer) -> None:
    with setting(server, mysql56_temporal_format="OFF"):
        run(
            server,
            "SET sql_mode = '', time_zone = '+00:00'",
            "CREATE TABLE t (a int primary key, d datetime, h time, s timestamp null)",
            "INSERT INTO t VALUES (1, '2020-01-02 03:04:05', '-838:59:59', '2038-01-19 03:14:07')",
            "INSERT INTO t VALUES (2, '0000-00-00', '12:34:56', 0), (3, '9999-12-31 23:59:59', '00:00:00', NULL)",
        )
    events = rows_events_of(closed_file(server), "t")
    table = events[0].table
    assert [column.type.name for column in table.columns] == ["LONG", "DATETIME", "TIME", "TIMESTAMP"]
    shown = server.execute("SET time_zone = '+00:00'", "SELECT concat(d), concat(h), concat(s) FROM shop.t ORDER BY a")
    for make in DECODERS:
        values = columns_of(decode(make, events, plan_of(table, special=SpecialValues.TEXT)), table)
        assert list(zip(values["d"], values["h"], values["s"], strict=True)) == shown
        typed = columns_of(decode(make, events, plan_of(table, special=SpecialValues.NULL)), table)
        assert [value is None for value in typed["d"]] == [False, True, False]
        assert [value is None for value in typed["h"]] == [True, False, False]
        assert [value is None for value in typed["s"]] == [False, True, True]


def test_text_in_every_character_set_is_what_the_server_shows(server: MariaDbServer) -> None:
    charsets = [row[0] for row in server.execute("SELECT character_set_name FROM information_schema.character_sets")]
    charsets = sorted(set(charsets) - {"binary"})
    columns = ", ".join(f"c_{name} text character set {name}" for name in charsets)
    texts = {name: list(samples(name)) for name in charsets}
    run(server, f"CREATE TABLE t (id int primary key, {columns}) ROW_FORMAT=DYNAMIC")
    with server.connect(database="shop", sql_mode="") as session, session.cursor() as cursor:
        for place in range(max(map(len, texts.values()))):
            values = ", ".join(
                f"CONVERT(x'{texts[name][place].hex()}' USING {name})" if place < len(texts[name]) else "NULL"
                for name in charsets
            )
            cursor.execute(f"INSERT INTO t VALUES ({place}, {values})")
        cursor.execute("SELECT * FROM t ORDER BY id")
        shown = list(cursor.fetchall())
    events = rows_events_of(closed_file(server), "t")
    for make in DECODERS:
        decoded = columns_of(decode(make, events, plan_of(events[0].table)), events[0].table)
        for place, name in enumerate(charsets):
            assert decoded[f"c_{name}"] == [row[place + 1] for row in shown], name


def samples(charset: str) -> Iterator[bytes]:
    """All characters of a set: those of one byte together, and those of several bytes by the first."""
    if charset in WIDE:
        yield "aä€中𐍈"[: 4 if charset == "ucs2" else 5].encode(WIDE[charset])
    elif charset == "utf8mb3":
        yield "aä€中".encode()
    elif charset == "utf8mb4":
        yield "aä€中𐍈".encode()
    elif single_byte_table(charset) is not None:
        yield bytes(range(1, 128 if charset == "ascii" else 256))
    else:
        assert charset in MULTIPLE
        yield bytes(range(1, 128))
        for lead in range(0x81, 0xFF):
            yield b"".join(_valid(charset, bytes((lead, trail))) for trail in range(0x40, 0xFF))
        if charset in ("ujis", "eucjpms"):
            for lead in range(0xA1, 0xFF):
                yield b"".join(_valid(charset, bytes((0x8F, lead, trail))) for trail in range(0xA1, 0xFF))


def _valid(charset: str, code: bytes) -> bytes:
    """The character, where it is one."""
    text = decode_text(charset, code)
    return code if len(text) == 1 and text != "?" else b""
