"""Renewal: how a capture goes on after a gap. What lies in the gap is never taken for complete.

===================  ================================================================================================
request              what happens
===================  ================================================================================================
``RecaptureTables``  the source logs the tables (again) from a position on; they are stopped, and once the stream has
                     passed that position they are captured again, as they are described then. The capture does the
                     same by itself for a table that must be read again
``RecaptureSource``  at the start of a session: what the source kept for us is released and created again; all existing
                     tables are captured from that position on, the others stop
===================  ================================================================================================

Either ends in one seal that moves ``since`` of the tables, which is how readers of their logs know: they read the
tables once more. Before that seal a crash leaves the request unanswered, and the next start does it from the beginning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater import failpoints
from headwater.capture.source_state import CapturedTable
from headwater.control.command import RecaptureSource, RecaptureTables
from headwater.control.request import Request, ask_capture, leave
from headwater.errors import HeadwaterError, InputError
from headwater.log_store.errors import ForeignSchema
from headwater.log_store.log_events import Reshaped
from headwater.sources.errors import SourceBusy, SourceNotFound, UnsupportedTable
from headwater.sources.events import SchemaChanged, stop_reason
from headwater.sources.offset import CdcOffset
from headwater.sources.source import Source
from headwater.sources.table import SourceColumn, SourceTable
from headwater.state import open_reader, open_writer
from headwater.state.errors import StoreOwned

INCLUDED = failpoints.register("renewal.included")

_MISSING_SECONDS = 3.0  # how long a table may be missing that is dropped and created again


@dataclass(frozen=True, slots=True)
class TableRenewal:
    """A table that is to be captured anew.

    :ivar table: as it is now.
    :ivar registration: how the source has it registered for us.
    :ivar position: after it the source logs all changes of the table.
    """

    table: SourceTable
    registration: str
    position: CdcOffset


class TableRenewals:
    """The tables that a session is about to capture anew, and who asked for it.

    :param check: raises where a table's log cannot hold its columns.
    :param pause: seconds between two attempts for a request that nobody waits for.
    :ivar named: the tables that were asked for in this session, whatever became of it.
    """

    def __init__(
        self,
        source: Source,
        check: Callable[[SourceTable], None],
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._check = check
        self._pause = pause
        self._clock = clock
        self._later: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self.requests: list[str] = []
        self.tables: dict[str, TableRenewal] = {}
        self.named: set[str] = set()

    def take_up(self, request: str, command: RecaptureTables, captured: Collection[str]) -> list[str]:
        """Make the source log the tables of *command*; those of them that were not being renewed yet.

        :param request: the id of the request.

        :raises InputError: one was never captured. :raises SourceError: one is not there, or cannot be captured.
        :raises SourceBusy: transactions that began before stayed open; not for a patient request.
        """
        if request in self.requests or self._clock() < self._later.get(request, 0.0):
            return []
        found = self._source.tables(command.tables)
        for table in found:
            name = table.full_name
            if name not in captured:
                raise InputError(
                    f"Table {name} is not captured into this store.", next_step=f"Run: headwater add-table … {name}"
                )
            self.named.add(name)
        try:
            new = self._include(found)
        except SourceBusy:
            if not command.is_patient:
                raise
            self._later[request] = self._clock() + self._pause
            return []
        self.requests.append(request)
        return new

    def include(self, name: str) -> None:
        """Make the source log the table *name*, for which no request is waiting; while it is busy, try again later.

        :raises SourceNotFound: it does not exist, and did not for some seconds: a script may drop a table and create it
            again. :raises SourceError: it cannot be captured.
        """
        if name in self.tables or self._clock() < self._later.get(name, 0.0):
            return
        try:
            self._include(self._source.tables([name]))
        except SourceBusy:
            self._later[name] = self._clock() + self._pause
        except SourceNotFound:
            now = self._clock()
            if now - self._missing_since.setdefault(name, now) >= _MISSING_SECONDS:
                del self._missing_since[name]
                raise
            self._later[name] = now + _MISSING_SECONDS / 10
        else:
            self._missing_since.pop(name, None)

    def _include(self, found: Sequence[SourceTable]) -> list[str]:
        new = [table for table in found if table.full_name not in self.tables]
        for table in new:
            self._check(table)
        if new:
            position = self._source.include(new)
            failpoints.hit(INCLUDED)
            registrations = self._source.register(new)
            for table in new:
                self.tables[table.full_name] = TableRenewal(table, registrations[table.full_name], position)
        return [table.full_name for table in new]

    def are_ready(self, reached: CdcOffset, captured: dict[str, CapturedTable]) -> bool:
        """Whether the tables can be captured from *reached* on: nothing from before the request comes any more.

        Readers know a renewal by another ``since``, so the log must have moved, too.
        """
        return bool(self.tables) and all(
            self._source.has_reached(renewal.position) and reached.to_json() != captured[name].since.to_json()
            for name, renewal in self.tables.items()
        )

    def clear(self) -> None:
        """All of them were done."""
        self.requests.clear()
        self.tables.clear()


def present_tables(
    source: Source, names: Sequence[str], check: Callable[[SourceTable], None]
) -> tuple[dict[str, SourceTable], dict[str, str]]:
    """The tables of *names* as they are now, and why the others cannot be captured; both by name."""
    try:
        found = source.tables(names)
        for table in found:
            check(table)
        return {table.full_name: table for table in found}, {}
    except (SourceNotFound, UnsupportedTable, ForeignSchema) as error:
        if len(names) == 1:
            return {}, {names[0]: reason_of(names[0], error)}
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    (present, gone), (more_present, more_gone) = (present_tables(source, half, check) for half in halves)
    return present | more_present, gone | more_gone


def reason_of(name: str, error: HeadwaterError) -> str:
    """Why the table *name* is stopped, and what to do."""
    step = "Create it again." if isinstance(error, SourceNotFound) else error.next_step
    return stop_reason(name, error.message, step)


def renewed_columns(known: SourceTable, now: SourceTable) -> SchemaChanged | None:
    """How the columns or the key of *now* differ from those of *known*, which was captured; ``None``: they do not.

    Columns are told apart by their field id, and in a table that was made anew by their name.
    """
    made_anew = known.source_id != now.source_id

    def identity(column: SourceColumn) -> object:
        return column.name if made_anew else column.field_id

    old = {identity(column): column for column in known.columns if not column.dropped}
    new = {identity(column): column for column in now.columns}
    kept = [(old[key], column) for key, column in new.items() if key in old]
    change = SchemaChanged(
        known,
        now,
        added=tuple(column.name for key, column in new.items() if key not in old),
        dropped=tuple(column.name for key, column in old.items() if key not in new),
        renamed=tuple((before.name, after.name) for before, after in kept if before.name != after.name),
        retyped=tuple(after.name for before, after in kept if before.type != after.type),
    )
    same_key = known.key_columns == now.key_columns
    is_same = same_key and not (change.added or change.dropped or change.renamed or change.retyped)
    return None if is_same else change


def reshaped(known: SourceTable, now: SourceTable) -> Reshaped:
    """How the rows of *now* differ in shape from those of *known*, which was captured."""
    if known.key_columns != now.key_columns:
        return Reshaped.KEY
    by_name, by_id = ({getattr(one, what): one for one in known.columns} for what in ("name", "field_id"))
    for column in now.columns:
        before = by_name.get(column.name), by_id.get(column.field_id)
        if before == (None, None):
            continue
        old = before[0] if before[0] is before[1] else None
        if old is None or old.type != column.type or _type_name(old) != _type_name(column):
            return Reshaped.KEY if column.name in now.key_columns else Reshaped.COLUMNS
    return Reshaped.NOTHING


def _type_name(column: SourceColumn) -> str:
    """The source's type without its length or digits."""
    return re.sub(r"\(.*?\)", "", column.source_type)


def renew(location: str | Path, tables: Sequence[str] | None, seconds: float = 60.0) -> str | None:
    """Have *tables*, or the whole source (``None``), captured again; ``None``: it is done.

    Where a capture runs, its answer is waited for; otherwise the next one does it when it starts: then this is the id
    of the request, which can be withdrawn.

    :raises RequestFailed: what the capture answered. :raises NoAnswer: none in time.
    :raises StoreNotFound: there is no store.
    """
    open_reader(location).close()
    try:
        store = open_writer(location)
    except StoreOwned:
        ask_capture(location, RecaptureSource() if tables is None else RecaptureTables(tuple(tables)), seconds)
        return None
    with store:
        command = RecaptureSource() if tables is None else RecaptureTables(tuple(tables), is_patient=True)
        request = Request(command)
        leave(location, request)
    return request.id
