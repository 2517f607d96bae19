"""Tables that are captured and kept under test, without a query of Spark: the log is folded when the test says so.

A consumer that never goes on holds the whole log, so that a model of each epoch can be made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.db.capture.running import RunningCapture
from tests.servers.postgres import Database

from headwater.backfill.log_ranges import LogRanges
from headwater.log_store import KvLogStoreReader, LogView
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.sink import Token
from headwater.sources.table import SourceTable
from headwater.state import open_reader
from headwater.state.query_store import open_query_store, own_state
from headwater.stream import Epoch
from headwater.stream.op import Op
from headwater.versioned import VersionedTable

QUERY, STATE = "keeper", "b"
Row = tuple[Any, ...]


class Keeper:
    """Captures *tables*, which are empty, and keeps them in ``<store>/tables``."""

    def __init__(self, database: Database, folder: Path, tables: Sequence[str]) -> None:
        self.tables = list(tables)
        self.capture = RunningCapture(database, folder, tables)
        self.capture.start()
        self.capture.catch_up()
        self.store = str(self.capture.store)
        self.folder = str(self.capture.store / "tables")
        self.sink = KeptTables(self.folder, merge_runs=2, retention_seconds=1.0)
        self._stores = [open_query_store(own_state(self.store, name), name) for name in ("model", QUERY)]
        self._source = open_reader(self.store)
        self._model, self._group = (KvLogStoreReader(self._source, store) for store in self._stores)
        self._delivered = self.newest()
        for reader in (self._model, self._group):
            reader.init(self.tables)
        for table in self._described(self._delivered).values():
            self.sink.complete(table, QUERY, STATE, self._delivered)
        self._group.truncate(Epoch(self._delivered))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.folds = 0

    def newest(self) -> int:
        with open_reader(self.store) as reader, reader.snapshot() as view:
            return int(view.epoch)

    def catch_up(self) -> int:
        """Until all that is committed is durable; the newest epoch then."""
        self.capture.catch_up()
        return self.newest()

    def table(self, name: str) -> VersionedTable:
        return VersionedTable.open(self.store, name, self.folder)

    def fold(self) -> int:
        """Fold what the pins allow into the tables, and let runs be merged."""
        upto = self.sink.choose(self.tables, self.newest())
        if upto <= self._delivered:
            return self._delivered
        for name, table in self._described(upto).items():
            token = Token(QUERY, STATE, self._delivered, upto, 0, generation=1)
            with open_reader(self.store) as reader, reader.snapshot() as view:
                ranges = LogRanges(view, [name]).changes(name, self._delivered, upto)
                rows = LogView.open(view, name).read_range(self._delivered, upto)
                staged = self.sink.stage_changes(table, token, rows, ranges.truncated)
            self.sink.commit(table, token, [staged])
        self._group.truncate(Epoch(upto))
        self._delivered = upto
        self.folds += 1
        return upto

    def fold_on(self, seconds: float = 0.3) -> None:
        """Fold again and again, until the end."""

        def run() -> None:
            while not self._stop.wait(seconds):
                self.fold()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def fold_off(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)

    def epochs(self, name: str, after: int, upto: int) -> list[int]:
        """Those of the log of *name* in between."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            return [int(end.epoch) for end in LogView.open(view, name).epochs(after, upto)]

    def model(self, name: str, epoch: int) -> list[Row]:
        """The rows of *name* as of *epoch*, as the changes of its log come to, one after the other."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            log = LogView.open(view, name)
            rows = [row for batch in log.read_range(0, epoch) for row in batch.to_pylist()]
            keys, names = log.log.key_columns, [n for n in log.log.schema.names if not n.startswith("_")]
        found: dict[Row, Row] = {}
        for row in sorted(rows, key=lambda row: (row["_epoch"], row["_seq"])):
            key = tuple(row[column] for column in keys)
            if row["_op"] in (Op.DELETE, Op.UPDATE_DELETE):
                found.pop(key, None)
            else:
                found[key] = tuple(row[column] for column in names)
        return sorted(found.values())

    def close(self) -> None:
        self.fold_off()
        for store in self._stores:
            store.close()
        self._source.close()
        self.capture.stop()

    def _described(self, epoch: int) -> dict[str, SourceTable]:
        with open_reader(self.store) as reader, reader.snapshot() as view:
            ranges = LogRanges(view, self.tables)
            return {name: ranges.changes(name, epoch, epoch).table for name in self.tables}
