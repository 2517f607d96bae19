"""LakeSink: the commit of all sinks of tables of Parquet files: what is left of a batch is proved, applied, swapped in.

A format (Delta, Iceberg) gives a handle of a table: what was read of it, and one commit at a time on top of that. What
a commit is, and where the tokens are kept, depends on the format.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final
from zlib import crc32

from headwater.sinks.batch import Batch, Held, refuse_late
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkBusy, SinkSchemaError, StagedLost
from headwater.sinks.lake_rows import LakeRows
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Committed, Mode, Staged, Token
from headwater.sinks.staging import files_of, parts_of, prove_files
from headwater.sinks.storage import names_store_errors
from headwater.sources.table import SourceTable
from headwater.system.retry import Backoff

COMMIT_ATTEMPTS: Final = 20
CONFLICT: Final = Backoff(base=0.01, factor=2, maximum=0.5)
"""The process that was slower waits before it tries again, or it would stay the slower one."""
RETENTION_HOURS: Final = 1


class LakeSink(LakeRows):
    """Stages rows for tables of files, and commits them. It can be pickled."""

    retention_hours: int
    adopt: bool
    format_name: ClassVar[str]

    # -- given by the format ---------------------------------------------------------------------------------------

    @abstractmethod
    def _opened(self, table: SourceTable) -> AbstractContextManager[Any]:
        """A handle of *table*."""

    @abstractmethod
    def _held(self, found: Any, table: SourceTable, query: str, backfill: str = "") -> Held:
        """What its tokens say."""

    @abstractmethod
    def _tokens(self, table: SourceTable, token: Token, batch: Batch, *, is_upsert: bool) -> dict[str, Any]:
        """What the commit of *batch* writes. :param is_upsert: there were rows before this backfill, noted now."""

    @abstractmethod
    def _fence_token(self, table: SourceTable, query: str, generation: int) -> dict[str, Any]: ...

    @abstractmethod
    def _create(self, found: Any, table: SourceTable) -> None: ...

    @abstractmethod
    def _is_ours(self, found: Any, table: SourceTable, query: str) -> bool:
        """Whether Headwater created the table or has written to it."""

    @abstractmethod
    def _require_ours(self, found: Any, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created the table, and *adopt* is not set."""

    @abstractmethod
    def _plan(self, found: Any, table: SourceTable, *, emptied: bool = False) -> Any:
        """What becomes of its columns. :param emptied: no row of before counts any more."""

    @abstractmethod
    def _rewrite(self, found: Any, table: SourceTable, token: Token, plan: Any) -> Rewrite:
        """Its files. :param plan: ``None``: its columns stay as they are."""

    @abstractmethod
    def _put(
        self, found: Any, query: str, generation: int, tokens: dict[str, Any], rewrite: Rewrite | None, plan: Any
    ) -> bool:
        """Commit on top of what was read; ``False``: another commit was faster, and nothing is changed.

        :param plan: ``None``: no row changes.
        """

    def _fitted(self, table: SourceTable, found: Any) -> SourceTable:
        """*table* with the columns that it has here."""
        return table

    def _extended(self, found: Any, plan: Any) -> bool:
        """Give the table columns apart from the commit, where its format needs that; ``False``: look at it again."""
        return True

    def _relaid(self, rewrite: Any, batch: Batch) -> tuple[Batch, list[DataFile]]:
        """*batch* with files that fit the columns, and those that are not needed any more."""
        return batch, []

    @names_store_errors
    def check_table(self, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created the table, and *adopt* is not set."""
        with self._opened(table) as found:
            if found.open():
                self._require_ours(found, table, query)

    @names_store_errors
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the table has."""
        with self._opened(table) as found:
            return self._held(found, table, query, backfill).committed if found.open() else Committed()

    @names_store_errors
    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One commit of the table, which is created or gets its new columns before.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkSchemaError: the columns became what the table cannot become, or others created the table.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        with self._opened(table) as found:
            return self._deliver(found, self._fitted(table, found), token, staged)

    @names_store_errors
    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A commit of the generation alone; the table is created if it does not exist."""
        with self._opened(table) as found:
            if not found.open():
                self._create(found, self._fitted(table, found))
            if self.adopt or self._is_ours(found, table, query):
                self._fence(found, table, query, generation, must=True)

    def _fence(self, found: Any, table: SourceTable, query: str, generation: int, *, must: bool) -> None:
        """A process of an earlier generation that sleeps in its commit must not wake up to files that are removed.

        A generation that is higher than ours is of a query whose state was removed: it began again.
        """
        for _ in range(COMMIT_ATTEMPTS):
            has = self._held(found, table, query).generation
            if has == generation or (has < generation and not must):
                return
            if self._put(found, query, generation, self._fence_token(table, query, generation), None, None):
                return
        raise self._busy(table)

    def _deliver(self, found: Any, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        if not found.open(newest=False):
            self._create(found, table)
        self._require_ours(found, table, token.query)
        for attempt in range(COMMIT_ATTEMPTS):
            held = self._held(found, table, token.query, token.backfill)
            batch = Batch.left_of(staged, token, held.committed)
            if batch is None:
                self._staging(table, token).clean(token)
                return False
            refuse_late(table, token, held.generation)
            plan = self._plan(found, table, emptied=batch.is_truncated)
            if not self._extended(found, plan):
                continue
            if batch.is_empty and not plan.is_changed:
                return True
            if self._commit_batch(found, table, token, held, batch, plan):
                self._staging(table, token).clean(token)
                self._tidy(found, table, token)
                return True
            time.sleep(CONFLICT.delay(attempt + 1))
        raise self._busy(table)

    def _commit_batch(self, found: Any, table: SourceTable, token: Token, held: Held, batch: Batch, plan: Any) -> bool:
        try:
            prove_files(found.storage, table, ((file.path, file.size) for file in files_of(batch.all)))
            self._staging(table, token).prove(parts_of(batch.all))
        except StagedLost:
            found.open()
            if self._held(found, table, token.query, token.backfill).committed == held.committed:
                raise
            return False  # another process committed the batch meanwhile, and its files
        rewrite = self._rewrite(found, table, token, plan)
        has_rows = bool(rewrite.files) and self.mode is not Mode.CHANGES
        is_upsert = bool(batch.history) and has_rows and not held.has_history
        values = self._tokens(table, token, batch, is_upsert=is_upsert)
        overlaps = is_upsert or held.is_upsert
        try:
            if batch.is_truncated and self.mode is Mode.MIRROR:
                rewrite.truncate()
            if plan.must_rewrite:
                rewrite.recast(plan.renamed)
            batch, waste = self._relaid(rewrite, batch)
            waste += self._apply(rewrite, table, token, batch, overlaps=overlaps)
        except BaseException:
            rewrite.discard()
            raise
        if not self._put(found, token.query, token.generation, values, rewrite, plan):
            rewrite.discard()
            return False
        rewrite.settle()
        for file in waste:
            found.storage.remove(file.path)
        return True

    def _tidy(self, found: Any, table: SourceTable, token: Token) -> None:
        """Join small files, and remove what no reader needs. The batch is committed, whatever happens here."""
        if self.mode is not Mode.CHANGES:
            rewrite = self._rewrite(found, table, token, None)
            if rewrite.compact():
                if self._put(found, token.query, token.generation, {}, rewrite, None):
                    rewrite.settle()
                else:
                    rewrite.discard()
        found.tidy(self.retention_hours)

    def _busy(self, table: SourceTable) -> SinkBusy:
        return SinkBusy(
            f"The {self.format_name} table of {table.full_name} was committed to by others {COMMIT_ATTEMPTS} times in "
            "a row.",
            next_step="Look for another query or job that writes to it.",
        )


def file_prefix(query: str, generation: int) -> str:
    """Of the names of files that tasks of *query* write: they tell whose they are."""
    return f"part-{crc32(query.encode()):08x}-{generation}-"


def is_left(path: str, query: str, generation: int) -> bool:
    """Whether a task of *query* of an earlier generation wrote it."""
    start, found, rest = path.partition(f"part-{crc32(query.encode()):08x}-")
    number = rest.partition("-")[0]
    return bool(found) and not start and number.isdigit() and int(number) < generation


def of_another(table: SourceTable, what: str, owner: str, option: str) -> SinkSchemaError:
    """The error of a target that has the rows of another table."""
    return SinkSchemaError(
        table.full_name,
        f"{what} has the rows of {owner}.",
        next_step=f"Set another {option} in [[sink]], or move what is there away; then restart.",
    )


def not_ours(table: SourceTable, what: str, option: str) -> SinkSchemaError:
    """The error of a table that others created. :param option: of the sink, that names where its tables are."""
    return SinkSchemaError(
        table.full_name,
        f"{what} was not created by Headwater.",
        next_step=f"Move it away; or set adopt = true (to write into it) or another {option} in [[sink]], and restart.",
    )
