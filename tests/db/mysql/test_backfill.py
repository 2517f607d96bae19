"""History and changes of MariaDB and MySQL come to the source, each row once, whoever writes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.mysql.delivering import TABLE, MySqlDelivering, create, writer
from tests.db.mysql.running import running
from tests.db.mysql.test_mysql_snapshots import TYPE_ROWS, TYPES
from tests.servers.mariadb import MariaDbServer

from headwater.backfill.control import ask_query
from headwater.sources.mysql.part import MySqlPart


def test_history_and_live_changes_come_to_the_source(server: MariaDbServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=300, interval_seconds=0.05)
        with writer(server):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert query.batches > 3
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_one_reader_pages_by_key(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, 1000)
    with running(server, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, backfill="single", split_rows=100, interval_seconds=0.05)
        with writer(server):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_history_and_changes_have_the_same_values_of_every_type(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(TYPES, *(f"INSERT INTO shop.types VALUES ({values})" for values in TYPE_ROWS))
    with running(server, tmp_path, "shop.types") as capture:
        query = MySqlDelivering(capture, "shop.types")
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
        query = MySqlDelivering(capture, TABLE, split_rows=1000, keyed=keyed)
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


STEPS = ("planned", "logged", "units", "read", "committed")


def test_m31_a_crash_at_each_step_loses_and_doubles_nothing(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 600)
    crashes = iter(STEPS)

    def crash_at(step: str) -> Callable[[str], None]:
        def between(now: str) -> None:
            if now == step:
                raise _Crash

        return between

    with running(mariadb, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.05)
        with writer(mariadb, 0.02):
            while not query.planner.is_history_done():
                try:
                    query.batch(timeout=0.2, between=crash_at(next(crashes, "")))
                except _Crash:
                    query.crash()
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


class _Crash(Exception):
    pass


def test_flush_logs_while_history_is_read_loses_nothing(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, 1000)
    with running(server, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=200, interval_seconds=0.05)
        with writer(server):
            while not query.planner.is_history_done():
                server.execute("FLUSH BINARY LOGS")
                query.batch(timeout=0.2)
        query.finish()
        query.assert_equal()
        query.close()


def test_m32_a_truncate_in_the_middle_begins_anew(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 900)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=300, parallelism=1, interval_seconds=0.05)
        query.batch(timeout=5)

        def truncate(step: str) -> None:
            if step == "units":  # planned, and not read yet
                mariadb.execute("TRUNCATE shop.orders", "INSERT INTO shop.orders VALUES (5, 'after', 1, 'x')")

        query.batch(timeout=5, between=truncate)
        query.finish()
        query.assert_equal()
        assert len(query.sink.mirror[TABLE]) == 1
        query.close()


def test_m15_a_transaction_that_was_open_when_it_was_planned_is_delivered(
    server: MariaDbServer, tmp_path: Path
) -> None:
    create(server, 300)
    with running(server, tmp_path, TABLE) as capture, server.connect(autocommit=False) as session:
        query = MySqlDelivering(capture, TABLE, split_rows=1000)
        session.cursor().execute("UPDATE shop.orders SET total = -1 WHERE id <= 30")

        def commit(step: str) -> None:
            if step == "units":
                session.commit()

        query.batch(timeout=5, between=commit)
        assert min(row["total"] for row in query.sink.mirror[TABLE].values()) == 1
        query.finish()
        query.assert_equal()
        query.close()


def test_m20_m33_an_empty_table_an_idle_one_and_a_busy_one_are_done(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 600)
    mariadb.execute(
        "CREATE TABLE shop.empty (id INT PRIMARY KEY)",
        "CREATE TABLE shop.idle (a VARCHAR(9), b INT, PRIMARY KEY (a, b)) COLLATE utf8mb4_general_ci",
        "INSERT INTO shop.idle SELECT 'Same', seq FROM shop.seq_1_to_300",
        "INSERT INTO shop.idle SELECT 'other', seq FROM shop.seq_1_to_10",
    )
    names = (TABLE, "shop.empty", "shop.idle")
    with running(mariadb, tmp_path, *names) as capture:
        query = MySqlDelivering(capture, *names, split_rows=100, interval_seconds=0.05)
        with writer(mariadb):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert sum(query.sink.history["shop.idle"].values()) == 310
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
        query = MySqlDelivering(capture, "shop.keyed", split_rows=30, parallelism=1, interval_seconds=0.05)
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
    batches = MySqlPart.batches

    def killing(part: MySqlPart) -> Iterator[pa.RecordBatch]:
        nonlocal killed
        part._block_bytes = 500_000
        for number, batch in enumerate(batches(part)):
            yield batch
            if number == 1 and killed < 2:
                killed += 1
                mariadb.execute(f"KILL {part.session.thread_id()}")

    monkeypatch.setattr(MySqlPart, "batches", killing)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=10_000)
        with writer(mariadb, 0.01):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert killed >= 1  # a part that was read anew may have no second batch
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_m25_a_column_that_comes_while_history_is_read(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 900)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.05, keyed=True)
        query.batch(timeout=5)

        def alter(step: str) -> None:
            if step == "units":
                mariadb.execute(
                    "ALTER TABLE shop.orders ADD COLUMN extra INT DEFAULT 7",
                    "UPDATE shop.orders SET extra = 8 WHERE id > 2500",
                )

        query.batch(timeout=5, between=alter)
        query.finish()
        query.assert_equal()
        query.close()


def test_m19_pages_and_splits_of_one_row_of_all_rows_and_of_more(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 6)
    with running(mariadb, tmp_path, TABLE) as capture:
        for rows, version in ((1, "parallel"), (3, "single"), (6, "parallel"), (7, "single")):
            query = MySqlDelivering(
                capture, TABLE, query=f"{version}{rows}", backfill=version, split_rows=rows, interval_seconds=0.01
            )
            query.finish()
            query.assert_equal()
            assert query.sink.history[TABLE].total() == 6
            query.close()


def test_m27_a_limit_of_0_holds_history_and_another_one_lets_it_go_on(mariadb: MariaDbServer, tmp_path: Path) -> None:
    create(mariadb, 3)
    with running(mariadb, tmp_path, TABLE) as capture:
        query = MySqlDelivering(capture, TABLE, rows_per_second=0)
        assert not query.batch(timeout=0.5)
        assert query.planner.is_waiting()
        limit = {"table": TABLE, "rows_per_second": 1000}
        asking = threading.Thread(target=ask_query, args=(query.options.store, "mirror", "throttle", limit))
        asking.start()
        query.run_until(lambda: not asking.is_alive())
        query.finish()
        query.assert_equal()
        assert query.sink.history[TABLE].total() == 3
        query.close()
