"""StreamLog: a batch of a stream becomes one epoch of a log, once.

A store that a stream writes is, to its readers, one that a capture writes: a log, a source whose position moves with
every seal, a captured table. There is no database behind it, so the position is the epoch itself
(:mod:`headwater.sources.written`). The store is held only while a batch is written: who may write is told by the
records of runs (:mod:`headwater.capture.stream_records`), which are sealed with the rows.

A table without a key of its own gets one: ``_row_id`` counts its rows from 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater import failpoints
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.capture.stream_records import StoreTaken, StreamBatch, StreamColumns, StreamRecords
from headwater.log_store import KvLogStoreFactory, KvLogStoreWriter
from headwater.log_store.columns import OP
from headwater.log_store.log_events import TRUNCATE
from headwater.sources.errors import SchemaStopped
from headwater.sources.events import SchemaChanged
from headwater.sources.evolution import Projection, SchemaPolicy, follow
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, SourceColumn, SourceTable
from headwater.sources.written import POSITION_TYPE, WrittenOffset, positions_of
from headwater.state import Snapshot, StateStore, open_reader, open_writer
from headwater.state.errors import StoreNotFound, StoreOwned
from headwater.stream import DEFAULT_VNODE_COUNT, Chunk, Epoch, EpochClock, EpochPair

BEFORE_COMMIT = failpoints.register("stream_log.before_commit")
AFTER_COMMIT = failpoints.register("stream_log.after_commit")

ROW_ID: Final = "_row_id"
"""The key that a table without one gets."""
IDENTITY: Final = {"written_by": "stream"}

_MAX_BYTES: Final = 16 << 20
_CHUNK_ROWS: Final = 65_536
_CHUNK_BYTES: Final = 8 << 20
_OWNED_SECONDS: Final = 10.0
_OWNED_LOOK_SECONDS: Final = 0.05

Rows = Iterable[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class StreamTable:
    """The table that a stream writes, as the stream has it. It travels to tasks.

    :ivar columns: without :data:`ROW_ID`, which is added where *key_columns* is empty.
    :ivar vnode_count: ``None``: as the log has it.
    :ivar replaces: each batch has all rows of the table: those of the batches before are gone.
    """

    namespace: str
    name: str
    columns: tuple[SourceColumn, ...]
    key_columns: tuple[str, ...]
    vnode_count: int | None = None
    replaces: bool = False

    def source_table(self) -> SourceTable:
        """With the key that it has or gets; its columns are numbered as they come.

        :raises UnsupportedTable: a name twice, a key column that there is not, a reserved name.
        """
        columns = self.columns
        if not self.key_columns:
            columns = (*columns, SourceColumn(ROW_ID, pa.int64(), "bigint", 0))
        numbered = tuple(replace(column, field_id=place) for place, column in enumerate(columns, 1))
        return SourceTable(self.namespace, self.name, numbered, self.key_columns or (ROW_ID,))


def is_written_by_stream(view: Snapshot) -> bool:
    """Whether a stream writes the store: there is no database behind it."""
    record, _ = SourceState.read(view)
    return record is not None and isinstance(record.offset, WrittenOffset)


def write_batch(
    location: str, table: StreamTable, batch: StreamBatch, rows: Callable[[], Rows], *, takeover: bool = False
) -> int | None:
    """Write *batch* as one epoch; ``None`` when it is there already, or has no rows.

    :param rows: what tasks have staged: the columns of the table, ``_op``, and where they are known
        ``_commit_timestamp`` and ``_unavailable``. It is not called when the batch is there.
    :param takeover: another stream wrote the store: it writes no more.
    :raises StreamFenced: a later run writes. :raises StoreTaken: the store is somebody else's.
    :raises CheckpointBehind: later batches are there. :raises StreamColumns: the log cannot have these columns.
    """
    with _owned(location, batch, takeover) as store, _StreamLog(store, table) as log:
        return log.write(batch, rows, takeover)


@contextmanager
def _owned(location: str, batch: StreamBatch, takeover: bool) -> Iterator[StateStore]:
    """The store, for one batch. Who holds it for long has died in the middle, or is about to be fenced."""
    end = time.monotonic() + _OWNED_SECONDS
    while True:
        try:
            store = open_writer(location)
            break
        except StoreOwned:
            _check_reader(location, batch, takeover)
            if time.monotonic() >= end:
                store = open_writer(location, takeover=True)
                break
            time.sleep(_OWNED_LOOK_SECONDS)
    with store:
        yield store


def _check_reader(location: str, batch: StreamBatch, takeover: bool) -> None:
    """Look whether *batch* may be written, without owning the store."""
    try:
        with open_reader(location) as reader, reader.snapshot() as view:
            record, captured = SourceState.read(view)
            _check_kind(location, record, captured)
            StreamRecords.read(view).admit(batch, takeover=takeover)
    except StoreNotFound:
        return


def _check_kind(location: str, record: SourceRecord | None, captured: dict[str, CapturedTable]) -> None:
    if captured and (record is None or not isinstance(record.offset, WrittenOffset)):
        raise StoreTaken(
            f"The store at {location} is that of a capture.", next_step="Name another directory with option 'store'."
        )


class _StreamLog:
    """The log, while one batch is written."""

    def __init__(self, store: StateStore, table: StreamTable) -> None:
        self._store, self._table = store, table
        self._factory = KvLogStoreFactory(store, max_bytes=_MAX_BYTES)
        self._sealer = self._factory.sealer
        try:
            with store.snapshot() as view:
                self._state = SourceState(self._factory.catalog, view, self._sealer.batch)
                self._records = StreamRecords(self._factory.catalog, view, self._sealer.batch)
            _check_kind(store.location, self._state.record, self._state.tables)
        except BaseException:
            self._factory.close()
            raise

    def __enter__(self) -> _StreamLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._factory.close()

    def write(self, batch: StreamBatch, rows: Callable[[], Rows], takeover: bool) -> int | None:
        is_new_run = self._records.admit(batch, takeover=takeover)
        if is_new_run:
            self._records.put_run(self._sealer.batch, batch)
        clock = EpochClock(lambda: time.time_ns() // 1_000_000, self._store.committed_epoch())
        epoch = clock.next()
        if self._records.has(batch):
            if is_new_run:
                self._sealer.seal(epoch)
            return None
        written, has_news = self._write_rows(epoch, clock, rows)
        if not (written or is_new_run or has_news):
            return None
        self._records.put_batch(self._sealer.batch, batch, int(epoch), written)
        self._state.put(self._sealer.batch, SourceRecord(IDENTITY, WrittenOffset(int(epoch)), epoch.unix_ms * 1000))
        failpoints.hit(BEFORE_COMMIT)
        self._sealer.seal(epoch)
        failpoints.hit(AFTER_COMMIT)
        return int(epoch)

    def _write_rows(self, epoch: Epoch, clock: EpochClock, rows: Callable[[], Rows]) -> tuple[int, bool]:
        """How many, and whether something beside rows is to be sealed."""
        projection, change, is_new = self._open_log(epoch)
        table = projection.table
        writer = self._factory.writer(self._factory.existing(table.full_name))
        writer.init(EpochPair(epoch, self._store.committed_epoch()))
        if change is not None:
            writer.change_schema(table.log_schema(POSITION_TYPE), table.key_columns, change.to_detail())
        if self._table.replaces and not is_new:
            writer.note(TRUNCATE, {"position": WrittenOffset(int(epoch)).to_json()})
        written = _Filler(projection, writer, epoch, self._records.rows).write(rows())
        writer.end_epoch(clock.next())
        return written, is_new or change is not None or self._table.replaces

    def _open_log(self, epoch: Epoch) -> tuple[Projection, SchemaChanged | None, bool]:
        now = self._table.source_table()
        name = now.full_name
        other = next((known for known in self._state.tables if known != name), None)
        if other is not None:
            raise StoreTaken(
                f"The store has the log of table {other}; a stream writes one table into a store of its own.",
                next_step=f"Name another store for table {name}.",
            )
        if name not in self._state.tables:
            schema, count = now.log_schema(POSITION_TYPE), self._table.vnode_count or DEFAULT_VNODE_COUNT
            self._factory.log(name, schema, now.key_columns, vnode_count=count)
            since = WrittenOffset(int(epoch.prev()))
            entry = CapturedTable(name, now.namespace, now.name, None, TableState.ACTIVE, since, "")
            self._state.put_table(self._sealer.batch, entry)
            return follow(now, now, SchemaPolicy.EVOLVE)[0], None, True
        log = self._factory.existing(name)
        if self._table.vnode_count not in (None, log.vnode_count):
            raise StreamColumns(
                f"The log of {name} has {log.vnode_count} vnodes, for good.", next_step="Leave out option 'vnodes'."
            )
        known = SourceTable.of_log(now.namespace, now.name, log.schema, log.key_columns, None)
        try:
            projection, change = follow(known, _numbered(now, known), SchemaPolicy.EVOLVE)
        except SchemaStopped as error:
            raise StreamColumns(
                f"The log of {name} cannot take the columns of the stream: {error.change}",
                next_step="Columns may come, go and become wider; for other changes, or another key, name another "
                "store.",
            ) from None
        return projection, change, False


def _numbered(now: SourceTable, known: SourceTable) -> SourceTable:
    """*now* with the field ids that *known* has for columns of the same names."""
    ids = {column.name: column.field_id for column in known.columns if not column.dropped}
    following = max(column.field_id for column in known.columns) + 1
    columns = []
    for column in now.columns:
        number = ids.get(column.name, following)
        following += number == following
        columns.append(replace(column, field_id=number))
    if now.key_columns != known.key_columns:
        raise SchemaStopped(now.full_name, "its key changed.")
    return replace(now, columns=tuple(columns))


class _Filler:
    """Makes the chunks of one epoch of the rows that tasks have staged."""

    def __init__(self, projection: Projection, writer: KvLogStoreWriter, epoch: Epoch, before: int) -> None:
        self._projection, self._writer, self._epoch = projection, writer, epoch
        self._table = projection.table
        self._schema = self._table.log_schema(POSITION_TYPE)
        self._before = before
        self._written = 0

    def write(self, batches: Rows) -> int:
        """All of them, small ones together; how many rows."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            if held and not batch.schema.equals(held[0].schema):
                self._chunk(held)
                held, rows, size = [], 0, 0
            held.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
                self._chunk(held)
                held, rows, size = [], 0, 0
        if held:
            self._chunk(held)
        return self._written

    def _chunk(self, held: list[pa.RecordBatch]) -> None:
        batch = held[0] if len(held) == 1 else pa.concat_batches(held)
        rows, names = batch.num_rows, batch.schema.names
        own = [batch.column(place) for place, name in enumerate(names) if name not in _ADDED]
        if self._table.key_columns == (ROW_ID,) and ROW_ID not in names:
            first = self._before + self._written + 1
            own.append(pa.array(np.arange(first, first + rows)))
        arrays = [
            *self._projection.apply(own, rows),
            positions_of(int(self._epoch), self._written, rows),
            self._times(batch),
            batch.column(UNAVAILABLE_COLUMN) if UNAVAILABLE_COLUMN in names else pa.nulls(rows, pa.string()),
        ]
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        count = self._writer.log.vnode_count
        self._writer.write_chunk(Chunk.build(made, batch.column(OP), self._table.key_columns, count))
        self._written += rows

    def _times(self, batch: pa.RecordBatch) -> pa.Array:
        """When the rows were committed where they came from; else when they are written here."""
        now = pa.scalar(self._epoch.unix_ms * 1000, pa.timestamp("us", tz="UTC"))
        if COMMIT_TIMESTAMP_COLUMN not in batch.schema.names:
            return pa.repeat(now, batch.num_rows)
        return pc.fill_null(batch.column(COMMIT_TIMESTAMP_COLUMN), now)


_ADDED: Final = (OP, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN)
