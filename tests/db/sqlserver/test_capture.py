"""Changes come to the log, each once, in commit order: on the double of SQL Server, or on a real one if it is named."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from tests.db.sqlserver.running import TABLE, SqlServerCapture, create, running, stored_offset, writer
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.sqlserver import changes as stream
from headwater.stream import Op


def test_the_replayed_log_is_the_table(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        with writer(server):
            capture.wait_for(lambda: capture.capture.statistics.transactions > 60)
        capture.assert_equal(TABLE)
        capture.assert_once(TABLE)


def test_an_update_is_a_pair_and_one_of_the_key_a_delete_and_an_insert(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute(
            "INSERT INTO shop.orders VALUES (1, 'new', 1.5, N'ä'), (2, 'new', NULL, NULL)",
            "UPDATE shop.orders SET total = 2 WHERE id = 1",
            "UPDATE shop.orders SET id = 3 WHERE id = 2",
            "DELETE FROM shop.orders WHERE id = 1",
        )
        capture.catch_up()
        found = [(Op(row["_op"]).name, row["id"], row["total"]) for row in capture.rows(TABLE)]
        assert [(op, key) for op, key, _ in found] == [
            ("INSERT", 1),
            ("INSERT", 2),
            ("UPDATE_DELETE", 1),
            ("UPDATE_INSERT", 1),
            ("DELETE", 2),
            ("INSERT", 3),
            ("DELETE", 1),
        ]
        assert str(found[3][2]) == "2.00"
        assert all(row["_commit_timestamp"] is not None for row in capture.rows(TABLE))


def test_a_transaction_over_tables_is_in_one_epoch_and_has_one_number(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    server.execute("CREATE TABLE shop.lines (id bigint NOT NULL, line int NOT NULL, PRIMARY KEY (id, line))")
    track(server, "lines")
    with running(server, tmp_path, TABLE, "shop.lines") as capture:
        for number in range(20):
            server.execute(
                f"BEGIN TRANSACTION; INSERT INTO shop.orders VALUES ({number}, 'new', 1, NULL);"
                f" INSERT INTO shop.lines VALUES ({number}, 1), ({number}, 2); COMMIT"
            )
        server.execute("BEGIN TRANSACTION; INSERT INTO shop.lines VALUES (99, 1); ROLLBACK")
        capture.catch_up()
        places = defaultdict(set)
        positions = []
        for log in (TABLE, "shop.lines"):
            for row in capture.rows(log):
                places[row["_position"][:8]].add((row["_epoch"], row["id"]))
                positions.append(row["_position"])
        assert len(places) == 20
        assert all(len(seen) == 1 for seen in places.values())
        assert len(set(positions)) == len(positions) == 60


def test_a_large_transaction_comes_in_blocks_and_ends_in_one_epoch(
    server: AnySqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(server, 1200)
    monkeypatch.setattr("headwater.sources.sqlserver.changes.BLOCK_ROWS", 101)
    monkeypatch.setattr(stream, "MAX_ROWS", 300)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("UPDATE shop.orders SET total = total + 1")
        capture.catch_up()
        rows = capture.rows(TABLE)
        assert len(rows) == 2400
        assert len({row["_epoch"] for row in rows}) == 1
        assert [row["_op"] for row in rows] == [Op.UPDATE_DELETE, Op.UPDATE_INSERT] * 1200


def test_blocks_without_values_are_joined_by_the_librarys_rows_too(
    server: AnySqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(server)
    monkeypatch.setattr("headwater.sources.sqlserver.changes.BLOCK_ROWS", 3)
    monkeypatch.setenv("HEADWATER_PURE", "1")
    with running(server, tmp_path, TABLE) as capture:
        server.execute(f"INSERT INTO shop.orders VALUES {', '.join(f'({n}, NULL, NULL, NULL)' for n in range(9))}")
        server.execute("UPDATE shop.orders SET total = id, note = CASE WHEN id > 4 THEN N'x' END WHERE id > 0")
        capture.assert_equal(TABLE)


def test_a_restart_goes_on_where_the_log_ends(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        capture.stop()
        server.execute(
            "INSERT INTO shop.orders VALUES (2, 'b', 1, NULL)", "UPDATE shop.orders SET total = 5 WHERE id = 1"
        )
        capture.start()
        capture.assert_equal(TABLE)
        capture.assert_once(TABLE)


def test_the_position_goes_on_while_nothing_that_is_captured_changes(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    server.execute("CREATE TABLE shop.others (id int NOT NULL PRIMARY KEY)")
    with running(server, tmp_path, TABLE) as capture:
        capture.wait_for(lambda: stored_offset(capture.store) is not None)
        before = stored_offset(capture.store)
        assert before is not None
        server.execute("INSERT INTO shop.others VALUES (1)")
        capture.reach_the_end()
        after = stored_offset(capture.store)
        assert after is not None
        assert after > before
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.assert_equal(TABLE)


def test_a_table_that_is_added_comes_from_there_on(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("CREATE TABLE shop.late (id int NOT NULL PRIMARY KEY)")
        track(server, "late")
        server.execute("INSERT INTO shop.late VALUES (1)")
        capture.catch_up()
        capture.stop()
        capture.start([TABLE, "shop.late"])
        server.execute("INSERT INTO shop.late VALUES (2)", "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        assert [row["id"] for row in capture.rows("shop.late")] == [2]
        capture.assert_equal(TABLE)


def test_a_table_that_is_added_while_the_capture_is_behind_survives_a_broken_connection(
    double: SqlServerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(double)
    monkeypatch.setattr(stream, "MAX_COMMITS", 1)
    with running(double, tmp_path, TABLE) as capture:
        capture.stop()
        double.execute(*(f"INSERT INTO shop.orders VALUES ({n}, 'a', 1, NULL)" for n in range(20)))
        double.execute("CREATE TABLE shop.late (id int NOT NULL PRIMARY KEY)")
        track(double, "late")
        double.execute("INSERT INTO shop.late VALUES (1)")
        for number in (3, 7):  # in the middle of what was missed
            double.inject(rf"shop_orders_CT.*{double.engine.commits[number].lsn:020X}", "drop")
        capture.start([TABLE, "shop.late"])
        double.execute("INSERT INTO shop.late VALUES (2)")
        capture.catch_up()
        assert double.has_injected
        assert [row["id"] for row in capture.rows("shop.late")][-1] == 2
        assert capture.tables()["shop.late"].state.value == "active"
        capture.assert_equal(TABLE)
        capture.assert_once(TABLE, "shop.late")


def test_commits_that_the_job_has_not_read_come_when_it_has(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.engine.agent_runs = False
        double.execute(
            "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)", "INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)"
        )
        assert capture.rows(TABLE) == []
        double.engine.agent_runs = True
        capture.catch_up()
        assert [row["id"] for row in capture.rows(TABLE)] == [1, 2]


def test_a_connection_that_breaks_in_the_middle_loses_nothing(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double, 30)
    with running(double, tmp_path, TABLE) as capture:
        failures: tuple[int | str, ...] = ("drop", -1205, 596)
        for number, what in enumerate(failures, 1):
            double.inject("shop_orders_CT" if number % 2 == 0 else "lsn_time_mapping", what)
            double.execute(f"UPDATE shop.orders SET total = total + {number}")
            capture.catch_up()
            double.drop_connections()
        assert double.has_injected
        double.execute("DELETE FROM shop.orders WHERE id < 30")
        capture.catch_up()
        capture.assert_once(TABLE)
        assert len(capture.rows(TABLE)) == 3 * 60 + 9


def test_the_capture_needs_no_right_to_see_the_state_of_the_database(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE], dsn=double.dsn_of("plain"))
    capture.start()
    double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    capture.wait_for(lambda: len(capture.rows(TABLE)) == 1)
    capture.stop()
