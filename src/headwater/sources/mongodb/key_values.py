"""Values of ``_id`` as texts: canonical extended JSON, which keeps every value of every type exactly. Pure.

A whole number is its digits alone, whatever type it has: for MongoDB ``5`` and ``5.0`` are one key.
"""

from __future__ import annotations

import json
import re
import struct
import uuid
from datetime import UTC, datetime
from typing import Any, Final

import bson
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError
from bson.int64 import Int64
from bson.json_util import JSONMode, JSONOptions, dumps, loads
from bson.objectid import ObjectId

from headwater.sources.errors import InvalidRange
from headwater.sources.mongodb.documents.elements import document_end, elements
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.mongodb.documents.types import Kind, column_type
from headwater.sources.table import SourceTable

_TEXT: Final = JSONOptions(
    json_mode=JSONMode.CANONICAL,
    datetime_conversion=DatetimeConversion.DATETIME_MS,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
)
CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, uuid_representation=UuidRepresentation.UNSPECIFIED
)
_SIZE: Final = struct.Struct("<i")
_HEX: Final = re.compile(r"[0-9a-fA-F]{24}")


def text_of(value: Any) -> str:
    """The text of a value that :data:`CODEC` decoded."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool | DatetimeMS):
        return str(int(value))
    return dumps(value, json_options=_TEXT, separators=(",", ":"))


def value_of(text: str) -> Any:
    """What :func:`text_of` wrote. :raises ValueError: it is no such text."""
    try:
        return loads(text, json_options=_TEXT)
    except (BSONError, TypeError, KeyError) as error:
        raise ValueError("no extended JSON") from error


def id_of(document: bytes | memoryview) -> Any:
    """The ``_id`` of a raw document, whatever its other fields hold. :raises ValueError: it cannot be read."""
    data = bytes(document)
    for kind, name, start, stop in elements(data, 0, document_end(data, 0, len(data)), 0):
        if name == b"_id":
            body = bytes((kind,)) + b"_id\0" + data[start:stop] + b"\0"
            try:
                return bson.decode(_SIZE.pack(len(body) + 4) + body, CODEC)["_id"]
            except BSONError:
                raise ValueError("a text that is not UTF-8") from None
    raise ValueError("a document without _id")


def raw_id(text: str) -> bytes:
    """The raw document ``{_id: …}`` of a value's text."""
    return bson.encode({"_id": value_of(text)}, codec_options=CODEC)


def order_key(text: str) -> bytes:
    """Bytes that sort as MongoDB sorts the values of such texts."""
    return id_key(raw_id(text))


def read_value(table: SourceTable, text: str) -> str:
    """The text of the key that a person wrote as *text*: as the type of the key has it, or as extended JSON.

    :raises InvalidRange: it is none.
    """
    column = table.column(table.key_columns[0])
    kind = column_type(column).kind
    try:
        return text_of(_read(kind, text))
    except ValueError:
        raise InvalidRange(
            f"Key column {column.name!r} of {table.full_name} is of type {column.source_type}; a value is not.",
            next_step='Write it as extended JSON: 5, "text", {"$oid": "…"}, {"$date": "2026-01-31T00:00:00Z"}.',
        ) from None


def _read(kind: Kind, text: str) -> Any:
    if text.startswith("{"):
        return value_of(text)
    if kind is Kind.OBJECT_ID:
        if not _HEX.fullmatch(text):
            raise ValueError("no ObjectId")
        return ObjectId(text)
    if kind in (Kind.INT, Kind.LONG):
        return Int64(int(text))
    if kind is Kind.UUID:
        return Binary(uuid.UUID(text).bytes, 4)
    if kind is Kind.DATE:
        moment = datetime.fromisoformat(text)
        return DatetimeMS(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    if kind is Kind.STRING:
        return json.loads(text) if text.startswith('"') else text
    return value_of(text)
