"""Runner: brings a derived table from one epoch to the next, in the driver.

=========  ===========================================================================  ====================
phase      meaning                                                                      goes to
=========  ===========================================================================  ====================
waiting    a table is not complete yet                                                  snapshot
snapshot   the whole result as of one epoch is made and delivered                       live
live       what changed since is made anew for the keys that it touches, and delivered  live, waiting (anew)
=========  ===========================================================================  ====================

A step is: the keys that the net changes of ``(E0, E1]`` touch, the result of their rows at E0 and at E1, and the
difference of both, staged by tasks and committed once with the epoch as its token. Until that is durable the tables are
pinned at E0, by a pin that outlives this process: a step that a crash cut short is done again, from E0 or from what the
sink has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from headwater import failpoints
from headwater.derive.affected import AffectedKeys
from headwater.derive.derivation import NAMESPACE, Derivation, ResultColumns
from headwater.derive.errors import DeriveError, EpochLost, FunctionChanged
from headwater.derive.fingerprint import comparable, fingerprint
from headwater.derive.frames import Rows, Staging, TableFrame, result_columns
from headwater.derive.state import DerivedRecord, DerivedState
from headwater.errors import TransientError
from headwater.log_store.errors import EpochGone
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.errors import SinkBehind
from headwater.sinks.sink import Committed, Sink, Staged, Token
from headwater.sources.table import SourceTable
from headwater.spark.kept_rows import KeptPlace, KeptRead, places_of, vnode_cuts
from headwater.spark.types import spark_schema
from headwater.state import open_reader
from headwater.versioned import NotComplete, TableNotKept, VersionedTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEFORE_STAGE = failpoints.register("derive.before_stage")
AFTER_STAGE = failpoints.register("derive.after_stage")
BEFORE_DELIVER = failpoints.register("derive.before_deliver")
AFTER_DELIVER = failpoints.register("derive.after_deliver")

MANY_KEYS: Final = 100_000
"""Above so many keys the whole results are compared."""
FEW_KEYS: Final = 2_000
"""Up to so many keys are looked up where they are the primary key; above, all rows are read."""
_PLAN: Final = 1
_PIN_ATTEMPTS: Final = 20

Note = Callable[[str, dict[str, Any]], None]


class Phase(Enum):
    WAITING = "waiting"
    SNAPSHOT = "snapshot"
    LIVE = "live"


class NotPinned(DeriveError, TransientError):
    """Its tables moved on faster than they could be pinned."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a derivation works. :ivar folder: of the kept tables. :ivar query: its name beside the sinks' queries."""

    store: str
    folder: str
    query: str
    parallelism: int = 2

    @property
    def owner(self) -> str:
        """As pins name it."""
        return f"derive {self.query}"


class DerivedRunner:
    """One derivation, for as long as its process lives; one thread.

    :param note: writes an entry of the journal.
    :raises FencedError: another process derives it.
    """

    def __init__(
        self,
        place: Place,
        derivation: Derivation,
        function: Callable[..., DataFrame],
        sink: Sink,
        spark: SparkSession,
        note: Note,
    ) -> None:
        self._place, self._derivation, self._function = place, derivation, function
        self._sink, self._spark, self._note = sink, spark, note
        self._state = DerivedState(place.store, place.query)
        self._made_by = fingerprint(function, derivation.tables)
        self._tables: list[VersionedTable] = []
        self._recovered = False
        self.phase = Phase.WAITING
        self.batches = 0
        try:
            self._coordinator = Coordinator(place.store, place.query, self._state.generation)
        except BaseException:
            self._state.close()
            raise

    @property
    def epoch(self) -> int:
        """Up to which the table is delivered; 0 before its first result is."""
        return self._state.record.delivered

    def step(self) -> bool:
        """One batch, if there is something to do; whether there was.

        :raises HeadwaterError: nothing of the batch is in the sink, or all of it.
        """
        try:
            with ExitStack() as stack:
                self._tables = [
                    stack.enter_context(closing(KeptPlace(self._place.store, self._place.folder, name).open()))
                    for name in self._derivation.tables
                ]
                if not self._recovered:
                    self._recover()
                    self._check_function()
                    self._recovered = True
                is_held = self._is_held()
                if self.epoch and self._following():
                    return True
                if is_held:
                    self._let_go()
                return not (self.epoch or is_held) and self._first()
        except (NotComplete, TableNotKept):  # the sink that keeps them has just begun
            self._be(Phase.WAITING)
            return False
        finally:
            self._tables = []

    def close(self) -> None:
        self._coordinator.close()
        self._state.close()

    def _is_held(self) -> bool:
        """Whether a table stands still until its history was read once more: a new column has values, or a gap."""
        with open_reader(self._place.store) as reader, reader.snapshot() as view:
            sealed = int(view.epoch)
        return any(int(table.newest_epoch) < sealed for table in self._tables)

    def _let_go(self) -> None:
        """Its history is not read while an epoch is pinned, and the log does not tell what that changes."""
        if self.epoch:
            self._note("notice", {"derive": self._derivation.name, "event": "derive_begins_anew"})
            self._state.put(DerivedRecord())
        release_pins(self._place, self._derivation)
        self._be(Phase.WAITING)

    # -- what a crash left -----------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Commit what is pending, and learn from the sink what it has."""
        record = self._state.record
        table = record.table(NAMESPACE, self._derivation.name)
        if table is not None:
            try:
                self._coordinator.recover(self._sink, record.id, [table])
                has = self._sink.committed(table, self._place.query, record.id)
            except SinkBehind:
                has = Committed()
            lost = record.delivered and has == Committed() and self._sink.capabilities.readable
            if lost:
                self._note("notice", {"derive": self._derivation.name, "event": "derive_begins_anew"})
                self._coordinator.forget()
                self._state.put(DerivedRecord())
            else:
                known = max(record.delivered, has.epoch, record.start if has.plan >= _PLAN else 0)
                if known > record.delivered:
                    self._state.put(replace(record, delivered=known))

    def _check_function(self) -> None:
        """What was delivered must be of the function as it is: only what changes later is made by it.

        :raises FunctionChanged: it is not.
        """
        record, name = self._state.record, self._derivation.name
        if not record.delivered or record.function == self._made_by:
            return
        if record.function and comparable(record.function, self._made_by):
            raise FunctionChanged(
                f"The function of {self._derivation.full_name}, something that it uses, or its tables are not those "
                "that made what was delivered.",
                next_step=f"To make the table anew: headwater sink drop {name} && headwater sink resume {name}; or put "
                f"back what was changed, and: headwater sink retry {name}",
            )
        self._state.put(replace(record, function=self._made_by))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _first(self) -> bool:
        self._be(Phase.SNAPSHOT)
        epoch = self._pin_first()
        began = time.monotonic()
        known = self._known(epoch)
        self._derivation.check(known)
        result = self._function(*self._frames(epoch, Rows.ALL, None, known))
        table = ResultColumns(*result_columns(result)).table(self._derivation, None)
        self._state.put(self._state.record.begun(table, epoch, self._made_by))
        self._sink.abort(table, self._place.query, self._state.generation)  # what a life before left
        staging = Staging(self._sink, table, self._token(0, epoch))
        failpoints.hit(BEFORE_STAGE)
        staged = staging.first(result, self._place.parallelism)
        if self._sink.committed(table, self._place.query, self._state.record.id) != Committed():
            staged.append(staging.emptied())  # of a life before: what it left there is void
        self._deliver(staged, epoch, began)
        self._be(Phase.LIVE)
        return True

    def _following(self) -> bool:
        before = self.epoch
        epoch = min(int(table.newest_epoch) for table in self._tables)
        self._be(Phase.LIVE)
        if epoch <= before:
            return False
        self._pin_again(before)
        began = time.monotonic()
        known = self._known(epoch)
        affected = self._affected(before, epoch, known)
        if not affected.count:
            if self._is_stale():
                self._delivered(epoch, 0, began)
            return False
        old, new = self._results(before, epoch, affected, known)
        table = ResultColumns(*result_columns(new)).table(
            self._derivation, self._state.record.table(NAMESPACE, self._derivation.name)
        )
        staging = Staging(self._sink, table, self._token(before, epoch))
        failpoints.hit(BEFORE_STAGE)
        self._deliver(staging.following(old, new, self._place.parallelism), epoch, began)
        return True

    def _results(
        self, before: int, epoch: int, affected: AffectedKeys, known: Sequence[SourceTable]
    ) -> tuple[DataFrame, DataFrame]:
        """The results of the keys, as they were and as they are."""
        if self._is_transform(known):
            return (
                self._function(*self._frames(epoch, Rows.OLD, before, known)),
                self._function(*self._frames(epoch, Rows.NEW, before, known)),
            )
        keys = affected if affected.count <= MANY_KEYS else None
        rows = Rows.ALL if keys is None else Rows.SCANNED
        return (
            self._function(*self._frames(before, rows, None, known, keys)),
            self._function(*self._frames(epoch, rows, None, known, keys)),
        )

    def _is_transform(self, known: Sequence[SourceTable]) -> bool:
        """Each row of one table by itself: the rows that changed are all that is needed."""
        return len(known) == 1 and set(self._derivation.by[0]) == set(known[0].key_columns)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _known(self, epoch: int) -> list[SourceTable]:
        return [table.table(epoch) for table in self._tables]

    def _affected(self, before: int, epoch: int, known: Sequence[SourceTable]) -> AffectedKeys:
        affected = AffectedKeys(self._derivation.check(known))
        for table, by in zip(self._tables, self._derivation.by, strict=True):
            changes = table.changes(before, epoch, (0, table.vnode_count), columns=list(by))
            affected.add(changes, by, most=1 if self._is_transform(known) else MANY_KEYS)
        return affected

    def _frames(
        self,
        epoch: int,
        rows: Rows,
        after: int | None,
        known: Sequence[SourceTable],
        affected: AffectedKeys | None = None,
    ) -> list[DataFrame]:
        """A frame of each table, with the columns of *known*."""
        made = []
        for table, wanted, by in zip(self._tables, known, self._derivation.by, strict=True):
            there = table.table(epoch)
            places = places_of(wanted, there)
            by_name = dict(zip(wanted.schema.names, places, strict=True))
            columns = tuple(by_name[name] for name in by)
            how = rows
            if rows is Rows.SCANNED and affected is not None:
                is_key = set(columns) == set(there.key_columns) and affected.count <= FEW_KEYS
                how = Rows.FOUND if is_key else rows
            place = KeptPlace(self._place.store, self._place.folder, there.full_name)
            frame = TableFrame(
                KeptRead(place, epoch, places, after),
                spark_schema(wanted),
                tuple(vnode_cuts(table, epoch, self._place.parallelism)),
                how,
                tuple(name for name in columns if name is not None),
                None if affected is None else affected.keys,
            )
            made.append(frame.frame(self._spark))
        return made

    # -- delivering ------------------------------------------------------------------------------------------------

    def _token(self, after: int, epoch: int) -> Token:
        return Token(self._place.query, self._state.record.id, after, epoch, _PLAN, generation=self._state.generation)

    def _deliver(self, staged: Sequence[Staged], epoch: int, began: float) -> None:
        failpoints.hit(AFTER_STAGE)
        failpoints.hit(BEFORE_DELIVER)
        self._coordinator.deliver(self._sink, staged)
        failpoints.hit(AFTER_DELIVER)
        self._delivered(epoch, sum(one.rows for one in staged), began)
        self.batches += 1

    def _delivered(self, epoch: int, rows: int, began: float) -> None:
        record = self._state.record
        seconds = round(time.monotonic() - began, 3)
        self._state.put(replace(record, delivered=epoch, rows=record.rows + rows, seconds=seconds))
        self._pin(epoch)

    def _is_stale(self) -> bool:
        """Nothing of its tables changed: that is worth a durable word only now and then."""
        return time.time() - self._state.record.updated_ms / 1000 >= _STALE_SECONDS

    def _pin(self, epoch: int) -> None:
        for table in self._tables:
            table.pin(self._place.owner, epoch, name=_pin_name(self._place.query))

    def _pin_again(self, epoch: int) -> None:
        """It is pinned already, unless somebody removed the pin.

        :raises EpochLost: the tables have gone on without it.
        """
        try:
            self._pin(epoch)
        except EpochGone as error:
            name = self._derivation.name
            raise EpochLost(
                f"{self._derivation.full_name} is at epoch {epoch}, which its tables no longer have: {error.message}",
                next_step=f"Make it anew: headwater sink drop {name} && headwater sink resume {name}",
            ) from None

    def _pin_first(self) -> int:
        """Pin all tables at one epoch: that of a first result that was cut short, or the newest."""
        wanted = self._state.record.start
        for _ in range(_PIN_ATTEMPTS):
            epoch = wanted or min(int(table.newest_epoch) for table in self._tables)
            try:
                self._pin(epoch)
            except EpochGone:
                wanted = 0
                time.sleep(0.05)
            else:
                return epoch
        raise NotPinned(
            f"The tables of {self._derivation.full_name} moved on while they were pinned.",
            next_step="Nothing: it is tried again.",
        )

    def _be(self, phase: Phase) -> None:
        if phase is not self.phase:
            fields = {"derive": self._derivation.name, "from": self.phase.value, "to": phase.value}
            self.phase = phase
            self._note("phase_changed", fields)


_STALE_SECONDS: Final = 5.0


def release_pins(place: Place, derivation: Derivation) -> None:
    """The tables need not keep what the derivation, which does not run, had read."""
    for name in derivation.tables:
        VersionedTable(place.store, name, place.folder).release(_pin_name(place.query))


def _pin_name(query: str) -> str:
    """The file of a pin is called so."""
    return "derive-" + "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in query)
