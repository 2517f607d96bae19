"""A kept table for benchmarks: rows as a history leaves them, in several runs, and a log with the changes after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from _sink_rows import BATCH_ROWS, TABLE, as_inserts, orders
from headwater.log_store import KvLogStoreFactory
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.sink import HistoryPart, Token
from headwater.sources.splits import KeyRange, SplitKind
from headwater.state import open_writer
from headwater.stream import Chunk, Epoch, EpochPair
from headwater.versioned import VersionedTable

RUNS = 8
QUERY, BACKFILL = "bench-table", "b"


@dataclass(frozen=True)
class KeptOrders:
    """The table of the other benchmarks, kept. :ivar rows: in the order in which they were delivered."""

    store: str
    folder: Path
    rows: pa.Table

    @classmethod
    def make(cls, folder: Path, rows: int, changes: int, runs: int = RUNS) -> KeptOrders:
        """*rows* in *runs* runs of keys in no order, and *changes* of the log after them."""
        mixed = orders(rows).take(pa.array(np.random.default_rng(7).permutation(rows))).combine_chunks()
        sink = KeptTables(str(folder / "tables"), merge_runs=1000)
        part = HistoryPart(SplitKind.KEY, (KeyRange(),), bytes(16), 0)
        cuts = np.linspace(0, rows, runs + 1).astype(int)
        for plan in range(1, runs + 1):
            token = Token(QUERY, BACKFILL, 0, 0, plan)
            piece = mixed.slice(cuts[plan - 1], cuts[plan] - cuts[plan - 1])
            batches = iter(piece.to_batches(max_chunksize=BATCH_ROWS))
            sink.commit(TABLE, token, [sink.stage_history(TABLE, token, part, batches)])
        store = str(folder / "store")
        _write_log(store, mixed.slice(0, changes))
        sink.complete(TABLE, QUERY, BACKFILL, int(Epoch.from_ms(1)))
        return cls(store, folder / "tables", mixed)

    @property
    def sink(self) -> KeptTables:
        return KeptTables(str(self.folder))

    def open(self) -> VersionedTable:
        return VersionedTable.open(self.store, TABLE.full_name, self.folder)


def _write_log(location: str, rows: pa.Table) -> None:
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        log = factory.log(TABLE.full_name, TABLE.log_schema(pa.binary(16)), TABLE.key_columns)
        writer = factory.writer(log)
        writer.init(EpochPair(Epoch.from_ms(1), Epoch(0)))
        writer.end_epoch(Epoch.from_ms(2))
        factory.sealer.seal(Epoch.from_ms(1))
        for batch in as_inserts(rows):
            rows = batch.drop_columns(["_epoch", "_op", "_vnode", "_seq"])
            writer.write_chunk(Chunk.build(rows, batch.column("_op"), TABLE.key_columns, log.vnode_count))
        writer.end_epoch(Epoch.from_ms(3))
        factory.sealer.seal(Epoch.from_ms(2))
        factory.close()
