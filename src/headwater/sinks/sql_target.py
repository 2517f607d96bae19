"""Target: a session with the database of a sink, as :class:`headwater.sinks.sql_sink.SqlSink` uses it.

One class per database implements it. A *source* is what :meth:`Target.source` gives: staged rows that statements can
name. All statements of a batch run in one transaction. The library of a database is a :class:`SqlDriver`: it is loaded
when a sink is first used, not when it is created, so that a missing one is reported then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from headwater import failpoints
from headwater.errors import HeadwaterError
from headwater.sinks.batch import Batch, Held, in_ranges, is_all
from headwater.sinks.errors import SinkDriverMissing, SinkRowError
from headwater.sinks.sink import Committed, Mode, Staged, Token
from headwater.sinks.sql_staged import SqlPart, unpacked
from headwater.sinks.sql_table import SqlTable
from headwater.system.pool import Pool

REST_SECONDS: Final = 5.0

BEFORE_PREPARE = failpoints.register("sink.sql.before_prepare")
AFTER_PREPARE = failpoints.register("sink.sql.after_prepare")


class Target(ABC):
    """A session with the database of a sink. A *source* is what :meth:`source` gives: rows that statements can name."""

    shapes_apart: ClassVar[bool] = False
    """A table is made and changed before the transaction, because that would end it."""

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def prepare(self) -> None:
        """Make our own tables, if they are not there."""

    @abstractmethod
    def committed(self, table: SqlTable, query: str, backfill: str) -> Committed: ...

    @abstractmethod
    def stage(self, table: SqlTable, relation: str, schema: pa.Schema, rows: Iterator[pa.Table]) -> tuple[int, int]:
        """Make *relation* with *rows*; how many they were, and about how many bytes."""

    @abstractmethod
    def proof(self, relation: str) -> tuple[int, int]:
        """How many rows *relation* has now, and a checksum of them that does not depend on their order."""

    @abstractmethod
    def shape(
        self, table: SqlTable, empty: Callable[[], None] | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """Create the table, or give it the columns that it lacks.

        :param empty: no row of before counts any more: called first, it removes them.
        :param check: where :attr:`shapes_apart` is set: called once no other session can change the table. What it
            raises ends this.
        """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def held(self, table: SqlTable, token: Token) -> Held:
        """What the tokens say now; they are not locked."""

    @abstractmethod
    def lock(self, table: SqlTable, token: Token) -> Held: ...

    @abstractmethod
    def record(self, table: SqlTable, token: Token, batch: Batch, *, is_upsert: bool) -> None: ...

    @abstractmethod
    def fence(self, table: SqlTable, query: str, generation: int) -> None:
        """From now on batches of earlier generations are not committed."""

    @abstractmethod
    def relations(self) -> list[str]:
        """All that is staged, by anybody."""

    @abstractmethod
    def drop(self, relations: Sequence[str]) -> None: ...

    @abstractmethod
    def read(self, table: SqlTable, columns: Sequence[str], *, current: bool = False) -> Iterator[pa.Table]:
        """Rows of the table; with *current* the current versions alone. Nothing where there is no table."""

    @abstractmethod
    def has_rows(self, table: SqlTable) -> bool: ...

    @abstractmethod
    def source(self, table: SqlTable, part: SqlPart) -> Any: ...

    @abstractmethod
    def rows_source(self, table: SqlTable, rows: pa.Table, part: SqlPart) -> Any:
        """The *rows* of *part*, which are in memory."""

    @abstractmethod
    def append(self, table: SqlTable, source: Any) -> None:
        """All rows, as they are."""

    @abstractmethod
    def merge(self, table: SqlTable, source: Any) -> None:
        """Mirror: upsert rows by key, delete those that are gone."""

    @abstractmethod
    def set_columns(self, table: SqlTable, source: Any, columns: Sequence[str]) -> None:
        """Set *columns* of rows that are there."""

    @abstractmethod
    def remove(self, table: SqlTable, keys: Any, kept: Sequence[Any], at_us: int) -> None:
        """Delete rows (end current versions) with one of *keys*, or all, but those that the sources *kept* have."""

    @abstractmethod
    def add_versions(self, table: SqlTable, source: Any) -> None:
        """End the versions that rows close, and begin theirs."""

    @abstractmethod
    def merge_versions(self, table: SqlTable, source: Any, *, only_existing: bool = False) -> None:
        """Begin the versions of rows that are not the current ones already.

        :param only_existing: of keys that have a current version alone; it tells what the rows do not.
        """

    @abstractmethod
    def end_versions(self, table: SqlTable, at_us: int) -> None:
        """End all current versions."""

    @abstractmethod
    def clear(self, table: SqlTable) -> None:
        """Delete all rows."""

    @abstractmethod
    def refusal(self, table: SqlTable, rows: pa.Table) -> str | None:
        """Why the table does not take *rows*, if it does not. Nothing is left of the try."""

    def sources(self, table: SqlTable, staged: Sequence[Staged]) -> Iterator[Any]:
        """What was staged, in order; what came inside from several tasks is one, for it is of different keys."""
        inside: list[SqlPart] = []
        for one in staged:
            parts: tuple[SqlPart, ...] = one.detail.parts
            if len(parts) == 1 and parts[0].inside is not None and (not inside or parts[0].schema == inside[0].schema):
                inside += parts
                continue
            for part in parts:
                yield self.source(table, part)
        if inside:
            joined = replace(
                inside[0],
                deletes=any(part.deletes for part in inside),
                adds=any(part.adds for part in inside),
                unavailable=tuple(sorted({name for part in inside for name in part.unavailable})),
                null_keys=any(part.null_keys for part in inside),
            )
            yield self.rows_source(table, pa.concat_tables([unpacked(part) for part in inside]), joined)

    def keys_in(self, table: SqlTable, staged: Staged) -> Iterator[Any]:
        """The keys that the table has in the ranges of *staged*, as sources; ``None`` where that is all of them."""
        if is_all(staged.ranges or ()):
            yield None
            return
        found: list[pa.Table] = []
        for rows in self.read(table, table.key, current=table.mode is Mode.HISTORY):
            keys = [rows.column(name) for name in table.key]
            found.append(rows.filter(pa.array(in_ranges(staged, keys))))
        found = [rows for rows in found if rows.num_rows]
        if found:
            joined = pa.concat_tables(found)
            yield self.rows_source(table, joined, SqlPart(joined.num_rows, joined.nbytes, joined.schema))


def target_pool() -> Pool[Target]:
    """Of one kind of database; a session that rested for a while may be closed at the other end."""
    return Pool(lambda target: target.is_alive(), lambda target: target.close(), rest_seconds=REST_SECONDS)


def row_reason(error: HeadwaterError) -> str | None:
    """Why a table does not take a row; ``None``: *error* is about something else."""
    if not isinstance(error, SinkRowError):
        return None
    return error.reason if error.column is None else f"column {error.column}: {error.reason}"


@dataclass(frozen=True, slots=True)
class SqlDriver:
    """The library of one kind of database.

    :ivar name: of the kind. :ivar error: what all errors of the library are.
    :ivar address: reads a connection string; the text of an address shows no password.
    :ivar connect: a connection to an address.
    :ivar target: a session, of a connection, its address, where our own tables are, and what becomes of columns that
        are renamed, or dropped.
    :ivar sink_error: our error for one of the library, at an address, about a table, or ``""``, and our own tables.
    """

    name: str
    error: type[Exception]
    address: Callable[[str], Any]
    connect: Callable[[Any], Any]
    target: Callable[..., Target]
    sink_error: Callable[[Any, Any, str, str], HeadwaterError]


@contextmanager
def needs_library(module: str, database: str, extra: str) -> Iterator[None]:
    """Around imports of what needs *module*. :raises SinkDriverMissing: it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise SinkDriverMissing(
            f"The library for {database} is not installed.", next_step=f"Run: pip install 'headwater[{extra}]'"
        ) from None
