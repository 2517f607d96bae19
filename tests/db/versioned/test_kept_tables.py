"""Tables of a real database, kept by a query: as they were at every epoch that can be read."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.capture.running import running
from tests.db.versioned.kept import kept
from tests.servers.postgres import Database
from tests.store.versioned.written import applied, rows_at

from headwater.control.command import ResnapshotTable
from headwater.control.request import ask_query
from headwater.errors import TransientError
from headwater.log_store import LogView
from headwater.state import open_reader
from headwater.versioned import BaseGone, NotComplete, NotYet, TableNotKept, VersionedTable
from headwater.versioned.compaction import compact

ORDERS = "public.orders"


def _orders(database: Database, rows: int = 500) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, note text)",
        "ALTER TABLE orders ALTER COLUMN note SET STORAGE EXTERNAL",
        f"INSERT INTO orders SELECT n, 'new', repeat('x', 3000) FROM generate_series(1, {rows}) n",
    )


def test_a_table_is_as_it_was_at_every_epoch(newest_postgres: Database, tmp_path: Path) -> None:
    """Updates leave the long note out, which the log then does not have: it comes from the base."""
    _orders(newest_postgres)
    with running(newest_postgres, tmp_path, ORDERS) as capture, kept(capture, ORDERS) as query:
        with pytest.raises(TableNotKept):
            query.table(ORDERS)
        query.batch()
        with pytest.raises(NotComplete):
            query.table(ORDERS)
        query.finish()
        table = query.table(ORDERS)
        known = {table.newest_epoch: query.source_rows(ORDERS)}
        with table.pin("test") as pin:
            assert [(one.owner, one.epoch) for one in table.pins()] == [("test", pin.epoch)]
            for number in range(5):
                newest_postgres.execute(
                    f"UPDATE orders SET state = 'step {number}' WHERE id % 7 = {number}",
                    f"DELETE FROM orders WHERE id % 50 = {number}",
                    f"INSERT INTO orders VALUES ({1000 + number}, 'later', 'n')",
                )
                capture.catch_up()
                known[table.newest_epoch] = query.source_rows(ORDERS)
                query.batch()
            epochs = sorted(known)
            assert table.base_epoch <= pin.epoch
            copy: VersionedTable = pickle.loads(pickle.dumps(table))
            for epoch in epochs:
                assert rows_at(copy, epoch) == known[epoch]
            for after, upto in pairwise(epochs):
                changed = applied(known[after], table.changes(after, upto, (0, 256)))
                assert changed == known[upto]
            whole = applied(known[epochs[0]], table.changes(epochs[0], epochs[-1], (0, 256)))
            assert whole == known[epochs[-1]]
        query.finish()
        assert table.base_epoch > epochs[0]
        with pytest.raises(BaseGone):
            rows_at(table, epochs[0])
        with pytest.raises(NotYet):
            rows_at(table, table.newest_epoch + (1 << 40))
        assert rows_at(table, table.newest_epoch) == known[epochs[-1]]
        compact(query.sink.folder(ORDERS), everything=True, kept_seconds=0)
        assert len(list(query.sink.folder(ORDERS).runs.iterdir())) == 1
        assert rows_at(table, table.newest_epoch) == known[epochs[-1]]
        found = table.lookup(pa.table({"id": [10, 999_999, 1001]}), columns=["id", "state"])
        assert found.to_pylist() == [{"id": 10, "state": "step 3"}, {"id": 1001, "state": "later"}]


def test_truncate_columns_and_a_new_snapshot(newest_postgres: Database, tmp_path: Path) -> None:
    _orders(newest_postgres, 50)
    with running(newest_postgres, tmp_path, ORDERS) as capture, kept(capture, ORDERS) as query:
        query.finish()
        table = query.table(ORDERS)
        registration = capture.tables()[ORDERS].registration
        with table.pin("test") as pin:
            before = query.source_rows(ORDERS)
            newest_postgres.execute(
                "TRUNCATE orders", "INSERT INTO orders VALUES (7, 'after', 'n'), (1000, 'after', NULL)"
            )
            capture.catch_up()
            upto = table.newest_epoch
            assert rows_at(table, upto) == query.source_rows(ORDERS)
            assert rows_at(table, pin.epoch) == before
            assert applied(before, table.changes(pin.epoch, upto, (0, 256))) == query.source_rows(ORDERS)
        query.finish()
        assert rows_at(table, table.newest_epoch) == query.source_rows(ORDERS)
        # a new file and new columns in one check of the catalog are a rewrite, which would stop the table
        capture.wait_for(lambda: capture.tables()[ORDERS].registration != registration)
        newest_postgres.execute(
            "ALTER TABLE orders RENAME COLUMN state TO status",
            "ALTER TABLE orders ADD COLUMN priority int NOT NULL DEFAULT 3",
            "INSERT INTO orders VALUES (8, 'wide', NULL, 4)",
        )
        capture.catch_up()
        query.finish()
        table = query.table(ORDERS)
        assert rows_at(table, table.newest_epoch) == query.source_rows(ORDERS)
        assert table.table(table.newest_epoch).schema.names == ["id", "status", "note", "priority"]
        with pytest.raises(TransientError):  # nobody waits for the answer
            ask_query(query.options.state_location, "keep", ResnapshotTable(ORDERS), 0)
        while query.planner.is_history_done():
            query.planner._serve()
        newest_postgres.execute("UPDATE orders SET status = 'not folded' WHERE id = 8")
        capture.catch_up()
        with table.pin("reader"):
            for _ in range(50):
                query.batch()
                if waiting := query.planner.status()["tables"][ORDERS]["waiting"]:
                    break
            assert waiting.endswith("is pinned by reader")
            assert rows_at(table, table.newest_epoch) == query.source_rows(ORDERS)
        query.batch()
        with pytest.raises(NotComplete):
            table.pin("late")
        query.finish()
        assert rows_at(query.table(ORDERS), table.newest_epoch) == query.source_rows(ORDERS)


def test_two_tables_show_one_moment_at_every_epoch(newest_postgres: Database, tmp_path: Path) -> None:
    """Money goes from one table to the other in each transaction: the total is the same at every epoch."""
    newest_postgres.execute(
        "CREATE TABLE a (id int PRIMARY KEY, amount int)",
        "CREATE TABLE b (id int PRIMARY KEY, amount int)",
        "INSERT INTO a SELECT n, 100 FROM generate_series(1, 20) n",
        "INSERT INTO b SELECT n, 100 FROM generate_series(1, 20) n",
    )
    names = ("public.a", "public.b")
    with running(newest_postgres, tmp_path, *names) as capture, kept(capture, *names) as query:
        query.finish()
        tables = [query.table(name) for name in names]
        with tables[0].pin("test") as pin, tables[1].pin("test", pin.epoch):
            for number in range(40):
                newest_postgres.execute(
                    f"WITH x AS (UPDATE a SET amount = amount - {number} WHERE id = {number % 20 + 1})"
                    f" UPDATE b SET amount = amount + {number} WHERE id = {(7 * number) % 20 + 1}"
                )
            capture.catch_up()
            query.batch()
            with open_reader(query.options.store) as reader, reader.snapshot() as view:
                epochs = [int(end.epoch) for end in LogView.open(view, "public.a").epochs(pin.epoch)]
            for epoch in epochs:
                found = [rows_at(table, epoch) for table in tables]
                assert sum(row["amount"] for rows in found for row in rows.values()) == 4000
        assert len(epochs) > 1


def test_a_driver_that_dies_between_any_two_steps(newest_postgres: Database, tmp_path: Path) -> None:
    _orders(newest_postgres, 300)
    with (
        running(newest_postgres, tmp_path, ORDERS) as capture,
        kept(capture, ORDERS, split_rows=50, parallelism=1, interval_seconds=0.001) as query,
    ):
        for number in range(6):
            query.batch()
            newest_postgres.execute(f"UPDATE orders SET state = 's{number}' WHERE id % 6 = {number}")
            query.crash()
        query.finish()
        query.crash()
        query.batch()
        table = query.table(ORDERS)
        assert rows_at(table, table.newest_epoch) == query.source_rows(ORDERS)
