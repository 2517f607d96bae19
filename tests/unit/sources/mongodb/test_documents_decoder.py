"""Raw documents into columns, by both decoders."""

from __future__ import annotations

import datetime as dt
import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import bson
import pyarrow as pa
import pytest
from tests.unit.sources.mongodb.documents_cases import (
    A_UUID,
    CODECS,
    EVERY_TYPE,
    IN_2020,
    decode,
    document,
    one,
    raw,
    table,
    text,
)

from headwater.sources.errors import InvalidKey, SourceProtocolError, SpecialValue
from headwater.sources.mongodb.documents import layout
from headwater.sources.mongodb.documents.decoder import DocumentDecoder, RawArray
from headwater.sources.mongodb.documents.errors import UnreadableText
from headwater.sources.table import SpecialValues

NULL, TEXT = SpecialValues.NULL, SpecialValues.TEXT
SECRET = "s3cret"


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("int", 7, 7),
        ("int", bson.Int64(-(2**31)), -(2**31)),
        ("int", 5.0, 5),
        ("long", bson.Int64(2**63 - 1), 2**63 - 1),
        ("long", -(2.0**63), -(2**63)),
        ("double", 0.1, 0.1),
        ("double", bson.Int64(2**53), 2.0**53),
        ("double", -7, -7.0),
        ("bool", False, False),
        ("string", "été\0☃", "été\0☃"),
        ("objectId", bson.ObjectId("0123456789abcdef01234567"), "0123456789abcdef01234567"),
        ("date", IN_2020, IN_2020),
        ("date", bson.DatetimeMS(-62_135_596_800_000), dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
        ("timestamp", bson.Timestamp(2**32 - 1, 7), (2**32 - 1) << 32 | 7),
        ("decimal", bson.Decimal128("1.10"), "1.10"),
        ("decimal", bson.Decimal128("-0E-7"), "-0E-7"),
        ("decimal", bson.Decimal128("NaN"), "NaN"),
        ("decimal", bson.Decimal128("-Infinity"), "-Infinity"),
        ("decimal", bson.Decimal128("9.999999999999999999999999999999999E+6144"), "9." + "9" * 33 + "E+6144"),
        ("decimal", bson.Decimal128("1E-6176"), "1E-6176"),
        ("decimal", bson.Int64(-5), "-5"),
        ("decimal(20,4)", bson.Decimal128("-12.34"), Decimal("-12.3400")),
        ("decimal(20,4)", bson.Decimal128("1E+3"), Decimal("1000.0000")),
        ("decimal(20,4)", bson.Decimal128("1.230000000"), Decimal("1.2300")),
        ("decimal(20,4)", 3, Decimal("3.0000")),
        ("decimal(38,0)", bson.Decimal128("9" * 34), Decimal("9" * 34)),
        ("decimal(76,40)", bson.Decimal128("-1." + "0" * 32 + "1"), Decimal("-1." + "0" * 32 + "1" + "0" * 7)),
        ("binData", b"\x00\xff", b"\x00\xff"),
        ("binData(5)", bson.Binary(b"md", 5), b"md"),
        ("binData(2)", bson.Binary(b"old", 2), b"old"),
        ("uuid", bson.Binary(A_UUID.bytes, 4), str(A_UUID)),
        ("json", {"a": [1, 2.0, None]}, '{"a":[1,2.0,null]}'),
        ("json", "x", '"x"'),
        ("array<int>", [1, None, 3.0], [1, None, 3]),
        ("array<array<string>>", [["a"], [], None], [["a"], [], None]),
        ("struct<a: int, b: string>", {"b": "x", "c": 1}, {"a": None, "b": "x"}),
        ("struct<a: array<struct<b: date>>>", {"a": [{"b": IN_2020}, {}]}, {"a": [{"b": IN_2020}, {"b": None}]}),
    ],
)
def test_a_value_is_exact_in_a_column_of_its_type(codec: str, kind: str, value: Any, wanted: Any) -> None:
    found = one(codec, kind, value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("int", 2**31, "does not hold exactly"),
        ("int", 1.5, "does not hold exactly"),
        ("long", 2.0**63, "does not hold exactly"),
        ("long", float("nan"), "does not hold exactly"),
        ("long", -0.0, "does not hold exactly"),
        ("long", bson.Decimal128("1"), "decimal"),
        ("double", bson.Int64(2**53 + 1), "does not hold exactly"),
        ("double", bson.Int64(2**63 - 1), "does not hold exactly"),
        ("double", "1", "string"),
        ("bool", 1, "int"),
        ("string", 1, "int"),
        ("string", bson.MinKey(), "minKey"),
        ("string", bson.MaxKey(), "maxKey"),
        ("objectId", "0123456789abcdef01234567", "string"),
        ("date", bson.DatetimeMS(253_402_300_800_000), "does not hold exactly"),
        ("date", bson.DatetimeMS(-62_135_596_800_001), "does not hold exactly"),
        ("date", bson.Timestamp(1, 1), "timestamp"),
        ("timestamp", IN_2020, "date"),
        ("decimal", 1.5, "double"),
        ("decimal(10,2)", bson.Decimal128("1.234"), "does not hold exactly"),
        ("decimal(10,2)", bson.Decimal128("123456789"), "does not hold exactly"),
        ("decimal(10,2)", bson.Decimal128("NaN"), "does not hold exactly"),
        ("decimal(10,2)", bson.Decimal128("-0"), "does not hold exactly"),
        ("decimal(10,2)", bson.Decimal128("1E+6000"), "does not hold exactly"),
        ("decimal(10,2)", bson.Decimal128("1E-6000"), "does not hold exactly"),
        ("binData", bson.Binary(b"", 5), "another subtype"),
        ("uuid", bson.Binary(b"short", 4), "another subtype"),
        ("uuid", bson.Binary(A_UUID.bytes, 3), "another subtype"),
        ("array<int>", {"a": 1}, "object"),
        ("struct<a: int>", [1], "array"),
    ],
)
def test_a_value_that_its_column_does_not_take_goes_by_policy(codec: str, kind: str, value: Any, found: str) -> None:
    with pytest.raises(SpecialValue, match=found) as raised:
        one(codec, kind, value)
    assert "shop.orders" in str(raised.value)
    assert "'v'" in str(raised.value)
    assert f"({kind})" in str(raised.value)
    assert one(codec, kind, value, v=NULL) is None
    decoded = decode(codec, {"v": kind}, raw([{"_id": 1, "v": value}, {"_id": 2}]), v=NULL)
    assert [(one.path, one.wanted, one.count) for one in decoded.conflicts] == [("v", kind, 1)]
    assert any(found in name for name in decoded.conflicts[0].found)
    assert isinstance(one(codec, kind, value, v=TEXT), str)


def test_a_conflict_inside_a_column_is_named_by_its_path_and_leaves_the_rest(codec: str) -> None:
    kind = "struct<city: string, tags: array<int>>"
    documents = raw([{"_id": 1, "a": {"city": 5, "tags": [1, SECRET, 3, True]}}, {"_id": 2, "a": {"city": "x"}}])
    decoded = decode(codec, {"a": kind}, documents, a=NULL)
    assert decoded.batch.column("a").to_pylist() == [
        {"city": None, "tags": [1, None, 3, None]},
        {"city": "x", "tags": None},
    ]
    told = [(one.column, one.path, one.wanted, one.found, one.count) for one in decoded.conflicts]
    assert told == [("a", "a.city", "string", ("int",), 1), ("a", "a.tags[]", "int", ("string", "bool"), 2)]
    with pytest.raises(SpecialValue, match=r"at a\.tags\[\]") as raised:
        decode(codec, {"a": kind}, documents)
    assert SECRET not in str(raised.value)
    assert "special_values of shop.orders.a" in str(raised.value)


def test_missing_fields_and_nulls_are_null_and_of_a_field_twice_the_first_counts(codec: str) -> None:
    twice = document((16, b"_id", b"\1\0\0\0"), (16, b"v", b"\5\0\0\0"), (16, b"v", b"\6\0\0\0"))
    documents = [twice, bson.encode({"v": None, "_id": 2}), bson.encode({"_id": 3})]
    decoded = decode(codec, {"v": "int", "w": "struct<a: int>", "x": "array<int>"}, documents)
    assert decoded.batch.column("v").to_pylist() == [5, None, None]
    assert decoded.batch.column("w").to_pylist() == [None, None, None]
    assert decoded.batch.column("x").to_pylist() == [None, None, None]
    assert decoded.conflicts == ()


def test_every_type_has_extended_json(codec: str) -> None:
    decoded = decode(codec, {"document": "document"}, bson.encode({"_id": 1, **EVERY_TYPE}))
    found = decoded.batch.column("document")[0].as_py()
    assert json.loads(found) == {
        "_id": 1,
        "double": 1.5,
        "string": "été",
        "object": {"a": 1, "b": {"c": [1, "x"]}},
        "array": [1, 2.5, None, [True], {"k": "v"}],
        "binary": {"$binary": {"base64": "AAH/", "subType": "00"}},
        "md5": {"$binary": {"base64": "MDEyMzQ1Njc4OWFiY2RlZg==", "subType": "05"}},
        "old": {"$binary": {"base64": "b2xk", "subType": "02"}},
        "uuid": {"$binary": {"base64": "ABEiM0RVZneImaq7zN3u/w==", "subType": "04"}},
        "objectId": {"$oid": "0123456789abcdef01234567"},
        "bool": True,
        "date": {"$date": "2020-01-02T03:04:05.678Z"},
        "null": None,
        "regex": {"$regularExpression": {"pattern": '^a/"', "options": "im"}},
        "code": {"$code": "f()"},
        "scoped": {"$code": "f(x)", "$scope": {"x": 1}},
        "int": 7,
        "timestamp": {"$timestamp": {"t": 0x90000001, "i": 2}},
        "long": 1 << 40,
        "decimal": {"$numberDecimal": "-12.3400"},
        "minKey": {"$minKey": 1},
        "maxKey": {"$maxKey": 1},
    }


def test_types_that_are_no_longer_written_have_extended_json_too(codec: str) -> None:
    place = bytes(range(12))
    old = document(
        (16, b"_id", b"\1\0\0\0"),
        (6, b"undefined", b""),
        (12, b"pointer", text(b"shop.orders") + place),
        (14, b"symbol", text(b"s")),
    )
    found = decode(codec, {"document": "document"}, old).batch.column("document")[0].as_py()
    assert found == (
        '{"_id":1,"undefined":{"$undefined":true},'
        '"pointer":{"$dbPointer":{"$ref":"shop.orders","$id":{"$oid":"000102030405060708090a0b"}}},'
        '"symbol":{"$symbol":"s"}}'
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (100.0, "100.0"),
        (0.1, "0.1"),
        (12.34, "12.34"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (1e15, "1e+15"),
        (999999999999999.0, "999999999999999.0"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (5e-324, "4.94065645841247e-324"),
        (1 / 3, "0.3333333333333333"),
        (float("nan"), '{"$numberDouble":"NaN"}'),
        (float("-inf"), '{"$numberDouble":"-Infinity"}'),
        (bson.Int64(-(2**63)), "-9223372036854775808"),
        (bson.DatetimeMS(-1), '{"$date":{"$numberLong":"-1"}}'),
        (bson.DatetimeMS(0), '{"$date":"1970-01-01T00:00:00Z"}'),
        (bson.DatetimeMS(951_782_400_001), '{"$date":"2000-02-29T00:00:00.001Z"}'),
        (bson.DatetimeMS(253_402_300_799_999), '{"$date":"9999-12-31T23:59:59.999Z"}'),
        (bson.DatetimeMS(253_402_300_800_000), '{"$date":{"$numberLong":"253402300800000"}}'),
        ('"\\/\b\f\n\r\t\x01\x1f\x7f☃', '"\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f☃"'),
        ({}, "{}"),
        ([], "[]"),
    ],
)
def test_extended_json_is_written_to_the_letter(codec: str, value: Any, wanted: str) -> None:
    assert one(codec, "json", value) == wanted


def test_what_no_column_takes_is_in_the_rest(codec: str) -> None:
    documents = raw([{"_id": 1, "a": 2, "b": {"c": 1}, "rest": 5}, {"_id": 2, "a": 3}])
    decoded = decode(codec, {"a": "int", "rest": "rest"}, documents)
    assert decoded.batch.column("rest").to_pylist() == ['{"b":{"c":1},"rest":5}', None]
    assert decoded.batch.column("a").to_pylist() == [2, 3]


def test_text_that_is_not_utf8_is_an_error_or_null_and_never_replaced(codec: str) -> None:
    bad = document((16, b"_id", b"\1\0\0\0"), (2, b"v", text(b"\xff\xfe")), (2, b"\xc0", text(b"x")))
    for kind in ("string", "json", "document", "rest"):
        with pytest.raises(UnreadableText, match="not UTF-8"):
            decode(codec, {"v": kind}, bad)
        decoded = decode(codec, {"v": kind}, bad, v=NULL)
        assert decoded.batch.column("v").to_pylist() == [None]
        assert decoded.conflicts[0].count == 1


@pytest.mark.parametrize("surrogate", [b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe2\x82", b"\x80"])
def test_halves_of_pairs_and_cut_characters_are_no_text(codec: str, surrogate: bytes) -> None:
    bad = document((16, b"_id", b"\1\0\0\0"), (2, b"v", text(b"eight or more " + surrogate)))
    with pytest.raises(UnreadableText):
        decode(codec, {"v": "string"}, bad)


def test_a_document_without_a_key_that_its_column_takes_is_refused_whatever_the_policy(codec: str) -> None:
    decoder = DocumentDecoder(table({"_id": "objectId"}, {"_id": NULL}), codec_used=CODECS[codec])
    for wrong, found in (({"_id": SECRET}, "string"), ({"a": 1}, "no value"), ({"_id": None}, "null")):
        with pytest.raises(InvalidKey, match=found) as raised:
            decoder.decode(bson.encode(wrong))
        assert 'Declare _id = "key"' in str(raised.value)
        assert SECRET not in str(raised.value)


def test_a_key_of_any_type_may_be_null_and_must_be_there(codec: str) -> None:
    decoded = decode(codec, {"_id": "json"}, raw([{"_id": None}, {"_id": "a"}]))
    assert decoded.batch.column("_id_key").to_pylist() == [b"\x05", b"\x0fa\0\0"]
    assert decoded.batch.column("_id").to_pylist() == [None, '"a"']
    with pytest.raises(InvalidKey, match="no value"):
        decode(codec, {}, bson.encode({"a": 1}))


def test_an_arrow_column_of_documents_is_decoded_with_its_nulls_and_slices(codec: str) -> None:
    documents = [None if number % 3 == 1 else bson.encode({"_id": number, "v": str(number)}) for number in range(20)]
    whole = pa.array(documents, pa.binary())
    of = table({"_id": "long", "v": "string"})
    decoder = DocumentDecoder(of, codec_used=CODECS[codec])
    wanted = [None if number % 3 == 1 else str(number) for number in range(20)]
    for start, length in ((0, 20), (3, 9), (8, 12), (19, 1), (5, 0)):
        decoded = decoder.decode(whole.slice(start, length)).batch
        assert decoded.column("v").to_pylist() == wanted[start : start + length]
        decoded.validate(full=True)
    assert decoder.decode(whole.cast(pa.large_binary())).batch.column("v").to_pylist() == wanted
    assert decoder.decode(pa.chunked_array([whole[:5], whole[5:]])).batch.column("v").to_pylist() == wanted
    assert decoder.decode(pa.nulls(3, pa.binary())).batch.column("v").to_pylist() == [None] * 3
    assert decoder.decode(pa.array([], pa.binary())).batch.num_rows == 0


def test_bytes_lists_of_bytes_and_views_are_the_same_batch(codec: str) -> None:
    documents = [bson.encode({"_id": number, "v": number / 4}) for number in range(100)]
    joined = b"".join(documents)
    wanted = decode(codec, {"v": "double"}, joined).batch
    assert wanted.num_rows == 100
    assert decode(codec, {"v": "double"}, documents).batch == wanted
    assert decode(codec, {"v": "double"}, memoryview(joined)).batch == wanted
    assert decode(codec, {"v": "double"}, bytearray(joined)).batch == wanted
    assert decode(codec, {"v": "double"}, b"").batch.num_rows == 0


def test_an_array_of_documents_is_decoded_as_a_server_sends_it(codec: str) -> None:
    documents = [{"_id": number, "v": str(number)} for number in range(120)]
    answer = bson.encode({"nextBatch": documents})
    array = memoryview(answer)[4 + 1 + len(b"nextBatch\0") : -1]
    assert decode(codec, {"v": "string"}, RawArray(array)).batch == decode(codec, {"v": "string"}, raw(documents)).batch
    assert decode(codec, {"v": "string"}, RawArray(b"\5\0\0\0\0")).batch.num_rows == 0
    for broken in (b"", bytes(array)[:-1], bytes(array) + b"\0", document((16, b"0", b"\1\0\0\0"))):
        with pytest.raises(SourceProtocolError):
            decode(codec, {"v": "string"}, RawArray(broken))


def test_a_batch_that_was_given_stays_while_the_decoder_goes_on(codec: str) -> None:
    decoder = DocumentDecoder(table({"_id": "long", "v": "string"}), codec_used=CODECS[codec])
    batches = [decoder.decode(raw([{"_id": n, "v": f"{n} {m}"} for m in range(50)])).batch for n in range(20)]
    for number, batch in enumerate(batches):
        assert batch.column("v").to_pylist() == [f"{number} {m}" for m in range(50)]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b"\x05\0\0", "a document is cut"),
        (b"\x04\0\0\0\0", "a document is cut"),
        (b"\xff\xff\xff\xff\0", "a document is cut"),
        (b"\x06\0\0\0\0\0", "a name|name of a field is cut|no type of BSON"),
        (b"\x05\0\0\0\1", "does not end"),
        (document((16, b"v", b"\1\0")), "a value is cut"),
        (document((2, b"v", b"\0\0\0\0\0")), "a text is cut"),
        (document((2, b"v", b"\xff\xff\xff\x7f\0")), "a text is cut"),
        (document((5, b"v", b"\xff\xff\xff\xff\0")), "a value is cut"),
        (document((8, b"v", b"\2")), "neither 0 nor 1"),
        (document((20, b"v", b"")), "no type of BSON"),
        (document((11, b"v", b"abc")), "a text is cut"),
        (document((15, b"v", b"\x05\0\0\0")), "a value is cut"),
    ],
)
def test_what_is_no_document_is_an_error_that_says_why(codec: str, broken: bytes, reason: str) -> None:
    good = bson.encode({"_id": 1})
    with pytest.raises(SourceProtocolError, match=f"document 1: .*({reason})"):
        decode(codec, {"v": "string"}, good + broken)


def test_documents_nested_deeper_than_a_server_stores_are_refused(codec: str) -> None:
    def nested(levels: int) -> bytes:
        inner = document()
        for _ in range(levels - 1):
            inner = document((3, b"v", inner))
        return document((16, b"_id", b"\1\0\0\0"), (3, b"v", inner))

    assert decode(codec, {"v": "json"}, nested(200)).batch.num_rows == 1
    for types in ({"v": "json"}, {"v": "document"}):
        with pytest.raises(SourceProtocolError, match="nested deeper"):
            decode(codec, types, nested(3000))
    deep_key = document((3, b"_id", nested(3000)))
    with pytest.raises(SourceProtocolError, match="nested deeper"):
        decode(codec, {}, deep_key)


def test_a_column_that_was_dropped_is_null(codec: str) -> None:
    from dataclasses import replace

    of = table({"_id": "long", "v": "string"})
    gone = replace(of, columns=(of.columns[0], replace(of.columns[1], dropped=True)))
    decoded = DocumentDecoder(gone, codec_used=CODECS[codec]).decode(raw([{"_id": 1, "v": 5}]))
    assert decoded.batch.to_pylist() == [{"_id": 1, "v": None}]


def test_decoders_work_side_by_side_in_threads(codec: str) -> None:
    documents = raw([{"_id": number, "v": [{"a": str(number)}]} for number in range(300)])
    wanted = decode(codec, {"v": "json", "document": "document"}, documents).batch

    def work(_: int) -> bool:
        return all(decode(codec, {"v": "json", "document": "document"}, documents).batch == wanted for _ in range(5))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


def test_python_does_it_where_the_compiled_code_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_PURE", "1")
    assert layout.codec() is CODECS["python"]
    monkeypatch.setenv("HEADWATER_PURE", "0")
    assert layout.codec() is CODECS.get("compiled", CODECS["python"])
