"""Columns that change, and large values that are not sent, while the history of their table is read into a mirror."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, on, only, running, shared
from tests.db.backfill.test_into_delta import IntoDelta

from headwater.capture.renewal import renew
from headwater.log_store.log_events import SCHEMA
from headwater.sources.errors import SnapshotExpired
from headwater.sources.open import open_source
from headwater.sources.splits import SplitKind

pytestmark = pytest.mark.db

TABLE = "public.orders"
ROWS = 600
CHANGES = {
    "added": "ADD COLUMN grade int",
    "added with a value": "ADD COLUMN grade int DEFAULT 7",
    "dropped": "DROP COLUMN state",
    "renamed": "RENAME COLUMN state TO status",
    "wider": "ALTER COLUMN amount TYPE decimal(12)",
}
SMALL: dict[str, Any] = {"split_rows": 100, "interval_seconds": 0.001, "keyed": True, "parallelism": 1}
SOME = "UPDATE orders SET note = 'later' WHERE id % 50 = 0"


def _create(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, amount decimal(9), note text)",
        f"INSERT INTO orders SELECT n, 'new', n, 'first' FROM generate_series(1, {ROWS}) n",
    )


def _assert_equal(query: IntoDelta) -> None:
    """The mirror has the rows of the source, in the columns that the source has."""
    source = open_source(query.options.source, spill=query.capture.folder / "unused")
    (table,) = source.tables([TABLE])
    source.close()
    names = [column.name for column in table.columns]
    found = query.rows(TABLE)
    expected = query.capture.database.execute(f"SELECT {', '.join(names)} FROM orders")
    assert Counter(zip(*(found.column(name).to_pylist() for name in names), strict=True)) == Counter(expected)


def _deliver(query: IntoDelta) -> bool:
    """Deliver a batch; when its snapshot no longer shows the table, again as a pipeline does. Whether it did so."""
    try:
        query.loop.deliver()
    except SnapshotExpired:
        query.close()
        query.open()
        assert query.batch()
        return True
    return False


KEYED = [
    *(("added", "between batches", server) for server in on(MYSQL)),
    *(("added with a value", "in a batch", server) for server in on(MARIADB)),
    *(("dropped", "in a batch", server) for server in on(POSTGRES, MYSQL)),
    *(("renamed", "in a batch", server) for server in on(POSTGRES, MARIADB)),
    *(("wider", "in a batch", server) for server in on(POSTGRES, MYSQL)),
]


@pytest.mark.parametrize(
    ("how", "when", "kind", "shop"),
    [
        *((how, when, SplitKind.KEY, server) for how, when, server in KEYED),
        ("added with a value", "in a batch", SplitKind.HEAP, POSTGRES),
        ("wider", "between batches", SplitKind.HEAP, POSTGRES),
    ],
    indirect=["shop"],
)
def test_m25_columns_change_in_the_middle_of_the_history(
    shop: Shop, tmp_path: Path, how: str, when: str, kind: SplitKind
) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=kind, **SMALL)
        for _ in range(2):
            assert query.batch()
        if when == "in a batch":
            assert query.loop.plan(5)
            shop.execute(f"ALTER TABLE orders {CHANGES[how]}", SOME)
            if how in ("dropped", "renamed"):
                capture.catch_up()  # the log is ahead of the catalog that the plan was made with
            _deliver(query)
        else:
            shop.execute(f"ALTER TABLE orders {CHANGES[how]}", SOME)
        assert query.planner.has_history
        query.finish(20)
        _assert_equal(query)
        query.close()


@pytest.mark.parametrize(
    ("how", "shop"),
    [("renamed", POSTGRES), ("added with a value", POSTGRES), ("renamed", MARIADB)],
    indirect=["shop"],
)
def test_columns_that_change_after_the_last_row_of_a_batch_are_in_the_mirror(
    shop: Shop, tmp_path: Path, how: str
) -> None:
    """The epoch of the change has no rows, and so no barrier."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, **SMALL)
        query.finish(20)
        shop.execute(SOME)
        capture.catch_up()
        shop.execute(f"ALTER TABLE orders {CHANGES[how]}")
        capture.wait_for(lambda: any(event.kind == SCHEMA for event in capture.events(TABLE)))
        query.finish(20)
        _assert_equal(query)
        query.close()


@only(POSTGRES)
@pytest.mark.parametrize("when", ["between batches", "in a batch"])
def test_m25_rows_that_a_rewrite_moves_to_other_blocks_are_not_lost(shop: Shop, tmp_path: Path, when: str) -> None:
    """Nothing in the log tells of it: rows that were not read yet come to lie where others have been read."""
    _create(shop)
    shop.execute(f"DELETE FROM orders WHERE id <= {ROWS // 3}")
    with running(shop, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=SplitKind.HEAP, **SMALL)
        for _ in range(3):
            assert query.batch()
        assert 0 < len(query.rows(TABLE)) < ROWS * 2 // 3
        if when == "in a batch":
            assert query.loop.plan(5)
            shop.execute("VACUUM FULL orders")
            assert _deliver(query), "its snapshot shows an empty file"
        else:
            shop.execute("VACUUM FULL orders")
        query.finish(20)
        _assert_equal(query)
        query.close()


@shared(MARIADB)
def test_m25_a_type_that_becomes_another_stops_the_history_until_the_table_is_read_anew(
    shop: Shop, tmp_path: Path
) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_kind=SplitKind.KEY, **SMALL)
        assert query.batch()
        shop.execute("ALTER TABLE orders ALTER COLUMN state TYPE int USING 5", SOME)
        capture.wait_until_stopped(TABLE)
        while query.batch():
            pass
        assert query.planner.has_history
        assert query.planner.is_waiting()
        assert "headwater resnapshot public.orders" in query.planner.status()["tables"][TABLE]["waiting"]
        assert not renew(str(capture.store), [TABLE])
        shop.execute("UPDATE orders SET state = 6 WHERE id % 70 = 0")
        query.batch()
        query.finish()
        query.assert_equal()
        query.close()


@only(POSTGRES)
@pytest.mark.parametrize("kind", [SplitKind.KEY, SplitKind.HEAP])
def test_m28_large_values_that_updates_left_alone_of_rows_that_were_not_read_yet(
    shop: Shop, tmp_path: Path, kind: SplitKind
) -> None:
    """Before the rows are read, in the batch that reads them, after it; and of rows that are gone once that is told."""
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, note text)",
        "ALTER TABLE orders ALTER COLUMN note SET STORAGE EXTERNAL",
        "INSERT INTO orders SELECT n, rpad('new', 100), n || repeat('x', 3000) FROM generate_series(1, 400) n",
    )
    with running(shop, tmp_path, TABLE) as capture:
        query = IntoDelta(capture, TABLE, split_kind=kind, **SMALL)
        for number in range(2):
            shop.execute(f"UPDATE orders SET state = 'before {number}' WHERE id % 3 = {number}")
            capture.catch_up()
            if number == 0:
                first = capture.rows(TABLE)
            assert query.loop.plan(5)
            shop.execute(f"UPDATE orders SET state = 'within {number}' WHERE id % 7 = {number}")
            query.loop.deliver()
        assert query.planner.has_history
        capture.stop()
        shop.execute(
            "UPDATE orders SET state = 'last' WHERE id % 5 = 0",
            "DELETE FROM orders WHERE id % 20 = 0",
            "UPDATE orders SET id = id + 1000 WHERE id % 20 = 5",
            "INSERT INTO orders SELECT n * 20, 'again', repeat('y', 3000) FROM generate_series(1, 10) n",
        )
        capture.start()
        capture.catch_up()
        assert any(row["_unavailable"] == "note" for row in capture.rows(TABLE))
        assert any(row["state"].startswith("before") and row["note"] for row in first if row["state"])
        query.finish()
        _assert_equal(query)
        query.close()
