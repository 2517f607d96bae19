"""Types of SQL Server: what they become, how they are asked for, and names."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.errors import InputError
from headwater.sources.errors import InvalidKey, SpecialValue, UndecodableValue
from headwater.sources.sqlserver.catalog import CatalogColumn, CatalogTable
from headwater.sources.sqlserver.names import TableName
from headwater.sources.sqlserver.source import constant, defaults_of
from headwater.sources.sqlserver.types import SqlType, Ticks, keeps_values, selected, source_column
from headwater.sources.sqlserver.values import column_of
from headwater.sources.table import SourceTable, SpecialValues


@pytest.mark.parametrize(
    ("told", "text", "arrow"),
    [
        (("decimal", 17, 38, 10), "decimal(38,10)", pa.decimal128(38, 10)),
        (("nvarchar", -1, 0, 0), "nvarchar(max)", pa.string()),
        (("nvarchar", 80, 0, 0), "nvarchar(40)", pa.string()),
        (("varbinary", 8, 0, 0), "varbinary(8)", pa.binary()),
        (("datetime2", 8, 27, 7), "datetime2(7)", pa.timestamp("us")),
        (("datetimeoffset", 8, 27, 3), "datetimeoffset(3)", pa.timestamp("us", tz="UTC")),
        (("time", 5, 16, 7), "time(7)", pa.time64("us")),
        (("tinyint", 1, 3, 0), "tinyint", pa.uint8()),
        (("timestamp", 8, 0, 0), "timestamp", pa.binary()),
        (("geography", -1, 0, 0), "geography", pa.string()),
    ],
)
def test_a_type_of_the_catalog_is_kept_as_text_and_read_again(
    told: tuple[str, int, int, int], text: str, arrow: pa.DataType
) -> None:
    kind = SqlType.of_catalog(*told)
    assert str(kind) == text
    assert SqlType.parse(text) == kind
    assert kind.arrow(Ticks.REFUSE) == arrow


def test_times_are_asked_for_as_numbers_and_texts_in_unicode() -> None:
    assert selected(source_column("at", SqlType("datetime2", 3), 1)).startswith("DATEDIFF_BIG(microsecond, ")
    assert "% 1000 / 100" in selected(source_column("at", SqlType("datetime2", 7), 1))
    assert selected(source_column("a", SqlType("varchar", 20), 1)) == "CONVERT(nvarchar(20), [a])"
    assert selected(source_column("a", SqlType("varchar", 8000), 1)) == "CONVERT(nvarchar(max), [a])"
    assert selected(source_column("a]b", SqlType("bigint"), 1)) == "[a]]b]"
    text = source_column("at", SqlType("datetimeoffset", 7), 1, special_values=SpecialValues.TEXT)
    assert selected(text) == "CONVERT(varchar(40), [at], 121)"
    floats = source_column("f", SqlType("float"), 1, special_values=SpecialValues.TEXT)
    assert floats.type == pa.float64()


def test_values_that_are_none_of_their_type_are_refused_without_being_shown() -> None:
    column = source_column("n", SqlType("decimal", 5, 2), 1)
    table = SourceTable("shop", "t", (column,), ("n",), 1)
    with pytest.raises(UndecodableValue) as caught:
        column_of(table, column, pa.array(["secret"]), Ticks.REFUSE)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidKey):
        column_of(table, column, pa.array([None], pa.string()), Ticks.REFUSE)


def test_nanoseconds_that_do_not_fit_are_special() -> None:
    key, column = (
        source_column("id", SqlType("int"), 1),
        source_column("at", SqlType("datetime2", 7), 2, ticks=Ticks.NS),
    )
    table = SourceTable("shop", "t", (key, column), ("id",), 1)
    assert column_of(table, column, pa.array([17]), Ticks.NS).cast(pa.int64()).to_pylist() == [1700]
    with pytest.raises(SpecialValue, match="before 1677"):
        column_of(table, column, pa.array([2_000_000_000_000_000_000]), Ticks.NS)


@pytest.mark.parametrize(
    ("definition", "kind", "value"),
    [
        ("((0))", pa.int32(), 0),
        ("(N'it''s')", pa.string(), "it's"),
        ("((1))", pa.bool_(), True),
        ("('2024-01-01')", pa.date32(), "2024-01-01"),
        ("(getdate())", pa.timestamp("us"), None),
        ("('x')", pa.int32(), None),
    ],
)
def test_defaults_that_are_constants_are_read(definition: str, kind: pa.DataType, value: object) -> None:
    found = constant(definition, kind)
    assert (None if found is None else str(found[0].as_py())) == (None if value is None else str(value))


def test_defaults_that_older_rows_have_are_known_only_of_constants_that_must_be_there() -> None:
    def catalog(number: int, name: str, default: str | None, *, nullable: bool) -> CatalogColumn:
        return CatalogColumn(number, name, SqlType("int"), nullable, False, None, default)

    columns = (
        catalog(1, "known", "((5))", nullable=False),
        catalog(2, "perhaps", "((5))", nullable=True),
        catalog(3, "computed", "(checksum(newid()))", nullable=False),
        catalog(4, "none", None, nullable=True),
    )
    table = CatalogTable(TableName("shop", "orders"), 1, True, False, columns, ("known",), "PK")
    added = [source_column(column.name, column.type, column.number) for column in columns]
    found = defaults_of(table, added)
    assert found is not None
    assert found.to_pylist() == [{"known": 5, "perhaps": None, "computed": None}]
    assert defaults_of(table, added[3:]) is None
    assert defaults_of(None, added) is None


@pytest.mark.parametrize("text", ["", "a.b.c", "a b", "[a", "a."])
def test_texts_that_are_no_names_of_tables_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        TableName.parse(text)


def test_names_are_quoted_as_logs_have_them() -> None:
    assert str(TableName.parse("orders")) == "dbo.orders"
    assert str(TableName.parse('[my shop]."Or.ders"')) == '"my shop"."Or.ders"'
    assert TableName.parse("[a]]b].c").sql == "[a]]b].[c]"


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        ("int", "bigint", True),
        ("bigint", "int", False),
        ("decimal(10,2)", "numeric(12,2)", True),
        ("decimal(10,2)", "decimal(10,4)", False),
        ("datetime2(3)", "datetime2(7)", True),
        ("datetime2(7)", "datetime2(3)", False),
        ("datetime", "datetime2(3)", False),
        ("varchar(9)", "nvarchar(max)", True),
        ("nvarchar(9)", "varchar(9)", False),
        ("char(9)", "char(10)", False),
        ("float", "varchar(40)", False),
    ],
)
def test_an_alter_column_keeps_stored_values_or_may_change_them(old: str, new: str, is_kept: bool) -> None:
    assert keeps_values(SqlType.parse(old), SqlType.parse(new)) is is_kept
