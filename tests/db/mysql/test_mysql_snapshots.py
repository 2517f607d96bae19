"""Snapshots of MariaDB and MySQL: the rows are the server's, the splits part them, the order is the server's."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FAMILY

from headwater.sources.errors import InvalidRange, SnapshotExpired, SpecialValue, UnsupportedTable
from headwater.sources.mysql import splitting
from headwater.sources.mysql.catalog import read_table
from headwater.sources.mysql.connection import Connection, Dsn, ask, connect
from headwater.sources.mysql.key_columns import cut_after, read_key
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.snapshots import MySqlSnapshots
from headwater.sources.snapshots import UnsharedSnapshots, mark_from_json, open_snapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues

ALL = KeyRange()


def described(server: MariaDbServer, name: str, policy: SpecialValues = SpecialValues.STOP) -> SourceTable:
    with closing(connect(Dsn(server.dsn))) as session:
        return read_table(session, TableName("shop", name)).described(
            lambda column: SpecialValues.STOP if column == "id" else policy
        )


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def read(server: MariaDbServer, table: SourceTable, part: KeyRange = ALL, **options: Any) -> list[dict[str, Any]]:
    return rows_of(MySqlSnapshots(server.dsn).read(table, SplitKind.KEY, part, None, **options))


TYPES = """
CREATE TABLE shop.types (
  id INT PRIMARY KEY, i1 TINYINT, u1 TINYINT UNSIGNED, i2 SMALLINT, u2 SMALLINT UNSIGNED, i3 MEDIUMINT,
  u3 MEDIUMINT UNSIGNED, i4 INT, u4 INT UNSIGNED, i8 BIGINT, u8 BIGINT UNSIGNED, d1 DECIMAL(10,2),
  d2 DECIMAL(65,30), d3 DECIMAL(38,0), f FLOAT, g DOUBLE, b1 BIT(1), b9 BIT(9), y YEAR, d DATE, t TIME(6),
  dt DATETIME(6), dt0 DATETIME, ts TIMESTAMP(6) NULL, c CHAR(10), v VARCHAR(100),
  l VARCHAR(100) CHARACTER SET latin1, tx LONGTEXT, bi BINARY(4), vb VARBINARY(100), bl LONGBLOB,
  e ENUM('one', 'two', 'it''s'), s SET('a', 'b', 'c'), j JSON, p POINT
) DEFAULT CHARACTER SET utf8mb4
"""
TYPE_ROWS = [
    "1, -128, 255, -32768, 65535, -8388608, 16777215, -2147483648, 4294967295, -9223372036854775808,"
    " 18446744073709551615, -12345678.91, 12345678901234567890123456789012345.123456789012345678901234567891,"
    " -99999999999999999999999999999999999999, 3.1415927, 0.1, b'1', b'100000001', 2155, '9999-12-31',"
    " '23:59:59.999999', '9999-12-31 23:59:59.999999', '1000-01-01 00:00:00', '2038-01-19 03:14:07.999999',"
    " 'abc', 'größe 中 😀', 'größe', REPEAT('x', 300), X'00FF', X'00010203FF', X'', 'it''s', 'a,c',"
    " '{\"k\": [1, 2.5, \"é\"]}', ST_GeomFromText('POINT(1 2)')",
    "2, 127, 0, 32767, 0, 8388607, 0, 2147483647, 0, 9223372036854775807, 0, 0, -0.000000000000000000000000000001,"
    " 0, -1.5e-30, 1.7976931348623157e308, b'0', b'0', 1901, '0001-01-01', '00:00:00', '1970-01-01 00:00:00.000001',"
    " '1969-12-31 23:59:59', '1970-01-01 00:00:01', '', '', '', '', X'', X'', X'00', 'one', '', '[]', NULL",
    "3" + ", NULL" * 34,
]


def test_values_of_every_type_are_those_of_the_server(server: MariaDbServer) -> None:
    server.execute(TYPES, *(f"INSERT INTO shop.types VALUES ({values})" for values in TYPE_ROWS))
    table = described(server, "types")
    first, second, third = read(server, table)
    assert third == {"id": 3} | dict.fromkeys(table.schema.names[1:])
    for row, values in ((first, 1), (second, 2)):
        shown = ", ".join(_shown(column.name) for column in table.columns)
        [found] = server.execute(f"SELECT {shown} FROM shop.types WHERE id = {values}")
        for column, told in zip(table.columns, found, strict=True):
            text = told.decode() if isinstance(told, bytes) and isinstance(row[column.name], str) else told
            assert _plain(row[column.name]) == _plain(text), column.name
    assert first["p"][:5] == b"\x01\x01\x00\x00\x00"
    assert first["f"] == np.float32(3.1415927)


def _shown(name: str) -> str:
    return {"p": "SUBSTR(p, 5)", "f": "CAST(f AS DOUBLE)", "b1": "b1 + 0", "t": "TIME_FORMAT(t, '%H:%i:%s.%f')"}.get(
        name, f"`{name}`"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("{", "[")):
        return json.dumps(json.loads(value))
    if hasattr(value, "microsecond") and not hasattr(value, "year"):
        return value.strftime("%H:%M:%S.%f")
    return value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value


def test_python_reads_the_same_rows_as_compiled_code(mariadb: MariaDbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    mariadb.execute(TYPES, *(f"INSERT INTO shop.types VALUES ({values})" for values in TYPE_ROWS))
    table = described(mariadb, "types")
    compiled = list(MySqlSnapshots(mariadb.dsn).read(table, SplitKind.KEY, ALL, None))
    monkeypatch.setenv("HEADWATER_PURE", "1")
    assert list(MySqlSnapshots(mariadb.dsn).read(table, SplitKind.KEY, ALL, None)) == compiled


@pytest.mark.parametrize("pure", ["0", "1"])
def test_rows_larger_than_a_packet_and_a_block_come_whole(
    mariadb: MariaDbServer, monkeypatch: pytest.MonkeyPatch, pure: str
) -> None:
    monkeypatch.setenv("HEADWATER_PURE", pure)
    mariadb.execute("SET GLOBAL max_allowed_packet = 1 << 26")
    lengths = [1, 5 << 20, 250, (16 << 20) - 1, 17 << 20, 251, 65_536, 3, 33 << 20, 70_000]
    with mariadb.connect(max_allowed_packet=1 << 26) as session, session.cursor() as cursor:
        cursor.execute("CREATE TABLE shop.large (id INT PRIMARY KEY, data LONGBLOB)")
        for number, length in enumerate(lengths):
            cursor.execute(f"INSERT INTO shop.large VALUES ({number}, REPEAT(CHAR({65 + number}), {length}))")
    table = described(mariadb, "large")
    found = {
        row["id"]: (len(row["data"]), row["data"][:1])
        for batch in MySqlSnapshots(mariadb.dsn).read(table, SplitKind.KEY, ALL, None)
        for row in batch.to_pylist()
    }
    assert found == {number: (length, bytes([65 + number])) for number, length in enumerate(lengths)}


def test_special_values_follow_their_policy(server: MariaDbServer) -> None:
    server.execute("CREATE TABLE shop.special (id INT PRIMARY KEY, d DATE, t TIME(3))")
    with server.connect(sql_mode="") as session, session.cursor() as cursor:
        cursor.execute(
            "INSERT INTO shop.special VALUES (1, '0000-00-00', '12:00:00.5'), (2, '2020-01-01', '-01:00:00')"
        )
    with pytest.raises(SpecialValue, match=r"shop\.special, column 'd' \(date\) holds zero or partial dates"):
        read(server, described(server, "special"))
    nulls = read(server, described(server, "special", SpecialValues.NULL))
    assert [(row["d"] is None, row["t"] is None) for row in nulls] == [(True, False), (False, True)]
    texts = read(server, described(server, "special", SpecialValues.TEXT), columns=["d", "t"])
    assert texts == [{"d": "0000-00-00", "t": "12:00:00.500"}, {"d": "2020-01-01", "t": "-01:00:00.000"}]


# -- keys ------------------------------------------------------------------------------------------------------------

KEYS = {
    "tinyint": ("TINYINT", [str(n) for n in range(-128, 128, 50)]),
    "bigint unsigned": ("BIGINT UNSIGNED", [str(n) for n in (0, 1, 2**31, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)]),
    "decimal": ("DECIMAL(65,30)", ["-1.5", "0", "0.000000000000000000000000000001", "1e34", "-1e34", "2"]),
    "double": ("DOUBLE", ["-1e300", "-0.1", "0", "1e-300", "0.30000000000000004", "0.3", "7"]),
    "bit": ("BIT(12)", ["b'0'", "b'1'", "b'100000000000'", "b'11'", "b'10'"]),
    "year": ("YEAR", ["1901", "2155", "2000", "1999"]),
    "date": ("DATE", ["'1000-01-01'", "'2020-02-29'", "'9999-12-31'", "'1969-12-31'"]),
    "datetime": ("DATETIME(3)", ["'2020-01-01 00:00:00.001'", "'2020-01-01'", "'1969-12-31 23:59:59.999'"]),
    "timestamp": ("TIMESTAMP(6)", ["'2020-01-01 00:00:00.000001'", "'2020-01-01'", "'1971-01-01'", "'2037-01-01'"]),
    "time": ("TIME(6)", ["'00:00:00'", "'23:59:59.999999'", "'12:00:00.5'"]),
    "enum": ("ENUM('zebra', 'apple', 'it''s', 'Mango')", ["'apple'", "'zebra'", "'Mango'", "'it''s'"]),
    "set": ("SET('z', 'a', 'm')", ["'z'", "'a'", "'m'", "'z,a'", "'z,m'", "''"]),
    "varbinary": ("VARBINARY(20)", ["X'00'", "X''", "X'FF'", "X'0000'", "X'61'", "X'6100'", "X'80'"]),
    "binary": ("BINARY(3)", ["X'00'", "X'FF'", "X'61'", "X'6101'", "X'80'"]),
    "general_ci": (
        "VARCHAR(30) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
        ["'a'", "'B'", "'c'", "'ä c'", "'Ärger'", "'zebra'", "'Zoo'", "''", "'a b'", "'a\\tb'", "'中'", "'😀'", "'ß'"],
    ),
    "unicode_ci": (
        "VARCHAR(30) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        ["'a'", "'B'", "'c'", "'äh'", "'Ärger'", "'zebra'", "'Zoo'", "'a-b'", "'ab'", "'ss1'", "'ß2'"],
    ),
    "bin": ("VARCHAR(30) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", ["'a'", "'A'", "'a\\t'", "'b '", "'ä'", "'😀'"]),
    "latin1": (
        "CHAR(10) CHARACTER SET latin1 COLLATE latin1_german1_ci",
        ["'a'", "'Äpfel'", "'apfel2'", "'z'", "'ö'", "'O2'"],
    ),
}


EVERYWHERE = ("bigint unsigned", "enum", "varbinary", "unicode_ci")
"""Of these both families are asked by default."""


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        (kind, family)
        for family in FAMILY
        for kind in KEYS
        if family == "mariadb" or kind in EVERYWHERE or os.environ.get("HEADWATER_SOAK")
    ],
)
def test_keys_are_cut_and_placed_in_the_order_of_the_server(
    mysql_servers: Callable[[str], MariaDbServer], family: str, kind: str
) -> None:
    server = mysql_servers(family)
    with server.fresh():
        server.execute("CREATE DATABASE shop")
        _cut_and_place(server, kind)


def _cut_and_place(server: MariaDbServer, kind: str) -> None:
    type_sql, values = KEYS[kind]
    server.execute(
        f"CREATE TABLE shop.keyed (k {type_sql}, n INT, PRIMARY KEY (k, n))",
        *(f"INSERT INTO shop.keyed VALUES ({value}, 1), ({value}, 2)" for value in values),
    )
    table = described(server, "keyed")
    source = MySqlSnapshots(server.dsn)
    ordered = read(server, table)
    assert len(ordered) == 2 * len(values)
    with source.export() as snapshot:
        plan = snapshot.plan(table, split_rows=3)
        parts = [read(server, table, split.range) for split in plan.splits]
        assert list(itertools.chain(*parts)) == ordered
        assert [len(part) for part in parts[:-1]] == [3] * (-(-len(ordered) // 3) - 1)
        end = snapshot.page_end(table, SplitKind.KEY, ALL, 3)
        assert end is not None
        assert read(server, table, KeyRange(None, end)) == ordered[:3]
        assert snapshot.page_end(table, SplitKind.KEY, KeyRange(end), len(ordered) - 3) is None
    cuts = [split.range.end for split in plan.splits[:-1] if split.range.end is not None]
    more = {cut for one in cuts[:2] for cut in (Cut(one.values[:1]), Cut(one.values, after=True))}
    keys = pa.RecordBatch.from_pylist(ordered, schema=table.schema).select(["k", "n"])
    order = source.order(table)
    for one in more:
        below = len(read(server, table, KeyRange(end=one)))
        assert order.places(keys, [one]).tolist() == [0] * below + [1] * (len(ordered) - below), one
    whole = [split.range.end for split in plan.splits[:-1] if split.range.end is not None]
    expected = list(itertools.chain(*([n] * 3 for n in range(len(plan.splits)))))[: len(ordered)]
    assert order.places(keys, whole).tolist() == expected


def test_a_read_that_goes_on_after_a_row_begins_with_the_next(mariadb: MariaDbServer) -> None:
    for kind in ("decimal", "bit", "timestamp", "set", "binary", "general_ci"):
        type_sql, values = KEYS[kind]
        mariadb.execute(
            "DROP TABLE IF EXISTS shop.again",
            f"CREATE TABLE shop.again (k {type_sql} PRIMARY KEY, v INT)",
            *(f"INSERT INTO shop.again VALUES ({value}, 1)" for value in values),
        )
        table = described(mariadb, "again")
        rows = read(mariadb, table)
        with closing(connect(Dsn(mariadb.dsn))) as session:
            key = read_key(read_table(session, TableName("shop", "again")), table)
        place = len(rows) // 2
        assert read(mariadb, table, KeyRange(cut_after(key, [rows[place]["k"]]))) == rows[place + 1 :], kind


def test_skewed_keys_are_cut_where_the_rows_are(mariadb: MariaDbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "HALVED_ROWS", 100)
    mariadb.execute(
        "CREATE TABLE shop.skew (k BIGINT, n INT, v VARCHAR(200), PRIMARY KEY (k, n))",
        "INSERT INTO shop.skew SELECT seq, 0, REPEAT('x', 150) FROM shop.seq_1_to_4000",
        "INSERT INTO shop.skew SELECT 1000000000000 + seq * 7, 0, 'far' FROM shop.seq_1_to_2000",
        "INSERT INTO shop.skew SELECT -9223372036854775808 + CAST(seq AS SIGNED), 0, 'low' FROM shop.seq_1_to_50",
        "INSERT INTO shop.skew SELECT 777777777, seq, 'same' FROM shop.seq_1_to_3000",
        "ANALYZE TABLE shop.skew",
    )
    table = described(mariadb, "skew")
    with MySqlSnapshots(mariadb.dsn).export() as snapshot:
        plan = snapshot.plan(table, split_rows=500)
    sizes = [len(read(mariadb, table, split.range)) for split in plan.splits]
    assert sum(sizes) == 9050
    large = [size for size, split in zip(sizes, plan.splits, strict=True) if size > 1500]
    assert large == [3000]  # one value of the first column: pages
    assert [split.rows for split, size in zip(plan.splits, sizes, strict=True) if size == 3000] == [-1]
    assert 8 <= len(plan.splits) <= 60, plan.why


def test_a_table_of_many_splits_is_planned_with_few_questions(
    mariadb: MariaDbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly beyond that: no row is lost, and no part has more than a few splits' worth."""
    monkeypatch.setattr(splitting, "HALVED_ROWS", 100)
    monkeypatch.setattr(splitting, "MOST_HALVED", 30)
    asked: list[str] = []

    def noting(session: Connection, query: str) -> list[dict[str, Any]]:
        asked.append(query)
        return ask(session, query)

    monkeypatch.setattr(splitting, "ask", noting)
    mariadb.execute(
        "CREATE TABLE shop.many (k BIGINT PRIMARY KEY, v VARCHAR(200))",
        "INSERT INTO shop.many SELECT IF(seq > 3000, 1000000000 + seq * 1000, seq), 'x' FROM shop.seq_1_to_6000",
        "ANALYZE TABLE shop.many",
    )
    table = described(mariadb, "many")
    with MySqlSnapshots(mariadb.dsn).export() as snapshot:
        plan = snapshot.plan(table, split_rows=100)
    assert 10 < sum(query.startswith("EXPLAIN") for query in asked) <= 60
    assert 40 < len(plan.splits) < 100
    sizes = [len(read(mariadb, table, split.range)) for split in plan.splits]
    assert sum(sizes) == 6000
    assert max(sizes) < 600


def test_a_very_large_table_with_another_key_is_handed_out_in_pages(
    mariadb: MariaDbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "HALVED_ROWS", 10)
    monkeypatch.setattr(splitting, "STEPPED_ROWS", 100)
    mariadb.execute(
        "CREATE TABLE shop.texts (k VARCHAR(20) PRIMARY KEY)",
        "INSERT INTO shop.texts SELECT CONCAT('k', seq) FROM shop.seq_1_to_500",
        "ANALYZE TABLE shop.texts",
    )
    table = described(mariadb, "texts")
    with MySqlSnapshots(mariadb.dsn).export() as snapshot:
        assert [(split.range, split.rows) for split in snapshot.plan(table, split_rows=50).splits] == [(ALL, -1)]
        (whole,) = snapshot.plan(table, split_rows=1 << 40).splits
        assert whole.range == ALL
        assert whole.rows > 400


# -- what it is ------------------------------------------------------------------------------------------------------


def test_a_mark_has_what_was_committed_before_it(server: MariaDbServer) -> None:
    source = open_snapshots(server.dsn)
    assert isinstance(source, UnsharedSnapshots)
    with closing(source.export()) as before:
        server.execute("CREATE TABLE shop.t (id INT PRIMARY KEY)", "INSERT INTO shop.t VALUES (1)")
        with closing(source.export()) as after:
            assert before.mark.high < after.mark.low
            assert mark_from_json(after.name) == after.mark
            table = described(server, "t")
            with closing(source.open_parts(table, [ALL])) as part:
                assert part.high == after.mark.high
                server.execute("INSERT INTO shop.t VALUES (2)")
                assert rows_of(part.batches()) == [{"id": 1}]


def test_a_table_that_is_not_what_it_was_is_planned_anew(server: MariaDbServer) -> None:
    server.execute("CREATE TABLE shop.t (id INT PRIMARY KEY, v INT)")
    table = described(server, "t")
    for change in ("MODIFY v BIGINT", "DROP COLUMN v", "RENAME TO shop.u"):
        server.execute(f"ALTER TABLE shop.t {change}")
        with pytest.raises(SnapshotExpired, match=r"Table shop\.t"):
            read(server, table)


def test_ranges_that_people_name_are_read_or_refused(server: MariaDbServer) -> None:
    server.execute("CREATE TABLE shop.t (id INT, e ENUM('b', 'a'), PRIMARY KEY (id, e))")
    table, source = described(server, "t"), MySqlSnapshots(server.dsn)
    assert source.key_range(table, KeyRange(Cut(("+5", "a")), Cut(("7",)))) == KeyRange(Cut(("5", "2")), Cut(("7",)))
    for wrong in (Cut(("x",)), Cut(("1", "c")), Cut(("1", "a", "2"))):
        with pytest.raises(InvalidRange):
            source.key_range(table, KeyRange(wrong))
    with pytest.raises(InvalidRange, match="ends before it begins"):
        source.key_range(table, KeyRange(Cut(("5",)), Cut(("4",))))
    with source.export() as snapshot, pytest.raises(UnsupportedTable, match="order of its key"):
        snapshot.plan(table, split_rows=10, kind=SplitKind.HEAP)


def test_random_rows_in_random_ranges_are_those_of_the_server(mariadb: MariaDbServer) -> None:
    rng = random.Random(7)
    mariadb.execute("CREATE TABLE shop.r (a INT, b VARCHAR(5), v INT, PRIMARY KEY (a, b))")
    values: Sequence[str] = [f"({rng.randrange(5)}, '{rng.choice('aAbBzZ')}{n % 7}', {n})" for n in range(100)]
    mariadb.execute(f"INSERT IGNORE INTO shop.r VALUES {', '.join(values)}")
    table = described(mariadb, "r")
    everything = read(mariadb, table)
    for _ in range(20):
        low, high = sorted(rng.sample(range(len(everything)), 2))
        part = KeyRange(*(Cut((str(everything[n]["a"]), everything[n]["b"])) for n in (low, high)))
        assert read(mariadb, table, part) == everything[low:high]
