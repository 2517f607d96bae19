"""JSON of Arrow columns, in three forms. Pure.

**Rows** (:func:`json_texts`, :func:`objects_of`), whole columns at a time, no Python per row:

====================================  ==============================================================================
Arrow                                 JSON
====================================  ==============================================================================
bool, integers, floats                the same; NaN and the infinities are the strings ``"NaN"``, ``"Infinity"``, …
decimal                               a string with all its digits
string                                a string
binary                                a string, base64
date                                  a string, ``"2024-02-29"``
timestamp                             a string, ``"2024-02-29T12:00:00.000000Z"``; without a zone, without the ``Z``
list, struct, map                     array, object, object (keys as strings)
null                                  ``null``
====================================  ==============================================================================

*of_debezium* makes of dates the number of days, and of timestamps without a zone that of microseconds since 1970, as
Debezium's connectors do.

**Lines** (:func:`json_lines`): what a batch writes, in the order of its steps. Each line is an object: ``_table``, in a
mirror ``_step`` (``clear``, ``delete``, ``upsert`` or ``update``), then the columns of the row.

**Nested values** (:func:`to_json`, :func:`from_json`) of the few columns for which a database has no type, value by
value. What JSON has no exact form for is text: decimals and times as they are written, bytes as hexadecimal digits,
``NaN`` and infinities. A map is a list of pairs.
"""

from __future__ import annotations

import json
import math
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.sinks.row_batch import Append, Clear, Delete, RowBatch, Step
from headwater.sinks.types import array_of
from headwater.sources.table import SourceTable

SLICE_ROWS: Final = 20_000
SLICE_BYTES: Final = 8 << 20

_SPACE: Final = 0x20
_PLAIN = (pt.is_boolean, pt.is_integer, pt.is_floating, pt.is_string, pt.is_binary)


def slices(rows: pa.Table) -> Iterator[pa.Table]:
    """*rows* in slices that take little as text."""
    of_row = max(rows.nbytes // max(rows.num_rows, 1), 1)
    step = max(min(SLICE_ROWS, SLICE_BYTES // of_row), 1)
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def json_objects(columns: Mapping[str, Any], rows: int, *, of_debezium: bool = False) -> Any:
    """One JSON object per row: a string array."""
    texts = {name: json_texts(values, of_debezium=of_debezium) for name, values in columns.items()}
    return objects_of(texts, rows)


def objects_of(texts: Mapping[str, Any], rows: int) -> Any:
    """Objects of columns (or scalars) that are JSON text already."""
    pieces: list[Any] = []
    start = "{"
    for name, values in texts.items():
        pieces += [f"{start}{json.dumps(name, ensure_ascii=False)}:", values]
        start = ","
    if not pieces:
        return pa.repeat(pa.scalar("{}"), rows)
    made = pc.binary_join_element_wise(*pieces, "}", "")
    return pa.repeat(made, rows) if isinstance(made, pa.Scalar) else made


def json_texts(values: Any, *, of_debezium: bool = False) -> Any:
    """Each value as JSON text; null is ``null``."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return pc.fill_null(_texts(values, of_debezium), "null")


def plain(rows: pa.Table) -> pa.Table:
    """*rows* with types that every driver takes: bool, numbers, text and bytes; all else as exact text, or as JSON."""
    columns = [
        values if any(is_kind(values.type) for is_kind in _PLAIN) else _unquoted(values) for values in rows.columns
    ]
    return pa.table(columns, rows.schema.names)


def _unquoted(values: Any) -> Any:
    values = array_of(values)
    return values.cast(pa.string()) if not pt.is_nested(values.type) else _texts(values, False)


def _texts(values: Any, of_debezium: bool) -> Any:
    kind = values.type
    if pt.is_boolean(kind) or pt.is_integer(kind):
        return values.cast(pa.string())
    if pt.is_floating(kind):
        return _float_texts(values)
    if pt.is_string(kind) or pt.is_large_string(kind):
        return _quoted(escaped(values.cast(pa.string())))
    if pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind):
        return _quoted(base64_texts(values))
    if of_debezium and pt.is_date(kind):
        return values.cast(pa.int32()).cast(pa.string())
    if pt.is_timestamp(kind):
        return _timestamp_texts(values, of_debezium)
    if pt.is_list(kind) or pt.is_struct(kind) or pt.is_map(kind):
        return _nested_texts(values, of_debezium)
    return _quoted(values.cast(pa.string()))


def _quoted(texts: Any) -> Any:
    return pc.binary_join_element_wise('"', texts, '"', "")


def escaped(texts: Any) -> Any:
    """What stands between the quotes of JSON strings."""
    _, raw = _content(texts)
    if not ((raw < _SPACE) | (raw == ord('"')) | (raw == ord("\\"))).any():
        return texts
    texts = pc.replace_substring(texts, "\\", "\\\\")
    texts = pc.replace_substring(texts, '"', '\\"')
    for code in np.unique(raw[raw < _SPACE]):
        texts = pc.replace_substring(texts, chr(code), json.dumps(chr(code))[1:-1])
    return texts


def _float_texts(values: Any) -> Any:
    texts = values.cast(pa.string())
    if pc.all(pc.is_finite(values)).as_py() is not False:
        return texts
    for found, told in (("nan", '"NaN"'), ("-nan", '"NaN"'), ("inf", '"Infinity"'), ("-inf", '"-Infinity"')):
        texts = pc.if_else(pc.equal(texts, found), told, texts)
    return texts


def _timestamp_texts(values: Any, of_debezium: bool) -> Any:
    if of_debezium and values.type.tz is None:
        return values.cast(pa.int64()).cast(pa.string())
    texts = values.cast(pa.timestamp(values.type.unit)).cast(pa.string())
    return pc.binary_join_element_wise(
        '"', pc.replace_substring(texts, " ", "T"), 'Z"' if values.type.tz is not None else '"', ""
    )


def _nested_texts(values: Any, of_debezium: bool) -> Any:
    kind = values.type
    if pt.is_struct(kind):
        columns = {kind.field(place).name: values.field(place) for place in range(kind.num_fields)}
        made = json_objects(columns, len(values), of_debezium=of_debezium)
        return pc.if_else(values.is_valid(), made, pa.scalar(None, pa.string()))
    if pt.is_map(kind):
        keys = _quoted(escaped(values.keys.cast(pa.string())))
        inside = pc.binary_join_element_wise(keys, json_texts(values.items, of_debezium=of_debezium), ":")
        opens, closes = "{", "}"
    else:
        inside = json_texts(values.values, of_debezium=of_debezium)
        opens, closes = "[", "]"
    lists = pa.ListArray.from_arrays(values.offsets, inside)
    made = pc.binary_join_element_wise(opens, pc.binary_join(lists, ","), closes, "")
    return pc.if_else(values.is_valid(), made, pa.scalar(None, pa.string()))


def base64_texts(values: Any) -> Any:
    """Base64 of each value, by one call for all: each is put where its length is a multiple of three."""
    is_valid = values.is_valid()
    values = pc.fill_null(values.cast(pa.binary()), b"")
    offsets, raw = _content(values)
    lengths = np.diff(offsets).astype(np.int64)
    groups = -(-lengths // 3)
    starts = np.concatenate(([0], np.cumsum(groups)))
    padded = np.zeros(int(starts[-1]) * 3, np.uint8)
    moved = np.repeat(starts[:-1] * 3 - offsets[:-1], lengths)
    padded[np.arange(moved.size) + moved] = raw
    coded = np.frombuffer(b2a_base64(padded.tobytes(), newline=False), np.uint8).copy()
    ends = starts[1:] * 4
    lacking = groups * 3 - lengths
    coded[ends[lacking >= 1] - 1] = ord("=")
    coded[ends[lacking == 2] - 2] = ord("=")
    places = pa.py_buffer((starts * 4).astype(np.int32))
    made = pa.Array.from_buffers(pa.string(), len(values), [None, places, pa.py_buffer(coded)])
    return pc.if_else(is_valid, made, pa.scalar(None, pa.string()))


def _content(values: Any) -> tuple[Any, Any]:
    """Where each value begins and the last one ends, and their bytes; only those of *values* where it is a slice."""
    _, places, data = values.buffers()
    if not len(values) or data is None:
        return np.zeros(len(values) + 1, np.int32), np.zeros(0, np.uint8)
    offsets = np.frombuffer(places, np.int32)[values.offset : values.offset + len(values) + 1]
    return offsets - offsets[0], np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def json_lines(table: SourceTable, batch: RowBatch, rows: int) -> Iterator[list[str]]:
    """The lines in groups of *rows*, the last one may be smaller: the same batch is always cut in the same way."""
    held: list[str] = []
    for step in batch.steps():
        for some in step_lines(table, step):
            held += some
            whole = len(held) - len(held) % rows
            yield from (held[start : start + rows] for start in range(0, whole, rows))
            held = held[whole:]
    if held:
        yield held


def step_lines(table: SourceTable, step: Step) -> Iterator[list[str]]:
    """The lines of one step."""
    fixed: dict[str, Any] = {"_table": json.dumps(table.full_name, ensure_ascii=False)}
    if not isinstance(step, Append):
        fixed["_step"] = json.dumps(type(step).__name__.lower())
    if isinstance(step, Clear):
        yield objects_of(fixed, 1).to_pylist()
    for rows in slices(rows_of(step)):
        texts = {name: json_texts(rows.column(name)) for name in rows.schema.names}
        yield objects_of({**fixed, **texts}, rows.num_rows).to_pylist()


def rows_of(step: Step) -> pa.Table:
    """The rows of *step*; none of one that clears."""
    match step:
        case Clear():
            return pa.table({})
        case Delete(keys):
            return keys
        case _:
            return step.rows


def to_json(values: Any) -> Any:
    """*values* as texts."""
    texts = [None if one is None else json.dumps(_exact(one), ensure_ascii=False) for one in values.to_pylist()]
    return pa.array(texts, pa.string())


def from_json(texts: Any, kind: pa.DataType) -> Any:
    """The values that :func:`to_json` made *texts* of."""
    made = _reader(kind)
    found = [None if one is None else made(json.loads(one)) for one in texts.to_pylist()]
    return pa.array(found, kind)


def _exact(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _exact(one) for name, one in value.items()}
    return [_exact(one) for one in value] if isinstance(value, list | tuple) else value


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    def or_null(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: None if value is None else make(value)

    if pt.is_list(kind):
        element = _reader(kind.value_type)
        return or_null(lambda value: [element(one) for one in value])
    if pt.is_map(kind):
        key, item = _reader(kind.key_type), _reader(kind.item_type)
        return or_null(lambda value: [(key(one[0]), item(one[1])) for one in value])
    if pt.is_struct(kind):
        makers = {field.name: _reader(field.type) for field in kind}
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
