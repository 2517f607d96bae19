"""Claim-check delivery: the rows of the query are pointers, and the tasks that write open the log or the source.

The data source ``headwater_claims`` is both ends of one query that delivers all tables of one sink. Its reader plans
(:class:`~headwater.backfill.planner.QueryPlanner`) and gives one row per unit; its writer reads that unit, stages it
with the sink, and commits each table once per batch. What a batch is called comes from our own epochs and plans, never
from Spark's batch id, which may repeat.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit

from headwater.backfill.keeping import Keeping
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import changed_keys, parked_history, read_changes, read_history
from headwater.backfill.units import LogUnit, SnapshotUnit, SplitUnit, Unit
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.dead_letters import DeadLetters, ParkedRows, Refusing, Sieve
from headwater.sinks.delivery_look import DeliveryLook
from headwater.sinks.errors import SinkRowError
from headwater.sinks.sink import Committed, HistoryPart, Sink, Staged, Token
from headwater.sinks.staged_tables import TableFailure
from headwater.sources.errors import UnsupportedTable
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.spark.failure import told
from headwater.spark.heartbeat import BEAT_SUFFIX, Heartbeat
from headwater.spark.session import hot

FORMAT: Final = "headwater_claims"
OPTION: Final = "delivery_secret"
"""The option that carries the delivery; Spark hides the values of options with such a name."""
_COLUMN: Final = "claim"
_POLL_SECONDS: Final = 1.0
_PARTS: Final = 4
"""So many tasks of a batch for each that runs at a time: a task costs a tenth of a second, whatever it does."""

_coordinators: dict[tuple[str, str], Coordinator] = {}
"""Of this process, by store and query: the processes that commit are used again, and opening one takes a while."""


@dataclass(frozen=True, slots=True)
class ClaimDelivery:
    """What one query does.

    :ivar stop_file: once it is there, no batch begins.
    :ivar dead_letters: where rows go that the sink refuses; ``None``: they stop it.
    :ivar parked: where rows go that special values park; ``None``: such tables cannot be delivered.
    """

    options: QueryOptions
    sink: Sink
    stop_file: str
    dead_letters: str | None = None
    parked: str | None = None

    @property
    def may_park(self) -> tuple[str, ...]:
        """Tables that may be parked, but for the last of them: without history what they miss would not come back."""
        return self.options.tables if self.options.history else ()

    def to_option(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def from_option(cls, text: str) -> ClaimDelivery:
        made = pickle.loads(base64.b64decode(text))
        assert isinstance(made, cls)
        return made


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit, and the batch that it is of. :ivar tries: each row is tried at the sink before it is staged."""

    unit: Unit
    token: Token
    tries: bool = False


class ClaimSource(DataSource):
    """Both ends of a claim-check query."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return f"{_COLUMN} BINARY"

    def streamReader(self, schema: Any) -> ClaimReader:  # noqa: N802 - Spark's name
        return ClaimReader(ClaimDelivery.from_option(self.options[OPTION]))

    def streamWriter(self, schema: Any, overwrite: bool) -> ClaimWriter:  # noqa: N802 - Spark's name
        hot()
        return ClaimWriter(ClaimDelivery.from_option(self.options[OPTION]))


class ClaimReader(DataSourceStreamReader):
    """Plans the query; lives in one process of its own for as long as the query runs."""

    def __init__(self, delivery: ClaimDelivery) -> None:
        self._delivery = delivery
        self._opened: QueryPlanner | None = None
        self._beat: Heartbeat | None = None
        self._look = DeliveryLook(delivery.options.store, delivery.options.query)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClaimReader, (self._delivery,)

    @property
    def _planner(self) -> QueryPlanner:
        if self._opened is None:
            sink, options = self._delivery.sink, self._delivery.options

            def committed(table: SourceTable, backfill: str) -> Committed:
                return sink.committed(table, options.query, backfill)

            def recover(generation: int, backfill: str, tables: Sequence[SourceTable]) -> None:
                with Coordinator(options.store, options.query, generation) as coordinator:
                    coordinator.recover(sink, backfill, tables)

            def parked() -> dict[str, str]:
                return {name: one["reason"] for name, one in self._look.parked().items()}

            self._opened = QueryPlanner(
                options,
                committed=committed,
                recover=recover,
                parked=parked,
                keeping=Keeping.of(sink, options.query),
                takeover=True,
            )
        return self._opened

    @contextmanager
    def _answering(self) -> Iterator[QueryPlanner]:
        """The planner, which is seen to hang where it does not answer soon."""
        planner = self._planner
        if self._beat is None:
            self._beat = Heartbeat(Path(self._delivery.stop_file).with_suffix(BEAT_SUFFIX))
        with self._beat:
            yield planner

    @told
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Spark asks again after the first batch was planned, and when it is delivered again after a crash."""
        hot()
        return self._planner.initial().to_json()

    @told
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Waits a moment for something to do."""
        hot()
        if Path(self._delivery.stop_file).exists():
            return start
        with self._answering() as planner:
            return planner.advance(QueryOffset.from_json(start), timeout=_POLL_SECONDS).to_json()

    @told
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = QueryOffset.from_json(start), QueryOffset.from_json(end)
        with self._answering() as planner:
            units = planner.units(first, last)
        token = Token(
            self._delivery.options.query,
            planner.backfill_id,
            first.epoch,
            last.epoch,
            last.plan,
            generation=planner.generation,
        )
        parks = self._delivery.dead_letters is not None
        suspects = self._look.suspects() if parks else frozenset()
        claims = [Claim(unit, _token_of(unit, token), unit.table.full_name in suspects) for unit in units]
        parts = min(len(claims), _PARTS * self._delivery.options.parallelism)
        return [InputPartition([pickle.dumps(claim) for claim in claims[part::parts]]) for part in range(parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        yield pa.RecordBatch.from_arrays([pa.array(partition.value, pa.binary())], [_COLUMN])

    def commit(self, end: dict[str, int]) -> None:
        """Nothing: what is delivered is known when the next batch is planned."""

    def stop(self) -> None:
        self._look.close()
        if self._beat is not None:
            self._beat.close()
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _token_of(unit: Unit, token: Token) -> Token:
    return token if isinstance(unit, LogUnit) else replace(token, attempt=unit.attempt)


@dataclass(slots=True)
class StagedClaims(WriterCommitMessage):
    """What one task has staged, the rows that it parked, and the tables that it could not stage."""

    generation: int = 0
    staged: list[Staged] = field(default_factory=list)
    parked: list[Staged] = field(default_factory=list)
    failures: list[TableFailure] = field(default_factory=list)


class ClaimWriter(DataSourceStreamArrowWriter):
    """Stages units in tasks; commits them in one process, once per batch."""

    def __init__(self, delivery: ClaimDelivery) -> None:
        self._delivery = delivery

    @told
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedClaims:
        hot()
        made = StagedClaims()
        for batch in iterator:
            for value in batch.column(0).to_pylist():
                claim: Claim = pickle.loads(value)
                made.generation = claim.token.generation
                self._stage(claim, made)
        return made

    def _stage(self, claim: Claim, made: StagedClaims) -> None:
        try:
            try:
                self._stage_unit(claim, made)
            except SinkRowError:
                if self._delivery.dead_letters is None or claim.tries:
                    raise
                self._stage_unit(replace(claim, tries=True), made)
        except Exception as error:
            failure = TableFailure.of(claim.unit.table, error)
            if failure is None or len(self._delivery.may_park) < 2:
                raise
            made.failures.append(failure)

    def _stage_unit(self, claim: Claim, made: StagedClaims) -> None:
        options, sink, unit = self._delivery.options, self._delivery.sink, claim.unit
        part = None if isinstance(unit, LogUnit) else _history_part(options, unit)
        rows = read_changes(options, unit) if isinstance(unit, LogUnit) else read_history(options, unit)
        parking = self._parking(unit)
        if parking is not None:
            rows = parking.through(rows)
        sieve = Sieve(cast(Refusing, sink), unit.table) if claim.tries else None
        if sieve is not None:
            rows = sieve.through(rows)
        if isinstance(unit, LogUnit):
            made.staged.append(sink.stage_changes(unit.table, claim.token, rows, unit.truncated))
        else:
            assert part is not None
            made.staged.append(sink.stage_history(unit.table, claim.token, part, rows))
        refused = [*(sieve.refused if sieve is not None else ()), *(parking.rows if parking is not None else ())]
        if refused:
            letters = self._letters
            made.parked.append(
                letters.stage_changes(unit.table, claim.token, refused)
                if part is None
                else letters.stage_history(unit.table, claim.token, part, refused)
            )

    @property
    def _letters(self) -> DeadLetters:
        path = self._delivery.dead_letters or self._delivery.parked
        assert path is not None
        return DeadLetters(path)

    def _parking(self, unit: Unit) -> ParkedRows | None:
        """What takes parked rows out; ``None``: the table has none, and none to be resolved."""
        table, path = unit.table, self._delivery.parked
        if path is None and table.parking:
            raise UnsupportedTable(
                table.full_name,
                "rows of it may be parked, and this query has no place for them.",
                next_step=f"Set special_values of {table.full_name} to text, null or stop.",
            )
        if path is None or not (table.parking or (Path(path) / DeadLetters(path).directory_of(table)).is_dir()):
            return None
        if isinstance(unit, LogUnit):
            return ParkedRows(table, DeadLetters(path), truncated=unit.truncated)
        return ParkedRows(table, DeadLetters(path), parked_history(self._delivery.options, unit))

    @told
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        hot()
        staged: list[Staged] = []
        parked: list[Staged] = []
        failures: list[TableFailure] = []
        for message in messages:
            assert isinstance(message, StagedClaims)
            staged += message.staged
            parked += message.parked
            failures += message.failures
        if not staged and not failures:
            return
        delivery = self._delivery
        generation = max(message.generation for message in messages if isinstance(message, StagedClaims))
        coordinator = self._coordinator(generation)
        if parked:
            self._letters.commit(parked)
        coordinator.deliver(
            delivery.sink,
            staged,
            failures,
            parks_rows=delivery.dead_letters is not None,
            tables=delivery.may_park,
        )

    def _coordinator(self, generation: int) -> Coordinator:
        options = self._delivery.options
        place = (options.store, options.query)
        known = _coordinators.get(place)
        if known is None or known.generation != generation:
            if known is not None:
                _coordinators.pop(place).close()
            known = _coordinators[place] = Coordinator(options.store, options.query, generation)
        return known

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: Spark also calls this after a commit that took effect."""


def _history_part(options: QueryOptions, unit: SplitUnit | SnapshotUnit) -> HistoryPart:
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
        order=open_snapshots(options.source).order(unit.table)
        if unit.replaces and unit.kind is SplitKind.KEY and unit.ranges != (KeyRange(),)
        else None,
    )
