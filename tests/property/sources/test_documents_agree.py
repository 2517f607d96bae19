"""Both decoders of documents give what the library of MongoDB gives, whatever the documents; keys sort as values do."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson import json_util
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sampled import SOAK
from tests.unit.sources.mongodb.documents_cases import CODECS, EVERY_TYPE, OPTIONS, decode

from headwater.sources.mongodb.documents.columns import inferred_columns
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.table import SourceTable, SpecialValues

RELAXED = json_util.JSONOptions(json_mode=json_util.JSONMode.RELAXED, datetime_conversion="datetime_auto")
NO_NUMBERS = ("nan", "NaN", "inf", "-inf", "Infinity", "-Infinity")
examples = settings(max_examples=1000 if SOAK else 40)
DECIMALS = st.builds(
    lambda sign, digits, exponent: bson.Decimal128(f"{sign}{digits}E{exponent}"),
    st.sampled_from(["", "-"]),
    st.integers(0, 10**34 - 1),
    st.integers(-6176, 6111),
)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1).map(bson.Int64),
    st.floats(),
    st.integers(-1000, 1000).map(float),
    st.integers(-(10**9), 10**9).map(lambda number: number / 100),
    DECIMALS,
    st.sampled_from([bson.Decimal128(text) for text in ("NaN", "Infinity", "-Infinity", "0", "-0", "1.0", "0.1")]),
)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: not name.startswith("$")
)
SCALARS = st.one_of(
    NUMBERS,
    st.text(max_size=20),
    st.binary(max_size=20),
    st.builds(bson.Binary, st.binary(max_size=20), st.sampled_from([0, 2, 5, 128])),
    st.builds(bson.Binary, st.binary(min_size=16, max_size=16), st.sampled_from([3, 4])),
    st.binary(min_size=12, max_size=12).map(bson.ObjectId),
    st.booleans(),
    st.none(),
    st.integers(-(2**63), 2**63 - 1).map(bson.DatetimeMS),
    st.integers(0, 2**45).map(bson.DatetimeMS),
    st.builds(bson.Timestamp, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.builds(bson.Regex, NAMES, st.sampled_from(["", "i", "imsx"])),
    st.text(max_size=8).map(bson.Code),
    st.builds(bson.Code, st.text(max_size=8), st.dictionaries(NAMES, st.integers(0, 9), min_size=1, max_size=2)),
    st.sampled_from([bson.MinKey(), bson.MaxKey()]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)
DOCUMENTS = st.lists(st.dictionaries(NAMES.filter(lambda name: name != "_id"), VALUES, max_size=6), max_size=5)


def told(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"_id": number, **one} for number, one in enumerate(documents)]


@pytest.mark.parametrize("codec", sorted(CODECS))
@example([EVERY_TYPE])
@examples
@given(DOCUMENTS)
def test_the_extended_json_of_a_document_is_that_of_the_library(codec: str, documents: list[dict[str, Any]]) -> None:
    raw = [bson.encode(one) for one in told(documents)]
    found = decode(codec, {"document": "document"}, raw).batch.column("document").to_pylist()
    wanted = [json_util.dumps(bson.decode(one, OPTIONS), json_options=RELAXED) for one in raw]
    # text for text of what was parsed: 1 and 1.0 and true are not the same
    assert [json.dumps(json.loads(one)) for one in found] == [json.dumps(json.loads(one)) for one in wanted]


@example([EVERY_TYPE, dict.fromkeys(EVERY_TYPE, 1)])
@examples
@given(DOCUMENTS)
def test_columns_of_a_sample_take_every_document_of_it_the_same_in_both_decoders(
    documents: list[dict[str, Any]],
) -> None:
    raw = [bson.encode(one) for one in told(documents)]
    columns = inferred_columns(raw)
    of = SourceTable("shop", "orders", columns.columns, columns.key_columns)
    batches = [DocumentDecoder(of, codec_used=codec).decode(raw) for codec in CODECS.values()]
    for decoded in batches:
        decoded.batch.validate(full=True)
        assert decoded.conflicts == ()
        assert str(plain(decoded.batch)) == str(plain(batches[0].batch))
        for row, one in zip(plain(decoded.batch), raw, strict=True):
            whole = dict(row)
            values = {**json.loads(whole.pop("_rest") or "{}"), **whole}
            assert set(values) >= set(bson.decode(one, OPTIONS))


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows, with dates as numbers: Python has not all of them."""
    columns = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in batch.columns]
    return pa.table(columns, names=batch.schema.names).to_pylist() if batch.num_rows else []


@pytest.mark.parametrize("kind", ["int", "long", "double", "decimal", "decimal(38,6)", "decimal(76,30)"])
@examples
@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_a_column_of_numbers_has_the_very_number_or_a_conflict(kind: str, numbers: list[Any]) -> None:
    raw = [bson.encode({"_id": place, "v": number}) for place, number in enumerate(numbers)]
    decoded = [decode(codec, {"v": kind}, raw, v=SpecialValues.NULL) for codec in CODECS]
    for one in decoded:
        values = one.batch.column("v").to_pylist()
        assert str(values) == str(decoded[0].batch.column("v").to_pylist())
        assert sum(conflict.count for conflict in one.conflicts) == values.count(None)
        for value, number in zip(values, numbers, strict=True):
            if value is not None and str(value) not in NO_NUMBERS:
                assert exact(bson.Decimal128(value) if kind == "decimal" else value) == exact(number)


def exact(number: Any) -> Fraction:
    return Fraction(number.to_decimal() if isinstance(number, bson.Decimal128) else number)


@examples
@given(st.lists(VALUES, min_size=2, max_size=6))
def test_keys_sort_as_mongodb_compares_and_are_the_same_in_both_decoders(values: list[Any]) -> None:
    raw = [bson.encode({"_id": value}) for value in values]
    keys = [id_key(one) for one in raw]
    for codec in CODECS:
        assert decode(codec, {}, raw).batch.column("_id_key").to_pylist() == keys
    ranks = [rank(value) for value in values]
    for left, left_key in zip(ranks, keys, strict=True):
        for right, right_key in zip(ranks, keys, strict=True):
            assert (left < right) == (left_key < right_key)
            assert (left == right) == (left_key == right_key)


def rank(value: Any) -> tuple[Any, ...]:
    """Something of Python that is ordered as MongoDB orders *value*."""
    match value:
        case bson.MinKey():
            return (1,)
        case None:
            return (5,)
        case bool():
            return (40, value)
        case bson.MaxKey():
            return (127,)
        case bson.Code() if value.scope is not None:
            return (65, value.encode(), fields(value.scope))
        case bson.Code():
            return (60, value.encode())
        case int() | float() | bson.Decimal128():
            return (10, *number_rank(value))
        case str():
            return (15, value.encode())
        case dict():
            return (20, fields(value))
        case list():
            return (25, tuple(rank(one) for one in value))
        case bytes():
            subtype = getattr(value, "subtype", 0)
            content = struct.pack("<i", len(value)) + value if subtype == 2 else bytes(value)
            return (30, len(content), subtype, content)
        case bson.ObjectId():
            return (35, value.binary)
        case bson.DatetimeMS():
            return (45, int(value))
        case bson.Timestamp():
            return (47, value.time, value.inc)
        case _:
            assert isinstance(value, bson.Regex)
            return (50, value.pattern.encode(), flags(value))


def flags(value: Any) -> bytes:
    return bson.encode({"r": value})[7 + len(value.pattern.encode()) + 1 : -2]


def fields(value: Any) -> tuple[Any, ...]:
    return tuple((rank(one)[0], name.encode(), rank(one)) for name, one in value.items())


def number_rank(value: Any) -> tuple[Any, ...]:
    text = str(value).lower()
    if "nan" in text:
        return (0, 0)
    if "inf" in text:
        return (1, 0) if text.startswith("-") else (3, 0)
    return (2, exact(value))
