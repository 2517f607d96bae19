"""Postgres text: the types that columns have in a Postgres sink, and Arrow values as the server reads and prints them.

===================================  =====================================================================
in the sink (Arrow)                  in Postgres
===================================  =====================================================================
bool, int8, int16, int32, int64      boolean, smallint, smallint, integer, bigint
float, double                        real, double precision
decimal(p, s)                        numeric(p,s)
string                               text; of a source's uuid, json, jsonb, numeric or time (µs) that type
binary                               bytea
date, timestamp                      date, timestamp with or without time zone
list of one of these                 an array of it
list of lists, struct, map           jsonb (:mod:`headwater.sinks.json_rows`)
===================================  =====================================================================
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyarrow import csv

from headwater.sinks.json_rows import to_json
from headwater.sinks.sql_table import named_type
from headwater.sinks.types import array_of

CSV_ROWS: Final = 20_000
"""Rows that are encoded at a time, while the server reads those before."""

_SIMPLE: Final = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.binary(): "bytea",
    pa.date32(): "date",
}
_TEXTS: Final = frozenset(("uuid", "json", "jsonb", "numeric"))
_WHOLE: Final = {"smallint": 5, "integer": 10, "bigint": 19}
_NUMERIC: Final = re.compile(r"numeric(?:\((\d+),(\d+)\))?")
_VARCHAR: Final = re.compile(r"character varying(\(\d+\))?|character\(\d+\)")


def sql_type(field: pa.Field, source: pa.DataType | None) -> str:
    """The type of a column for *field*, whose type at the source is *source*, as ``format_type`` prints it."""
    return _type(field.type, source, named_type(field))


def _type(kind: pa.DataType, source: pa.DataType | None, named: str) -> str:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pt.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pt.is_timestamp(kind):
        return f"timestamp {'with' if kind.tz else 'without'} time zone"
    if pt.is_string(kind):
        if source == pa.time64("us"):
            return "time without time zone"
        name = named.partition("(")[0]
        return name if name in _TEXTS else "text"
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        element = source.value_type if source is not None and pt.is_list(source) else None
        return f"{_type(kind.value_type, element, named.removesuffix('[]'))}[]"
    return "jsonb"


def holds(kind: str, other: str) -> bool:
    """Whether a column of type *kind* takes every value of *other*, or refuses it without changing it."""
    if kind == other or {_general(kind), _general(other)} == {"text"}:
        return True
    if kind.endswith("[]") and other.endswith("[]"):
        return holds(kind[:-2], other[:-2])
    if kind in _WHOLE and other in _WHOLE:
        return _WHOLE[kind] >= _WHOLE[other]
    if kind == "double precision":
        return other in ("real", "smallint", "integer")
    mine = _NUMERIC.fullmatch(kind)
    if mine is None:
        return False
    if mine[1] is None:
        return other in _WHOLE or _NUMERIC.fullmatch(other) is not None
    digits, scale = int(mine[1]) - int(mine[2]), int(mine[2])
    theirs = _NUMERIC.fullmatch(other)
    if theirs is not None and theirs[1] is not None:
        return scale >= int(theirs[2]) and digits >= int(theirs[1]) - int(theirs[2])
    return other in _WHOLE and digits >= _WHOLE[other]


def _general(kind: str) -> str:
    return "text" if _VARCHAR.fullmatch(kind) else kind


def csv_of(rows: pa.Table) -> Any:
    """*rows* as csv for ``COPY``: NULL is nothing, the empty text is ``""``. A buffer."""
    columns = [_chunked(_plain(column)) for column in rows.columns]
    stream = pa.BufferOutputStream()
    options = csv.WriteOptions(include_header=False, quoting_style="needed", batch_size=CSV_ROWS)
    csv.write_csv(pa.table(columns, rows.schema.names), stream, options)
    return stream.getvalue()


def literal_of(values: Any) -> str:
    """All *values* as one literal of ``text[]``."""
    elements = _quoted(texts_of(values))
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(elements)], pa.int32()), elements), ",")
    return f"{{{joined[0].as_py()}}}"


def texts_of(values: Any) -> Any:
    """Each of *values* as the server reads it; an array."""
    plain = _plain(values)
    plain = array_of(plain)
    return plain if pt.is_string(plain.type) else plain.cast(pa.string())


def _plain(values: Any) -> Any:
    """*values* in a type whose text Arrow writes as the server reads it."""
    kind = values.type
    if pt.is_binary(kind):
        return _hexadecimal(values)
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        return _literals(values)
    return to_json(values) if pt.is_nested(kind) else values


def _hexadecimal(values: Any) -> Any:
    array = array_of(values)
    array = array.cast(pa.large_binary())
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64)[array.offset : array.offset + len(array) + 1]
    digits = (b"" if data is None else bytes(memoryview(data)[offsets[0] : offsets[-1]])).hex().encode()
    validity = pc.is_valid(array).buffers()[1] if array.null_count else None
    buffers = [validity, pa.py_buffer((offsets - offsets[0]) * 2), pa.py_buffer(digits)]
    texts = pa.Array.from_buffers(pa.large_string(), len(array), buffers)
    return pc.binary_join_element_wise(pa.scalar("\\x", pa.large_string()), texts, pa.scalar("", pa.large_string()))


def _literals(values: Any) -> Any:
    """Lists as literals of arrays."""
    array = array_of(values)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    elements = _quoted(texts_of(array.flatten()))
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, elements), ",")
    wrapped = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(pc.is_valid(array), wrapped, pa.scalar(None, pa.string()))


def _quoted(texts: Any) -> Any:
    """Elements of an array's literal."""
    texts = texts.cast(pa.string())
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return pc.fill_null(pc.binary_join_element_wise('"', escaped, '"', ""), "NULL")


def _chunked(values: Any) -> Any:
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
