"""Text to typed values: each type at its edges, special values under each policy, keys, and what is no value at all.

Whatever comes by csv must be the same, so each test of values runs both ways.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sources.errors import InvalidKey, SourceProtocolError, SpecialValue, UndecodableValue
from headwater.sources.postgres.convert import convert_column, convert_columns
from headwater.sources.postgres.csv import read_csv
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

UTC = dt.UTC
FIRST, LAST = dt.datetime.min.replace(tzinfo=UTC), dt.datetime.max.replace(tzinfo=UTC)
TIMESTAMP, TIMESTAMPTZ = pa.timestamp("us"), pa.timestamp("us", tz="UTC")


def naive(moment: dt.datetime) -> dt.datetime:
    return moment.replace(tzinfo=None)


def table_of(
    kind: pa.DataType, source_type: str = "x", policy: SpecialValues = SpecialValues.STOP, **options: Any
) -> SourceTable:
    """A table of a key and a column ``v`` of *kind*."""
    key = SourceColumn("id", pa.int64(), "bigint", 1, nullable=False)
    value = SourceColumn("v", kind, source_type, 2, special_values=policy, **options)
    return SourceTable("public", "t", (key, value), ("id",))


def from_stream(table: SourceTable, texts: list[str | None]) -> pa.Array:
    """As the stream gives them, once with a slice that does not begin at the front."""
    column = table.columns[-1]
    whole = convert_column(table, column, pa.array(texts, pa.string()))
    sliced = pa.array(["rubbish", *texts, "rubbish"], pa.string()).slice(1, len(texts))
    assert str(convert_column(table, column, sliced).to_pylist()) == str(whole.to_pylist())
    return whole


def copied(texts: list[str | None]) -> bytes:
    """Text as COPY writes csv: quoted where it must be, NULL as nothing."""
    lines = []
    for number, text in enumerate(texts):
        if text is not None and (text == "" or any(sign in text for sign in ',"\r\n')):
            text = '"' + text.replace('"', '""') + '"'
        lines.append(f"{number},{text or ''}\n")
    return "".join(lines).encode()


def from_snapshot(table: SourceTable, texts: list[str | None]) -> pa.Array:
    batches = read_csv(table, copied(texts))
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(table.schema, check_metadata=True)
    return pa.concat_arrays([batch.column("v") for batch in batches])


Read = Callable[[SourceTable, list[str | None]], pa.Array]


@pytest.fixture(params=[from_stream, from_snapshot])
def read(request: pytest.FixtureRequest) -> Read:
    way: Read = request.param
    return way


@pytest.mark.parametrize(
    ("kind", "texts", "values"),
    [
        (pa.bool_(), ["t", "f", None], [True, False, None]),
        (pa.int16(), ["-32768", "32767", "0"], [-32768, 32767, 0]),
        (pa.int32(), ["-2147483648", "2147483647"], [-(2**31), 2**31 - 1]),
        (pa.int64(), ["-9223372036854775808", "9223372036854775807", None], [-(2**63), 2**63 - 1, None]),
        (pa.int64(), ["4294967295"], [4294967295]),
        (pa.float64(), ["1.7976931348623157e+308", "5e-324", "0.1"], [1.7976931348623157e308, 5e-324, 0.1]),
        (pa.float32(), ["3.4028235e+38", "1e-45", None], [3.4028234663852886e38, 1.401298464324817e-45, None]),
        (
            pa.decimal128(18, 4),
            ["99999999999999.9999", "-0.0001", "0.0000", None],
            [Decimal("99999999999999.9999"), Decimal("-0.0001"), Decimal("0.0000"), None],
        ),
        (pa.decimal128(38, 0), ["9" * 38, "-" + "9" * 38], [Decimal("9" * 38), Decimal("-" + "9" * 38)]),
        (pa.decimal128(7, 0), ["12300", "-100"], [Decimal(12300), Decimal(-100)]),
        (pa.decimal128(5, 5), ["0.00123"], [Decimal("0.00123")]),
        (pa.decimal256(76, 2), ["9" * 74 + ".99", None], [Decimal("9" * 74 + ".99"), None]),
        (pa.date32(), ["0001-01-01", "9999-12-31", "2024-02-29"], [dt.date.min, dt.date.max, dt.date(2024, 2, 29)]),
        (
            pa.time64("us"),
            ["00:00:00", "23:59:59.999999", "12:34:56.1", None],
            [dt.time(), dt.time.max, dt.time(12, 34, 56, 100_000), None],
        ),
        (
            TIMESTAMP,
            ["0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "1969-12-31 23:59:59.5", None],
            [naive(FIRST), naive(LAST), naive(dt.datetime(1969, 12, 31, 23, 59, 59, 500_000, UTC)), None],
        ),
        (
            TIMESTAMPTZ,
            ["2024-01-01 00:00:00.123456+00", "0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00", None],
            [
                dt.datetime(2024, 1, 1, microsecond=123456, tzinfo=UTC),
                FIRST,
                LAST,
                None,
            ],
        ),
        (pa.string(), ["", None, "größe", ' "quoted", \\ and\nnewline', "NULL"], None),
        (pa.string(), ['{"a": 1.10}', "1 day -00:00:01", "NaN", "infinity", "(1,2)", "[1,2)"], None),
        (pa.binary(), ["\\x", "\\x00ff", None, "\\xDEADbeef"], [b"", b"\0\xff", None, b"\xde\xad\xbe\xef"]),
        (pa.binary(), [None, None], [None, None]),
        (pa.list_(pa.int32()), ["{}", "{1,NULL,-3}", None], [[], [1, None, -3], None]),
        (pa.list_(pa.string()), ['{"a,b",NULL,"NULL","","q\\"\\\\"}'], [["a,b", None, "NULL", "", 'q"\\']]),
        (pa.list_(pa.bool_()), ["{t,f,NULL}"], [[True, False, None]]),
        (pa.list_(pa.binary()), ['{"\\\\x00ff",NULL}'], [[b"\0\xff", None]]),
        (pa.list_(pa.decimal128(10, 2)), ["{1.50,-0.01}"], [[Decimal("1.50"), Decimal("-0.01")]]),
        (
            pa.list_(TIMESTAMPTZ),
            ['{"2024-01-01 00:00:00+00"}', None],
            [[dt.datetime(2024, 1, 1, tzinfo=UTC)], None],
        ),
        (pa.list_(pa.list_(pa.int32())), ['{"{1,2}",NULL,"{}"}'], [[[1, 2], None, []]]),
    ],
)
def test_values_are_exact(read: Read, kind: pa.DataType, texts: list[str | None], values: list[Any] | None) -> None:
    typed = read(table_of(kind), texts)
    typed.validate(full=True)
    assert typed.type == kind
    assert typed.to_pylist() == (texts if values is None else values)


@pytest.mark.parametrize(("kind", "form"), [(pa.float32(), "<f"), (pa.float64(), "<d")])
def test_numbers_that_are_none_and_zeros_with_a_sign_are_kept(read: Read, kind: pa.DataType, form: str) -> None:
    values = read(table_of(kind), ["NaN", "Infinity", "-Infinity", "-0"]).to_pylist()
    assert math.isnan(values[0])
    assert values[1:3] == [math.inf, -math.inf]
    assert struct.pack(form, values[3]) == struct.pack(form, -0.0)


def test_no_rows_are_no_rows(read: Read) -> None:
    for kind in (pa.int64(), pa.binary(), pa.string(), pa.time64("us"), pa.list_(pa.int32()), pa.bool_()):
        table = table_of(kind)
        assert len(convert_column(table, table.columns[1], pa.array([], pa.string()))) == 0
        assert read_csv(table, b"") == []


SPECIAL = [
    (pa.decimal128(18, 4), "NaN", "1.0000"),
    (pa.decimal128(18, 4), "Infinity", "1.0000"),
    (pa.decimal128(18, 4), "-Infinity", "1.0000"),
    (pa.decimal256(60, 4), "NaN", "1.0000"),
    (pa.date32(), "infinity", "2024-01-01"),
    (pa.date32(), "-infinity", "2024-01-01"),
    (pa.date32(), "0044-03-15 BC", "2024-01-01"),
    (pa.date32(), "10000-01-01", "2024-01-01"),
    (pa.date32(), "5874897-12-31", "2024-01-01"),
    (TIMESTAMP, "infinity", "2024-01-01 00:00:00"),
    (TIMESTAMP, "4713-01-01 00:00:00 BC", "2024-01-01 00:00:00"),
    (TIMESTAMP, "294276-12-31 23:59:59.999999", "2024-01-01 00:00:00"),
    (TIMESTAMPTZ, "-infinity", "2024-01-01 00:00:00+00"),
    (TIMESTAMPTZ, "0001-12-31 23:59:59+00 BC", "2024-01-01 00:00:00+00"),
    (TIMESTAMPTZ, "10000-01-01 00:00:00+00", "2024-01-01 00:00:00+00"),
    (pa.time64("us"), "24:00:00", "12:00:00"),
    (pa.list_(pa.int32()), "{{1,2},{3,4}}", "{1}"),
    (pa.list_(pa.int32()), "[2:3]={1,2}", "{1}"),
]


@pytest.mark.parametrize(("kind", "special", "usual"), SPECIAL)
def test_a_special_value_is_an_error_that_names_the_option(
    read: Read, kind: pa.DataType, special: str, usual: str
) -> None:
    with pytest.raises(SpecialValue) as caught:
        read(table_of(kind, "its type"), [usual, special])
    text = str(caught.value)
    assert all(part in text for part in ("public.t", "'v'", "its type", "special_values of public.t.v to text"))
    assert special not in text.replace(caught.value.values, "")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(("kind", "special", "usual"), SPECIAL)
def test_a_special_value_is_null_where_that_is_the_policy(
    read: Read, kind: pa.DataType, special: str, usual: str
) -> None:
    table = table_of(kind, policy=SpecialValues.NULL)
    values = read(table, [usual, special, None, usual]).to_pylist()
    (expected,) = set(map(str, from_stream(table, [usual]).to_pylist()))
    assert [None if value is None else str(value) for value in values] == [expected, None, None, expected]


@pytest.mark.parametrize(("kind", "special", "usual"), SPECIAL)
def test_a_special_value_is_kept_where_the_column_is_text(
    read: Read, kind: pa.DataType, special: str, usual: str
) -> None:
    table = table_of(pa.string(), policy=SpecialValues.TEXT)
    assert read(table, [usual, special]).to_pylist() == [usual, special]


def test_special_elements_of_arrays_follow_the_policy(read: Read) -> None:
    with pytest.raises(SpecialValue):
        read(table_of(pa.list_(pa.date32())), ["{infinity}"])
    null = table_of(pa.list_(pa.date32()), policy=SpecialValues.NULL)
    assert read(null, ["{2024-01-01,infinity}", '{"0044-03-15 BC"}']).to_pylist() == [
        [dt.date(2024, 1, 1), None],
        [None],
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.bool_(), "maybe"),
        (pa.bool_(), "true"),
        (pa.int16(), "32768"),
        (pa.int32(), "1.5"),
        (pa.int64(), "secret"),
        (pa.float64(), "secret"),
        (pa.decimal128(18, 4), "1.23456"),
        (pa.decimal128(18, 4), "999999999999999"),
        (pa.decimal256(60, 4), "secret"),
        (pa.date32(), "2024-02-30"),
        (pa.date32(), "01/02/2024"),
        (pa.time64("us"), "25:00:00"),
        (TIMESTAMP, "2024-01-01 00:00:00+00"),
        (TIMESTAMPTZ, "2024-01-01 00:00:00"),
        (pa.binary(), "\\x0"),
        (pa.binary(), "\\xgg"),
        (pa.binary(), "escape\\000"),
        (pa.list_(pa.int32()), "1,2"),
        (pa.list_(pa.int32()), "{1,"),
        (pa.list_(pa.int32()), "{secret}"),
    ],
)
@pytest.mark.parametrize("policy", [SpecialValues.STOP, SpecialValues.NULL])
def test_what_is_no_value_of_the_type_is_an_error_under_every_policy(
    read: Read, kind: pa.DataType, text: str, policy: SpecialValues
) -> None:
    with pytest.raises(UndecodableValue) as caught:
        read(table_of(kind, "its type", policy), [None, text])
    assert all(part in str(caught.value) for part in ("public.t", "'v'", "its type"))
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_key_is_never_null_and_never_undecodable() -> None:
    """Scenario C23: a null or undecodable key is an error; other columns may be null."""
    table = table_of(pa.date32())
    assert convert_columns(table, [pa.array(["1"]), pa.array([None], pa.string())])[1].to_pylist() == [None]
    for key in (None, "secret"):
        with pytest.raises(InvalidKey, match="'id'") as caught:
            convert_column(table, table.columns[0], pa.array(["1", key], pa.string()))
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidKey):
        read_csv(table, b"1,2024-01-01\n,2024-01-01\n")


def test_a_special_key_that_the_policy_makes_null_is_an_error() -> None:
    """Scenario C23."""
    key = SourceColumn("d", pa.date32(), "date", 1, nullable=False, special_values=SpecialValues.NULL)
    table = SourceTable("public", "t", (key,), ("d",))
    with pytest.raises(InvalidKey):
        convert_column(table, key, pa.array(["infinity"]))


def test_where_all_columns_are_the_key_they_may_be_null() -> None:
    column = SourceColumn("v", pa.int64(), "bigint", 1)
    table = SourceTable("public", "t", (column,), ("v",))
    assert convert_column(table, column, pa.array(["1", None])).to_pylist() == [1, None]
    assert read_csv(table, b"1\n\n3\n")[0].column(0).to_pylist() == [1, None, 3]


@pytest.mark.parametrize("source_type", ["vector(3)", "public.vector(3)", "halfvec(3)"])
def test_a_vector_has_as_many_numbers_as_its_type_says(read: Read, source_type: str) -> None:
    """Scenario C25: the text is kept, the dimension is checked."""
    table = table_of(pa.string(), source_type)
    assert read(table, ["[1,2.5,-3e-05]", None]).to_pylist() == ["[1,2.5,-3e-05]", None]
    for wrong in ("[1,2]", "[1,2,3,4]"):
        with pytest.raises(UndecodableValue, match="dimensions"):
            read(table, ["[1,2,3]", wrong])


def test_a_vector_without_a_dimension_may_have_any(read: Read) -> None:
    """Scenario C25."""
    assert read(table_of(pa.string(), "vector"), ["[1]", "[1,2]"]).to_pylist() == ["[1]", "[1,2]"]


def test_csv_tells_null_from_empty_text() -> None:
    table = table_of(pa.string())
    (batch,) = read_csv(table, b'1,\n2,""\n3,"a\nb"\n4,"say ""hi"""\n5,NULL\n')
    assert batch.column("v").to_pylist() == [None, "", "a\nb", 'say "hi"', "NULL"]


def test_csv_rows_larger_than_any_block_are_read() -> None:
    large = "x" * (3 << 20)
    (batch,) = read_csv(table_of(pa.string()), f"1,{large}\n2,b\n".encode())
    assert batch.column("v").to_pylist() == [large, "b"]


@pytest.mark.parametrize("data", [b"1\n", b"1,2,3\n", b"1,a\n2\n", b'1,"a\n'])
def test_what_is_no_csv_of_the_table_is_refused_without_showing_it(data: bytes) -> None:
    with pytest.raises((SourceProtocolError, UndecodableValue)) as caught:
        read_csv(table_of(pa.int64()), data)
    assert caught.value.__context__ is None


def test_csv_keeps_a_byte_order_mark_that_a_value_begins_with() -> None:
    mark = "\ufeff"
    table = SourceTable("public", "t", (SourceColumn("v", pa.string(), "text", 1),), ("v",))
    for value in (mark, mark + "a", mark + mark, mark + ","):
        assert from_snapshot_line(table, value) == value


def from_snapshot_line(table: SourceTable, value: str) -> str:
    text = f'"{value}"' if "," in value else value
    (batch,) = read_csv(table, f"{text}\n".encode())
    read: str = batch.column("v")[0].as_py()
    return read


def test_csv_of_some_columns_is_read_in_their_order() -> None:
    table = table_of(pa.date32())
    (batch,) = read_csv(table, b"2024-01-01\n\n", [table.column("v")])
    assert batch.to_pydict() == {"v": [dt.date(2024, 1, 1), None]}
