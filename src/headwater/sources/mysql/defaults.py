"""Constant defaults: what rows from before an added column have in it, from what the catalog tells.

MySQL tells a constant as its text, and says ``DEFAULT_GENERATED`` where it is an expression; MariaDB tells every
default as an expression, a constant in quotes. A default that is computed (the time of the statement,
say) is not known here.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from headwater.sources.mysql.catalog import CatalogColumn
from headwater.sources.mysql.types import MySqlType
from headwater.sources.table import SourceColumn

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
_ESCAPES: Final = {"0": "\0", "n": "\n", "r": "\r", "t": "\t", "b": "\b", "Z": "\x1a"}
_EPOCH: Final = datetime.fromisoformat("1970-01-01")


def constant_default(told: CatalogColumn, column: SourceColumn) -> pa.Array | None:
    """An array of one value of the column's type; ``None`` where it is null or not known."""
    text = default_text(told)
    if text is None:
        return None
    try:
        return pa.array([_value(text, told, column.type)], column.type)
    except (ValueError, ArithmeticError, pa.ArrowException):
        return None


def default_text(told: CatalogColumn) -> str | None:
    """The text of a constant default; that which the server takes where a column is never null and has none."""
    if told.is_generated or "DEFAULT_GENERATED" in told.extra.upper():
        return None
    text = told.default
    if text is None or text.upper() == "NULL":
        return None if told.nullable else _implied(told)
    if text.startswith("'") and text.endswith("'") and len(text) > 1:
        return _unquoted(text[1:-1])
    if "(" in text or text.lower().startswith(("current_", "now", "uuid")):
        return None
    return text


def _unquoted(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        return "'" if found[0] == "''" else _ESCAPES.get(found[1], found[1])

    return re.sub(r"''|\\(.)", one, text, flags=re.DOTALL)


def _implied(told: CatalogColumn) -> str | None:
    kind = MySqlType.parse(told.type_text).name
    if kind == "enum":
        first = re.match(r"enum\('((?:[^'\\]|\\.|'')*)'", told.type_text, re.IGNORECASE)
        return _unquoted(first[1]) if first else None
    if kind in ("date", "datetime", "timestamp", "json") or kind in ("uuid", "inet4", "inet6"):
        return None
    if kind == "time":
        return "00:00:00"
    is_text = "char" in kind or "text" in kind or "blob" in kind or "binary" in kind or kind == "set"
    return "" if is_text else "0"


def _value(text: str, told: CatalogColumn, kind: pa.DataType) -> Any:
    if pt.is_boolean(kind):
        return text not in ("0", "b'0'", "")
    if pt.is_integer(kind) or pt.is_decimal(kind) or pt.is_floating(kind):
        if not _NUMBER.fullmatch(text):
            raise ValueError
        number = Decimal(text)
        if pt.is_decimal(kind):
            return number.quantize(Decimal(1).scaleb(-kind.scale))
        return float(number) if pt.is_floating(kind) else int(number)
    if pt.is_binary(kind):
        size = MySqlType.parse(told.type_text)
        value = text.encode("utf-8")
        return value.ljust(size.numbers[0], b"\0") if size.name == "binary" and size.numbers else value
    if pt.is_date(kind):
        return date.fromisoformat(text[:10])
    if pt.is_timestamp(kind):
        return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
    if pt.is_time(kind):
        return time.fromisoformat(text)
    return text
