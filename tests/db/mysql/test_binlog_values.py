"""Values of every type: what the decoder makes of row events is what the server's SELECT gives, and a snapshot."""

from __future__ import annotations

import datetime as dt
import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymysql.converters import encoders
from tests.db.mysql.binlog_reading import DECODERS, closed_file, columns_of, decode, plan_of, rows_events_of
from tests.servers.mariadb import MariaDbServer

from headwater.sources.mysql.catalog import read_table
from headwater.sources.mysql.connection import Dsn, connect
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.snapshots import MySqlSnapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues

ROWS = 20
EXAMPLES = 200 if os.environ.get("HEADWATER_SOAK") else 7


def text_or_null(value: Any) -> Any:
    return None if value is None else str(value)


def fixed(value: Decimal | None) -> str | None:
    return None if value is None else f"{value:f}"


def upper_hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex().upper()


class Column(NamedTuple):
    """A column, how its values are made, and how they are compared with the server's.

    :ivar shown: SQL that shows a value; ``{}`` stands for the column.
    :ivar show: the same of the decoded value.
    """

    type: str
    values: st.SearchStrategy[Any]
    shown: str = "{}"
    show: Callable[[Any], Any] = text_or_null
    families: tuple[str, ...] = ("mariadb", "mysql")
    is_number: bool = False


def integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.integers(low, high) | st.sampled_from((low, high, 0, 1))


def decimals(digits: int, scale: int) -> st.SearchStrategy[str]:
    most = 10**digits - 1
    edges = st.sampled_from((most, -most, 0, 1, -1))
    # as text: Python's Decimal would round to the digits of its context
    return (st.integers(-most, most) | edges).map(
        lambda unscaled: (
            f"{'-' if unscaled < 0 else ''}{abs(unscaled) // 10**scale}.{abs(unscaled) % 10**scale:0{scale}d}"
            if scale
            else str(unscaled)
        )
    )


def times(digits: int) -> st.SearchStrategy[str]:
    most = (838 * 3600 + 59 * 60 + 58) * 10**digits

    def shown(units: int) -> str:
        seconds, fraction = divmod(abs(units), 10**digits)
        text = f"{'-' if units < 0 else ''}{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
        return f"{text}.{fraction:0{digits}d}" if digits else text

    return (st.integers(-most, most) | st.integers(-100, 100) | st.integers(0, 86_400 * 10**digits)).map(shown)


DATES = st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31)).map(lambda date: f"{date:%Y-%m-%d}".rjust(10, "0"))
SPECIAL_DATES = st.sampled_from(("0000-00-00", "2020-00-00", "2020-05-00", "0000-05-06", "2021-00-31"))


def moments(digits: int, dates: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    clock = st.integers(0, 86_399)
    fraction = st.integers(0, 10**digits - 1)

    def shown(date: str, seconds: int, part: int) -> str:
        text = f"{date} {seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
        return f"{text}.{part:0{digits}d}" if digits else text

    return st.builds(shown, dates, clock, fraction)


STAMPS = st.dates(dt.date(1970, 1, 2), dt.date(2038, 1, 18)).map(lambda date: f"{date:%Y-%m-%d}")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
TRIMMED = st.text(st.characters(codec="utf-8", exclude_categories=("Zs", "Cc"), exclude_characters="\0"), max_size=10)
LATIN = st.text(st.characters(codec="cp1252", exclude_characters="\0"), max_size=20)
BYTES = st.binary(max_size=40)

JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=10)
)
JSON_KEYS = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    JSON_LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_KEYS, inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value, ensure_ascii=False))


def wkb_point(x: float, y: float) -> bytes:
    return struct.pack("<IBIdd", 0, 1, 1, x, y)


POINTS = st.builds(wkb_point, st.floats(-180, 180), st.floats(-90, 90))
MIXED = st.sampled_from(
    ("::", "::1", "::0.1.0.0", "::1.2.3.4", "::ffff:1.2.3.4", "::ffff:0.0.0.0", "1::", "1:0:0:2::3")
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)

COLUMNS: dict[str, Column] = {
    "tiny_i": Column("tinyint", integers(8, signed=True)),
    "tiny_u": Column("tinyint unsigned", integers(8, signed=False)),
    "small_i": Column("smallint", integers(16, signed=True)),
    "small_u": Column("smallint unsigned", integers(16, signed=False)),
    "medium_i": Column("mediumint", integers(24, signed=True)),
    "medium_u": Column("mediumint unsigned", integers(24, signed=False)),
    "int_i": Column("int", integers(32, signed=True)),
    "int_u": Column("int unsigned zerofill", integers(32, signed=False), "{}+0"),
    "big_i": Column("bigint", integers(64, signed=True)),
    "big_u": Column("bigint unsigned", integers(64, signed=False)),
    "dec65": Column("decimal(65,30)", decimals(65, 30), show=fixed),
    "dec38": Column("decimal(38,10)", decimals(38, 10), show=fixed),
    "dec10": Column("decimal(10,0)", decimals(10, 0), show=fixed),
    "dec9": Column("decimal(9,9)", decimals(9, 9), show=fixed),
    "float_": Column(
        "float", st.floats(width=32, allow_nan=False, allow_infinity=False), "{} + 0e0", lambda v: v, is_number=True
    ),
    "double_": Column("double", NUMBERS, show=lambda v: v, is_number=True),
    "bit1": Column("bit(1)", st.integers(0, 1), "{}+0", show=lambda v: None if v is None else str(int(v))),
    "bit37": Column(
        "bit(37)", integers(37, signed=False), "{}+0", lambda v: None if v is None else str(int.from_bytes(v, "big"))
    ),
    "bit64": Column(
        "bit(64)", integers(64, signed=False), "{}+0", lambda v: None if v is None else str(int.from_bytes(v, "big"))
    ),
    "year_": Column("year", st.integers(1901, 2155) | st.just(0), "{}+0"),
    "char_": Column("char(10) character set utf8mb4", TRIMMED),
    "varchar_": Column("varchar(300) character set utf8mb4", TEXT),
    "short_": Column("varchar(20) character set utf8mb4", TEXT),
    "text_": Column("text character set latin1", LATIN),
    "wide": Column("varchar(30) character set utf16", TEXT),
    "binary_": Column("binary(5)", st.binary(max_size=5), "hex({})", upper_hex),
    "varbinary_": Column("varbinary(300)", BYTES, "hex({})", upper_hex),
    "tinyblob_": Column("tinyblob", BYTES, "hex({})", upper_hex),
    "blob_": Column("mediumblob", BYTES | st.binary(min_size=300, max_size=400), "hex({})", upper_hex),
    "enum_": Column(
        "enum('a','ä','€','it''s') character set utf8mb4", st.sampled_from(("a", "ä", "€", "it's", "none"))
    ),
    "set_": Column("set('a','ä','€') character set latin1", st.sampled_from(("", "a", "ä", "a,€", "a,ä,€", "ä,€"))),
    "json_": Column("json", JSON),
    "geometry_": Column("geometry", POINTS, "hex({})", lambda v: None if v is None else "00000000" + v.hex().upper()),
    "uuid_": Column("uuid", st.uuids().map(str), families=("mariadb",)),
    "inet6_": Column("inet6", st.ip_addresses(v=6).map(str) | MIXED, families=("mariadb",)),
    "inet4_": Column("inet4", st.ip_addresses(v=4).map(str), families=("mariadb",)),
    "compressed_": Column("varchar(200) compressed character set utf8mb4", TEXT, families=("mariadb",)),
    "vector_": Column(
        "vector(3)",
        st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3).map(lambda v: struct.pack("<3f", *v)),
        "hex({})",
        upper_hex,
        families=("mysql",),
    ),
}
TIMES: dict[str, Column] = {
    "date_": Column("date", DATES | SPECIAL_DATES),
    "time0": Column("time", times(0)),
    "time2": Column("time(2)", times(2)),
    "time3": Column("time(3)", times(3)),
    "time6": Column("time(6)", times(6)),
    "datetime0": Column("datetime", moments(0, DATES | SPECIAL_DATES)),
    "datetime1": Column("datetime(1)", moments(1, DATES | SPECIAL_DATES)),
    "datetime4": Column("datetime(4)", moments(4, DATES)),
    "datetime6": Column("datetime(6)", moments(6, DATES | SPECIAL_DATES)),
    "timestamp0": Column("timestamp null", moments(0, STAMPS) | st.just("0000-00-00 00:00:00")),
    "timestamp3": Column("timestamp(3) null", moments(3, STAMPS)),
    "timestamp6": Column("timestamp(6) null", moments(6, STAMPS) | st.just("0000-00-00 00:00:00")),
}


def columns_for(server: MariaDbServer, columns: dict[str, Column]) -> dict[str, Column]:
    family = "mariadb" if server.kind == "MariaDB" else "mysql"
    return {name: column for name, column in columns.items() if family in column.families}


def rows_of(columns: dict[str, Column]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    row = st.tuples(*(st.none() | column.values for column in columns.values()))
    return st.lists(row, min_size=ROWS, max_size=ROWS)


def written(server: MariaDbServer, columns: dict[str, Column], rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Insert *rows* into an empty table ``t``; what the server shows of them."""
    shown = ", ".join(column.shown.format(f"`{name}`") for name, column in columns.items())
    with (
        server.connect(database="shop", sql_mode="ALLOW_INVALID_DATES", conv={}) as session,
        session.cursor() as cursor,
    ):
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute("TRUNCATE t")
        server.execute("FLUSH BINARY LOGS")
        marks = ", ".join("%s" for _ in columns)
        session.encoders = dict(encoders)
        cursor.executemany(f"INSERT INTO t ({', '.join(columns)}) VALUES ({marks})", rows)
        cursor.execute(f"SELECT {shown} FROM t ORDER BY id")
        return list(cursor.fetchall())


def made_table(server: MariaDbServer, columns: dict[str, Column]) -> dict[str, Column]:
    kept = columns_for(server, columns)
    body = ", ".join(f"{name} {column.type}" for name, column in kept.items())
    with server.connect(database="shop", sql_mode="") as session:
        session.cursor().execute(f"CREATE TABLE t (id bigint primary key auto_increment, {body})")
    return kept


SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_values_of_every_type_are_those_that_the_server_shows(server: MariaDbServer) -> None:
    columns = made_table(server, COLUMNS)

    @SETTINGS
    @given(rows_of(columns))
    def check(rows: list[tuple[Any, ...]]) -> None:
        shown = written(server, columns, rows)
        events = rows_events_of(closed_file(server), "t")
        table = events[0].table
        plan = plan_of(table, plan_types(columns))
        for make in DECODERS:
            decoded = columns_of(decode(make, events, plan), table)
            for place, (name, column) in enumerate(columns.items()):
                wanted = [row[place] for row in shown]
                if column.is_number:
                    wanted = [None if text is None else float(text) for text in wanted]
                assert [column.show(value) for value in decoded[name]] == wanted, name
        assert decoded == snapshot_of(server, SpecialValues.STOP)
        types = {column.name: column.type for column in described(server, SpecialValues.TEXT).columns}
        texts = columns_of(decode(DECODERS[0], events, plan_of(table, plan_types(columns), types=types)), table)
        snapshot = snapshot_of(server, SpecialValues.TEXT)
        for name in columns:
            assert texts[name] == snapshot[name], name

    check()


def plan_types(columns: dict[str, Column]) -> dict[str, str]:
    """The types that a table map does not tell."""
    return {name: column.type for name, column in columns.items() if name in ADDRESSES}


def described(server: MariaDbServer, policy: SpecialValues) -> SourceTable:
    with closing(connect(Dsn(server.dsn))) as session:
        return read_table(session, TableName("shop", "t")).described(
            lambda column: SpecialValues.STOP if column == "id" else policy
        )


def snapshot_of(server: MariaDbServer, policy: SpecialValues) -> dict[str, list[Any]]:
    """The columns of ``t`` as a snapshot reads them."""
    table = described(server, policy)
    batches = list(MySqlSnapshots(server.dsn).read(table, SplitKind.KEY, KeyRange(), None))
    return dict(pa.Table.from_batches(batches, table.schema).sort_by("id").to_pydict())


ADDRESSES = frozenset(("uuid_", "inet4_", "inet6_"))


def test_dates_and_times_are_those_that_the_server_shows(server: MariaDbServer) -> None:
    columns = made_table(server, TIMES)

    @SETTINGS
    @given(rows_of(columns))
    def check(rows: list[tuple[Any, ...]]) -> None:
        shown = written(server, columns, rows)
        events = rows_events_of(closed_file(server), "t")
        table = events[0].table
        for make in DECODERS:
            texts = columns_of(decode(make, events, plan_of(table, special=SpecialValues.TEXT)), table)
            typed = columns_of(decode(make, events, plan_of(table, special=SpecialValues.NULL)), table)
            for place, name in enumerate(columns):
                wanted = [row[place] for row in shown]
                assert texts[name] == wanted, name
                assert typed[name] == [value_of(name, text) for text in wanted], name
        assert typed == snapshot_of(server, SpecialValues.NULL)
        assert texts | {"id": typed["id"]} == snapshot_of(server, SpecialValues.TEXT)

    check()


def value_of(name: str, text: str | None) -> Any:
    """The Arrow value of the server's text; ``None`` where there is none."""
    if text is None:
        return None
    try:
        if name.startswith("time") and not name.startswith("timestamp"):
            return dt.time.fromisoformat(text) if len(text.partition(":")[0]) == 2 else None
        if name.startswith("date_"):
            return dt.date.fromisoformat(text)
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=dt.UTC) if name.startswith("timestamp") else moment
