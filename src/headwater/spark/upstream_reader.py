"""The stream of an upstream table: its rows at one version as inserts, then every change, each once.

Spark plans in one process for as long as the query runs, which holds the planner, and reads in tasks, which get the
table as it is named and a range of vnodes each.

Where the table no longer keeps what comes next the query stays where it is, and its status and the log say so; one with
the trigger *available now* ends with the error instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as st

from headwater.backfill.loop import next_batch
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_upstream
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.backfill.units import UpstreamUnit
from headwater.sources.table import SourceTable
from headwater.spark.columns import Columns
from headwater.spark.data_source_api import (
    BatchStarts,
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from headwater.spark.errors import StreamRuns, TableChanged
from headwater.spark.options import STOP
from headwater.spark.rows import Rows
from headwater.spark.session import hot
from headwater.spark.types import rebatched
from headwater.spark.upstream_options import UpstreamSourceOptions
from headwater.state.errors import StoreOwned

_POLL_SECONDS: Final = 1.0
_OWNED_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2


def upstream_table(query: QueryOptions) -> SourceTable:
    """The table of *query* as it is now. :raises UpstreamDropped: it does not exist."""
    upstream = _upstream(query)
    return upstream.table(upstream.newest_epoch())


class UpstreamPartition(InputPartition):
    """One unit, and where its columns are."""

    def __init__(self, unit: UpstreamUnit, places: tuple[str | None, ...]) -> None:
        self.unit, self.places = unit, places


class UpstreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one upstream table as a stream."""

    def __init__(self, options: UpstreamSourceOptions, schema: st.StructType) -> None:
        self._options, self._schema = options, schema
        self._query = options.for_query()
        self._opened: QueryPlanner | None = None
        self._upto: int | None = None
        self._starts = BatchStarts()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def _planner(self) -> QueryPlanner:
        if self._opened is None:
            self._opened = _open(self._query, takeover=self._options.takeover, parallelism=self._options.parallelism)
        return self._opened

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return self._planner.initial().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The snapshot, and every version that is there by now."""
        self._upto = self._planner.newest_epoch()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, int]:
        """Waits a moment for something to do. :raises RetentionMiss: with *available now*, what follows is gone."""
        hot()
        start = self._starts.start(start, self.initialOffset)
        planner, upto, begin = self._planner, self._upto, QueryOffset.from_json(start)
        end = next_batch(planner, begin, _POLL_SECONDS if upto is None else 0.0, upto=upto)
        while upto is not None and end == begin and not planner.has_reached(upto):
            end = next_batch(planner, begin, _POLL_SECONDS, upto=upto)
        return self._starts.planned(start, end.to_json())

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return self._planner.newest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """:raises TableChanged: the table is read once more, or its columns changed, and the options say to stop."""
        self._starts.check(start, end)
        options, planner = self._options, self._planner
        first = QueryOffset.from_json(start)
        made = []
        columns: Columns | None = None
        for unit in planner.units(first, QueryOffset.from_json(end)):
            assert isinstance(unit, UpstreamUnit)
            if unit.replaces and first.plan and options.on_resnapshot == STOP:
                raise _replaced(unit)
            if columns is None:
                columns = Columns.of(self._schema, upstream_table(self._query), options.columns)
            places = columns.places(unit.table, stops=options.on_schema_change == STOP)
            made.append(UpstreamPartition(unit, places))
        return made

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        if not isinstance(partition, UpstreamPartition):
            return iter(())  # Spark's own, for a batch without units
        rows, options = Rows(self._schema, partition.places), self._options
        found = read_upstream(_upstream(self._query), partition.unit)
        return rebatched(rows.of_changes(batch, preimages=options.preimages) for batch in found)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: what is delivered is known when the next batch is planned."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _upstream(query: QueryOptions) -> UpstreamTable:
    assert query.upstream is not None
    return query.upstream


def _open(query: QueryOptions, *, takeover: bool, parallelism: int) -> QueryPlanner:
    """The planner; that of a query which was just stopped is waited for."""
    end = time.monotonic() + _OWNED_SECONDS
    while True:
        try:
            return QueryPlanner(query, takeover=takeover, slots=lambda: parallelism)
        except StoreOwned as error:
            if time.monotonic() >= end:
                raise StreamRuns(
                    f"Another stream of the name {query.query!r} is running: {error.message}",
                    next_step="Stop it, give this one another name with option 'query', or set takeover=true.",
                ) from None
            time.sleep(_LOOK_SECONDS)


def _replaced(unit: UpstreamUnit) -> TableChanged:
    return TableChanged(
        f"Table {unit.table.full_name} is read once more: rows that came before are void.",
        next_step="Empty what you made of them, then start again with option onResnapshot=ignore.",
    )
