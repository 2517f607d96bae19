"""PlaceSnapshot: a place in the log that tasks read at, and what is planned there; what is the same for every server.

It keeps no transaction open: its place is enough to read at, however long it takes and whoever begins anew. Nothing is
locked and nothing old is kept at the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Generic, Self, TypeVar

from headwater.errors import HeadwaterError
from headwater.sources.snapshots import SnapshotMark
from headwater.sources.splits import Cut, KeyRange, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

_Session = TypeVar("_Session")
_Catalog = TypeVar("_Catalog")
_Mark = TypeVar("_Mark", bound=SnapshotMark)


class PlaceSnapshot(ABC, Generic[_Session, _Catalog, _Mark]):
    """A place. One thread. Those who implement it set :attr:`_mark`."""

    _mark: _Mark

    def __init__(self) -> None:
        self._catalogs: dict[tuple[str, str], _Catalog] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What readers need: the place."""
        return self._mark.to_json()

    @property
    def mark(self) -> _Mark:
        """What it contains."""
        return self._mark

    def is_open(self) -> bool:
        """Whether the server answers."""
        try:
            with self._asked() as session:
                self._ping(session)
        except HeadwaterError:
            return False
        return True

    def has_key(self, table: SourceTable) -> bool:
        """Whether it has: no table is captured that has none."""
        return True

    def files(self, table: SourceTable) -> str:
        """Nothing: no range is one of blocks."""
        return ""

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows.

        :raises UnsupportedTable: it cannot be split in that way. :raises SourceNotFound: there is no such table.
        """
        catalog = self._catalog(table)
        with self._asked() as session:
            return self._plan(session, table, catalog, split_rows, kind)

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
        catalog = self._catalog(table)
        with self._asked() as session:
            return self._page_end(session, table, catalog, part, rows)

    def _catalog(self, table: SourceTable) -> _Catalog:
        """What the catalog said when it was asked first. :raises SourceNotFound: there is no such table."""
        name = table.namespace, table.name
        if name not in self._catalogs:
            with self._asked() as session:
                self._catalogs[name] = self._read(session, table)
        return self._catalogs[name]

    # -- what each server does in its own way ------------------------------------------------------------------------

    @abstractmethod
    def table(self, table: SourceTable) -> SourceTable:
        """See :class:`~headwater.sources.snapshots.ExportedSnapshot`."""

    @abstractmethod
    def close(self) -> None:
        """Let the session go. Closing twice is fine."""

    @abstractmethod
    def _asked(self) -> AbstractContextManager[_Session]:
        """The session for questions; one that broke is opened again."""

    @abstractmethod
    def _ping(self, session: _Session) -> None: ...

    @abstractmethod
    def _read(self, session: _Session, table: SourceTable) -> _Catalog: ...

    @abstractmethod
    def _plan(
        self, session: _Session, table: SourceTable, catalog: _Catalog, split_rows: int, kind: SplitKind | None
    ) -> SplitPlan: ...

    @abstractmethod
    def _page_end(
        self, session: _Session, table: SourceTable, catalog: _Catalog, part: KeyRange, rows: int
    ) -> Cut | None: ...
