"""The other end: ``df.writeStream.format("headwater")`` writes a stream into a log of its own, each batch once.

Tasks stage rows (:mod:`headwater.spark.stream_writer`); the process in which Spark commits writes them as one epoch, in
one seal with the record that the batch is there (:mod:`headwater.capture.stream_log`). What Spark does is met so:

=======================================================  ==========================================================
Spark                                                    here
=======================================================  ==========================================================
runs a task again, or twice at once                      one answer for each partition comes to the commit; what
                                                         the others staged is removed
commits a batch again, after a crash or an error         the record says that it is there: nothing is written
aborts, also after a commit that took effect             only staged files of that batch are removed
counts batches from 0 again with a new checkpoint        the id of the stream is new, too: another record
starts the stream while an old driver still runs         the new run is known from its first batch; the old one is
                                                         fenced
=======================================================  ==========================================================
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import types as st

from headwater import failpoints
from headwater.capture.stream_log import ROW_ID, StreamTable, write_batch
from headwater.capture.stream_records import StagedRowsLost, StreamBatch, StreamColumns
from headwater.log_store.columns import OP, RESERVED
from headwater.sinks.storage import Storage
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceColumn
from headwater.spark.columns import CHANGE_TYPE_COLUMN, COMMIT_VERSION_COLUMN
from headwater.spark.data_source_api import DataSourceStreamArrowWriter, WriterCommitMessage
from headwater.spark.errors import InvalidOption, UnsupportedSchema
from headwater.spark.session import hot
from headwater.spark.types import arrow_schema, converted, spark_type
from headwater.spark.write_options import WriteOptions
from headwater.state.location import split_location
from headwater.stream.op import Op, ops_of

BEFORE_PART = failpoints.register("stream_log.before_part")
AFTER_PART = failpoints.register("stream_log.after_part")
BEFORE_CLEAN = failpoints.register("stream_log.before_clean")
AFTER_CLEAN = failpoints.register("stream_log.after_clean")

FOLDER: Final = "staging"
INLINE_BYTES: Final = 256 << 10

_NAME: Final = re.compile(r"(?:.*/)?([^/]+)/(\d+)-[^/]+\.arrow")


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Rows that one task has staged: inside, or in a file."""

    rows: int
    inside: bytes | None = None
    path: str | None = None


class StagedRows:
    """The staging of one store: what the tasks of a batch prepared, for the process that writes the epoch.

    A few rows travel inside the answer of the task; many are written to a file in ``staging`` beside the store. Its
    name has the stream, the batch and the run, so that files that no process will use are known: those of batches that
    are written, and of other streams.
    """

    def __init__(self, location: str) -> None:
        self._storage = _storage(location)

    def put(self, batch: StreamBatch, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> StagedPart:
        """Stage *rows*, however many."""
        held: list[pa.RecordBatch] = []
        size = 0
        for part in rows:
            held.append(part)
            size += part.nbytes
            if size > INLINE_BYTES:
                return self._file(batch, schema, held, rows)
        sink = pa.BufferOutputStream()
        count = _write(sink, schema, held)
        return StagedPart(count, inside=sink.getvalue().to_pybytes() if count else None)

    def _file(
        self, batch: StreamBatch, schema: pa.Schema, held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]
    ) -> StagedPart:
        name = f"{quote(batch.query, safe='')}/{batch.number}-{quote(batch.run, safe='')}-{uuid.uuid4().hex}.arrow"
        failpoints.hit(BEFORE_PART)
        with self._storage.create(name) as stream:
            count = _write(stream, schema, _chained(held, rest), "lz4")
        failpoints.hit(AFTER_PART)
        return StagedPart(count, path=name)

    def get(self, parts: Iterable[StagedPart]) -> Iterator[pa.RecordBatch]:
        """The rows of *parts*, in their order. :raises StagedRowsLost: a file is gone."""
        for part in parts:
            if part.inside is not None:
                yield from pa.ipc.open_stream(part.inside)
            elif part.path is not None:
                try:
                    file = self._storage.files.open_input_file(part.path)
                except FileNotFoundError:
                    raise StagedRowsLost(
                        "Rows that a task has staged are gone: another run of the stream has removed them.",
                        next_step="Start the query again: it makes the batch once more.",
                    ) from None
                with file:
                    yield from pa.ipc.open_stream(file)

    def remove(self, parts: Iterable[StagedPart]) -> None:
        """Remove the files of *parts*, which nobody writes."""
        for part in parts:
            if part.path is not None:
                self._storage.remove(part.path)

    def clean(self, batch: StreamBatch) -> None:
        """*batch* is written: remove what it and those before have staged, and what other streams have."""
        failpoints.hit(BEFORE_CLEAN)
        own = quote(batch.query, safe="")
        for info in self._storage.list():
            found = _NAME.fullmatch(info.path)
            if found and (found[1] != own or int(found[2]) <= batch.number):
                self._storage.remove(info.path)
        failpoints.hit(AFTER_CLEAN)


def _storage(location: str) -> Storage:
    engine, rest = split_location(location)
    if engine == "embedded":
        return Storage(f"{rest}/{FOLDER}", is_private=True)
    parts = urlsplit(rest)
    told = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    options = {f"aws_{name}": value for name, value in told.items()}
    if told.get("endpoint", "").startswith("http://"):
        options["aws_allow_http"] = "true"
    return Storage(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{FOLDER}", query="")), options)


def _chained(held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while held:
        yield held.pop(0)
    yield from rest


def _write(stream: object, schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str | None = None) -> int:
    rows = 0
    with pa.ipc.new_stream(stream, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


_KINDS: Final = {
    CHANGE_TYPE_COLUMN: st.StringType,
    COMMIT_TIMESTAMP_COLUMN: st.TimestampType,
    UNAVAILABLE_COLUMN: st.StringType,
}
_LEFT_OUT: Final = frozenset((COMMIT_VERSION_COLUMN, POSITION_COLUMN))
_PREIMAGE, _POSTIMAGE = int(Op.UPDATE_DELETE), int(Op.UPDATE_INSERT)


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """How the rows of one stream become rows of its log. It travels to tasks. Never row by row.

    ``_change_type`` says what a row is, where the rows have that column; otherwise each is an upsert of its key, or,
    without one, a new row. ``_commit_timestamp`` and ``_unavailable`` are kept, ``_commit_version`` and ``_position``
    are not: they are positions in the log that the rows came from. An update without its new row (a filter left it out)
    is a delete of the old one.

    :ivar table: what they are written to.
    :ivar schema: of the staged rows: the table's columns, ``_op``, and those of ours that came.
    """

    table: StreamTable
    schema: pa.Schema

    @classmethod
    def of(cls, options: WriteOptions, schema: st.StructType, *, replaces: bool = False) -> WrittenRows:
        """*schema* is that of the DataFrame; *replaces*: each of its batches has all rows.

        :raises InvalidOption: no such key column, or none where one is needed.
        :raises UnsupportedSchema: a column that a log cannot have.
        """
        _check(options, schema, replaces)
        arrow = {field.name: field.type for field in arrow_schema(schema)}
        own = [field for field in schema if field.name not in _KINDS and field.name not in _LEFT_OUT]
        columns = tuple(
            SourceColumn(field.name, arrow[field.name], field.dataType.simpleString(), place)
            for place, field in enumerate(own, 1)
        )
        table = StreamTable(options.namespace, options.name, columns, options.key, options.vnodes, replaces)
        table.source_table()  # which says what is wrong
        fields = [pa.field(column.name, column.type) for column in columns]
        kept = [name for name in (COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN) if name in arrow]
        added = [pa.field(OP, pa.int8()), *(pa.field(name, arrow[name]) for name in kept)]
        return cls(table, pa.schema([*fields, *added]))

    def staged(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of *batches*, in order; both halves of an update are in one batch.

        :raises ChunkError: a change type that there is not. :raises StreamColumns: a key that is null.
        """
        held: pa.RecordBatch | None = None
        for batch in batches:
            made = self._plain(batch)
            if held is not None:
                made = pa.concat_batches([held, made])
                held = None
            if made.num_rows and int(made.column(OP)[-1].as_py()) == _PREIMAGE:
                held, made = made.slice(made.num_rows - 1), made.slice(0, made.num_rows - 1)
            if made.num_rows:
                yield self._without_halves(made)
        if held is not None:
            yield self._without_halves(held)

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.table.key_columns:
            if batch.column(name).null_count:
                raise StreamColumns(
                    f"A row for table {self.table.name} has null in the key column {name!r}.",
                    next_step="Leave such rows out with a filter, or take another key.",
                )
        arrays: list[Any] = [
            self._ops(batch) if field.name == OP else converted(batch.column(field.name), field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _ops(self, batch: pa.RecordBatch) -> pa.Int8Array:
        if CHANGE_TYPE_COLUMN in batch.schema.names:
            return ops_of(batch.column(CHANGE_TYPE_COLUMN))
        op = Op.UPDATE_INSERT if self.table.key_columns and not self.table.replaces else Op.INSERT
        return pa.repeat(pa.scalar(int(op), pa.int8()), batch.num_rows)

    def _without_halves(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        place = batch.schema.get_field_index(OP)
        codes = batch.column(place).to_numpy()
        alone = (codes == _PREIMAGE) & ~np.append(codes[1:] == _POSTIMAGE, False)
        if not alone.any():
            return batch
        return batch.set_column(place, batch.schema.field(place), pa.array(np.where(alone, int(Op.DELETE), codes)))


def _check(options: WriteOptions, schema: st.StructType, replaces: bool) -> None:
    names = schema.names
    for name in options.key:
        if name not in names or name in _KINDS or name in _LEFT_OUT:
            raise InvalidOption(f"Received key column {name!r}.", next_step=f"The rows have {', '.join(names)}.")
    if CHANGE_TYPE_COLUMN in names and replaces:
        raise InvalidOption(
            f"The rows have {CHANGE_TYPE_COLUMN!r}; in the output mode 'complete' they are all rows, not changes.",
            next_step="Leave the column out, or use outputMode('append').",
        )
    if CHANGE_TYPE_COLUMN in names and not options.key:
        raise InvalidOption(
            f"The rows have {CHANGE_TYPE_COLUMN!r}, and no key that says which row changed.",
            next_step="Set option 'key', or leave the column out, or give it another name to keep it as it is.",
        )
    if ROW_ID in names and not options.key:
        raise InvalidOption(
            f"The rows have a column {ROW_ID!r}, which a table without a key gets.",
            next_step=f"Set key={ROW_ID}, or leave the column out.",
        )
    for field in schema:
        if field.name in RESERVED:
            raise UnsupportedSchema(f"The column name {field.name!r} is taken.", next_step="Give it another name.")
        wanted = _KINDS.get(field.name)
        if wanted is not None and not isinstance(field.dataType, wanted):
            raise UnsupportedSchema(
                f"Column {field.name!r} is {field.dataType.simpleString()}; it must be {wanted().simpleString()}.",
                next_step="Cast it, or give it another name.",
            )
    for field in schema:
        try:
            spark_type(arrow_schema(st.StructType([field])).field(0).type)  # who reads the log must have a type for it
        except (PySparkException, UnsupportedSchema):
            raise UnsupportedSchema(
                f"Column {field.name!r} has the type {field.dataType.simpleString()}, which a log cannot hold.",
                next_step="Cast it, for example to string, or leave it out.",
            ) from None


_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
_RUN_PROPERTY: Final = "spark.jobGroup.id"
"""What tasks are told of the query that they are of. A streaming query's job group is the id of its run."""

_begun: set[tuple[str, str]] = set()
"""Stores and runs whose first batch this process has written: a batch without rows needs no word after that."""


@dataclass(slots=True)
class StagedBatch(WriterCommitMessage):
    """What one task has staged, and for which batch."""

    batch: StreamBatch
    part: StagedPart


class HeadwaterStreamWriter(DataSourceStreamArrowWriter):
    """Writes one stream into one log.

    :param replaces: each batch has all rows: those before it are gone.
    """

    def __init__(self, options: WriteOptions, schema: st.StructType, *, replaces: bool = False) -> None:
        self._options = options
        self._rows = WrittenRows.of(options, schema, replaces=replaces)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedBatch:
        """In a task: stage its rows."""
        hot()
        batch = _told_batch(self._options)
        part = StagedRows(self._options.store).put(batch, self._rows.schema, self._rows.staged(iterator))
        return StagedBatch(batch, part)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """In one process, once per batch or again: write it as an epoch.

        :raises StreamFenced: the stream was started again elsewhere. :raises StoreTaken: another stream's store.
        """
        hot()
        staged = [message for message in messages if isinstance(message, StagedBatch)]
        if not staged:
            return
        batch, parts = staged[0].batch, [message.part for message in staged]
        begun = (self._options.store, batch.run)
        if begun in _begun and not self._rows.table.replaces and not any(part.rows for part in parts):
            return
        rows = StagedRows(self._options.store)
        write_batch(
            self._options.store, self._rows.table, batch, lambda: rows.get(parts), takeover=self._options.takeover
        )
        rows.clean(batch)
        _begun.add(begun)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Spark also calls this after a commit that took effect: what was staged is then of no use either."""
        parts = [message.part for message in messages if isinstance(message, StagedBatch)]
        StagedRows(self._options.store).remove(parts)


def _told_batch(options: WriteOptions) -> StreamBatch:
    """The batch that this task is of. :raises InvalidOption: Spark does not tell which stream it is."""
    context = TaskContext.get()
    told = {} if context is None else {name: context.getLocalProperty(name) for name in _PROPERTIES}
    query, number, run = (told.get(name) for name in _PROPERTIES)
    query = query or options.query
    if query is None or number is None:
        raise InvalidOption(
            "Spark does not tell which stream a task is of.",
            next_step="Set option 'query' to a name that stays with the checkpoint: another one with a new checkpoint.",
        )
    return StreamBatch(query, run or query, int(number))


_PROPERTIES: Final = (_QUERY_PROPERTY, _BATCH_PROPERTY, _RUN_PROPERTY)
