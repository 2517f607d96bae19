"""Capture against real servers: what the log tells is what the tables are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.db.capture.running import OPTIONS, RunningCapture, running
from tests.servers.postgres import Database

from headwater.capture import TableState
from headwater.capture.options import OnRewrite
from headwater.log_store.log_events import SCHEMA, TRUNCATE
from headwater.sources.errors import SchemaStopped, UnsupportedTable
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.postgres import source, toast, visibility
from headwater.stream import Op

ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(18,4), note text, paid boolean, at timestamptz)"


def fill(database: Database, first: int, last: int, table: str = "orders") -> None:
    values = "i, i * 1.25, 'note ' || i, i % 3 = 0, now()"
    database.execute(f"INSERT INTO {table} SELECT {values} FROM generate_series({first}, {last}) i")


def test_the_replayed_log_is_the_table(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(ORDERS)
    with running(postgres, tmp_path, "orders") as capture:
        fill(postgres, 1, 2000)
        postgres.execute(
            "UPDATE orders SET amount = amount + 1 WHERE id % 7 = 0",
            "DELETE FROM orders WHERE id % 11 = 0",
            "UPDATE orders SET id = id + 100000 WHERE id % 13 = 0",
            "UPDATE orders SET note = NULL WHERE id % 17 = 0",
        )
        capture.assert_equal("orders")
        ops = {row["_op"] for row in capture.rows("public.orders")}
    assert ops == {Op.INSERT, Op.DELETE, Op.UPDATE_INSERT}


def test_a_restart_goes_on_without_loss_or_repeat(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(ORDERS)
    capture = RunningCapture(postgres, tmp_path, ["orders"])
    capture.start()
    fill(postgres, 1, 100)
    capture.catch_up()
    capture.stop()
    fill(postgres, 101, 200)
    capture.start()
    fill(postgres, 201, 300)
    capture.assert_equal("orders")
    capture.stop()
    positions = [row["_position"] for row in capture.rows("public.orders")]
    assert len(positions) == len(set(positions)) == 300
    assert positions == sorted(positions)


def test_a_change_after_a_quiet_spell_is_sealed_at_once_and_the_next_one_waits(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(ORDERS)
    capture = RunningCapture(newest_postgres, tmp_path, ["orders"])
    capture.options = replace(OPTIONS, epoch_seconds=3600.0)
    capture.start()
    fill(newest_postgres, 1, 1)
    capture.catch_up()
    fill(newest_postgres, 2, 2)
    capture.wait_for(lambda: capture.capture.statistics.rows == 2)
    assert [row["id"] for row in capture.rows("public.orders")] == [1]
    capture.stop()
    assert [row["id"] for row in capture.rows("public.orders")] == [1, 2]


def test_a_transaction_is_never_split_over_epochs_and_is_one_cut_over_tables(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    for name in ("a", "b"):
        database.execute(f"CREATE TABLE {name} (id serial PRIMARY KEY, tx int)")
    with running(database, tmp_path, "a", "b") as capture:
        with database.connect() as session:
            for number in range(300):
                with session.transaction():
                    for name in ("a", "b", "a"):
                        session.execute(f"INSERT INTO {name} (tx) VALUES (%s)", [number])
        capture.catch_up()
        epochs: dict[int, set[int]] = {}
        for name in ("public.a", "public.b"):
            for row in capture.rows(name):
                epochs.setdefault(row["tx"], set()).add(row["_epoch"])
    assert len(epochs) == 300
    assert all(len(found) == 1 for found in epochs.values())


def test_m32_truncate_stands_between_the_rows_before_and_after(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(ORDERS)
    with running(postgres, tmp_path, "orders") as capture:
        fill(postgres, 1, 50)
        with postgres.connect() as session, session.transaction():
            session.execute("INSERT INTO orders (id) VALUES (1000)")
            session.execute("TRUNCATE orders")
            session.execute("INSERT INTO orders (id) VALUES (1), (2)")
        capture.assert_equal("orders")
        assert [event.kind for event in capture.events("public.orders")] == [TRUNCATE]
        assert capture.replayed("public.orders").num_rows == 2


def test_columns_that_come_go_grow_and_change_their_names_lose_no_row(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "ALTER TABLE orders ADD COLUMN size numeric(5)")
    with running(postgres, tmp_path, "orders") as capture:
        fill(postgres, 1, 10)
        postgres.execute("ALTER TABLE orders ADD COLUMN colour text DEFAULT 'blue'")
        fill(postgres, 11, 20)
        capture.catch_up()  # the default of the rows before is in the catalog only until the table is rewritten
        with postgres.connect() as session, session.transaction():
            session.execute("INSERT INTO orders (id, size) VALUES (100, 5)")
            session.execute("ALTER TABLE orders ALTER COLUMN size TYPE numeric(12)")
            session.execute("INSERT INTO orders (id, size) VALUES (101, 5000000000)")
            session.execute("ALTER TABLE orders RENAME COLUMN note TO remark")
            session.execute("INSERT INTO orders (id, remark) VALUES (102, 'renamed')")
            session.execute("ALTER TABLE orders DROP COLUMN paid")
            session.execute("INSERT INTO orders (id) VALUES (103)")
        fill_rest = "INSERT INTO orders (id, remark) SELECT i, 'x' FROM generate_series(200, 210) i"
        postgres.execute(fill_rest)
        capture.assert_equal("orders")
        changes = [event.detail for event in capture.events("public.orders") if event.kind == SCHEMA]
    assert [change["added"] for change in changes] == [["colour"], [], [], []]
    assert changes[1]["retyped"] == ["size"]
    assert changes[2]["renamed"] == {"note": "remark"}
    assert changes[3]["dropped"] == ["paid"]


def test_the_policy_ignore_keeps_the_columns(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(ORDERS)
    with running(newest_postgres, tmp_path, "orders", schema_policy=SchemaPolicy.IGNORE) as capture:
        fill(newest_postgres, 1, 10)
        newest_postgres.execute(
            "ALTER TABLE orders ADD COLUMN colour text DEFAULT 'blue'", "INSERT INTO orders (id) VALUES (12)"
        )
        capture.catch_up()
        newest_postgres.execute("ALTER TABLE orders DROP COLUMN paid")
        newest_postgres.execute("INSERT INTO orders (id, colour) VALUES (11, 'red')")
        capture.catch_up()
        last = capture.rows("public.orders")[-1]
    assert last["id"] == 11
    assert last["paid"] is None
    assert "colour" not in last


def test_the_policy_stop_stops_before_the_change_and_evolve_goes_on_there(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    database.execute(ORDERS)
    capture = RunningCapture(database, tmp_path, ["orders"], schema_policy=SchemaPolicy.STOP)
    capture.start()
    fill(database, 1, 10)
    database.execute("ALTER TABLE orders ADD COLUMN colour text", "INSERT INTO orders (id, colour) VALUES (11, 'red')")
    error = capture.wait_for_end()
    assert isinstance(error, SchemaStopped)
    assert "Set schema_policy to evolve or ignore" in str(error)
    again = RunningCapture(database, tmp_path, ["orders"])
    again.start()
    again.assert_equal("orders")
    again.stop()


def test_a_type_that_becomes_another_stops_the_table_and_the_others_go_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(ORDERS, "CREATE TABLE other (id int PRIMARY KEY)")
    with running(newest_postgres, tmp_path, "orders", "other") as capture:
        fill(newest_postgres, 1, 10)
        newest_postgres.execute(
            "ALTER TABLE orders ALTER COLUMN amount TYPE int USING 0", "INSERT INTO orders (id, amount) VALUES (11, 2)"
        )
        newest_postgres.execute("INSERT INTO other VALUES (1)")
        capture.assert_equal("other")
        stopped = capture.tables()["public.orders"]
        assert [row["id"] for row in capture.rows("public.orders")] == list(range(1, 11))
    assert stopped.state is TableState.STOPPED
    assert "rows were rewritten" in stopped.reason
    assert "headwater resnapshot public.orders" in stopped.reason


def test_a_table_without_a_key_is_refused_with_the_statement_that_helps(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE TABLE keyless (a int, b text)")
    capture = RunningCapture(newest_postgres, tmp_path, ["keyless"])
    capture.start()
    error = capture.wait_for_end()
    assert isinstance(error, UnsupportedTable)
    assert "REPLICA IDENTITY FULL" in str(error)


def test_replica_identity_full_tells_old_rows_and_needs_no_key(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(
        "CREATE TABLE keyless (a int, b text)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        ORDERS,
        "ALTER TABLE orders REPLICA IDENTITY FULL",
    )
    with running(postgres, tmp_path, "keyless", "orders") as capture:
        postgres.execute(
            "INSERT INTO keyless VALUES (1, 'x'), (2, NULL), (NULL, 'z')",
            "UPDATE keyless SET b = 'y' WHERE a = 1",
            "DELETE FROM keyless WHERE a = 2",
        )
        fill(postgres, 1, 20)
        postgres.execute("UPDATE orders SET amount = 0 WHERE id < 5")
        capture.assert_equal("orders")
        pairs = [row for row in capture.rows("public.orders") if row["_op"] == Op.UPDATE_DELETE]
        assert [row["note"] for row in pairs] == [f"note {number}" for number in range(1, 5)]
        found = sorted(map(str, capture.replayed("public.keyless").to_pylist()))
    assert found == sorted(map(str, [{"a": 1, "b": "y"}, {"a": None, "b": "z"}]))


@pytest.mark.parametrize("full", [False, True])
def test_m28_unchanged_toast_values_are_completed(postgres: Database, tmp_path: Path, full: bool) -> None:
    postgres.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, body text, meta jsonb, n int)",
        "ALTER TABLE docs ALTER COLUMN body SET STORAGE EXTERNAL",
        f"ALTER TABLE docs REPLICA IDENTITY {'FULL' if full else 'DEFAULT'}",
        # rows from before the capture: the log never told their values
        "INSERT INTO docs SELECT i, repeat('old ' || i, 2000), NULL, 0 FROM generate_series(1, 20) i",
    )
    with running(postgres, tmp_path, "docs") as capture:
        postgres.execute(
            "INSERT INTO docs SELECT i, repeat('new ' || i, 2000), '{\"a\": 1}', 0 FROM generate_series(21, 40) i",
            "UPDATE docs SET n = n + 1",
            "UPDATE docs SET id = id + 1000 WHERE id % 5 = 0",
            "UPDATE docs SET body = 'short' WHERE id = 3",
        )
        capture.assert_equal("docs")
        unknown = {row["id"] % 5 for row in capture.rows("public.docs") if row["_unavailable"]}
    assert unknown <= ({0} if not full else set())  # those moved to another key before their value could be read


def test_m28_a_value_of_a_row_that_is_gone_is_told_to_be_unknown(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    database.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, body text, n int)",
        "ALTER TABLE docs ALTER COLUMN body SET STORAGE EXTERNAL",
        "INSERT INTO docs SELECT i, repeat('old ' || i, 2000), 0 FROM generate_series(1, 3) i",
    )
    capture = RunningCapture(database, tmp_path, ["docs"])
    capture.start()
    capture.catch_up()
    capture.stop()
    database.execute("UPDATE docs SET n = 1", "DELETE FROM docs WHERE id = 2")
    capture.start()
    capture.catch_up()
    capture.stop()
    updates = {row["id"]: row for row in capture.rows("public.docs") if row["_op"] == Op.UPDATE_INSERT}
    assert {key: row["_unavailable"] for key, row in updates.items()} == {1: None, 2: "body", 3: None}
    assert updates[2]["body"] is None
    assert updates[1]["body"] == "old 1" * 2000


DOCS = (
    "CREATE TABLE docs (id int PRIMARY KEY, body text, n int)",
    "ALTER TABLE docs ALTER COLUMN body SET STORAGE EXTERNAL",
    "INSERT INTO docs SELECT i, repeat('old ' || i, 2000), 0 FROM generate_series(1, 3) i",
)


def test_large_values_are_read_only_when_their_transaction_is_visible(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With synchronous replication the log has a commit before other sessions see it, here: until the reload."""
    database, server = newest_postgres, newest_postgres.server
    database.execute(*DOCS)
    monkeypatch.setattr(visibility, "VISIBLE_SECONDS", 0.5)
    with running(database, tmp_path, "docs") as capture:
        capture.catch_up()
        server.reload(synchronous_standby_names="nobody")
        try:
            with database.connect() as session, ThreadPoolExecutor(1) as writer:
                change = """BEGIN; INSERT INTO docs VALUES (4, repeat('new', 2000), 0);
                    UPDATE docs SET body = repeat('other', 2000) WHERE id = 1; UPDATE docs SET n = 1; COMMIT"""
                committed = writer.submit(session.execute, change)
                capture.wait_for(lambda: "synchronous standby" in str(capture.capture.statistics.last_error))
                assert database.value("SELECT sum(n) FROM docs") == 0
                server.reload(synchronous_standby_names="")
                committed.result(60)
        finally:
            server.reload(synchronous_standby_names="")
        capture.assert_equal("docs")
        told = {row["id"]: row for row in capture.rows("public.docs") if row["n"] == 1}
    assert {key: row["_unavailable"] for key, row in told.items()} == dict.fromkeys((1, 2, 3, 4))
    assert told[1]["body"] == "other" * 2000
    assert told[4]["body"] == "new" * 2000


def test_a_locked_table_whose_large_values_must_be_read_is_read_again_and_the_others_go_on(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = newest_postgres
    monkeypatch.setattr(toast, "LOCKED_SECONDS", 0.3)
    monkeypatch.setattr(source, "LOCK_TIMEOUT", "200ms")
    database.execute(*DOCS, "CREATE TABLE other (id int PRIMARY KEY)")
    capture = RunningCapture(database, tmp_path, ["docs", "other"])
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD)
    capture.start()
    since = capture.tables()["public.docs"].since
    with database.connect() as holder:
        holder.execute("BEGIN; UPDATE docs SET n = 2; COMMIT; BEGIN; LOCK TABLE docs IN ACCESS EXCLUSIVE MODE")
        capture.wait_for(lambda: capture.tables()["public.docs"].state is not TableState.ACTIVE)
        database.execute("INSERT INTO other VALUES (1)")
        capture.assert_equal("other")
        holder.execute("COMMIT")
    capture.wait_for(lambda: capture.tables()["public.docs"].state is TableState.ACTIVE)
    capture.stop()
    assert capture.tables()["public.docs"].since != since
    assert capture.capture.statistics.restarts == 0


def test_a_large_transaction_is_streamed_and_told_whole_at_its_commit(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    database.execute(ORDERS, f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    with running(database, tmp_path, "orders") as capture:
        with database.connect() as session, session.transaction():
            session.execute("INSERT INTO orders (id, note) SELECT i, 'kept' FROM generate_series(1, 5000) i")
            session.execute("SAVEPOINT before")
            session.execute("INSERT INTO orders (id, note) SELECT i, 'undone' FROM generate_series(5001, 9000) i")
            fill(database, 20001, 20100)
            session.execute("ROLLBACK TO SAVEPOINT before")
            session.execute("UPDATE orders SET note = 'changed' WHERE id % 2 = 0")
        capture.assert_equal("orders")
        epochs = {row["_epoch"] for row in capture.rows("public.orders") if row["id"] <= 9000}
    assert len(epochs) == 1
