"""SqlServerSnapshot: a number of the log that tasks read at, and what is planned there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeVar

from headwater.errors import TransientError
from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_conditions import where
from headwater.sources.position_snapshots import PositionSnapshot, with_columns
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.sqlserver.catalog import CatalogTable, read_table, size_of
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.instances import read_instances
from headwater.sources.sqlserver.key_columns import KeyColumn, key_list, key_texts, read_key
from headwater.sources.sqlserver.log_watch import settled_end
from headwater.sources.sqlserver.names import TableName
from headwater.sources.sqlserver.offset import SqlServerMark
from headwater.sources.sqlserver.server import Server
from headwater.sources.sqlserver.types import source_column
from headwater.sources.sqlserver.values import broken_texts_named
from headwater.sources.table import SourceTable, SpecialValues
from headwater.system.pool import Pool

IDLE_SECONDS: Final = 20.0
_END: Final = (
    "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCK_TIMEOUT -1;"
)

T = TypeVar("T")


def _reset(session: Session) -> bool:
    with suppress(TransientError):
        if session.is_open:
            session.run(_END)
            return True
    return False


_POOL: Final = Pool(_reset, Session.close, idle_seconds=IDLE_SECONDS)


def borrow(dsn: Dsn) -> Session:
    """A session without a transaction; a new one where none is idle.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """
    return _POOL.borrow(dsn.origin, lambda: Session(dsn))


def give_back(session: Session) -> None:
    """Nothing is open in it but perhaps a transaction, which is rolled back."""
    _POOL.give_back(session.dsn.origin, session)


def with_session(dsn: Dsn, question: Callable[[Session], T]) -> T:
    """The answer over a session, which is opened again when it breaks."""
    return _POOL.ask(dsn.origin, lambda: Session(dsn), question)


NUMBERED_ROWS: Final = 20_000_000
"""Above that, by the server's count, a table is not walked for its cuts."""
UNKNOWN_ROWS: Final = -1
"""Of a split that is handed out in pages."""


def plan_splits(
    session: Session, table: SourceTable, catalog: CatalogTable, split_rows: int, kind: SplitKind | None
) -> SplitPlan:
    """Splits of about *split_rows* rows of *table*. :raises UnsupportedTable: by heap.

    =====================  ===========================================================================================
    tables                 every n-th key, exactly, in one statement along the index of the key
    very large tables      one split, of which pages of exactly so many rows are handed out, one by one
    =====================  ===========================================================================================

    The server orders the keys and prints them; nothing of its order is repeated here. The first split has no start and
    the last no end, and both are read: they may have had rows at the position that rows are brought back to.
    """
    if kind is SplitKind.HEAP:
        raise UnsupportedTable(
            table.full_name,
            "places in its files cannot be asked for.",
            next_step="Set split_kind to key, or leave it out.",
        )
    key = read_key(catalog, table)
    rows, size = size_of(session, catalog)
    if rows <= split_rows:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), rows),), rows, size, "1 range: all of it.")
    if rows > NUMBERED_ROWS:
        why = "1 range: pages of its key, each found when it is handed out."
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), UNKNOWN_ROWS),), rows, size, why)
    found = _keys(
        session,
        table,
        f"SELECT {key_texts(key)} FROM (SELECT {key_list(key)}, ROW_NUMBER() OVER (ORDER BY {key_list(key)}) AS [n]"
        f" FROM {catalog.name.sql}) AS [numbered] WHERE [n] % {split_rows} = 0 ORDER BY [n]",
        key,
    )
    cuts: list[Cut | None] = [None, *(Cut(texts, after=True) for texts in found), None]
    last = max(0, rows - split_rows * len(found))
    splits = tuple(
        Split(number, KeyRange(start, end), split_rows if end is not None else last)
        for number, (start, end) in enumerate(pairwise(cuts))
    )
    why = f"{len(splits)} ranges of keys: every {split_rows:,}th key, along its index."
    return SplitPlan(SplitKind.KEY, splits, rows, size, why)


def page_end(session: Session, table: SourceTable, catalog: CatalogTable, part: KeyRange, rows: int) -> Cut | None:
    """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
    key = read_key(catalog, table)
    found = _keys(
        session,
        table,
        f"SELECT {key_texts(key)} FROM {catalog.name.sql}{where(part, key)} ORDER BY {key_list(key)}"
        f" OFFSET {rows - 1} ROWS FETCH NEXT 2 ROWS ONLY",
        key,
    )
    return Cut(found[0], after=True) if len(found) == 2 else None


def _keys(session: Session, table: SourceTable, statement: str, key: Sequence[KeyColumn]) -> list[tuple[str, ...]]:
    """The texts of the keys that *statement* gives. :raises BrokenText: one is no Unicode."""
    with broken_texts_named(table, [table.column(column.name) for column in key]):
        found = session.ask(statement)
    return [tuple(str(row[f"k{place}"]) for place in range(len(key))) for row in found]


COMMIT_SECONDS: Final = 0.1
"""How long a commit that is on disk, where the capture job has read it, may take until versions of rows show it."""


class SqlServerSnapshot(PositionSnapshot[Session, CatalogTable, SqlServerMark]):
    """A place. One thread.

    :param lock_seconds: how long a question waits for a locked table; ``None``: until it is free.
    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    :raises SourceMisconfigured: the user may not ask how far the log is, without which no row can be placed.
    :raises SourceBusy: the capture job does not come to the end of the log.
    """

    def __init__(self, dsn: Dsn, lock_seconds: float | None = None) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn, self._lock_seconds = dsn, lock_seconds
        self._session: Session | None = None
        try:
            with self._asked() as session:
                Server.ask(session).require_cdc(session)
                self._mark = SqlServerMark(settled_end(session))
                time.sleep(COMMIT_SECONDS)
        except BaseException:
            self.close()
            raise

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has now and that are captured, those that came new at the end.

        :raises SourceNotFound: the database has no such table.
        """
        catalog = self._catalog(table)
        with self._asked() as session:
            instances = read_instances(session, [catalog.id]).get(catalog.id, [])
        captured = {column.number for instance in instances[-1:] for column in instance.columns}
        known = {column.field_id: column for column in table.columns}
        columns = [
            source_column(
                column.name,
                column.type,
                column.number,
                nullable=column.nullable,
                special_values=known[column.number].special_values if column.number in known else SpecialValues.STOP,
                ticks=self._dsn.ticks,
            )
            for column in catalog.columns
            if not column.computed and (column.number in captured or column.number in known)
        ]
        return replace(with_columns(table, columns), source_id=catalog.id)

    def close(self) -> None:
        """Let the session go. Closing twice is fine."""
        if self._session is not None:
            give_back(self._session)
        self._session = None

    def _ping(self, session: Session) -> None:
        session.ask("SELECT 1 AS [one]")

    def _read(self, session: Session, table: SourceTable) -> CatalogTable:
        return read_table(session, TableName(table.namespace, table.name))

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Session]:
        if self._session is None or not self._session.is_open:
            self._session = borrow(self._dsn)
            waits = -1 if self._lock_seconds is None else max(1, round(self._lock_seconds * 1000))
            self._session.run(f"SET LOCK_TIMEOUT {waits};")
        yield self._session
