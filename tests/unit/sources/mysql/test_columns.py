"""Types and defaults as the catalog writes them, and the address of a server."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sources.errors import InvalidDsn
from headwater.sources.mysql.catalog import CatalogColumn
from headwater.sources.mysql.connection import Dsn, Version
from headwater.sources.mysql.defaults import constant_default
from headwater.sources.mysql.types import MySqlType, arrow_type, source_column, source_type
from headwater.sources.table import SpecialValues


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tinyint(4)", pa.int8()),
        ("tinyint(1)", pa.int8()),
        ("tinyint(3) unsigned", pa.uint8()),
        ("smallint unsigned", pa.uint16()),
        ("mediumint(9)", pa.int32()),
        ("int(10) unsigned zerofill", pa.uint32()),
        ("bigint(20) unsigned", pa.uint64()),
        ("decimal(10,0)", pa.decimal128(10, 0)),
        ("decimal(65,30)", pa.decimal256(65, 30)),
        ("float", pa.float32()),
        ("double(8,2)", pa.float64()),
        ("bit(1)", pa.bool_()),
        ("bit(9)", pa.binary()),
        ("year(4)", pa.int16()),
        ("date", pa.date32()),
        ("time(3)", pa.time64("us")),
        ("datetime(6)", pa.timestamp("us")),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("varchar(20)", pa.string()),
        ("enum('a','b)c')", pa.string()),
        ("set('x','y')", pa.string()),
        ("json", pa.string()),
        ("uuid", pa.string()),
        ("varbinary(10)", pa.binary()),
        ("longblob", pa.binary()),
        ("point", pa.binary()),
        ("vector(3)", pa.binary()),
        ("something new", pa.string()),
    ],
)
def test_a_type_takes_this_arrow_type(text: str, expected: pa.DataType) -> None:
    assert arrow_type(MySqlType.parse(text)) == expected
    assert arrow_type(MySqlType.parse(source_type(text))) == expected


def test_a_display_width_says_nothing_except_that_of_tinyint1() -> None:
    assert [source_type(text) for text in ("int(11)", "int", "tinyint(1)", "tinyint(3) unsigned")] == [
        "int",
        "int",
        "tinyint(1)",
        "tinyint unsigned",
    ]
    assert source_column("f", "tinyint(1)", 1, tinyint1_is_boolean=True).type == pa.bool_()
    assert source_column("f", "date", 1, special_values=SpecialValues.TEXT).type == pa.string()


def told(kind: str, default: str | None, *, nullable: bool = True, extra: str = "") -> CatalogColumn:
    return CatalogColumn(1, "c", kind, nullable, default, extra, None, None)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (told("int", "7"), 7),
        (told("int", None), None),
        (told("int(11)", "NULL"), None),
        (told("int", None, nullable=False), 0),
        (told("bigint unsigned", "18446744073709551615"), 18446744073709551615),
        (told("varchar(20)", "it's"), "it's"),
        (told("varchar(20)", "'it''s'"), "it's"),
        (told("varchar(20)", None, nullable=False), ""),
        (told("decimal(8,2)", "1.5"), Decimal("1.50")),
        (told("enum('x','y')", None, nullable=False), "x"),
        (told("date", "'2026-01-02'"), date(2026, 1, 2)),
        (told("datetime", "2026-01-02 03:04:05"), datetime.fromisoformat("2026-01-02 03:04:05")),
        (told("binary(3)", "a"), b"a\0\0"),
        (told("datetime", "CURRENT_TIMESTAMP", extra="DEFAULT_GENERATED"), None),
        (told("timestamp", "current_timestamp()"), None),
        (told("int", "5", extra="VIRTUAL GENERATED"), None),
        (told("int", None, nullable=False, extra="auto_increment"), None),
        (told("timestamp", "2026-01-02 03:04:05"), None),
        (told("bit(4)", "b'101'"), b"\x05"),
        (told("bit(12)", None, nullable=False), b"\0\0"),
        (told("binary(3)", "0x610000"), None),
        (told("decimal(8,2)", "1.555"), None),
        (told("year", "26"), None),
        (told("year", "'0'"), None),
        (told("year", "2026"), 2026),
        (told("varchar(3)", "'ab  '"), None),
        (told("char(5)", "'a '"), "a"),
        (told("enum('x','y')", "z"), None),
        (told("date", "0000-00-00"), None),
    ],
)
def test_rows_from_before_a_column_have_its_constant_default(column: CatalogColumn, expected: Any) -> None:
    value = constant_default(column, source_column("c", column.type_text, 1))
    assert (None if value is None else value.to_pylist()[0]) == expected


def test_an_address_never_shows_its_password() -> None:
    dsn = Dsn("mariadb://cdc:p%40ss@db.example/shop?tinyint1=boolean")
    assert (dsn.host, dsn.port, dsn.user, dsn.database) == ("db.example", 3306, "cdc", "shop")
    assert dsn.tinyint1_is_boolean
    assert dsn.parameters()["password"] == "p@ss"
    assert "p@ss" not in f"{dsn} {dsn!r} {dsn.hide('refused p@ss')}"


@pytest.mark.parametrize(
    "text", ["postgresql://x/y", "mysql://h/d?wrong=1", "mysql://h/d?tinyint1=maybe", "mysql://h:x/"]
)
def test_other_addresses_are_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(InvalidDsn) as raised:
        Dsn(text)
    assert text not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.7.4-2", "MySQL 9.7.4"),
        ("8.0.36-0ubuntu0.22.04.1", "MySQL 8.0.36"),
        ("10.11.19-MariaDB-0+deb12u1-log", "MariaDB 10.11.19"),
        ("5.5.5-10.6.7-MariaDB", "MariaDB 10.6.7"),
    ],
)
def test_a_version_is_read_as_servers_write_it(text: str, expected: str) -> None:
    assert str(Version.parse(text)) == expected
