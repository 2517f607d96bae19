"""What the stream of a source tells the capture, in the order of the source's commits.

A transaction is told as :class:`Changes`, :class:`Truncated`, :class:`SchemaChanged` and :class:`Stopped` of its tables
and ends at a :class:`Boundary`. Several small transactions may come as one: what counts is that nothing is half way at
a boundary, so an epoch may be sealed there and only there. The changes of one table keep their order; between tables of
one transaction there is none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from headwater.sources.errors import RefusedValue, RereadNeeded, SchemaStopped, UnsupportedTable
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows of one table in commit order.

    :ivar rows: the columns of the table's log: its own, position, commit time and what could not be known.
    :ivar ops: int8, one per row.
    """

    table: SourceTable
    rows: pa.RecordBatch
    ops: pa.Int8Array


@dataclass(frozen=True, slots=True)
class Truncated:
    """All rows of a table were removed at once.

    :ivar commit_time_us: of the transaction, microseconds since 1970; ``None`` where the source does not say.
    """

    table: SourceTable
    position: CdcOffset
    commit_time_us: int | None = None


@dataclass(frozen=True, slots=True)
class SchemaChanged:
    """The rows that follow have other columns. It may come inside a transaction.

    :ivar renamed: new names by old ones.
    :ivar retyped: names, as they are now, of the columns whose type became wider.
    :ivar defaults: one row: what the rows from before have in added columns, where it is not null.
    """

    before: SourceTable
    after: SourceTable
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    retyped: tuple[str, ...] = ()
    defaults: pa.RecordBatch | None = None

    def to_detail(self) -> dict[str, Any]:
        """For the log's event."""
        return {
            "added": list(self.added),
            "dropped": list(self.dropped),
            "renamed": dict(self.renamed),
            "retyped": list(self.retyped),
            "defaults": None if self.defaults is None else packed_row(self.defaults),
        }


@dataclass(frozen=True, slots=True)
class Stopped:
    """A table changed so that its changes cannot be told from here on; those of the others can.

    :ivar reason: what changed, and what to do.
    :ivar reread: reading the table again, as it is now, repairs it.
    """

    table: SourceTable
    reason: str
    reread: bool = False

    @classmethod
    def by(cls, table: SourceTable, error: SchemaStopped | UnsupportedTable | RefusedValue) -> Stopped:
        """*table* stopped because of *error*."""
        match error:
            case SchemaStopped():
                what = error.change
            case UnsupportedTable():
                what = error.reason
            case _:
                what = error.message
        reason = stop_reason(table.full_name, what, error.next_step)
        return cls(table, reason, reread=isinstance(error, RereadNeeded))


def stop_reason(table: str, what: str, next_step: str | None = None) -> str:
    """Why *table* is stopped, ending with the command that resumes it.

    >>> stop_reason("shop.orders", "it has no key.", "Add one.")
    'It has no key. Add one. Then run: headwater resnapshot shop.orders'
    """
    reason = f"{what[0].upper()}{what[1:]} {next_step or ''}".rstrip()
    command = f"headwater resnapshot {table}"
    return reason if command in reason else f"{reason} {'Then run' if next_step else 'Run'}: {command}"


def packed_row(row: pa.RecordBatch) -> str:
    """A batch as text for JSON: an Arrow IPC stream in base64."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as stream:
        stream.write_batch(row)
    return base64.b64encode(sink.getvalue()).decode()


@dataclass(frozen=True, slots=True)
class Boundary:
    """Everything before *position* was told, and no transaction is half way.

    :ivar commit_time_us: of the newest transaction, microseconds since 1970; ``None`` where only the log went on.
    :ivar transactions: how many ended since the boundary before.
    :ivar identity: of the source, where it is not what the stream was opened with, and the place is one of its log: a
        standby that was promoted.
    """

    position: CdcOffset
    commit_time_us: int | None
    transactions: int
    identity: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """A captured table and how the source had it registered for us when that was last looked at."""

    table: SourceTable
    registration: str


Event: TypeAlias = Changes | Truncated | SchemaChanged | Stopped | Boundary | Registered


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen at the source about a captured table.

    :ivar reason: what, and what to do; empty where nothing needs to be told.
    :ivar stops: its changes cannot be captured any more.
    :ivar reread: … and reading the table again, as it is now, repairs it.
    :ivar registration: what it is from now on, if it changed.
    :ivar change: how its columns changed before any row with the new ones; the stream follows it already.
    """

    table: SourceTable
    reason: str
    stops: bool
    registration: str | None = None
    reread: bool = False
    change: SchemaChanged | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What a comparison of the source's catalog with the captured tables found.

    :ivar time: when the catalog was read, in seconds since 1970, where *findings* has all that differed then; ``None``:
        the stream must first pass the position where something was seen.
    """

    findings: Sequence[Finding]
    time: float | None


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Where a stream is.

    :ivar behind_bytes: of the source's log that were not read yet; ``None`` where the source cannot say.
    :ivar held_bytes: of the source's log that it must keep for us; ``None`` where it cannot say.
    """

    bytes_received: int
    behind_bytes: int | None
    held_bytes: int | None
    spilled_bytes: int


class ChangeStream(Protocol):
    """The stream of one source from a position on."""

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """What came, at most *timeout* seconds later; nothing after the first boundary if *stop_at_boundary*.

        Once something came, more may be waited for, until *linger* seconds after the call: many rows at once are
        cheaper.

        :raises TransientError: the stream broke; what came after the last sealed boundary must be forgotten.
        """
        ...

    def acknowledge(self, position: CdcOffset) -> None:
        """Everything before *position* is durable: the source may forget it."""
        ...

    def add_table(self, table: SourceTable) -> None:
        """Tell the changes of *table*, too, from now on."""
        ...

    def remove_table(self, table: SourceTable) -> None:
        """Its changes are of no interest any more."""
        ...

    def status(self) -> StreamStatus: ...

    def close(self) -> None: ...
