"""What a person meets: mistakes that are refused, advice that works, and what the commands show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import Database

from headwater.sources.errors import SchemaStopped, SourceMisconfigured, SpecialValue
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


def test_the_advice_on_special_values_works_also_for_a_column_that_is_known(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, a date, b timestamptz)")
    capture = RunningCapture(newest_postgres, tmp_path, ["t"])
    capture.start()
    newest_postgres.execute("INSERT INTO t VALUES (1, '2026-01-01', now()), (2, 'infinity', now())")
    error = capture.wait_for_end()
    assert isinstance(error, SpecialValue)
    policies = {"public.t.a": SpecialValues.TEXT, "public.t.b": SpecialValues.NULL}
    newest_postgres.execute("INSERT INTO t VALUES (3, '-infinity', 'infinity')")
    with running(newest_postgres, tmp_path, "t", special_values=policies) as again:
        again.catch_up()
        rows = {row["id"]: row for row in again.rows("public.t")}
    assert [rows[key]["a"] for key in (1, 2, 3)] == ["2026-01-01", "infinity", "-infinity"]
    assert rows[2]["b"] is not None
    assert rows[3]["b"] is None


def test_a_value_that_an_ignored_wider_type_brought_is_never_shown(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    capture = RunningCapture(newest_postgres, tmp_path, ["t"], schema_policy=SchemaPolicy.IGNORE)
    capture.start()
    newest_postgres.execute("ALTER TABLE t ALTER n TYPE bigint", "INSERT INTO t VALUES (1, 1234567890123)")
    error = capture.wait_for_end()
    assert isinstance(error, SchemaStopped)
    assert "1234567890123" not in str(error)
    assert "--schema-policy evolve" in str(error)
    with running(newest_postgres, tmp_path, "t") as again:
        again.assert_equal("t")


def test_the_commands_show_events_and_stopped_tables(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    with running(database, tmp_path, "t", "u") as capture:
        database.execute("INSERT INTO t VALUES (1)", "TRUNCATE t", "ALTER TABLE t ADD colour text")
        database.execute("INSERT INTO t VALUES (1, 'red')", "DROP TABLE u")
        capture.wait_for(lambda: "public.u" in capture.capture.statistics.stopped_tables)
        capture.catch_up()
        told = shown("log", "show", str(capture.store), "public.t")
        assert "truncate" in told
        assert '"added": ["colour"]' in told
        assert "red" not in told.replace("coloured", "")
        assert "Captured no longer" in shown("log", "status", str(capture.store), "public.u")
        assert '"capture": "stopped"' in shown("log", "status", str(capture.store), "public.u", "--json")
