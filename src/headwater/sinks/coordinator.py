"""Coordinator: one batch of a query after the other, from staged to committed, with a row that survives every crash.

The token of a batch is created once, when it is planned, and is kept in the sink by the same transaction as its rows; a
row here only tells what to do next. A query that starts commits what is pending, from what was staged, before it plans:
so a process of before that wakes up in the middle of a commit finds the token in the sink and changes nothing. Where
that cannot be done exactly, the query writes its generation into every table concerned before it plans, and that commit
is refused there. A process of before that comes with a new batch is refused here, by its generation.

A table that the sink cannot take is *parked* with the reason, and the others go on: its query leaves it out until
`headwater sink retry` lets it return, when it is read once more. One of which the sink refused a row at the commit is
*suspect*: where such rows are parked, tasks try each of its rows before they stage them.

A row has the states of :class:`~headwater.sinks.delivery.DeliveryState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from headwater import failpoints
from headwater.errors import NotFoundError
from headwater.sinks.delivery import (
    ACCOUNTED,
    DELIVERIES,
    DELIVERY_STATE,
    PARKED,
    SUSPECT,
    TABLE,
    DeliveryRecord,
    DeliveryState,
    ParkedTable,
    TableFailure,
    behind,
    by_table_of,
    commit_tables,
    each,
    has_changes,
    is_there,
    now_ms,
    of_tables,
    packed,
    parked_tables,
    read_records,
)
from headwater.sinks.errors import (
    OtherAttempt,
    RowsRefused,
    SinkBehind,
    SinkFenced,
    SinkRefuses,
    SinkRowError,
    SinkSchemaError,
    StagedLost,
)
from headwater.sinks.sink import Committed, Sink, Staged, Token, check_targets
from headwater.sinks.staged_codec import decode
from headwater.sources.table import SourceTable
from headwater.state import WriteBatch
from headwater.state.errors import WriterFenced
from headwater.state.query_store import QueryStore

BEFORE_PENDING = failpoints.register("delivery.before_pending")
AFTER_PENDING = failpoints.register("delivery.after_pending")
BEFORE_COMMITTED = failpoints.register("delivery.before_committed")
AFTER_COMMITTED = failpoints.register("delivery.after_committed")

BEFORE_FENCES = failpoints.register("delivery.before_fences")
AFTER_FENCES = failpoints.register("delivery.after_fences")

BEFORE_PARKED = failpoints.register("delivery.before_parked")
AFTER_PARKED = failpoints.register("delivery.after_parked")


class Coordinator:
    """The deliveries of one query to one sink; one thread. Its rows are in the query's state.

    :ivar committed_rows: by this object.
    """

    def __init__(self, store: QueryStore) -> None:
        self._store, self._query, self.generation = store, store.query, store.generation
        self.committed_rows = 0
        batch = WriteBatch()
        self._rows = store.catalog.open_or_create(DELIVERIES, batch)
        self._state = store.catalog.open_or_create(DELIVERY_STATE, batch)

    @property
    def records(self) -> tuple[DeliveryRecord, ...]:
        """In order: at most one that is committed, then those that are pending or aborted."""
        self.flush()
        with self._store.snapshot() as view:
            return read_records(self._rows, view)

    def parked(self) -> dict[str, ParkedTable]:
        """The tables that are parked. Which these are is never deferred."""
        with self._store.snapshot() as view:
            return parked_tables(self._state, view)

    def suspects(self) -> frozenset[str]:
        """The tables of which the sink refused rows at the commit."""
        return frozenset(self._of_tables(SUSPECT))

    def deliver(
        self,
        sink: Sink,
        staged: Sequence[Staged],
        failures: Sequence[TableFailure] = (),
        *,
        parks_rows: bool = False,
        tables: Sequence[str] = (),
    ) -> None:
        """Commit one batch, each of its tables once.

        :param failures: tables that could not be staged: nothing of them is committed.
        :param parks_rows: rows that the sink refuses are parked: a table with one is suspect, and staged anew.
        :param tables: of the query: the last one that is not parked is not parked either.
        :raises SinkFenced: a later generation delivers; nothing of the batch was committed here.
        :raises SinkError: the others are committed; the batch stays pending, and is committed when it comes again.
        """
        failed = {one.table.full_name: one for one in failures}
        by_table = {name: parts for name, parts in by_table_of(staged).items() if name not in failed}
        token = max((one.token for one in staged), key=lambda one: (one.epoch, one.plan), default=None)
        record = None if token is None else self._pending(token, by_table)
        errors = commit_tables(sink, by_table)
        self._judge(sink, failed, errors, parks_rows=parks_rows, tables=tables)
        if record is not None:
            self._finish(sink, record, {name: parts for name, parts in by_table.items() if name not in errors})

    def _judge(
        self,
        sink: Sink,
        failed: Mapping[str, TableFailure],
        errors: Mapping[str, tuple[SourceTable, BaseException]],
        *,
        parks_rows: bool,
        tables: Sequence[str],
    ) -> None:
        """Park the tables that cannot be delivered; raise what is about more than one of them."""
        parked = dict(failed)
        for name, (table, error) in errors.items():
            # one that is suspect already was staged without the rows that the sink refuses one by one
            if parks_rows and isinstance(error, SinkRowError) and name not in self.suspects():
                self._suspect(name)
                raise RowsRefused(error.message, next_step="Nothing: the batch is staged anew without them.") from error
            failure = TableFailure.of(table, error)
            if failure is None:
                raise error
            parked[name] = failure
        if not parked:
            return
        if not set(tables) - self.parked().keys() - parked.keys():
            first = next(iter(parked.values()))
            raise SinkRefuses(first.reason, next_step=first.next_step)

        def change(batch: WriteBatch) -> None:
            for name, one in parked.items():
                value = ParkedTable(one.reason, one.next_step, now_ms()).to_json()
                self._state.put(batch, 0, (f"{PARKED}{name}",), (value,))

        failpoints.hit(BEFORE_PARKED)
        self._seal(change)
        failpoints.hit(AFTER_PARKED)
        for one in parked.values():
            sink.abort(one.table, self._query, self.generation + 1)

    def _of_tables(self, prefix: str) -> dict[str, Any]:
        """What is sealed of tables, by their names."""
        with self._store.snapshot() as view:
            return of_tables(self._state, view, prefix)

    def _suspect(self, name: str) -> None:
        self._seal(lambda batch: self._state.put(batch, 0, (f"{SUSPECT}{name}",), (now_ms(),)))

    def recover(self, sink: Sink, backfill: str, tables: Sequence[SourceTable]) -> None:
        """Take over from the generations of before: commit what is pending, remove what nobody commits any more.

        :raises SinkError: the sink does not take it; what is pending stays so.
        :raises SinkBehind: the sink lacks what was committed to it.
        :raises SinkInputError: two of *tables* have the same target there.
        """
        check_targets(sink, tables)
        for record in self.records:
            if record.state is DeliveryState.PENDING:
                self._settle(sink, record)
        self.flush()
        epochs = self._of_tables(TABLE)
        lost: set[str] = set()
        for table, has in behind(sink, self._query, backfill, tables, epochs):
            if has != Committed():
                raise SinkBehind(table.full_name, sink.name, has.epoch, epochs[table.full_name])
            lost.add(table.full_name)
        if lost:  # they begin anew: what was committed before is not what the sink must have
            self._seal(lambda batch: self._forget(batch, TABLE, lost))
        self._shut_out(sink, tables, lost)
        each(tables, lambda table: sink.abort(table, self._query, self.generation), sink.capabilities.connections)

    def _shut_out(self, sink: Sink, tables: Sequence[SourceTable], lost: Set[str]) -> None:
        """Refuse commits of earlier generations that can still be under way.

        A batch of which everything was committed is found by its token, whoever brings it again. That is so for the
        tables of a query after each recovery: only where a batch was given up, or a table is new here (also after
        everything was forgotten), can a frozen process have something that no token accounts for.
        """
        aborted = [record for record in self.records if record.state is DeliveryState.ABORTED]
        known = self._accounted()
        safe = known - lost - {name for record in aborted for name in record.tables}
        names = {table.full_name for table in tables}
        if self.generation > 1:
            doubtful = [table for table in tables if table.full_name not in safe]
            failpoints.hit(BEFORE_FENCES)
            each(
                doubtful, lambda table: _fence(sink, table, self._query, self.generation), sink.capabilities.connections
            )
            failpoints.hit(AFTER_FENCES)
        if aborted or names != known:

            def change(batch: WriteBatch) -> None:
                for record in aborted:
                    self._rows.delete(batch, 0, (record.number,))
                self._state.put(batch, 0, (ACCOUNTED,), (sorted(names),))

            self._seal(change)

    def _accounted(self) -> set[str]:
        with self._store.snapshot() as view:
            found = self._state.get(view, 0, (ACCOUNTED,))
        return set() if found is None else set(found[0])

    def forget(self) -> None:
        """Forget every batch, and how far each table is: the next start fences all tables."""

        def change(batch: WriteBatch) -> None:
            for record in self.records:
                self._rows.delete(batch, 0, (record.number,))
            self._forget(batch, TABLE, self._of_tables(TABLE))
            self._state.delete(batch, 0, (ACCOUNTED,))

        self._seal(change)

    def flush(self) -> None:
        """Make durable that a batch is committed, if that still waits for the next plan.

        :raises SinkFenced: a later writer has the query.
        """
        with self._fencing():
            self._store.flush()

    def _settle(self, sink: Sink, record: DeliveryRecord) -> None:
        with self._store.snapshot() as view:
            found = self._rows.get(view, 0, (record.number,))
        assert found is not None
        staged = decode(found[1])
        if staged is None:
            self._abort(record, "What was staged is not kept: the batch is staged anew.")
            return
        by_table = by_table_of(staged)
        errors = [error for _, error in commit_tables(sink, by_table).values()]
        if any(isinstance(error, OtherAttempt | StagedLost | NotFoundError | FileNotFoundError) for error in errors):
            self._abort(record, "What was staged is gone, or of another attempt: the batch is staged anew.")
        elif any(TableFailure.of(staged[0].table, error) is not None for error in errors):
            self._abort(record, "A table cannot be delivered: the batch is staged anew, and it is parked.")
        elif errors:
            raise errors[0]
        else:
            self._finish(sink, record, by_table)

    def _pending(self, token: Token, by_table: Mapping[str, Sequence[Staged]]) -> DeliveryRecord:
        record = DeliveryRecord(
            number=0,
            state=DeliveryState.PENDING,
            generation=self.generation,
            epoch=token.epoch,
            plan=token.plan,
            tables={name: sum(one.rows for one in parts) for name, parts in by_table.items()},
            changed=[name for name, parts in by_table.items() if any(has_changes(one) for one in parts)],
            since_ms=now_ms(),
        )
        kept = packed([one for parts in by_table.values() for one in parts])

        def change(batch: WriteBatch) -> None:
            nonlocal record
            known = self.records
            record = replace(record, number=known[-1].number + 1 if known else 1)
            for old in known:
                if old.state is DeliveryState.PENDING:  # the same batch, staged before
                    self._rows.delete(batch, 0, (old.number,))
            self._rows.put(batch, 0, (record.number,), (record.to_json(), kept))

        failpoints.hit(BEFORE_PENDING)
        self._seal(change)
        failpoints.hit(AFTER_PENDING)
        return record

    def _finish(self, sink: Sink, record: DeliveryRecord, committed: Mapping[str, Sequence[Staged]]) -> None:
        """*record* is over; the sink has of it what is *committed*."""
        changed = [name for name in record.changed if name in committed and is_there(sink, committed[name])]

        def change(batch: WriteBatch) -> None:
            for old in self.records:
                if old.number < record.number and old.state is DeliveryState.COMMITTED:
                    self._rows.delete(batch, 0, (old.number,))
            self._put(batch, record, DeliveryState.COMMITTED, None)
            self._forget(batch, SUSPECT, record.tables)
            for name in changed:
                self._state.put(batch, 0, (f"{TABLE}{name}",), (record.epoch,))

        batch = WriteBatch()
        change(batch)
        self.committed_rows += sum(staged.rows for parts in committed.values() for staged in parts)
        failpoints.hit(BEFORE_COMMITTED)
        self._store.defer(batch)
        failpoints.hit(AFTER_COMMITTED)

    def _forget(self, batch: WriteBatch, prefix: str, names: Iterable[str]) -> None:
        for name in names:
            self._state.delete(batch, 0, (f"{prefix}{name}",))

    def _abort(self, record: DeliveryRecord, reason: str) -> None:
        self._seal(lambda batch: self._put(batch, record, DeliveryState.ABORTED, reason))

    def _put(self, batch: WriteBatch, record: DeliveryRecord, state: DeliveryState, reason: str | None) -> None:
        value = record.to_json() | {"state": state.value, "since_ms": now_ms(), "reason": reason}
        self._rows.put(batch, 0, (record.number,), (value, b""))

    def _seal(self, change: Callable[[WriteBatch], None]) -> None:
        """Seal what *change* writes. :raises SinkFenced: a later writer has the query."""
        batch = WriteBatch()
        change(batch)
        with self._fencing():
            self._store.seal(batch)

    @contextmanager
    def _fencing(self) -> Iterator[None]:
        try:
            yield
        except WriterFenced as error:
            raise SinkFenced(
                f"Query {self._query!r} was started again elsewhere: this is generation {self.generation} of it.",
                next_step="No action needed: the later process delivers.",
            ) from error


def _fence(sink: Sink, table: SourceTable, query: str, generation: int) -> None:
    with suppress(SinkSchemaError):  # a target that cannot be created: nothing is committed there either
        sink.fence(table, query, generation)
