"""The memory of a capture process: bounded, however large a transaction is and however many tables there are."""

from __future__ import annotations

from pathlib import Path

from tests.crash.capture.capture_process import PostgresProcess
from tests.servers.postgres import Database

from headwater.log_store import LogView
from headwater.state import open_reader

MEGABYTES = 300


def rows_of(store: Path, log: str) -> int:
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, log)
        return sum(batch.num_rows for batch in shown.read_range(0, shown.sealed))


def test_a_transaction_of_a_million_rows_stays_out_of_memory(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE many (id bigint PRIMARY KEY, note text)")
    capture = PostgresProcess(database, tmp_path, ["many"])
    try:
        capture.start()
        capture.wait_until_it_reads()
        database.execute("INSERT INTO many SELECT i, 'a note of row ' || i FROM generate_series(1, 1000000) i")
        capture.catch_up()
        assert capture.peak_megabytes() < MEGABYTES
        capture.stop()
        assert rows_of(capture.store, "public.many") == 1_000_000
        assert capture.said == ""
    finally:
        capture.close()


def test_two_hundred_tables_in_one_transaction_and_one_by_one(database: Database, tmp_path: Path) -> None:
    tables = [f"t{number}" for number in range(200)]
    with database.connect() as session, session.transaction():
        for table in tables:
            session.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)".encode())
    capture = PostgresProcess(database, tmp_path, tables)
    try:
        capture.start()
        capture.wait_until_it_reads()
        inserts = [f"INSERT INTO {table} SELECT i, 'row ' || i FROM generate_series(1, 50) i" for table in tables]
        with database.connect() as session, session.transaction():
            for insert in inserts:
                session.execute(insert.encode())
        database.execute(*(f"UPDATE {table} SET note = 'changed'" for table in tables))
        capture.catch_up()
        assert capture.peak_megabytes() < MEGABYTES
        capture.stop()
        assert {rows_of(capture.store, f"public.{table}") for table in tables} == {100}
        assert capture.said == ""
    finally:
        capture.close()
