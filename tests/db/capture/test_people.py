"""What a person meets: mistakes that are refused, advice that works, and what the commands show."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.db.capture.running import OPTIONS, RunningCapture, running
from tests.servers.postgres import Database

from headwater.capture.renewal import renew
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.table import SpecialValues


def shown(*arguments: str) -> str:
    command = [sys.executable, "-m", "headwater.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_store_does_not_take_the_slot_away(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    first = RunningCapture(newest_postgres, tmp_path / "first", ["t"])
    first.start()
    first.catch_up()
    first.stop()
    second = RunningCapture(newest_postgres, tmp_path / "second", ["t"])
    second.start()
    error = second.wait_for_end()
    assert isinstance(error, SourceMisconfigured)
    assert "another name for the slot" in str(error)
    newest_postgres.execute("INSERT INTO t VALUES (1)")
    first.start()
    first.assert_equal("t")
    first.stop()


def test_a_special_value_stops_its_table_alone_and_the_advice_works(newest_postgres: Database, tmp_path: Path) -> None:
    """Rows of the transactions before it are kept; over a restart the table stays stopped, and the others go on."""
    database = newest_postgres
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a date, b timestamptz)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE TABLE plain (id int PRIMARY KEY)",
    )
    capture = RunningCapture(database, tmp_path, ["t", "other", "plain"])
    capture.options = replace(OPTIONS, epoch_seconds=1.0)  # several transactions are told at once
    capture.start()
    with database.connect() as session:
        session.execute("INSERT INTO other VALUES (0)")
        session.execute("INSERT INTO t SELECT i, '2026-01-01', now() FROM generate_series(1, 3) i")
        session.execute("UPDATE t SET b = NULL WHERE id = 2")
        with session.transaction():
            session.execute("INSERT INTO t VALUES (4, '2026-01-01', now())")
            session.execute("INSERT INTO other VALUES (1)")
            session.execute("INSERT INTO t VALUES (5, 'infinity', now())")
        session.execute("INSERT INTO t VALUES (6, '2026-01-01', now())")
    database.execute("ALTER TABLE plain ADD day date DEFAULT 'infinity'", "INSERT INTO plain VALUES (1)")
    for table, column in (("public.t", "a"), ("public.plain", "day")):
        reason = capture.wait_until_stopped(table)
        assert f"Table {table}, column '{column}' (date) holds infinite dates or times" in reason
        assert reason.endswith(f"headwater resnapshot {table}")
    assert [row["id"] for row in capture.rows("public.t")] == [1, 2, 3, 2]
    capture.assert_equal("other")
    capture.stop()
    policies = {"public.t.a": SpecialValues.TEXT, "public.t": SpecialValues.NULL, "public.plain": SpecialValues.TEXT}
    with running(database, tmp_path, "t", "other", "plain", special_values=policies) as again:
        database.execute("INSERT INTO other VALUES (2)")
        again.assert_equal("other")
        assert not renew(again.store, ["public.t", "public.plain"])
        database.execute(
            "INSERT INTO t VALUES (7, '-infinity', 'infinity')", "INSERT INTO plain VALUES (2, '0044-03-15 BC')"
        )
        again.catch_up()
        told, plain = again.rows("public.t")[-1], again.rows("public.plain")[-1]
        assert [told["id"], told["a"], told["b"]] == [7, "-infinity", None]
        assert [plain["id"], plain["day"]] == [2, "0044-03-15 BC"]
        assert not again.capture.statistics.stopped_tables


def test_a_value_that_an_ignored_wider_type_brought_is_never_shown(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, n numeric(5))")
    capture = RunningCapture(newest_postgres, tmp_path, ["t"], schema_policy=SchemaPolicy.IGNORE)
    capture.start()
    newest_postgres.execute("ALTER TABLE t ALTER n TYPE numeric(20)", "INSERT INTO t VALUES (1, 1234567890123)")
    capture.wait_until_stopped("public.t")
    reason = capture.tables()["public.t"].reason
    assert "1234567890123" not in reason
    assert "Set schema_policy to evolve" in reason
    capture.stop()
    with running(newest_postgres, tmp_path, "t") as again:
        assert not renew(again.store, ["public.t"])
        newest_postgres.execute("INSERT INTO t VALUES (2, 1234567890123)")
        again.catch_up()
        assert again.rows("public.t")[-1]["n"] == 1234567890123


def test_the_commands_show_events_and_stopped_tables(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    with running(database, tmp_path, "t", "u") as capture:
        registration = capture.tables()["public.t"].registration
        database.execute("INSERT INTO t VALUES (1)", "TRUNCATE t")
        capture.wait_for(lambda: capture.tables()["public.t"].registration != registration)
        database.execute("ALTER TABLE t ADD colour text")
        database.execute("INSERT INTO t VALUES (1, 'red')", "DROP TABLE u")
        capture.wait_for(lambda: "public.u" in capture.capture.statistics.stopped_tables)
        capture.catch_up()
        told = shown("log", "show", str(capture.store), "public.t")
        assert "truncate" in told
        assert '"added": ["colour"]' in told
        assert "red" not in told.replace("coloured", "")
        assert "Captured no longer" in shown("log", "status", str(capture.store), "public.u")
        assert '"capture": "stopped"' in shown("log", "status", str(capture.store), "public.u", "--json")
