"""Marks against real servers: a change is either in the rows of a snapshot, or its mark says that it is not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.db.conftest import StartPostgres
from tests.db.postgres.oracle import FollowedDatabase
from tests.servers.postgres import Database

from headwater.sources.postgres.export import PostgresSnapshot
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.snapshots import ExportedSnapshot
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable


@pytest.fixture
def followed(postgres: Database, tmp_path: Path) -> Iterator[FollowedDatabase]:
    postgres.execute(f"ALTER DATABASE {postgres.name} SET logical_decoding_work_mem = '64kB'")
    with closing(FollowedDatabase(postgres, tmp_path, {})) as database:
        database.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
        yield database


def shown(dsn: str, table: SourceTable, snapshot: ExportedSnapshot) -> set[int]:
    """The keys that the snapshot has."""
    batches = PostgresSnapshots(dsn).read(table, SplitKind.KEY, KeyRange(), snapshot.name, columns=["id"])
    return {key for batch in batches for key in batch.column("id").to_pylist()}


def contained(changes: pa.Table, snapshot: ExportedSnapshot) -> set[int]:
    """The keys of the changes that the mark says to be in it."""
    inside = snapshot.mark.contains(changes.column("_position").combine_chunks())
    return set(changes.column("id").filter(pa.array(inside)).to_pylist())


def check(changes: pa.Table, snapshot: PostgresSnapshot, rows: set[int]) -> None:
    assert contained(changes, snapshot) == rows
    mark = snapshot.mark
    assert mark.low <= mark.high
    places = [int.from_bytes(position[:8], "big") for position in changes.column("_position").to_pylist()]
    keys = changes.column("id").to_pylist()
    assert {key for key, place in zip(keys, places, strict=True) if place < mark.low_lsn} <= rows
    assert not {key for key, place in zip(keys, places, strict=True) if place >= mark.high_lsn} & rows


def test_m15_transactions_of_every_kind_that_are_open_across_a_snapshot(followed: FollowedDatabase) -> None:
    (table,) = followed.add("t")
    database = followed.database
    with ExitStack() as closed:

        def begun(*statements: str) -> Any:
            session = closed.enter_context(database.connect())
            session.execute("BEGIN")
            for statement in statements:
                session.execute(statement.encode())
            return session

        nested = ("SAVEPOINT a", "INSERT INTO t VALUES ({0} + 1)", "SAVEPOINT b", "INSERT INTO t VALUES ({0} + 2)")
        kinds = {
            "plain": ("INSERT INTO t VALUES ({0})",),
            "only in a savepoint": (*nested, "RELEASE b", "RELEASE a"),
            "partly undone": ("INSERT INTO t VALUES ({0})", *nested, "ROLLBACK TO b", "INSERT INTO t VALUES ({0} + 3)"),
            "large": (
                "INSERT INTO t SELECT {0} + i, repeat('x', 500) FROM generate_series(0, 2000) i",
                *(nested[0], "INSERT INTO t SELECT {0} + i, repeat('x', 500) FROM generate_series(3000, 5000) i"),
            ),
        }
        endings = {"before": [], "after": []}  # type: dict[str, list[Any]]
        for number, statements in enumerate(kinds.values()):
            for place, (when, sessions) in enumerate(endings.items()):
                base = (number * 2 + place + 1) * 10_000
                sessions.append(begun(*(statement.format(base) for statement in statements)))
                prepared = begun(*(statement.format(base + 500_000) for statement in statements))
                prepared.execute(f"PREPARE TRANSACTION '{database.name}{number}{when}'".encode())
        # None of them ends in the order in which it began.
        for number in reversed(range(len(kinds))):
            endings["before"][number].execute("COMMIT")
            database.execute(f"COMMIT PREPARED '{database.name}{number}before'")
        snapshot = closed.enter_context(PostgresSnapshots(database.dsn).export())
        database.execute("INSERT INTO t VALUES (1)")
        for number in reversed(range(len(kinds))):
            endings["after"][number].execute("COMMIT")
            database.execute(f"COMMIT PREPARED '{database.name}{number}after'")
        rows = shown(database.dsn, table, snapshot)
        assert len(rows) == 2 * (1 + 2 + 3 + 2001 + 2001)
        changes = followed.changes()["t"]
        assert changes.num_rows == 2 * len(rows) + 1
        check(changes, snapshot, rows)
        assert snapshot.mark.unseen(changes.column("_position").combine_chunks()).sum() == len(rows) + 1
        followed.stream.close()  # the server counts when the connection ends
        streamed = "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = 'headwater'"
        while not database.value(streamed):
            time.sleep(0.02)


def test_snapshots_taken_while_many_write_are_exact(followed: FollowedDatabase) -> None:
    (table,) = followed.add("t")
    database, stop = followed.database, threading.Event()

    def write(number: int) -> None:
        chance = random.Random(number)
        with database.connect() as session:
            session.execute(b"SET synchronous_commit = " + chance.choice([b"on", b"off"]))
            for key in range(number * 1_000_000, (number + 1) * 1_000_000):
                session.execute("BEGIN")
                session.execute("INSERT INTO t VALUES (%s)", [key])
                if chance.random() < 0.3:
                    session.execute("SAVEPOINT a")
                    session.execute("INSERT INTO t VALUES (%s)", [key + 500_000])
                if stop.wait(chance.choice([0, 0, 0.001, 0.02])):
                    session.execute("COMMIT")
                    return
                session.execute("COMMIT")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for writer in writers:
        writer.start()
    with ExitStack() as closed:
        source = PostgresSnapshots(database.dsn)
        try:
            taken = []
            for _ in range(15):
                snapshot = closed.enter_context(source.export())
                taken.append((snapshot, shown(database.dsn, table, snapshot)))
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        changes = followed.changes()["t"]
        for snapshot, rows in taken:
            check(changes, snapshot, rows)
        assert len({len(rows) for _, rows in taken}) > 5
        assert any(snapshot.mark.xip for snapshot, _ in taken)


def test_a_commit_that_waits_for_a_standby_is_in_the_log_and_unseen(
    start_postgres: StartPostgres, tmp_path: Path
) -> None:
    with start_postgres().database() as database, closing(FollowedDatabase(database, tmp_path, {})) as followed:
        followed.run("CREATE TABLE t (id bigint PRIMARY KEY)")
        (table,) = followed.add("t")
        followed.run("INSERT INTO t VALUES (0)")
        followed.changes()  # the description of a table is read only once its transaction is visible
        followed.run("SET synchronous_commit = local")
        database.server.reload(synchronous_standby_names="nobody")
        with database.connect() as waiting:
            thread = threading.Thread(target=waiting.execute, args=("INSERT INTO t VALUES (1)",))
            thread.start()
            changes = pa.table({})
            while not changes.num_rows:
                changes = followed.changes().get("t", changes)
            positions = changes.column("_position").combine_chunks()
            with PostgresSnapshots(database.dsn).export() as snapshot:
                assert shown(database.dsn, table, snapshot) == {0}
                assert snapshot.mark.unseen(positions).tolist() == [True]
                assert snapshot.mark.low_lsn <= int.from_bytes(positions[0].as_py()[:8], "big")
            database.server.reload(synchronous_standby_names="")
            thread.join()
            with PostgresSnapshots(database.dsn).export() as snapshot:
                assert snapshot.mark.unseen(positions).tolist() == [False]


def test_m29_a_standby_tells_what_its_snapshots_contain(start_postgres: StartPostgres, tmp_path: Path) -> None:
    primary = start_postgres()
    with primary.database() as database:
        standby = start_postgres(primary=primary)
        dsn = standby.dsn(database.name)
        with closing(FollowedDatabase(database, tmp_path, {})) as followed, ExitStack() as closed:
            followed.run("CREATE TABLE t (id bigint PRIMARY KEY)")
            (table,) = followed.add("t")
            sessions = [closed.enter_context(database.connect()) for _ in range(3)]
            taken = []
            for number in range(12):
                session = sessions[number % 3]
                session.execute("COMMIT")
                session.execute("BEGIN")
                session.execute("INSERT INTO t VALUES (%s)", [number])
                database.execute(f"INSERT INTO t VALUES ({number + 100})")
                snapshot = closed.enter_context(PostgresSnapshots(dsn).export())
                taken.append((snapshot, shown(dsn, table, snapshot)))
            for session in sessions:
                session.execute("COMMIT")
            changes = followed.changes()["t"]
            for snapshot, rows in taken:
                check(changes, snapshot, rows)
            assert len(taken[-1][1]) > 15
