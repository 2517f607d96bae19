"""QueryTables: the tables of one query, by name, but for those that the sink does not take.

A table that the query no longer has is *left*: its log does not wait for it, and if it comes back it begins anew. So
is one that the sink does not take: it is *parked*, until the query is started with a sink that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

from headwater.backfill.cdc.backfill import CdcBackfill
from headwater.backfill.log_ranges import LogRanges
from headwater.backfill.plans import QueryState
from headwater.backfill.query import TABLES, QueryOptions
from headwater.backfill.query_table import QueryTable
from headwater.backfill.since import resolve_since
from headwater.backfill.snapshot.backfill import SnapshotBackfill, release_pins
from headwater.backfill.table_backfill import TableContext
from headwater.capture.source_state import CapturedTable, TableState
from headwater.log_store import KvLogStoreReader
from headwater.sinks.sink import Committed
from headwater.sources.snapshots import SnapshotSource
from headwater.sources.table import SourceTable
from headwater.state import Snapshot
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair
from headwater.stream.mutation import ALL_TARGETS, Mutation
from headwater.system.clock import Clock

CommittedOf = Callable[[SourceTable, str], Committed]
"""What the sink has of a table, of the backfill that is named."""
PARKED: Final = "parked"
"""What the status says of a table that the sink does not take, instead of a phase."""


class QueryTables(Mapping[str, QueryTable]):
    """The tables that are planned. What changes is written with the next save.

    :param view: of the capture's store. :param ranges: of the logs in it.
    :param parked: the tables that the sink does not take, and why.
    """

    def __init__(
        self,
        options: QueryOptions,
        state: QueryState,
        source: SnapshotSource,
        logs: KvLogStoreReader,
        view: Snapshot,
        ranges: LogRanges,
        parked: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._options, self._state, self._logs, self._clock = options, state, logs, clock
        self._parked = {name: why for name, why in parked.items() if name in options.tables}
        self._leave((set(state.tables) - set(options.tables)) | self._parked.keys())
        start = None
        if options.since is not None and state.delivered is None:
            start = resolve_since(view, options.since, options.tables, clock.unix_ms())
        newest = view.epoch
        names = [name for name in options.tables if name not in self._parked]
        logs.init(names, start)
        self._tables = {
            name: QueryTable(TableContext(options, state, source, clock, ranges.latest(name)), logs.consumer(name))
            for name in names
        }
        self._epochs = EpochPair(Epoch(newest).next(0), Epoch(newest))

    def __getitem__(self, name: str) -> QueryTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def external(self) -> dict[str, CdcBackfill]:
        """The backfills that share a snapshot of the source, by table."""
        return {name: table.backfill for name, table in self.items() if isinstance(table.backfill, CdcBackfill)}

    @property
    def versioned(self) -> dict[str, SnapshotBackfill]:
        """The backfills from our own versioned tables, by table."""
        return {name: table.backfill for name, table in self.items() if isinstance(table.backfill, SnapshotBackfill)}

    def begin(self, committed: CommittedOf | None) -> None:
        """Before the first plan. :param committed: what the sink has of a table, where the sink can tell."""
        for table in self.values():
            table.backfill.on_barrier(Barrier(self._epochs, BarrierKind.INITIAL))
            if committed is not None:
                self._check_sink(table, committed)

    def _check_sink(self, table: QueryTable, committed: CommittedOf) -> None:
        """A sink that has nothing of a table whose backfill was delivered is another one: the table is read again."""
        delivered = self._state.delivered
        if delivered is None or not delivered.plan or not table.backfill.has_read:
            return
        if committed(table.table, self._state.id) == Committed():
            table.restart()

    def mutate(self, mutation: Mutation) -> Barrier:
        """The next barrier, with *mutation*, which the tables follow that it is for."""
        self._epochs = self._epochs.next(self._epochs.curr.next(self._clock.unix_ms()))
        barrier = Barrier(self._epochs, BarrierKind.CHECKPOINT, mutation)
        for table in self.values():
            if mutation.target in (ALL_TARGETS, table.name):
                table.backfill.on_barrier(barrier)
        return barrier

    def returning(self, captured: Mapping[str, CapturedTable]) -> list[str]:
        """The parked tables that were captured again since they were planned last: what was wrong may be over."""
        return [
            name
            for name in self._parked
            if (table := captured.get(name)) is not None
            and table.state is TableState.ACTIVE
            and self._state.table(name).since not in (None, table.since.to_json())
        ]

    # -- tables that go --------------------------------------------------------------------------------------------

    def park(self, parked: Mapping[str, str]) -> None:
        """Leave out those of *parked* that are here. Durable on return."""
        found = {name: why for name, why in parked.items() if name in self._tables}
        for name in found:
            self._tables[name].backfill.save(self._state.batch)
            del self._tables[name]
        self._parked |= found
        self._leave(found.keys())

    def _leave(self, names: Set[str]) -> None:
        """In one seal: the logs do not wait for these tables, and their changes are missing from now on."""
        leaving = [name for name in names if not self._state.table(name).left]
        for name in leaving:
            record = self._state.table(name)
            if record.origin == TABLES and self._options.kept is not None:
                release_pins(self._options.store, self._options.kept, self._options.query, [name])
            record.left = True
            self._state.put_table(name)
        if leaving:
            self._logs.drop(leaving, defer=True)
            self._state.save()

    # -- versioned tables ------------------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether the query must go on before a versioned table can be read: that one is further on."""
        return any(backfill.is_late for backfill in self.versioned.values())

    def readable_upto(self, limit: int) -> int:
        """*limit*, or up to where the versioned tables can be read."""
        readable = (backfill.readable_epoch for backfill in self.versioned.values())
        return min([limit, *(epoch for epoch in readable if epoch is not None)])

    # -- state, status ---------------------------------------------------------------------------------------------

    def forget(self, epoch: int) -> None:
        """Everything up to *epoch* is delivered: save that, so that the logs and the versioned tables can forget it."""
        found = {name: table.unneeded(epoch) for name, table in self.items()}
        upto = {name: Epoch(keep) for name, keep in found.items() if keep is not None}
        self._logs.truncate(upto, defer=True)
        self.save()
        for backfill in self.versioned.values():
            backfill.release()

    def save(self) -> None:
        """Make durable what has changed."""
        for table in self.values():
            table.backfill.save(self._state.batch)
        if self._state.batch:
            self._state.save()

    def status(self) -> dict[str, Any]:
        """What a person wants to know of each."""
        parked = {name: {"phase": PARKED, "waiting": why} for name, why in self._parked.items()}
        return {name: table.status() for name, table in self.items()} | parked
