"""Reads of parts in exported snapshots: over connections that break, beside tables that change."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.db.conftest import StartPostgres
from tests.db.postgres.test_snapshot import described, rows
from tests.servers.postgres import Database
from tests.servers.proxy import TcpProxy

from headwater.sources.errors import AccessDenied, SnapshotExpired, SourceNotFound, SourceUnreachable, UnsupportedTable
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues
from headwater.system.retry import READ

WIDE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i",
)
ALL = KeyRange()
END_READERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headwater'"
    " AND datname = current_database() AND query LIKE 'COPY%'"
)


def keys(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [key for batch in batches for key in batch.column("id").to_pylist()]


@pytest.fixture
def proxied(postgres: Database) -> Iterator[tuple[Database, TcpProxy, str]]:
    """A database and the way to it through a proxy."""
    with TcpProxy("127.0.0.1", postgres.server.port) as proxy:
        yield postgres, proxy, postgres.dsn.replace(f":{postgres.server.port}/", f":{proxy.port}/")


@pytest.mark.parametrize("kind", list(SplitKind))
@pytest.mark.parametrize("how", ["cut", "terminated"])
def test_m21_a_read_whose_connection_breaks_goes_on_after_the_last_row(
    proxied: tuple[Database, TcpProxy, str], kind: SplitKind, how: str
) -> None:
    database, proxy, dsn = proxied
    database.execute(*WIDE, "INSERT INTO t SELECT id + 20000, v FROM t")  # more than all buffers on the way hold
    table = described(database, "t")
    with PostgresSnapshots(database.dsn).export() as snapshot:
        database.execute("DELETE FROM t WHERE id % 3 = 0", "UPDATE t SET v = 'y'", "VACUUM t")
        part = KeyRange(Cut(("5001" if kind is SplitKind.KEY else "100",)), None)
        expected = keys(PostgresSnapshots(database.dsn).read(table, kind, part, snapshot.name))
        found, broken = [], 0
        reading = PostgresSnapshots(dsn).read(table, kind, part, snapshot.name, batch_bytes=100_000)
        for batch in reading:
            found += batch.column("id").to_pylist()
            assert set(batch.column("v").to_pylist()) == {"x" * 1000}
            if broken < min(proxy.accepted, 5):  # each connection once, at its first rows
                broken += 1
                proxy.cut() if how == "cut" else database.execute(END_READERS)
        assert found == expected
        assert len(found) > 30_000
        assert broken >= 3
        assert proxy.accepted >= 3  # what was in flight already is given first


def test_m21_a_server_that_is_away_for_a_moment_is_waited_for_and_then_no_more(
    proxied: tuple[Database, TcpProxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, proxy, dsn = proxied
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        proxy.refuse(len(pauses) != 3)

    monkeypatch.setattr("headwater.sources.postgres.snapshots.sleep", sleep)
    database.execute(*WIDE)
    table = described(database, "t")
    with PostgresSnapshots(database.dsn).export() as snapshot:
        reading = PostgresSnapshots(dsn).read(table, SplitKind.KEY, ALL, snapshot.name, batch_bytes=100_000)
        found = next(reading).num_rows
        proxy.refuse()
        proxy.cut()
        found += sum(batch.num_rows for batch in reading)
        assert found == 20_000
        assert pauses == [READ.delay(failures) for failures in (1, 2, 3)]
        proxy.refuse()
        with pytest.raises(SourceUnreachable):
            list(PostgresSnapshots(dsn).read(table, SplitKind.KEY, ALL, snapshot.name))
        assert pauses[3:] == [READ.delay(failures) for failures in (1, 2, 3, 4)]


def test_m21_a_restarted_server_has_no_old_snapshots(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    with server.database() as database:
        database.execute(*WIDE)
        table = described(database, "t")
        source = PostgresSnapshots(database.dsn)
        snapshot = source.export()
        reading = source.read(table, SplitKind.KEY, ALL, snapshot.name, batch_bytes=100_000)
        next(reading)
        server.restart()
        with pytest.raises(SnapshotExpired):
            list(reading)
        assert not snapshot.is_open()
        snapshot.close()


def test_rows_that_come_in_another_order_are_not_taken_for_those_that_came_before(
    proxied: tuple[Database, TcpProxy, str],
) -> None:
    database, proxy, dsn = proxied
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i * 7919 % 20011, repeat('x', 1000) FROM generate_series(1, 20000) i",
        "ANALYZE t",
        f"ALTER DATABASE {database.name} SET enable_seqscan = off",
        f"ALTER DATABASE {database.name} SET enable_bitmapscan = off",
    )
    table, part = described(database, "t"), KeyRange(Cut(("5",)), Cut(("19000",)))
    with PostgresSnapshots(database.dsn).export() as snapshot:
        reading = PostgresSnapshots(dsn).read(table, SplitKind.KEY, part, snapshot.name, batch_bytes=100_000)
        assert next(reading).column("id").to_pylist()[:3] == [5, 6, 7]
        database.execute(
            f"ALTER DATABASE {database.name} SET enable_seqscan = on",
            f"ALTER DATABASE {database.name} SET enable_indexscan = off",
        )
        proxy.cut()
        with pytest.raises(SnapshotExpired, match="another order"):
            list(reading)


CHANGES: dict[str, Sequence[str]] = {
    "m32 truncated": ("TRUNCATE t",),
    "m32 truncated and filled": ("BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, 'x', 1); COMMIT",),
    "m25 rewritten": ("ALTER TABLE t ALTER COLUMN n TYPE bigint",),
    "m25 rewritten by a default": ("ALTER TABLE t ADD COLUMN r float DEFAULT random()",),
    "m25 a column dropped": ("ALTER TABLE t DROP COLUMN v",),
    "m25 a column exchanged": (
        "ALTER TABLE t ADD COLUMN w text DEFAULT 'other'",
        "ALTER TABLE t RENAME COLUMN v TO old",
        "ALTER TABLE t RENAME COLUMN w TO v",
    ),
    "m25 another type without a rewrite": ("ALTER TABLE t ALTER COLUMN v TYPE varchar",),
    "m26 dropped": ("DROP TABLE t",),
    "m26 dropped and made anew": (
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        "INSERT INTO t VALUES (1, 'x', 1)",
    ),
    "m26 exchanged": ("BEGIN; ALTER TABLE t RENAME TO s; CREATE TABLE t (LIKE s INCLUDING ALL); COMMIT",),
    "moved": ("CLUSTER t USING t_pkey",),
    "packed": ("VACUUM FULL t",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_a_snapshot_no_longer_shows_is_an_error_not_an_end(newest_postgres: Database, change: str) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        "INSERT INTO t SELECT i, 'x', i FROM generate_series(1, 9) i",
    )
    source, table = PostgresSnapshots(newest_postgres.dsn), described(newest_postgres, "t")
    with source.export() as snapshot:
        snapshot.plan(table, split_rows=2, kind=SplitKind.KEY)  # holds no lock afterwards
        assert len(keys(source.read(table, SplitKind.KEY, ALL, snapshot.name))) == 9
        newest_postgres.execute(*CHANGES[change])
        for part in (ALL, KeyRange(Cut(("4",)), None)):
            with pytest.raises(SnapshotExpired, match="Take a new snapshot"):
                list(source.read(table, SplitKind.KEY, part, snapshot.name))
        assert snapshot.is_open()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE t ADD COLUMN w text DEFAULT 'new'",
        "ALTER TABLE t ALTER COLUMN n SET DEFAULT 3",
        "CREATE INDEX ON t (n)",
        "VACUUM FREEZE t",
        "UPDATE t SET id = id + 100",
    ],
)
def test_other_changes_leave_the_snapshot_as_it_was(newest_postgres: Database, change: str) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        "INSERT INTO t SELECT i, 'x', i FROM generate_series(1, 9) i",
    )
    source, table = PostgresSnapshots(newest_postgres.dsn), described(newest_postgres, "t")
    with source.export() as snapshot:
        before = rows(list(source.read(table, SplitKind.KEY, ALL, snapshot.name)))
        newest_postgres.execute(change)
        assert rows(list(source.read(table, SplitKind.KEY, ALL, snapshot.name))) == before


@pytest.mark.parametrize(
    "change",
    [
        "TRUNCATE low",
        "ALTER TABLE parted DETACH PARTITION low",
        "ALTER TABLE parted DETACH PARTITION low CONCURRENTLY",
        "ALTER TABLE parted ATTACH PARTITION more FOR VALUES FROM (20) TO (30)",
        "DROP TABLE high",
        "CREATE TABLE most PARTITION OF parted FOR VALUES FROM (30) TO (40)",
    ],
)
@pytest.mark.parametrize("kind", list(SplitKind))
def test_a_partitioned_table_whose_partitions_change(newest_postgres: Database, change: str, kind: SplitKind) -> None:
    newest_postgres.execute(
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE more (id int PRIMARY KEY)",
        "INSERT INTO parted VALUES (1), (11)",
        "INSERT INTO more VALUES (21)",
    )
    source, table = PostgresSnapshots(newest_postgres.dsn), described(newest_postgres, "parted")
    with source.export() as snapshot:
        assert sorted(keys(source.read(table, kind, ALL, snapshot.name))) == [1, 11]
        newest_postgres.execute("INSERT INTO parted VALUES (2)")
        assert sorted(keys(source.read(table, kind, ALL, snapshot.name))) == [1, 11]
        newest_postgres.execute(change)
        with pytest.raises(SnapshotExpired, match="partitions changed"):
            list(source.read(table, kind, ALL, snapshot.name))


def test_reading_as_of_now(postgres: Database) -> None:
    postgres.execute(*WIDE)
    source: Any = pickle.loads(pickle.dumps(open_snapshots(postgres.dsn)))
    table = described(postgres, "t")
    part = KeyRange(Cut(("10",), after=True), Cut(("20",)))
    assert sorted(keys(source.read(table, SplitKind.KEY, part, None, columns=["id"]))) == list(range(11, 20))
    postgres.execute("DELETE FROM t WHERE id <> 15")
    assert keys(source.read(table, SplitKind.KEY, part, None, columns=["id"])) == [15]
    assert keys(source.read(table, SplitKind.HEAP, ALL, None, columns=["id"])) == [15]
    postgres.execute("TRUNCATE t")
    assert keys(source.read(table, SplitKind.KEY, ALL, None)) == []
    postgres.execute("DROP TABLE t")
    with pytest.raises(SourceNotFound):
        list(source.read(table, SplitKind.KEY, part, None))


def test_m21_a_read_as_of_now_cannot_go_on_once_rows_were_given(proxied: tuple[Database, TcpProxy, str]) -> None:
    database, proxy, dsn = proxied
    database.execute(*WIDE)
    reading = PostgresSnapshots(dsn).read(described(database, "t"), SplitKind.KEY, ALL, None, batch_bytes=100_000)
    next(reading)
    proxy.cut()
    with pytest.raises(SourceUnreachable):
        list(reading)


def test_a_snapshot_outlives_questions_that_fail_and_the_patience_of_the_server(postgres: Database) -> None:
    role = postgres.role("reader")
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "CREATE TABLE hidden (id int PRIMARY KEY)",
        f'GRANT SELECT ON t TO "{role}"',
        f"ALTER ROLE \"{role}\" SET idle_in_transaction_session_timeout = '50ms'",
        f"ALTER ROLE \"{role}\" SET statement_timeout = '200ms'",
        f"ALTER ROLE \"{role}\" SET lock_timeout = '200ms'",
    )
    if postgres.server.major >= 17:
        postgres.execute(f"ALTER ROLE \"{role}\" SET transaction_timeout = '50ms'")
    table, hidden = described(postgres, "t"), described(postgres, "hidden")
    source = PostgresSnapshots(postgres.dsn_of(role))
    with source.export() as snapshot:
        with pytest.raises(AccessDenied):
            snapshot.plan(hidden, split_rows=10)
        with pytest.raises(SourceNotFound):
            snapshot.table(replace(table, name="missing"))
        postgres.execute("SELECT pg_sleep(0.2)", "DELETE FROM t")
        snapshot._session.execute("SELECT pg_sleep(0.3)")
        assert snapshot.is_open()
        assert keys(source.read(table, SplitKind.KEY, ALL, snapshot.name)) == [1]
        postgres.execute("ALTER TABLE t ADD COLUMN v int")  # is not held up
        postgres.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'headwater'"
            " AND datname = current_database()"
        )
        assert not snapshot.is_open()


def test_the_columns_of_a_table_are_those_of_the_snapshot(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, d date, g int GENERATED ALWAYS AS (id + 1) STORED)",
        "CREATE PUBLICATION headwater FOR TABLE t (id, v, d)",
    )
    table = described(postgres, "t", special_values={"public.t.d": SpecialValues.TEXT})
    with ExitStack() as closed:

        def now() -> SourceTable:
            return closed.enter_context(PostgresSnapshots(postgres.dsn).export()).table(table)

        assert now() == table
        postgres.execute("ALTER TABLE t ADD COLUMN unpublished int")
        assert now() == table
        postgres.execute("ALTER TABLE t RENAME COLUMN v TO w")
        assert [column.name for column in now().columns] == ["id", "w", "d"]
        postgres.execute("ALTER PUBLICATION headwater SET TABLE t (id, w, unpublished)")
        found = now()
        assert [column.name for column in found.columns] == ["id", "w", "d", "unpublished"]
        postgres.execute("ALTER PUBLICATION headwater SET TABLE t", "ALTER TABLE t DROP COLUMN d")
        assert [column.name for column in now().columns] == ["id", "w", "unpublished"]
        table = replace(table, columns=(*table.columns[:2], replace(table.columns[2], dropped=True)))
        found = now()
        assert [column.name for column in found.columns] == ["id", "w", "d", "unpublished"]
        assert found.columns[2].dropped
        postgres.execute("ALTER TABLE t ALTER COLUMN w TYPE bigint USING 1")
        assert now().column("w").type == pa.int64()


def test_a_table_without_an_order_of_its_keys_is_read_by_heap_alone(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int, j json)", "ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1, '{}')"
    )
    source, table = PostgresSnapshots(postgres.dsn), described(postgres, "t")
    with source.export() as snapshot:
        plan = snapshot.plan(table, split_rows=10)
        assert plan.kind is SplitKind.HEAP
        assert keys(source.read(table, plan.kind, plan.splits[0].range, snapshot.name)) == [1]
        with pytest.raises(UnsupportedTable):
            snapshot.plan(table, split_rows=10, kind=SplitKind.KEY)
    with pytest.raises(UnsupportedTable):
        source.order(table)
