"""Which Spark type a column takes, and that its values stay what they are."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as st

from headwater.sources.table import SourceColumn, SourceTable
from headwater.spark.errors import UnsupportedSchema
from headwater.spark.types import (
    ROWS_AT_LEAST,
    ROWS_AT_MOST,
    Shape,
    arrow_schema,
    converted,
    is_exact,
    rebatched,
    spark_schema,
    spark_type,
)

_NOON = dt.datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=dt.UTC)
CASES: list[tuple[pa.DataType, str, Any, Any]] = [
    (pa.bool_(), "boolean", True, True),
    (pa.int16(), "smallint", -(2**15), -(2**15)),
    (pa.int64(), "bigint", 2**63 - 1, 2**63 - 1),
    (pa.uint32(), "bigint", 2**32 - 1, 2**32 - 1),
    (pa.uint64(), "decimal(20,0)", 2**64 - 1, Decimal(2**64 - 1)),
    (pa.float32(), "float", 0.5, 0.5),
    (pa.decimal128(38, 10), "decimal(38,10)", Decimal("1.5"), Decimal("1.5000000000")),
    (pa.decimal128(5, -2), "decimal(7,0)", Decimal("1200"), Decimal("1200")),
    (pa.decimal256(50, 12), "string", Decimal("0.0000000001"), "0.000000000100"),
    (pa.decimal256(76, 0), "string", Decimal("9" * 76), "9" * 76),
    (pa.string(), "string", "ä", "ä"),
    (pa.binary(), "binary", b"\0", b"\0"),
    (pa.date32(), "date", dt.date(1, 1, 1), dt.date(1, 1, 1)),
    (pa.time64("us"), "string", dt.time(9, 5, 0, 7), "09:05:00.000007"),
    (pa.timestamp("us", tz="UTC"), "timestamp", _NOON, _NOON),
    (pa.timestamp("us"), "timestamp_ntz", _NOON.replace(tzinfo=None), _NOON.replace(tzinfo=None)),
    (pa.list_(pa.time64("us")), "array<string>", [dt.time(9), None], ["09:00:00.000000", None]),
    (pa.list_(pa.decimal256(50, 12)), "array<string>", [Decimal("1E-9")], ["0.000000001000"]),
    (pa.list_(pa.list_(pa.int32())), "array<array<int>>", [[1], None, []], [[1], None, []]),
    (pa.struct([("a", pa.int16())]), "struct<a:smallint>", {"a": 1}, {"a": 1}),
    (pa.map_(pa.string(), pa.int32()), "map<string,int>", [("k", 1)], [("k", 1)]),
]


@pytest.mark.parametrize(("kind", "name", "value", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_value_stays_what_it_is(kind: pa.DataType, name: str, value: Any, expected: Any) -> None:
    wanted = spark_type(kind)
    assert wanted.simpleString() == name
    target = arrow_schema(st.StructType([st.StructField("c", wanted)])).field(0).type
    made = converted(pa.array([None, value, None, value], kind).slice(1), target)
    assert made.type.equals(target)
    assert made.to_pylist() == [expected, None, expected]


def test_a_type_that_spark_has_not_is_refused() -> None:
    with pytest.raises(UnsupportedSchema, match="no type for duration"):
        spark_type(pa.duration("us"))


def test_columns_are_given_in_the_order_that_was_asked_for() -> None:
    columns = (SourceColumn("id", pa.int64(), "bigint", 1), SourceColumn("v", pa.string(), "text", 2))
    table = SourceTable("public", "t", columns, ("id",))
    assert spark_schema(table).simpleString() == "struct<id:bigint,v:string>"
    assert spark_schema(table, ["v", "id"]).names == ["v", "id"]
    with pytest.raises(UnsupportedSchema, match=r"'w'.* id, v"):
        spark_schema(table, ["w"])


EXACT = [
    (st.IntegerType(), st.LongType(), True),
    (st.LongType(), st.IntegerType(), False),
    (st.IntegerType(), st.DecimalType(10, 0), True),
    (st.IntegerType(), st.DecimalType(10, 2), False),
    (st.LongType(), st.DoubleType(), False),
    (st.DecimalType(10, 2), st.DecimalType(12, 3), True),
    (st.DecimalType(10, 2), st.DecimalType(10, 3), False),
    (st.DecimalType(10, 2), st.StringType(), True),
    (st.FloatType(), st.DoubleType(), True),
    (st.DoubleType(), st.FloatType(), False),
    (st.StringType(), st.IntegerType(), False),
    (st.TimestampNTZType(), st.TimestampType(), False),
    (st.ArrayType(st.IntegerType()), st.ArrayType(st.LongType()), True),
    (st.ArrayType(st.IntegerType()), st.ArrayType(st.LongType(), False), False),
    (st.ArrayType(st.IntegerType()), st.StringType(), False),
]


@pytest.mark.parametrize(("natural", "wanted", "expected"), EXACT)
def test_only_types_that_have_every_value_may_stand_for_another(
    natural: st.DataType, wanted: st.DataType, expected: bool
) -> None:
    assert is_exact(natural, wanted) is expected


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (-7, st.DecimalType(12, 2), Decimal("-7.00")),
        (-7, st.StringType(), "-7"),
        (7, st.LongType(), 7),
    ],
)
def test_a_wider_type_holds_the_same_number(value: int, wanted: st.DataType, expected: Any) -> None:
    target = arrow_schema(st.StructType([st.StructField("c", wanted)])).field(0).type
    assert converted(pa.array([value], pa.int32()), target).to_pylist() == [expected]


def test_a_batch_has_the_schema_to_the_letter() -> None:
    kinds = {"id": st.LongType(), "at": st.TimestampType(), "tags": st.ArrayType(st.StringType()), "no": st.DateType()}
    schema = st.StructType([st.StructField(name, kind) for name, kind in kinds.items()])
    shape = Shape(schema)
    columns = [pa.array([1, 2], pa.int64()), pa.nulls(2, pa.timestamp("us", tz="UTC")), pa.array([["a"], None]), None]
    made = shape.batch(columns, 2)
    assert made.schema.equals(arrow_schema(schema), check_metadata=True)
    assert made.column(2).to_pylist() == [["a"], None]
    assert made.column(3).null_count == 2


def test_batches_are_joined_and_cut_to_the_size_that_spark_likes() -> None:
    def batch(start: int, rows: int) -> pa.RecordBatch:
        return pa.record_batch({"n": pa.array(range(start, start + rows))})

    sizes = [10] * 1000 + [0, 100_000, 3]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    made = list(rebatched(batch(start, rows) for start, rows in zip(starts, sizes, strict=True)))
    assert [n for one in made for n in one.column(0).to_pylist()] == list(range(sum(sizes)))
    assert all(one.num_rows <= ROWS_AT_MOST for one in made)
    assert all(one.num_rows >= ROWS_AT_LEAST for one in made[:-1])


def test_no_more_large_rows_are_held_than_memory_has_room_for() -> None:
    taken = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for _ in range(64):
            taken += 1
            yield pa.record_batch({"v": pa.array(["x" * (1 << 20)])})

    rows = 0
    for made in rebatched(batches()):
        rows += made.num_rows
        assert taken - rows < 16
        assert made.nbytes < 16 << 20
    assert rows == 64
