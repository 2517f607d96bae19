"""SqlSink: what sinks in databases have in common: what tasks stage, and the one transaction that commits it.

A *target* (:mod:`headwater.sinks.sql_target`) is a session with the database; it knows the SQL. Here is what is done
with it: the batch is checked against the tokens, which are rows of a table of ours beside the tables, locked for the
transaction; its changes and then its history are merged; the tokens are written; the transaction is committed.
Relations in which rows were staged are dropped after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater import failpoints
from headwater.errors import TransientError
from headwater.sinks.batch import Batch, KnownRows, refuse_late, replaced_ranges, rows_after, truncated_us
from headwater.sinks.change_rows import change_rows, history_rows
from headwater.sinks.errors import SinkBusy, SinkSchemaError, StagedLost
from headwater.sinks.fold import fold, folded_schema
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.sql_staged import (
    Seen,
    SqlPart,
    StagedRelations,
    is_done,
    is_left,
    packed,
    relation_name,
)
from headwater.sinks.sql_table import OnDrop, OnRename, SqlTable, check_table_name, place_name
from headwater.sinks.sql_target import SqlDriver, Target
from headwater.sinks.types import conform
from headwater.sinks.versions import VALID_FROM, as_staged, history_versions, version_pieces
from headwater.sources.table import SourceTable
from headwater.system.pool import Pool

INLINE_BYTES: Final = 256 << 10

BEFORE_STAGE = failpoints.register("sink.sql.before_stage")
AFTER_STAGE = failpoints.register("sink.sql.after_stage")
BEFORE_COMMIT = failpoints.register("sink.sql.before_commit")
AFTER_COMMIT = failpoints.register("sink.sql.after_commit")
BEFORE_CLEAN = failpoints.register("sink.sql.before_clean")
AFTER_CLEAN = failpoints.register("sink.sql.after_clean")


class SqlSink(ABC):
    """A sink in a database. Subclasses are dataclasses with the options."""

    capabilities: ClassVar = Capabilities((Mode.MIRROR, Mode.CHANGES, Mode.HISTORY), refuses_rows=True)
    sessions: ClassVar[Pool[Target]]

    dsn: str
    mode: Mode
    table: str
    on_rename: OnRename
    on_drop: OnDrop

    def __post_init__(self) -> None:
        check_table_name(self.table)

    @property
    def name(self) -> str:
        driver = self._driver
        return f"{driver.name}:{driver.address(self.dsn)}"

    @property
    @abstractmethod
    def _driver(self) -> SqlDriver:
        """:raises SinkDriverMissing: its library is not installed."""

    @property
    @abstractmethod
    def _own(self) -> str:
        """Where our own tables are."""

    @abstractmethod
    def _place(self, table: SourceTable) -> tuple[str, str]:
        """Schema (database) and name of *table* there."""

    def target(self, table: SourceTable) -> str:
        """The name of *table* there."""
        return place_name(self._place(table))

    @abstractmethod
    def _table(self, table: SourceTable) -> SqlTable:
        """:raises SinkSchemaError: it cannot be there."""

    @contextmanager
    def _target(self, table: SourceTable | None = None) -> Iterator[Target]:
        """A session. Errors of the server leave the block as errors of our tree, which name *table*."""
        driver, own = self._driver, self._own
        address = driver.address(self.dsn)

        def connect() -> Target:
            return driver.target(driver.connect(address), address, own, self.on_rename, self.on_drop)

        try:
            with self.sessions.borrowed((self.dsn, own, self.on_rename, self.on_drop), connect) as target:
                yield target
        except driver.error as error:
            raise driver.sink_error(error, address, "" if table is None else table.full_name, own) from None

    def check(self) -> None:
        """:raises SinkError: it cannot be reached, or we may not write there."""
        with self._target() as target:
            target.prepare()

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the tokens say; nothing where the table is gone."""
        with self._target(table) as target:
            return target.committed(self._table(table), query, backfill)

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Mirror: the folded rows. History: versions, in pieces. Changes: every row."""
        made = self._table(table)
        if self.mode is Mode.MIRROR:
            folded = conform(fold(table, batches, truncated), folded_schema(made.own))
            return _staged(table, token, False, [self._put(made, token, iter([folded]))], truncated=truncated)
        after = max(token.after, self.committed(table, token.query, token.backfill).epoch)
        later = (rows_after(batch, after) for batch in batches)
        if self.mode is Mode.CHANGES:
            rows = (change_rows(batch, made.own) for batch in later)
            return _staged(table, token, False, [self._put(made, token, rows)], after=after)
        parts: list[SqlPart | None] = []
        since: list[int] = []
        for piece in version_pieces(table, made.own, later, truncated):
            parts.append(self._put(made, token, iter([piece])))
            since.append(pc.min(piece.column(VALID_FROM)).cast(pa.int64()).as_py())
        return _staged(table, token, False, parts, truncated=truncated, after=after, at_us=min(since, default=None))

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """Rows as the mode has them; those that may be there apart, if the key does not tell."""
        made = self._table(table)
        ranges = replaced_ranges(table, part) if part.replaces and self.mode is not Mode.CHANGES else None
        columns: tuple[str, ...] | None = None
        is_apart = made.is_whole and self.mode is Mode.MIRROR
        known = KnownRows(made.key, part.changed if is_apart else None)
        if self.mode is Mode.CHANGES:
            rows = (history_rows(batch, made.own, part) for batch in batches)
        elif part.columns is not None and self.mode is Mode.HISTORY:
            columns = tuple(name for name in part.columns if name in made.own.names)
            others = ",".join(name for name in made.own.names if name not in {*columns, *made.key})
            rows = (as_staged(history_versions(batch, made.own, part), others or None) for batch in batches)
        elif part.columns is not None:
            columns = tuple(name for name in part.columns if name in made.own.names)
            schema = pa.schema([one for one in made.own if one.name in {*made.key, *columns}])
            rows = (conform(pa.Table.from_batches([batch]), schema) for batch in batches)
        elif self.mode is Mode.HISTORY:
            rows = (history_versions(batch, made.own, part) for batch in batches)
        else:
            rows = (conform(pa.Table.from_batches([one]), made.own) for one in known.others(batches))
        parts = [self._put(made, token, rows)]
        if known.rows:
            staged = self._put(made, token, iter([conform(pa.Table.from_batches(known.rows), made.own)]))
            parts.append(staged and replace(staged, is_known=True))
        return _staged(
            table, token, True, parts, ranges=ranges, order=part.order, columns=columns, at_us=part.commit_time_us
        )

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One transaction.

        :raises OtherAttempt: the history of this plan, or a part of the changes, came from another process.
        :raises SinkFenced: a later generation delivers. :raises SinkSchemaError: the table cannot take its columns.
        :raises SinkRowError: it does not take a row. :raises StagedLost: what was staged is gone.
        """
        if not staged:
            return False
        made = self._table(table)
        with self._target(table) as target:
            target.prepare()
            is_new = self._deliver(target, made, token, staged)
            failpoints.hit(AFTER_COMMIT)
            if any(part.relation for one in staged for part in one.detail.parts):
                failpoints.hit(BEFORE_CLEAN)
                target.drop([name for name in target.relations() if is_done(name, made, token)])
                failpoints.hit(AFTER_CLEAN)
        return is_new

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """The generation beside the tokens of the table, whether it exists or not."""
        made = self._table(table)
        with self._target(table) as target:
            target.prepare()
            target.fence(made, query, generation)

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Drop the relations of earlier generations, which commit nothing from now on."""
        self.fence(table, query, generation)
        made = self._table(table)
        with self._target(table) as target:
            failpoints.hit(BEFORE_CLEAN)
            target.drop([name for name in target.relations() if is_left(name, made, query, generation)])

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows as they are now."""
        with self._target(table) as target:
            for rows in target.read(self._table(table), columns):
                yield from rows.to_batches()

    def refused(self, table: SourceTable, rows: pa.Table) -> list[tuple[int, str]]:
        """Which of *rows*, in the table's own columns, the target refuses, and why; nothing is written.

        Found by halves: a try for every half that has one, so few of many are found in few tries.
        """
        made = self._table(table)
        rows = conform(rows, made.own).combine_chunks()
        found: list[tuple[int, str]] = []
        with self._target(table) as target:
            target.prepare()
            waiting = [(0, rows.num_rows)]
            while waiting:
                start, end = waiting.pop()
                reason = target.refusal(made, rows.slice(start, end - start)) if end > start else None
                if reason is not None and end - start == 1:
                    found.append((start, reason))
                elif reason is not None:
                    middle = (start + end) // 2
                    waiting += [(middle, end), (start, middle)]
        return found

    def _deliver(self, target: Target, made: SqlTable, token: Token, staged: Sequence[Staged]) -> bool:
        if target.shapes_apart:
            left = Batch.left_of(staged, token, target.committed(made, token.query, token.backfill))
            if left is None:
                return False
            self._shape(target, made, left, partial(self._check_left, target, made, token, staged))
            if left.is_empty:
                return True
        with target.transaction():
            held = target.lock(made, token)
            batch = Batch.left_of(staged, token, held.committed)
            if batch is None:
                return False
            refuse_late(made.source, token, held.generation)
            self._prove(target, made, batch)
            if not target.shapes_apart:
                self._shape(target, made, batch)
            if batch.is_empty:
                return True
            is_upsert = held.is_upsert
            if batch.history and held.committed.plan == 0 and made.is_whole and self.mode is Mode.MIRROR:
                is_upsert = target.has_rows(made)
            self._apply(target, made, batch, is_upsert=is_upsert)
            target.record(made, token, batch, is_upsert=is_upsert)
            failpoints.hit(BEFORE_COMMIT)
        return True

    def _check_left(self, target: Target, made: SqlTable, token: Token, staged: Sequence[Staged]) -> None:
        """Before columns are changed outside of the transaction of the batch.

        :raises SinkFenced: a later generation delivers. :raises SinkBusy: another process has committed the batch.
        """
        held = target.held(made, token)
        if Batch.left_of(staged, token, held.committed) is None:
            raise SinkBusy(f"Another process committed this batch of {made.name}.", next_step="Try again.")
        refuse_late(made.source, token, held.generation)

    def _prove(self, target: Target, made: SqlTable, batch: Batch) -> None:
        """:raises StagedLost: rows that were staged are not there any more, as after a crash of the server."""
        for part in (part for one in batch.all for part in one.detail.parts if part.relation is not None):
            rows, checksum = target.proof(part.relation)
            if rows != part.rows:
                raise _lost(made, f"{part.relation} has {rows:,} of the {part.rows:,} rows that were staged.")
            if checksum != part.checksum:
                raise _lost(made, f"{part.relation} has other rows than those that were staged.")

    def _shape(self, target: Target, made: SqlTable, batch: Batch, check: Callable[[], None] | None = None) -> None:
        """Columns of rows that go with this batch may become any others."""
        is_emptied = batch.is_truncated and self.mode is not Mode.CHANGES
        try:
            target.shape(made, partial(self._empty, target, made, batch) if is_emptied else None, check)
        except self._driver.error as error:  # a view on it, another owner, …: this table's alone
            name = made.source.full_name
            found = self._driver.sink_error(error, self._driver.address(self.dsn), name, self._own)
            if isinstance(found, TransientError):
                raise found from None
            step = "Allow the change there: the server's log has the statement."
            raise SinkSchemaError(name, f"{made.name} cannot be changed. {found.message}", next_step=step) from None

    def _empty(self, target: Target, made: SqlTable, batch: Batch) -> None:
        if self.mode is Mode.MIRROR:
            target.clear(made)
        else:
            target.end_versions(made, truncated_us(batch.changes, (one.detail.at_us for one in batch.changes)))

    def _apply(self, target: Target, made: SqlTable, batch: Batch, *, is_upsert: bool) -> None:
        if self.mode is Mode.CHANGES:
            for source in target.sources(made, batch.all):
                target.append(made, source)
            return
        if batch.is_truncated:
            self._empty(target, made, batch)
        for source in target.sources(made, batch.changes):
            if self.mode is Mode.MIRROR:
                target.merge(made, source)
            else:
                target.add_versions(made, source)
        for one in batch.history:
            self._apply_history(target, made, one, is_upsert=is_upsert)

    def _apply_history(self, target: Target, made: SqlTable, one: Staged, *, is_upsert: bool) -> None:
        detail: StagedRelations = one.detail
        sources = [target.source(made, part) for part in detail.parts]
        if one.ranges is not None:
            kept = () if made.is_whole and self.mode is Mode.MIRROR else sources
            for keys in target.keys_in(made, one):
                target.remove(made, keys, kept, detail.at_us or 0)
        is_empty = not target.has_rows(made)
        for part, source in zip(detail.parts, sources, strict=True):
            if detail.columns is not None and self.mode is Mode.HISTORY:
                target.merge_versions(made, source, only_existing=True)
            elif detail.columns is not None:
                target.set_columns(made, source, detail.columns)
            elif is_empty or (made.is_whole and self.mode is Mode.MIRROR and not (is_upsert or part.is_known)):
                target.append(made, source)
            elif self.mode is Mode.MIRROR:
                target.merge(made, source)
            else:
                target.merge_versions(made, source)

    def _put(self, made: SqlTable, token: Token, tables: Iterator[pa.Table]) -> SqlPart | None:
        """Stage rows: a few inside, many in a relation; ``None`` if there are none."""
        seen = Seen(made)
        tables = seen.all(one for one in tables if one.num_rows)
        held: list[pa.Table] = []
        size = 0
        for rows in tables:
            held.append(rows)
            size += rows.nbytes
            if size > INLINE_BYTES:
                relation = relation_name(made, token)
                failpoints.hit(BEFORE_STAGE)
                with self._target(made.source) as target:
                    target.prepare()
                    count, size = target.stage(made, relation, rows.schema, chain(held, tables))
                    kept, checksum = target.proof(relation)
                if kept != count:
                    raise _lost(made, f"{kept:,} of {count:,} rows are in {relation}, where they were staged.")
                failpoints.hit(AFTER_STAGE)
                return seen.part(count, size, rows.schema, relation=relation, checksum=checksum)
        if not held:
            return None
        joined = pa.concat_tables(held)
        return seen.part(joined.num_rows, size, joined.schema, inside=packed(joined))


def _staged(
    table: SourceTable,
    token: Token,
    is_snapshot: bool,
    parts: Sequence[SqlPart | None],
    *,
    columns: tuple[str, ...] | None = None,
    at_us: int | None = None,
    **more: Any,
) -> Staged:
    detail = StagedRelations(tuple(part for part in parts if part is not None), columns, at_us)
    return Staged.of(table, token, is_snapshot, detail, **more)


def _lost(made: SqlTable, what: str) -> StagedLost:
    return StagedLost(
        f"Table {made.source.full_name}: {what}", next_step="No action needed: the batch is staged again."
    )
