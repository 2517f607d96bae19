"""Retention: how much a log may hold, by size and by age; once, or as a policy that the writer applies at its seals.

What all consumers have delivered is forgotten anyway. Retention is for the rest: a log without consumers, or with one
that does not come back. It refuses to drop what a consumer still needs; told to do it all the same, it does, and that
consumer stops with :class:`~headwater.log_store.errors.RetentionMiss`, never silently.

What no consumer needs goes in two seals, as every truncation does: one that comes in between is not cut off. What is
forced goes in the next one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.log_store.consumers import Consumer, Consumers
from headwater.log_store.errors import RetentionRefused
from headwater.log_store.log import Log
from headwater.log_store.log_view import LogView
from headwater.log_store.state import now_ms
from headwater.log_store.truncation import Truncation
from headwater.state import Catalog, Field, FieldType, Snapshot, StateReader, StateTable, TableSchema, WriteBatch
from headwater.stream import Epoch

if TYPE_CHECKING:
    from headwater.log_store.factory import KvLogStoreFactory

RETENTION = TableSchema(
    "log_retention",
    1,
    key=(Field("log", FieldType.TEXT),),
    value=(
        Field("max_bytes", FieldType.UINT, nullable=True),
        Field("max_age_seconds", FieldType.FLOAT, nullable=True),
        Field("force", FieldType.BOOL),
    ),
)
CHECK_MS = 10_000
"""How often a policy is looked at."""
RECOUNT_MS = 600_000
"""How often the sizes of all epochs are read again: a compaction or a migration may have changed them."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The bounds of a log; ``None`` is no bound.

    :ivar force: also for what a consumer has not read.
    """

    max_bytes: int | None = None
    max_age_seconds: float | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What a retention would drop: everything up to *upto*."""

    upto: Epoch
    epochs: int
    rows: int
    bytes: int
    needed_by: tuple[str, ...]


class _Ends:
    """Epoch, rows, bytes and time of each epoch that a log holds; only what is new is read from the store."""

    def __init__(self) -> None:
        self._columns = tuple(array("Q") for _ in range(4))

    def follow(self, view: Snapshot, log: Log, gone: Epoch) -> None:
        epochs = self._columns[0]
        cut = bisect_right(epochs, gone)
        for column in self._columns:
            del column[:cut]
        for end in LogView(view, log).epochs(max(gone, epochs[-1] if epochs else 0)):
            for column, value in zip(self._columns, (end.epoch, end.rows, end.size, end.sealed_ms), strict=True):
                column.append(value)

    def plan(self, retention: Retention, now: int, consumers: list[Consumer]) -> RetentionPlan:
        held = sum(self._columns[2])
        oldest_ms = None if retention.max_age_seconds is None else now - retention.max_age_seconds * 1000
        upto, epochs, rows, size = Epoch(0), 0, 0, 0
        for epoch, epoch_rows, epoch_size, sealed_ms in zip(*self._columns, strict=True):
            too_big = retention.max_bytes is not None and held - size > retention.max_bytes
            too_old = oldest_ms is not None and sealed_ms < oldest_ms
            if not (too_big or too_old):
                break
            upto, epochs, rows, size = Epoch(epoch), epochs + 1, rows + epoch_rows, size + epoch_size
        needed = tuple(sorted(consumer.name for consumer in consumers if consumer.delivered() < upto))
        return RetentionPlan(upto, epochs, rows, size, needed)


def plan_retention(
    store: StateReader, log: str, retention: Retention, clock: Callable[[], int] = now_ms
) -> RetentionPlan:
    """What *retention* would drop now, from any process. :raises LogNotFound: no such log."""
    with closing(Consumers(store.location)) as known, store.snapshot() as view:
        shown = LogView.open(view, log)
        return _plan(view, shown.log, shown.bounds().gone, retention, clock(), known.of(log))


def _plan(
    view: Snapshot, log: Log, gone: Epoch, retention: Retention, now: int, consumers: list[Consumer]
) -> RetentionPlan:
    ends = _Ends()
    ends.follow(view, log, gone)
    return ends.plan(retention, now, consumers)


def apply_retention(
    factory: KvLogStoreFactory, log: str, retention: Retention, *, clock: Callable[[], int] = now_ms
) -> RetentionPlan:
    """Drop what *retention* asks for: forced in the next seal, otherwise in the one after it.

    :raises RetentionRefused: a consumer needs it. Nothing was dropped.
    """
    known = factory.existing(log)
    with factory.store.snapshot() as view:
        plan = _plan(view, known, factory.truncation.gone(log), retention, clock(), factory.consumers.of(log))
    if plan.needed_by and not retention.force:
        names = ", ".join(repr(name) for name in plan.needed_by)
        raise RetentionRefused(
            f"Retention of log {log!r} would drop {plan.epochs} epochs that consumer {names} has not read.",
            next_step="Let it catch up or drop it; Retention(force=True) drops them all the same, and stops it.",
        )
    if plan.needed_by:
        factory.truncation.drop(factory.sealer.batch, known, plan.upto)
    elif plan.epochs:
        factory.truncation.forget_unneeded(log, plan.upto)
    return plan


def retention_of(view: Snapshot, log: str) -> Retention | None:
    """The policy of *log*, as any process sees it."""
    catalog = Catalog.load(view)
    row = catalog.open(RETENTION).get(view, 0, (log,)) if RETENTION.name in catalog.names() else None
    return None if row is None else Retention(*row)


class RetentionPolicies:
    """The policies of all logs of a store; part of every seal of its writer."""

    def __init__(
        self,
        catalog: Catalog,
        view: Snapshot,
        batch: WriteBatch,
        store: StateReader,
        truncation: Truncation,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._table: StateTable = catalog.open_or_create(RETENTION, batch)
        self._policies = {log: Retention(*values) for (log,), values in self._table.scan(view, 0)}
        self._store = store
        self._truncation = truncation
        self._clock = clock
        self._ends: dict[str, _Ends] = {}
        self._checked: int | None = None
        self._counted = 0

    def __iter__(self) -> Iterator[tuple[str, Retention]]:
        return iter(sorted(self._policies.items()))

    def put(self, batch: WriteBatch, log: str, policy: Retention | None) -> None:
        """Set the policy of *log*, or (``None``) take it away. :raises LogNotFound: no such log."""
        self._truncation.registry.get(log)
        self._checked = None
        if policy is None:
            self._policies.pop(log, None)
            self._ends.pop(log, None)
            self._table.delete(batch, 0, (log,))
        else:
            self._policies[log] = policy
            age = None if policy.max_age_seconds is None else float(policy.max_age_seconds)
            self._table.put(batch, 0, (log,), (policy.max_bytes, age, policy.force))

    def add_to(self, batch: WriteBatch) -> None:
        now = self._clock()
        if not self._policies or (self._checked is not None and 0 <= now - self._checked < CHECK_MS):
            return
        self._checked = now
        if not 0 <= now - self._counted < RECOUNT_MS:
            self._ends.clear()
            self._counted = now
        consumers = self._truncation.consumers.all()
        with self._store.snapshot() as view:
            for name, policy in self._policies.items():
                log = self._truncation.registry.get(name)
                ends = self._ends.setdefault(name, _Ends())
                ends.follow(view, log, self._truncation.gone(name))
                plan = ends.plan(policy, now, [consumer for consumer in consumers if consumer.log == name])
                if not plan.needed_by:
                    self._truncation.forget_unneeded(name, plan.upto)
                elif policy.force:
                    self._truncation.drop(batch, log, plan.upto)

    def sealed(self) -> None:
        """What it asked for is in the bounds."""
