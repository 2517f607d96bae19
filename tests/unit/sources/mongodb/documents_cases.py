"""Documents for tests: raw bytes of every type, tables with declared columns, and both decoders."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from headwater.sources.mongodb.documents import python_documents
from headwater.sources.mongodb.documents.decoder import Decoded, DocumentDecoder, RawDocuments
from headwater.sources.mongodb.documents.layout import Codec
from headwater.sources.mongodb.documents.types import source_column
from headwater.sources.table import SourceTable, SpecialValues

CODECS: dict[str, Codec] = {"python": python_documents}
try:
    from headwater.sources.mongodb.documents import _documents

    CODECS["compiled"] = _documents
except ImportError:
    pass

OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)
IN_2020: Final = dt.datetime(2020, 1, 2, 3, 4, 5, 678_000, dt.UTC)
A_UUID: Final = UUID("00112233-4455-6677-8899-aabbccddeeff")

EVERY_TYPE: Final[dict[str, Any]] = {
    "double": 1.5,
    "string": "été",
    "object": {"a": 1, "b": {"c": [1, "x"]}},
    "array": [1, 2.5, None, [True], {"k": "v"}],
    "binary": b"\x00\x01\xff",
    "md5": bson.Binary(b"0123456789abcdef", 5),
    "old": bson.Binary(b"old", 2),
    "uuid": bson.Binary(A_UUID.bytes, 4),
    "objectId": bson.ObjectId("0123456789abcdef01234567"),
    "bool": True,
    "date": IN_2020,
    "null": None,
    "regex": bson.Regex('^a/"', "im"),
    "code": bson.Code("f()"),
    "scoped": bson.Code("f(x)", {"x": 1}),
    "int": 7,
    "timestamp": bson.Timestamp(0x90000001, 2),
    "long": bson.Int64(1 << 40),
    "decimal": bson.Decimal128("-12.3400"),
    "minKey": bson.MinKey(),
    "maxKey": bson.MaxKey(),
}

IN_ORDER: Final[list[Any]] = [
    bson.MinKey(),
    None,
    float("nan"),
    float("-inf"),
    bson.Decimal128("-1E+6144"),
    -1.7976931348623157e308,
    bson.Int64(-(2**63)),
    -(2.0**53),
    -101,
    -100.5,
    bson.Decimal128("-100"),
    -1,
    -0.1,
    bson.Decimal128("-0.1"),  # the double next to it is a little less
    bson.Decimal128("-1E-6176"),
    0,
    bson.Decimal128("1E-6176"),
    5e-324,
    bson.Decimal128("0.1"),
    0.1,
    1,
    1.5,
    2,
    9,
    10,
    11,
    99,
    100,
    101,
    2.0**53,
    bson.Int64(2**53 + 1),
    bson.Int64(2**63 - 1),
    2.0**63,
    1.7976931348623157e308,
    bson.Decimal128("9.999999999999999999999999999999999E+6144"),
    float("inf"),
    "",
    "\0",
    "\0a",
    "a",
    "a\0",
    "aa",
    "b",
    "é",
    {},
    {"a": 1},
    {"a": 1, "b": 1},
    {"a": 2},
    {"b": 1},
    {"a": "1"},
    {"a": {"b": 1}},
    [],
    [1],
    [1, 2],
    ["a"],
    b"",
    b"b",
    bson.Binary(b"a", 5),
    b"aa",
    bson.ObjectId("0" * 24),
    bson.ObjectId("f" * 24),
    False,
    True,
    bson.DatetimeMS(-(2**63)),
    bson.DatetimeMS(-1),
    bson.DatetimeMS(0),
    bson.DatetimeMS(2**63 - 1),
    bson.Timestamp(0, 0),
    bson.Timestamp(1, 2),
    bson.Timestamp(2**32 - 1, 0),
    bson.Regex("a", ""),
    bson.Regex("a", "i"),
    bson.Regex("b", ""),
    bson.Code("a"),
    bson.Code("a", {"x": 1}),
    bson.MaxKey(),
]
"""Values of all types, each less than the next."""


def document(*elements: tuple[int, bytes, bytes]) -> bytes:
    """Of type, name and value of each element, for what no library writes."""
    body = b"".join(bytes((kind,)) + name + b"\0" + value for kind, name, value in elements)
    return struct.pack("<i", len(body) + 5) + body + b"\0"


def text(value: bytes) -> bytes:
    return struct.pack("<i", len(value) + 1) + value + b"\0"


def raw(documents: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(bson.encode(one) for one in documents)


def table(
    types: Mapping[str, str],
    policies: Mapping[str, SpecialValues] | None = None,
    key: str | None = None,
) -> SourceTable:
    """The first column is the key where *key* is none; then documents need it."""
    columns = tuple(
        source_column(name, kind, place, special_values=(policies or {}).get(name, SpecialValues.STOP))
        for place, (name, kind) in enumerate(types.items(), 1)
    )
    return SourceTable("shop", "orders", columns, (key or next(iter(types)),))


def decode(codec: str, types: Mapping[str, str], documents: RawDocuments, **policies: SpecialValues) -> Decoded:
    """The columns of *types* beside a key ``_id`` that is taken as bytes of any type."""
    of = table({"_id_key": "key", **types}, policies)
    return DocumentDecoder(of, codec_used=CODECS[codec]).decode(documents)


def one(codec: str, kind: str, value: Any, **policies: SpecialValues) -> Any:
    """What a single value becomes in a column of *kind*."""
    found = decode(codec, {"v": kind}, bson.encode({"_id": 1, "v": value}), **policies)
    return found.batch.column("v")[0].as_py()
