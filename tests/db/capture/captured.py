"""Small tables of a Postgres, a capture that has them, and what somebody does to its slot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psycopg
from tests.db.capture.running import RunningCapture
from tests.servers.postgres import Database, PostgresServer

SLOT = "headwater"


def make_tables(database: Database, *names: str) -> None:
    """*names*, or ``t``."""
    for name in names or ("t",):
        database.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, v text)")


def fill(database: Database, first: int, last: int, table: str = "t") -> None:
    database.execute(f"INSERT INTO {table} (id, v) SELECT i, 'v' || i FROM generate_series({first}, {last}) i")


def captured(database: Database, folder: Path, *tables: str, **source: Any) -> RunningCapture:
    """A capture of *tables*, or of ``t``, that runs and has the rows 1 to 10 of ``t``."""
    capture = RunningCapture(database, folder, tables or ("t",), **source)
    capture.start()
    fill(database, 1, 10)
    capture.catch_up()
    return capture


def end_walsenders(database: Database) -> None:
    database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")


def drop_slot(database: Database) -> None:
    """As somebody does who means it: the reader is ended until the slot is free for a moment."""
    deadline = time.monotonic() + 30
    while True:
        end_walsenders(database)
        try:
            database.execute(f"SELECT pg_drop_replication_slot('{SLOT}')")
            return
        except psycopg.errors.ObjectInUse:
            assert time.monotonic() < deadline


def write_much_wal(server: PostgresServer) -> None:
    """More than a slot may hold if that is a megabyte."""
    with server.connect() as session:
        for _ in range(40):
            session.execute("SELECT pg_logical_emit_message(false, 'much', repeat('x', 1048576))")
        session.execute("SELECT pg_switch_wal()")
        session.execute("CHECKPOINT")
