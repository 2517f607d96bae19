"""Cuts, orders and values of SQL Server's tables: on the double, or on a real server if one is named."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.db.sqlserver.running import described, running
from tests.sampled import share
from tests.servers.sqlserver import AnySqlServer, track

from headwater.sources.errors import InvalidRange, SnapshotExpired, SpecialValue
from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues

KEYS: dict[str, list[str]] = {
    "int": ["-5", "0", "7", "100", "2000000"],
    "bigint": ["-9223372036854775808", "5", "9223372036854775807"],
    "tinyint": ["0", "7", "255"],
    "decimal(20,3)": ["-10.5", "-9", "0.001", "9", "10", "1000000000000000"],
    "money": ["-2.5", "10", "9", "100"],
    "varchar(20)": ["'b'", "'A'", "'a1'", "'Z'", "'_'", "'aa'"],
    "nvarchar(20)": ["N'ä'", "N'B'", "N'a'", "N'ж'"],
    "uniqueidentifier": [
        "'FF000000-0000-0000-0000-000000000001'",
        "'00000000-0000-0000-0000-0000000000FF'",
        "'00000000-0000-0000-00FF-000000000001'",
        "'00000000-00FF-0000-0000-000000000001'",
        "'01000000-0000-0000-0000-000000000001'",
        "'000000FF-0000-0000-0000-000000000001'",
    ],
    "date": ["'2024-02-29'", "'0001-01-01'", "'9999-12-31'"],
    "datetime": ["'2024-02-29 10:00:00.003'", "'1753-01-01'", "'2024-02-29 10:00:00.007'"],
    "datetime2(6)": ["'2024-02-29 10:00:00.000001'", "'0001-01-01'", "'9999-12-31 23:59:59.999999'"],
    "datetimeoffset(3)": ["'2024-01-01 10:00 +02:00'", "'2024-01-01 09:00 +00:00'", "'2024-01-01 07:30 -01:00'"],
    "time(3)": ["'10:00:00.001'", "'00:00'", "'23:59:59.999'"],
    "float": ["1e300", "-2.5", "0.1"],
    "varbinary(8)": ["0x02", "0x0100", "0xFF"],
    "bit": ["0", "1"],
}


def make(server: AnySqlServer, kind: str, values: list[str], folder: Path) -> SourceTable:
    server.execute(f"CREATE TABLE shop.keyed (id {kind} NOT NULL PRIMARY KEY, n int)")
    for number, value in enumerate(values):
        server.execute(f"INSERT INTO shop.keyed VALUES ({value}, {number})")
    track(server, "keyed")
    return described(server, "shop.keyed", folder)


def read(server: AnySqlServer, table: SourceTable, part: KeyRange) -> list[int]:
    batches = open_snapshots(server.dsn).read(table, SplitKind.KEY, part, None)
    return [row["n"] for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("kind", share(list(KEYS), 1, 4))
def test_cuts_of_keys_of_every_kind_are_those_of_the_server(server: AnySqlServer, tmp_path: Path, kind: str) -> None:
    table = make(server, kind, KEYS[kind], tmp_path)
    in_order = [row[0] for row in server.execute("SELECT n FROM shop.keyed ORDER BY id")]
    snapshots = open_snapshots(server.dsn)
    with snapshots.export() as snapshot:  # type: ignore[attr-defined]
        plan = snapshot.plan(table, split_rows=1)
        page = snapshot.page_end(table, SplitKind.KEY, KeyRange(), 1)
    parts = [read(server, table, split.range) for split in plan.splits]
    assert [row for part in parts for row in part] == in_order
    assert all(len(part) <= 1 for part in parts)
    assert page is not None
    assert read(server, table, KeyRange(page)) == in_order[1:]
    rows = pa.Table.from_batches(snapshots.read(table, SplitKind.KEY, KeyRange(), None)).combine_chunks()
    cuts = [split.range.start for split in plan.splits if split.range.start is not None]
    places = snapshots.order(table).places(rows.select(["id"]).to_batches()[0], cuts)
    by_number = dict(zip(rows["n"].to_pylist(), places.tolist(), strict=True))
    assert [by_number[number] for number in in_order] == sorted(by_number.values())
    assert by_number == {number: place for place, part in enumerate(parts) for number in part}


def test_a_key_of_several_columns_is_cut_as_a_whole(server: AnySqlServer, tmp_path: Path) -> None:
    server.execute("CREATE TABLE shop.keyed (a varchar(9) NOT NULL, b int NOT NULL, n int, PRIMARY KEY (a, b))")
    for number in range(30):
        server.execute(f"INSERT INTO shop.keyed VALUES ('{'xYz'[number % 3]}', {number // 3}, {number})")
    track(server, "keyed")
    table = described(server, "shop.keyed", tmp_path)
    with open_snapshots(server.dsn).export() as snapshot:  # type: ignore[attr-defined]
        plan = snapshot.plan(table, split_rows=4)
    found = [read(server, table, split.range) for split in plan.splits]
    assert sorted(row for part in found for row in part) == list(range(30))
    assert [row for part in found for row in part] == [
        row[0] for row in server.execute("SELECT n FROM shop.keyed ORDER BY a, b")
    ]
    assert len(found) == 8


def test_a_range_that_a_person_names_is_printed_or_refused(server: AnySqlServer, tmp_path: Path) -> None:
    table = make(server, "datetime2(3)", ["'2024-01-01'", "'2024-01-02'"], tmp_path)
    snapshots = open_snapshots(server.dsn)
    assert snapshots.key_range(table, KeyRange(Cut(("2024-01-02",)))) == KeyRange(Cut(("2024-01-02 00:00:00.000",)))
    for part in (
        KeyRange(Cut(("soon",))),
        KeyRange(Cut(("2024-01-01", "2"))),
        KeyRange(Cut(("2024-01-02",)), Cut(("2024-01-01",))),
    ):
        with pytest.raises(InvalidRange):
            snapshots.key_range(table, part)


def test_a_table_that_is_not_what_it_was_must_be_planned_anew(server: AnySqlServer, tmp_path: Path) -> None:
    table = make(server, "int", ["1"], tmp_path)
    server.execute("ALTER TABLE shop.keyed DROP COLUMN n")
    with pytest.raises(SnapshotExpired):
        read(server, table, KeyRange())


TYPES: dict[str, tuple[str, Any]] = {
    "tinyint": ("255", 255),
    "smallint": ("-32768", -32768),
    "int": ("2147483647", 2147483647),
    "bigint": ("-9223372036854775808", -(2**63)),
    "bit": ("1", True),
    "decimal(38,10)": ("'1234567890123456789012345678.0123456789'", Decimal("1234567890123456789012345678.0123456789")),
    "numeric(5,0)": ("-99999", Decimal(-99999)),
    "money": ("'-922337203685477.5808'", Decimal("-922337203685477.5808")),
    "smallmoney": ("'214748.3647'", Decimal("214748.3647")),
    "float": ("1.7976931348623157e308", 1.7976931348623157e308),
    "real": ("0.5", 0.5),
    "char(5)": ("'ab'", "ab   "),
    "varchar(20)": ("'naïve'", "naïve"),
    "nvarchar(max)": ("N'日本語 🐟'", "日本語 🐟"),
    "ntext": ("N'long'", "long"),
    "xml": ("N'<a b=\"1\"/>'", '<a b="1"/>'),
    "binary(4)": ("0x0102", b"\x01\x02\0\0"),
    "varbinary(max)": ("0xDEADBEEF", b"\xde\xad\xbe\xef"),
    "date": ("'9999-12-31'", dt.date(9999, 12, 31)),
    "time(6)": ("'23:59:59.999999'", dt.time(23, 59, 59, 999999)),
    "datetime": ("'2024-02-29 12:00:00.007'", dt.datetime(2024, 2, 29, 12, 0, 0, 7000)),  # noqa: DTZ001
    "smalldatetime": ("'2024-02-29 12:34'", dt.datetime(2024, 2, 29, 12, 34)),  # noqa: DTZ001
    "datetime2(7)": ("'0001-01-01 00:00:00.1234560'", dt.datetime(1, 1, 1, 0, 0, 0, 123456)),  # noqa: DTZ001
    "datetimeoffset(6)": (
        "'2024-03-01 01:00:00.000001 +02:00'",
        dt.datetime(2024, 2, 29, 23, 0, 0, 1, tzinfo=dt.UTC),
    ),
    "uniqueidentifier": ("'6f9619ff-8b86-d011-b42d-00c04fc964ff'", "6F9619FF-8B86-D011-B42D-00C04FC964FF"),
    "hierarchyid": ("'/1/2/'", "/1/2/"),
    "sql_variant": ("N'text'", "text"),
}


def test_history_and_changes_have_the_same_values_of_every_type(server: AnySqlServer, tmp_path: Path) -> None:
    columns = [f"c{number}" for number in range(len(TYPES))]
    declared = ", ".join(f"{name} {kind}" for name, kind in zip(columns, TYPES, strict=True))
    server.execute(f"CREATE TABLE shop.types (id int NOT NULL PRIMARY KEY, {declared}, twice AS (id * 2))")
    values = ", ".join(text for text, _ in TYPES.values())
    server.execute(f"INSERT INTO shop.types VALUES (1, {values})", "INSERT INTO shop.types (id) VALUES (2)")
    track(server, "types")
    expected = dict(zip(columns, (value for _, value in TYPES.values()), strict=True))
    with running(server, tmp_path, "shop.types") as capture:
        server.execute(f"INSERT INTO shop.types VALUES (3, {values})", "INSERT INTO shop.types (id) VALUES (4)")
        capture.catch_up()
        told = {row["id"]: row for row in capture.rows("shop.types")}
    table = described(server, "shop.types", tmp_path)
    batches = open_snapshots(server.dsn).read(table, SplitKind.KEY, KeyRange(), None)
    shown = {row["id"]: row for batch in batches for row in batch.to_pylist()}
    assert "twice" not in shown[1]
    for rows, number in ((shown, 1), (shown, 3), (told, 3)):
        assert {name: rows[number][name] for name in columns} == expected
    for rows, number in ((shown, 2), (told, 4)):
        assert {rows[number][name] for name in columns} == {None}


def test_the_seventh_digit_of_a_second_is_refused_left_out_kept_or_text(server: AnySqlServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE TABLE shop.ticks (id int NOT NULL PRIMARY KEY, at datetime2(7), t time(7), o datetimeoffset(7))"
    )
    server.execute(
        "INSERT INTO shop.ticks VALUES (1, '2024-01-01 00:00:00.1234567', '10:00:00.0000001',"
        " '2024-01-01 02:00:00.0000009 +02:00')"
    )
    track(server, "ticks")

    def values(options: str = "", special: SpecialValues | None = None) -> list[Any]:
        dsn = server.dsn + options
        policies = {} if special is None else {f"shop.ticks.{name}": special for name in ("at", "t", "o")}
        source = open_source(dsn, spill=tmp_path / "unused", special_values=policies)
        (table,) = source.tables(["shop.ticks"])
        source.close()
        (batch,) = open_snapshots(dsn).read(table, SplitKind.KEY, KeyRange(), None)
        return [batch.column(name)[0] for name in ("at", "t", "o")]

    with pytest.raises(SpecialValue, match=r"special_values of shop\.ticks\.at to text"):
        values()
    assert [value.as_py() for value in values("?ticks=truncate")] == [
        dt.datetime(2024, 1, 1, 0, 0, 0, 123456),  # noqa: DTZ001
        dt.time(10),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    ]
    assert [value.cast(pa.int64()).as_py() % 1000 for value in values("?ticks=ns")] == [700, 100, 900]
    assert [value.as_py() for value in values(special=SpecialValues.NULL)] == [None, None, None]
    assert [value.as_py() for value in values(special=SpecialValues.TEXT)] == [
        "2024-01-01 00:00:00.1234567",
        "10:00:00.0000001",
        "2024-01-01 02:00:00.0000009 +02:00",
    ]


def test_neighbours_share_a_cut(server: AnySqlServer, tmp_path: Path) -> None:
    table = make(server, "int", [str(n) for n in range(20)], tmp_path)
    with open_snapshots(server.dsn).export() as snapshot:  # type: ignore[attr-defined]
        plan = snapshot.plan(table, split_rows=3)
    assert plan.rows == 20
    assert all(one.range.end == other.range.start for one, other in pairwise(plan.splits))


def test_rows_are_the_same_by_compiled_code_and_by_the_library(
    server: AnySqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.execute(
        "CREATE TABLE shop.wide (id int NOT NULL PRIMARY KEY, t nvarchar(max), b varbinary(max), f float, o bit)"
    )
    for first in range(0, 400, 100):
        numbers = range(first + 1, first + 101)
        texts = {n: "NULL" if n % 7 == 0 else f"N'{'ä🐟' * (n * 20)}'" for n in numbers}
        values = ", ".join(f"({n}, {texts[n]}, 0x{'AB' * n}, {n / 3}, {n % 2})" for n in numbers)
        server.execute(f"INSERT INTO shop.wide VALUES {values}")
    track(server, "wide")
    table = described(server, "shop.wide", tmp_path)

    def rows() -> list[dict[str, Any]]:
        batches = open_snapshots(server.dsn).read(table, SplitKind.KEY, KeyRange(), None)
        return [row for batch in batches for row in batch.to_pylist()]

    compiled = rows()
    monkeypatch.setenv("HEADWATER_PURE", "1")
    assert rows() == compiled
    assert len(compiled) == 400
    assert len(compiled[397]["t"]) == 2 * 398 * 20
