"""CapturedLogs: the logs of the captured tables, their epochs, and what is noted with each seal.

All of it is staged until an epoch ends and is sealed, in one step: rows and events of the tables, which tables there
are, up to where the source was told, and answers to requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from headwater.capture.renewal import renewed_columns, reshaped
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.capture.statistics import CaptureStatistics
from headwater.control.request import Answers
from headwater.errors import HeadwaterError
from headwater.log_store import KvLogStoreFactory, KvLogStoreWriter
from headwater.log_store.log_events import FORMER_KEY, PARTITION, RENEWED, RESHAPED, TRUNCATE
from headwater.sources.events import Changes, Finding, Registered, SchemaChanged, Truncated
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable
from headwater.state import StateStore
from headwater.stream import Chunk, Epoch, EpochClock, EpochPair

_MAX_ROWS = 1 << 18
_MAX_BYTES = 16 << 20  # it takes thrice: as chunks, as pages of the store, and in the seal that is under way


class CapturedLogs:
    """The logs in *store*; one thread.

    :param position_type: of ``_position`` in the logs.
    :ivar tables: those that are captured, as their logs have them now, by name.
    :ivar rows: that the open epoch has; what is noted counts as one.
    :ivar opened: when the open epoch began.
    """

    def __init__(
        self,
        store: StateStore,
        position_type: pa.DataType,
        statistics: CaptureStatistics,
        now_ms: Callable[[], int],
    ) -> None:
        self._position_type = position_type
        self._statistics = statistics
        self.factory = KvLogStoreFactory(store, max_rows=_MAX_ROWS, max_bytes=_MAX_BYTES, clock=now_ms)
        self.sealer = self.factory.sealer
        self.tables: dict[str, SourceTable] = {}
        self._writers: dict[str, KvLogStoreWriter] = {}
        self._leaving: list[KvLogStoreWriter] = []
        self.rows = self.bytes = 0
        try:
            with store.snapshot() as view:
                self.state = SourceState(self.factory.catalog, view, self.sealer.batch)
            self.answers = Answers(self.factory.catalog, store, self.sealer.batch)
            self._clock = EpochClock(now_ms, store.committed_epoch())
            self._epochs = EpochPair(self._clock.next(), store.committed_epoch())
            self.opened = time.monotonic()
            self._open_known()
        except BaseException:
            self.close()
            raise

    # -- tables ----------------------------------------------------------------------------------------------------

    def _open_known(self) -> None:
        for known in self.state.tables.values():
            if known.state is TableState.ACTIVE:
                self._open_writer(self._of_log(known))
            else:
                self._statistics.stopped_tables[known.log] = known.reason

    def _of_log(self, known: CapturedTable) -> SourceTable:
        log = self.factory.existing(known.log)
        return SourceTable.of_log(known.namespace, known.name, log.schema, log.key_columns, known.source_id)

    def _open_writer(self, table: SourceTable) -> None:
        name = table.full_name
        writer = self.factory.writer(self.factory.existing(name))
        writer.init(self._epochs)
        self._writers[name], self.tables[name] = writer, table

    def capture(self, tables: Sequence[SourceTable], registrations: Mapping[str, str], since: CdcOffset) -> None:
        """Their logs begin at *since*."""
        for table in tables:
            self.factory.log(table.full_name, table.log_schema(self._position_type), table.key_columns)
        for table in tables:
            self._open_writer(table)
            self._put(table, registrations[table.full_name], since)

    def check(self, table: SourceTable) -> None:
        """:raises ForeignSchema: the table's log cannot hold its columns."""
        log = self.factory.existing(table.full_name)
        log.with_schema(table.log_schema(self._position_type), table.key_columns)

    def capture_anew(self, table: SourceTable, registration: str, since: CdcOffset) -> None:
        """The rows of its log that follow begin at *since*, with the columns and the key that it has now."""
        name = table.full_name
        before = self._of_log(self.state.tables[name])
        if name not in self._writers:
            self._open_writer(before)
        writer, change = self._writers[name], renewed_columns(before, table)
        told = SchemaChanged(before, table) if change is None else change
        shape = {RESHAPED: reshaped(before, table).value, FORMER_KEY: list(before.key_columns)}
        detail = told.to_detail() | {RENEWED: since.to_json()} | shape
        writer.change_schema(table.log_schema(self._position_type), table.key_columns, detail)
        self.tables[name] = table
        self._statistics.stopped_tables.pop(name, None)
        self._put(table, registration, since)

    def _put(self, table: SourceTable, registration: str, since: CdcOffset) -> None:
        entry = CapturedTable(
            table.full_name, table.namespace, table.name, table.source_id, TableState.ACTIVE, since, registration
        )
        self.state.put_table(self.sealer.batch, entry)

    def stop(self, name: str, reason: str, state: TableState = TableState.STOPPED) -> SourceTable | None:
        """Its changes end here, those before are sealed with the epoch; what it was, if it was captured by now.

        Whatever stopped it, once that is repaired one command captures it again: a reason without it gets it.
        """
        if state is TableState.STOPPED and "headwater resnapshot" not in reason:
            reason = f"{reason} Run: headwater resnapshot {name}"
        self.state.stop_table(self.sealer.batch, name, reason, state)
        self._statistics.stopped_tables[name] = reason
        table = self.tables.pop(name, None)
        if table is not None:
            self._leaving.append(self._writers.pop(name))
        self.rows += 1
        return table

    @property
    def stopped(self) -> list[str]:
        """The tables whose changes are captured no longer."""
        return [name for name, known in self.state.tables.items() if known.state is TableState.STOPPED]

    def captures(self, name: str) -> bool:
        """Whether a table is known that may be meant by *name*, with or without its namespace."""
        return any(name in (full, table.name) for full, table in self.state.tables.items())

    def rereading(self) -> list[str]:
        """The tables that are about to be captured again."""
        return [name for name, table in self.state.tables.items() if table.state is TableState.REREADING]

    def registered(self) -> list[Registered]:
        """How the source has the captured tables registered, as far as it was told."""
        return [Registered(table, self.state.tables[name].registration) for name, table in self.tables.items()]

    def since(self) -> dict[str, CdcOffset]:
        """Where the log of each captured table begins."""
        return {name: self.state.tables[name].since for name in self.tables}

    # -- what the logs are told ------------------------------------------------------------------------------------

    def write(self, event: Changes) -> None:
        name = event.table.full_name
        chunk = Chunk.build(event.rows, event.ops, event.table.key_columns)
        self._writers[name].write_chunk(chunk)
        self.rows += chunk.num_rows
        self.bytes += chunk.nbytes
        self._statistics.count(name, chunk.num_rows, chunk.nbytes)

    def truncate(self, event: Truncated) -> None:
        self._writers[event.table.full_name].note(TRUNCATE, {"position": event.position.to_json()})
        self.rows += 1

    def change_schema(self, event: SchemaChanged) -> None:
        name = event.before.full_name
        schema = event.after.log_schema(self._position_type)
        self._writers[name].change_schema(schema, event.after.key_columns, event.to_detail())
        self.tables[name] = event.after
        self.rows += 1

    def note(self, name: str, text: str) -> None:
        """Keep what somebody saw among the events of a table, if that is captured."""
        if name in self._writers:
            self._writers[name].note(PARTITION, {"text": text})

    def found(self, finding: Finding) -> None:
        """What was seen at the source about a table that goes on."""
        name = finding.table.full_name
        if finding.registration is not None:
            entry = replace(self.state.tables[name], registration=finding.registration)
            self.state.put_table(self.sealer.batch, entry)
        if finding.reason:
            self.note(name, finding.reason)
        self.rows += 1

    def answer(self, requests: Sequence[str], problem: HeadwaterError | None = None) -> None:
        for request in requests:
            self.answers.put(self.sealer.batch, request, problem)

    # -- seals -----------------------------------------------------------------------------------------------------

    @property
    def durable(self) -> SourceRecord:
        """As the last seal has it, or the one that is under way."""
        record = self.state.record
        assert record is not None
        return record

    def end_epoch(self, record: SourceRecord) -> Epoch:
        """The open epoch ends at *record*; which one that is, to be sealed."""
        following = self._clock.next()
        for writer in (*self._writers.values(), *self._leaving):
            writer.end_epoch(following)
        self._leaving = []
        self.state.put(self.sealer.batch, record)
        self._epochs = self._epochs.next(following)
        self.rows = self.bytes = 0
        self.opened = time.monotonic()
        self._statistics.epochs += 1
        return self._epochs.prev

    def seal(self, record: SourceRecord) -> None:
        """The open epoch ends at *record*, durably."""
        self.sealer.seal(self.end_epoch(record))

    def seal_alone(self) -> None:
        """What is noted, before any table has a writer."""
        self.sealer.seal(self._epochs.curr)
        self._epochs = self._epochs.next(self._clock.next())

    def close(self) -> None:
        """Let go of the logs; the store stays open."""
        self.factory.close()
