"""Long work on the logs of a capture that runs: asked for from another process, done beside its work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.db.capture.running import RunningCapture
from tests.servers.postgres import Database

from headwater.log_store import KvLogStoreFactory, LogView
from headwater.log_store.state import now_ms
from headwater.sources.open import open_source
from headwater.state import open_reader, open_writer
from headwater.stream import EpochClock


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def make_log_of_format_1(database: Database, folder: Path) -> None:
    """As an older release left it."""
    source = open_source(database.dsn, spill=folder / "spill")
    (table,) = source.tables(["public.t"])
    with open_writer(folder / "store") as store:
        factory = KvLogStoreFactory(store)
        factory.log("public.t", table.log_schema(source.position_type), table.key_columns, log_format=1)
        factory.sealer.seal(EpochClock(now_ms, store.committed_epoch()).next())
        factory.close()
    source.close()


def formats(folder: Path) -> set[int]:
    with open_reader(folder / "store") as reader, reader.snapshot() as view:
        return {number for end in LogView.open(view, "public.t").epochs() for number in end.formats.numbers}


def test_a_log_is_migrated_and_compacted_while_its_capture_runs(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    make_log_of_format_1(database, tmp_path)
    capture = RunningCapture(database, tmp_path, ["t"])
    capture.start()
    try:
        database.execute("INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i")
        for _ in range(20):
            database.execute("UPDATE t SET n = n + 1")
            capture.catch_up()
        assert formats(tmp_path) == {1}
        migrated = command("log", "migrate", str(capture.store), "public.t", "--json")
        assert migrated.returncode == 0, migrated.stderr
        assert json.loads(migrated.stdout)["rows"] >= 2000
        database.execute("UPDATE t SET n = n + 1")
        capture.assert_equal("t")
        assert formats(tmp_path) == {2}
        compacted = command("log", "compact", str(capture.store), "public.t", "--json")
        assert compacted.returncode == 0, compacted.stderr
        saved = json.loads(compacted.stdout)
        assert saved["rows"] <= 200 < saved["rows_before"]
        database.execute("DELETE FROM t WHERE id > 50")
        capture.assert_equal("t")
        unknown = command("log", "migrate", str(capture.store), "public.nothing")
        assert unknown.returncode == 1
        assert "headwater log status" in unknown.stderr
    finally:
        capture.stop()
