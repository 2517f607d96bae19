"""MySQL text: the types that columns have in a sink of MySQL or MariaDB, and Arrow values as the server reads them.

===================================  ============================================================================
in the sink (Arrow)                  in MySQL and MariaDB
===================================  ============================================================================
bool, int8, int16, int32, int64      tinyint, tinyint, smallint, int, bigint; of a source's unsigned: unsigned
float, double                        double
decimal(p, s)                        decimal(p,s); text where it has more than 30 decimals
string                               longtext; of a source's uuid varchar(36), of a time (µs) time(6)
binary                               longblob
string, binary of a key              varchar, varbinary: what an index holds, 3072 bytes in all
date, timestamp                      date, datetime(6); with a zone in UTC
list, struct, map                    longtext with JSON (:mod:`headwater.sinks.json_rows`)
===================================  ============================================================================
"""

from __future__ import annotations

import binascii
import re
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.sinks.json_rows import from_json, to_json
from headwater.sinks.sql_table import named_type
from headwater.sinks.types import array_of
from headwater.sources.table import SourceTable
from headwater.versioned.fitting import cast

KEY_BYTES: Final = 3072
LONGEST_KEY: Final = 768

_SIMPLE: Final = {
    pa.bool_(): "tinyint",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "double",
    pa.float64(): "double",
    pa.date32(): "date",
}
_UNSIGNED: Final = {
    pa.uint8(): "tinyint unsigned",
    pa.uint16(): "smallint unsigned",
    pa.uint32(): "int unsigned",
    pa.uint64(): "bigint unsigned",
}
_WHOLE: Final = {"tinyint": 3, "smallint": 5, "mediumint": 8, "int": 10, "bigint": 20}
_DIGITS: Final = {"tinyint": 3, "smallint": 5, "mediumint": 7, "int": 10, "bigint": 19}
_TEXT: Final = re.compile(r"(var)?char\(\d+\)|(tiny|medium|long)?text")
_BYTES: Final = re.compile(r"(var)?binary\(\d+\)|(tiny|medium|long)?blob")
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_WIDTH: Final = re.compile(r"^((?:tiny|small|medium|big)?int)\(\d+\)")


def key_length(table: SourceTable) -> int:
    """How many characters of text each column of the key may have, so that an index holds them all."""
    kinds = [table.column(name).type for name in table.key_columns]
    wide = [kind for kind in kinds if not (pt.is_primitive(kind) or pt.is_decimal(kind))]
    left = KEY_BYTES - 1 - 20 * (len(kinds) - len(wide))
    return min(LONGEST_KEY - 1, left // 4 // max(len(wide), 1))


def sql_type(field: pa.Field, source: pa.DataType | None, key: tuple[str, ...] = (), length: int = 0) -> str:
    """The type of a column, as ``information_schema`` prints it, without display widths.

    :param key: columns of an index, whose texts have at most *length* characters.
    """
    found = _type(field.type, source, named_type(field))
    if field.name in key and found in ("longtext", "longblob"):
        return f"varchar({length})" if found == "longtext" else f"varbinary({length * 4})"
    return found


def _type(kind: pa.DataType, source: pa.DataType | None, named: str) -> str:
    if source in _UNSIGNED:
        return _UNSIGNED[source]
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pt.is_timestamp(kind):
        return "datetime(6)"
    number = kind if pt.is_decimal(kind) else source
    if number is not None and pt.is_decimal(number) and number.precision <= 65 and 0 <= number.scale <= 30:
        return f"decimal({number.precision},{number.scale})"
    if pt.is_binary(kind):
        return "longblob"
    if pt.is_string(kind) and source == pa.time64("us"):
        return "time(6)"
    return "varchar(36)" if pt.is_string(kind) and named == "uuid" else "longtext"


def normal(kind: str) -> str:
    """A type of ``information_schema`` without its display width."""
    return _WIDTH.sub(r"\1", kind)


def holds(kind: str, other: str) -> bool:
    """Whether a column of type *kind* takes every value of *other*, or refuses it without changing it."""
    for family in (_TEXT, _BYTES):
        if family.fullmatch(kind) and family.fullmatch(other):
            return True
    if kind == other:
        return True
    mine, theirs = kind.removesuffix(" unsigned"), other.removesuffix(" unsigned")
    if mine in _WHOLE and theirs in _WHOLE:
        if (kind == mine) == (other == theirs):
            return _WHOLE[mine] >= _WHOLE[theirs]
        return kind == mine and _WHOLE[mine] > _WHOLE[theirs]
    if kind == "double":
        return other == "float" or (theirs in _WHOLE and theirs != "bigint")
    found, told = _DECIMAL.fullmatch(kind), _DECIMAL.fullmatch(other)
    if found is None:
        return False
    digits, scale = int(found[1]) - int(found[2]), int(found[2])
    if told is not None:
        return scale >= int(told[2]) and digits >= int(told[1]) - int(told[2])
    return theirs in _WHOLE and digits >= _DIGITS[theirs] + (other == "bigint unsigned")


def lines_of(rows: pa.Table) -> bytes:
    """*rows* for ``LOAD DATA`` with its defaults: tabs between, ``\\N`` for null; bytes as hexadecimal digits."""
    columns = []
    for column in rows.columns:
        texts = _texts(column)
        if pt.is_string(column.type) or pt.is_nested(column.type):
            for found, written in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n")):
                texts = pc.replace_substring(texts, found, written)
        columns.append(pc.fill_null(texts, "\\N"))
    lines = pc.binary_join_element_wise(pc.binary_join_element_wise(*columns, "\t"), "\n", "")
    return _content(lines)


def tuples_of(rows: pa.Table) -> bytes:
    """*rows* as what stands after ``VALUES``."""
    columns = [pc.fill_null(_literals(column), "NULL") for column in rows.columns]
    joined = pc.binary_join_element_wise(*columns, ",")
    return _content(pc.binary_join_element_wise(",(", joined, ")", ""))[1:]


def values_of(texts: list[Any], field: pa.Field, source: pa.DataType | None, kind: str) -> Any:
    """A column that was read, its values as texts (bytes as hexadecimal digits), in the sink's type."""
    wanted = field.type
    if pt.is_binary(wanted):
        return pa.array([None if one is None else binascii.unhexlify(one) for one in texts], wanted)
    array = pa.array(texts, pa.string())
    if pt.is_nested(wanted):
        return from_json(array, wanted)
    if pt.is_boolean(wanted):
        return pc.equal(array, "1")
    if pt.is_float32(wanted):
        return array.cast(pa.float64()).cast(wanted)
    if pt.is_timestamp(wanted):
        return array.cast(pa.timestamp("us")).cast(wanted)
    if pt.is_string(wanted) and source is not None and kind.startswith("decimal"):
        return cast(array.cast(source), wanted)
    return array.cast(wanted)


def _literals(values: Any) -> Any:
    texts = _texts(values)
    kind = values.type
    if pt.is_integer(kind) or pt.is_boolean(kind):
        return texts
    if pt.is_string(kind) or pt.is_nested(kind):
        texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), "'", "\\'")
    return pc.binary_join_element_wise("X'" if pt.is_binary(kind) else "'", texts, "'", "")


def _texts(values: Any) -> Any:
    array = array_of(values)
    kind = array.type
    if pt.is_binary(kind):
        return _digits(array)
    if pt.is_nested(kind):
        return to_json(array)
    if pt.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pt.is_float32(kind):
        array = array.cast(pa.float64())
    elif pt.is_timestamp(kind):
        array = array.cast(pa.timestamp("us"))
    return array.cast(pa.string())


def _digits(array: Any) -> Any:
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    digits = (b"" if data is None else bytes(memoryview(data)[offsets[0] : offsets[-1]])).hex().encode()
    validity = pc.is_valid(array).buffers()[1] if array.null_count else None
    made = [validity, pa.py_buffer(((offsets - offsets[0]) * 2).astype(np.int32)), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(array), made)


def _content(lines: Any) -> bytes:
    """All texts of an array, one after the other."""
    array = array_of(lines)
    _, places, data = array.buffers()
    if data is None or not len(array):
        return b""
    offsets = np.frombuffer(places, np.int32)
    return bytes(memoryview(data)[offsets[array.offset] : offsets[array.offset + len(array)]])
