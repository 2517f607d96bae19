"""QueryOptions: everything that a query is made of, over captured tables or over an upstream table.

It travels to tasks: values only, and a table that holds no connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.sources.splits import SplitKind
from headwater.state.query_store import own_state

PARALLEL, SINGLE = "parallel", "single"
AUTO, SOURCE, TABLES = "auto", "source", "tables"


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """One query.

    :ivar store: location of the store that the capture writes; with *upstream* nothing but its state is there.
    :ivar source: connection string of the database, never shown; empty where a stream writes the store.
    :ivar query: its name: that of its consumer in the logs, and of its state.
    :ivar state: location of the store that has its state; ``None``: a store of this query alone, beside that of the
        capture.
    :ivar tables: full names of captured tables, or the name of *upstream*.
    :ivar history: deliver the rows that were there before the capture, too.
    :ivar backfill: ``parallel`` reads splits side by side, ``single`` one page after the other.
    :ivar split_rows: about how many rows a split has.
    :ivar split_kind: ``None`` chooses.
    :ivar keyed: the sink upserts by key, so history may come by heap blocks and overlap changes.
    :ivar takes_columns: the sink takes rows of some columns alone, as one that upserts does: a column that came with a
        value is read again by itself.
    :ivar interval_seconds: about how long the history of one batch is read, and so how long a snapshot is held.
    :ivar rows_per_second: of history, for each table; ``None`` is no limit, 0 stands still.
    :ivar new_columns: the capture takes up columns that come new; otherwise they are not read.
    :ivar max_rows: changes of one batch, about; epochs are never cut. :ivar max_epochs: … and epochs.
    :ivar kept: the folder of the tables that we keep; ``None``: there are none.
    :ivar origin: where history comes from: the ``source``, our own ``tables``, or ``auto``: our tables where the query
        is new and they have all of it.
    :ivar since: no history, and of the changes those since then: an epoch, or a time with its zone (ISO 8601).
    :ivar upstream: the table that is consumed, instead of captured ones; see :meth:`over`.
    :raises InvalidQuery: a number below 1, no table, another word for *backfill* or *origin*.
    """

    store: str
    source: str = field(repr=False)
    query: str
    tables: tuple[str, ...]
    history: bool = True
    backfill: str = PARALLEL
    split_rows: int = 100_000
    split_kind: SplitKind | None = None
    keyed: bool = False
    takes_columns: bool = False
    interval_seconds: float = 4.0
    rows_per_second: int | None = None
    new_columns: bool = True
    max_rows: int | None = None
    max_epochs: int | None = None
    kept: str | None = None
    origin: str = AUTO
    since: str | None = None
    state: str | None = None
    upstream: UpstreamTable | None = field(default=None, repr=False)

    @classmethod
    def over(
        cls,
        upstream: UpstreamTable,
        store: str,
        query: str,
        *,
        since: str | None = None,
        rows_per_second: int | None = None,
        max_rows: int | None = None,
        max_epochs: int | None = None,
    ) -> QueryOptions:
        """A query over an upstream table: its snapshot, unless *since* says otherwise, then its change log.

        :param store: where its state is kept, beside (``queries/<query>``); nothing else needs to be there.
        """
        return cls(
            store,
            "",
            query,
            (upstream.name,),
            history=since is None,
            since=since,
            rows_per_second=rows_per_second,
            max_rows=max_rows,
            max_epochs=max_epochs,
            upstream=upstream,
        )

    @property
    def state_location(self) -> str:
        """Where its state is."""
        return self.state or own_state(self.store, self.query)

    def __post_init__(self) -> None:
        if not self.query or not self.store or not self.tables:
            raise InvalidQuery("A query needs a name, a store and at least one table.")
        if self.origin not in (AUTO, SOURCE, TABLES):
            raise InvalidQuery(f"Received origin={self.origin!r}; valid are {AUTO!r}, {SOURCE!r} and {TABLES!r}.")
        if self.origin == TABLES and self.history and self.kept is None:
            raise InvalidQuery(
                "History is wanted from our own tables, and none are kept.",
                next_step='Add a [[sink]] of kind = "table" and wait until it is live; or use from = "source".',
            )
        if self.since is not None and self.history:
            raise InvalidQuery("Changes since a time come without history.", next_step="Set history=false.")
        if self.history and not self.source and self.upstream is None:
            raise InvalidQuery(
                "There is no database whose history could be read: a stream writes the store.",
                next_step="Set history=false: the query delivers what the log holds, and all that comes.",
            )
        if self.backfill not in (PARALLEL, SINGLE):
            raise InvalidQuery(f"Received backfill={self.backfill!r}; valid are {PARALLEL!r} and {SINGLE!r}.")
        for name in ("split_rows", "max_rows", "max_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidQuery(f"Received {name}={value}; valid are numbers from 1.")
        if self.interval_seconds <= 0 or (self.rows_per_second is not None and self.rows_per_second < 0):
            raise InvalidQuery("interval_seconds must be above 0, and rows_per_second 0 or more.")
        if self.split_kind is SplitKind.HEAP and not self.keyed:
            raise InvalidQuery(
                "Splits by heap need a sink that upserts by key.", next_step="Leave split_kind out, or use 'key'."
            )
