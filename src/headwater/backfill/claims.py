"""Claims: what the tasks of a batch do. A claim names a range of a log, or a part of a backfill; its rows are read
and staged by the task itself, so they never pass through the driver or Spark. Tables may be captured or upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from headwater.backfill.cdc.external import external_table
from headwater.backfill.keeping import Keeping
from headwater.backfill.planner import QueryPlanner, Recover
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import changed_keys, parked_history, read_unit
from headwater.backfill.tasks import Slots
from headwater.backfill.units import LogUnit, SnapshotUnit, Unit, UpstreamUnit
from headwater.sinks.dead_letters import DeadLetters, ParkedRows, RejectsRows, RowFilter
from headwater.sinks.delivery import TableFailure
from headwater.sinks.errors import SinkRowError
from headwater.sinks.sink import Committed, HistoryPart, Sink, Staged, Token
from headwater.sources.errors import UnsupportedTable
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.system.clock import Clock


@dataclass(frozen=True, slots=True)
class Delivery:
    """The tables of one query, and the sink that gets them.

    :ivar dead_letters: where rows go that the sink refuses; ``None``: they stop it.
    :ivar parked: where rows go that special values park; ``None``: such tables cannot be delivered.
    """

    options: QueryOptions
    sink: Sink
    dead_letters: str | None = None
    parked: str | None = None

    @property
    def name(self) -> str:
        return self.options.query

    @property
    def store(self) -> str:
        return self.options.store

    @property
    def state(self) -> str:
        return self.options.state_location

    @property
    def may_park(self) -> tuple[str, ...]:
        """Tables that may be parked, but for the last of them: without a backfill their missing rows never come."""
        options = self.options
        return options.tables if options.history and options.upstream is None else ()

    @property
    def parks_rows(self) -> bool:
        return self.dead_letters is not None

    @property
    def letters(self) -> DeadLetters:
        path = self.dead_letters or self.parked
        assert path is not None
        return DeadLetters(path)

    def open_planner(
        self, recover: Recover, parked: Callable[[], Mapping[str, str]], slots: Slots, clock: Clock
    ) -> QueryPlanner:
        """The planner of its batches. An earlier one is fenced."""

        def committed(table: SourceTable, backfill: str) -> Committed:
            return self.sink.committed(table, self.name, backfill)

        return QueryPlanner(
            self.options,
            committed=committed,
            recover=recover,
            parked=parked,
            keeping=Keeping.of(self.sink, self.name),
            takeover=True,
            slots=slots,
            clock=clock,
        )

    def stage(self, claims: Sequence[Claim], budget: Budget | None = None) -> StagedClaims:
        """Read the units of *claims* and stage them with the sink; in a task, which may run twice.

        :raises BatchTooLarge: they have more than the *budget*.
        """
        result = StagedClaims()
        for claim in claims:
            _stage(self, claim, result, budget)
        return result

    def commit_parked(self, parked: Sequence[Staged]) -> None:
        """Make durable what tasks staged of parked rows."""
        self.letters.commit(parked)


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit of the planner, and the batch that it belongs to.

    :ivar tries: each row is tried at the sink before it is staged.
    """

    unit: Any
    token: Token
    tries: bool = False


@dataclass(slots=True)
class StagedClaims:
    """What tasks have staged, the rows that they parked, and the tables that they could not stage."""

    staged: list[Staged] = field(default_factory=list)
    parked: list[Staged] = field(default_factory=list)
    failures: list[TableFailure] = field(default_factory=list)

    def add(self, other: StagedClaims) -> None:
        self.staged += other.staged
        self.parked += other.parked
        self.failures += other.failures


class BatchTooLarge(Exception):
    """A batch has more rows or bytes than may be staged in the driver. Never leaves the loop."""


@dataclass(slots=True)
class Budget:
    """The rows and bytes that may still be read."""

    rows: int
    size: int

    def through(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """:raises BatchTooLarge: there are more of them."""
        for batch in batches:
            self.rows -= batch.num_rows
            self.size -= batch.nbytes
            if self.rows < 0 or self.size < 0:
                raise BatchTooLarge
            yield batch


def _stage(delivery: Delivery, claim: Claim, result: StagedClaims, budget: Budget | None) -> None:
    try:
        try:
            _stage_unit(delivery, claim, result, budget)
        except SinkRowError:
            if delivery.dead_letters is None or claim.tries:
                raise
            _stage_unit(delivery, replace(claim, tries=True), result, budget)
    except BatchTooLarge:
        raise
    except Exception as error:
        failure = TableFailure.of(claim.unit.table, error)
        if failure is None or len(delivery.may_park) < 2:
            raise
        result.failures.append(failure)


def _stage_unit(delivery: Delivery, claim: Claim, result: StagedClaims, budget: Budget | None) -> None:
    sink, unit = delivery.sink, claim.unit
    part = _history_part(delivery.options, unit)
    rows = read_unit(delivery.options, unit)
    if budget is not None:
        rows = budget.through(rows)
    parking = _parking(delivery, unit)
    if parking is not None:
        rows = parking.through(rows)
    row_filter = RowFilter(cast(RejectsRows, sink), unit.table) if claim.tries else None
    if row_filter is not None:
        rows = row_filter.through(rows)
    if part is None:
        result.staged.append(sink.stage_changes(unit.table, claim.token, rows, unit.truncated))
    else:
        result.staged.append(sink.stage_history(unit.table, claim.token, part, rows))
        if isinstance(unit, UpstreamUnit) and unit.truncated is not None:
            result.staged.append(sink.stage_changes(unit.table, claim.token, iter(()), unit.truncated))
    refused = [*(row_filter.refused if row_filter is not None else ()), *(parking.rows if parking is not None else ())]
    if refused:
        result.parked.append(
            delivery.letters.stage_changes(unit.table, claim.token, refused)
            if part is None
            else delivery.letters.stage_history(unit.table, claim.token, part, refused)
        )


def _parking(delivery: Delivery, unit: Unit) -> ParkedRows | None:
    """What takes parked rows out; ``None``: the table has none, and none to be resolved."""
    table, path = unit.table, delivery.parked
    if isinstance(unit, UpstreamUnit):
        return None
    if path is None and table.parking:
        raise UnsupportedTable(
            table.full_name,
            "its rows can be parked, and this query has no directory for parked rows.",
            next_step=f"Set special_values of {table.full_name} to text, null or stop.",
        )
    if path is None or not (table.parking or (Path(path) / DeadLetters(path).directory_of(table)).is_dir()):
        return None
    if isinstance(unit, LogUnit):
        return ParkedRows(table, DeadLetters(path), truncated=unit.truncated)
    return ParkedRows(table, DeadLetters(path), parked_history(delivery.options, unit))


def _history_part(options: QueryOptions, unit: Unit) -> HistoryPart | None:
    """How the sink takes the rows of *unit*; ``None``: they are changes."""
    if isinstance(unit, LogUnit):
        return None
    if isinstance(unit, UpstreamUnit):
        return HistoryPart(SplitKind.KEY, (), unit.position, unit.commit_time_us) if unit.is_history else None
    if isinstance(unit, SnapshotUnit):
        return HistoryPart(SplitKind.KEY, (KeyRange(),), unit.position, unit.commit_time_us)
    return HistoryPart(
        unit.kind,
        unit.ranges,
        unit.position,
        unit.commit_time_us,
        replaces=unit.replaces,
        rereads=unit.rereads,
        changed=changed_keys(options, unit),
        columns=unit.columns,
        order=external_table(options.source, unit.table).order
        if unit.replaces and unit.kind is SplitKind.KEY and unit.ranges != (KeyRange(),)
        else None,
    )
