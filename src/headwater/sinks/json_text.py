"""JSON text: nested values as sinks in databases hold them, and back. Pure.

Whole numbers, floating numbers, truth values and texts are those of JSON. What JSON has no exact form for is text:
decimals and times as they are written, bytes as hexadecimal digits, ``NaN`` and infinities. A map is a list of pairs.
Values are gone through one by one: this is for the few columns that no database has a type for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt


def to_json(values: Any) -> Any:
    """*values* as texts."""
    texts = [None if one is None else json.dumps(_plain(one), ensure_ascii=False) for one in values.to_pylist()]
    return pa.array(texts, pa.string())


def from_json(texts: Any, kind: pa.DataType) -> Any:
    """The values that :func:`to_json` made *texts* of."""
    made = _maker(kind)
    found = [None if one is None else made(json.loads(one)) for one in texts.to_pylist()]
    return pa.array(found, kind)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _maker(kind: pa.DataType) -> Callable[[Any], Any]:
    def or_null(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: None if value is None else make(value)

    if pt.is_list(kind):
        element = _maker(kind.value_type)
        return or_null(lambda value: [element(one) for one in value])
    if pt.is_map(kind):
        key, item = _maker(kind.key_type), _maker(kind.item_type)
        return or_null(lambda value: [(key(one[0]), item(one[1])) for one in value])
    if pt.is_struct(kind):
        makers = {field.name: _maker(field.type) for field in kind}
        return or_null(lambda value: {name: make(value.get(name)) for name, make in makers.items()})
    if pt.is_floating(kind):
        return or_null(float)
    if pt.is_decimal(kind):
        return or_null(Decimal)
    if pt.is_binary(kind):
        return or_null(bytes.fromhex)
    if pt.is_date(kind):
        return or_null(date.fromisoformat)
    if pt.is_timestamp(kind):
        return or_null(lambda value: _moment(value, has_zone=kind.tz is not None))
    return lambda value: value


def _moment(text: str, *, has_zone: bool) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.astimezone(UTC) if has_zone else moment
