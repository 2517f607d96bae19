"""A log as a snapshot shows it: barriers, the rows of an epoch, ranges. Any process may read it.

What is read is a function of the stored bytes and the arguments alone: the same range gives the same batches, always.
The barrier of an epoch names its format: while a log is migrated, each epoch is read in exactly one of both.
Within an epoch rows come chunk by chunk (format 2) or vnode by vnode (format 1); the rows of one vnode always come in
the order of their seq ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from headwater.log_store import chunk_codec, row_codec
from headwater.log_store.chunk_codec import ChunkHeader
from headwater.log_store.columns import read_schema, with_epoch
from headwater.log_store.errors import EpochGone, ForeignVnode, InvalidOffset, LogCorrupt, RetentionMiss, UnknownVersion
from headwater.log_store.log import FORMATS, Log, LogRegistry
from headwater.log_store.log_events import FORMER_VERSION, LogEvent, events_of
from headwater.log_store.serde import (
    BARRIERS,
    CHUNKS_OF,
    BarrierRecord,
    LogStoreRowSerde,
    barriers_from,
    chunks_from,
    chunks_of,
    parse_barrier_key,
    rows_from,
    space_end,
)
from headwater.log_store.truncation import BOUNDS, Bounds
from headwater.state import Catalog, Snapshot, open_reader
from headwater.stream import Epoch, VnodeBitmap

_ROWS_AT_ONCE = 8192
_EPOCHS_AT_ONCE = 256
_BYTES_AT_ONCE = 16 << 20

Ended: TypeAlias = Sequence[tuple[int, BarrierRecord]]
"""The barriers of one epoch: each with its writer."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Where the rows of an epoch are: vnodes in format 1, writers in format 2. Each row is in exactly one place."""

    rows: VnodeBitmap
    chunks: frozenset[int]

    @classmethod
    def of(cls, ended: Ended) -> Formats:
        """:raises UnknownVersion: a format that this release does not know."""
        return _formats(tuple((writer, record.format, record.vnodes) for writer, record in ended))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The formats by number."""
        return (*((row_codec.FORMAT,) if self.rows else ()), *((chunk_codec.FORMAT,) if self.chunks else ()))


@lru_cache(maxsize=64)
def _formats(ended: tuple[tuple[int, int, VnodeBitmap], ...]) -> Formats:
    """Of writer, format and vnodes of each barrier: epoch after epoch mostly the same."""
    rows = VnodeBitmap.empty(ended[0][2].count)
    chunks = set()
    for writer, number, vnodes in ended:
        if number == row_codec.FORMAT:
            rows = rows | vnodes
        elif number == chunk_codec.FORMAT:
            chunks.add(writer)
        else:
            raise UnknownVersion(
                f"An epoch has format {number}; this release reads {' and '.join(map(str, FORMATS))}.",
                next_step="Upgrade headwater.",
            )
    return Formats(rows, frozenset(chunks))


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The barriers that all instances wrote at the end of one epoch, as one.

    :ivar ended: each of them.
    """

    epoch: Epoch
    is_checkpoint: bool
    rows: int
    size: int
    vnodes: VnodeBitmap
    schema_version: int
    first_schema_version: int
    sealed_ms: int
    formats: Formats
    is_stop: bool
    compacted: bool
    ended: Ended


class LogView:
    """One log in one snapshot."""

    def __init__(self, view: Snapshot, log: Log) -> None:
        self._view = view
        self.log = log
        self._serde = LogStoreRowSerde(log)

    @classmethod
    def open(cls, view: Snapshot, name: str) -> LogView:
        """:raises LogNotFound: no such log."""
        return cls(view, LogRegistry.load(view).get(name))

    @property
    def sealed(self) -> Epoch:
        """The newest epoch that can be read."""
        return self._view.epoch

    def bounds(self) -> Bounds:
        """What the log has forgotten."""
        catalog = Catalog.load(self._view)
        row = None
        if BOUNDS.name in catalog.names():
            row = catalog.open(BOUNDS).get(self._view, 0, (self.log.name,))
        return Bounds(Epoch(0), Epoch(0)) if row is None else Bounds(Epoch(row[0]), Epoch(row[1]))

    def events(self, after: int, upto: int) -> Iterator[LogEvent]:
        """What was noted beside the rows of the epochs in ``(after, upto]``, in order."""
        return events_of(self._view, self.log.name, after, upto)

    def schema_version_at(self, epoch: int) -> int:
        """The version of the schema at the end of *epoch*, which the log has not forgotten.

        It follows from what changed later: an epoch without rows has no barrier, and can still change the schema.
        """
        later = self.events(epoch, self.sealed)
        versions = (event.detail[FORMER_VERSION] for event in later if FORMER_VERSION in event.detail)
        return int(next(versions, self.log.schema_version))

    def epochs(self, after: int = 0, upto: int | None = None) -> Iterator[EpochEnd]:
        """The ends of the epochs in ``(after, upto]``, in order."""
        for epoch, group in groupby(self.records(after, upto), key=itemgetter(0)):
            yield _joined(epoch, [(writer, record) for _, writer, record in group])

    def records(self, after: int = 0, upto: int | None = None) -> Iterator[tuple[Epoch, int, BarrierRecord]]:
        """Epoch, writer and record of every barrier in ``(after, upto]``, in order."""
        number = self.log.number
        end = space_end(number, BARRIERS) if upto is None else barriers_from(number, upto + 1)
        items = self._view.scan(barriers_from(number, after + 1), end)
        while run := list(islice(items, _EPOCHS_AT_ONCE)):
            records = BarrierRecord.from_many([bytes(data) for _, data in run])
            for (key, _), record in zip(run, records, strict=True):
                yield *parse_barrier_key(key), record

    def batches(self, epoch: Epoch, ended: Ended, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        """The stored batches of one epoch for *wanted* vnodes; each row from where its barrier says it is.

        :raises LogCorrupt: damaged, or not as much as the barriers say.
        """
        formats = Formats.of(ended)
        if formats.rows & wanted:
            yield from self._row_batches(epoch, ended, formats.rows & wanted)
        if formats.chunks:
            yield from (batch for _, batch in self._chunks([(epoch, ended)], wanted))

    def _chunks(self, run: Sequence[tuple[Epoch, Ended]], wanted: VnodeBitmap) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batches in format 2 of neighbouring epochs, each with its epoch, in one scan."""
        number = self.log.number
        whole = None if wanted.is_full else wanted
        held = {
            chunks_of(number, epoch, writer): _Expected(epoch, record.chunks, record.rows)
            for epoch, ended in run
            for writer, record in ended
            if record.format == chunk_codec.FORMAT
        }
        low, high = chunks_from(number, run[0][0]), chunks_from(number, run[-1][0] + 1)
        found: list[tuple[_Expected, bytes, Any]] = []
        size = 0
        for key, data in self._view.scan(low, high):
            place = held.get(key[:CHUNKS_OF])
            if place is not None:
                found.append((place, key, data))
                size += len(data)
                if size >= _BYTES_AT_ONCE:
                    yield from self._serde.decode_chunks(_with_headers(found), whole)
                    found, size = [], 0
        values = _with_headers(found)
        missing = next((place for place in held.values() if place.chunks or place.rows), None)
        if missing is not None:
            raise _missing(missing.epoch)
        yield from self._serde.decode_chunks(values, whole)

    def _row_batches(self, epoch: Epoch, ended: Ended, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        number = self.log.number
        found: dict[int, int] = {}
        items: list[tuple[bytes, bytes]] = []
        for vnode in wanted:
            low, high = (rows_from(number, vnode, bound) for bound in (epoch, epoch + 1))
            rows = [(bytes(key), bytes(value)) for key, value in self._view.scan(low, high)]
            found[vnode] = len(rows)
            items += rows
            if len(items) >= _ROWS_AT_ONCE:
                yield from self._serde.decode_rows(items)
                items = []
        yield from self._serde.decode_rows(items)
        for _, record in ended:
            is_whole = record.format == row_codec.FORMAT and record.vnodes <= wanted
            if is_whole and sum(found[vnode] for vnode in record.vnodes) != record.rows:
                raise _missing(epoch)

    def check_not_dropped(self, after: int, consumer: str | None = None) -> None:
        """:raises RetentionMiss: retention dropped epochs after *after*."""
        bounds = self.bounds()
        if after < bounds.dropped:
            who = "this reader" if consumer is None else f"consumer {consumer!r}"
            raise RetentionMiss(
                f"Retention dropped epochs of log {self.log.name!r} up to {bounds.dropped}, unread by {who}.",
                bounds.gone,
                next_step="Drop the consumer (headwater log drop), then start it with a new snapshot of the table.",
            )

    def check_range(self, after: int, upto: int) -> None:
        """:raises EpochGone: the log no longer holds it. :raises InvalidOffset: not sealed yet, or backwards."""
        bounds = self.bounds()
        if after < bounds.gone:
            raise EpochGone(
                f"Log {self.log.name!r} no longer holds what comes after epoch {after}; "
                f"its oldest epochs come after {bounds.gone}.",
                bounds.gone,
                next_step=f"Read from epoch {bounds.gone} on, or take a new snapshot of the table.",
            )
        if upto > self.sealed or upto < after:
            raise InvalidOffset(f"Epochs ({after}, {upto}] cannot be read: the newest sealed epoch is {self.sealed}.")

    def read_range(self, after: int, upto: int, wanted: VnodeBitmap | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of the epochs in ``(after, upto]`` and the *wanted* vnodes (all by default).

        They have the columns of the log, then ``_op``, ``_vnode``, ``_seq`` and ``_epoch``.

        :raises EpochGone: the log no longer holds a part of it.
        :raises InvalidOffset: a part of it is not sealed yet.
        :raises ForeignVnode: *wanted* is of another vnode count than the log.
        :raises LogCorrupt: damaged, or not as much as the barriers say; it may come after the rows before it.
        """
        self.check_range(after, upto)
        count = self.log.vnode_count
        vnodes = VnodeBitmap.full(count) if wanted is None else wanted
        if vnodes.count != count:
            raise ForeignVnode(
                f"Received a bitmap of {vnodes.count} vnodes for log {self.log.name!r}, which has {count}."
            )
        for only_chunks, places in groupby(self._places(after, upto), lambda place: not Formats.of(place[1]).rows):
            if only_chunks:
                while run := list(islice(places, _EPOCHS_AT_ONCE)):  # a range of any length needs little memory
                    for epoch, batch in self._chunks(run, vnodes):
                        yield with_epoch(batch, epoch)
            else:
                for epoch, ended in places:
                    for batch in self.batches(epoch, ended, vnodes):
                        yield with_epoch(batch, epoch)

    def read_epoch(self, end: EpochEnd, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        """The rows of one epoch, as :meth:`read_range` gives them."""
        for batch in self.batches(end.epoch, end.ended, wanted):
            yield with_epoch(batch, end.epoch)

    def _places(self, after: int, upto: int) -> Iterator[tuple[Epoch, Ended]]:
        """The barriers of each epoch in ``(after, upto]``."""
        for epoch, group in groupby(self.records(after, upto), key=itemgetter(0)):
            yield epoch, [(writer, record) for _, writer, record in group]

    def schema(self) -> pa.Schema:
        """The columns of :meth:`read_range` for the newest schema."""
        return read_schema(self.log.schema)


@dataclass(slots=True)
class _Expected:
    """What a barrier says of its writer's chunks, and was not found yet."""

    epoch: Epoch
    chunks: int
    rows: int


def _with_headers(found: Sequence[tuple[_Expected, bytes, Any]]) -> list[tuple[int, Any, ChunkHeader]]:
    """Epoch, value and header of chunks, which are no longer expected."""
    values: list[tuple[int, Any, ChunkHeader]] = []
    for place, key, data in found:
        header = chunk_codec.decode_header(data)
        if key[CHUNKS_OF:] != header.first_seq.to_bytes(4, "big"):
            raise LogCorrupt("A key in the chunks of a log is not the key of the chunk that it has.")
        place.chunks -= 1
        place.rows -= header.rows
        values.append((place.epoch, data, header))
    return values


def _missing(epoch: Epoch) -> LogCorrupt:
    return LogCorrupt(f"Epoch {epoch} does not have the rows that its barrier names.")


def _joined(epoch: Epoch, ended: Ended) -> EpochEnd:
    records = [record for _, record in ended]
    vnodes = records[0].vnodes
    for record in records[1:]:
        vnodes = vnodes | record.vnodes
    return EpochEnd(
        epoch,
        any(record.is_checkpoint for record in records),
        sum(record.rows for record in records),
        sum(record.size for record in records),
        vnodes,
        max(record.schema_version for record in records),
        min(record.first_schema_version or record.schema_version for record in records),
        max(record.sealed_ms for record in records),
        Formats.of(ended),
        any(record.is_stop for record in records),
        any(record.compacted for record in records),
        ended,
    )


def read_range(
    location: str, log: str, after: int, upto: int, vnodes: VnodeBitmap | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of the epochs in ``(after, upto]`` of a log, from any process: as :meth:`LogView.read_range`.

    :raises LogNotFound: no such log.
    """
    with open_reader(location) as store, store.mapped_snapshot() as view:
        yield from LogView.open(view, log).read_range(after, upto, vnodes)
