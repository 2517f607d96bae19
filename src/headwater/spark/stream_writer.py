"""The other end: ``df.writeStream.format("headwater")`` writes a stream into a log of its own, each batch once.

Tasks stage rows (:mod:`headwater.spark.staged_rows`); the process in which Spark commits writes them as one epoch, in
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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st

from headwater.capture.stream_log import write_batch
from headwater.capture.stream_records import StreamBatch
from headwater.spark.data_source_api import DataSourceStreamArrowWriter, WriterCommitMessage
from headwater.spark.errors import InvalidOption
from headwater.spark.session import hot
from headwater.spark.staged_rows import StagedPart, StagedRows
from headwater.spark.write_options import WriteOptions
from headwater.spark.written_rows import WrittenRows

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
