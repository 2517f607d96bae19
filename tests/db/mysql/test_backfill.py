"""What the history of MariaDB and MySQL has of its own; the suite of all databases is tests/db/backfill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.conftest import StartServer
from tests.db.mysql.delivering import TABLE, create, writer
from tests.db.mysql.running import MySqlCapture, end_of_log, running
from tests.db.mysql.test_failures import replicate, replicate_mysql, wait_for_mysql_replica, wait_for_replica
from tests.db.mysql.test_mysql_snapshots import TYPE_ROWS, TYPES
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FILES, MYSQL

from headwater.sources.errors import SnapshotExpired
from headwater.sources.mysql.parts import MySqlParts


def test_history_and_changes_have_the_same_values_of_every_type(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(TYPES, *(f"INSERT INTO shop.types VALUES ({values})" for values in TYPE_ROWS))
    with running(server, tmp_path, "shop.types") as capture:
        query = Delivering(capture, "shop.types")
        query.finish()
        found = query.sink.mirror["shop.types"]
        names = ", ".join(f"`{name}`" for name in found[(1,)] if name != "id")
        server.execute(f"INSERT INTO shop.types (id, {names}) SELECT id + 100, {names} FROM shop.types")
        query.finish()
        query.close()
    assert len(found) == 2 * len(TYPE_ROWS)
    for number in range(1, len(TYPE_ROWS) + 1):
        assert found[(number,)] | {"id": 0} == found[(number + 100,)] | {"id": 0}


@pytest.mark.parametrize("keyed", [True, False])
def test_each_row_is_that_of_the_place_that_was_planned(mariadb: MariaDbServer, tmp_path: Path, keyed: bool) -> None:
    create(mariadb, 300)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=1000, keyed=keyed)
        before = {row[0]: row[1] for row in mariadb.execute("SELECT id, total FROM shop.orders")}

        def change(step: str) -> None:
            if step == "planned":
                mariadb.execute(
                    "UPDATE shop.orders SET total = total + 1000 WHERE id < 300",
                    "UPDATE shop.orders SET total = total + 1000 WHERE id < 300",
                    "DELETE FROM shop.orders WHERE id BETWEEN 300 AND 400",
                    "INSERT INTO shop.orders VALUES (1, 'late', 1, '')",
                    "UPDATE shop.orders SET id = 2 WHERE id = 600",
                )

        assert query.batch(timeout=5, between=change)
        assert {key[0]: row["total"] for key, row in query.sink.mirror[TABLE].items()} == before
        query.finish()
        query.assert_equal()
        query.close()


def test_flush_logs_while_history_is_read_loses_nothing(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, 1000)
    with running(server, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=200, interval_seconds=0.05)
        with writer(server):
            while not query.planner.is_history_done():
                server.execute("FLUSH BINARY LOGS")
                query.batch(timeout=0.2)
        query.finish()
        query.assert_equal()
        query.close()


@pytest.mark.parametrize(
    ("type_sql", "value"),
    [
        ("VARCHAR(20) COLLATE utf8mb4_general_ci", "CONCAT(ELT(1 + MOD(seq, 4), 'a', 'B', 'é', 'Z'), seq)"),
        ("BIGINT UNSIGNED", "18446744073709551615 - seq * 3"),
        pytest.param(
            "TIMESTAMP(6)", "TIMESTAMP'2024-01-01 00:00:00' + INTERVAL seq * 7 SECOND", marks=pytest.mark.soak
        ),
        pytest.param("BINARY(4)", "UNHEX(LPAD(HEX(seq * 7919), 8, '0'))", marks=pytest.mark.soak),
        pytest.param("DECIMAL(20,5)", "(CAST(seq AS SIGNED) - 100) / 7", marks=pytest.mark.soak),
    ],
    ids=["text", "unsigned", "timestamp", "binary", "decimal"],
)
def test_m17_m16_keys_of_any_type_change_and_move_while_they_are_read(
    mariadb: MariaDbServer, tmp_path: Path, type_sql: str, value: str
) -> None:
    mariadb.execute(
        f"CREATE TABLE shop.keyed (k {type_sql} PRIMARY KEY, n INT) DEFAULT CHARACTER SET utf8mb4",
        f"INSERT INTO shop.keyed SELECT {value}, seq FROM shop.seq_1_to_200",
    )
    with running(mariadb, tmp_path, "shop.keyed") as capture:
        query = Delivering(capture, "shop.keyed", split_rows=30, parallelism=1, interval_seconds=0.05)
        number = 0

        def change(step: str) -> None:
            nonlocal number
            number += 1
            low, high = number * 13 % 200, number * 29 % 200
            mariadb.execute(
                f"DELETE FROM shop.keyed WHERE n = {low}",
                f"UPDATE shop.keyed SET n = n + 1000 WHERE n BETWEEN {high} AND {high + 5}",
                f"INSERT IGNORE INTO shop.keyed SELECT {value}, {number} FROM shop.seq_{low + 1}_to_{low + 3}",
                f"UPDATE IGNORE shop.keyed SET k = (SELECT {value} FROM shop.seq_{300 + number}_to_{300 + number})"
                f" WHERE n = {high + 7}",
            )

        while not query.planner.is_history_done():
            query.batch(timeout=0.2, between=change)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history["shop.keyed"].values()) == 1
        query.close()


def test_m21_connections_that_are_killed_in_the_middle_go_on_after_the_last_row(
    mariadb: MariaDbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(mariadb, 3000)
    mariadb.execute("UPDATE shop.orders SET note = REPEAT('x', 4000)")  # more than lies in the socket
    killed = 0
    batches = MySqlParts.batches

    def killing(part: MySqlParts) -> Iterator[pa.RecordBatch]:
        nonlocal killed
        for number, batch in enumerate(batches(part)):
            yield batch
            if number == 1 and killed < 2:
                killed += 1
                mariadb.execute(f"KILL {part.session.thread_id()}")

    monkeypatch.setattr("headwater.sources.mysql.parts.BLOCK_BYTES", 500_000)
    monkeypatch.setattr(MySqlParts, "batches", killing)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=10_000)
        with writer(mariadb, 0.01):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert killed >= 1  # a part that was read anew may have no second batch
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_m19_pages_and_splits_of_one_row_of_all_rows_and_of_more(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 6)
    with running(mariadb, tmp_path, TABLE) as capture:
        for rows, version in ((1, "parallel"), (3, "single"), (6, "parallel"), (7, "single")):
            query = Delivering(
                capture, TABLE, query=f"{version}{rows}", backfill=version, split_rows=rows, interval_seconds=0.01
            )
            query.finish()
            query.assert_equal()
            assert query.sink.history[TABLE].total() == 6
            query.close()


@pytest.mark.parametrize(
    "change",
    [
        "DROP COLUMN state, ADD COLUMN state VARCHAR(9) DEFAULT 'other'",
        "RENAME COLUMN state TO note, RENAME COLUMN note TO state",
    ],
    ids=["replaced", "swapped"],
)
def test_m25_a_column_of_the_same_name_is_not_taken_for_the_one_that_was_planned(
    server: MariaDbServer, tmp_path: Path, change: str
) -> None:
    """Servers know columns by their names alone; the log tells which is which."""
    create(server, 60)
    server.execute("ALTER TABLE shop.orders MODIFY note VARCHAR(9)")
    with running(server, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, keyed=True)  # reads a new column again

        def alter(step: str) -> None:
            if step == "planned":
                server.execute(f"ALTER TABLE shop.orders {change}", "UPDATE shop.orders SET total = 0 WHERE id = 3")

        try:
            query.batch(timeout=5, between=alter)
        except SnapshotExpired:  # not where the log has the change by then: the columns are read as it says
            query.crash()
            query.batch(timeout=5)
        query.finish()
        found = query.sink.mirror[TABLE]
        rows = server.execute("SELECT id, state, note, total FROM shop.orders")
        assert rows == [(key, *(found[key,][name] for name in ("state", "note", "total"))) for (key,) in sorted(found)]
        query.close()


PARTS = {
    "shop.ranged": "PARTITION BY RANGE (id) "
    "(PARTITION p0 VALUES LESS THAN (100), PARTITION p1 VALUES LESS THAN MAXVALUE)",
    "shop.hashed": "PARTITION BY RANGE (id) SUBPARTITION BY HASH (id) SUBPARTITIONS 2 "
    "(PARTITION p0 VALUES LESS THAN (150), PARTITION p1 VALUES LESS THAN MAXVALUE)",
    "other.plain": "",
}


def test_partitions_in_several_databases_of_a_server_in_another_time_zone(
    server: MariaDbServer, tmp_path: Path
) -> None:
    """And columns with defaults that are named in another order, and tables that come and go meanwhile."""
    server.execute("CREATE DATABASE other", "SET GLOBAL time_zone = '+05:30'")
    try:
        for name, parts in PARTS.items():
            server.execute(
                f"CREATE TABLE {name} (at TIMESTAMP(3) DEFAULT '2024-03-31 02:30:00.125', id INT PRIMARY KEY,"
                f" v INT DEFAULT 7, name VARCHAR(9) DEFAULT 'né') {parts}"
            )
            values = ", ".join(f"({n}, {n})" for n in range(1, 301))
            server.execute(f"INSERT INTO {name} (v, id) VALUES {values}", f"INSERT INTO {name} (id) VALUES (1000)")
        with running(server, tmp_path, *PARTS) as capture:
            query = Delivering(capture, *PARTS, split_rows=100, parallelism=1, interval_seconds=0.001)
            number = 0
            while not query.planner.is_history_done():
                query.batch(timeout=0.2)
                number += 1
                for name in PARTS:
                    server.execute(
                        f"UPDATE {name} SET v = -{number} WHERE id % 10 = {number % 10}",
                        f"UPDATE {name} SET id = id + 2000 WHERE id = {number * 9 % 300}",  # into another partition
                        f"DELETE FROM {name} WHERE id = {number * 7 % 300}",
                        f"INSERT INTO {name} (name, id) VALUES ('later', {5000 + number})",
                    )
                if number <= 5:
                    server.execute(f"CREATE TABLE shop.gone{number} (id INT PRIMARY KEY)")
                    server.execute(f"INSERT INTO shop.gone{number} VALUES (1)", f"DROP TABLE shop.gone{number}")
            query.finish()
            query.assert_equal()
            assert all(max(counts.values()) == 1 for counts in query.sink.history.values())
            query.close()
    finally:
        server.execute("SET GLOBAL time_zone = 'SYSTEM'")


def test_without_history_only_later_rows_come(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 5)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, history=False)
        mariadb.execute("INSERT INTO shop.orders VALUES (1, 'later', 1, '')")
        capture.catch_up()
        while query.batch(timeout=0.2):
            pass
        assert list(query.sink.mirror[TABLE]) == [(1,)]
        query.close()


def _failed_over(primary: MariaDbServer, replica: MariaDbServer, folder: Path, wait: Callable[[], None]) -> None:
    """In the middle of a backfill the replica, whose files have other names, takes over."""
    primary.execute("CREATE DATABASE shop")
    create(primary, 900)
    primary.execute("FLUSH LOGS")
    capture = MySqlCapture(primary, folder, [TABLE])
    capture.start()
    query = Delivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.001)
    with writer(primary, 0.01):
        for _ in range(3):
            query.batch(timeout=5)
    assert query.planner.has_history
    capture.stop()
    query.close()
    wait()
    primary.stop()
    moved = MySqlCapture(replica, folder, [TABLE])
    moved.start()
    query.capture, query.sink.source = moved, replica.dsn
    query.options = replace(query.options, source=replica.dsn)
    query.start()
    with writer(replica, 0.01):
        query.run_until(query.planner.is_history_done)
    query.finish()
    query.assert_equal()
    assert max(query.sink.history[TABLE].values()) == 1
    query.close()
    moved.stop()


@pytest.mark.soak
def test_m23_a_replica_takes_over_in_the_middle_of_the_history(start_mysql: StartServer, tmp_path: Path) -> None:
    primary = start_mysql("mariadb", {"server-id": "1"})
    replica = start_mysql("mariadb", {"server-id": "2", "log-bin": "other-name"})
    primary.execute("RESET MASTER")  # what made the server is not for the replica
    replicate(replica, primary)

    def taken_over() -> None:
        wait_for_replica(replica, primary)
        replica.execute("STOP SLAVE")

    _failed_over(primary, replica, tmp_path, taken_over)


@pytest.mark.soak
def test_m23_a_replica_of_mysql_takes_over_in_the_middle_of_the_history(
    start_mysql: StartServer, tmp_path: Path
) -> None:
    primary = start_mysql("mysql", {"server-id": "1"})
    replica = start_mysql("mysql", {"server-id": "2", "log-bin": "other-name"})
    replicate_mysql(replica, primary)

    def taken_over() -> None:
        wait_for_mysql_replica(replica, primary)
        replica.execute("STOP REPLICA")

    _failed_over(primary, replica, tmp_path, taken_over)


@pytest.mark.soak
@pytest.mark.parametrize("settings", [MYSQL, FILES], ids=["numbered", "file and position"])
def test_a_commit_that_waits_for_a_replica_is_not_taken_for_seen(
    settings: Mapping[str, str], start_mysql: StartServer, tmp_path: Path
) -> None:
    """It is in the log for seconds before anybody sees its rows: they come, once."""
    server = start_mysql("mysql", settings)
    server.execute("CREATE DATABASE shop")
    create(server, 50)
    with running(server, tmp_path, TABLE) as capture:
        server.execute(
            "INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'",
            "SET GLOBAL rpl_semi_sync_source_timeout = 3000",
            "SET GLOBAL rpl_semi_sync_source_enabled = ON",
        )
        before = end_of_log(server.dsn)
        late = threading.Thread(target=server.execute, args=("INSERT INTO shop.orders VALUES (1, 'late', 1, '')",))
        late.start()
        while settings is FILES and not end_of_log(server.dsn) > before:
            time.sleep(0.02)
        query = Delivering(capture, TABLE, split_rows=1000)
        query.batch(timeout=10)
        late.join()
        query.finish()
        query.assert_equal()
        query.close()
