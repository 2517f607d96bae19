"""A capture of the SQL Server under test: as that of a Postgres, with the server's own rows as the oracle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.db.backfill.delivering import Delivering
from tests.db.capture.running import RunningCapture
from tests.servers.sqlserver import AnySqlServer, track

from headwater.capture import SourceState
from headwater.sources.open import open_source
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset
from headwater.sources.sqlserver.server import log_end
from headwater.sources.table import SourceTable
from headwater.state import open_reader

TABLE = "shop.orders"


def end_of_log(dsn: str) -> SqlServerOffset:
    """Where the log ends now."""
    with Session(Dsn(dsn)) as session:
        return SqlServerOffset(log_end(session))


def stored_offset(store: Path) -> SqlServerOffset | None:
    """The position that a store holds."""
    with contextlib.suppress(LookupError), open_reader(store) as reader, reader.snapshot() as view:
        record, _ = SourceState.read(view)
        if record is not None:
            assert isinstance(record.offset, SqlServerOffset)
            return record.offset
    return None


class SqlServerCapture(RunningCapture):
    """One capture of *server*; it can be stopped and started again over the same store."""

    def __init__(self, server: AnySqlServer, folder: Path, tables: Sequence[str], **source: Any) -> None:
        self.server = server
        super().__init__(server, folder, tables, source.pop("dsn", None), **source)  # type: ignore[arg-type]
        if server.is_double:  # its capture job looks all the time, so positions are worth a seal sooner
            self.options = replace(self.options, heartbeat_seconds=0.1, retry_seconds=0.2)

    def catch_up(self) -> None:
        """Until all changes that the server has committed by now are durable."""
        self._reach(SqlServerOffset(Lsn(self.server.last_change())))

    def reach_the_end(self) -> None:
        """Until the position is where the server's log ends by now, whatever is in it."""
        self._reach(end_of_log(self.server.dsn))

    def _reach(self, target: SqlServerOffset) -> None:
        self.wait_for(lambda: self.failure is not None or self._is_durable(target))
        if self.failure is not None:
            raise self.failure

    def _is_durable(self, target: SqlServerOffset) -> bool:
        offset = stored_offset(self.store)
        return offset is not None and offset >= target

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self.server, table)


def selected(server: AnySqlServer, table: SourceTable) -> pa.Table:
    """The rows of a table as the server prints them: numbers and texts."""
    columns = ", ".join(f"CONVERT(nvarchar(max), [{column.name}]) AS [{column.name}]" for column in table.columns)
    rows = server.execute(f"SELECT {columns} FROM [{table.namespace}].[{table.name}]")
    by_column = [[row[place] for row in rows] for place in range(len(table.columns))]
    arrays = [
        pa.array(values, pa.string()).cast(one.type) for values, one in zip(by_column, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=table.schema)


@contextlib.contextmanager
def running(server: AnySqlServer, folder: Path, *tables: str, **source: Any) -> Iterator[SqlServerCapture]:
    """A capture that runs, and is stopped at the end."""
    made = SqlServerCapture(server, folder, tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)


class SqlServerDelivering(Delivering):
    """As :class:`Delivering`, with the server's own rows as what is expected."""

    capture: SqlServerCapture

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self.capture.server, table)


def create(server: AnySqlServer, rows: int = 0, key: str = "bigint") -> None:
    """The table ``shop.orders``, with rows that were there before anything was captured."""
    server.execute(
        f"CREATE TABLE shop.orders (id {key} NOT NULL PRIMARY KEY, state varchar(9), total decimal(10,2),"
        " note nvarchar(40))"
    )
    for first in range(0, rows, 500):
        values = ", ".join(f"({n * 3}, 'new', {n}, N'xxxx')" for n in range(first + 1, min(first + 500, rows) + 1))
        server.execute(f"INSERT INTO shop.orders VALUES {values}")
    track(server, "orders")


@contextlib.contextmanager
def writer(server: AnySqlServer, pause: float = 0.005) -> Iterator[None]:
    """Somebody who writes all the time: new rows, updates, deletes, other keys."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                at = number * 37 % 9000
                server.execute(
                    f"BEGIN TRANSACTION; DELETE FROM shop.orders WHERE id = {at * 3 + 1};"
                    f" INSERT INTO shop.orders VALUES ({at * 3 + 1}, 'live', {number}, N'a');"
                    f" UPDATE shop.orders SET state = 'paid', total = {number} WHERE id BETWEEN {at} AND {at + 20};"
                    f" DELETE FROM shop.orders WHERE id = {at + 3}; COMMIT",
                    f"UPDATE shop.orders SET id = {100000 + number} WHERE id = {at + 30}",
                )
                stop.wait(pause)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not failed, failed


def described(server: AnySqlServer, name: str, folder: Path) -> SourceTable:
    """A table as it is captured."""
    source = open_source(server.dsn, spill=folder / "unused")
    try:
        return source.tables([name])[0]
    finally:
        source.close()
