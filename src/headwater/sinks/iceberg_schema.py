"""Columns of Iceberg tables: by which ids they go, and how they follow those of their source. Pure; needs pyiceberg.

A file tells for each column the id, not only the name: a renamed column keeps its id, and no file is written anew. So
does a column whose type Iceberg widens by itself (int to long, float to double, a decimal of the same scale). Any other
wider type is a new column of the same name, and the table is written anew. Columns that the source has no longer stay,
unless another one has their name.

Which column of the source each one is, is kept in a property of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Final
from zlib import crc32

import pyarrow as pa
import pyarrow.types as pt
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.sink import Mode
from headwater.sinks.table_schema import evolve
from headwater.sources.table import FIELD_ID

PARQUET_ID: Final = b"PARQUET:field_id"

_SIMPLE: Final[tuple[tuple[Callable[[Any], bool], type[IcebergType]], ...]] = (
    (pt.is_boolean, BooleanType),
    (pt.is_int8, IntegerType),
    (pt.is_int16, IntegerType),
    (pt.is_int32, IntegerType),
    (pt.is_int64, LongType),
    (pt.is_float32, FloatType),
    (pt.is_float64, DoubleType),
    (pt.is_string, StringType),
    (pt.is_binary, BinaryType),
    (pt.is_date32, DateType),
)
_ARROW: Final[Mapping[type[Any], pa.DataType]] = {
    BooleanType: pa.bool_(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    DateType: pa.date32(),
    TimestampType: pa.timestamp("us"),
    TimestamptzType: pa.timestamp("us", tz="UTC"),
}


@dataclass(frozen=True)
class Layout:
    """The columns of a table.

    :ivar schema: as Iceberg has them. :ivar sources: by id: the field id at the source.
    """

    schema: Schema
    sources: Mapping[int, str]

    @classmethod
    def of(cls, table: str, schema: Schema, sources: str | None) -> Layout:
        """:raises SinkSchemaError: a column has a type that is never written here."""
        for field in schema.fields:
            if _arrow_type(field.field_type) is None:
                raise SinkSchemaError(
                    table,
                    f"column {field.name!r} is {field.field_type} there.",
                    next_step="Deliver it to another namespace or warehouse.",
                )
        return cls(schema, {int(name): text for name, text in json.loads(sources or "{}").items()})

    @property
    def sources_text(self) -> str:
        return json.dumps({str(name): text for name, text in sorted(self.sources.items())})

    @property
    def arrow(self) -> pa.Schema:
        """The columns as files have them, with their ids."""
        return pa.schema([_arrow_field(field, self.sources.get(field.field_id)) for field in self.schema.fields])

    def columns(self, names: Iterable[str]) -> pa.Schema:
        """Those of *names*, in the order of the table."""
        wanted = set(names)
        return pa.schema([field for field in self.arrow if field.name in wanted])

    @property
    def names(self) -> dict[int, str]:
        return {field.field_id: field.name for field in self.schema.fields}


@dataclass(frozen=True)
class Plan:
    """What becomes of a table's columns.

    :ivar is_changed: they are not as they were. :ivar must_rewrite: nor are the files.
    :ivar names: by id: what files that are there, and new ones, have.
    """

    layout: Layout
    is_changed: bool
    must_rewrite: bool
    names: Mapping[int, str]
    renamed: ClassVar[Mapping[str, str | None]] = {}
    """Columns keep their ids: files are read by these."""


def new_layout(wanted: pa.Schema) -> Layout:
    """The columns of a table that is made for *wanted*; any catalog gives the same ids."""
    numbers = count(1)
    fields = [NestedField(next(numbers), one.name, _iceberg_type(one.type, numbers), required=False) for one in wanted]
    schema = assign_fresh_schema_ids(Schema(*fields))
    return Layout(schema, _sources(zip(schema.fields, wanted, strict=True)))


def plan(table: str, layout: Layout, wanted: pa.Schema, last_id: int, mode: Mode, *, emptied: bool = False) -> Plan:
    """How a table with *layout* takes the rows of *wanted*. :raises SinkSchemaError: it cannot."""
    as_files = pa.schema([pa.field(one.name, _file_type(one.type), metadata=one.metadata) for one in wanted])
    before = layout.arrow
    evolution = evolve(table, before, as_files, mode, copies=True, emptied=emptied)
    origins = {name: name for name in evolution.schema.names if name in before.names} | dict(evolution.renamed)
    moved = {old: new for new, old in evolution.renamed.items() if old is not None}
    there = {field.name: field for field in layout.schema.fields}
    kept = [moved.get(name, name) for name in there if name in moved or origins.get(name) == name]
    numbers = count(last_id + 1)
    fields: list[NestedField] = []
    names: dict[int, str] = {}
    rewritten = False
    gone = moved.keys() - evolution.renamed.keys()
    for name in (*kept, *(one for one in evolution.schema.names if one not in kept and one not in gone)):
        old = there.get(origins.get(name) or "")
        kind = evolution.schema.field(name).type
        if old is None:
            fields.append(NestedField(next(numbers), name, _iceberg_type(kind, numbers), required=False))
        elif kind == before.field(old.name).type:
            fields.append(NestedField(old.field_id, name, old.field_type, required=old.required, doc=old.doc))
        else:
            wider = _iceberg_type(kind, numbers)
            is_promoted = _is_promotion(old.field_type, wider)
            number = old.field_id if is_promoted else next(numbers)
            rewritten |= not is_promoted
            names[old.field_id] = name
            fields.append(NestedField(number, name, wider, required=False, doc=old.doc))
    schema = Schema(*fields)
    told = [(field, as_files.field(field.name)) for field in fields if field.name in as_files.names]
    sources = _sources(told) if emptied else dict(layout.sources) | _sources(told)
    made = Layout(schema, {name: text for name, text in sources.items() if name in {one.field_id for one in fields}})
    is_changed = schema != layout.schema or made.sources != layout.sources
    return Plan(made, is_changed, rewritten, names | made.names)


def fingerprint(columns: pa.Schema) -> str:
    """Of the names, types and ids of columns of a file: two that are equal have the same."""
    return f"{crc32(repr([_told(field) for field in columns]).encode()):08x}"


def _told(field: pa.Field) -> tuple[Any, ...]:
    kind = field.type
    inner = [kind.field(place) for place in range(kind.num_fields)] if pt.is_nested(kind) else []
    return field.name, str(kind), (field.metadata or {}).get(PARQUET_ID), [_told(one) for one in inner]


def _sources(pairs: Iterable[tuple[NestedField, pa.Field]]) -> dict[int, str]:
    told = ((mine.field_id, (theirs.metadata or {}).get(FIELD_ID)) for mine, theirs in pairs)
    return {number: text.decode() for number, text in told if text is not None}


def _iceberg_type(kind: pa.DataType, numbers: Any) -> Any:
    for is_one, made in _SIMPLE:
        if is_one(kind):
            return made()
    if pt.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    if pt.is_timestamp(kind):
        return TimestamptzType() if kind.tz else TimestampType()
    if pt.is_list(kind):
        return ListType(next(numbers), _iceberg_type(kind.value_type, numbers), element_required=False)
    if pt.is_map(kind):
        ids = next(numbers), next(numbers)
        key, value = (_iceberg_type(one, numbers) for one in (kind.key_type, kind.item_type))
        return MapType(ids[0], key, ids[1], value, value_required=False)
    assert pt.is_struct(kind), kind
    return StructType(
        *(NestedField(next(numbers), one.name, _iceberg_type(one.type, numbers), required=False) for one in kind)
    )


def _file_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column of *kind* has in files, without ids."""
    found = _arrow_type(_iceberg_type(kind, count()))
    assert found is not None
    return found


def _arrow_type(kind: IcebergType) -> pa.DataType | None:
    if type(kind) in _ARROW:
        return _ARROW[type(kind)]
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ListType):
        inner = _arrow_type(kind.element_type)
        return None if inner is None else pa.list_(_with_id("element", inner, kind.element_id))
    if isinstance(kind, MapType):
        key, value = _arrow_type(kind.key_type), _arrow_type(kind.value_type)
        if key is None or value is None:
            return None
        return pa.map_(_with_id("key", key, kind.key_id, nullable=False), _with_id("value", value, kind.value_id))
    if isinstance(kind, StructType):
        fields = [(field, _arrow_type(field.field_type)) for field in kind.fields]
        if all(found is not None for _, found in fields):
            return pa.struct([_with_id(field.name, found, field.field_id) for field, found in fields])
    return None


def _with_id(name: str, kind: Any, number: int, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable, metadata={PARQUET_ID: str(number).encode()})


def _arrow_field(field: NestedField, source: str | None) -> pa.Field:
    metadata = {PARQUET_ID: str(field.field_id).encode()}
    if source is not None:
        metadata[FIELD_ID] = source.encode()
    return pa.field(field.name, _arrow_type(field.field_type), metadata=metadata)


def _is_promotion(old: IcebergType, new: IcebergType) -> bool:
    """Whether Iceberg reads files of the *old* type as the *new* one."""
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    pairs = ((IntegerType, LongType), (FloatType, DoubleType))
    return any(isinstance(old, narrow) and isinstance(new, wide) for narrow, wide in pairs)
