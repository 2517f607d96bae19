"""A capture under test, in a thread of the test, and the table that its log tells of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.replay import replay
from tests.servers.postgres import Database

from headwater.capture import Capture, CaptureOptions, CaptureState, SourceState, TableState
from headwater.capture.options import OnRewrite
from headwater.log_store import LogView
from headwater.log_store.log_events import LogEvent, events_of
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.offset import Lsn, PostgresOffset
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.table import SourceTable
from headwater.state import open_reader

OPTIONS = CaptureOptions(epoch_seconds=0.05, heartbeat_seconds=0.5, retry_seconds=0.5, on_rewrite=OnRewrite.STOP)
"""A table that must be read again stops, so that a test sees why; tests of the re-read itself choose otherwise."""


class RunningCapture:
    """One capture of *database*; it can be stopped and started again over the same store."""

    def __init__(
        self, database: Database, folder: Path, tables: Sequence[str], dsn: str | None = None, **source: Any
    ) -> None:
        self.database = database
        self.folder = folder
        self.store = folder / "store"
        self.options = OPTIONS
        self._tables = list(tables)
        self._dsn = dsn or database.dsn
        self._source = source
        self.failure: BaseException | None = None

    def start(self, tables: Sequence[str] | None = None, *, takeover: bool = False) -> None:
        self.failure = None
        source = open_source(self._dsn, spill=self.folder / "spill", **self._source)
        names = self._tables if tables is None else tables
        self.capture = Capture(source, self.store, names, self.options, takeover=takeover)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wait_for(lambda: self.capture.state is not CaptureState.STARTING or self.failure is not None)

    def _run(self) -> None:
        try:
            self.capture.run()
        except BaseException as error:
            self.failure = error

    def wait_for(self, done: Any, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"waited {seconds} s: {self.capture.statistics}"
            time.sleep(0.02)

    def wait_for_end(self) -> BaseException:
        """The failure that ended it."""
        self.wait_for(lambda: self.failure is not None)
        self._thread.join(30)
        assert self.failure is not None
        return self.failure

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = Lsn.parse(self.database.value("SELECT pg_current_wal_insert_lsn()::text"))
        self.wait_for(lambda: self.failure is not None or self.durable() >= target)
        if self.failure is not None:
            raise self.failure

    def durable(self) -> int:
        offset = stored_offset(self.store)
        if offset is None:
            return 0
        assert isinstance(offset, PostgresOffset)
        return offset.lsn

    def fails_to_start(self, tables: Sequence[str] | None = None) -> BaseException:
        """Start it, to the failure that ends it."""
        self.start(tables)
        return self.wait_for_end()

    def stop(self) -> None:
        self.capture.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def replayed(self, log: str) -> pa.Table:
        """The table that the log tells of."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            return replay(view, log)

    def rows(self, log: str) -> list[dict[str, Any]]:
        """The rows that a log still has, in their order."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            shown = LogView.open(view, log)
            rows = [row for batch in shown.read_range(shown.bounds().gone, shown.sealed) for row in batch.to_pylist()]
        return sorted(rows, key=lambda row: (row["_epoch"], row["_seq"]))

    def events(self, log: str) -> list[LogEvent]:
        with open_reader(self.store) as reader, reader.snapshot() as view:
            return list(events_of(view, log, 0, view.epoch))

    def tables(self) -> dict[str, Any]:
        """What is durable of the captured tables."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            return dict(SourceState.read(view)[1])

    def assert_once(self, *logs: str) -> None:
        """No row of the logs is there twice, and each log is in commit order."""
        for log in logs:
            positions = [row["_position"] for row in self.rows(log)]
            assert all(one < other for one, other in pairwise(positions)), log

    def wait_until_stopped(self, log: str) -> str:
        """Until the table is durably stopped; why."""
        self.wait_for(lambda: self.failure is not None or self.tables()[log].state is TableState.STOPPED)
        if self.failure is not None:
            raise self.failure
        return str(self.tables()[log].reason)

    def selected(self, table: SourceTable) -> pa.Table:
        """The rows of a table as the server has them now."""
        return selected(self.database, table)

    def assert_equal(self, *names: str) -> None:
        """The table that each log tells of is the table at the source."""
        self.catch_up()
        stopped = {log: table.reason for log, table in self.tables().items() if table.state is TableState.STOPPED}
        for name in names:
            source = open_source(self._dsn, spill=self.folder / "unused", **self._source)
            (table,) = source.tables([name])
            source.close()
            expected = self.selected(table)
            assert table.full_name not in stopped, stopped[table.full_name]
            found = self.replayed(table.full_name).select(expected.schema.names)
            order = [(column, "ascending") for column in table.key_columns]
            found, expected = found.sort_by(order), expected.sort_by(order)
            assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
            assert found.cast(expected.schema).equals(expected), name


def stored_offset(store: Path) -> CdcOffset | None:
    """The position that a store holds."""
    with contextlib.suppress(LookupError), open_reader(store) as reader, reader.snapshot() as view:
        record, _ = SourceState.read(view)
        return None if record is None else record.offset
    return None


def selected(database: Database, table: SourceTable) -> pa.Table:
    """The rows of a table, read from the server as a snapshot."""
    return pa.Table.from_batches(read_table(Dsn(database.dsn), table), table.schema)


@contextlib.contextmanager
def running(database: Database, folder: Path, *tables: str, **source: Any) -> Iterator[RunningCapture]:
    """A capture that runs, and is stopped at the end."""
    made = RunningCapture(database, folder, tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)
