"""Evolution: how the columns of a table at a sink follow those of its source. Pure.

A column that the sink lacks is added at the end. A column that the source has no longer stays, and is null from then
on, or goes, and the table is written anew. A column that was renamed, which its field id tells, is a new one: a mirror
has the old values there, too, and is written anew for it. A type may become wider: the table is written anew. Any other
change is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from headwater.sinks.errors import SinkSchemaError
from headwater.sources.table import FIELD_ID


@dataclass(frozen=True, slots=True)
class Evolution:
    """What becomes of a table's columns.

    :ivar schema: its columns afterwards. :ivar added: those that are new.
    :ivar renamed: of the new columns those that had another name, which is told. :ivar dropped: names that go.
    :ivar must_rewrite: the files that the table has are not as they must be.
    """

    schema: pa.Schema
    added: tuple[pa.Field, ...]
    renamed: Mapping[str, str]
    must_rewrite: bool
    dropped: tuple[str, ...] = ()


def evolve(table: str, existing: pa.Schema, wanted: pa.Schema, *, is_mirror: bool, drops: bool = False) -> Evolution:
    """How *existing* takes the rows of *wanted*.

    :param is_mirror: values of columns that were renamed are copied. :param drops: columns that the source had go.
    :raises SinkSchemaError: it cannot.
    """
    fields: list[pa.Field] = []
    wider = False
    for field in existing:
        place = wanted.get_field_index(field.name)
        if place < 0 or holds(field.type, wanted.field(place).type):
            fields.append(field)
        elif holds(wanted.field(place).type, field.type):
            fields.append(wanted.field(place))
            wider = True
        else:
            raise SinkSchemaError(
                table,
                f"column {field.name!r} is {field.type} there and became {wanted.field(place).type}.",
                next_step="Deliver it to another directory, or remove the table there and take a new snapshot.",
            )
    known = {name.lower() for name in existing.names}
    added = tuple(field for field in wanted if field.name not in existing.names)
    clash = next((field.name for field in added if field.name.lower() in known), None)
    if clash is not None:
        raise SinkSchemaError(
            table,
            f"column {clash!r} differs from one that is there in upper and lower case only.",
            next_step="Deliver it to another directory.",
        )
    renamed = _renamed(existing, wanted, added) if is_mirror or drops else {}
    gone = [one for one in existing if one.name not in wanted.names and FIELD_ID in (one.metadata or {})]
    dropped = tuple(one.name for one in gone) if drops else ()
    schema = pa.schema([field for field in (*fields, *added) if field.name not in dropped])
    return Evolution(schema, added, renamed, wider or bool(renamed) or bool(dropped), dropped)


def _renamed(existing: pa.Schema, wanted: pa.Schema, added: Iterable[pa.Field]) -> dict[str, str]:
    gone = {_field_id(field): field for field in existing if field.name not in wanted.names}
    pairs = [(field, gone[_field_id(field)]) for field in added if _field_id(field) in gone]
    return {field.name: old.name for field, old in pairs if holds(field.type, old.type)}


def _field_id(field: pa.Field) -> bytes:
    return bytes((field.metadata or {}).get(FIELD_ID, field.name.encode() + b" has none"))


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether every value of *other* is one of *kind*."""
    if kind == other:
        return True
    if pt.is_signed_integer(kind) and pt.is_signed_integer(other):
        return bool(kind.bit_width >= other.bit_width)
    if pt.is_decimal(kind) and pt.is_decimal(other):
        return bool(kind.scale >= other.scale and kind.precision - kind.scale >= other.precision - other.scale)
    if pt.is_decimal(kind) and pt.is_signed_integer(other):
        return bool(kind.precision - kind.scale >= {8: 3, 16: 5, 32: 10, 64: 19}[other.bit_width])
    if pt.is_float64(kind):
        return bool(pt.is_float32(other) or (pt.is_signed_integer(other) and other.bit_width <= 32))
    if pt.is_list(kind) and pt.is_list(other):
        return holds(kind.value_type, other.value_type)
    if pt.is_struct(kind) and pt.is_struct(other):
        return kind.names == other.names and all(
            holds(mine.type, theirs.type) for mine, theirs in zip(kind, other, strict=True)
        )
    return bool(
        pt.is_map(kind)
        and pt.is_map(other)
        and holds(kind.key_type, other.key_type)
        and holds(kind.item_type, other.item_type)
    )
