"""Rows of COPY BINARY: values, special values, and blocks that are none."""

from __future__ import annotations

import datetime as dt
import random
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sources.errors import (
    InvalidKey,
    SourceError,
    SourceProtocolError,
    SpecialValue,
    UndecodableValue,
)
from headwater.sources.postgres.binary import BinaryRows, compiled_decode
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

decode = compiled_decode()
if decode is None:
    pytest.skip("the compiled code was not built", allow_module_level=True)

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
COLUMNS: dict[str, tuple[int, pa.DataType]] = {
    "id": (20, pa.int64()),
    "flag": (16, pa.bool_()),
    "small": (21, pa.int16()),
    "whole": (23, pa.int32()),
    "oid": (26, pa.int64()),
    "single": (700, pa.float32()),
    "double": (701, pa.float64()),
    "text": (25, pa.string()),
    "json": (3802, pa.string()),
    "uuid": (2950, pa.string()),
    "bytes": (17, pa.binary()),
    "day": (1082, pa.date32()),
    "at": (1184, pa.timestamp("us", tz="UTC")),
    "time": (1083, pa.time64("us")),
    "price": (1700, pa.decimal128(38, 10)),
    "number": (1700, pa.string()),
    "list": (1007, pa.list_(pa.int32())),
}


def rows_of(columns: dict[str, tuple[int, pa.DataType]], policy: SpecialValues = SpecialValues.STOP) -> BinaryRows:
    described = tuple(
        SourceColumn(name, kind, "any", place + 1, nullable=name != "id", special_values=policy)
        for place, (name, (_, kind)) in enumerate(columns.items())
    )
    table = SourceTable("public", "t", described, (next(iter(columns)),))
    assert decode is not None
    return BinaryRows(decode, table, described, [oid for oid, _ in columns.values()])


def one(oid: int, kind: pa.DataType, policy: SpecialValues = SpecialValues.STOP) -> BinaryRows:
    return rows_of({"id": (20, pa.int64()), "v": (oid, kind)}, policy)


def row(*values: bytes | None) -> bytes:
    fields = (b"\xff\xff\xff\xff" if value is None else struct.pack("!i", len(value)) + value for value in values)
    return struct.pack("!h", len(values)) + b"".join(fields)


def numeric(groups: Sequence[int], weight: int, sign: int = 0, scale: int = 0) -> bytes:
    return struct.pack(f"!HhHH{len(groups)}H", len(groups), weight, sign, scale, *groups)


ID = struct.pack("!q", 1)
FULL = row(
    ID, b"\1", struct.pack("!h", -2), struct.pack("!i", -3), struct.pack("!I", 2**32 - 1), struct.pack("!f", 0.5),
    struct.pack("!d", -0.25), "größe".encode(), b'\1{"a": 1}', bytes(range(16)), b"\0\xff", struct.pack("!i", 0),
    struct.pack("!q", -1), struct.pack("!q", 1), numeric([12, 3400], 0, 0x4000, 2), numeric([12, 3400], 0, 0x4000, 3),
    b"{1,NULL}",
)  # fmt: skip
EMPTY = row(ID, *[None] * (len(COLUMNS) - 1))


def test_values_of_each_kind() -> None:
    (batch,) = rows_of(COLUMNS).batches(HEADER + FULL + EMPTY + TRAILER)
    batch.validate(full=True)
    full, empty = batch.to_pylist()
    assert full | {"at": None, "day": None} == {
        "id": 1, "flag": True, "small": -2, "whole": -3, "oid": 2**32 - 1, "single": 0.5, "double": -0.25,
        "text": "größe", "json": '{"a": 1}', "uuid": "00010203-0405-0607-0809-0a0b0c0d0e0f", "bytes": b"\0\xff",
        "day": None, "at": None, "time": dt.time(microsecond=1), "price": Decimal("-12.34"),
        "number": "-12.340", "list": [1, None],
    }  # fmt: skip
    assert full["day"].isoformat() == "2000-01-01"
    assert full["at"].isoformat() == "1999-12-31T23:59:59.999999+00:00"
    assert empty == {name: 1 if name == "id" else None for name in COLUMNS}


def test_header_and_end_may_be_in_blocks_of_their_own() -> None:
    rows = rows_of(COLUMNS)
    assert [rows.batches(block) for block in (b"", HEADER, TRAILER, HEADER + TRAILER)] == [[]] * 4
    (batch,) = rows.batches(FULL * 100)
    assert batch.num_rows == 100


@pytest.mark.parametrize(
    ("groups", "weight", "digits", "scale", "expected"),
    [
        ([], 0, 1, 0, "0"),
        ([0, 0], 5, 1, 0, "0"),
        ([1], 0, 1, 0, "1"),
        ([1], 1, 5, 0, "10000"),
        ([1], 9, 37, 0, "1" + "0" * 36),
        ([10], 9, 38, 0, "1" + "0" * 37),
        ([100], 9, 38, 0, None),
        ([1], 10, 38, 0, None),
        ([1], 32767, 38, 0, None),
        ([1], -32768, 38, 38, None),
        ([99] + [9999] * 9, 9, 38, 0, "9" * 38),
        ([9999] * 9 + [9900], -1, 38, 38, "0." + "9" * 38),
        ([9999] * 10, -1, 38, 38, None),
        ([9999] * 9 + [9990], -1, 38, 38, None),
        ([0] * 5000 + [7], 5000, 1, 0, "7"),
        ([7] + [0] * 5000, 0, 1, 0, "7"),
        ([1] * 5000, 4999, 38, 0, None),
        ([1, 5000], 0, 5, 1, "1.5"),
        ([1, 5500], 0, 5, 1, None),
        ([10], 0, 1, 0, None),
        ([10_000], 0, 38, 0, None),
        ([1, 65535, 1], 2, 38, 0, None),
        ([1], -1, 10, 4, "0.0001"),
        ([1, 2, 3, 4], 3, 38, 10, "1000200030004.0000000000"),
        ([1, 2, 3, 4, 5], 4, 38, 10, "10002000300040005.0000000000"),
    ],
)
def test_decimals(groups: list[int], weight: int, digits: int, scale: int, expected: str | None) -> None:
    rows = one(1700, pa.decimal128(digits, scale))
    for sign, factor in ((0, 1), (0x4000, -1)):
        data = row(ID, numeric(groups, weight, sign))
        if expected is None:
            with pytest.raises(UndecodableValue, match="none of its type"):
                rows.batches(data)
        else:
            (batch,) = rows.batches(data)
            assert batch.column("v")[0].as_py() == Decimal(expected).copy_sign(factor)


@pytest.mark.parametrize(
    ("groups", "weight", "sign", "scale", "expected"),
    [
        ([], 0, 0, 0, "0"),
        ([], 0, 0, 3, "0.000"),
        ([1], 0, 0, 0, "1"),
        ([1, 20], 1, 0x4000, 0, "-10020"),
        ([12], 2, 0, 0, "1200000000"),
        ([1, 2, 3456], 1, 0, 4, "10002.3456"),
        ([1, 2, 3400], 1, 0, 2, "10002.34"),
        ([5], -1, 0, 4, "0.0005"),
        ([5000], -3, 0x4000, 9, "-0.000000005"),
        ([5000], -3, 0, 12, "0.000000005000"),
        ([1], 0, 0, 9, "1.000000000"),
        ([1], 3, 0, 1, "1" + "0" * 12 + ".0"),
        ([], 0, 0xC000, 0, "NaN"),
        ([], 0, 0xD000, 0x20, "Infinity"),
        ([], 0, 0xF000, 0x20, "-Infinity"),
        ([10_000], 0, 0, 0, None),
        ([1], 0, 0x1000, 0, None),
        ([1], 0, 0, 0x4000, None),
    ],
)
def test_numbers_of_any_size_are_text(
    groups: list[int], weight: int, sign: int, scale: int, expected: str | None
) -> None:
    data = row(ID, numeric(groups, weight, sign, scale))
    if expected is None:
        with pytest.raises(SourceProtocolError, match="a numeric value is none"):
            one(1700, pa.string()).batches(data)
    else:
        (batch,) = one(1700, pa.string()).batches(data * 2)
        batch.validate(full=True)
        assert batch.column("v").to_pylist() == [expected] * 2


DAY, MOMENT = pa.date32(), pa.timestamp("us")
FAR_MOMENT = (253402300800 - 946684800) * 10**6


@pytest.mark.parametrize(
    ("oid", "kind", "value", "said"),
    [
        (1082, DAY, struct.pack("!i", 2**31 - 1), "infinite"),
        (1082, DAY, struct.pack("!i", -(2**31)), "infinite"),
        (1082, DAY, struct.pack("!i", 2932897 - 10957), "outside the years"),
        (1082, DAY, struct.pack("!i", -719163 - 10957), "outside the years"),
        (1114, MOMENT, struct.pack("!q", 2**63 - 1), "infinite"),
        (1114, MOMENT, struct.pack("!q", -(2**63)), "infinite"),
        (1114, MOMENT, struct.pack("!q", FAR_MOMENT), "outside the years"),
        (1114, MOMENT, struct.pack("!q", 2**63 - 2), "outside the years"),
        (1114, MOMENT, struct.pack("!q", -(2**63) + 1), "outside the years"),
        (1083, pa.time64("us"), struct.pack("!q", 86_400_000_000), "24:00"),
        (1700, pa.decimal128(5, 2), numeric([], 0, 0xC000), "NaN"),
        (1700, pa.decimal128(5, 2), numeric([], 0, 0xD000), "NaN"),
        (1700, pa.decimal128(5, 2), numeric([], 0, 0xF000), "NaN"),
    ],
)
def test_special_values_follow_the_policy(oid: int, kind: pa.DataType, value: bytes, said: str) -> None:
    data = row(ID, value) + row(ID, None)
    with pytest.raises(SpecialValue, match=said):
        one(oid, kind).batches(data)
    (batch,) = one(oid, kind, SpecialValues.NULL).batches(data)
    batch.validate(full=True)
    assert batch.column("v").to_pylist() == [None, None]


def test_a_key_is_not_null() -> None:
    with pytest.raises(InvalidKey, match="a key is null"):
        rows_of({"id": (20, pa.int64())}).batches(row(None))


@pytest.mark.parametrize(("oid", "kind", "format"), [(700, pa.float32(), "I"), (701, pa.float64(), "Q")])
def test_there_is_one_nan(oid: int, kind: pa.DataType, format: str) -> None:  # noqa: A002
    bits = 32 if format == "I" else 64
    nans = [2**bits - 1, 2**bits - 2, 2 ** (bits - 1) - 1]
    (batch,) = one(oid, kind).batches(b"".join(row(ID, struct.pack(f"!{format}", nan)) for nan in nans))
    expected = pa.array(["NaN"]).cast(kind)
    whole = pa.uint32() if bits == 32 else pa.uint64()
    assert set(batch.column("v").view(whole).to_pylist()) == set(expected.view(whole).to_pylist())


BAD: dict[str, Any] = {
    "a header is cut": HEADER[:15],
    "an unknown flag": HEADER[:11] + b"\0\1\0\0" + bytes(4) + FULL,
    "a long extension": HEADER[:15] + b"\xff\xff\xff\xff" + FULL,
    "one byte": FULL + b"\0",
    "a row is cut": FULL[:-1],
    "after the end": FULL + TRAILER + FULL,
    "fewer values": row(ID),
    "more values": row(*[None] * 100),
    "a negative length": FULL[:2] + struct.pack("!i", -2) + FULL[6:],
    "a great length": FULL[:2] + struct.pack("!i", 2**31 - 1) + FULL[6:],
    "csv": b"1,t,2,3,4\n",
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_copy_is_an_error(what: str) -> None:
    with pytest.raises(SourceProtocolError, match=r"is no binary copy of its 17 columns: .+\."):
        rows_of(COLUMNS).batches(BAD[what])


@pytest.mark.parametrize(
    ("oid", "kind", "value"),
    [
        (20, pa.int64(), bytes(4)),
        (23, pa.int32(), bytes(8)),
        (16, pa.bool_(), b""),
        (2950, pa.string(), bytes(15)),
        (3802, pa.string(), b""),
        (3802, pa.string(), b"\2{}"),
        (1700, pa.decimal128(5, 2), bytes(7)),
        (1700, pa.decimal128(5, 2), numeric([1, 2], 0)[:-2]),
        (1700, pa.decimal128(5, 2), numeric([1, 2], 0) + b"\0\0"),
        (25, pa.string(), b"\xff"),
        (3802, pa.string(), b"\1\xc3"),
    ],
)
def test_a_value_of_another_form_is_an_error(oid: int, kind: pa.DataType, value: bytes) -> None:
    with pytest.raises(SourceProtocolError):
        one(oid, kind).batches(row(ID, value))


@pytest.mark.parametrize(
    ("oid", "kind", "value"),
    [
        (16, pa.bool_(), b"\2"),
        (1083, pa.time64("us"), struct.pack("!q", -1)),
        (1083, pa.time64("us"), struct.pack("!q", 86_400_000_001)),
        (1700, pa.decimal128(5, 2), numeric([], 0, 1)),
    ],
)
def test_a_value_that_the_type_does_not_have_is_an_error(oid: int, kind: pa.DataType, value: bytes) -> None:
    with pytest.raises(UndecodableValue):
        one(oid, kind).batches(row(ID, value))


def test_mutated_blocks_are_rows_or_errors_and_never_a_crash() -> None:
    rows, chance = rows_of(COLUMNS), random.Random(7)
    whole = HEADER + (FULL + EMPTY) * 3 + TRAILER
    read = refused = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
                case 1:
                    del data[place : place + chance.randint(1, 20)]
                case 2:
                    data[place:place] = chance.randbytes(chance.randint(1, 8))
                case _:
                    data[place : place + 4] = struct.pack("!i", chance.choice((-1, -2, 0, 1, 2**31 - 1, len(whole))))
            if not data:
                break
        try:
            for batch in rows.batches(bytes(data)):
                batch.validate(full=True)
            read += 1
        except SourceError:
            refused += 1
    assert read > 100
    assert refused > 1000
