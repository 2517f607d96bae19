"""Data files: Parquet files of a table, written once under a name of their own, with the statistics of their columns.

A file is never changed. Its statistics say which keys it can have, so that a change reads only the files that it may
concern.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater import failpoints
from headwater.sinks.partitions import NOT_PARTED, Partitioning, Values, with_values
from headwater.sinks.storage import Storage
from headwater.sinks.types import conform

COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
GROUP_ROWS: Final = 64 * 1024
GROUP_BYTES: Final = 32 << 20
SAMPLE_ROWS: Final = 8192
TEXT_PREFIX: Final = 32
OPEN_PARTITIONS: Final = 32
"""So many are written at a time: each holds a group of rows in memory."""
EXACT_DIGITS: Final = 15
"""A decimal with so many is exact as a JSON number."""
_HIGHEST = "\U0010ffff"

BEFORE_FILE = failpoints.register("sink.files.before_file")
AFTER_FILE = failpoints.register("sink.files.after_file")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file.

    :ivar path: its name in the directory of the table.
    :ivar lows: per column the least value, a prefix of it, or nothing when it is not known; *highs* likewise.
    :ivar parted: the values that all its rows have in the columns by which they are parted.
    """

    path: str
    size: int
    rows: int
    lows: dict[str, Any] = field(default_factory=dict)
    highs: dict[str, Any] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)
    written_ms: int = 0
    parted: Values = field(default_factory=dict)

    @property
    def statistics(self) -> str:
        """As the log of a Delta table has them."""
        lows = {name: _json_value(value) for name, value in self.lows.items()}
        highs = {name: _json_value(value) for name, value in self.highs.items()}
        told = {"numRecords": self.rows, "minValues": lows, "maxValues": highs, "nullCount": self.nulls}
        return json.dumps(told, ensure_ascii=False)  # delta-rs reads escaped characters beyond U+FFFF as others


class FileWriter:
    """Writes rows into files of about *target_bytes* each.

    :param prefix: of the names of the files. :param partition: that the rows are of.
    """

    def __init__(
        self,
        storage: Storage,
        schema: pa.Schema,
        target_bytes: int,
        prefix: str = "part-",
        partition: Values | None = None,
    ) -> None:
        self._storage = storage
        self._schema = schema
        self._target = target_bytes
        self._prefix = prefix
        self._partition = partition or {}
        self._made: list[DataFile] = []
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = 0
        self._open: _OpenFile | None = None

    def write(self, rows: pa.Table) -> None:
        """Take *rows*, whose values the columns of the schema hold."""
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_bytes += rows.nbytes
        if self._held_rows >= GROUP_ROWS or self._held_bytes >= GROUP_BYTES:
            self._flush()

    def write_all(self, tables: Iterable[pa.Table]) -> list[DataFile]:
        """The files with the rows of *tables*; what was written is removed if they fail."""
        try:
            for rows in tables:
                if rows.num_rows:
                    self.write(rows)
            return self.close()
        except BaseException:
            self.abort()
            raise

    def close(self) -> list[DataFile]:
        """The files, all of them durable."""
        self._flush()
        self._end_file()
        return self._made

    def abort(self) -> None:
        """Remove what was written; nobody was told of it."""
        if self._open is not None:
            self._end_file()
        for made in self._made:
            self._storage.remove(made.path)

    def _flush(self) -> None:
        if not self._held_rows:
            return
        rows = conform(pa.concat_tables(self._held), self._schema)
        self._held, self._held_rows, self._held_bytes = [], 0, 0
        if self._open is None:
            self._open = _OpenFile(self._storage, f"{self._prefix}{uuid.uuid4()}.parquet", self._schema, rows)
        self._open.write(rows)
        if self._open.size >= self._target:
            self._end_file()

    def _end_file(self) -> None:
        if self._open is not None:
            ended, self._open = self._open, None  # one that cannot be written must not be ended again
            self._made.append(replace(ended.close(), parted=self._partition))


class PartitionWriter:
    """Writes rows into files by their partitions.

    :param schema: the columns of the rows, also those by which they are parted.
    """

    def __init__(
        self, storage: Storage, schema: pa.Schema, by: Partitioning, target_bytes: int, prefix: str = "part-"
    ) -> None:
        self._by = by
        self._new = partial(FileWriter, storage, by.stored(schema), target_bytes, prefix)
        self._storage = storage
        self._open: dict[tuple[str | None, ...], FileWriter] = {}
        self._made: list[DataFile] = []

    def write_all(self, tables: Iterable[pa.Table]) -> list[DataFile]:
        """The files with the rows of *tables*; what was written is removed if they fail."""
        try:
            for rows in tables:
                for values, part in self._by.split(rows):
                    if part.num_rows:
                        self._writer(values).write(part)
            while self._open:
                self._close_oldest()
            return self._made
        except BaseException:
            for writer in self._open.values():
                writer.abort()
            for made in self._made:
                self._storage.remove(made.path)
            raise

    def _writer(self, values: Values) -> FileWriter:
        place = tuple(values.values())
        if place in self._open:
            self._open[place] = self._open.pop(place)  # the newest
        else:
            while len(self._open) >= OPEN_PARTITIONS:
                self._close_oldest()
            self._open[place] = self._new(values)
        return self._open[place]

    def _close_oldest(self) -> None:
        place = next(iter(self._open))
        self._made += self._open[place].close()
        del self._open[place]


class _OpenFile:
    def __init__(self, storage: Storage, path: str, schema: pa.Schema, rows: pa.Table) -> None:
        failpoints.hit(BEFORE_FILE)
        self._path = path
        self._schema = schema
        self._context = storage.create(path)
        self._stream = self._context.__enter__()
        self._metadata: list[Any] = []
        self._has_nan: set[str] = set()
        self._writer = pq.ParquetWriter(
            self._stream,
            schema,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=_repeating(rows),
            metadata_collector=self._metadata,
            store_schema=False,
        )

    @property
    def size(self) -> int:
        return int(self._stream.tell())

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=GROUP_ROWS)
        for column in self._schema:
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(rows.column(column.name))).as_py():
                self._has_nan.add(column.name)

    def close(self) -> DataFile:
        self._writer.close()
        size = self.size
        self._context.__exit__(None, None, None)
        failpoints.hit(AFTER_FILE)
        metadata = self._metadata[0]
        lows, highs, nulls = _bounds(metadata, self._schema, self._has_nan)
        return DataFile(self._path, size, metadata.num_rows, lows, highs, nulls, int(time.time() * 1000))


def write_files(
    storage: Storage, rows: pa.Table, target_bytes: int, prefix: str = "part-", by: Partitioning = NOT_PARTED
) -> list[DataFile]:
    """Files with *rows*."""
    return PartitionWriter(storage, rows.schema, by, target_bytes, prefix).write_all([rows])


def write_empty(storage: Storage, schema: pa.Schema, prefix: str) -> DataFile:
    """A file without rows, which has the columns of *schema*."""
    return _OpenFile(storage, f"{prefix}{uuid.uuid4()}.parquet", schema, schema.empty_table()).close()


def read_file(storage: Storage, file: DataFile, schema: pa.Schema) -> pa.Table:
    """The rows of *file* with exactly the columns of *schema*."""
    found = read_rows(storage, file.path, schema.names)
    return conform(with_values(found, file.parted, schema), schema)


def read_rows(storage: Storage, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file; those of *columns* that it has."""
    with pq.ParquetFile(storage.files.open_input_file(path)) as file:
        if columns is not None:
            columns = [name for name in columns if name in file.schema_arrow.names]
        return file.read(columns=columns, use_threads=True)


def _repeating(rows: pa.Table) -> list[str]:
    """The columns of texts that occur again and again: a dictionary pays for them, and costs twice for all others."""
    sample = rows.slice(0, SAMPLE_ROWS)
    texts = [field.name for field in rows.schema if pa.types.is_string(field.type) or pa.types.is_binary(field.type)]
    return [name for name in texts if pc.count_distinct(sample.column(name)).as_py() * 10 <= sample.num_rows]


def _bounds(
    metadata: Any, schema: pa.Schema, has_nan: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    for place in range(metadata.num_columns):
        name = metadata.schema.column(place).path
        if name not in schema.names or pa.types.is_nested(schema.field(name).type):
            continue
        told = [group.column(place).statistics for group in groups]
        if any(one is None for one in told):
            continue
        nulls[name] = sum(one.null_count for one in told)
        with_values = [one for one in told if one.num_values]
        if name in has_nan or not with_values or not all(one.has_min_max for one in with_values):
            continue
        try:
            low, high = min(one.min for one in with_values), max(one.max for one in with_values)
        except (OverflowError, ValueError):
            continue
        if _is_bound(low) and _is_bound(high):
            lows[name] = _prefix(low)
            highs[name] = _prefix(high, _HIGHEST)
    return lows, highs, nulls


def _is_bound(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) != float("inf")
    if isinstance(value, Decimal):
        return len(value.as_tuple().digits) <= EXACT_DIGITS
    return isinstance(value, int | str | date) and not isinstance(value, bool)


def _prefix(value: Any, end: str = "") -> Any:
    return value[:TEXT_PREFIX] + end if isinstance(value, str) and len(value) > TEXT_PREFIX else value


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text + "Z" if value.tzinfo is not None else text
    if isinstance(value, date):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value
