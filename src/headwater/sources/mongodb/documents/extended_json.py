"""Relaxed extended JSON (version 2) of BSON values, as bytes of UTF-8, without the compiled code. Pure.

Relaxed, because it can be asked: a number is a number, so that ``get_json_object(document, '$.price')`` or a variant of
Spark finds it. It is exact: a double always has a point or an exponent and as many digits as it needs, a whole number
has all of its digits, Decimal128, dates, bytes and the rest stand in objects of their own
(``{"$numberDecimal":"1.10"}``). What is not told apart is an int from a long of the same number. Fields come in their
order, nothing stands between signs.

A text that is not UTF-8 has no JSON: :class:`NoText`.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from typing import Any, Final

from headwater.sources.mongodb.documents import elements as bson
from headwater.sources.mongodb.documents.decimals import Decimal128

LAST_DATE: Final = 253_402_300_799_999
"""The end of the year 9999, in milliseconds; dates until then, from 1970 on, have a text."""
_DAY: Final = 86_400_000


class NoText(Exception):
    """A text that is not UTF-8."""


def document_json(data: bytes, at: int, end: int, depth: int = 0) -> bytes:
    """The document between *at* and *end*. :raises ValueError: it is none. :raises NoText: it has such a text."""
    parts = [
        field_json(data, kind, name, start, stop, depth)
        for kind, name, start, stop in bson.elements(data, at, end, depth)
    ]
    return b"{" + b",".join(parts) + b"}"


def field_json(data: bytes, kind: int, name: bytes, start: int, stop: int, depth: int) -> bytes:
    """A field with its name."""
    return _text(name) + b":" + value_json(data, kind, start, stop, depth)


def value_json(data: bytes, kind: int, start: int, stop: int, depth: int) -> bytes:
    """One value; *depth*: of the document that it is in."""
    if kind == bson.DOUBLE:
        return double_json(struct.unpack_from("<d", data, start)[0])
    if kind == bson.STRING:
        return _text(data[start + 4 : stop - 1])
    if kind == bson.OBJECT:
        return document_json(data, start, stop, depth + 1)
    if kind == bson.ARRAY:
        inner = bson.elements(data, start, stop, depth + 1)
        return b"[" + b",".join(value_json(data, one, at, to, depth + 1) for one, _, at, to in inner) + b"]"
    if kind in (bson.INT, bson.LONG):
        return b"%d" % int.from_bytes(data[start:stop], "little", signed=True)
    if kind == bson.BOOL:
        return b"true" if data[start] else b"false"
    if kind == bson.NULL:
        return b"null"
    if kind == bson.CODE_WITH_SCOPE:
        middle = bson.string_end(data, start + 4, stop)
        code = _text(data[start + 8 : middle - 1])
        return b'{"$code":' + code + b',"$scope":' + document_json(data, middle, stop, depth + 1) + b"}"
    return _dumped(_typed(data, kind, start, stop))


def double_json(number: float) -> bytes:
    """The fewest of 15 to 17 digits that give it back."""
    if number != number or number in (float("inf"), float("-inf")):
        name = "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
        return b'{"$numberDouble":"%s"}' % name.encode()
    text = f"{number:.15g}"
    if float(text) != number:
        text = f"{number:.16g}"
        if float(text) != number:
            text = f"{number:.17g}"
    if "." not in text and "e" not in text:
        text += ".0"
    return text.encode()


def date_text(ms: int) -> str:
    """ISO 8601, with milliseconds where there are any."""
    days, left = divmod(ms, _DAY)
    year, month, day = _civil(days)
    seconds, thousandths = divmod(left, 1000)
    fraction = f".{thousandths:03d}" if thousandths else ""
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{year:04d}-{month:02d}-{day:02d}T{clock}{fraction}Z"


def _typed(data: bytes, kind: int, start: int, stop: int) -> Any:
    if kind == bson.BINARY:
        subtype, content = bson.binary_content(data, start, stop)
        return {"$binary": {"base64": b64encode(content).decode(), "subType": f"{subtype:02x}"}}
    if kind == bson.OBJECT_ID:
        return {"$oid": data[start:stop].hex()}
    if kind == bson.DATE:
        ms = int.from_bytes(data[start:stop], "little", signed=True)
        return {"$date": date_text(ms) if 0 <= ms <= LAST_DATE else {"$numberLong": str(ms)}}
    if kind == bson.DECIMAL:
        return {"$numberDecimal": Decimal128.read(data[start:stop]).text}
    if kind == bson.TIMESTAMP:
        ordinal, seconds = struct.unpack_from("<II", data, start)
        return {"$timestamp": {"t": seconds, "i": ordinal}}
    if kind == bson.REGEX:
        middle = bson.cstring_end(data, start, stop)
        pattern, options = _utf8(data[start : middle - 1]), _utf8(data[middle : stop - 1])
        return {"$regularExpression": {"pattern": pattern, "options": options}}
    if kind == bson.DB_POINTER:
        place = {"$oid": data[stop - 12 : stop].hex()}
        return {"$dbPointer": {"$ref": _utf8(data[start + 4 : stop - 13]), "$id": place}}
    if kind == bson.CODE:
        return {"$code": _utf8(data[start + 4 : stop - 1])}
    if kind == bson.SYMBOL:
        return {"$symbol": _utf8(data[start + 4 : stop - 1])}
    if kind == bson.UNDEFINED:
        return {"$undefined": True}
    return {"$minKey": 1} if kind == bson.MIN_KEY else {"$maxKey": 1}


def _utf8(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise NoText from None


def _text(text: bytes) -> bytes:
    return _dumped(_utf8(text))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _civil(days: int) -> tuple[int, int, int]:
    """Year, month and day of the Gregorian calendar."""
    days += 719_468
    era, of_era = divmod(days, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month += 3 if month < 10 else -9
    return year + era * 400 + (month <= 2), month, day
