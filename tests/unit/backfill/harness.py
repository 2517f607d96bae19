"""A backfill of a fake database, whose state is in a store in memory."""

from __future__ import annotations

from itertools import count

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.parallel import open_backfill
from headwater.backfill.cdc.state import BackfillTables
from headwater.sources.table import SourceTable
from headwater.sources.written import NoSnapshots
from headwater.state import Catalog, WriteBatch, open_writer
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair, Mutation

_stores = count()


class Stored:
    """A store with the state of backfills."""

    def __init__(self) -> None:
        self.store = open_writer(f"memory://backfill-unit-{next(_stores)}")
        self.epochs = count(1)

    def open(self, table: SourceTable, options: BackfillOptions) -> BackfillExecutor:
        with self.store.snapshot() as view:
            tables = BackfillTables(Catalog.load(view), WriteBatch())
            return open_backfill(ExternalStorageTable(table, NoSnapshots()), tables, view, options)

    def save(self, executor: BackfillExecutor) -> int:
        """How many steps it took."""
        batch = WriteBatch()
        executor.state.save(batch)
        self.store.seal(Epoch.from_ms(next(self.epochs)), batch)
        return len(batch)

    def again(self, executor: BackfillExecutor, options: BackfillOptions | None = None) -> BackfillExecutor:
        """As it is after a save and a restart."""
        self.save(executor)
        return self.open(executor.table, options or executor.options)

    def rows(self) -> int:
        """Rows of all state tables."""
        with self.store.snapshot() as view:
            catalog = Catalog.load(view)
            return sum(1 for name in catalog.names() for _ in view.scan_prefix(catalog.prefix(name)))


def barrier(mutation: Mutation | None, kind: BarrierKind = BarrierKind.CHECKPOINT) -> Barrier:
    return Barrier(EpochPair(curr=Epoch.from_ms(2), prev=Epoch.from_ms(1)), kind, mutation)
