"""The bytes of a key sort as its values do, nulls last, and give the values back."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cmp_to_key, partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.state import Field, FieldType
from headwater.state.batch import prefix_end
from headwater.state.errors import InvalidKey, InvalidValue, StoreCorrupt
from headwater.state.key_encoding import decode_key, encode_key
from headwater.state.table import decode_row, encode_row

STRATEGIES: dict[FieldType, st.SearchStrategy[Any]] = {
    FieldType.INT: st.integers(-(2**63), 2**63 - 1),
    FieldType.UINT: st.integers(0, 2**64 - 1),
    FieldType.BOOL: st.booleans(),
    FieldType.FLOAT: st.floats(),
    FieldType.DECIMAL: st.decimals() | st.decimals(allow_nan=False, places=30) | st.integers().map(Decimal),
    FieldType.TEXT: st.text(max_size=20),
    FieldType.BYTES: st.binary(max_size=20),
    FieldType.UUID: st.uuids(),
    FieldType.DATE: st.dates(),
    FieldType.TIME: st.times().map(lambda value: value.replace(fold=0)),
    FieldType.TIMESTAMP: st.datetimes().map(lambda value: value.replace(fold=0)),
    FieldType.TIMESTAMPTZ: st.datetimes(timezones=st.just(UTC)).map(lambda value: value.replace(fold=0)),
}
KEY_TYPES = list(STRATEGIES)


def compare_values(kind: FieldType, left: Any, right: Any) -> int:
    """The order that a database gives: nulls last; of numbers, NaN last and all NaN equal."""
    if left is None or right is None:
        return (left is None) - (right is None)
    if kind is FieldType.TEXT:
        left, right = left.encode(), right.encode()
    if kind in (FieldType.FLOAT, FieldType.DECIMAL):
        left_nan, right_nan = (Decimal(number).is_nan() for number in (left, right))
        if left_nan or right_nan:
            return int(left_nan) - int(right_nan)
    if kind is FieldType.UUID:
        left, right = left.bytes, right.bytes
    return int(left > right) - int(left < right)


@st.composite
def keys(draw: st.DrawFn) -> tuple[list[Field], list[tuple[Any, ...]]]:
    kinds = draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=3))
    fields = [Field(f"f{i}", kind, nullable=True) for i, kind in enumerate(kinds)]
    row = st.tuples(*(st.none() | STRATEGIES[kind] for kind in kinds))
    return fields, draw(st.lists(row, min_size=2, max_size=8))


@given(keys())
def test_encoded_keys_sort_as_their_values(drawn: tuple[list[Field], list[tuple[Any, ...]]]) -> None:
    fields, rows = drawn

    def compare(left: tuple[Any, ...], right: tuple[Any, ...]) -> int:
        for field, a, b in zip(fields, left, right, strict=True):
            order = compare_values(field.type, a, b)
            if order:
                return order
        return 0

    by_value = sorted(rows, key=cmp_to_key(compare))
    encoded = [encode_key(fields, row) for row in by_value]
    assert encoded == sorted(encoded)
    for a, b in pairwise(by_value):
        assert (compare(a, b) == 0) == (encode_key(fields, a) == encode_key(fields, b))


@given(keys())
def test_a_key_comes_back_and_its_front_part_is_a_prefix(drawn: tuple[list[Field], list[tuple[Any, ...]]]) -> None:
    fields, rows = drawn
    for row in rows:
        encoded = encode_key(fields, row)
        back = decode_key(fields, encoded)
        for field, a, b in zip(fields, row, back, strict=True):
            assert compare_values(field.type, a, b) == 0
            assert type(a) is type(b)
        for size in range(len(fields)):
            front = encode_key(fields, row[:size])
            end = prefix_end(front)
            assert encoded.startswith(front)
            assert end is None or front <= encoded < end


@given(st.sampled_from([*KEY_TYPES, FieldType.JSON]), st.data())
def test_a_row_comes_back_exactly(kind: FieldType, data: st.DataObject) -> None:
    values = STRATEGIES.get(kind, st.recursive(st.none() | st.booleans() | st.text(), st.lists))
    fields = [Field("a", kind), Field("b", kind, nullable=True), Field("c", FieldType.TEXT, nullable=True)]
    row = (data.draw(values.filter(lambda value: value is not None)), data.draw(st.none() | values), None)
    back = decode_row(fields, encode_row(9, fields, row))
    assert repr(back) == repr(row)


@given(st.binary(max_size=60), st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=4))
@example(b"\x01\x03\x00\x00\x00\x01", [FieldType.DECIMAL])
def test_foreign_bytes_are_corruption_and_never_another_error(data: bytes, kinds: list[FieldType]) -> None:
    fields = [Field(f"f{i}", kind, nullable=True) for i, kind in enumerate(kinds)]
    for decode, stored in ((decode_key, data), (decode_row, b"\x01\x00\x01" + data)):
        try:
            assert len(decode(fields, stored)) == len(fields)
        except StoreCorrupt:
            continue


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FieldType.INT, 2**63),
        (FieldType.INT, True),
        (FieldType.INT, "1"),
        (FieldType.INT, 1.0),
        (FieldType.UINT, -1),
        (FieldType.UINT, 2**64),
        (FieldType.BOOL, 1),
        (FieldType.FLOAT, 1),
        (FieldType.DECIMAL, 1.5),
        (FieldType.TEXT, b"bytes"),
        (FieldType.TEXT, "lone \ud800 surrogate"),
        (FieldType.BYTES, "text"),
        (FieldType.UUID, "6f1c2a44-0000-7000-8000-000000000000"),
        (FieldType.DATE, datetime(2026, 1, 1)),  # noqa: DTZ001
        (FieldType.TIME, time(1, tzinfo=UTC)),
        (FieldType.TIMESTAMP, datetime(2026, 1, 1, tzinfo=UTC)),
        (FieldType.TIMESTAMPTZ, datetime(2026, 1, 1)),  # noqa: DTZ001
        (FieldType.TIMESTAMP, date(2026, 1, 1)),
        (FieldType.TIMESTAMPTZ, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))),
    ],
)
def test_a_value_of_another_type_is_refused_without_being_shown(kind: FieldType, wrong: Any) -> None:
    fields = [Field("amount", kind)]
    for refuse in (encode_key, partial(encode_row, 1)):
        with pytest.raises((InvalidKey, InvalidValue), match="'amount'") as caught:
            refuse(fields, (wrong,))
        assert repr(wrong) not in str(caught.value)


def test_nulls_only_where_the_field_allows_them() -> None:
    strict, loose = [Field("a", FieldType.INT)], [Field("a", FieldType.INT, nullable=True)]
    with pytest.raises(InvalidKey, match="'a' is null"):
        encode_key(strict, (None,))
    with pytest.raises(InvalidValue, match="'a' is null"):
        encode_row(1, strict, (None,))
    assert encode_key(loose, (2**63 - 1,)) < encode_key(loose, (None,))
    with pytest.raises(InvalidKey, match="2 key values for 1"):
        encode_key(strict, (1, 2))
    with pytest.raises(InvalidValue, match="2 values for 1"):
        encode_row(1, strict, (1, 2))
