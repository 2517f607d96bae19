"""A capture of a MySQL or MariaDB under test: as that of a Postgres, with the server's own rows as the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from tests.db.capture.running import RunningCapture, stored_offset

from headwater.sources.mysql.connection import Dsn, connect
from headwater.sources.mysql.offset import MySqlOffset
from headwater.sources.mysql.server import Server, log_position
from headwater.sources.table import SourceTable


def end_of_log(dsn: str) -> MySqlOffset:
    """Where the server's log ends now."""
    session = connect(Dsn(dsn))
    try:
        return log_position(session, Server.ask(session))
    finally:
        session.close()


class Executing(Protocol):
    """A server, or one of its databases."""

    @property
    def dsn(self) -> str: ...

    def execute(self, *statements: str) -> list[tuple[Any, ...]]: ...


class MySqlCapture(RunningCapture):
    """One capture of *server*; it can be stopped and started again over the same store."""

    def __init__(self, server: Executing, folder: Path, tables: Sequence[str], **source: Any) -> None:
        self.server = server
        super().__init__(server, folder, tables, source.pop("dsn", None), **source)  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = end_of_log(self._dsn)
        self.wait_for(lambda: self.failure is not None or self._is_durable(target))
        if self.failure is not None:
            raise self.failure

    def _is_durable(self, target: MySqlOffset) -> bool:
        offset = self.offset()
        return offset is not None and offset >= target

    def offset(self) -> MySqlOffset | None:
        """The position that the store holds."""
        offset = stored_offset(self.store)
        assert offset is None or isinstance(offset, MySqlOffset)
        return offset

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self.server, table)


def selected(server: Executing, table: SourceTable) -> pa.Table:
    """The rows of a table, as the library gives them to anybody who asks."""
    columns = ", ".join(f"`{column.name}`" for column in table.columns)
    rows = server.execute("SET time_zone = '+00:00'", f"SELECT {columns} FROM `{table.namespace}`.`{table.name}`")
    by_column = [[_plain(row[place], column.type) for row in rows] for place, column in enumerate(table.columns)]
    arrays = [pa.array(values, column.type) for values, column in zip(by_column, table.columns, strict=True)]
    return pa.Table.from_arrays(arrays, schema=table.schema)


def _plain(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind) and isinstance(value, bytes):
        return value != b"\0"
    return value // timedelta(microseconds=1) if isinstance(value, timedelta) else value


@contextlib.contextmanager
def running(server: Executing, folder: Path, *tables: str, **source: Any) -> Iterator[MySqlCapture]:
    """A capture that runs, and is stopped at the end."""
    made = MySqlCapture(server, folder, tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)
