"""Errors of the sources: what happened, under what the caller must do (:mod:`headwater.errors`).

No error here holds a row value or a password. An error about a table names it; an error about a column names the
column, its type in the source and the option that decides about it.
"""

from __future__ import annotations

from headwater.databases.address import InvalidAddress
from headwater.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptionError,
    HeadwaterError,
    InputError,
    LoginError,
    NotFoundError,
    TransientError,
)


class SourceError(HeadwaterError):
    """Any error of :mod:`headwater.sources`."""


class SourceUnreachable(SourceError, TransientError):
    """The server did not answer, is starting or stopping, or ended the connection: try again."""


class SourceBusy(SourceError, TransientError):
    """The server has no room now: too many connections, or something that we need is locked or in use."""


class SlotBusy(SourceBusy):
    """Another connection reads the replication slot.

    :ivar slot: its name.
    :ivar pid: the server process that holds it, where it is known.
    """

    def __init__(self, slot: str, pid: int | None = None) -> None:
        self.slot, self.pid = slot, pid
        holder = "another connection" if pid is None else f"the server process {pid}"
        super().__init__(
            f"The replication slot {slot!r} is read by {holder}.",
            next_step="Stop the other capture process, or wait until the server ends its connection.",
        )


class SnapshotExpired(SourceError, TransientError):
    """An exported snapshot is gone because its transaction ended: take a new one."""


class AccessDenied(SourceError, InputError):
    """The server refused the user: a wrong password, no right to connect, to replicate or to read a table."""


class LoginRefused(AccessDenied, LoginError):
    """The server refused the login: a wrong or expired password, a locked user, an address that is not allowed."""


class NoDatabase(SourceError, InputError):
    """Something of a database was asked for, and the log is written by a stream."""


class SourceMisconfigured(SourceError, InputError):
    """A setting of the server, the slot or the publication does not allow the capture."""


class DriverMissing(SourceError, InputError):
    """The library that speaks to this kind of database is not installed."""


class InvalidDsn(SourceError, InvalidAddress):
    """The connection string cannot be used. Its text is never shown."""


class SourceNotFound(SourceError, NotFoundError):
    """The source has no database, table, publication or slot of this name."""


class InvalidRange(SourceError, InputError):
    """A range of keys that a person named and that the table cannot have."""


class UnsupportedTable(SourceError, InputError):
    """A table that cannot be captured as it is.

    :ivar table: its name.
    """

    def __init__(self, table: str, reason: str, *, next_step: str | None = None) -> None:
        self.table, self.reason = table, reason
        super().__init__(f"Table {table} cannot be captured: {reason}", next_step=next_step)


class SchemaStopped(SourceError, ConflictError):
    """A table changed in a way that does not go on by itself. Nothing after the change was taken.

    :ivar table: its name.
    :ivar change: what changed.
    """

    def __init__(self, table: str, change: str, *, next_step: str | None = None) -> None:
        self.table, self.change = table, change
        super().__init__(f"Table {table} changed and the capture of it stopped: {change}", next_step=next_step)


class RereadNeeded(SchemaStopped):
    """A table changed so that its log alone does not give its rows: it must be read again, as it is now."""

    def __init__(self, table: str, change: str, *, next_step: str | None = None) -> None:
        super().__init__(table, change, next_step=next_step or f"Run: headwater resnapshot {table}")


class TableLocked(RereadNeeded):
    """Another session locks a table, and a value that the log left out must be read from it."""


class SlotLost(SourceError, ConflictError):
    """The replication slot is gone: changes since our position can no longer be had from it."""


class SlotInvalidated(SourceError, ConflictError):
    """The server keeps the replication slot but no longer what it needs.

    :ivar slot: its name.
    :ivar reason: the server's word for it.
    """

    def __init__(self, slot: str, reason: str, *, next_step: str | None = None) -> None:
        self.slot, self.reason = slot, reason
        super().__init__(f"The server invalidated the replication slot {slot!r}: {reason}.", next_step=next_step)


class SlotMoved(SourceError, ConflictError):
    """Somebody else moved the slot past what we hold: the changes between are lost to us."""


class LogPurged(SourceError, ConflictError):
    """The server has removed files of its log that we had not read: the changes in them are lost to us."""


class CommitsCameLate(SourceError, ConflictError):
    """The server showed commits after we had taken what lies behind them for whole: something there held them back."""


class ServerReplaced(SourceError, ConflictError):
    """Behind the same address is another server than the one whose positions we hold."""


class SourceWentBack(SourceError, ConflictError):
    """The server's log ends before our position: it was restored, or a standby was promoted that had not all of it."""


class SourceProtocolError(SourceError, CorruptionError):
    """Bytes that are not a message of the protocol, or one that cannot come here."""


class RefusedValue(SourceError):
    """A value that cannot be taken as it is: its table stops, the others go on.

    :ivar table: name of the table.
    """

    table: str


class UndecodableValue(RefusedValue, CorruptionError):
    """A text that is no value of the column's type.

    :ivar table: name of the table.
    :ivar column: name of the column.
    """

    def __init__(self, table: str, column: str, source_type: str, reason: str) -> None:
        self.table, self.column, self.source_type = table, column, source_type
        super().__init__(
            f"Table {table}, column {column!r} ({source_type}): {reason}",
            next_step="Correct the value at the source, or leave the table out of the captured tables; then run:"
            f" headwater resnapshot {table}",
        )


class InvalidKey(UndecodableValue):
    """A key column is null or cannot be decoded; a row without its key cannot be placed."""


class SpecialValue(RefusedValue, InputError):
    """A value that is legal in the source and has no equal in the column's type.

    :ivar table: name of the table.
    :ivar column: name of the column.
    :ivar values: what kind of value, for example ``infinity``.
    """

    def __init__(self, table: str, column: str, source_type: str, values: str, *, next_step: str | None = None) -> None:
        self.table, self.column, self.source_type, self.values = table, column, source_type, values
        step = (
            f"Set special_values of {table}.{column} to text (the column becomes exact text), null (they become"
            " null) or park (their rows are kept apart), in pipeline.toml or with --special-values, and restart; then"
            f" run: headwater resnapshot {table}"
        )
        super().__init__(
            f"Table {table}, column {column!r} ({source_type}) holds {values}, which its Arrow type does not have.",
            next_step=next_step or step,
        )


class BrokenText(SpecialValue):
    """A text that the source takes and that is no Unicode: half a surrogate pair, which is half a character."""

    def __init__(self, table: str, column: str, source_type: str, *, is_key: bool) -> None:
        mended = f"the rows whose texts were cut inside a character, then run: headwater resnapshot {table}"
        null = f"Set special_values of {table}.{column} to null (such texts become null) and restart, or repair"
        step = f"{'Repair' if is_key else null} {mended}"
        super().__init__(table, column, source_type, "half a surrogate pair", next_step=step)


class InvalidOffset(SourceError, InputError):
    """A text or value that is no position of a source."""


class ForeignOffset(SourceError, InputError):
    """Two positions of different kinds of source, or without a common order, were compared."""


class SpillFull(SourceError, CapacityError):
    """No room on disk for the transactions that the server streams before their commit."""


class SourceClosed(SourceError, ClosedError):
    """The connection or stream was closed."""
