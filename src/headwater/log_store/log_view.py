"""A log as a snapshot shows it: barriers, the rows of an epoch, ranges. Any process may read it.

What is read is a function of the stored bytes and the arguments alone: the same range gives the same batches, always.
Within an epoch rows come chunk by chunk (format 2) or vnode by vnode (format 1); the rows of one vnode always come in
the order of their seq ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log_store import layout, row_codec
from headwater.log_store.barrier_record import BarrierRecord
from headwater.log_store.bounds import BOUNDS, Bounds
from headwater.log_store.chunk_codec import decode_blocks, decode_header
from headwater.log_store.columns import read_schema, stored_schema, with_epoch
from headwater.log_store.errors import EpochGone, InvalidOffset
from headwater.log_store.log import Log, LogRegistry
from headwater.state import Catalog, Snapshot
from headwater.stream import Epoch, VnodeBitmap

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The barriers that all instances wrote at the end of one epoch, as one."""

    epoch: Epoch
    is_checkpoint: bool
    rows: int
    size: int
    vnodes: VnodeBitmap
    schema_version: int
    sealed_ms: int
    formats: frozenset[int]
    is_stop: bool


class LogView:
    """One log in one snapshot."""

    def __init__(self, view: Snapshot, log: Log) -> None:
        self._view = view
        self.log = log
        catalog = Catalog.load(view)
        self._bounds = catalog.open(BOUNDS) if BOUNDS.name in catalog.names() else None

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
        row = None if self._bounds is None else self._bounds.get(self._view, 0, (self.log.name,))
        return Bounds(Epoch(0), Epoch(0)) if row is None else Bounds(Epoch(row[0]), Epoch(row[1]))

    def epochs(self, after: int = 0, upto: int | None = None) -> Iterator[EpochEnd]:
        """The ends of the epochs in ``(after, upto]``, in order."""
        number = self.log.number
        end = layout.space_end(number, layout.BARRIERS) if upto is None else layout.barriers_from(number, upto + 1)
        records: list[BarrierRecord] = []
        current: Epoch | None = None
        for key, data in self._view.scan(layout.barriers_from(number, after + 1), end):
            epoch, _ = layout.parse_barrier_key(key)
            if current is not None and epoch != current:
                yield _joined(current, records)
                records = []
            current = epoch
            records.append(BarrierRecord.from_bytes(bytes(data)))
        if current is not None:
            yield _joined(current, records)

    def batches(self, epoch: Epoch, formats: frozenset[int], wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        """The stored batches of one epoch for *wanted* vnodes."""
        if row_codec.FORMAT in formats:
            yield from self._row_batches(epoch, wanted)
        if formats != {row_codec.FORMAT}:
            yield from self._chunk_batches(epoch, wanted)

    def _chunk_batches(self, epoch: Epoch, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        number = self.log.number
        whole = None if wanted.is_full else wanted
        for _, data in self._view.scan(layout.chunks_from(number, epoch), layout.chunks_from(number, epoch + 1)):
            header = decode_header(data)
            schema = stored_schema(self.log.schema_of(header.schema_version))
            yield from decode_blocks(data, header, schema, whole)

    def _row_batches(self, epoch: Epoch, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        number = self.log.number
        values: list[bytes] = []
        places: list[tuple[int, int]] = []
        for vnode in wanted:
            for key, value in self._view.scan(
                layout.rows_from(number, vnode, epoch), layout.rows_from(number, vnode, epoch + 1)
            ):
                _, _, seq = layout.parse_row_key(key)
                values.append(bytes(value))
                places.append((vnode, seq))
            if len(values) >= _ROWS_AT_ONCE:
                yield from self._decoded(values, places)
                values, places = [], []
        yield from self._decoded(values, places)

    def _decoded(self, values: list[bytes], places: list[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        if not values:
            return
        version = row_codec.schema_version_of(values[0])
        schema = self.log.schema_of(version)
        rows, ops = row_codec.decode_rows(values, schema)
        vnodes, seqs = np.array(places, np.int64).T
        columns: list[Any] = [*rows.columns, ops, pa.array(vnodes.astype(np.uint16)), pa.array(seqs.astype(np.uint32))]
        yield pa.RecordBatch.from_arrays(columns, schema=stored_schema(schema))

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
        """
        self.check_range(after, upto)
        vnodes = VnodeBitmap.full(self.log.vnode_count) if wanted is None else wanted
        for end in self.epochs(after, upto):
            yield from self.read_epoch(end, vnodes)

    def read_epoch(self, end: EpochEnd, wanted: VnodeBitmap) -> Iterator[pa.RecordBatch]:
        """The rows of one epoch, as :meth:`read_range` gives them."""
        for batch in self.batches(end.epoch, end.formats, wanted):
            yield with_epoch(batch, end.epoch)

    def schema(self) -> pa.Schema:
        """The columns of :meth:`read_range` for the newest schema."""
        return read_schema(self.log.schema)


def _joined(epoch: Epoch, records: list[BarrierRecord]) -> EpochEnd:
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
        max(record.sealed_ms for record in records),
        frozenset(record.format for record in records),
        any(record.is_stop for record in records),
    )
