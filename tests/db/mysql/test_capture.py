"""Capture of MariaDB and MySQL: what the log tells is what the tables are."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.db.capture.running import OPTIONS
from tests.db.mysql.running import MySqlCapture, running
from tests.servers.mariadb import MariaDbServer

from headwater.capture.renewal import renew
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.log_store.log_events import SCHEMA, TRUNCATE
from headwater.sources.errors import SchemaStopped, SourceNotFound, UnsupportedTable
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.table import SpecialValues
from headwater.stream import Op

ORDERS = (
    "CREATE TABLE shop.orders (id bigint PRIMARY KEY, amount decimal(18,4), note varchar(200), paid tinyint(1), "
    "at datetime(6))"
)
LOG = "shop.orders"


def fill(server: MariaDbServer, first: int, last: int, table: str = LOG) -> None:
    """In one transaction of several statements."""
    numbers = range(first, last + 1)
    with server.connect(autocommit=False) as session, session.cursor() as cursor:
        for start in range(0, len(numbers), 500):
            rows = ", ".join(
                f"({i}, {i * 1.25}, 'note {i}', {i % 3 == 0}, '2026-01-01 00:00:00.{i % 1000000:06d}')"
                for i in numbers[start : start + 500]
            )
            cursor.execute(f"INSERT INTO {table} (id, amount, note, paid, at) VALUES {rows}")
        session.commit()


def test_the_replayed_log_is_the_table(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    with running(server, tmp_path, LOG) as capture:
        fill(server, 1, 2000)
        server.execute(
            "UPDATE shop.orders SET amount = amount + 1 WHERE id % 7 = 0",
            "DELETE FROM shop.orders WHERE id % 11 = 0",
            "UPDATE shop.orders SET id = id + 100000 WHERE id % 13 = 0",
            "UPDATE shop.orders SET note = NULL WHERE id % 17 = 0",
            "REPLACE INTO shop.orders (id, note) VALUES (1, 'replaced')",
            "INSERT INTO shop.orders (id) VALUES (2) ON DUPLICATE KEY UPDATE note = 'upserted'",
        )
        capture.assert_equal(LOG)
        capture.assert_once(LOG)
        ops = {row["_op"] for row in capture.rows(LOG)}
    assert ops == {Op.INSERT, Op.DELETE, Op.UPDATE_DELETE, Op.UPDATE_INSERT}


def test_a_restart_goes_on_without_loss_or_repeat(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    capture = MySqlCapture(server, tmp_path, [LOG])
    capture.start()
    fill(server, 1, 100)
    capture.catch_up()
    capture.stop()
    fill(server, 101, 200)
    server.execute("FLUSH LOGS")
    capture.start()
    fill(server, 201, 300)
    server.execute("FLUSH LOGS")
    fill(server, 301, 310)
    capture.assert_equal(LOG)
    capture.stop()
    assert len(capture.rows(LOG)) == 310
    capture.assert_once(LOG)


def test_a_transaction_is_never_split_over_epochs_and_is_one_cut_over_tables(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        mariadb.execute(f"CREATE TABLE shop.{name} (id int AUTO_INCREMENT PRIMARY KEY, tx int)")
    with running(mariadb, tmp_path, "shop.a", "shop.b") as capture:
        with mariadb.connect(autocommit=False) as session, session.cursor() as cursor:
            for number in range(300):
                for name in ("a", "b", "a"):
                    cursor.execute(f"INSERT INTO shop.{name} (tx) VALUES ({number})")
                session.commit()
        capture.catch_up()
        epochs: dict[int, set[int]] = {}
        for name in ("shop.a", "shop.b"):
            for row in capture.rows(name):
                epochs.setdefault(row["tx"], set()).add(row["_epoch"])
    assert len(epochs) == 300
    assert all(len(found) == 1 for found in epochs.values())


def test_m32_truncate_stands_between_the_rows_before_and_after(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    with running(server, tmp_path, LOG) as capture:
        fill(server, 1, 50)
        server.execute("TRUNCATE TABLE shop.orders", "INSERT INTO shop.orders (id) VALUES (1), (2)")
        capture.assert_equal(LOG)
        assert [event.kind for event in capture.events(LOG)] == [TRUNCATE]
        assert capture.replayed(LOG).num_rows == 2


def test_statements_with_settings_of_their_own_and_keys_that_remove_rows_are_noticed(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 9)
        mariadb.execute("SET STATEMENT lock_wait_timeout = 5 FOR TRUNCATE TABLE shop.orders")
        fill(mariadb, 3, 4)
        capture.assert_equal(LOG)
        mariadb.execute("UPDATE shop.orders SET note = 'x'", "ALTER IGNORE TABLE shop.orders ADD UNIQUE (note(3))")
        assert f"headwater resnapshot {LOG}" in capture.wait_until_stopped(LOG)


def test_columns_that_come_go_grow_and_change_their_names_lose_no_row(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS, "ALTER TABLE shop.orders ADD COLUMN size int")
    with running(server, tmp_path, LOG) as capture:
        fill(server, 1, 10)
        server.execute("ALTER TABLE shop.orders ADD COLUMN colour varchar(20) NOT NULL DEFAULT 'blue' AFTER id")
        fill(server, 11, 20)
        server.execute(
            "INSERT INTO shop.orders (id, size) VALUES (100, 5)",
            "ALTER TABLE shop.orders MODIFY size bigint",
            "INSERT INTO shop.orders (id, size) VALUES (101, 5000000000)",
            "ALTER TABLE shop.orders RENAME COLUMN note TO remark",
            "INSERT INTO shop.orders (id, remark) VALUES (102, 'renamed')",
            "ALTER TABLE shop.orders CHANGE COLUMN remark comment text, DROP COLUMN paid",
            "INSERT INTO shop.orders (id) VALUES (103)",
            "INSERT INTO shop.orders (id, comment) VALUES (200, 'x'), (201, 'y')",
        )
        capture.assert_equal(LOG)
        changes = [event.detail for event in capture.events(LOG) if event.kind == SCHEMA]
        fill_rows = {row["id"]: row["colour"] for row in capture.replayed(LOG).to_pylist()}
    assert changes[0]["added"] == ["colour"]
    assert fill_rows[1] == "blue"
    assert changes[1]["retyped"] == ["size"]
    assert changes[2]["renamed"] == {"note": "remark"}
    assert (changes[3]["renamed"], changes[3]["dropped"]) == ({"remark": "comment"}, ["paid"])


def test_a_rename_is_a_rename_also_when_its_first_row_comes_after_a_restart(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    capture = MySqlCapture(mariadb, tmp_path, [LOG])
    capture.start()
    fill(mariadb, 1, 3)
    mariadb.execute("ALTER TABLE shop.orders RENAME COLUMN note TO remark")
    capture.catch_up()
    capture.stop()
    mariadb.execute("INSERT INTO shop.orders (id, remark) VALUES (10, 'after')")
    capture.start()
    capture.assert_equal(LOG)
    capture.stop()
    assert capture.replayed(LOG).sort_by("id").to_pylist()[0]["remark"] == "note 1"


def test_a_column_that_is_dropped_and_made_anew_at_once_is_another_one(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 3)
        mariadb.execute("ALTER TABLE shop.orders DROP COLUMN note, ADD COLUMN note varchar(200) DEFAULT 'new'")
        mariadb.execute("INSERT INTO shop.orders (id) VALUES (10)")
        capture.assert_equal(LOG)


def test_the_policy_ignore_keeps_the_columns(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG, schema_policy=SchemaPolicy.IGNORE) as capture:
        fill(mariadb, 1, 3)
        mariadb.execute(
            "ALTER TABLE shop.orders ADD COLUMN extra int FIRST, DROP COLUMN paid",
            "INSERT INTO shop.orders (id, extra) VALUES (10, 1)",
        )
        capture.catch_up()
        rows = capture.replayed(LOG).sort_by("id").to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3, 10]
    assert "extra" not in rows[0]
    assert (rows[2]["paid"], rows[3]["paid"]) == (1, None)


def test_the_policy_stop_stops_before_the_change_and_goes_on_with_another(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    capture = MySqlCapture(mariadb, tmp_path, [LOG], schema_policy=SchemaPolicy.STOP)
    capture.start()
    fill(mariadb, 1, 3)
    capture.catch_up()
    mariadb.execute(
        "ALTER TABLE shop.orders ADD COLUMN extra int", "INSERT INTO shop.orders (id, extra) VALUES (10, 1)"
    )
    assert isinstance(capture.wait_for_end(), SchemaStopped)
    capture = MySqlCapture(mariadb, tmp_path, [LOG])
    capture.start()
    capture.assert_equal(LOG)
    capture.stop()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DROP TABLE shop.orders", "dropped at the source"),
        ("RENAME TABLE shop.orders TO shop.old_orders", "called shop.old_orders"),
        ("ALTER TABLE shop.orders RENAME TO shop.old_orders", "called shop.old_orders"),
        ("RENAME TABLE shop.orders TO shop.x, shop.other TO shop.orders", "took its name"),
        ("ALTER TABLE shop.orders DROP PRIMARY KEY, ADD PRIMARY KEY (id, at)", "key changed"),
        ("ALTER TABLE shop.orders MODIFY amount int", "changed from"),
        ("ALTER TABLE shop.orders DROP COLUMN id, ADD COLUMN id2 int PRIMARY KEY", "key changed"),
    ],
)
def test_a_table_that_cannot_be_followed_stops_and_the_others_go_on(
    statement: str, reason: str, mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS, ORDERS.replace("shop.orders", "shop.other"))
    with running(mariadb, tmp_path, LOG, "shop.other") as capture:
        mariadb.execute("UPDATE shop.orders SET at = now()", "INSERT INTO shop.orders (id, at) VALUES (0, now())")
        mariadb.execute(statement)
        if "MODIFY" in statement or "ADD PRIMARY KEY" in statement:
            mariadb.execute("INSERT INTO shop.orders (id, at) VALUES (5, now())")
        told = capture.wait_until_stopped(LOG)
        if "shop.other TO" not in statement:
            fill(mariadb, 1, 5, "shop.other")
            capture.assert_equal("shop.other")
    assert reason in told
    assert f"headwater resnapshot {LOG}" in told


def test_m26_a_table_that_was_dropped_and_made_anew_stops(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 3)
        mariadb.execute("DROP TABLE shop.orders", ORDERS)
        fill(mariadb, 10, 12)
        assert "dropped" in capture.wait_until_stopped(LOG)
        assert capture.replayed(LOG).num_rows == 3


def test_a_table_that_is_dropped_while_no_capture_runs_stops_alone(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, "CREATE TABLE shop.other LIKE shop.orders")
    with running(mariadb, tmp_path, LOG, "shop.other"):
        fill(mariadb, 1, 3)
    mariadb.execute("DROP TABLE shop.orders")
    with running(mariadb, tmp_path, LOG, "shop.other") as capture:
        fill(mariadb, 1, 5, "shop.other")
        assert "dropped" in capture.wait_until_stopped(LOG)
        capture.assert_equal("shop.other")


@pytest.mark.parametrize(("copy", "old"), [("_orders_gho", "_orders_del"), ("_orders_new", "_orders_old")])
def test_a_swap_of_gh_ost_or_pt_osc_loses_no_row(copy: str, old: str, mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 20)
        mariadb.execute(
            f"CREATE TABLE shop.{copy} LIKE shop.orders",
            f"ALTER TABLE shop.{copy} ADD COLUMN extra int DEFAULT 7",
            f"INSERT INTO shop.{copy} (id, amount, note, paid, at) SELECT id, amount, note, paid, at FROM shop.orders",
            f"RENAME TABLE shop.orders TO shop.{old}, shop.{copy} TO shop.orders",
            f"DROP TABLE shop.{old}",
        )
        fill(mariadb, 21, 30)
        mariadb.execute("UPDATE shop.orders SET note = 'x' WHERE id < 5")
        capture.assert_equal(LOG)


def test_tables_are_added_while_it_runs(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, ORDERS.replace("shop.orders", "shop.more"))
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 5)
        ask_capture(capture.store, AddTables(("shop.more",)))
        fill(mariadb, 6, 10)
        fill(mariadb, 1, 10, "shop.more")
        capture.assert_equal(LOG, "shop.more")


def test_a_table_without_a_key_or_that_is_not_there_is_refused(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute("CREATE TABLE shop.heap (a int)", "CREATE VIEW shop.seen AS SELECT 1 AS a")
    assert isinstance(MySqlCapture(mariadb, tmp_path, ["shop.heap"]).fails_to_start(), UnsupportedTable)
    assert isinstance(MySqlCapture(mariadb, tmp_path, ["shop.seen"]).fails_to_start(), UnsupportedTable)
    assert isinstance(MySqlCapture(mariadb, tmp_path, ["shop.none"]).fails_to_start(), SourceNotFound)


def test_keys_are_in_the_order_of_the_index_and_may_be_a_unique_index(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(
        "CREATE TABLE shop.k (a int NOT NULL, b int NOT NULL, c int, PRIMARY KEY (b, a))",
        "CREATE TABLE shop.u (a int NOT NULL, c int, UNIQUE KEY by_a (a), UNIQUE KEY by_c (c))",
    )
    with running(mariadb, tmp_path, "shop.k", "shop.u") as capture:
        mariadb.execute("INSERT INTO shop.k VALUES (1, 2, 3), (2, 1, 4)", "INSERT INTO shop.u VALUES (1, NULL), (2, 7)")
        mariadb.execute("UPDATE shop.u SET c = 8 WHERE a = 1", "DELETE FROM shop.k WHERE a = 1")
        capture.assert_equal("shop.k", "shop.u")
        assert capture.capture.source.tables(["shop.k"])[0].key_columns == ("b", "a")


def test_generated_and_invisible_columns_are_captured(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE TABLE shop.g (id int PRIMARY KEY, s int AS (id + 1) STORED, v int AS (id + 2) VIRTUAL, "
        "i int INVISIBLE DEFAULT 5)"
    )
    with running(server, tmp_path, "shop.g") as capture:
        server.execute("INSERT INTO shop.g (id) VALUES (1), (2)", "UPDATE shop.g SET id = 20, i = 6 WHERE id = 2")
        capture.assert_equal("shop.g")


def test_tinyint1_is_a_number_or_a_boolean_as_the_address_says(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute("CREATE TABLE shop.flags (id int PRIMARY KEY, f tinyint(1))")
    with running(server, tmp_path / "number", "shop.flags") as capture:
        server.execute("INSERT INTO shop.flags VALUES (1, 1), (2, 0), (3, NULL)")
        capture.assert_equal("shop.flags")
        assert [row["f"] for row in capture.rows("shop.flags")] == [1, 0, None]
    with running(server, tmp_path / "flag", "shop.flags", dsn=f"{server.dsn}?tinyint1=boolean") as capture:
        server.execute("INSERT INTO shop.flags VALUES (4, 1), (5, 0), (6, NULL)")
        capture.catch_up()
        assert [row["f"] for row in capture.rows("shop.flags")] == [True, False, None]
        server.execute("INSERT INTO shop.flags VALUES (7, 2)")
        assert "numbers that are neither 0 nor 1" in capture.wait_until_stopped("shop.flags")


@pytest.mark.parametrize("policy", [SpecialValues.NULL, SpecialValues.TEXT])
def test_zero_dates_and_long_times_are_what_the_policy_says(
    policy: SpecialValues, server: MariaDbServer, tmp_path: Path
) -> None:
    server.execute("CREATE TABLE shop.odd (id int PRIMARY KEY, d date, t time(3))")
    special = {"shop.odd.d": policy, "shop.odd.t": policy}
    with running(server, tmp_path, "shop.odd", special_values=special) as capture:
        server.execute("SET sql_mode = ''", "INSERT INTO shop.odd VALUES (1, '0000-00-00', '-838:59:59')")
        server.execute("INSERT INTO shop.odd VALUES (2, '2026-02-03', '12:34:56.5')")
        capture.catch_up()
        found = [(str(row["d"]), str(row["t"])) for row in capture.rows("shop.odd")]
    expected = {
        SpecialValues.NULL: [("None", "None"), ("2026-02-03", "12:34:56.500000")],
        SpecialValues.TEXT: [("0000-00-00", "-838:59:59.000"), ("2026-02-03", "12:34:56.500")],
    }
    assert found == expected[policy]


def test_a_special_value_stops_its_table_alone_and_the_advice_works(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute("CREATE TABLE shop.odd (id int PRIMARY KEY, d date, n int)", ORDERS)
    capture = MySqlCapture(server, tmp_path, ["shop.odd", LOG])
    capture.options = replace(OPTIONS, epoch_seconds=1.0)  # several transactions are told at once
    capture.start()
    server.execute(
        "SET sql_mode = ''",
        "INSERT INTO shop.orders (id) VALUES (0)",
        "INSERT INTO shop.odd VALUES (1, '2026-01-01', 1), (2, NULL, 2)",
        "UPDATE shop.odd SET n = 3 WHERE id = 2",
        "BEGIN",
        "INSERT INTO shop.odd VALUES (3, '2026-01-01', 3)",
        "INSERT INTO shop.orders (id) VALUES (1)",
        "INSERT INTO shop.odd VALUES (4, '0000-00-00', 4)",
        "COMMIT",
        "INSERT INTO shop.odd VALUES (5, '2026-01-01', 5)",
    )
    reason = capture.wait_until_stopped("shop.odd")
    assert "Table shop.odd, column 'd' (date) holds dates of no calendar" in reason
    assert reason.endswith("headwater resnapshot shop.odd")
    assert [row["id"] for row in capture.rows("shop.odd")] == [1, 2, 2, 2]
    capture.assert_equal(LOG)
    capture.stop()
    with running(server, tmp_path, "shop.odd", LOG, special_values={"shop.odd": SpecialValues.TEXT}) as again:
        server.execute("INSERT INTO shop.orders (id) VALUES (2)")
        again.assert_equal(LOG)
        assert not renew(again.store, ["shop.odd"])
        server.execute("SET sql_mode = ''", "INSERT INTO shop.odd VALUES (6, '0000-00-00', 6)")
        again.catch_up()
        told = again.rows("shop.odd")[-1]
        assert [told["id"], told["d"], told["n"]] == [6, "0000-00-00", 6]
        assert not again.capture.statistics.stopped_tables
        server.execute(
            "SET sql_mode = ''",
            "ALTER TABLE shop.orders ADD day date DEFAULT '0000-00-00'",  # which the rows of before have now
            "INSERT INTO shop.orders (id) VALUES (3)",
        )
        assert "older rows have in new columns is not in the log: day" in again.wait_until_stopped(LOG)


def test_rows_of_an_xa_transaction_come_with_its_commit_and_not_before(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    with running(server, tmp_path, LOG) as capture:
        for number, verb in ((1, "COMMIT"), (2, "ROLLBACK")):
            server.execute(
                f"XA START 'x{number}'",
                f"INSERT INTO shop.orders (id) VALUES ({number})",
                f"XA END 'x{number}'",
                f"XA PREPARE 'x{number}'",
            )
            fill(server, number * 100, number * 100 + 5)
            time.sleep(0.3)
            assert all(row["id"] >= 100 or row["id"] < number for row in capture.rows(LOG))
            server.execute(f"XA {verb} 'x{number}'")
        capture.assert_equal(LOG)


def test_a_capture_does_not_begin_before_prepared_transactions_are_decided(
    server: MariaDbServer, tmp_path: Path
) -> None:
    server.execute(ORDERS)
    server.execute("XA START 'x'", "INSERT INTO shop.orders (id) VALUES (1)", "XA END 'x'", "XA PREPARE 'x'")
    capture = MySqlCapture(server, tmp_path, [LOG])
    capture.start()
    try:
        time.sleep(0.7)
        assert capture.offset() is None
    finally:
        server.execute("XA COMMIT 'x'")
    capture.catch_up()
    capture.stop()


@pytest.mark.parametrize("rows", [3, 40_000])
def test_rows_that_are_logged_and_rolled_back_are_not_told(rows: int, mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 5)
        with mariadb.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute("CREATE TEMPORARY TABLE shop.passing (a int)")
            cursor.execute(f"INSERT INTO shop.orders (id) SELECT 100 + seq FROM shop.seq_1_to_{rows}")
            cursor.execute("DROP TEMPORARY TABLE shop.passing")
            session.rollback()
        fill(mariadb, 6, 9)
        capture.assert_equal(LOG)
        assert {row["id"] for row in capture.rows(LOG)} == set(range(1, 10))


def test_partitioned_and_subpartitioned_tables_are_followed_and_a_dropped_partition_stops_them(
    server: MariaDbServer, tmp_path: Path
) -> None:
    server.execute(
        "CREATE TABLE shop.parts (id int, day int, note text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day) "
        "SUBPARTITION BY HASH (id) SUBPARTITIONS 2 "
        "(PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN (20))"
    )
    with running(server, tmp_path, "shop.parts") as capture:
        server.execute(
            "INSERT INTO shop.parts VALUES (1, 1, 'a'), (2, 11, 'b'), (3, 5, 'c')",
            "UPDATE shop.parts SET day = 15 WHERE id = 1",
            "DELETE FROM shop.parts WHERE id = 3",
            "ALTER TABLE shop.parts ADD PARTITION (PARTITION p2 VALUES LESS THAN (30))",
            "INSERT INTO shop.parts VALUES (4, 25, 'd')",
        )
        capture.assert_equal("shop.parts")
        server.execute("ALTER TABLE shop.parts DROP PARTITION p1")
        assert "a partition was dropped" in capture.wait_until_stopped("shop.parts").lower()


def test_unsigned_keys_beyond_2_to_the_63_and_timestamp_keys_of_a_server_in_another_zone(
    server: MariaDbServer, tmp_path: Path
) -> None:
    server.execute(
        "CREATE TABLE shop.big (id bigint unsigned PRIMARY KEY, n int unsigned)",
        "CREATE TABLE shop.times (at timestamp(3) PRIMARY KEY, d datetime)",
    )
    with running(server, tmp_path, "shop.big", "shop.times") as capture:
        server.execute(
            "SET time_zone = '+09:00'",
            "INSERT INTO shop.big VALUES (18446744073709551615, 4294967295), (9223372036854775808, 0), (1, NULL)",
            "UPDATE shop.big SET n = 1 WHERE id > 9223372036854775807",
            "INSERT INTO shop.times VALUES ('2026-03-01 00:00:00.125', '2026-03-01 00:00:00')",
        )
        capture.assert_equal("shop.big", "shop.times")


def test_tables_of_several_databases_with_names_of_every_kind(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE DATABASE `My Shop`",
        "CREATE TABLE `My Shop`.`Order Lines` (`Id` int PRIMARY KEY, `a b` varchar(10), `äöü` text, `select` int)",
        "CREATE TABLE shop.Orders (ID int PRIMARY KEY, x int)",
    )
    names = ('"My Shop"."Order Lines"', "shop.Orders")
    with running(server, tmp_path, *names) as capture:
        server.execute(
            "INSERT INTO `My Shop`.`Order Lines` VALUES (1, 'x', 'ü', 2)",
            "INSERT INTO shop.Orders VALUES (1, 2)",
            "ALTER TABLE shop.Orders RENAME COLUMN X TO `Y`",
            "INSERT INTO shop.Orders VALUES (2, 3)",
        )
        capture.assert_equal(*names)
        assert set(capture.tables()) == {'"My Shop"."Order Lines"', 'shop."Orders"'}
