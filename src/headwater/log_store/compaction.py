"""Key compaction of a backlog: of the rows that one key has in a run of epochs only the newest stays.

Rows keep their epoch, vnode and seq. Whoever reads the run to its end, from wherever it starts, ends with the same
table by key: the last word on every key is kept, deletes included. Changes in between are no longer told, so this is
never done unless asked for. A half of an update pair whose other half is gone becomes an insert or a delete. A row that
adds is an update without its old row if the first row of its key in the run is one.

Left alone are epochs that

* a pin shows: somebody may be reading them as they are;
* a consumer has delivered for some vnodes and not for others, or is inside of;
* changed their columns in their middle, or are older than the key that the log has now.

Each epoch's rows and barrier change in one seal. A crash between two seals is harmless: a row only goes when a newer
one of its key is durable already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater import failpoints
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.columns import OP, SEQ, VNODE
from headwater.log_store.errors import ForeignSchema, WrongCall
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log import Log
from headwater.log_store.log_view import EpochEnd, LogView
from headwater.log_store.rewrite import rewrite_epoch
from headwater.log_store.serde import BarrierRecord
from headwater.stream import Epoch, Op

BEFORE_EPOCH = failpoints.register("log_store.compact_before_epoch")

RUN_ROWS = 1_000_000
"""Rows whose keys are held in memory at once."""
CHUNK_ROWS = 65_536
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Saved:
    """What a compaction looked at, and what it left."""

    epochs: int = 0
    rows_before: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes: int = 0
    epochs_left_alone: int = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            self.epochs + other.epochs,
            self.rows_before + other.rows_before,
            self.rows + other.rows,
            self.bytes_before + other.bytes_before,
            self.bytes + other.bytes,
            self.epochs_left_alone + other.epochs_left_alone,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one writer wrote in one epoch."""

    epoch: Epoch
    writer: int
    record: BarrierRecord
    rows: int
    lone: NDArray[np.bool_]
    inserts: NDArray[np.bool_]

    def has_other_ops(self, updates: NDArray[np.bool_]) -> bool:
        """Whether an update without its old row is an insert, or the reverse: the first row of its key was left out."""
        return bool((self.lone & ~updates | self.inserts & updates).any())


class Compaction:
    """The compaction of one log, in the process that writes the store.

    Call :meth:`step` at barriers until it says that it is done; what a step did is durable with the next seal.
    """

    def __init__(self, factory: KvLogStoreFactory, log: str, *, compression: Compression = Compression.NONE) -> None:
        self._factory = factory
        self._log = factory.existing(log)
        self._compression = compression
        self._after = Epoch(0)
        self.saved = Saved()
        if not self._log.key_columns:
            raise ForeignSchema(f"Log {log!r} has no key; it cannot be compacted by key.")

    def step(self, max_rows: int = RUN_ROWS) -> bool:
        """Compact the next run of epochs, of about *max_rows* rows, in the next seal; whether it was the last.

        :raises WrongCall: the log is being migrated (one of both at a time).
        """
        log = self._factory.existing(self._log.name)
        if log.rows_held:
            raise WrongCall(
                f"Log {log.name!r} is being migrated.", next_step="Finish that first: headwater log migrate."
            )
        # What was truncated since the last seal is still in the snapshot; written again it would come back to life.
        after = max(self._after, self._factory.truncation.gone(log.name))
        with self._factory.store.snapshot() as view:
            shown = LogView(view, log)
            run: list[EpochEnd] = []
            rows = 0
            left_alone = self._left_alone()
            for end in shown.epochs(after):
                is_mixed = end.first_schema_version != end.schema_version
                is_foreign = is_mixed or end.first_schema_version < log.key_since
                if is_foreign or any(low < end.epoch <= high for low, high in left_alone):
                    if run:
                        break  # a run has no holes
                    self.saved += Saved(epochs_left_alone=1)
                    self._after = end.epoch
                    continue
                if run and (rows + end.rows > max_rows or end.schema_version != run[0].schema_version):
                    break
                run.append(end)
                rows += end.rows
            if not run:
                return True
            self.saved += self._compact(shown, log, run)
            self._after = run[-1].epoch
            return next(shown.epochs(self._after), None) is None

    def _left_alone(self) -> list[tuple[int, int]]:
        """Epochs ``(low, high]`` that must stay as they are."""
        name = self._log.name
        ranges = [(0, int(pin.epoch)) for pin in self._factory.store.pins()]
        for consumer in self._factory.consumers.of(name):
            furthest = max((place.epoch for _, place in consumer.progress.places()), default=Epoch(0))
            ranges.append((consumer.delivered(), furthest))
        return ranges

    def _compact(self, shown: LogView, log: Log, run: list[EpochEnd]) -> Saved:
        parts, newest, updates = _newest(shown, log, run)
        saved = Saved(epochs=len(run))
        place = 0
        for part in parts:
            keep, lone = newest[place : place + part.rows], updates[place : place + part.rows]
            place += part.rows
            same = Saved(0, part.rows, part.rows, part.record.size, part.record.size)
            if keep.all() and not part.has_other_ops(lone):
                saved += same
                continue
            failpoints.hit(BEFORE_EPOCH)
            made = rewrite_epoch(
                self._factory.sealer,
                log,
                part.epoch,
                part.writer,
                part.record,
                _survivors(list(_batches(shown, part.epoch, part.writer, part.record)), keep, lone),
                part.record.format,
                compacted=True,
                compression=self._compression,
            )
            saved += Saved(0, part.rows, made.rows, part.record.size, made.bytes)
        return saved


def _batches(shown: LogView, epoch: Epoch, writer: int, record: BarrierRecord) -> Iterator[pa.RecordBatch]:
    return shown.batches(epoch, [(writer, record)], record.vnodes)


def _newest(shown: LogView, log: Log, run: list[EpochEnd]) -> tuple[list[_Part], NDArray[np.bool_], NDArray[np.bool_]]:
    """The parts of the run, and for each row, in the order in which they are read, whether it is its key's newest.

    And whether the newest, if it adds, is an update without its old row: as the first row of its key.
    """
    parts: list[_Part] = []
    keys: list[pa.RecordBatch] = []
    epochs: list[NDArray[np.int64]] = []
    seqs: list[NDArray[np.uint32]] = []
    lone: list[NDArray[np.bool_]] = []
    inserts: list[NDArray[np.bool_]] = []
    for epoch, writer, record in shown.records(run[0].epoch - 1, run[-1].epoch):
        count, before = 0, len(lone)
        for batch in _batches(shown, epoch, writer, record):
            keys.append(_key_batch(batch, log))
            seqs.append(batch.column(SEQ).to_numpy())
            lone.append(_lone_updates(batch))
            inserts.append(batch.column(OP).to_numpy() == Op.INSERT)
            count += batch.num_rows
        epochs.append(np.full(count, len(parts)))
        none = np.zeros(0, bool)
        own = (np.concatenate([none, *masks[before:]]) for masks in (lone, inserts))
        parts.append(_Part(epoch, writer, record, count, *own))
    if not keys:
        return parts, np.zeros(0, bool), np.zeros(0, bool)
    # Writers of one epoch own different vnodes, hence different keys: the order between them decides nothing.
    order = np.lexsort((np.concatenate(seqs), np.concatenate(epochs)))
    age = np.empty(len(order), np.int64)
    age[order] = np.arange(len(order))
    table = pa.Table.from_batches(keys).append_column("age", pa.array(age))
    names = table.schema.names[:-1]
    try:
        found = table.group_by(names, use_threads=False).aggregate([("age", "max"), ("age", "min")])
    except (pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise ForeignSchema(f"Log {log.name!r} has a key of a type that cannot be compacted.") from error
    last, first = (order[found.column(name).to_numpy()] for name in ("age_max", "age_min"))
    newest = np.zeros(len(order), bool)
    newest[last] = True
    updates = np.zeros(len(order), bool)
    updates[last] = np.concatenate(lone)[first]
    return parts, newest, updates


def _lone_updates(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """The new rows of updates that are told without their old rows, in rows ordered by vnode and seq."""
    ops, vnodes, seqs = (batch.column(name).to_numpy() for name in (OP, VNODE, SEQ))
    found: NDArray[np.bool_] = ops == Op.UPDATE_INSERT
    found[1:] &= (ops[:-1] != Op.UPDATE_DELETE) | (vnodes[:-1] != vnodes[1:]) | (seqs[:-1] + 1 != seqs[1:])
    return found


def _key_batch(batch: pa.RecordBatch, log: Log) -> pa.RecordBatch:
    """The key columns, as values that Arrow can group."""
    columns: list[Any] = []
    for name in log.key_columns:
        column = batch.column(name)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=[f"key{place}" for place in range(len(columns))])


def _survivors(
    batches: list[pa.RecordBatch], keep: NDArray[np.bool_], lone: NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """The rows to keep, ordered by vnode and seq, with valid update pairs, in chunks of some rows and bytes.

    A chunk has whole vnodes: a vnode's rows in two chunks could come in the wrong order.
    """
    vnodes, seqs, ops = (
        np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in (VNODE, SEQ, OP)
    )
    order = np.lexsort((seqs, vnodes))
    ops[order] = _valid_ops(ops[order], vnodes[order], seqs[order].astype(np.int64), keep[order])
    ops[lone & (ops == Op.INSERT)] = Op.UPDATE_INSERT
    kept = order[keep[order]]
    row_bytes = sum(batch.nbytes for batch in batches) // len(keep)
    cuts = _cuts(vnodes[kept], max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(1, row_bytes))))
    for low, high in pairwise(cuts):
        rows = kept[low:high]
        batch = _taken(batches, rows)
        place = batch.schema.get_field_index(OP)
        yield batch.set_column(place, batch.schema.field(place), pa.array(ops[rows], pa.int8()))


def _valid_ops(
    ops: NDArray[np.int8], vnodes: NDArray[np.uint16], seqs: NDArray[np.int64], keep: NDArray[np.bool_]
) -> NDArray[np.int8]:
    """The ops of ordered rows when only those of *keep* stay: a half of a pair that stands alone is one no longer."""
    opens = np.zeros(len(ops), bool)
    opens[:-1] = (ops[:-1] == Op.UPDATE_DELETE) & (ops[1:] == Op.UPDATE_INSERT) & (vnodes[:-1] == vnodes[1:])
    opens[:-1] &= (seqs[:-1] + 1 == seqs[1:]) & keep[:-1] & keep[1:]
    closes = np.append(False, opens[:-1])
    valid = ops.copy()
    valid[(ops == Op.UPDATE_DELETE) & ~opens] = Op.DELETE
    valid[(ops == Op.UPDATE_INSERT) & ~closes] = Op.INSERT
    return valid


def _cuts(vnodes: NDArray[np.uint16], rows: int) -> list[int]:
    """Places between vnodes, about *rows* apart, from the first to behind the last."""
    borders = np.flatnonzero(np.append(True, vnodes[1:] != vnodes[:-1])) if len(vnodes) else np.zeros(0, np.int64)
    cuts = [0]
    for wanted in range(rows, len(vnodes), rows):
        at = int(borders[np.searchsorted(borders, wanted, side="right") - 1])
        if at > cuts[-1]:
            cuts.append(at)
    return [*cuts, len(vnodes)] if len(vnodes) else []


def _taken(batches: list[pa.RecordBatch], rows: NDArray[np.int64]) -> pa.RecordBatch:
    """The rows with these numbers, counted over all batches. Only they are copied: the whole may be too big for one."""
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    source = np.searchsorted(starts, rows, side="right") - 1
    places = [np.flatnonzero(source == number) for number in range(len(batches))]
    parts = [
        batch.take(pa.array(rows[place] - start))
        for batch, place, start in zip(batches, places, starts, strict=False)
        if len(place)
    ]
    joined = pa.Table.from_batches(parts).combine_chunks().to_batches()
    if len(joined) != 1:
        raise WrongCall(
            "An epoch has more in one vnode than Arrow can hold in one column.", next_step="Leave this log as it is."
        )
    return joined[0].take(pa.array(np.argsort(np.concatenate(places))))
