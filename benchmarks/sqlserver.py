"""SQL Server: rows of the protocol to Arrow columns. The server is one that sends prepared bytes, not SQL Server."""

from __future__ import annotations

import io
import json
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from _harness import Figure, interleaved, main, progress
from _servers import wire
from headwater.sources.sqlserver.changes import BLOCK_ROWS
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.types import SqlType, Ticks, source_column
from headwater.sources.sqlserver.values import column_of
from headwater.sources.table import SourceTable

KINDS = (
    "bigint",
    "int",
    "decimal(18,4)",
    "nvarchar(20)",
    "nvarchar(60)",
    "datetime2(7)",
    "datetime2(3)",
    "bit",
    "float",
)
COLUMNS = tuple(source_column(f"c{n}", SqlType.parse(kind), n + 1) for n, kind in enumerate(KINDS))
TABLE = SourceTable("shop", "orders", COLUMNS, ("c0",), 1)


def rows_of(count: int) -> list[list[Any]]:
    """Rows as :func:`~headwater.sources.sqlserver.types.selected` asks for them."""
    return [
        [
            n,
            n % 97,
            f"{n}.1250",
            f"state {n % 7}",
            f"a note of some length, number {n}",
            n * 10,
            n * 1000,
            n % 2 == 0,
            n / 7,
        ]
        for n in range(count)
    ]


def _serve(listener: socket.socket, answers: dict[str, bytes]) -> None:
    while True:
        connection, _ = listener.accept()
        try:
            wire.receive(connection)
            wire.send(connection, wire.prelogin_reply())
            login = wire.read_login(wire.receive(connection)[1])
            wire.send(connection, wire.login_reply(login))
            while True:
                kind, payload = wire.receive(connection)
                asked = wire.read_batch(payload) if kind == wire.BATCH else ""
                wire.send(connection, answers.get(asked, wire.done()), min(login.packet, 32_767))
        except wire.Hangup:
            connection.close()


@contextmanager
def serving(answers: dict[str, bytes]) -> Iterator[str]:
    """The address of a process that answers each batch with its bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, answers), daemon=True)
        process.start()
        try:
            yield f"sqlserver://sa:x@127.0.0.1:{port}/shop"
        finally:
            process.kill()
            process.join()


def measure(quick: bool) -> list[Figure]:
    count = 20_000 if quick else 100_000
    rows = rows_of(count)
    names = [column.name for column in COLUMNS]
    texts = [[json.dumps(dict(zip(names, row, strict=True)))] for row in rows]
    answers = {"columns": wire.result(names, rows), "json": wire.result(["row"], texts)}
    as_told = pa.schema([(name, pa.array([value]).type) for name, value in zip(names, rows[0], strict=True)])
    options = arrow_json.ParseOptions(explicit_schema=as_told, unexpected_field_behavior="error")
    with progress("SQL Server"), serving(answers) as dsn, Session(Dsn(dsn)) as session:

        def library() -> None:
            with session._asked("columns") as cursor:
                assert sum(1 for _ in cursor) == count

        def to_arrow() -> None:
            made = 0
            for block in session.columns("columns", BLOCK_ROWS):
                values = [
                    column_of(TABLE, column, given, Ticks.REFUSE) for column, given in zip(COLUMNS, block, strict=True)
                ]
                made += len(values[0])
            assert made == count

        def json_to_arrow() -> None:
            made = 0
            for block in session.columns("json", BLOCK_ROWS):
                data = "\n".join(block[0].to_pylist()).encode()
                made += arrow_json.read_json(io.BytesIO(data), parse_options=options).num_rows
            assert made == count

        bare, columns, rendered = interleaved(3, library, to_arrow, json_to_arrow)
    return [
        Figure(
            "rows to Arrow (a double of SQL Server) / the library's rows, thrown away",
            count / columns,
            count / bare,
            10.0,
            "higher",
            "rows/s",
        ),
        Figure(
            "rows to Arrow (a double of SQL Server) / one JSON text per row",
            count / columns,
            count / rendered,
            None,
            "higher",
            "rows/s",
        ),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
