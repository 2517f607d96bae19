"""Types and schemas of state tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from headwater.state.errors import SchemaMismatch

MAX_NAME = 100


class FieldType(Enum):
    """What a field holds, and the Python type that stands for it."""

    INT = "int"  # int, 64 bits signed: every smaller width fits, so widening a column moves no key
    UINT = "uint"  # int, 64 bits unsigned
    BOOL = "bool"
    FLOAT = "float"
    DECIMAL = "decimal"  # decimal.Decimal of any size, NaN and infinities
    TEXT = "text"
    BYTES = "bytes"
    UUID = "uuid"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"  # datetime without a time zone, microseconds
    TIMESTAMPTZ = "timestamptz"  # datetime with one; read back in UTC
    JSON = "json"  # values only: anything that json holds


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a state table."""

    name: str
    type: FieldType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A state table: its name, the version of its row layout, key fields and value fields.

    :raises SchemaMismatch: no key, a JSON key, a name twice, or a version below 1.
    """

    name: str
    version: int
    key: tuple[Field, ...]
    value: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in (*self.key, *self.value)]
        named = type(self.name) is str and self.name.isprintable() and 0 < len(self.name) <= MAX_NAME
        if not named or not self.key or len(set(names)) != len(names) or not 1 <= self.version < 1 << 16:
            raise SchemaMismatch(
                f"Table {self.name!r} needs a printable name of at most {MAX_NAME} characters, at least one key field, "
                "distinct field names and a version from 1."
            )
        for field in self.key:
            if field.type is FieldType.JSON:
                raise SchemaMismatch(
                    f"Key field {field.name!r} of table {self.name!r} cannot be json: it has no order."
                )


def fields_to_json(fields: tuple[Field, ...]) -> list[list[Any]]:
    """Fields as the catalog keeps them."""
    return [[field.name, field.type.value, field.nullable] for field in fields]


def fields_from_json(stored: list[list[Any]]) -> tuple[Field, ...]:
    return tuple(Field(name, FieldType(kind), nullable) for name, kind, nullable in stored)
