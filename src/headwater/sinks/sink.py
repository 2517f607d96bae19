"""Sink: where the tables of a query are delivered, in two steps: tasks stage, one process commits.

What is committed carries its token **in the sink itself**, in the same transaction: a batch that is delivered again
finds its token there and changes nothing. Staging may happen more than once for one batch, and its results be thrown
away; it never shows to readers of the sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import pyarrow as pa

from headwater.sinks.errors import SinkInputError
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable


class Mode(Enum):
    """What a sink's table has.

    ``MIRROR``: the rows as they are now. ``CHANGES``: every change, appended. ``HISTORY``: every version of every row,
    with the time from which and up to which it was the row (:mod:`headwater.sinks.versions`).
    """

    MIRROR = "mirror"
    CHANGES = "changes"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kind of sink can do.

    :ivar modes: that it has; the first is the one that it has by itself.
    :ivar readable: :meth:`Sink.shown` gives its rows, so that they can be compared with the source.
    :ivar refuses_rows: it may refuse single rows that are right at the source: those can be parked.
    :ivar connections: how many of its tables one process commits at a time.
    """

    modes: tuple[Mode, ...]
    readable: bool = True
    refuses_rows: bool = False
    connections: int = 8


@dataclass(frozen=True, slots=True)
class Token:
    """What one batch of one table is called, for good.

    :ivar query: the name of the query. :ivar backfill: names its state: plans of another one are others.
    :ivar after: the batch has the epochs after this one. :ivar epoch: … up to this one.
    :ivar plan: its newest plan. :ivar attempt: of that plan's snapshot.
    :ivar generation: of the processes that deliver: the next start has the next one. It is no part of what the batch is
        called; it tells what was staged by processes that are gone.
    """

    query: str
    backfill: str
    after: int
    epoch: int
    plan: int
    attempt: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """What a sink has of a table: the epoch up to which it has the changes, the plan up to which it has history."""

    epoch: int = 0
    plan: int = 0
    attempt: int = 0


class StagedPiece(Protocol):
    """A file, a relation, or rows that travel with the answer of the task."""

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int: ...


class StagedDetail(Protocol):
    """What the sinks of one family stage."""

    @property
    def pieces(self) -> Sequence[StagedPiece]: ...


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged; it can be pickled.

    :ivar is_snapshot: history, or changes.
    :ivar truncated: the epoch and seq at which the table was truncated: what the sink had of it before goes first.
    :ivar after: of changes that are staged without rows that the sink has: up to which epoch it had them then.
    :ivar ranges: of history: rows of the sink in these ranges of keys that were not read there are gone.
    :ivar order: of the keys, which decides which rows lie in *ranges*.
    :ivar detail: the sink's own, a frozen dataclass: file names and the like.
    """

    table: SourceTable
    token: Token
    is_snapshot: bool
    rows: int
    size: int = 0
    truncated: tuple[int, int] | None = None
    after: int | None = None
    ranges: tuple[KeyRange, ...] | None = None
    order: KeyOrder | None = None
    detail: Any = None

    @classmethod
    def of(cls, table: SourceTable, token: Token, is_snapshot: bool, detail: StagedDetail, **more: Any) -> Self:
        """With the rows and bytes of *detail*. :param more: the other attributes."""
        rows, size = (sum(getattr(piece, name) for piece in detail.pieces) for name in ("rows", "size"))
        return cls(table, token, is_snapshot, rows, size, detail=detail, **more)


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """What a task stages of history.

    :ivar position: the ``_position`` of its rows. :ivar commit_time_us: their ``_commit_timestamp``.
    :ivar replaces: the sink may have rows in *ranges* already: they are replaced, rows that are gone are deleted.
    :ivar changed: keys that may be in the sink already, as hashes (:func:`headwater.stream.hash`): those rows are
        upserted, all others are new.
    :ivar order: with *replaces* and ``KEY``: the order of the keys, which tells the rows that lie in *ranges*.
    :ivar columns: only these (and the key) are of interest: a new column of rows that the sink has.
    :ivar rereads: the sink was given rows of the table before.
    """

    kind: SplitKind
    ranges: tuple[KeyRange, ...]
    position: bytes
    commit_time_us: int
    replaces: bool = False
    changed: Any = None
    columns: tuple[str, ...] | None = None
    order: KeyOrder | None = None
    rereads: bool = False


class Sink(Protocol):
    """One place with a table for each table of a query. It can be pickled; it holds no connection.

    Its parameters are the keys of ``[[sink]]`` in a pipeline; those whose values are secret are not in its ``repr``.
    """

    capabilities: ClassVar[Capabilities]

    @property
    def name(self) -> str:
        """Kind and place, without secrets."""
        ...

    @property
    def mode(self) -> Mode: ...

    def check(self) -> None:
        """:raises SinkError: it cannot be written to; what to do."""
        ...

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What it has of *table*."""
        ...

    def stage_changes(
        self,
        table: SourceTable,
        token: Token,
        batches: Iterator[pa.RecordBatch],
        truncated: tuple[int, int] | None,
    ) -> Staged:
        """Stage rows of the table's log (its columns, then those that the log adds), of a range of vnodes.

        They are in the order of the log for each key. Rows before *truncated* (epoch, seq) are void.
        """
        ...

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """Stage rows of the table's history: its own columns alone."""
        ...

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """Make one batch of *table* visible, changes first and history after them; ``False``: it was there already.

        :raises SinkError: nothing of it is visible, or all of it.
        """
        ...

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """Refuse commits of generations of *query* before *generation* from now on.

        Durable when it returns, also for a commit that is under way in a frozen process: it is visible already, or
        never will be. A target that does not exist yet is created where it cannot be fenced otherwise.
        """
        ...

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what *query* staged for *table* before *generation* and did not commit.

        Called when a query starts, after what was pending is committed: nobody commits those any more. Where a frozen
        commit needs what is removed, the table is fenced first.
        """
        ...

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows as readers see them now, with exactly *columns*, in the types of
        :func:`~headwater.sinks.types.sink_schema`; nothing where nothing was delivered.

        :raises SinkInputError: its rows cannot be read again (:attr:`Capabilities.readable`).
        """
        ...


@runtime_checkable
class KeepingSink(Protocol):
    """What a sink has beside that keeps tables of our own, as they were at any epoch that somebody needs."""

    @property
    def interval_seconds(self) -> float:
        """About how long it waits between two batches of changes."""
        ...

    def choose(self, tables: Sequence[str], upto: int) -> int:
        """Up to where the next batch of *tables* may go, *upto* at most. Durable: nobody pins an earlier epoch then."""
        ...

    def may_read(self, table: str, *, wanted: bool) -> str | None:
        """Why history of *table* cannot be read now. ``None``: nobody pins it from now on, while it is *wanted*."""
        ...

    def complete(self, table: SourceTable, query: str, backfill: str, epoch: int) -> None:
        """It has the table as it was at *epoch*."""
        ...

    def incomplete(self, table: SourceTable, query: str, backfill: str, progress: Mapping[str, Any]) -> None:
        """History of the table is missing, or about to be read once more."""
        ...


@runtime_checkable
class TargetedSink(Protocol):
    """A sink that writes each table to a target of its own: a directory, a topic, a table."""

    def target(self, table: SourceTable) -> str:
        """What the target of *table* is called; the same for two tables means that they share it."""
        ...


def check_targets(sink: Sink, tables: Iterable[SourceTable]) -> None:
    """Refuse tables that share a target. :raises SinkInputError: two of *tables* do; both are named."""
    if not isinstance(sink, TargetedSink):
        return
    owners: dict[str, SourceTable] = {}
    for table in tables:
        target = sink.target(table)
        owner = owners.setdefault(target, table)
        if owner.full_name != table.full_name:
            raise SinkInputError(
                f"Tables {owner.full_name} and {table.full_name} have the same target {target} at {sink.name}.",
                next_step="Deliver one of them to another [[sink]] (its key `tables` says which), or change the option"
                " that names the targets.",
            )
