"""What was staged as bytes for the state store: JSON and the raw bytes that it refers to, never a pickle.

Whoever can write a store must not be able to run code in the process that reads it: only the classes of
:data:`_CLASSES` are created, from values of plain types. docs/formats/query.md has the format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from headwater import __version__
from headwater.sinks.data_files import DataFile
from headwater.sinks.sink import Staged, Token
from headwater.sinks.sql_staged import SqlPart, StagedRelations
from headwater.sinks.staging import Part, StagedFiles, StagedRuns
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues
from headwater.versioned.run_file import RunInfo

_VERSION: Final = f"3 {__version__}"
"""Only the release that wrote it reads it."""
_MAGIC: Final = b"HWSTAGED"
_LENGTH: Final = struct.Struct("<I")

_STORED: Final = (
    *(Staged, Token, SourceTable, SourceColumn, KeyRange, Cut),
    *(StagedFiles, DataFile, Part, StagedRelations, SqlPart, StagedRuns, RunInfo),
)
_CLASSES: Final[dict[str, type[Any]]] = {one.__name__: one for one in _STORED}
_FIELDS: Final = {one: [field.name for field in fields(one) if field.init] for one in _CLASSES.values()}
_TEXTS: Final[dict[str, tuple[type[Any], Callable[[Any], str], Callable[[str], Any]]]] = {
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "uuid": (UUID, str, UUID),
    "special_values": (SpecialValues, lambda value: str(value.value), SpecialValues),
}
"""By tag: a type whose values are texts. Of a datetime, which is a date, too, the first one counts."""


class NotStorable(TypeError):
    """A value of a type that is not stored: a sink from another package has it in its details."""


def encode(staged: Sequence[Staged]) -> bytes:
    """:raises NotStorable: there is a value of another type."""
    writer = _Writer()
    text = json.dumps([_VERSION, [writer.value(one) for one in staged], writer.tables]).encode()
    return b"".join((_MAGIC, _LENGTH.pack(len(text)), text, *writer.blobs))


def decode(data: bytes) -> list[Staged] | None:
    """``None``: another release wrote it, or it is something else. Only objects of :data:`_CLASSES` are created."""
    start = len(_MAGIC) + _LENGTH.size
    if len(data) < start or not data.startswith(_MAGIC):
        return None
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    try:
        version, staged, tables = json.loads(data[start : start + length])
        if version != _VERSION:
            return None
        reader = _Reader(memoryview(data)[start + length :], tables)
        found = [reader.value(one) for one in staged]
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, pa.ArrowException):
        return None
    return found if all(isinstance(one, Staged) for one in found) else None


class _Writer:
    """A value is itself, a list, or an object with one key: the tag of its type."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.tables: list[Any] = []
        self._at = 0
        self._known: list[SourceTable] = []

    def value(self, value: Any) -> Any:
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
            return value
        if type(value) is list:
            return [self.value(one) for one in value]
        if type(value) is tuple:
            return {"tuple": [self.value(one) for one in value]}
        if isinstance(value, dict):
            return {"dict": [[self.value(key), self.value(one)] for key, one in value.items()]}
        if isinstance(value, bytes):
            return {"bytes": self._blob(value)}
        if isinstance(value, pa.DataType):
            return {"type": self._blob(pa.schema([pa.field("", value)]).serialize().to_pybytes())}
        if isinstance(value, pa.Schema):
            return {"schema": self._blob(value.serialize().to_pybytes())}
        if isinstance(value, timedelta):
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if type(value) is SourceTable:
            return {"table": self._table(value)}
        if type(value) in _FIELDS:
            return {type(value).__name__: self._fields(value)}
        for tag, (kind, to_text, _) in _TEXTS.items():
            if type(value) is kind:
                return {tag: to_text(value)}
        raise NotStorable(f"A {type(value).__name__} is not kept.")

    def _fields(self, value: Any) -> list[Any]:
        return [self.value(getattr(value, name)) for name in _FIELDS[type(value)]]

    def _table(self, table: SourceTable) -> int:
        """Many parts are of one table, which is written once."""
        for number, known in enumerate(self._known):
            if known is table or (known.full_name == table.full_name and known == table):
                return number
        self._known.append(table)
        self.tables.append(self._fields(table))
        return len(self._known) - 1

    def _blob(self, data: bytes) -> list[int]:
        self.blobs.append(data)
        self._at += len(data)
        return [self._at - len(data), len(data)]


class _Reader:
    def __init__(self, blobs: memoryview, tables: list[Any]) -> None:
        self._blobs = blobs
        self._tables = [self._created(SourceTable, one) for one in tables]

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((tag, inside),) = value.items()
        if tag in _TEXTS:
            return _TEXTS[tag][2](inside)
        match tag:
            case "tuple":
                return tuple(self.value(one) for one in inside)
            case "dict":
                return {self.value(key): self.value(one) for key, one in inside}
            case "bytes":
                return self._blob(inside)
            case "type":
                return pa.ipc.read_schema(pa.py_buffer(self._blob(inside))).field(0).type
            case "schema":
                return pa.ipc.read_schema(pa.py_buffer(self._blob(inside)))
            case "timedelta":
                return timedelta(*inside)
            case "table":
                return self._tables[inside]
        return self._created(_CLASSES[tag], inside)

    def _created(self, kind: type[Any], values: list[Any]) -> Any:
        return kind(**dict(zip(_FIELDS[kind], map(self.value, values), strict=True)))

    def _blob(self, where: list[int]) -> bytes:
        at, length = where
        found = bytes(self._blobs[at : at + length])
        if at < 0 or len(found) != length:
            raise ValueError("It ends too early.")
        return found
