"""Positions sort as the keys do, and are what the state store writes for the same key."""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.state.key_encoding import encode_key
from headwater.state.types import Field, FieldType
from headwater.versioned.errors import UnsupportedKey
from headwater.versioned.key_positions import keys, positions, vnode_position

naive = datetime.fromisoformat
SAME: dict[str, tuple[pa.DataType, FieldType, list[Any]]] = {
    "i64": (pa.int64(), FieldType.INT, [-(1 << 63), -1, 0, 1, (1 << 63) - 1]),
    "i16": (pa.int16(), FieldType.INT, [-(1 << 15), 0, (1 << 15) - 1]),
    "u64": (pa.uint64(), FieldType.UINT, [0, 1, (1 << 64) - 1]),
    "bool": (pa.bool_(), FieldType.BOOL, [False, True]),
    "double": (pa.float64(), FieldType.FLOAT, [float("-inf"), -1.5, -0.0, 0.0, 5e-324, 2.0, float("inf")]),
    "text": (pa.string(), FieldType.TEXT, ["", "\x00", "\x00\x00", "\x01", "a", "a\x00", "ab", "ü", "🦆"]),
    "bytes": (pa.large_binary(), FieldType.BYTES, [b"", b"\x00", b"\x00\xff", b"\x01", b"\xff\xff"]),
    "day": (pa.date32(), FieldType.DATE, [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    "moment": (
        pa.timestamp("us"),
        FieldType.TIMESTAMP,
        [naive("0001-01-01"), naive("1970-01-01"), naive("2024-02-29T23:59")],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_key_is_written_as_the_state_store_writes_it(name: str) -> None:
    kind, field, values = SAME[name]
    made = keys(pa.RecordBatch.from_arrays([pa.array([*values, None], kind)], ["k"]), ["k"]).to_pylist()
    assert made == [encode_key([Field("k", field, nullable=True)], [value]) for value in [*values, None]]
    assert made == sorted(made)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (
            pa.decimal128(20, 4),
            [Decimal("-99999.0001"), Decimal("-0.0001"), Decimal("0"), Decimal("7"), Decimal("1E9")],
        ),
        (pa.decimal256(60, 2), [Decimal("-1E50"), Decimal("-1"), Decimal("0.01"), Decimal("1E50")]),
        (pa.uuid(), [uuid.UUID(int=0).bytes, uuid.UUID(int=5).bytes, uuid.UUID(int=(1 << 128) - 1).bytes]),
        (pa.float32(), [-1.0, 0.5, float("nan")]),
        (pa.time64("us"), [0, 1, 86_399_999_999]),
        (pa.duration("ms"), [-5, 0, 9]),
        (pa.time32("s"), [0, 1, 86_399]),
        (pa.binary(2), [b"\x00\x00", b"\x00\x01", b"\xff\x00"]),
    ],
)
def test_positions_sort_as_values_do(kind: pa.DataType, values: list[Any]) -> None:
    array = pa.array(values, kind.storage_type).cast(kind) if isinstance(kind, pa.UuidType) else pa.array(values, kind)
    rows = pa.RecordBatch.from_arrays([pa.concat_arrays([array, pa.nulls(1, kind)])], ["k"])
    made = keys(rows, ["k"]).to_pylist()
    assert made == sorted(made)
    assert len(set(made)) == len(values) + 1


def test_the_vnode_comes_first_and_the_columns_after_it() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array(["b", "a", "a", None]), pa.array([1, 2, 1, 0]), pa.array(np.array([7, 7, 300, 7], np.uint16))],
        ["t", "n", "_vnode"],
    )
    made = positions(rows, ("t", "n")).to_pylist()
    assert sorted(range(4), key=made.__getitem__) == [1, 0, 3, 2]
    assert [place[:2] for place in made] == [vnode_position(vnode) for vnode in (7, 7, 300, 7)]


def test_a_slice_has_the_positions_of_its_rows() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([Decimal(n) for n in range(9)], pa.decimal128(9, 2))], ["k"])
    assert keys(rows.slice(3, 2), ["k"]).to_pylist() == keys(rows, ["k"]).to_pylist()[3:5]


def test_a_key_without_an_order_is_refused() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([[1]], pa.list_(pa.int32()))], ["k"])
    with pytest.raises(UnsupportedKey, match="'k' has type list"):
        keys(rows, ["k"])
