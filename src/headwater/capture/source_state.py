"""What is durable of a source beside its logs: who it is, how far it was read, and its tables.

Position and rows go into one seal: after a crash the stream starts exactly where the logs end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from headwater.sources.offset import CdcOffset
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch

SOURCES = TableSchema(
    "sources",
    1,
    key=(Field("name", FieldType.TEXT),),
    value=(Field("identity", FieldType.JSON), Field("offset", FieldType.TEXT), Field("commit_time_us", FieldType.INT)),
)
CAPTURED = TableSchema(
    "captured_tables",
    1,
    key=(Field("log", FieldType.TEXT),),
    value=(
        Field("namespace", FieldType.TEXT),
        Field("name", FieldType.TEXT),
        Field("source_id", FieldType.INT),
        Field("state", FieldType.TEXT),
        Field("since", FieldType.TEXT),
        Field("registration", FieldType.TEXT),
        Field("reason", FieldType.TEXT),
    ),
)
SOURCE = "source"
"""A store holds one source; this is the key of its row."""
_BEGUN = "begun"
"""The key of a row that says: this store may have made something at a source, whose position it does not hold yet.

Its identity is that of a source that is being prepared anew, after a gap; else it is empty.
"""


class TableState(Enum):
    """The life of a captured table.

    =========  =================================================  ==================================
    state      meaning                                            goes to
    =========  =================================================  ==================================
    active     its changes are captured                           stopped, rereading
    stopped    they are not: *reason* says why and what to do     rereading, active (after a gap)
    rereading  they are not: it is about to be captured again     active, stopped (it cannot be)
    =========  =================================================  ==================================
    """

    ACTIVE = "active"
    STOPPED = "stopped"
    REREADING = "rereading"


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Who the source is, and how far its log is durable here."""

    identity: Mapping[str, Any]
    offset: CdcOffset
    commit_time_us: int = 0


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table that is or was captured into the log *log*.

    :ivar source_id: the source's own number of the table: a table made anew under the old name has another.
    :ivar since: the position from which its log is complete; when it moves, changes before it may be missing.
    :ivar registration: how the source has it registered for us.
    """

    log: str
    namespace: str
    name: str
    source_id: int | None
    state: TableState
    since: CdcOffset
    registration: str
    reason: str = ""


class SourceState:
    """The durable state of the source of one store; writes go into the batch of the next seal."""

    def __init__(self, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> None:
        self._sources: StateTable = catalog.open_or_create(SOURCES, batch)
        self._captured: StateTable = catalog.open_or_create(CAPTURED, batch)
        self._load(view)

    def _load(self, view: Snapshot) -> None:
        row = self._sources.get(view, 0, (SOURCE,))
        self.record = None if row is None else SourceRecord(row[0], CdcOffset.from_json(row[1]), row[2])
        begun = self._sources.get(view, 0, (_BEGUN,))
        self.has_begun = begun is not None
        self.preparing: Mapping[str, Any] = {} if begun is None else begun[0]
        self.tables = {key[0]: _table(key[0], values) for key, values in self._captured.scan(view, 0)}

    @classmethod
    def read(cls, view: Snapshot) -> tuple[SourceRecord | None, dict[str, CapturedTable]]:
        """For other processes: the source and its tables, as the snapshot has them."""
        catalog = Catalog.load(view)
        if not {SOURCES.name, CAPTURED.name} <= set(catalog.names()):
            return None, {}
        state = cls.__new__(cls)
        state._sources, state._captured = catalog.open(SOURCES), catalog.open(CAPTURED)
        state._load(view)
        return state.record, state.tables

    def note_begin(self, batch: WriteBatch, source: Mapping[str, Any] | None = None) -> None:
        """The source is about to be prepared for this store, or prepared anew: *source*."""
        self.has_begun, self.preparing = True, source or {}
        self._sources.put(batch, 0, (_BEGUN,), (dict(self.preparing), "", 0))

    def note_prepared(self, batch: WriteBatch) -> None:
        """What was prepared anew is on record, or was given up."""
        self.note_begin(batch)

    def put(self, batch: WriteBatch, record: SourceRecord) -> None:
        """Where the log is durable, from the next seal on."""
        self.record = record
        values = (dict(record.identity), record.offset.to_json(), record.commit_time_us)
        self._sources.put(batch, 0, (SOURCE,), values)

    def put_table(self, batch: WriteBatch, table: CapturedTable) -> None:
        self.tables[table.log] = table
        number = -1 if table.source_id is None else table.source_id
        values = (
            table.namespace,
            table.name,
            number,
            table.state.value,
            table.since.to_json(),
            table.registration,
            table.reason,
        )
        self._captured.put(batch, 0, (table.log,), values)

    def stop_table(self, batch: WriteBatch, log: str, reason: str, state: TableState = TableState.STOPPED) -> None:
        """The changes of a table end here."""
        self.put_table(batch, replace(self.tables[log], state=state, reason=reason))


def _table(log: str, values: tuple[Any, ...]) -> CapturedTable:
    namespace, name, number, state, since, registration, reason = values
    known = None if number < 0 else number
    since = CdcOffset.from_json(since)
    return CapturedTable(log, namespace, name, known, TableState(state), since, registration, reason)
