"""Coordinator: one batch of a query after the other, from staged to committed, with a row that survives every crash.

The token of a batch is made once, when it is planned, and is kept in the sink by the same transaction as its rows; a
row here only tells what to do next. A query that starts commits what is pending, from what was staged, before it plans:
so a process of before that wakes up in the middle of a commit finds the token in the sink and changes nothing. One that
comes with a new batch is refused here, by its generation.

A table that the sink cannot take is *parked* with the reason, and the others go on: its query leaves it out until
somebody lets it come back, when it is read once more. One of which the sink refused a row at the commit is *suspect*:
where such rows are parked, tasks try each of its rows before they stage them.

A row has the states of :class:`~headwater.sinks.delivery_record.DeliveryState`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from headwater import failpoints
from headwater.errors import FencedError, NotFoundError
from headwater.sinks.delivery_look import behind
from headwater.sinks.delivery_record import (
    DELIVERIES,
    DELIVERY_STATE,
    FOLDER,
    GENERATION,
    PARKED,
    SUSPECT,
    TABLE,
    DeliveryRecord,
    DeliveryState,
    now_ms,
    of_tables,
)
from headwater.sinks.errors import OtherAttempt, RowsRefused, SinkBehind, SinkFenced, SinkRefuses, SinkRowError
from headwater.sinks.sink import Committed, Sink, Staged, Token, check_targets
from headwater.sinks.staged_codec import decode
from headwater.sinks.staged_tables import (
    TableFailure,
    by_table_of,
    commit_tables,
    has_changes,
    is_there,
    packed,
)
from headwater.sources.table import SourceTable
from headwater.state import Catalog, StateStore, WriteBatch
from headwater.state.beside import open_beside_writer
from headwater.stream import EpochClock

BEFORE_PENDING = failpoints.register("delivery.before_pending")
AFTER_PENDING = failpoints.register("delivery.after_pending")
BEFORE_COMMITTED = failpoints.register("delivery.before_committed")
AFTER_COMMITTED = failpoints.register("delivery.after_committed")

BEFORE_PARKED = failpoints.register("delivery.before_parked")
AFTER_PARKED = failpoints.register("delivery.after_parked")


class Coordinator:
    """The deliveries of one query to one sink.

    :param generation: of the query's planner: a higher one was started later.
    :raises SinkFenced: a later generation delivers.
    """

    def __init__(self, location: str, query: str, generation: int) -> None:
        self._location, self._query, self.generation = location, query, generation
        self._lock = threading.Lock()
        self._store: StateStore
        self._open()

    @property
    def records(self) -> tuple[DeliveryRecord, ...]:
        """In order: at most one that is committed, then those that are pending or aborted."""
        with self._store.snapshot() as view:
            found = [DeliveryRecord.from_json(key[0], values[0]) for key, values in self._rows.scan(view, 0)]
        return tuple(sorted(found, key=lambda record: record.number))

    def parked(self) -> dict[str, Any]:
        """The tables that are parked: ``reason``, ``next_step`` and ``since_ms`` of each."""
        return self._told(PARKED)

    def suspects(self) -> frozenset[str]:
        """The tables of which the sink refused rows at the commit."""
        return frozenset(self._told(SUSPECT))

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
            if parks_rows and isinstance(error, SinkRowError) and name not in self._told(SUSPECT):
                self._suspect(name)
                raise RowsRefused(error.message, next_step="Nothing: the batch is staged anew without them.") from error
            failure = TableFailure.of(table, error)
            if failure is None:
                raise error
            parked[name] = failure
        if not parked:
            return
        if not set(tables) - self._told(PARKED).keys() - parked.keys():
            first = next(iter(parked.values()))
            raise SinkRefuses(first.reason, next_step=first.next_step)

        def change(batch: WriteBatch) -> None:
            for name, one in parked.items():
                told = {"reason": one.reason, "next_step": one.next_step, "since_ms": now_ms()}
                self._state.put(batch, 0, (f"{PARKED}{name}",), (told,))

        failpoints.hit(BEFORE_PARKED)
        self._seal(change)
        failpoints.hit(AFTER_PARKED)
        for one in parked.values():
            sink.abort(one.table, self._query, self.generation + 1)

    def _told(self, prefix: str) -> dict[str, Any]:
        """What is known of tables, by their names."""
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
        epochs = self._told(TABLE)
        lost: list[str] = []
        for table, has in behind(sink, self._query, backfill, tables, epochs):
            if has != Committed():
                raise SinkBehind(table.full_name, sink.name, has.epoch, epochs[table.full_name])
            lost.append(table.full_name)
        if lost:  # they begin anew: what was committed before is not what the sink must have
            self._seal(lambda batch: self._forget(batch, TABLE, lost))
        for table in tables:
            sink.abort(table, self._query, self.generation)
        if any(record.state is DeliveryState.ABORTED for record in self.records):
            self._seal(self._without_aborted)

    def forget(self) -> None:
        """Forget every batch, and how far each table is."""

        def change(batch: WriteBatch) -> None:
            for record in self.records:
                self._rows.delete(batch, 0, (record.number,))
            self._forget(batch, TABLE, self._told(TABLE))

        self._seal(change)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        if any(isinstance(error, OtherAttempt | NotFoundError | FileNotFoundError) for error in errors):
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

        failpoints.hit(BEFORE_COMMITTED)
        self._seal(change)
        failpoints.hit(AFTER_COMMITTED)

    def _forget(self, batch: WriteBatch, prefix: str, names: Iterable[str]) -> None:
        for name in names:
            self._state.delete(batch, 0, (f"{prefix}{name}",))

    def _abort(self, record: DeliveryRecord, reason: str) -> None:
        self._seal(lambda batch: self._put(batch, record, DeliveryState.ABORTED, reason))

    def _without_aborted(self, batch: WriteBatch) -> None:
        for record in self.records:
            if record.state is DeliveryState.ABORTED:
                self._rows.delete(batch, 0, (record.number,))

    def _put(self, batch: WriteBatch, record: DeliveryRecord, state: DeliveryState, reason: str | None) -> None:
        value = record.to_json() | {"state": state.value, "since_ms": now_ms(), "reason": reason}
        self._rows.put(batch, 0, (record.number,), (value, b""))

    def _open(self) -> None:
        """Take the store over, unless a later generation has it."""
        self._store = open_beside_writer(self._location, FOLDER, self._query, takeover=True)
        try:
            self._clock = EpochClock(now_ms, self._store.committed_epoch())
            batch = WriteBatch()
            with self._store.snapshot() as view:
                catalog = Catalog.load(view)
                self._rows = catalog.open_or_create(DELIVERIES, batch)
                self._state = catalog.open_or_create(DELIVERY_STATE, batch)
                found = self._state.get(view, 0, (GENERATION,))
            newest = 0 if found is None else int(found[0])
            if newest > self.generation:
                raise SinkFenced(
                    f"Query {self._query!r} was started again elsewhere: this is generation {self.generation} of it, "
                    f"generation {newest} delivers.",
                    next_step="Nothing: this process has nothing more to do.",
                )
            if newest < self.generation:
                self._state.put(batch, 0, (GENERATION,), (self.generation,))
            if batch:
                self._store.seal(self._clock.next(), batch)
        except BaseException:
            self._store.close()
            raise

    def _seal(self, change: Callable[[WriteBatch], None]) -> None:
        """Seal what *change* writes; a process of the same generation may have had the store in between."""
        with self._lock:
            try:
                self._try_seal(change)
            except FencedError:
                self._store.close()
                self._open()
                self._try_seal(change)

    def _try_seal(self, change: Callable[[WriteBatch], None]) -> None:
        batch = WriteBatch()
        change(batch)
        self._store.seal(self._clock.next(), batch)


def forget_committed(location: str, query: str, generation: int) -> None:
    """What *query*, which does not run, has committed counts no more: the sink itself tells. What is parked stays.

    :param generation: processes of earlier ones are refused from now on.
    """
    with Coordinator(location, query, generation) as coordinator:
        coordinator.forget()
