"""One stretch of capture: from opening the source's stream to its end or its first failure.

Everything that a session holds in memory follows from what is sealed in the store, so a failed session is thrown away
as a crash would do it, and the next one starts from the last seal: the store drops what was staged, the source sends
again what was not acknowledged. After a gap a session goes on as :mod:`headwater.capture.renewal` tells.

An epoch is sealed at a transaction boundary, with the position that it ends at, while the next one is being read. The
source is told after the seal, never before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headwater import failpoints
from headwater.capture.chores import Chores
from headwater.capture.options import CaptureOptions
from headwater.capture.renewal import TableRenewals, present_tables, reason_of, renewed_columns
from headwater.capture.requests import ADD_TABLES, REMARK, RENEW_SOURCE, RENEW_TABLES, Answers, Request, Requests
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.capture.statistics import CaptureStatistics
from headwater.capture.stream_errors import StoreTaken
from headwater.errors import HeadwaterError, TransientError
from headwater.log_store import KvLogStoreFactory, KvLogStoreWriter
from headwater.log_store.log_events import PARTITION, RENEWED, SCHEMA, TRUNCATE
from headwater.sources.errors import SchemaStopped, SlotBusy, SourceBusy, SourceMisconfigured, UnsupportedTable
from headwater.sources.events import (
    Boundary,
    Changes,
    ChangeStream,
    Event,
    Finding,
    Registered,
    SchemaChanged,
    Stopped,
    Truncated,
)
from headwater.sources.offset import CdcOffset
from headwater.sources.source import AlwaysLogging, Registering, Source
from headwater.sources.table import SourceTable
from headwater.sources.written import WrittenOffset
from headwater.state import StateStore
from headwater.stream import Chunk, EpochClock, EpochPair

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
_STAGE_BYTES = 16 << 20  # it takes thrice: as chunks, as pages of the store, and in the seal that is under way
_STATUS_SECONDS = 1.0
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
        requests: Requests,
    ) -> None:
        self._source = source
        self._options = options
        self._statistics = statistics
        self._factory = KvLogStoreFactory(store, stage_bytes=_STAGE_BYTES, clock=now_ms)
        self._sealer = self._factory.sealer
        self._writers: dict[str, KvLogStoreWriter] = {}
        self._leaving: list[KvLogStoreWriter] = []
        self._tables: dict[str, SourceTable] = {}
        self._rows = self._bytes = 0
        self._at_boundary = True
        self._sealing: SourceRecord | None = None
        self._renewals = TableRenewals(source, self._check_log, options.heartbeat_seconds)
        self.wants_restart = False
        try:
            with store.snapshot() as view:
                self._state = SourceState(self._factory.catalog, view, self._sealer.batch)
                self.answers = Answers(self._factory.catalog, view, self._sealer.batch)
                self._chores = Chores(self._factory, self.answers)
            self._clock = EpochClock(now_ms, store.committed_epoch())
            self._epochs = EpochPair(self._clock.next(), store.committed_epoch())
            self._opened = self._came = time.monotonic()
            self._looked = self._asked = -math.inf
            self._open_known()
            asked = requests.unanswered(self.answers)
            self._record = self._start(names, [request.id for request in asked if request.kind == RENEW_SOURCE])
            self._stream = self._open_stream()
        except BaseException:
            self._factory.close()
            raise
        try:
            self.serve([request for request in asked if request.kind == RENEW_TABLES])
            if self._add(names, self._renewals.named):
                self._end_epoch(self._record)
                self._sealer.seal(self._epochs.prev)
        except BaseException:
            self.close()
            raise

    def _open_stream(self) -> ChangeStream:
        """The stream of all tables from the position that is durable."""
        if isinstance(self._source, AlwaysLogging):
            self._source.begin_from({name: self._state.tables[name].since for name in self._tables})
        if isinstance(self._source, Registering):
            self._source.resume(self._registered())
        return self._source.open(list(self._tables.values()), self._record.offset, self._record.identity)

    # -- tables ----------------------------------------------------------------------------------------------------

    def _open_known(self) -> None:
        for known in self._state.tables.values():
            if known.state is TableState.ACTIVE:
                log = self._factory.existing(known.log)
                table = SourceTable.of_log(known.namespace, known.name, log.schema, log.key_columns, known.source_id)
                self._open_writer(table)
            else:
                self._statistics.stopped_tables[known.log] = known.reason

    def _start(self, names: Sequence[str], renewals: Sequence[str]) -> SourceRecord:
        """Where the stream starts; *renewals* are the requests to prepare the source anew."""
        record = self._state.record
        if record is None:
            return self._begin(names, renewals)
        if isinstance(record.offset, WrittenOffset):
            raise StoreTaken("A stream writes this store.", next_step="Name another directory for the capture.")
        return self._renew_source(record, renewals) if renewals else record

    def _begin(self, names: Sequence[str], renewals: Sequence[str]) -> SourceRecord:
        """Who the source is, and its tables, are durable before their first change is read."""
        tables = self._source.tables(names)
        resumed = self._state.has_begun
        if not resumed:  # what is made at the source after this is ours, also if we do not come to hold its position
            here = self._source.claim([])  # first: what is refused now must not be taken for ours at the next start
            self._state.note_begin(self._sealer.batch, here)
            self._seal_alone()
        elif self._state.preparing:
            self._source.claim([self._state.preparing])
        failpoints.hit(BEFORE_BEGIN)
        offset, identity = self._source.begin(tables, resumed=resumed)
        failpoints.hit(AFTER_BEGIN)
        record = SourceRecord(identity, offset)
        self._capture(tables, offset)
        self._state.note_prepared(self._sealer.batch)
        self._answer(renewals)
        self._end_epoch(record)
        self._sealer.seal(self._epochs.prev)
        return record

    def _answer(self, requests: Sequence[str], problem: HeadwaterError | None = None) -> None:
        for request in requests:
            self.answers.put(self._sealer.batch, request, problem)

    def _seal_alone(self) -> None:
        """What is noted, before any table has a writer."""
        self._sealer.seal(self._epochs.curr)
        self._epochs = self._epochs.next(self._clock.next())

    def _add(self, names: Sequence[str], renewed: Collection[str] = ()) -> bool:
        """Capture those of *names* that are not captured yet, from the boundary that was reached; whether any is new.

        :param renewed: somebody asked to capture these anew: they may be stopped.
        :raises SchemaStopped: one was captured before and stopped: going on would leave a gap.
        """
        found = [table for table in self._source.tables(names) if table.full_name not in renewed]
        for table in found:
            known = self._state.tables.get(table.full_name)
            if known is not None and known.state is TableState.STOPPED:
                step = f"Run: headwater resnapshot {table.full_name}"
                raise SchemaStopped(table.full_name, known.reason.removesuffix(step).rstrip(), next_step=step)
        new = [table for table in found if table.full_name not in self._writers]
        if new:
            since = self._source.include(new).joined(self._record.offset)
            self._capture(new, since)
            for table in new:
                self._stream.add_table(table)
        return bool(new)

    def _capture(self, tables: Sequence[SourceTable], since: CdcOffset) -> None:
        registrations = self._source.register(tables)
        for table in tables:
            self._factory.log(table.full_name, table.log_schema(self._source.position_type), table.key_columns)
        for table in tables:
            name = table.full_name
            self._open_writer(table)
            entry = CapturedTable(
                name, table.namespace, table.name, table.source_id, TableState.ACTIVE, since, registrations[name]
            )
            self._state.put_table(self._sealer.batch, entry)

    def _open_writer(self, table: SourceTable) -> None:
        name = table.full_name
        writer = self._factory.writer(self._factory.existing(name))
        writer.init(self._epochs)
        self._writers[name], self._tables[name] = writer, table

    def serve(self, requests: Sequence[Request]) -> None:
        """Do what was asked, with the next seal. An answer tells what could not be done; the capture goes on.

        Call it where :attr:`at_boundary` holds.
        """
        for request in requests:
            problem: HeadwaterError | None = None
            try:
                if request.kind == RENEW_SOURCE:
                    self.wants_restart = True
                    continue
                if request.kind == RENEW_TABLES:
                    self._take_up(request)
                    continue
                if request.kind == REMARK:
                    self._note(request)
                elif request.kind == ADD_TABLES:
                    self._add(request.detail["tables"], self._renewals.tables)
                else:
                    self._chores.add(request)
                    continue
            except SourceBusy as error:
                problem = error
            except TransientError:
                raise
            except HeadwaterError as error:
                problem = error
            self.answers.put(self._sealer.batch, request.id, problem)
            self._rows += 1
        if self._renewals.are_ready(self._record.offset, self._state.tables):
            self._renew_tables()

    def _note(self, request: Request) -> None:
        """Keep what a reader of the history saw among the events of its table, if that is captured."""
        writer = self._writers.get(str(request.detail["log"]))
        if writer is not None:
            writer.note(PARTITION, {"text": str(request.detail["text"])})

    def _stop_table(self, name: str, reason: str) -> None:
        """Its changes end here, those before are sealed with the epoch; the others go on."""
        self._state.stop_table(self._sealer.batch, name, reason)
        self._statistics.stopped_tables[name] = reason
        self._stream.remove_table(self._tables.pop(name))
        self._leaving.append(self._writers.pop(name))
        self._rows += 1

    # -- after a gap -----------------------------------------------------------------------------------------------

    def _check_log(self, table: SourceTable) -> None:
        """:raises ForeignSchema: the table's log cannot hold its columns."""
        log = self._factory.existing(table.full_name)
        log.with_schema(table.log_schema(self._source.position_type), table.key_columns)

    def _take_up(self, request: Request) -> None:
        """Tables are captured anew once the stream has passed what was committed before; until then they are stopped.

        Their rows of that time may be of any former shape, and are read with the table.
        """
        for name in self._renewals.take_up(request, self._state.tables):
            if name in self._writers:
                step = f"Run: headwater resnapshot {name}"
                self._stop_table(name, f"It is about to be captured anew; if that does not come about: {step}")

    def _renew_tables(self) -> None:
        """Capture them from the boundary that was reached on. On a new stream the source describes each table anew."""
        self._seal()
        self._acknowledge(wait=True)
        self._stream.close()
        failpoints.hit(BEFORE_TABLES)
        for renewal in self._renewals.tables.values():
            self._capture_anew(renewal.table, renewal.registration, self._record.offset)
        self._answer(self._renewals.requests)
        self._renewals.clear()
        self._end_epoch(self._record)
        self._sealer.seal(self._epochs.prev)
        failpoints.hit(AFTER_TABLES)
        self._stream = self._open_stream()

    def _capture_anew(self, table: SourceTable, registration: str, since: CdcOffset) -> None:
        """The rows of its log that follow begin at *since*, with the columns and the key that it has now."""
        name = table.full_name
        log = self._factory.existing(name)
        known = self._state.tables[name]
        before = SourceTable.of_log(known.namespace, known.name, log.schema, log.key_columns, known.source_id)
        if name not in self._writers:
            self._open_writer(before)
        writer, change = self._writers[name], renewed_columns(before, table)
        told = SchemaChanged(before, table) if change is None else change
        writer.note(SCHEMA, told.to_detail() | {RENEWED: since.to_json()})
        writer.change_schema(table.log_schema(self._source.position_type), table.key_columns)
        self._tables[name] = table
        self._statistics.stopped_tables.pop(name, None)
        entry = CapturedTable(
            name, table.namespace, table.name, table.source_id, TableState.ACTIVE, since, registration
        )
        self._state.put_table(self._sealer.batch, entry)

    def _renew_source(self, record: SourceRecord, requests: Sequence[str]) -> SourceRecord:
        """Prepare the source anew, whatever became of what was prepared before, and capture all tables from there on.

        :raises HeadwaterError: it cannot be; that is the answer, and the next start goes on as if nobody had asked.
        """
        with self._refusing(record, requests):
            here = self._source.claim([record.identity, self._state.preparing])
            present, gone = present_tables(self._source, list(self._state.tables), self._check_log)
        self._state.note_begin(self._sealer.batch, here)  # what is made there from now on is ours
        self._end_epoch(record)
        self._sealer.seal(self._epochs.prev)
        failpoints.hit(BEFORE_SOURCE)
        with self._refusing(record, requests):
            offset, identity = self._renewed_source(present, gone)
            registrations = self._source.register(list(present.values()))
        failpoints.hit(AFTER_SOURCE)
        for name, table in present.items():
            self._capture_anew(table, registrations[name], offset)
        for name, reason in gone.items():
            self._state.stop_table(self._sealer.batch, name, reason)
            self._statistics.stopped_tables[name] = reason
            if self._tables.pop(name, None) is not None:
                self._leaving.append(self._writers.pop(name))
        self._state.note_prepared(self._sealer.batch)
        self._answer(requests)
        renewed = SourceRecord(identity, offset, record.commit_time_us)
        self._end_epoch(renewed)
        self._sealer.seal(self._epochs.prev)
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
        except TransientError:
            raise
        except HeadwaterError as error:
            refused = error
        self._state.note_prepared(self._sealer.batch)
        self._answer(requests, refused)
        self._end_epoch(record)
        self._sealer.seal(self._epochs.prev)
        raise refused

    def _renewed_source(
        self, present: dict[str, SourceTable], gone: dict[str, str]
    ) -> tuple[CdcOffset, Mapping[str, Any]]:
        """Where the source keeps its log from, and who it is; tables that it refuses move from *present* to *gone*."""
        former = {table.since.to_json() for table in self._state.tables.values()}
        while True:
            try:
                offset, identity = self._source.renew(list(present.values()))
            except UnsupportedTable as error:
                if present.pop(error.table, None) is None:
                    raise
                gone[error.table] = reason_of(error)
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
        asked = time.monotonic()
        events = self._stream.poll(self._patience(), linger=linger, stop_at_boundary=self._is_due())
        self._came = max(asked, time.monotonic() - linger)
        for event in events:
            self._take(event)
        if self._at_boundary and self._is_due():
            self._seal()
        self._acknowledge()
        now = time.monotonic()
        if self._at_boundary and now - self._looked >= self._options.heartbeat_seconds:
            self._look()
        if now - self._asked >= _STATUS_SECONDS:
            self._asked = now
            self._statistics.look(self._stream.status())

    def _is_due(self) -> bool:
        options, age = self._options, time.monotonic() - self._opened
        if not self._rows and self._chores:
            return age >= options.epoch_seconds
        if not self._rows:  # the source may still forget what lies before the position
            return age >= min(options.heartbeat_seconds, _MOVED_SECONDS) and self._record.offset != self._durable.offset
        return age >= options.epoch_seconds or self._rows >= options.epoch_rows or self._bytes >= options.epoch_bytes

    @property
    def _durable(self) -> SourceRecord:
        """As the last seal has it, or the one that is under way."""
        record = self._state.record
        assert record is not None
        return record

    def _patience(self) -> float:
        if not self._rows and self._sealing is None:
            return min(_IDLE_SECONDS, self._options.heartbeat_seconds)
        return min(max(self._left(), 0.0), _IDLE_SECONDS)

    def _left(self) -> float:
        """Until the epoch should be sealed; one without rows has not begun."""
        seconds = self._options.epoch_seconds
        return seconds - (time.monotonic() - self._opened) if self._rows else seconds

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
        if not self._rows:
            self._opened = self._came
        if isinstance(event, Changes):
            self._write(event)
        elif isinstance(event, SchemaChanged):
            self._change_schema(event)
        elif isinstance(event, Stopped):
            self._stop_table(event.table.full_name, event.reason)
        else:
            self._truncate(event)

    def _write(self, event: Changes) -> None:
        name = event.table.full_name
        chunk = Chunk.build(event.rows, event.ops, event.table.key_columns)
        self._writers[name].write_chunk(chunk)
        self._rows += chunk.num_rows
        self._bytes += chunk.nbytes
        self._statistics.count(name, chunk.num_rows, chunk.nbytes)

    def _truncate(self, event: Truncated) -> None:
        self._writers[event.table.full_name].note(TRUNCATE, {"position": event.position.to_json()})
        self._rows += 1

    def _change_schema(self, event: SchemaChanged) -> None:
        name = event.before.full_name
        writer = self._writers[name]
        writer.note(SCHEMA, event.to_detail())
        writer.change_schema(event.after.log_schema(self._source.position_type), event.after.key_columns)
        self._tables[name] = event.after
        self._rows += 1

    # -- durability ------------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        """End the epoch at the boundary that was reached, and make it durable while the next one is read."""
        self._end_epoch(self._record)
        self._acknowledge(wait=True)
        self._chores.step(self._sealer.batch)
        self._sealer.seal_in_background(self._epochs.prev)
        self._sealing = self._record

    def _end_epoch(self, record: SourceRecord) -> None:
        following = self._clock.next()
        for writer in (*self._writers.values(), *self._leaving):
            writer.end_epoch(following)
        self._leaving = []
        self._state.put(self._sealer.batch, record)
        self._epochs = self._epochs.next(following)
        self._rows = self._bytes = 0
        self._opened = time.monotonic()
        self._statistics.epochs += 1

    def _acknowledge(self, *, wait: bool = False) -> None:
        """Tell the source what is durable by now."""
        record = self._sealing
        if record is None or not (wait or self._sealer.is_idle):
            return
        self._sealer.wait()  # raises what the seal raised
        failpoints.hit(BEFORE_ACKNOWLEDGE)
        self._stream.acknowledge(record.offset)
        failpoints.hit(AFTER_ACKNOWLEDGE)
        self._sealing = None
        self._statistics.sealed(self._sealer.store.committed_epoch(), record.commit_time_us)

    def _look(self) -> None:
        """Look at the source: does it still log our tables, and does its log go on?"""
        self._looked = time.monotonic()
        for finding in self._source.check(self._registered()):
            self._found(finding)

    def _registered(self) -> list[Registered]:
        return [Registered(table, self._state.tables[name].registration) for name, table in self._tables.items()]

    def _found(self, finding: Finding) -> None:
        name = finding.table.full_name
        if finding.stops:
            self._stop_table(name, finding.reason)
            return
        if finding.registration is not None:
            entry = replace(self._state.tables[name], registration=finding.registration)
            self._state.put_table(self._sealer.batch, entry)
        if finding.reason:
            self._writers[name].note(PARTITION, {"text": finding.reason})
        self._rows += 1

    def finish(self) -> None:
        """Seal and acknowledge what is whole; what is half way comes again with the next start."""
        if self._at_boundary and (self._rows or self._record.offset != self._durable.offset):
            self._seal()
        self._acknowledge(wait=True)

    def close(self) -> None:
        """Let go of the source and the logs; the store stays open."""
        try:
            self._stream.close()
        finally:
            self._factory.close()
