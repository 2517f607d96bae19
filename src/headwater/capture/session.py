"""One stretch of capture: from opening the source's stream to its end or its first failure.

Everything that a session holds in memory follows from what is sealed in the store, so a failed session is thrown away
as a crash would do it, and the next one starts from the last seal: the store drops what was staged, the source sends
again what was not acknowledged. After a gap a session goes on as :mod:`headwater.capture.renewal` tells.

An epoch is sealed at a transaction boundary, with the position that it ends at, while the next one is being read. The
source is told after the seal, never before. The first change after a quiet spell is sealed at once; under load seals
keep a distance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headwater import failpoints
from headwater.capture.captured_logs import CapturedLogs
from headwater.capture.chores import Chores
from headwater.capture.options import CaptureOptions, OnRewrite
from headwater.capture.renewal import TableRenewals, present_tables, reason_of
from headwater.capture.source_state import SourceRecord, TableState
from headwater.capture.statistics import CaptureStatistics
from headwater.capture.stream_records import StoreTaken
from headwater.control.command import (
    AddTables,
    CompactLog,
    MigrateLog,
    NoteEvent,
    RecaptureSource,
    RecaptureTables,
    command_name,
)
from headwater.control.request import Answers, Inbox, Request
from headwater.errors import PASSING, HeadwaterError, InputError
from headwater.sources.errors import (
    SchemaStopped,
    SlotBusy,
    SourceBusy,
    SourceMisconfigured,
    SourceNotFound,
    UnsupportedTable,
)
from headwater.sources.events import (
    Boundary,
    Changes,
    ChangeStream,
    Event,
    Finding,
    Registered,
    SchemaChanged,
    Stopped,
)
from headwater.sources.offset import CdcOffset
from headwater.sources.source import AlwaysLogging, Registering, Source
from headwater.sources.table import SourceTable
from headwater.sources.written import WrittenOffset
from headwater.state import StateStore

BEFORE_BEGIN = failpoints.register("capture.before_begin")
AFTER_BEGIN = failpoints.register("capture.after_begin")
BEFORE_ACKNOWLEDGE = failpoints.register("capture.before_acknowledge")
AFTER_ACKNOWLEDGE = failpoints.register("capture.after_acknowledge")
BEFORE_SOURCE = failpoints.register("renewal.before_source")
AFTER_SOURCE = failpoints.register("renewal.after_source")
BEFORE_TABLES = failpoints.register("renewal.before_tables")
AFTER_TABLES = failpoints.register("renewal.after_tables")

_IDLE_SECONDS = 1.0
_LINGER_SECONDS = 0.2
_HALF_WAY_SECONDS = 0.05  # one poll, where a seal waits for the end of a transaction, or its source for the seal
_DEAR = 2  # times the duration of the last seal: a distance between seals below which little else would be done
_MOST_DISTANCE_SECONDS = 5.0  # … but one slow seal must not hold up the next change for long
_STATUS_SECONDS = 1.0
_PENDING_SECONDS = 1.0  # until the source is checked again for what the stream had not passed yet
_MOST_LOOKING = 20  # … but it takes at most this part of the time
_MOVED_SECONDS = 1.0  # a position that has moved without rows is worth a seal: backfills wait for it


class CaptureSession:
    """Follows *source* into *store*; one thread.

    :ivar wants_restart: the source is to be prepared anew, which the next session does.
    """

    def __init__(
        self,
        source: Source,
        store: StateStore,
        names: Sequence[str],
        options: CaptureOptions,
        statistics: CaptureStatistics,
        now_ms: Callable[[], int],
        inbox: Inbox,
        on_sealed: Callable[[int], None],
    ) -> None:
        self._source = source
        self._options = options
        self._statistics = statistics
        self._at_boundary = True
        self._sealing: tuple[SourceRecord, float] | None = None
        self._sealed_at = -math.inf
        self._checked_time = statistics.checked_time
        self.wants_restart = False
        self._logs = CapturedLogs(store, source.position_type, statistics, now_ms)
        self._logs.sealer.on_sealed = on_sealed
        try:
            self._chores = Chores(self._logs.factory, self._logs.answers)
            self._renewals = TableRenewals(source, self._logs.check, options.heartbeat_seconds)
            self._look_due = self._asked = -math.inf
            asked = inbox.open(self.answers, now=True)
            self._record = self._start(
                names, [request.id for request in asked if isinstance(request.command, RecaptureSource)]
            )
            self._stream = self._open_stream()
        except BaseException:
            self._logs.close()
            raise
        try:
            self.serve([request for request in asked if isinstance(request.command, RecaptureTables)])
            if self._add(names, {*self._renewals.named, *self._logs.stopped}):
                self._logs.seal(self._record)
        except BaseException:
            self.close()
            raise

    @property
    def answers(self) -> Answers:
        """Those that were given."""
        return self._logs.answers

    def _open_stream(self) -> ChangeStream:
        """The stream of all tables from the position that is durable."""
        if isinstance(self._source, AlwaysLogging):
            self._source.begin_from(self._logs.since())
        if isinstance(self._source, Registering):
            self._source.resume(self._logs.registered())
        return self._source.open(list(self._logs.tables.values()), self._record.offset, self._record.identity)

    # -- tables ----------------------------------------------------------------------------------------------------

    def _start(self, names: Sequence[str], renewals: Sequence[str]) -> SourceRecord:
        """Where the stream starts; *renewals* are the requests to prepare the source anew."""
        record = self._logs.state.record
        if record is None:
            return self._begin(names, renewals)
        if isinstance(record.offset, WrittenOffset):
            raise StoreTaken("A stream writes this store.", next_step="Name another directory for the capture.")
        return self._renew_source(record, renewals) if renewals else record

    def _begin(self, names: Sequence[str], renewals: Sequence[str]) -> SourceRecord:
        """Who the source is, and its tables, are durable before their first change is read."""
        tables = self._source.tables(names)
        resumed = self._logs.state.has_begun
        if not resumed:  # what is made at the source after this is ours, also if we do not come to hold its position
            here = self._source.claim([])  # first: what is refused now must not be taken for ours at the next start
            self._logs.state.note_begin(self._logs.sealer.batch, here)
            self._logs.seal_alone()
        elif self._logs.state.preparing:
            self._source.claim([self._logs.state.preparing])
        failpoints.hit(BEFORE_BEGIN)
        offset, identity = self._source.begin(tables, resumed=resumed)
        failpoints.hit(AFTER_BEGIN)
        record = SourceRecord(identity, offset)
        self._logs.capture(tables, self._source.register(tables), offset)
        self._logs.state.note_prepared(self._logs.sealer.batch)
        self._logs.answer(renewals)
        self._logs.seal(record)
        return record

    def _add(self, names: Sequence[str], renewed: Collection[str] = ()) -> bool:
        """Capture those of *names* that are not captured yet, from the boundary that was reached; whether any is new.

        :param renewed: somebody asked to capture these anew, or their reason is in the status: they may be stopped.
        :raises SchemaStopped: one was captured before and stopped: going on would leave a gap.
        """
        found = [table for table in self._described(names) if table.full_name not in renewed]
        for table in found:
            known = self._logs.state.tables.get(table.full_name)
            if known is not None and known.state is TableState.STOPPED:
                step = f"Run: headwater resnapshot {table.full_name}"
                raise SchemaStopped(table.full_name, known.reason.removesuffix(step).rstrip(), next_step=step)
        new = [table for table in found if table.full_name not in self._logs.state.tables]
        if new:
            since = self._source.include(new).joined(self._record.offset)
            self._logs.capture(new, self._source.register(new), since)
            for table in new:
                self._stream.add_table(table)
        return bool(new)

    def _described(self, names: Sequence[str]) -> list[SourceTable]:
        """The tables as they are now. One that is captured, and gone by now, is left out: it stops, alone."""
        try:
            return self._source.tables(names)
        except (SourceNotFound, UnsupportedTable):
            others = [name for name in names if not self._logs.captures(name)]
            if len(others) == len(names):
                raise
            return self._source.tables(others) if others else []

    def serve(self, requests: Sequence[Request]) -> None:
        """Do what was asked, with the next seal. An answer tells what could not be done; the capture goes on.

        Call it where :attr:`at_boundary` holds.
        """
        for request in requests:
            problem: HeadwaterError | None = None
            try:
                match request.command:
                    case RecaptureSource():
                        self.wants_restart = True
                        continue
                    case RecaptureTables() as command:
                        self._take_up(request.id, command)
                        continue
                    case MigrateLog() | CompactLog() as command:
                        self._chores.add(request.id, command)
                        continue
                    case NoteEvent(log=log, text=text):
                        self._logs.note(log, text)
                    case AddTables(tables=tables):
                        self._add(tables, self._renewals.tables)
                    case command:
                        raise InputError(f"A capture cannot do {command_name(type(command))!r}.")
            except SourceBusy as error:
                problem = error
            except PASSING:
                raise
            except HeadwaterError as error:
                problem = error
            self.answers.put(self._logs.sealer.batch, request.id, problem)
            self._logs.rows += 1
        self._reread()
        if self._renewals.are_ready(self._record.offset, self._logs.state.tables):
            self._renew_tables()

    def _stop_table(self, name: str, reason: str, *, reread: bool = False) -> None:
        """Its changes end here, those before are sealed with the epoch; the others go on.

        :param reread: reading it again repairs it, which begins at the next boundary, where the options want that.
        """
        by_itself = reread and self._options.on_rewrite is OnRewrite.REREAD
        table = self._logs.stop(name, reason, TableState.REREADING if by_itself else TableState.STOPPED)
        if table is not None:
            self._stream.remove_table(table)

    # -- after a gap -----------------------------------------------------------------------------------------------

    def _take_up(self, request: str, command: RecaptureTables) -> None:
        """Tables are captured anew once the stream has passed what was committed before; until then they are stopped.

        Their rows of that time may be of any former shape, and are read with the table.
        """
        for name in self._renewals.take_up(request, command, self._logs.state.tables):
            if name in self._logs.tables:
                self._stop_table(name, "A resnapshot was requested.", reread=True)

    def _reread(self) -> None:
        """Begin to capture again what must be read again; a table that cannot be captured any more stops."""
        for name in self._logs.rereading():
            try:
                self._renewals.include(name)
            except PASSING:
                raise
            except HeadwaterError as error:
                self._logs.stop(name, reason_of(name, error))

    def _renew_tables(self) -> None:
        """Capture them from the boundary that was reached on. On a new stream the source describes each table anew."""
        self._seal()
        self._acknowledge(wait=True)
        self._stream.close()
        failpoints.hit(BEFORE_TABLES)
        for renewal in self._renewals.tables.values():
            self._logs.capture_anew(renewal.table, renewal.registration, self._record.offset)
        self._logs.answer(self._renewals.requests)
        self._renewals.clear()
        self._logs.seal(self._record)
        failpoints.hit(AFTER_TABLES)
        self._stream = self._open_stream()

    def _renew_source(self, record: SourceRecord, requests: Sequence[str]) -> SourceRecord:
        """Prepare the source anew, whatever became of what was prepared before, and capture all tables from there on.

        :raises HeadwaterError: it cannot be; that is the answer, and the next start goes on as if nobody had asked.
        """
        with self._refusing(record, requests):
            here = self._source.claim([record.identity, self._logs.state.preparing])
            present, gone = present_tables(self._source, list(self._logs.state.tables), self._logs.check)
        self._logs.state.note_begin(self._logs.sealer.batch, here)  # what is made there from now on is ours
        self._logs.seal(record)
        failpoints.hit(BEFORE_SOURCE)
        with self._refusing(record, requests):
            offset, identity = self._renewed_source(present, gone)
            registrations = self._source.register(list(present.values()))
        failpoints.hit(AFTER_SOURCE)
        for name, table in present.items():
            self._logs.capture_anew(table, registrations[name], offset)
        for name, reason in gone.items():
            self._logs.stop(name, reason)
        self._logs.state.note_prepared(self._logs.sealer.batch)
        self._logs.answer(requests)
        renewed = SourceRecord(identity, offset, record.commit_time_us)
        self._logs.seal(renewed)
        return renewed

    @contextmanager
    def _refusing(self, record: SourceRecord, requests: Sequence[str]) -> Iterator[None]:
        """What the source refuses for good inside is the answer; nothing else may wait for a seal there."""
        try:
            yield
            return
        except SlotBusy as error:
            step = "End that process, or give another --slot; then ask again."
            refused: HeadwaterError = SourceMisconfigured(error.message, next_step=step)
        except PASSING:
            raise
        except HeadwaterError as error:
            refused = error
        self._logs.state.note_prepared(self._logs.sealer.batch)
        self._logs.answer(requests, refused)
        self._logs.seal(record)
        raise refused

    def _renewed_source(
        self, present: dict[str, SourceTable], gone: dict[str, str]
    ) -> tuple[CdcOffset, Mapping[str, Any]]:
        """Where the source keeps its log from, and who it is; tables that it refuses move from *present* to *gone*."""
        former = {table.since.to_json() for table in self._logs.state.tables.values()}
        while True:
            try:
                offset, identity = self._source.renew(list(present.values()))
            except UnsupportedTable as error:
                if present.pop(error.table, None) is None:
                    raise
                gone[error.table] = reason_of(error.table, error)
                continue
            if offset.to_json() not in former:  # another server may have come to the very same place
                return offset, identity

    # -- the loop --------------------------------------------------------------------------------------------------

    @property
    def at_boundary(self) -> bool:
        """Whether no transaction is half way."""
        return self._at_boundary

    def step(self) -> None:
        """Take what comes within an instant, and seal when it is time."""
        linger = min(max(self._left(), 0.0), _LINGER_SECONDS)
        for event in self._stream.poll(self._patience(), linger=linger, stop_at_boundary=self._is_due()):
            self._take(event)
        if self._at_boundary and self._is_due():
            self._seal()
        self._acknowledge()
        self._statistics.buffer = self._logs.factory.buffer.statistics()
        now = time.monotonic()
        if self._at_boundary and now >= self._look_due:
            self._look()
        if now - self._asked >= _STATUS_SECONDS:
            self._asked = now
            self._statistics.look(self._stream.status())

    def _is_due(self) -> bool:
        options, age = self._options, time.monotonic() - self._logs.opened
        if not self._logs.rows and self._chores:
            return age >= options.epoch_seconds
        if not self._logs.rows:  # the source may forget what lies before the position; readers need epochs that go on
            has_moved = self._record.offset != self._logs.durable.offset
            return age >= (min(options.heartbeat_seconds, _MOVED_SECONDS) if has_moved else options.heartbeat_seconds)
        return self._left() <= 0 or self._logs.rows >= options.epoch_rows or self._logs.bytes >= options.epoch_bytes

    def _patience(self) -> float:
        """How long to wait for the source."""
        left = self._left()
        if left > 0:
            return min(left, _IDLE_SECONDS, self._options.heartbeat_seconds)
        if not self._at_boundary or self._sealing is not None:
            return _HALF_WAY_SECONDS
        return 0.0 if self._logs.rows else min(_IDLE_SECONDS, self._options.heartbeat_seconds)

    def _left(self) -> float:
        """Seconds until an epoch with rows may be sealed; not positive after a quiet spell."""
        costly = min(_DEAR * self._logs.sealer.seconds, _MOST_DISTANCE_SECONDS)
        distance = max(self._options.epoch_seconds, costly)
        return self._sealed_at + distance - time.monotonic()

    def _take(self, event: Event) -> None:
        if isinstance(event, Boundary):
            self._at_boundary = True
            commit_time = self._record.commit_time_us if event.commit_time_us is None else event.commit_time_us
            identity = self._record.identity if event.identity is None else event.identity
            self._record = SourceRecord(identity, event.position, commit_time)
            self._statistics.transactions += event.transactions
            self._statistics.caught_up = event.commit_time_us is None
            return
        self._at_boundary = False
        if isinstance(event, Changes):
            self._logs.write(event)
        elif isinstance(event, SchemaChanged):
            self._logs.change_schema(event)
        elif isinstance(event, Registered):
            self._logs.found(Finding(event.table, "", stops=False, registration=event.registration))
        elif isinstance(event, Stopped):
            self._stop_table(event.table.full_name, event.reason, reread=event.reread)
        else:
            self._logs.truncate(event)

    # -- durability ------------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        """End the epoch at the boundary that was reached, and make it durable while the next one is read."""
        if self._logs.rows:
            self._sealed_at = time.monotonic()
        ended = self._logs.end_epoch(self._record)
        self._acknowledge(wait=True)
        self._chores.step(self._logs.sealer.batch)
        self._logs.sealer.seal_in_background(ended)
        self._sealing = self._record, self._checked_time

    def _acknowledge(self, *, wait: bool = False) -> None:
        """Tell the source what is durable by now."""
        if self._sealing is None or not (wait or self._logs.sealer.is_idle):
            return
        record, checked_time = self._sealing
        self._logs.sealer.wait()  # raises what the seal raised
        failpoints.hit(BEFORE_ACKNOWLEDGE)
        self._stream.acknowledge(record.offset)
        failpoints.hit(AFTER_ACKNOWLEDGE)
        self._sealing = None
        self._statistics.checked_time = checked_time
        self._statistics.sealed(self._logs.sealer.store.committed_epoch(), record.commit_time_us)

    def _look(self) -> None:
        """Look at the source: does it still log our tables, and does its log go on?"""
        interval = min(self._options.heartbeat_seconds, self._options.schema_check_seconds)
        began = time.monotonic()
        self._look_due = began + interval
        try:
            checked = self._source.check(self._logs.registered())
        except SourceBusy:  # a table is locked, as by a long ALTER TABLE: changes flow on, the next check sees it
            return
        for finding in checked.findings:
            if finding.stops:
                self._stop_table(finding.table.full_name, finding.reason, reread=finding.reread)
            else:
                if finding.change is not None:
                    self._logs.change_schema(finding.change)
                self._logs.found(finding)
        if checked.time is None:
            took = time.monotonic() - began
            self._look_due = began + min(interval, max(_PENDING_SECONDS, _MOST_LOOKING * took))
        else:
            self._checked_time = checked.time
        if not self._logs.rows and self._sealing is None:  # else what was found is sealed first
            self._statistics.checked_time = self._checked_time

    def finish(self) -> None:
        """Seal and acknowledge what is whole; what is half way comes again with the next start."""
        if self._at_boundary and (self._logs.rows or self._record.offset != self._logs.durable.offset):
            self._seal()
        self._acknowledge(wait=True)

    def close(self) -> None:
        """Let go of the source and the logs; the store stays open."""
        try:
            self._stream.close()
        finally:
            self._logs.close()
