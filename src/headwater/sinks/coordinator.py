"""Coordinator: one batch of a query after the other, from staged to committed, with a row that survives every crash.

=========  ==============================================================  ===============================
state      meaning                                                         goes to
=========  ==============================================================  ===============================
PENDING    everything is staged; some tables may be committed              COMMITTED, ABORTED
COMMITTED  the sink has all tables of the batch                            (the next COMMITTED replaces it)
ABORTED    what was staged cannot be used: the batch is staged anew        (removed with what was staged)
=========  ==============================================================  ===============================

The token of a batch is made once, when it is planned, and is kept in the sink by the same transaction as its rows; a
row here only tells what to do next. A query that starts commits what is pending, from what was staged, before it plans:
so a process of before that wakes up in the middle of a commit finds the token in the sink and changes nothing. One that
comes with a new batch is refused here, by its generation.

A table that the sink cannot take is *parked* with the reason, and the others go on: its query leaves it out until
somebody lets it come back, when it is read once more. One of which the sink refused a row at the commit is *suspect*:
where such rows are parked, tasks try each of its rows before they stage them.

The rows are in a store of their own beside the capture's (``deliveries/<query>``).
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Self

from headwater import __version__, failpoints
from headwater.errors import FencedError, NotFoundError
from headwater.sinks.errors import (
    OtherAttempt,
    RowsRefused,
    SinkBehind,
    SinkFenced,
    SinkRefuses,
    SinkRowError,
    SinkSchemaError,
)
from headwater.sinks.sink import Committed, Sink, Staged, Token
from headwater.sources.errors import UnsupportedTable
from headwater.sources.table import SourceTable
from headwater.state import (
    Catalog,
    Field,
    FieldType,
    Snapshot,
    StateReader,
    StateStore,
    StateTable,
    TableSchema,
    WriteBatch,
)
from headwater.state.beside import open_beside_reader, open_beside_writer
from headwater.state.errors import StoreNotFound
from headwater.stream import EpochClock

BEFORE_PENDING = failpoints.register("delivery.before_pending")
AFTER_PENDING = failpoints.register("delivery.after_pending")
BEFORE_COMMITTED = failpoints.register("delivery.before_committed")
AFTER_COMMITTED = failpoints.register("delivery.after_committed")

BEFORE_PARKED = failpoints.register("delivery.before_parked")
AFTER_PARKED = failpoints.register("delivery.after_parked")

FOLDER: Final = "deliveries"
DELIVERIES = TableSchema(
    "deliveries",
    1,
    key=(Field("number", FieldType.INT),),
    value=(Field("record", FieldType.JSON), Field("staged", FieldType.BYTES)),
)
DELIVERY_STATE = TableSchema(
    "delivery_state", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
_GENERATION: Final = "generation"
_TABLE: Final = "table/"
"""Before the name of a table: the newest epoch with changes of it that was committed."""
_PARKED: Final = "parked/"
_SUSPECT: Final = "suspect/"
_COMMITS: Final = 4
_LARGEST_STAGED: Final = 16 << 20
_STAGED_VERSION: Final = f"1 {__version__}"
"""What is staged is pickled: only the release that wrote it reads it."""


class DeliveryState(Enum):
    PENDING = "pending"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One batch.

    :ivar generation: of the processes that staged it. :ivar epoch: up to which it has changes. :ivar plan: its newest.
    :ivar tables: rows by table; a table of which nothing was left has 0. :ivar changed: those with changes.
    :ivar since_ms: when it came to its state.
    """

    number: int
    state: DeliveryState
    generation: int
    epoch: int
    plan: int
    tables: Mapping[str, int] = field(default_factory=dict)
    changed: Sequence[str] = ()
    since_ms: int = 0
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "generation": self.generation,
            "epoch": self.epoch,
            "plan": self.plan,
            "tables": dict(self.tables),
            "changed": list(self.changed),
            "since_ms": self.since_ms,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, number: int, value: dict[str, Any]) -> Self:
        return cls(number=number, **(value | {"state": DeliveryState(value["state"])}))


@dataclass(frozen=True, slots=True)
class TableFailure:
    """Why one table cannot be delivered; it can be pickled."""

    table: SourceTable
    reason: str
    next_step: str | None = None

    @classmethod
    def of(cls, table: SourceTable, error: BaseException) -> Self | None:
        """``None``: *error* is not about the table alone."""
        if not isinstance(error, SinkSchemaError | SinkRowError | UnsupportedTable):
            return None
        return cls(table, error.message, error.next_step)


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
        by_table = {name: parts for name, parts in _by_table(staged).items() if name not in failed}
        token = max((one.token for one in staged), key=lambda one: (one.epoch, one.plan), default=None)
        record = None if token is None else self._pending(token, by_table)
        errors = _commit(sink, by_table)
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
            if parks_rows and isinstance(error, SinkRowError) and name not in self._told(_SUSPECT):
                self._suspect(name)
                raise RowsRefused(error.message, next_step="Nothing: the batch is staged anew without them.") from error
            failure = TableFailure.of(table, error)
            if failure is None:
                raise error
            parked[name] = failure
        if not parked:
            return
        if not set(tables) - self._told(_PARKED).keys() - parked.keys():
            first = next(iter(parked.values()))
            raise SinkRefuses(first.reason, next_step=first.next_step)

        def change(batch: WriteBatch) -> None:
            for name, one in parked.items():
                told = {"reason": one.reason, "next_step": one.next_step, "since_ms": _now_ms()}
                self._state.put(batch, 0, (f"{_PARKED}{name}",), (told,))

        failpoints.hit(BEFORE_PARKED)
        self._seal(change)
        failpoints.hit(AFTER_PARKED)
        for one in parked.values():
            sink.abort(one.table, self._query, self.generation + 1)

    def _told(self, prefix: str) -> dict[str, Any]:
        """What is known of tables, by their names."""
        with self._store.snapshot() as view:
            return _of_tables(self._state, view, prefix)

    def _suspect(self, name: str) -> None:
        self._seal(lambda batch: self._state.put(batch, 0, (f"{_SUSPECT}{name}",), (_now_ms(),)))

    def recover(self, sink: Sink, backfill: str, tables: Sequence[SourceTable]) -> None:
        """Take over from the generations of before: commit what is pending, remove what nobody commits any more.

        :raises SinkError: the sink does not take it; what is pending stays so.
        :raises SinkBehind: the sink lacks what was committed to it.
        """
        for record in self.records:
            if record.state is DeliveryState.PENDING:
                self._settle(sink, record)
        epochs = self._told(_TABLE)
        lost: list[str] = []
        for table, has in _behind(sink, self._query, backfill, tables, epochs):
            if has != Committed():
                raise SinkBehind(table.full_name, sink.name, has.epoch, epochs[table.full_name])
            lost.append(table.full_name)
        if lost:  # they begin anew: what was committed before is not what the sink must have
            self._seal(lambda batch: self._forget(batch, _TABLE, lost))
        for table in tables:
            sink.abort(table, self._query, self.generation)
        if any(record.state is DeliveryState.ABORTED for record in self.records):
            self._seal(self._without_aborted)

    def forget(self) -> None:
        """Forget every batch, and how far each table is."""

        def change(batch: WriteBatch) -> None:
            for record in self.records:
                self._rows.delete(batch, 0, (record.number,))
            self._forget(batch, _TABLE, self._told(_TABLE))

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
        staged = _unpacked(found[1])
        if staged is None:
            self._abort(record, "What was staged is not kept: the batch is staged anew.")
            return
        by_table = _by_table(staged)
        errors = [error for _, error in _commit(sink, by_table).values()]
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
            changed=[name for name, parts in by_table.items() if any(_has_changes(one) for one in parts)],
            since_ms=_now_ms(),
        )
        packed = _packed([one for parts in by_table.values() for one in parts])

        def change(batch: WriteBatch) -> None:
            nonlocal record
            known = self.records
            record = replace(record, number=known[-1].number + 1 if known else 1)
            for old in known:
                if old.state is DeliveryState.PENDING:  # the same batch, staged before
                    self._rows.delete(batch, 0, (old.number,))
            self._rows.put(batch, 0, (record.number,), (record.to_json(), packed))

        failpoints.hit(BEFORE_PENDING)
        self._seal(change)
        failpoints.hit(AFTER_PENDING)
        return record

    def _finish(self, sink: Sink, record: DeliveryRecord, committed: Mapping[str, Sequence[Staged]]) -> None:
        """*record* is over; the sink has of it what is *committed*."""
        changed = [name for name in record.changed if name in committed and _is_there(sink, committed[name])]

        def change(batch: WriteBatch) -> None:
            for old in self.records:
                if old.number < record.number and old.state is DeliveryState.COMMITTED:
                    self._rows.delete(batch, 0, (old.number,))
            self._put(batch, record, DeliveryState.COMMITTED, None)
            self._forget(batch, _SUSPECT, record.tables)
            for name in changed:
                self._state.put(batch, 0, (f"{_TABLE}{name}",), (record.epoch,))

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
        value = record.to_json() | {"state": state.value, "since_ms": _now_ms(), "reason": reason}
        self._rows.put(batch, 0, (record.number,), (value, b""))

    def _open(self) -> None:
        """Take the store over, unless a later generation has it."""
        self._store = open_beside_writer(self._location, FOLDER, self._query, takeover=True)
        try:
            self._clock = EpochClock(_now_ms, self._store.committed_epoch())
            batch = WriteBatch()
            with self._store.snapshot() as view:
                catalog = Catalog.load(view)
                self._rows = catalog.open_or_create(DELIVERIES, batch)
                self._state = catalog.open_or_create(DELIVERY_STATE, batch)
                found = self._state.get(view, 0, (_GENERATION,))
            newest = 0 if found is None else int(found[0])
            if newest > self.generation:
                raise SinkFenced(
                    f"Query {self._query!r} was started again elsewhere: this is generation {self.generation} of it, "
                    f"generation {newest} delivers.",
                    next_step="Nothing: this process has nothing more to do.",
                )
            if newest < self.generation:
                self._state.put(batch, 0, (_GENERATION,), (self.generation,))
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


def read_deliveries(location: str, query: str) -> tuple[DeliveryRecord, ...]:
    """What is known of the deliveries of *query*, from any process; nothing where there were none."""
    try:
        with open_beside_reader(location, FOLDER, query) as reader, reader.snapshot() as view:
            catalog = Catalog.load(view)
            if DELIVERIES.name not in catalog.names():
                return ()
            rows = catalog.open(DELIVERIES).scan(view, 0)
            found = [DeliveryRecord.from_json(key[0], values[0]) for key, values in rows]
    except StoreNotFound:
        return ()
    return tuple(sorted(found, key=lambda record: record.number))


def behind_of(
    location: str, query: str, backfill: str, sink: Sink, tables: Sequence[SourceTable]
) -> list[tuple[SourceTable, Committed]]:
    """The tables of which *sink* has less than what *query* committed to it, and what it has; from any process."""
    try:
        with open_beside_reader(location, FOLDER, query) as reader, reader.snapshot() as view:
            catalog = Catalog.load(view)
            known = DELIVERY_STATE.name in catalog.names()
            epochs = _of_tables(catalog.open(DELIVERY_STATE), view, _TABLE) if known else {}
    except StoreNotFound:
        return []
    found = _behind(sink, query, backfill, tables, epochs)
    return [(table, has) for table, has in found if has != Committed()]


def _of_tables(state: StateTable, view: Snapshot, prefix: str) -> dict[str, Any]:
    rows = state.scan(view, 0)
    return {key[0].removeprefix(prefix): value[0] for key, value in rows if key[0].startswith(prefix)}


def _behind(
    sink: Sink, query: str, backfill: str, tables: Sequence[SourceTable], epochs: Mapping[str, int]
) -> Iterator[tuple[SourceTable, Committed]]:
    for table in tables:
        wanted = epochs.get(table.full_name, 0)
        if wanted:
            has = sink.committed(table, query, backfill)
            if has.epoch < wanted:
                yield table, has


def _is_there(sink: Sink, staged: Sequence[Staged]) -> bool:
    """Whether the sink's token has come to this batch: not if it had the truncation, and there was nothing more."""
    token, table = staged[0].token, staged[0].table
    if any(one.rows for one in staged if not one.is_snapshot):
        return True
    return sink.committed(table, token.query, token.backfill).epoch >= token.epoch


def _has_changes(staged: Staged) -> bool:
    return not staged.is_snapshot and (staged.rows > 0 or staged.truncated)


class DeliveryLook:
    """What the coordinator of *query* has told of its tables, read again and again by one process."""

    def __init__(self, location: str, query: str) -> None:
        self._location, self._query = location, query
        self._reader: StateReader | None = None

    def parked(self) -> dict[str, dict[str, Any]]:
        """The tables that are parked: ``reason``, ``next_step`` and ``since_ms`` of each."""
        return self._read(_PARKED)

    def suspects(self) -> frozenset[str]:
        """The tables of which the sink refused rows at the commit."""
        return frozenset(self._read(_SUSPECT))

    def _read(self, prefix: str) -> dict[str, Any]:
        try:
            if self._reader is None:
                self._reader = open_beside_reader(self._location, FOLDER, self._query)
            with self._reader.snapshot() as view:
                catalog = Catalog.load(view)
                if DELIVERY_STATE.name not in catalog.names():
                    return {}
                return _of_tables(catalog.open(DELIVERY_STATE), view, prefix)
        except StoreNotFound:
            return {}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def read_parked(location: str, query: str) -> dict[str, dict[str, Any]]:
    """The tables that *query* has parked, once."""
    with closing(DeliveryLook(location, query)) as look:
        return look.parked()


def unpark(location: str, query: str) -> list[str]:
    """Let the parked tables of *query*, which does not run, come back; which they are."""
    names = sorted(read_parked(location, query))
    if names:
        with open_beside_writer(location, FOLDER, query, takeover=True) as store:
            batch = WriteBatch()
            with store.snapshot() as view:
                state = Catalog.load(view).open(DELIVERY_STATE)
            for name in names:
                state.delete(batch, 0, (f"{_PARKED}{name}",))
            store.seal(EpochClock(_now_ms, store.committed_epoch()).next(), batch)
    return names


def forget_committed(location: str, query: str, generation: int) -> None:
    """What *query*, which does not run, has committed counts no more: the sink itself tells. What is parked stays.

    :param generation: processes of earlier ones are refused from now on.
    """
    with Coordinator(location, query, generation) as coordinator:
        coordinator.forget()


def _commit(sink: Sink, by_table: Mapping[str, Sequence[Staged]]) -> dict[str, tuple[SourceTable, BaseException]]:
    """Commit each table; one that fails does not keep the others. Those that failed, and why."""
    failed: dict[str, tuple[SourceTable, BaseException]] = {}

    def commit(name: str, parts: Sequence[Staged]) -> None:
        try:
            _commit_table(sink, parts)
        except Exception as error:
            failed[name] = (parts[0].table, error)

    if len(by_table) == 1:
        for name, parts in by_table.items():
            commit(name, parts)
    elif by_table:
        with ThreadPoolExecutor(min(_COMMITS, len(by_table))) as threads:
            list(threads.map(commit, by_table, by_table.values()))
    return failed


def _commit_table(sink: Sink, staged: Sequence[Staged]) -> None:
    token = max((one.token for one in staged), key=lambda one: one.attempt)
    sink.commit(staged[0].table, token, staged)


def _by_table(staged: Sequence[Staged]) -> dict[str, list[Staged]]:
    found: dict[str, list[Staged]] = {}
    for one in staged:
        found.setdefault(one.table.full_name, []).append(one)
    return found


def _packed(staged: Sequence[Staged]) -> bytes:
    """What a later process needs to commit it; nothing where that would be too large, or tell secrets."""
    if any(one.detail.get("order") is not None for one in staged):  # it knows the address of the source
        return b""
    data = pickle.dumps((_STAGED_VERSION, list(staged)))
    return data if len(data) <= _LARGEST_STAGED else b""


def _unpacked(data: bytes) -> list[Staged] | None:
    """``None``: nothing was kept, or another release wrote it."""
    if not data:
        return None
    try:
        version, staged = pickle.loads(data)
    except Exception:
        return None
    return staged if version == _STAGED_VERSION else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
