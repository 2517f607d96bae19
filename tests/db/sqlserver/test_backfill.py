"""History and changes of SQL Server come to the source, each row once, whoever writes meanwhile.

On the double, or on a real server if one is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.sqlserver.running import (
    TABLE,
    SqlServerDelivering,
    create,
    described,
    running,
    writer,
)
from tests.sampled import share
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.errors import SourceMisconfigured
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.sqlserver.snapshots import SqlServerParts


@pytest.mark.parametrize("isolation", share(["snapshot", "read committed"], 1, 2))
def test_history_and_live_changes_come_to_the_source(server: AnySqlServer, tmp_path: Path, isolation: str) -> None:
    create(server, 1200)
    if isolation == "read committed":
        server.execute("ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION OFF")
    with running(server, tmp_path, TABLE) as capture:
        query = SqlServerDelivering(capture, TABLE, split_rows=300, interval_seconds=0.05)
        with writer(server, 0.02):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert query.batches > 2
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


@pytest.mark.parametrize("isolation", share(["read committed", "snapshot"], 1, 2))
def test_each_row_is_that_of_the_place_that_was_planned(server: AnySqlServer, tmp_path: Path, isolation: str) -> None:
    create(server, 100)
    if isolation == "read committed":
        server.execute("ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION OFF")
    with running(server, tmp_path, TABLE) as capture:
        query = SqlServerDelivering(capture, TABLE, split_rows=1000)
        before = {row[0]: str(row[1]) for row in server.execute("SELECT id, total FROM shop.orders")}

        def change(step: str) -> None:
            if step == "planned":
                server.execute(
                    "UPDATE shop.orders SET total = total + 1000 WHERE id < 60",
                    "UPDATE shop.orders SET total = total + 1000 WHERE id < 60",
                    "DELETE FROM shop.orders WHERE id BETWEEN 90 AND 120",
                    "INSERT INTO shop.orders VALUES (1, 'late', 1, N'')",
                    "UPDATE shop.orders SET id = 2 WHERE id = 240",
                )

        assert query.batch(timeout=5, between=change)
        assert {key[0]: str(row["total"]) for key, row in query.sink.mirror[TABLE].items()} == before
        query.finish()
        query.assert_equal()
        query.close()


def test_a_connection_that_breaks_while_history_is_read_goes_on_after_the_last_row(
    double: SqlServerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(double, 500)
    monkeypatch.setattr("headwater.sources.sqlserver.snapshots.BLOCK_ROWS", 50)
    with running(double, tmp_path, TABLE) as capture:
        query = SqlServerDelivering(capture, TABLE, split_rows=200, interval_seconds=0.05)
        for _ in range(3):
            double.inject(r"SELECT .* FROM \[shop\]\.\[orders\].* ORDER BY \[id\]$", "drop")
        query.run_until(query.planner.is_history_done)
        assert double.has_injected
        query.finish()
        query.assert_equal()
        query.close()


@pytest.mark.soak
def test_one_reader_pages_by_key(server: AnySqlServer, tmp_path: Path) -> None:
    create(server, 200)
    with running(server, tmp_path, TABLE) as capture:
        query = SqlServerDelivering(capture, TABLE, backfill="single", split_rows=120, interval_seconds=0.05)
        with writer(server, 0.05):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        query.close()


def test_keys_that_are_identifiers_keep_the_order_of_the_server_while_history_is_read(
    server: AnySqlServer, tmp_path: Path
) -> None:
    server.execute("CREATE TABLE shop.things (id uniqueidentifier NOT NULL PRIMARY KEY, n int)")
    keys = [f"{n * 7 % 64:08X}-0000-0000-0000-{n * 29 % 64:012X}" for n in range(64)]
    values = ", ".join(f"('{key}', {n})" for n, key in enumerate(keys))
    server.execute(f"INSERT INTO shop.things VALUES {values}")
    track(server, "things")
    with running(server, tmp_path, "shop.things") as capture:
        query = SqlServerDelivering(capture, "shop.things", split_rows=10, interval_seconds=0.05)
        server.execute(f"UPDATE shop.things SET n = n + 100 WHERE id IN ('{keys[3]}', '{keys[40]}', '{keys[63]}')")
        query.run_until(query.planner.is_history_done)
        server.execute(f"DELETE FROM shop.things WHERE id = '{keys[5]}'")
        query.finish()
        found = {key[0]: row["n"] for key, row in query.sink.mirror["shop.things"].items()}
        assert found == dict(server.execute("SELECT CONVERT(nvarchar(36), id) AS id, n FROM shop.things"))
        assert len(found) == 63
        query.close()


def test_a_default_that_is_not_known_is_read_once_more(server: AnySqlServer, tmp_path: Path) -> None:
    create(server, 20)
    with running(server, tmp_path, TABLE) as capture:
        query = SqlServerDelivering(capture, TABLE, interval_seconds=0.05, keyed=True)
        query.run_until(query.planner.is_history_done)
        server.execute("ALTER TABLE shop.orders ADD kind int DEFAULT 5 WITH VALUES")
        track(server, "orders", instance="orders_kind")
        server.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL, 7)")
        query.run_until(lambda: {row.get("kind") for row in query.sink.mirror[TABLE].values()} == {5, 7})
        query.finish()
        query.assert_equal()
        query.close()


def test_all_ranges_of_a_unit_are_read_at_one_moment(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double, 60)
    table, snapshots = described(double, TABLE, tmp_path), open_snapshots(double.dsn)
    parts = [KeyRange(None, Cut(("30",))), KeyRange(Cut(("90",)), Cut(("90",), after=True)), KeyRange(Cut(("150",)))]
    for allowed in ("ON", "OFF"):
        double.execute(f"ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION {allowed}")
        double.statements = []
        with snapshots.open_parts(table, parts) as reading:  # type: ignore[attr-defined]
            assert reading.progress.given == ()
            ids = [row["id"] for batch in reading.batches() for row in batch.to_pylist()]
            assert ids == [*range(3, 30, 3), 90, *range(150, 181, 3)]
            assert reading.progress.given == tuple(parts)
            assert reading.progress.rest == ()
        assert sum("dm_db_log_stats" in statement for statement in double.statements) == 1


def test_the_way_of_reading_is_told(server: AnySqlServer, tmp_path: Path) -> None:
    create(server, 10)
    table, snapshots = described(server, TABLE, tmp_path), open_snapshots(server.dsn)
    for allowed, way in (("ON", "snapshot"), ("OFF", "read committed")):
        server.execute(f"ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION {allowed}")
        with snapshots.open_parts(table, [KeyRange()]) as part:  # type: ignore[attr-defined]
            assert isinstance(part, SqlServerParts)
            assert part.isolation == way
            assert sum(batch.num_rows for batch in part.batches()) == 10


def test_history_needs_the_right_to_see_how_far_the_log_is(double: SqlServerDouble) -> None:
    create(double, 10)
    with pytest.raises(SourceMisconfigured, match="GRANT VIEW DATABASE STATE TO"):
        open_snapshots(double.dsn_of("plain")).export()
