"""RowSink: a base for sinks that are written to by the process that commits, row by row or message by message.

It stages what tasks read in files of its option ``staging``, finds out what of a batch is left, and gives that to the
sink as a :class:`~headwater.sinks.row_batch.RowBatch`. A sink of your own is a frozen dataclass with three methods:

``committed``
    what it has of a table, as it keeps it itself.
``write``
    the steps of a batch **and** ``batch.after`` in one transaction of its own; if ``batch.has`` is not what it has any
    more, nothing, and :class:`Overtaken`. That makes it exactly once. One that has no transactions derives from
    :class:`~headwater.sinks.at_least_once.AtLeastOnceSink` instead, and says so.
``name``
    kind and place, without secrets.

``ensure`` (make the table), ``keys`` (for parts of a table that are read again), ``begin``, ``check`` and ``shown`` may
be given, too. Modes are ``MIRROR`` and ``CHANGES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from headwater.log_store.columns import EPOCH
from headwater.sinks.batch import Batch, replaced_ranges
from headwater.sinks.change_rows import change_rows, history_rows
from headwater.sinks.errors import SinkBusy, SinkError, SinkInputError, SinkSchemaError, StagedLost
from headwater.sinks.fold import DELETED, fold, folded_schema
from headwater.sinks.row_batch import RowBatch
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import StagedFiles, Staging, parts_of
from headwater.sinks.storage import Storage
from headwater.sinks.types import conform, sink_type
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable

COMMIT_ATTEMPTS: Final = 20


class Overtaken(SinkError):
    """The sink has something else than ``batch.has``: another process committed in between. Nothing was written."""

    def __init__(self) -> None:
        super().__init__("Another process committed to the table in between.", next_step="Look at the batch again.")


@dataclass(frozen=True, kw_only=True)
class RowSink(ABC):
    """A sink whose rows are written by the process that commits. It can be pickled; it holds no connection.

    :param staging: a directory for rows on their way; a pipeline gives one in its work folder.
    :raises SinkInputError: a mode that it does not have.
    """

    capabilities: ClassVar[Capabilities] = Capabilities((Mode.MIRROR,), readable=False)
    is_exactly_once: ClassVar[bool] = True
    """Whether the token is in the same transaction as the rows. Otherwise a crash in between repeats a batch."""

    staging: str
    mode: Mode = Mode.MIRROR

    def __post_init__(self) -> None:
        if self.mode not in self.capabilities.modes or self.mode is Mode.HISTORY:
            raise SinkInputError(
                f"{type(self).__name__} has no mode {self.mode.value!r}.",
                next_step=f"Use {' or '.join(mode.value for mode in self.capabilities.modes)}.",
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """Kind and place, without secrets."""

    @abstractmethod
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What it has of *table*, as :meth:`write` has kept it; ``Committed()`` where there is nothing."""

    @abstractmethod
    def write(self, table: SourceTable, token: Token, batch: RowBatch) -> None:
        """Write ``batch.steps()`` and ``batch.after`` in one transaction.

        :raises Overtaken: it does not have ``batch.has``; nothing was written.
        """

    def ensure(self, table: SourceTable) -> None:  # noqa: B027 - not all need it
        """Make what is written to, and give it columns that it lacks; called before each batch that is not empty."""

    def begin(self, table: SourceTable, token: Token) -> Committed:
        """What it has of *table* now that this process wants to write *token*."""
        return self.committed(table, token.query, token.backfill)

    def keys(self, table: SourceTable) -> Iterator[pa.Table]:
        """The keys that it has, in the types of :meth:`own_schema`: asked for when a part of a table is read again."""
        raise SinkInputError(
            f"{self.name} cannot replace a part of {table.full_name}: it does not tell which keys it has.",
            next_step="Read the table again with `headwater resnapshot` as a whole, or give the sink a method `keys`.",
        )

    def check(self) -> None:
        """:raises SinkError: it cannot be written to; what to do."""
        Storage(self.staging, is_private=True).check()

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """:raises SinkInputError: its rows cannot be read again."""
        raise SinkInputError(f"The rows of {self.name} cannot be read again.", next_step="Leave it out of verify.")

    def own_schema(self, table: SourceTable) -> pa.Schema:
        """The columns of *table* in the types of :mod:`headwater.sinks.types`.

        :raises SinkSchemaError: a type that has none of these.
        """
        fields: list[pa.Field] = []
        for column in table.columns:
            kind = sink_type(column.type)
            if kind is None:
                raise SinkSchemaError(
                    table.full_name,
                    f"column {column.name!r} has type {column.type}, for which there is none in a sink.",
                    next_step="Leave the column out of the capture.",
                )
            fields.append(pa.field(column.name, kind))
        return pa.schema(fields)

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Mirror: folded rows. Changes: every row with its epoch, so that the commit can leave out what is there."""
        own = self.own_schema(table)
        if self.mode is Mode.CHANGES:
            rows = (change_rows(batch, own).append_column(EPOCH, batch.column(EPOCH)) for batch in batches)
            return self._stage(table, token, rows, is_snapshot=False)
        folded = conform(fold(table, batches, truncated), folded_schema(own))
        return self._stage(table, token, iter([folded]), is_snapshot=False, truncated=truncated)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """Mirror: rows as folded ones. Changes: each row as an insert."""
        own = self.own_schema(table)
        if self.mode is Mode.CHANGES:
            return self._stage(table, token, (history_rows(batch, own, part) for batch in batches), is_snapshot=True)
        unknown = None
        if part.columns is not None:
            written = {*part.columns, *table.key_columns}
            unknown = ",".join(name for name in own.names if name not in written) or None
        rows = (_as_folded(batch, own, unknown) for batch in batches)
        return self._stage(
            table,
            token,
            rows,
            is_snapshot=True,
            only_existing=part.columns is not None,
            ranges=replaced_ranges(table, part) if part.replaces else None,
            order=part.order,
        )

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """Write what is left of the batch.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a later process removed what was staged.
        """
        if not staged:
            return False
        staging = self._staged_by(table, token.query)
        for _ in range(COMMIT_ATTEMPTS):
            has = self.begin(table, token)
            left = Batch.left_of(staged, token, has)
            if left is None:
                staging.clean(token)
                return False
            if left.is_empty:
                return True
            staging.prove(parts_of(left.all))
            self.ensure(table)
            after = _after(has, token, left)
            try:
                self.write(table, token, RowBatch(table, self.mode, has, after, left, staging.gather, self.keys))
            except Overtaken:
                continue
            except FileNotFoundError as error:
                raise StagedLost(
                    f"What was staged for {table.full_name} is gone: a later process removed it.",
                    next_step="The batch is staged anew.",
                ) from error
            staging.clean(token)
            return True
        raise SinkBusy(
            f"Others committed to {table.full_name} at {self.name} {COMMIT_ATTEMPTS} times in a row.",
            next_step="Look for another query that delivers the same table there.",
        )

    def fence(self, table: SourceTable, query: str, generation: int) -> None:  # noqa: B027 - not all can
        """Refuse what earlier generations write from now on. A sink that cannot relies on ``batch.has`` alone."""

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what is staged."""
        self._staged_by(table, query).abort(generation)

    def _stage(
        self,
        table: SourceTable,
        token: Token,
        tables: Iterator[pa.Table],
        *,
        is_snapshot: bool,
        only_existing: bool = False,
        **more: Any,
    ) -> Staged:
        parts = tuple(self._staged_by(table, token.query).put_all(token, tables))
        return Staged.of(table, token, is_snapshot, StagedFiles(parts=parts, only_existing=only_existing), **more)

    def _staged_by(self, table: SourceTable, query: str) -> Staging:
        return Staging(Storage(self.staging, is_private=True), table, query)


def _as_folded(batch: pa.RecordBatch, own: pa.Schema, unknown: str | None) -> pa.Table:
    rows = conform(pa.Table.from_batches([batch]), own)
    rows = rows.append_column(pa.field(DELETED, pa.bool_(), False), pa.repeat(pa.scalar(False), rows.num_rows))
    return rows.append_column(UNAVAILABLE_COLUMN, pa.repeat(pa.scalar(unknown, pa.string()), rows.num_rows))


def _after(has: Committed, token: Token, left: Batch) -> Committed:
    epoch = max(has.epoch, token.epoch) if left.changes else has.epoch
    return Committed(epoch, token.plan, token.attempt) if left.history else Committed(epoch, has.plan, has.attempt)
