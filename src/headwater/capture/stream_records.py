"""What is durable of the streams that write a store, beside their rows: their runs, and the last batch of each.

It is sealed together with the rows, so a batch is either there with its record or not at all.

=========================================  ====================================================================
a batch comes from                         then
=========================================  ====================================================================
the newest run                             it is written
a run that is not known, of the same       it becomes the newest run: the stream was started again
stream as the newest
a run that is not known, of another        it is refused; or becomes the newest, where it was told to take over
stream
a run that was the newest once             it is fenced: nothing of it is written any more
=========================================  ====================================================================

A stream is known by an id that its checkpoint keeps, a run by one that it gets when it starts. Of a stream the last
batch comes again after a crash, earlier ones never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwater.errors import ConflictError, FencedError, HeadwaterError, InputError, TransientError
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch


class StreamLogError(HeadwaterError):
    """Any error of a log that a stream writes."""


class StreamFenced(StreamLogError, FencedError):
    """The stream was started again elsewhere, or another one has taken its store: this run has ended."""


class StoreTaken(StreamLogError, ConflictError):
    """The store is that of a capture, of another table or of another stream."""


class CheckpointBehind(StreamLogError, ConflictError):
    """The store has later batches of the stream than its checkpoint: that was restored, or lost a part."""


class StagedRowsLost(StreamLogError, TransientError):
    """Rows that a task has staged are gone: the batch must be made again."""


class StreamColumns(StreamLogError, InputError):
    """Columns that the log cannot have, or rows that it cannot hold."""


RUNS = TableSchema(
    "stream_runs",
    1,
    key=(Field("run", FieldType.TEXT),),
    value=(Field("generation", FieldType.INT), Field("query", FieldType.TEXT)),
)
BATCHES = TableSchema(
    "stream_batches",
    1,
    key=(Field("query", FieldType.TEXT),),
    value=(Field("batch", FieldType.INT), Field("epoch", FieldType.UINT), Field("rows", FieldType.INT)),
)
RUNS_KEPT: Final = 1000
"""Older ones are forgotten; a driver that slept through so many restarts is told by its batch that it is late."""


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One batch of one run of a stream.

    :ivar query: the id that the checkpoint keeps. :ivar run: that of this start. :ivar number: counts the batches.
    """

    query: str
    run: str
    number: int


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The last batch of a stream.

    :ivar rows: that the stream has written in all.
    """

    number: int
    epoch: int
    rows: int


class StreamRecords:
    """The streams of one store; writes go into the batch of the next seal."""

    def __init__(self, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> None:
        self._runs_table: StateTable = catalog.open_or_create(RUNS, batch)
        self._batches_table: StateTable = catalog.open_or_create(BATCHES, batch)
        self._load(view)

    @classmethod
    def read(cls, view: Snapshot) -> StreamRecords:
        """For other processes: what the snapshot has."""
        return cls(Catalog.load(view), view, WriteBatch())

    def _load(self, view: Snapshot) -> None:
        self.runs = {key[0]: (int(values[0]), str(values[1])) for key, values in self._runs_table.scan(view, 0)}
        self.batches = {key[0]: WrittenBatch(*values) for key, values in self._batches_table.scan(view, 0)}

    @property
    def rows(self) -> int:
        """What all streams together have written."""
        return sum(known.rows for known in self.batches.values())

    def admit(self, batch: StreamBatch, *, takeover: bool) -> bool:
        """Whether *batch* is of a run that is new here; an error if it may not write.

        :raises StreamFenced: a later run writes. :raises StoreTaken: another stream does.
        """
        newest, owner = max(self.runs.values(), default=(0, batch.query))
        known = self.runs.get(batch.run)
        if known is not None and known[0] < newest:
            other = "it was started again" if owner == batch.query else f"stream {owner} has taken the store over"
            raise StreamFenced(
                f"This run of stream {batch.query} writes no more: {other}.",
                next_step="Stop this one. One store has one writer: give each stream a store of its own.",
            )
        if known is None and owner != batch.query and not takeover:
            last = self.batches.get(owner)
            raise StoreTaken(
                f"The store was written by stream {owner}" + (f" up to batch {last.number}" if last else "") + "; this "
                f"is stream {batch.query}: another query, or the same one with a new checkpoint.",
                next_step="Name another store. To go on after what is there, set option takeover=true: rows that come "
                "again from the beginning are then there twice.",
            )
        return known is None

    def has(self, batch: StreamBatch) -> bool:
        """Whether *batch* was written.

        :raises CheckpointBehind: later ones were.
        """
        last = self.batches.get(batch.query)
        if last is None or batch.number > last.number:
            return False
        if batch.number < last.number:
            raise CheckpointBehind(
                f"The checkpoint of stream {batch.query} is at batch {batch.number}, the store has its batch "
                f"{last.number}: the checkpoint was restored from a copy, or lost a part.",
                next_step="Restore the newest checkpoint, or begin anew with an empty checkpoint and another store.",
            )
        return True

    def put_run(self, batch: WriteBatch, of: StreamBatch) -> None:
        """From the next seal on the run of *of* is the newest."""
        generation = max((known for known, _ in self.runs.values()), default=0) + 1
        self.runs[of.run] = (generation, of.query)
        self._runs_table.put(batch, 0, (of.run,), (generation, of.query))
        for run, (known, _) in list(self.runs.items()):
            if known <= generation - RUNS_KEPT:
                del self.runs[run]
                self._runs_table.delete(batch, 0, (run,))

    def put_batch(self, batch: WriteBatch, of: StreamBatch, epoch: int, rows: int) -> None:
        """From the next seal on *of*, with so many rows, is there."""
        before = self.batches.get(of.query)
        made = WrittenBatch(of.number, epoch, rows + (before.rows if before else 0))
        self.batches[of.query] = made
        self._batches_table.put(batch, 0, (of.query,), (made.number, made.epoch, made.rows))
