"""History and changes of MariaDB and MySQL come to the source, each row once, whoever writes meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.mysql.delivering import TABLE, MySqlDelivering, create, writer
from tests.db.mysql.running import running
from tests.servers.mariadb import MariaDbServer


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
