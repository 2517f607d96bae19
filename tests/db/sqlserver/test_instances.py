"""Capture instances change while a capture runs: on the double of SQL Server, or on a real one if it is named."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from tests.db.sqlserver.running import TABLE, SqlServerCapture, create, running
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.capture.renewal import renew
from headwater.sources.errors import LogPurged, SchemaStopped
from headwater.sources.evolution import SchemaPolicy


def disable(server: AnySqlServer, instance: str) -> None:
    server.execute(
        "EXEC sys.sp_cdc_disable_table @source_schema = N'shop', @source_name = N'orders',"
        f" @capture_instance = N'{instance}'"
    )


def test_a_column_comes_with_the_instance_that_has_it(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        server.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
        track(server, "orders", instance="orders_rate")
        server.execute(
            "INSERT INTO shop.orders VALUES (2, 'b', 2, NULL, 7.25)", "UPDATE shop.orders SET rate = 1 WHERE id = 1"
        )
        capture.catch_up()
        assert [(row["id"], row.get("rate"), row["_unavailable"]) for row in capture.rows(TABLE)] == [
            (1, None, None),
            (2, Decimal("7.25"), None),
            (1, None, None),
            (1, Decimal("1.00"), None),
        ]
        disable(server, "shop_orders")
        server.execute("UPDATE shop.orders SET rate = 2")
        capture.assert_equal(TABLE)
        assert [event.kind for event in capture.events(TABLE)].count("schema") == 1


def test_rows_between_the_column_and_its_instance_name_what_they_lack(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.engine.agent_runs = False  # the capture reads all of it when the newer instance is there
        double.execute(
            "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)",
            "ALTER TABLE shop.orders ADD rate decimal(5,2)",
            "INSERT INTO shop.orders VALUES (2, 'b', 2, NULL, 7.25)",
        )
        track(double, "orders", instance="orders_rate")
        double.execute("INSERT INTO shop.orders VALUES (3, 'c', 3, NULL, 8.25)")
        double.engine.agent_runs = True
        capture.catch_up()
        assert [(row["id"], row.get("rate"), row["_unavailable"]) for row in capture.rows(TABLE)] == [
            (1, None, None),
            (2, None, "rate"),
            (3, Decimal("8.25"), None),
        ]


def test_a_table_stops_where_rows_were_told_without_a_column_that_had_come(
    server: AnySqlServer, tmp_path: Path
) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
        server.execute("INSERT INTO shop.orders VALUES (1, 'b', 2, NULL, 7.25)")
        capture.catch_up()
        track(server, "orders", instance="orders_rate")
        server.execute("INSERT INTO shop.orders VALUES (2, 'b', 2, NULL, 7.25)")
        reason = capture.wait_until_stopped(TABLE)
        assert "the capture instance with it was created later" in reason
        assert "headwater resnapshot shop.orders" in reason


def test_a_default_is_what_older_rows_have(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        server.execute("ALTER TABLE shop.orders ADD kind nvarchar(9) NOT NULL DEFAULT N'plain', rank_ int")
        track(server, "orders", instance="orders_kind")
        server.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL, N'odd', 1)")
        capture.assert_equal(TABLE)
        assert {row["id"]: row["kind"] for row in capture.replayed(TABLE).to_pylist()} == {1: "plain", 2: "odd"}


def test_a_column_that_is_dropped_is_null_from_the_next_instance_on(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, N'x')")
        capture.catch_up()
        server.execute("ALTER TABLE shop.orders DROP COLUMN note")
        track(server, "orders", instance="orders_2")
        server.execute("INSERT INTO shop.orders VALUES (2, 'a', 1)")
        capture.catch_up()
        assert [(row["id"], row["note"]) for row in capture.rows(TABLE)] == [(1, "x"), (2, None)]


def test_an_instance_that_is_removed_too_early_stops_its_table_and_no_other(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    double.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(double, "lines")
    with running(double, tmp_path, TABLE, "shop.lines") as capture:
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        double.engine.agent_runs = False
        double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)")
        track(double, "orders", instance="orders_2")
        disable(double, "shop_orders")
        double.execute("INSERT INTO shop.lines VALUES (1)")
        double.engine.agent_runs = True
        reason = capture.wait_until_stopped(TABLE)
        assert "before all of it was read" in reason
        assert reason.endswith(" Run: headwater resnapshot shop.orders")
        capture.assert_equal("shop.lines")


def made_anew(server: AnySqlServer, *names: str) -> None:
    """Change data capture off and on again: what was changed between is in no instance."""
    for name in names:
        server.execute(
            f"EXEC sys.sp_cdc_disable_table @source_schema = N'shop', @source_name = N'{name}',"
            f" @capture_instance = N'shop_{name}'"
        )
    track(server, *names)


@pytest.mark.parametrize("others", [(), ("lines",)])
def test_an_instance_that_was_made_anew_while_no_capture_ran_stops_its_table_alone(
    server: AnySqlServer, tmp_path: Path, others: tuple[str, ...]
) -> None:
    create(server)
    server.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(server, "lines")
    capture = SqlServerCapture(server, tmp_path, [TABLE, *(f"shop.{name}" for name in others)])
    capture.start()
    server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)", "INSERT INTO shop.lines VALUES (1)")
    capture.catch_up()
    capture.stop()
    made_anew(server, "orders")
    server.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)", "INSERT INTO shop.lines VALUES (2)")
    capture.start()
    reason = capture.wait_until_stopped(TABLE)
    assert reason.startswith("Its capture instance was created again")
    assert reason.endswith(" Run: headwater resnapshot shop.orders")
    assert [row["id"] for row in capture.rows(TABLE)] == [1]
    if others:
        capture.assert_equal("shop.lines")
    capture.stop()


def test_tables_whose_instances_were_all_made_anew_stop_one_by_one_and_can_be_read_again(
    server: AnySqlServer, tmp_path: Path
) -> None:
    create(server)
    server.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(server, "lines")
    tables = [TABLE, "shop.lines"]
    capture = SqlServerCapture(server, tmp_path, tables)
    capture.start()
    server.execute("INSERT INTO shop.lines VALUES (1)")
    capture.catch_up()
    capture.stop()
    made_anew(server, "orders", "lines")
    capture.start()
    for name in tables:
        assert f"headwater resnapshot {name}" in capture.wait_until_stopped(name)
    renew(capture.store, tables)
    server.execute("INSERT INTO shop.lines VALUES (2)")
    capture.catch_up()
    assert [row["id"] for row in capture.rows("shop.lines")] == [1, 2]
    capture.stop()


def test_the_instance_that_a_column_came_with_is_the_one_that_is_known_at_the_next_start(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    before = capture.tables()[TABLE].registration
    double.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
    track(double, "orders", instance="orders_rate")
    double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL, 2)")
    number = double.engine.instances[-1].number
    capture.wait_for(lambda: f'"instance": {number}' in capture.tables()[TABLE].registration)
    assert f'"instance": {number}' not in before
    disable(double, "shop_orders")
    capture.stop()
    double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL, 2)", "DELETE FROM shop.orders")
    double.wait_for_scan()
    double.engine.purge(double.last_change())
    assert isinstance(capture.fails_to_start(), LogPurged)  # it is that instance: what is missing was cleaned up


def test_a_dropped_table_stops(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    server.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(server, "lines")
    with running(server, tmp_path, TABLE, "shop.lines") as capture:
        disable(server, "shop_orders")
        server.execute("DROP TABLE shop.orders", "INSERT INTO shop.lines VALUES (1)")
        assert capture.wait_until_stopped(TABLE).startswith("The table was dropped at the source. Create it again")
        capture.assert_equal("shop.lines")


def test_the_policy_stop_ends_the_capture_before_the_column(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    capture = SqlServerCapture(server, tmp_path, [TABLE], schema_policy=SchemaPolicy.STOP)
    capture.start()
    server.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
    track(server, "orders", instance="orders_rate")
    server.execute("INSERT INTO shop.orders VALUES (2, 'b', 2, NULL, 7.25)")
    failure = capture.wait_for_end()
    assert isinstance(failure, SchemaStopped)
    assert capture.rows(TABLE) == []


def test_a_column_that_no_instance_has_is_told(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
        capture.wait_for(lambda: any(event.kind == "partition" for event in capture.events(TABLE)))
        (event,) = [event for event in capture.events(TABLE) if event.kind == "partition"]
        assert "No capture instance has the columns rate" in str(event.detail)
        assert "@capture_instance = N'shop_orders_rate'" in str(event.detail)
