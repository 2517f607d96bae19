"""Constant defaults: what rows from before an added column have in it.

A statement writes a constant as a literal. The catalog writes it as the server's family does: MySQL gives its text, and
``DEFAULT_GENERATED`` where it is an expression; MariaDB gives an expression, a text in quotes. Whatever is
computed, depends on the time zone of a session, or would be converted by rules that are not the same everywhere is
unknown here: the table is read again then.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from headwater.sources.mysql.catalog import CatalogColumn
from headwater.sources.mysql.column_clause import ColumnClause, Literal
from headwater.sources.mysql.table_shape import labels
from headwater.sources.mysql.types import BINARIES, GEOMETRIES, TEXTS, MySqlType
from headwater.sources.table import SourceColumn, SpecialValues

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_TIME: Final = re.compile(r"\d\d:\d\d:\d\d(\.(\d{1,6}))?")
_EPOCH: Final = datetime.fromisoformat("1970-01-01")


def clause_default(clause: ColumnClause, column: SourceColumn) -> pa.Array | None:
    """An array of one value of the column's type, perhaps null; ``None`` where it is not known."""
    if clause.is_computed:
        return None
    if clause.default is not None:
        return _array(*clause.default, clause.type, column)
    if clause.nullable and not clause.type.startswith("timestamp"):  # which older settings make never null
        return pa.nulls(1, column.type)
    return _array(*_implied(clause.type), clause.type, column)


def constant_default(told: CatalogColumn, column: SourceColumn) -> pa.Array | None:
    """As :func:`clause_default`, of a column that the catalog describes."""
    extra = told.extra.upper()
    if told.is_generated or "DEFAULT_GENERATED" in extra or "AUTO_INCREMENT" in extra:
        return None
    text = told.default
    if text is None or text.upper() == "NULL":
        return pa.nulls(1, column.type) if told.nullable else _array(*_implied(told.type_text), told.type_text, column)
    literal = Literal.TEXT
    bits = re.fullmatch(r"b'([01]+)'", text)
    if bits is not None:
        literal, text = Literal.BITS, bits[1]
    elif text.startswith("'") and text.endswith("'") and len(text) > 1:
        text = text[1:-1].replace("''", "'")
    elif "(" in text:
        return None
    if "\\" in text or (text.startswith("0x") and MySqlType.parse(told.type_text).name in BINARIES):
        return None
    return _array(literal, text, told.type_text, column)


def _implied(type_text: str) -> tuple[Literal, str]:
    """What the server takes where a column is never null and has no default."""
    kind = MySqlType.parse(type_text).name
    if kind == "enum":
        return Literal.TEXT, next(iter(labels(type_text)), "\\")
    if kind in ("date", "datetime", "timestamp", "json", "uuid", "inet4", "inet6", "vector") or kind in GEOMETRIES:
        return Literal.COMPUTED, ""
    if kind == "time":
        return Literal.TEXT, "00:00:00"
    return (Literal.TEXT, "") if kind in TEXTS or kind in BINARIES else (Literal.NUMBER, "0")


def _array(literal: Literal, text: str, type_text: str, column: SourceColumn) -> pa.Array | None:
    if literal is Literal.NULL:
        return pa.nulls(1, column.type)
    kind = MySqlType.parse(type_text)
    if literal is Literal.COMPUTED or (column.special_values is SpecialValues.TEXT and kind.name not in TEXTS):
        return None
    try:
        return pa.array([_value(literal, text, kind, type_text, column.type)], column.type)
    except (ValueError, ArithmeticError, pa.ArrowException):
        return None


def _value(literal: Literal, text: str, kind: MySqlType, type_text: str, arrow: pa.DataType) -> Any:
    """:raises ValueError: the server may make something else of it."""
    if kind.name == "bit":
        number = int(text, 2) if literal is Literal.BITS else int(text)
        size = kind.numbers[0] if kind.numbers else 1
        if literal is Literal.TEXT or number >> size:
            raise ValueError
        return bool(number) if pa.types.is_boolean(arrow) else number.to_bytes((size + 7) // 8, "big")
    if literal is Literal.BITS:
        raise ValueError
    if kind.name in TEXTS or kind.name in BINARIES:
        return _text(literal, text, kind, type_text)
    if kind.name == "date" and _DATE.fullmatch(text):
        return date.fromisoformat(text)
    if kind.name == "datetime" and _DATE.fullmatch(text[:10]) and (len(text) == 10 or _is_time(text[11:], kind)):
        return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
    if kind.name == "time" and _is_time(text, kind):
        return time.fromisoformat(text)
    if kind.name == "year" and literal is Literal.TEXT and len(text.lstrip("0")) < 4:  # '0' is 2000, and 0 is 0
        raise ValueError
    return _number(text, kind, arrow)


def _number(text: str, kind: MySqlType, arrow: pa.DataType) -> Any:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    number = Decimal(text)
    if pa.types.is_boolean(arrow) and number in (0, 1):
        return bool(number)
    if pa.types.is_floating(arrow) and not kind.numbers:
        return float(number)
    scale = arrow.scale if pa.types.is_decimal(arrow) else 0
    exact = number.quantize(Decimal(1).scaleb(-scale))
    if exact != number or (kind.name == "year" and 0 < number < 100):
        raise ValueError
    if pa.types.is_decimal(arrow):
        return exact
    if not pa.types.is_integer(arrow):
        raise ValueError
    return int(exact)


def _text(literal: Literal, text: str, kind: MySqlType, type_text: str) -> Any:
    if literal is Literal.NUMBER and not re.fullmatch(r"0|[1-9]\d*", text):
        raise ValueError
    if kind.name in BINARIES:
        value = text.encode("ascii")
        if kind.numbers and len(value) > kind.numbers[0]:
            raise ValueError
        return value.ljust(kind.numbers[0] if kind.numbers else 1, b"\0") if kind.name == "binary" else value
    if kind.name in ("json", "uuid", "inet4", "inet6") or (
        kind.name in ("enum", "set") and literal is not Literal.TEXT
    ):
        raise ValueError
    if kind.name == "enum" and (text not in labels(type_text) or not text.isascii()):
        raise ValueError
    if kind.name == "set" and (text not in ("", *labels(type_text)) or not text.isascii()):
        raise ValueError
    if kind.name == "varchar" and len(text) > (kind.numbers or (0,))[0]:  # blanks at its end are cut
        raise ValueError
    return text.rstrip(" ") if kind.name == "char" else text


def _is_time(text: str, kind: MySqlType) -> bool:
    found = _TIME.fullmatch(text)
    return found is not None and len(found[2] or "") <= (kind.numbers[0] if kind.numbers else 0)
