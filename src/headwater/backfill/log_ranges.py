"""What the logs of a query's tables hold in a range of epochs, as one snapshot of the store shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import pyarrow as pa

from headwater.backfill.errors import TableNotCaptured
from headwater.capture.source_state import CapturedTable, SourceRecord, SourceState, TableState
from headwater.log_store import LogView
from headwater.log_store.log import Log, LogRegistry
from headwater.log_store.log_events import (
    FORMER_KEY,
    RENEWED,
    RESHAPED,
    SCHEMA,
    TRUNCATE,
    LogEvent,
    Reshaped,
    events_of,
)
from headwater.sources.offset import CdcOffset
from headwater.sources.table import FIELD_ID, POSITION_COLUMN, SourceTable
from headwater.state import Snapshot, open_reader

_MOST_EPOCHS: Final = 10_000


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What a table's log has in a range of epochs.

    :ivar table: the table as it is at the end of the range.
    :ivar after: where the range begins: after a gap in the log, the rows before it do not count.
    :ivar size: the bytes that the log stores for the rows.
    :ivar events: whether something beside rows happened. :ivar truncated: epoch and seq of the last TRUNCATE.
    :ivar defaulted: the field ids of columns that came with a value for the rows that were there.
    :ivar emptied: the table was captured anew in another shape: what the sink has of it goes, and is read again.
    :ivar renewed: epoch and seq from which on it was last captured again; the log lacks changes from before.
    """

    table: SourceTable
    after: int
    rows: int
    events: bool
    truncated: tuple[int, int] | None
    emptied: bool = False
    defaulted: tuple[int, ...] = ()
    renewed: tuple[int, int] | None = None
    size: int = 0

    def __bool__(self) -> bool:
        return self.rows > 0 or self.events

    @property
    def empty_since(self) -> int | None:
        """The epoch of a TRUNCATE from which on the log has all rows of the table; nothing else must be read."""
        if self.truncated is None or self.emptied or (self.renewed is not None and self.truncated < self.renewed):
            return None
        return self.truncated[0]


class LogRanges:
    """The logs of *names* in one snapshot.

    :ivar views: each of them.
    :param keyed: for a sink that has one row per key; others have rows of former shapes, and keep them.
    :raises TableNotCaptured: one has no log.
    """

    def __init__(self, view: Snapshot, names: Sequence[str], *, keyed: bool = True) -> None:
        self._view = view
        self._keyed = keyed
        self.record: SourceRecord | None
        self.captured: Mapping[str, CapturedTable]
        self.record, self.captured = SourceState.read(view)
        missing = [name for name in names if name not in self.captured]
        if missing:
            raise TableNotCaptured(
                f"Nobody captures table {missing[0]} into this store.",
                next_step=f"Run: headwater capture … --table {missing[0]}",
            )
        registry = LogRegistry.load(view)
        self.views = {name: LogView(view, registry.get(name)) for name in names}

    @property
    def newest(self) -> int:
        return int(self._view.epoch)

    def stopped(self, name: str) -> str | None:
        """Why nobody captures the table any more."""
        known = self.captured[name]
        return known.reason if known.state is not TableState.ACTIVE else None

    def lag(self, name: str, after: int) -> int:
        """How many epochs with changes of *name* come after *after*, or so many as are worth counting."""
        return sum(1 for _ in islice(self.views[name].epochs(after), _MOST_EPOCHS))

    def changes(self, name: str, after: int, upto: int) -> TableChanges:
        """What *name* has in ``(after, upto]``."""
        events = list(events_of(self._view, name, after, upto))
        renewals = [(int(event.epoch), event.seq) for event in events if self._empties(event)]
        if renewals:
            after = renewals[-1][0] - 1
        ends = [(end.rows, end.size) for end in self.views[name].epochs(after, upto)]
        truncates = [event for event in events if event.kind == TRUNCATE]
        emptied = [*renewals[-1:], *((int(event.epoch), event.seq) for event in truncates)]
        renewed = [(int(event.epoch), event.seq) for event in events if RENEWED in event.detail]
        table = self._table(name, self.views[name].schema_version_at(upto), upto)
        return TableChanges(
            table,
            after,
            sum(rows for rows, _ in ends),
            bool(events),
            max(emptied, default=None),
            bool(renewals),
            _defaulted(table, events),
            renewed[-1] if renewed else None,
            sum(size for _, size in ends),
        )

    def _empties(self, event: LogEvent) -> bool:
        """Whether rows from before *event* cannot stay beside those after it."""
        if RENEWED not in event.detail:
            return False
        how = Reshaped(event.detail.get(RESHAPED, Reshaped.KEY.value))
        return how is Reshaped.KEY or (how is Reshaped.COLUMNS and self._keyed)

    def latest(self, name: str) -> SourceTable:
        """The table as its log has it now."""
        return self._table(name, self.views[name].log.schema_version, self.newest)

    def following(self, name: str, upto: int) -> SourceTable:
        """The table as its next rows after the epoch *upto* have it; without any, as its log has it now.

        A snapshot that is taken later has these columns, and no row of the log with older ones comes any more.
        """
        end = next(iter(self.views[name].epochs(upto)), None)
        version = self.views[name].log.schema_version if end is None else end.first_schema_version
        return self._table(name, version, upto)

    def since(self, name: str, upto: int) -> CdcOffset | None:
        """Where the log of *name* begins; ``None`` while *upto* is before the epoch in which that moved."""
        later = events_of(self._view, name, upto, self.newest)
        return None if any(RENEWED in event.detail for event in later) else self.captured[name].since

    def positions(self, name: str, after: int, upto: int) -> pa.ChunkedArray:
        """The ``_position`` of every change in ``(after, upto]``."""
        batches = self.views[name].read_range(after, upto)
        kind = self.views[name].log.schema.field(POSITION_COLUMN).type
        return pa.chunked_array([batch.column(POSITION_COLUMN) for batch in batches], kind)

    def _table(self, name: str, version: int, upto: int) -> SourceTable:
        """The table with the columns of *version*, and the key that it has at the end of the epoch *upto*."""
        log, known = self.views[name].log, self.captured[name]
        schema = log.schema_of(version)
        later = (event.detail for event in events_of(self._view, name, upto, self.newest))
        former = next((detail[FORMER_KEY] for detail in later if FORMER_KEY in detail), None)
        keys = _key_columns(log, schema) if former is None else tuple(former)
        if not set(keys) <= set(schema.names):  # renamed since
            keys = _key_columns(log, schema)
        return SourceTable.of_log(known.namespace, known.name, schema, keys, known.source_id)


def _defaulted(table: SourceTable, events: Sequence[LogEvent]) -> tuple[int, ...]:
    """The columns of *table*, which is as *events* left it, that came among them with a value."""
    names: list[str] = []
    for detail in (event.detail for event in events if event.kind == SCHEMA):
        names = [detail["renamed"].get(name, name) for name in names if name not in detail["dropped"]]
        if detail["defaults"] is not None and RENEWED not in detail:
            names += detail["added"]
    return tuple(column.field_id for column in table.columns if column.name in names and not column.dropped)


def _key_columns(log: Log, schema: pa.Schema) -> tuple[str, ...]:
    """The log's key in *schema*, where its columns may have had other names.

    A table that was made anew may have had none of them; its rows of before are replaced by those of the new one, so
    that any key will do.
    """
    by_id = {field.metadata[FIELD_ID]: field.name for field in schema if field.metadata and FIELD_ID in field.metadata}
    known = [by_id.get(log.schema.field(name).metadata[FIELD_ID]) for name in log.key_columns]
    return tuple(name for name in known if name is not None) if None not in known else (next(iter(by_id.values())),)


def described_tables(location: str) -> list[SourceTable]:
    """The captured tables of the store at *location*, as they are now."""
    with open_reader(location) as reader, reader.snapshot() as view:
        captured = list(LogRanges(view, []).captured)
        ranges = LogRanges(view, captured)
        return [ranges.latest(name) for name in captured]
