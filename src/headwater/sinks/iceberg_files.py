"""Data files of Iceberg tables: written with the ids of their columns, one partition each; read by these ids.

:class:`~headwater.sinks.data_files.DataFile` is what the rest of the sink knows of a file; what the manifests of the
table have of it is made from that, and back. Needs pyiceberg.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from headwater.sinks.data_files import DataFile, PartitionWriter
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.iceberg_schema import PARQUET_ID, fingerprint
from headwater.sinks.keys import KeySet
from headwater.sinks.partitions import Partitioning, Values
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.storage import Storage
from headwater.sinks.types import conform
from headwater.sinks.version_rewrite import VersionRewrite

DATA: Final = "data/"
_FIRST_PARTITION_ID: Final = 1000
_PARTING: Final = (
    BooleanType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)
_LAYOUT = re.compile(DATA + r"part-[0-9a-f]{8}-\d+-([0-9a-f]{8})-[0-9a-f-]{36}\.parquet")
_TRANSFORM = re.compile(r"(year|month|day|hour|bucket|truncate)\(\s*(?:(\d+)\s*,\s*)?([^()]+?)\s*\)")


def partition_spec(table: str, partition_by: Sequence[str], schema: Schema) -> PartitionSpec:
    """The partitions of a new table. :raises SinkSchemaError: it cannot have these."""
    fields = []
    for place, text in enumerate(partition_by):
        found = _TRANSFORM.fullmatch(text.strip())
        kind, width, column = found.groups() if found else ("identity", None, text.strip())
        needs_width = kind in ("bucket", "truncate")
        source = next((field for field in schema.fields if field.name == column), None)
        transform = parse_transform(f"{kind}[{int(width or 1) or 1}]" if needs_width else kind)
        if (
            source is None
            or not isinstance(source.field_type, _PARTING)
            or needs_width != bool(int(width or 0))
            or not transform.can_transform(source.field_type)
        ):
            raise SinkSchemaError(
                table,
                f"it cannot be partitioned by {text!r}: the column is not there, or it has no such type.",
                next_step="Use column, year|month|day|hour(column), bucket(N, column) or truncate(N, column), and give "
                "the sink only tables that have it (tables = [...]).",
            )
        suffix = {"identity": "", "truncate": "_trunc"}.get(kind, f"_{kind}")
        fields.append(PartitionField(source.field_id, _FIRST_PARTITION_ID + place, transform, f"{column}{suffix}"))
    return PartitionSpec(*fields)


@dataclass(frozen=True)
class IcebergPartitioning(Partitioning):
    """Which partition each row is of, by the table's own *spec*. Files have all columns."""

    spec: PartitionSpec = field(default_factory=PartitionSpec)
    schema: Schema = field(default_factory=Schema)

    def __bool__(self) -> bool:
        return bool(self.spec.fields)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.spec.fields]

    def stored(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def split(self, rows: pa.Table) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
        if not self.spec.fields or not rows.num_rows:
            yield {}, rows
            return
        values = pa.table([self._values(one, rows) for one in self.spec.fields], self.names)
        keys = KeySet(values, self.names)
        order = np.argsort(keys.ids, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(keys.ids[order]) != 0))
        ordered = rows.take(pa.array(order)) if starts.size > 1 else rows
        firsts = values.take(pa.array(order[starts])).to_pylist()
        for start, end, first in zip(starts, np.append(starts[1:], len(order)), firsts, strict=True):
            yield {name: _text(value) for name, value in first.items()}, ordered.slice(start, end - start)

    def _values(self, one: PartitionField, rows: pa.Table) -> Any:
        source = self.schema.find_field(one.source_id)
        values = one.transform.pyarrow_transform(source.field_type)(rows.column(source.name).combine_chunks())
        if pa.types.is_date(values.type):
            return values.cast(pa.int32())
        return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


class IcebergWriter:
    """Writes rows into files of about *target_bytes* each, of one partition each.

    :param columns: of the files, with their ids; the names of the files tell them.
    """

    def __init__(
        self, storage: Storage, columns: pa.Schema, target_bytes: int, prefix: str, by: IcebergPartitioning
    ) -> None:
        self._columns = columns
        named = f"{DATA}{prefix}{fingerprint(columns)}-"
        self._writer = PartitionWriter(storage, columns, by, target_bytes, named)

    def write_all(self, tables: Iterable[pa.Table]) -> list[DataFile]:
        """The files with the rows of *tables*; what was written is removed if they fail."""
        return self._writer.write_all(conform(rows, self._columns) for rows in tables)


class ById(Rewrite):
    """Reads and writes files by the ids of their columns; a part of :class:`IcebergRewrite`.

    :ivar names: by id: how columns of files are called.
    """

    names: Mapping[int, str]

    def read(self, file: DataFile) -> pa.Table:
        return conform(read_columns(self._storage, file.path, self.names), self._schema)

    def read_keys(self, file: DataFile) -> pa.Table:
        return conform(read_columns(self._storage, file.path, self.names, self._keys), self._key_schema)

    def recast(self, renamed: Mapping[str, str | None]) -> None:
        for file in self.files:
            self._replace(file, self.read(file))

    def relaid(self, file: DataFile) -> list[DataFile]:
        """A staged file; written anew if its columns have other ids by now."""
        with pq.ParquetFile(self._storage.files.open_input_file(file.path)) as opened:
            columns = pa.schema([one for one in self._schema if one.name in opened.schema_arrow.names])
            found = _LAYOUT.fullmatch(file.path)
            if found is not None and found[1] == fingerprint(columns):
                return [file]
            return self._write(opened.read())

    def _write(self, rows: pa.Table) -> list[DataFile]:
        columns = pa.schema([one for one in self._schema if one.name in rows.schema.names])
        return super()._write(conform(rows, columns))


class IcebergRewrite(ById, Rewrite):
    """What the files of a mirror, or of changes, become."""


class IcebergVersionRewrite(ById, VersionRewrite):
    """What the files of a table of versions become."""


def read_columns(
    storage: Storage, path: str, names: Mapping[int, str], columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of a file: its columns that *names* tell by their ids; those of *columns*."""
    with pq.ParquetFile(storage.files.open_input_file(path)) as file:
        found: dict[str, str] = {}
        for field in file.schema_arrow:
            number = (field.metadata or {}).get(PARQUET_ID)
            name = field.name if number is None else names.get(int(number))
            if name is not None and (columns is None or name in columns):
                found[field.name] = name
        rows = file.read(columns=list(found), use_threads=True)
    return rows.rename_columns([found[name] for name in rows.schema.names])


def to_iceberg(file: DataFile, location: str, schema: Schema, spec: PartitionSpec) -> Any:
    """*file* as a manifest has it."""
    by_name = {field.name: field for field in schema.fields}

    def by_id(values: Mapping[str, Any]) -> dict[int, Any]:
        return {by_name[name].field_id: value for name, value in values.items() if name in by_name}

    def bounds(values: Mapping[str, Any]) -> dict[int, bytes]:
        return by_id(
            {
                name: to_bytes(_primitive(by_name[name].field_type), one)
                for name, one in values.items()
                if name in by_name
            }
        )

    made = IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{location}/{file.path}",
        file_format=FileFormat.PARQUET,
        partition=_record(file.parted, spec, schema),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes=None,
        value_counts=by_id(dict.fromkeys(file.nulls, file.rows)),
        null_value_counts=by_id(file.nulls),
        nan_value_counts=None,
        lower_bounds=bounds(file.lows),
        upper_bounds=bounds(file.highs),
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=None,
    )
    made.spec_id = spec.spec_id
    return made


def from_iceberg(file: Any, location: str, schema: Schema, spec: PartitionSpec, key_columns: Sequence[str]) -> DataFile:
    """What a manifest tells of a file, with what is known of its *key_columns*."""
    fields = [field for field in schema.fields if field.name in key_columns]
    lows, highs = (
        {field.name: _bound(field.field_type, told.get(field.field_id)) for field in fields}
        for told in (file.lower_bounds or {}, file.upper_bounds or {})
    )
    path = file.file_path.removeprefix(f"{location}/")
    return DataFile(
        path,
        file.file_size_in_bytes,
        file.record_count,
        {name: value for name, value in lows.items() if value is not None},
        {name: value for name, value in highs.items() if value is not None},
        parted={one.name: _text(file.partition[place]) for place, one in enumerate(spec.fields)},
    )


def _primitive(kind: IcebergType) -> PrimitiveType:
    assert isinstance(kind, PrimitiveType)
    return kind


def _text(value: Any) -> str | None:
    """A value of a partition, as a text."""
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def _record(values: Values, spec: PartitionSpec, schema: Schema) -> Record:
    """The inverse: as Iceberg has them."""
    kinds = [one.field_type for one in spec.partition_type(schema).fields]
    return Record(*(_value(values[one.name], kind) for one, kind in zip(spec.fields, kinds, strict=True)))


def _value(text: str | None, kind: IcebergType) -> Any:
    if text is None or isinstance(kind, StringType):
        return text
    if isinstance(kind, BooleanType):
        return text == "true"
    return Decimal(text) if isinstance(kind, DecimalType) else int(text)


def _bound(kind: IcebergType, data: bytes | None) -> Any:
    if data is None:
        return None
    if len(data) == 4 and isinstance(kind, LongType | DoubleType):  # of before the type became wider
        kind = IntegerType() if isinstance(kind, LongType) else FloatType()
    try:
        return _python(kind, from_bytes(_primitive(kind), data))
    except (ValueError, OverflowError):
        return None


def _python(kind: IcebergType, value: Any) -> Any:
    """As Arrow tells it: what Iceberg keeps as a number may be a date or a time."""
    if isinstance(kind, DateType):
        return pa.scalar(value, pa.int32()).cast(pa.date32()).as_py()
    if isinstance(kind, TimestampType | TimestamptzType):
        zone = "UTC" if isinstance(kind, TimestamptzType) else None
        return pa.scalar(value, pa.int64()).cast(pa.timestamp("us", tz=zone)).as_py()
    return value
