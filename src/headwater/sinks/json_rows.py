"""JSON rows: Arrow columns as JSON text, whole columns at a time. Pure; no Python per row.

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
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

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
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
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
