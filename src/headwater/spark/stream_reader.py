"""The stream of a table: its history, then every change, whole commits in each batch.

Spark plans in one process for as long as the query runs (:class:`HeadwaterStreamReader`, which holds the planner and,
where nobody else does it, the capture) and reads in tasks, which get the reader as it was made and one unit each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as st

from headwater.backfill.loop import next_batch, reach_source, units_of
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_changes, read_history
from headwater.backfill.units import LogUnit, Unit, UpstreamUnit
from headwater.spark.columns import Columns
from headwater.spark.data_source_api import (
    BatchStarts,
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from headwater.spark.errors import HistoryWaits, StreamRuns, TableChanged
from headwater.spark.options import STOP, SourceOptions
from headwater.spark.query_capture import QueryCapture
from headwater.spark.rows import Rows
from headwater.spark.session import hot
from headwater.spark.types import rebatched
from headwater.state.errors import StoreOwned
from headwater.system.read_ahead import ahead

_REACH_SECONDS: Final = 60.0
_HISTORY_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 1.0
_OWNED_SECONDS: Final = 10.0
_OWNED_LOOK_SECONDS: Final = 0.2


class UnitPartition(InputPartition):
    """One unit, and where its columns are."""

    def __init__(self, query: QueryOptions, unit: Unit, places: tuple[str | None, ...]) -> None:
        self.query, self.unit, self.places = query, unit, places

    def __repr__(self) -> str:
        return f"UnitPartition({type(self.unit).__name__} of {self.unit.table.full_name})"


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the planning process holds."""

    capture: QueryCapture
    query: QueryOptions
    planner: QueryPlanner
    columns: Columns

    @classmethod
    def open(cls, options: SourceOptions, schema: st.StructType) -> _Opened:
        capture = QueryCapture(options)
        try:
            table = capture.ensure()
            columns = Columns.of(schema, table, options.columns)
            query = options.for_query(table.full_name)
            return cls(capture, query, _planner(query, options), columns)
        except BaseException:
            capture.close()
            raise

    def close(self) -> None:
        self.planner.close()
        self.capture.close()


def _planner(query: QueryOptions, options: SourceOptions) -> QueryPlanner:
    """The planner; that of a query which was just stopped is waited for."""
    end = time.monotonic() + _OWNED_SECONDS
    while True:
        try:
            return QueryPlanner(query, takeover=options.takeover, slots=lambda: options.parallelism)
        except StoreOwned as error:
            if time.monotonic() >= end:
                raise StreamRuns(
                    f"Another stream of the name {query.query!r} is running: {error.message}",
                    next_step="Stop it, give this one another name with option 'query', or set takeover=true.",
                ) from None
            time.sleep(_OWNED_LOOK_SECONDS)


class HeadwaterStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one table as a stream."""

    def __init__(self, options: SourceOptions, schema: st.StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: _Opened | None = None
        self._upto: int | None = None
        self._starts = BatchStarts()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            self._opened = _Opened.open(self._options, self._schema)
        return self._opened

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Spark asks before the first batch is planned and again after that: it is the same."""
        hot()
        return self._open.planner.initial().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """All history, and every change that the source has committed by now."""
        self._upto = reach_source(self._open.planner, _REACH_SECONDS).epoch

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, int]:
        """Waits a moment for something to do: asking is not free. With *available now*, for history to go on.

        :raises HistoryWaits: it did not for a minute.
        """
        hot()
        opened, start = self._open, self._starts.start(start, self.initialOffset)
        begin, limit = QueryOffset.from_json(start), limit or self.getDefaultReadLimit()
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        give_up = time.monotonic() + _HISTORY_SECONDS
        while True:
            opened.capture.watch()
            patience = _POLL_SECONDS if self._upto is None or opened.planner.has_history else 0.0
            end = next_batch(opened.planner, begin, patience, max_rows=rows, upto=self._upto)
            planner = opened.planner
            if end != begin or self._upto is None or planner.has_reached(self._upto):
                return self._starts.planned(start, end.to_json())
            if time.monotonic() >= give_up:
                raise _history_waits(opened)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return self._open.planner.newest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """:raises TableChanged: the table was truncated or its columns changed, and the options say to stop."""
        self._starts.check(start, end)
        opened, options = self._open, self._options
        begin = QueryOffset.from_json(start)
        units = units_of(opened.planner, begin, QueryOffset.from_json(end))
        stops = options.on_schema_change == STOP
        is_new = opened.query.history and begin.plan == 0  # nothing was given yet that a TRUNCATE could empty
        ignores = is_new or options.on_truncate != STOP
        made = []
        for unit in units:
            if isinstance(unit, LogUnit) and unit.truncated is not None and not ignores:
                raise truncated(unit)
            made.append(UnitPartition(opened.query, unit, opened.columns.places(unit.table, stops=stops)))
        return made

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        assert isinstance(partition, UnitPartition)
        rows = Rows(self._schema, partition.places)
        made = rebatched(_rows_of(partition, rows, self._options.preimages))
        return made if isinstance(partition.unit, LogUnit) else ahead(made)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: what is delivered is known when the next batch is planned."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _rows_of(partition: UnitPartition, rows: Rows, preimages: bool) -> Iterator[pa.RecordBatch]:
    unit, query = partition.unit, partition.query
    if isinstance(unit, LogUnit):
        for batch in read_changes(query, unit, rows.needed):
            yield rows.of_changes(batch, preimages=preimages)
    elif not isinstance(unit, UpstreamUnit):
        needed = tuple(rows.needed) or unit.table.key_columns
        for batch in read_history(query, replace(unit, columns=needed)):
            yield rows.of_history(batch, unit.position, unit.commit_time_us)


def _history_waits(opened: _Opened) -> HistoryWaits:
    told, name = opened.planner.status(), opened.query.tables[0]
    why = told["tables"][name]["waiting"] or told["problem"] or "nobody knows why"
    return HistoryWaits(
        f"The history of table {name} has not gone on for {_HISTORY_SECONDS:g} s: {why.rstrip('.')}.",
        next_step="Start the query again when that is over; after an ALTER TABLE, any update of a row of the table"
        " brings it to the capture.",
    )


def truncated(unit: LogUnit) -> TableChanged:
    """What is raised when a table was truncated, and the options say to stop."""
    return TableChanged(
        f"Table {unit.table.full_name} was truncated, or captured anew after a gap: rows that came before are void.",
        next_step="Empty what you made of them and start with a new checkpoint and another 'query'; "
        "or set option onTruncate=ignore to go on.",
    )
