"""Columns that change, and large values that are not sent, while the history of their table is read into a mirror."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.test_into_delta import IntoDelta
from tests.db.capture.running import running
from tests.servers.postgres import Database

from headwater.capture.renewal import renew
from headwater.sources.splits import SplitKind
from headwater.spark.failure import ToldError

pytestmark = pytest.mark.db

TABLE = "public.orders"
ROWS = 600
CHANGES = {
    "added": "ADD COLUMN grade int",
    "added with a value": "ADD COLUMN grade int DEFAULT 7",
    "dropped": "DROP COLUMN state",
    "renamed": "RENAME COLUMN state TO status",
    "wider": "ALTER COLUMN amount TYPE bigint",
}
SMALL: dict[str, Any] = {"split_rows": 100, "interval_seconds": 0.001, "keyed": True, "parallelism": 1}
SOME = "UPDATE orders SET note = 'later' WHERE id % 50 = 0"


def _create(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, amount int, note text)",
        f"INSERT INTO orders SELECT n, 'new', n, 'first' FROM generate_series(1, {ROWS}) n",
    )


def _assert_equal(query: IntoDelta) -> None:
    """The mirror has the rows of the source, in the columns that the source has."""
    database = query.capture.database
    names = [
        name
        for (name,) in database.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped"
        )
    ]
    found = query.rows(TABLE)
    expected = database.execute(f"SELECT {', '.join(names)} FROM orders")
    assert Counter(zip(*(found.column(name).to_pylist() for name in names), strict=True)) == Counter(expected)


def _deliver(query: IntoDelta, start: Any, end: Any) -> bool:
    """Deliver a batch; when its snapshot no longer shows the table, again as a pipeline does. Whether it did so."""
    try:
        query.deliver(start, end)
    except ToldError as error:
        if "SnapshotExpired" not in str(error):
            raise
        query.planner.close()
        query.open()
        query.deliver(start, end)
        return True
    return False


@pytest.mark.parametrize(
    ("how", "when", "kind"),
    [
        ("added", "between batches", SplitKind.KEY),
        ("added with a value", "in a batch", SplitKind.HEAP),
        ("dropped", "in a batch", SplitKind.KEY),
        ("renamed", "in a batch", SplitKind.KEY),
        ("wider", "in a batch", SplitKind.KEY),
        ("wider", "between batches", SplitKind.HEAP),
    ],
)
def test_m25_columns_change_in_the_middle_of_the_history(
    newest_postgres: Database, tmp_path: Path, how: str, when: str, kind: SplitKind
) -> None:
    _create(newest_postgres)
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=kind, **SMALL)
        for _ in range(2):
            assert query.batch()
        if when == "in a batch":
            start = query.checkpoint
            assert start is not None
            planned = query.planner.advance(start, timeout=5)
            newest_postgres.execute(f"ALTER TABLE orders {CHANGES[how]}", SOME)
            _deliver(query, start, planned)
        else:
            newest_postgres.execute(f"ALTER TABLE orders {CHANGES[how]}", SOME)
        assert query.planner.has_history
        query.finish(20)
        _assert_equal(query)
        query.planner.close()


@pytest.mark.parametrize("when", ["between batches", "in a batch"])
def test_m25_rows_that_a_rewrite_moves_to_other_blocks_are_not_lost(
    newest_postgres: Database, tmp_path: Path, when: str
) -> None:
    """Nothing in the log tells of it: rows that were not read yet come to lie where others have been read."""
    _create(newest_postgres)
    newest_postgres.execute(f"DELETE FROM orders WHERE id <= {ROWS // 3}")
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=SplitKind.HEAP, **SMALL)
        for _ in range(3):
            assert query.batch()
        assert 0 < len(query.rows(TABLE)) < ROWS * 2 // 3
        if when == "in a batch":
            start = query.checkpoint
            assert start is not None
            planned = query.planner.advance(start, timeout=5)
            newest_postgres.execute("VACUUM FULL orders")
            assert _deliver(query, start, planned), "its snapshot shows an empty file"
        else:
            newest_postgres.execute("VACUUM FULL orders")
        query.finish(20)
        _assert_equal(query)
        query.planner.close()


def test_m25_a_type_that_becomes_another_stops_the_history_until_the_table_is_read_anew(
    newest_postgres: Database, tmp_path: Path
) -> None:
    _create(newest_postgres)
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_kind=SplitKind.KEY, **SMALL)
        assert query.batch()
        newest_postgres.execute("ALTER TABLE orders ALTER COLUMN state TYPE int USING 5", SOME)
        capture.wait_until_stopped(TABLE)
        while query.batch():
            pass
        assert query.planner.has_history
        assert query.planner.is_waiting()
        assert "headwater resnapshot public.orders" in query.planner.status()["tables"][TABLE]["waiting"]
        assert renew(str(capture.store), [TABLE])
        newest_postgres.execute("UPDATE orders SET state = 6 WHERE id % 70 = 0")
        query.batch()
        query.finish()
        query.assert_equal()
        query.close()


@pytest.mark.parametrize("kind", [SplitKind.KEY, SplitKind.HEAP])
def test_m28_large_values_that_updates_left_alone_of_rows_that_were_not_read_yet(
    newest_postgres: Database, tmp_path: Path, kind: SplitKind
) -> None:
    """Before the rows are read, in the batch that reads them, after it; and of rows that are gone once that is told."""
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, note text)",
        "ALTER TABLE orders ALTER COLUMN note SET STORAGE EXTERNAL",
        "INSERT INTO orders SELECT n, rpad('new', 100), n || repeat('x', 3000) FROM generate_series(1, 400) n",
    )
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=kind, **SMALL)
        for number in range(2):
            newest_postgres.execute(f"UPDATE orders SET state = 'before {number}' WHERE id % 3 = {number}")
            capture.catch_up()
            start = query.checkpoint or query.planner.initial()
            planned = query.planner.advance(start, timeout=5)
            assert planned.plan > start.plan
            newest_postgres.execute(f"UPDATE orders SET state = 'within {number}' WHERE id % 7 = {number}")
            query.deliver(start, planned)
        assert query.planner.has_history
        capture.stop()
        newest_postgres.execute(
            "UPDATE orders SET state = 'last' WHERE id % 5 = 0",
            "DELETE FROM orders WHERE id % 20 = 0",
            "UPDATE orders SET id = id + 1000 WHERE id % 20 = 5",
            "INSERT INTO orders SELECT n * 20, 'again', repeat('y', 3000) FROM generate_series(1, 10) n",
        )
        capture.start()
        capture.catch_up()
        told = capture.rows(TABLE)
        assert any(row["_unavailable"] == "note" for row in told)
        assert any(row["state"].startswith("before") and row["note"] for row in told if row["state"])
        query.finish()
        _assert_equal(query)
        query.planner.close()
