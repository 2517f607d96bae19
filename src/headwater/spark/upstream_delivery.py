"""Delivery of an upstream table to a sink of ours: the rows of the query are pointers, and the tasks that write open
the upstream table.

The data source ``headwater_upstream`` is both ends of the query. Its reader plans
(:class:`~headwater.backfill.snapshot.consume_upstream.planner.UpstreamPlanner`) and gives one row per unit; its writer
reads that unit and stages it with the sink, a snapshot as history and the change log as changes; one process commits
each batch once, under the name of its plan, which the sink keeps with the rows.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from headwater.backfill.offset import QueryOffset
from headwater.backfill.snapshot.consume_upstream.planner import UpstreamPlanner
from headwater.backfill.snapshot.consume_upstream.query import UpstreamQuery, UpstreamUnit
from headwater.backfill.snapshot.consume_upstream.reader import read_unit
from headwater.backfill.snapshot.consume_upstream.upstream_table import PartKind
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import SplitKind
from headwater.sources.table import SourceTable
from headwater.sources.written import POSITION_DTYPE
from headwater.spark.failure import told
from headwater.spark.session import hot

FORMAT: Final = "headwater_upstream"
OPTION: Final = "delivery_secret"
"""The option that carries the delivery; Spark hides the values of options with such a name."""
_COLUMN: Final = "claim"
_POLL_SECONDS: Final = 1.0

_coordinators: dict[tuple[str, str], Coordinator] = {}
"""Of this process, by store and query: the processes that commit are used again."""


@dataclass(frozen=True, slots=True)
class UpstreamDelivery:
    """What one query does. :ivar stop_file: once it is there, no batch begins; empty: there is none."""

    query: UpstreamQuery
    sink: Sink
    stop_file: str = ""

    def to_option(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def from_option(cls, text: str) -> UpstreamDelivery:
        made = pickle.loads(base64.b64decode(text))
        assert isinstance(made, cls)
        return made


def deliver(
    spark: Any,
    query: UpstreamQuery,
    sink: Sink,
    *,
    checkpoint: str | Path,
    stop_file: str = "",
    available_now: bool = False,
) -> Any:
    """Start the query that delivers the upstream table of *query* to *sink*, exactly once; Spark's own handle of it.

    :param checkpoint: a directory of its own, kept with the state of the query.
    :param available_now: the snapshot and every version that is there by now; then it ends.
    :raises SinkError: the sink cannot be written to.
    """
    sink.check()
    spark.dataSource.register(UpstreamDeliverySource)
    option = UpstreamDelivery(query, sink, stop_file).to_option()
    claims = spark.readStream.format(FORMAT).option(OPTION, option).load()
    writer = claims.writeStream.format(FORMAT).option(OPTION, option)
    writer = writer.option("checkpointLocation", str(checkpoint)).queryName(query.query)
    return (writer.trigger(availableNow=True) if available_now else writer).start()


class UpstreamDeliverySource(DataSource):
    """Both ends of the query."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return f"{_COLUMN} BINARY"

    def streamReader(self, schema: Any) -> UpstreamClaimReader:  # noqa: N802 - Spark's name
        return UpstreamClaimReader(UpstreamDelivery.from_option(self.options[OPTION]))

    def streamWriter(self, schema: Any, overwrite: bool) -> UpstreamClaimWriter:  # noqa: N802 - Spark's name
        hot()
        return UpstreamClaimWriter(UpstreamDelivery.from_option(self.options[OPTION]))


class UpstreamClaimReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the query; lives in one process of its own for as long as it runs."""

    def __init__(self, delivery: UpstreamDelivery) -> None:
        self._delivery = delivery
        self._opened: UpstreamPlanner | None = None
        self._upto: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def _planner(self) -> UpstreamPlanner:
        if self._opened is None:
            query, sink = self._delivery.query, self._delivery.sink

            def recover(generation: int, backfill: str, table: SourceTable) -> None:
                with Coordinator(query.store, query.query, generation) as coordinator:
                    coordinator.recover(sink, backfill, [table])

            self._opened = UpstreamPlanner(query, recover=recover, takeover=True)
        return self._opened

    @told
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return self._planner.initial().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    @told
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._upto = self._planner.newest_epoch()

    @told
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Waits a moment for something to do. :raises RetentionMiss: with *available now*, what follows is gone."""
        hot()
        if self._delivery.stop_file and Path(self._delivery.stop_file).exists():
            return start
        return self._planner.latest(QueryOffset.from_json(start), _POLL_SECONDS, self._upto).to_json()

    @told
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = QueryOffset.from_json(start), QueryOffset.from_json(end)
        planner, query = self._planner, self._delivery.query
        token = Token(
            query.query, planner.backfill_id, first.epoch, last.epoch, last.plan, generation=planner.generation
        )
        return [InputPartition(pickle.dumps((unit, token))) for unit in planner.units(first, last)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        if partition.value is not None:
            yield pa.RecordBatch.from_arrays([pa.array([partition.value], pa.binary())], [_COLUMN])

    def commit(self, end: dict[str, int]) -> None:
        """Nothing: what is delivered is known when the next batch is planned."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


@dataclass(slots=True)
class StagedUnits(WriterCommitMessage):
    """What one task has staged."""

    generation: int = 0
    staged: list[Staged] = field(default_factory=list)


class UpstreamClaimWriter(DataSourceStreamArrowWriter):
    """Stages units in tasks; commits them in one process, once per batch."""

    def __init__(self, delivery: UpstreamDelivery) -> None:
        self._delivery = delivery

    @told
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedUnits:
        hot()
        made = StagedUnits()
        for batch in iterator:
            for value in batch.column(0).to_pylist():
                unit, token = pickle.loads(value)
                made.generation = token.generation
                made.staged += stage_unit(self._delivery, unit, token)
        return made

    @told
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        hot()
        found = [message for message in messages if isinstance(message, StagedUnits)]
        staged = [one for message in found for one in message.staged]
        if staged:
            generation = max(message.generation for message in found)
            self._coordinator(generation).deliver(self._delivery.sink, staged)

    def _coordinator(self, generation: int) -> Coordinator:
        query = self._delivery.query
        place = (query.store, query.query)
        known = _coordinators.get(place)
        if known is None or known.generation != generation:
            if known is not None:
                _coordinators.pop(place).close()
            known = _coordinators[place] = Coordinator(query.store, query.query, generation)
        return known

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: Spark also calls this after a commit that took effect."""


def stage_unit(delivery: UpstreamDelivery, unit: UpstreamUnit, token: Token) -> list[Staged]:
    """Stage what *unit* reads; what came before a new snapshot goes with its first batch."""
    sink, rows = delivery.sink, read_unit(delivery.query.upstream, unit)
    truncated = (token.epoch, 0) if unit.replaces else None
    if unit.part.kind is PartKind.CHANGES:
        return [sink.stage_changes(unit.table, token, rows, truncated)]
    own = (batch.select(unit.table.schema.names) for batch in rows)
    part = HistoryPart(SplitKind.KEY, (), _position(unit), unit.commit_time_us)
    made = [sink.stage_history(unit.table, token, part, own)]
    if truncated is not None:
        made.append(sink.stage_changes(unit.table, token, iter(()), truncated))
    return made


def _position(unit: UpstreamUnit) -> bytes:
    """Before every row of a later version."""
    import numpy as np

    made = np.zeros(1, POSITION_DTYPE)
    made["epoch"] = unit.commit_version
    return made.tobytes()
