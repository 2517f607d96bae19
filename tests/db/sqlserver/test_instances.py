"""Capture instances change while a capture runs: on the double of SQL Server, or on a real one if it is named."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from tests.db.sqlserver.running import TABLE, SqlServerCapture, create, running
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.errors import SchemaStopped
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
        assert "the capture instance with it was made later" in reason
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
        assert "sp_cdc_enable_table" in reason
        capture.assert_equal("shop.lines")


def test_a_dropped_table_stops(server: AnySqlServer, tmp_path: Path) -> None:
    create(server)
    server.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(server, "lines")
    with running(server, tmp_path, TABLE, "shop.lines") as capture:
        disable(server, "shop_orders")
        server.execute("DROP TABLE shop.orders", "INSERT INTO shop.lines VALUES (1)")
        assert "captured no longer" in capture.wait_until_stopped(TABLE)
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


def test_a_column_that_no_instance_has_is_told(
    server: AnySqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(server)
    monkeypatch.setattr("headwater.sources.sqlserver.source._CHECK_SECONDS", 0.0)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("ALTER TABLE shop.orders ADD rate decimal(5,2)")
        capture.wait_for(lambda: any(event.kind == "partition" for event in capture.events(TABLE)))
        (event,) = [event for event in capture.events(TABLE) if event.kind == "partition"]
        assert "No capture instance has the columns rate" in str(event.detail)
        assert "@capture_instance = N'shop_orders_rate'" in str(event.detail)
