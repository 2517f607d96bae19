"""What a real server shows and a simple one would not: on the double, which is made to show it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.sqlserver.running import TABLE, create, described, running
from tests.db.sqlserver.test_instances import disable
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.errors import AccessDenied, SourceBusy
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.stream import Op


def test_the_newer_instance_tells_when_the_cleanup_job_has_passed_both(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.execute("ALTER TABLE shop.orders ADD rate int")
        track(double, "orders", instance="a_newer_one")  # by its name it stands before the older one
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL, 7)")
        capture.catch_up()
        double.engine.purge(double.engine.scanned)
        double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL, 8)")
        capture.catch_up()
        assert [(row["id"], row["rate"]) for row in capture.rows(TABLE)] == [(1, 7), (2, 8)]
        assert [column.name for column in described(double, TABLE, tmp_path).columns][-1] == "rate"


def test_the_order_is_that_of_the_commands_where_numbers_of_changes_have_another(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    double.engine.seqvals_are_reversed = True
    with running(double, tmp_path, TABLE) as capture:
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)", "UPDATE shop.orders SET id = 2")
        double.execute("BEGIN TRANSACTION; UPDATE shop.orders SET id = 3; UPDATE shop.orders SET id = 2; COMMIT")
        capture.catch_up()
        assert [(Op(row["_op"]).name, row["id"]) for row in capture.rows(TABLE)] == [
            ("INSERT", 1),
            ("DELETE", 1),
            ("INSERT", 2),
            ("DELETE", 2),
            ("INSERT", 3),
            ("DELETE", 3),
            ("INSERT", 2),
        ]


def test_an_instance_that_is_being_made_is_waited_for_and_one_behind_a_role_is_refused(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    double.engine.instances[0].is_being_made = True
    with pytest.raises(SourceBusy, match="is being made"):
        described(double, TABLE, tmp_path)
    double.engine.instances[0].is_being_made = False
    double.engine.is_gated = True
    with pytest.raises(AccessDenied, match=r"may not read the capture instance") as refused:
        described(double, TABLE, tmp_path)
    assert "ALTER ROLE [readers] ADD MEMBER" in str(refused.value.next_step)


def test_long_values_that_did_not_change_are_in_the_old_row_too(server: AnySqlServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE TABLE shop.notes (id int NOT NULL PRIMARY KEY, n int, body nvarchar(max), data varbinary(max), t text)"
    )
    track(server, "notes")
    with running(server, tmp_path, "shop.notes") as capture:
        server.execute(
            "INSERT INTO shop.notes VALUES (1, 1, N'long', 0x01, 'old')",
            "UPDATE shop.notes SET n = 2",
            "UPDATE shop.notes SET body = N'longer'",
            "UPDATE shop.notes SET t = 'new'",
            "DELETE FROM shop.notes",
        )
        capture.catch_up()
        found = [
            (row["n"], row["body"], row["data"], row["t"], row["_unavailable"]) for row in capture.rows("shop.notes")
        ]
        assert found == [
            (1, "long", b"\1", "old", None),
            (1, "long", b"\1", "old", None),
            (2, "long", b"\1", "old", None),
            (2, "long", b"\1", "old", None),
            (2, "longer", b"\1", "old", None),
            (2, "longer", b"\1", None, "t"),
            (2, "longer", b"\1", "new", None),
            (2, "longer", b"\1", None, "t"),
        ]


def test_an_instance_that_is_made_anew_under_its_name_stops_its_table_while_nothing_else_changes(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.reach_the_end()
        with double.engine.lock:  # or the capture may look between the two
            double.engine.disable("shop", "orders", "shop_orders")
            double.engine.enable("shop", "orders", None)
        assert "created again, or removed, before all of it was read" in capture.wait_until_stopped(TABLE)


def test_a_table_that_is_captured_no_longer_stops_while_nothing_else_changes(
    server: AnySqlServer, tmp_path: Path
) -> None:
    create(server)
    with running(server, tmp_path, TABLE) as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        disable(server, "shop_orders")
        reason = capture.wait_until_stopped(TABLE)
        assert reason.startswith("Its last capture instance was removed. Run: EXEC sys.sp_cdc_enable_table")


def test_an_instance_that_is_removed_while_it_is_read_stops_its_table_and_no_other(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    double.execute("CREATE TABLE shop.lines (id int NOT NULL PRIMARY KEY)")
    track(double, "lines")
    with running(double, tmp_path, TABLE, "shop.lines") as capture:
        double.inject("shop_orders_CT", 208)
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)", "INSERT INTO shop.lines VALUES (1)")
        assert "removed while it was read" in capture.wait_until_stopped(TABLE)
        capture.assert_equal("shop.lines")


def test_an_alteration_that_brings_other_columns_makes_no_gap(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.execute("alter table shop.orders add address int")
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL, 5)")
        capture.catch_up()
        double.execute("ALTER TABLE shop.orders DROP COLUMN address", "alter table shop.orders add rate int")
        track(double, "orders", instance="orders_rate")
        double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL, 7)")
        capture.catch_up()
        assert [(row["id"], row.get("rate")) for row in capture.rows(TABLE)] == [(1, None), (2, 7)]


def test_a_rowversion_and_a_widened_text_are_read_though_change_tables_have_other_types(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    double.execute("CREATE TABLE shop.marked (id int NOT NULL PRIMARY KEY, mark timestamp, name varchar(20))")
    double.execute("INSERT INTO shop.marked VALUES (1, 0x0000000000000007, 'a')")
    track(double, "marked")
    table = described(double, "shop.marked", tmp_path)
    assert table.column("mark").source_type == "binary(8)"
    (double.engine.tables["shop", "marked"].columns[2]).kind = "varchar(50)"
    (batch,) = open_snapshots(double.dsn).read(table, SplitKind.KEY, KeyRange(), None)
    assert batch.to_pylist() == [{"id": 1, "mark": bytes(7) + b"\7", "name": "a"}]
