"""DerivedPlanner: plans the batches that bring a derived table from one epoch to the next. A
:class:`~headwater.backfill.loop.DeliveryLoop` delivers them.

=========  ===========================================================================  ====================
phase      meaning                                                                      goes to
=========  ===========================================================================  ====================
waiting    a table is not complete yet                                                  snapshot
snapshot   the whole result as of one epoch is computed and delivered                   live
live       what changed since is computed for the keys that it touches, and delivered   live, waiting (again)
=========  ===========================================================================  ====================

A batch is the keys that the net changes of ``(E0, E1]`` touch, the result of their rows at E0 and at E1, and the
difference of both; its bounds are sealed before the function runs. Until E1 is known to be delivered the tables are
pinned at E0, by a pin that outlives this process: a batch that a crash cut short is planned again with the same bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from headwater import failpoints
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import Recover
from headwater.backfill.tasks import Slots
from headwater.derive.affected import AffectedKeys
from headwater.derive.derivation import NAMESPACE, Derivation
from headwater.derive.errors import EpochLost, FunctionChanged
from headwater.derive.fingerprint import comparable, fingerprint
from headwater.derive.state import DerivedRecord, DerivedState
from headwater.log_store.errors import EpochGone
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.errors import SinkBehind
from headwater.sinks.sink import Committed
from headwater.sources.table import SourceTable
from headwater.state import open_reader
from headwater.system.clock import Clock, Wait
from headwater.versioned import NotComplete, TableNotKept, VersionedTable

if TYPE_CHECKING:
    from headwater.derive.delivery import DerivedDelivery

AFTER_DELIVER = failpoints.register("derive.after_deliver")

_PLAN: Final = 1
_PIN_ATTEMPTS: Final = 20
_STALE_SECONDS: Final = 5.0
_WAITING_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05

MANY_KEYS: Final = 100_000
"""Above so many keys the whole results are compared."""


class Phase(Enum):
    WAITING = "waiting"
    SNAPSHOT = "snapshot"
    LIVE = "live"


@dataclass(slots=True)
class DerivedUnit:
    """One batch; it never leaves the driver.

    :ivar made_by: the fingerprint of the function.
    :ivar before: what was delivered; 0: nothing was, and the batch is the whole result as of *epoch*.
    :ivar affected: the keys that the changes in ``(before, epoch]`` touch; ``None``: all.
    :ivar began: when it was planned. :ivar rows: that are staged; 0 before.
    """

    state: DerivedState
    slots: Slots
    made_by: str
    before: int
    epoch: int
    affected: AffectedKeys | None
    began: float
    rows: int = 0


class DerivedPlanner:
    """Plans the batches of one derived table; one thread.

    :ivar returning: its tables, when they must be read once more: it begins again with a planner that is opened later.
    :raises FunctionChanged: the function is not the one that made what was delivered.
    """

    def __init__(self, delivery: DerivedDelivery, recover: Recover, slots: Slots, clock: Clock) -> None:
        self._delivery, self._derivation = delivery, delivery.derivation
        self._slots, self._clock = slots, clock
        self._made_by = fingerprint(delivery.function, delivery.derivation.tables)
        self._unit: DerivedUnit | None = None
        self._look_at = 0.0
        self.phase = Phase.WAITING
        self.returning: Sequence[str] = ()
        self._state = DerivedState(delivery.state, delivery.name)
        self.generation = self._state.generation
        try:
            self._recover(recover)
            self._check_function()
        except BaseException:
            self._state.close()
            raise

    @property
    def backfill_id(self) -> str:
        """Names this life of the table."""
        return self._state.record.id

    @property
    def epoch(self) -> int:
        """Up to which the table is known to be delivered; 0 before its first result is."""
        return self._state.record.delivered

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]:
        """What is delivered. A batch that is not is planned again, once its tables can be read."""
        ends = [end.epoch for end in committed if end.epoch == self._state.record.planned]
        return QueryOffset(max([self.epoch, *ends]), _PLAN), None

    def plan(self, start: QueryOffset, *, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start* ends, which is sealed; *start* when there is none now: see :attr:`wait`.

        :param upto: no epochs after this one, but for the first result.
        :raises EpochLost: the tables have gone on without it.
        """
        self._mark_delivered(start.epoch)
        if self._clock.monotonic() >= self._look_at:
            self._unit = self._next(upto)
            if self._unit is not None:
                return QueryOffset(self._unit.epoch, _PLAN)
            self._rest()
        return start

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""
        return Wait(max(self._look_at - self._clock.monotonic(), _LOOK_SECONDS))

    def units(self, start: QueryOffset, end: QueryOffset) -> list[DerivedUnit]:
        """The batch that was planned."""
        assert self._unit is not None
        return [self._unit]

    def close(self) -> None:
        self._state.close()

    # -- what a crash left -----------------------------------------------------------------------------------------

    def _recover(self, recover: Recover) -> None:
        """Commit what is pending, and learn from the sink what it has."""
        record, sink, has = self._state.record, self._delivery.sink, Committed()
        table = record.table(NAMESPACE, self._derivation.name)
        try:
            recover(self._state.store, record.id, [] if table is None else [table])
            if table is not None:
                has = sink.committed(table, self._delivery.name, record.id)
        except SinkBehind:
            pass
        if record.delivered and has == Committed() and sink.capabilities.readable:
            self._begin_again()
            return
        known = max(record.delivered, has.epoch, record.start if has.plan >= _PLAN else 0)
        if known > record.delivered:
            self._state.put(replace(record, delivered=known))

    def _check_function(self) -> None:
        """What was delivered must be of the function as it is: only what changes later is made by it."""
        record, name = self._state.record, self._derivation.name
        if not record.delivered or record.function == self._made_by:
            return
        if record.function and comparable(record.function, self._made_by):
            raise FunctionChanged(
                f"The function of {self._derivation.full_name}, something that it uses, or its tables are not those "
                "that made what was delivered.",
                next_step=f"To rebuild the table: headwater sink drop {name} && headwater resume --sink {name}; or put "
                f"back what was changed, and: headwater sink retry {name}",
            )
        self._state.put(replace(record, function=self._made_by))

    def _begin_again(self) -> None:
        """Forget what was delivered: the next batch is the whole result, in the place of what the sink has."""
        self._delivery.note("notice", {"derive": self._derivation.name, "event": "derive_begins_anew"})
        Coordinator(self._state.store).forget()
        self._state.put(DerivedRecord())

    # -- planning --------------------------------------------------------------------------------------------------

    def _next(self, upto: int | None) -> DerivedUnit | None:
        """The next batch, sealed, if there is something to do."""
        try:
            with self._delivery.opened() as tables:
                is_held = self._is_held(tables)
                unit = self._following(tables, upto) if self.epoch else None
                if unit is None and is_held:
                    self._let_go()
                elif not self.epoch:
                    unit = self._first(tables)
                return unit
        except (NotComplete, TableNotKept):  # the sink that keeps them has just begun
            self._be(Phase.WAITING)
            return None

    def _is_held(self, tables: Sequence[VersionedTable]) -> bool:
        """Whether a table stands still until its history was read once more: a new column has values, or a gap."""
        with open_reader(self._delivery.store) as reader, reader.snapshot() as view:
            sealed = int(view.epoch)
        return any(int(table.newest_epoch) < sealed for table in tables)

    def _let_go(self) -> None:
        """Its history is not read while an epoch is pinned, and the log does not tell what that changes."""
        if self.epoch:
            self._begin_again()
            self.returning = self._derivation.tables
        delivery = self._delivery
        release_pins(delivery.store, delivery.folder, delivery.name, self._derivation.tables)
        self._be(Phase.WAITING)

    def _first(self, tables: Sequence[VersionedTable]) -> DerivedUnit | None:
        """The result as of the epoch of one that was cut short, or of the newest."""
        self._be(Phase.SNAPSHOT)
        wanted = self._state.record.start
        for _ in range(_PIN_ATTEMPTS):
            epoch = wanted or min(int(table.newest_epoch) for table in tables)
            try:
                self._pin(tables, epoch)
            except EpochGone:
                wanted = 0
                continue
            self._derivation.check([table.table(epoch) for table in tables])
            return self._sealed(0, epoch, None, self._clock.monotonic())
        return None  # the tables moved on while they were pinned: the next look tries again

    def _following(self, tables: Sequence[VersionedTable], upto: int | None) -> DerivedUnit | None:
        record, before = self._state.record, self.epoch
        newest = min(int(table.newest_epoch) for table in tables)
        newest = newest if upto is None else min(newest, upto)
        epoch = record.planned if before < record.planned <= newest else newest
        self._be(Phase.LIVE)
        if epoch <= before:
            return None
        began = self._clock.monotonic()
        self._pin_again(tables, before)
        affected = self._affected(tables, before, epoch)
        if not affected.count:
            if self._clock.unix_ms() - record.updated_ms >= _STALE_SECONDS * 1000:  # worth a seal only now and then
                self._delivered(epoch, 0, began)
            return None
        return self._sealed(before, epoch, affected, began)

    def _affected(self, tables: Sequence[VersionedTable], before: int, epoch: int) -> AffectedKeys:
        known = [table.table(epoch) for table in tables]
        affected = AffectedKeys(self._derivation.check(known))
        most = 1 if is_transform(self._derivation, known) else MANY_KEYS
        for table, by in zip(tables, self._derivation.by, strict=True):
            changes = table.changes(before, epoch, (0, table.vnode_count), columns=list(by))
            affected.add(changes, by, most=most)
        return affected

    def _sealed(self, before: int, epoch: int, affected: AffectedKeys | None, began: float) -> DerivedUnit:
        """The batch, whose bounds are durable."""
        record = self._state.record
        if record.planned != epoch:
            self._state.put(replace(record, planned=epoch, start=record.start if before else epoch))
        return DerivedUnit(self._state, self._slots, self._made_by, before, epoch, affected, began)

    # -- what is delivered -----------------------------------------------------------------------------------------

    def _mark_delivered(self, epoch: int) -> None:
        """The loop has delivered the batch that ends at *epoch*, or all that is planned up to it."""
        unit, self._unit = self._unit, None
        if epoch <= self.epoch:
            return
        failpoints.hit(AFTER_DELIVER)
        rows, began = (0, self._clock.monotonic()) if unit is None else (unit.rows, unit.began)
        self._delivered(epoch, rows, began)
        self._be(Phase.LIVE)
        self._rest()

    def _delivered(self, epoch: int, rows: int, began: float) -> None:
        record = self._state.record
        seconds = round(self._clock.monotonic() - began, 3)
        self._state.put(replace(record, delivered=epoch, rows=record.rows + rows, seconds=seconds))
        with suppress(NotComplete, TableNotKept), self._delivery.opened() as tables:
            self._pin(tables, epoch)

    def _rest(self) -> None:
        self._look_at = self._clock.monotonic() + (self._delivery.interval_seconds if self.epoch else _WAITING_SECONDS)

    # -- pins ------------------------------------------------------------------------------------------------------

    def _pin(self, tables: Sequence[VersionedTable], epoch: int) -> None:
        for table in tables:
            table.pin(f"derive {self._delivery.name}", epoch, name=_pin_name(self._delivery.name))

    def _pin_again(self, tables: Sequence[VersionedTable], epoch: int) -> None:
        """It is pinned already, unless somebody removed the pin."""
        try:
            self._pin(tables, epoch)
        except EpochGone as error:
            name = self._derivation.name
            raise EpochLost(
                f"{self._derivation.full_name} is at epoch {epoch}, which its tables no longer have: {error.message}",
                next_step=f"Rebuild it: headwater sink drop {name} && headwater resume --sink {name}",
            ) from None

    def _be(self, phase: Phase) -> None:
        if phase is not self.phase:
            fields = {"derive": self._derivation.name, "from": self.phase.value, "to": phase.value}
            self.phase = phase
            self._delivery.note("phase_changed", fields)


def is_transform(derivation: Derivation, known: Sequence[SourceTable]) -> bool:
    """Each row of one table by itself: the rows that changed are all that is needed."""
    return len(known) == 1 and set(derivation.by[0]) == set(known[0].key_columns)


def release_pins(store: str, folder: str, query: str, tables: Sequence[str]) -> None:
    """The tables need not keep what the derivation, which does not run, had read."""
    for name in tables:
        VersionedTable(store, name, folder).release(_pin_name(query))


def _pin_name(query: str) -> str:
    """The file of a pin is called so."""
    return "derive-" + "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in query)
