"""A query that has its history from kept tables is killed at every durable step of it, and goes on where it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.db.capture.running import running
from tests.db.versioned.kept import kept
from tests.servers.postgres import PostgresServer

from headwater.backfill.snapshot.record import SnapshotPhase, SnapshotTables
from headwater.state import Catalog, WriteBatch
from headwater.state.query_store import QueryReader, own_state
from headwater.versioned import VersionedTable

pytestmark = pytest.mark.crash

TABLE = "public.orders"
ROWS = 1500
SCRIPT = Path(__file__).with_name("kept_query.py")


@pytest.fixture(scope="module")
def kept_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose table is kept; changes come after it was folded last."""
    folder = tmp_path_factory.mktemp("kept")
    with PostgresServer() as server, server.database() as database:
        database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
            f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
        )
        with running(database, folder, TABLE) as capture, kept(capture, TABLE) as keeping:
            keeping.finish()
            database.execute(
                "UPDATE orders SET name = 'later' WHERE id % 7 = 0", "DELETE FROM orders WHERE id % 11 = 0"
            )
            capture.catch_up()
    return folder


def _run(folder: Path, failpoint: str = "") -> int:
    """The exit code."""
    environment = os.environ | {"HEADWATER_FAILPOINTS": failpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(folder), TABLE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


STEPS = ("snapshot_backfill.after_pin=kill@1", "query.after_save=kill@4", "snapshot_backfill.before_let_go=kill@1")
MORE = ("snapshot_backfill.before_begin=kill@1", "query.before_save=kill@5", "snapshot_backfill.after_let_go=kill@1")


@pytest.mark.parametrize("failpoint", STEPS + MORE if os.environ.get("HEADWATER_SOAK") else STEPS)
def test_killed_at_a_durable_step_it_goes_on_where_it_was(failpoint: str, kept_tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(kept_tables, folder)
    assert _run(folder, failpoint) == -signal.SIGKILL
    assert _run(folder) == 0
    rows = DeltaTable(str(folder / "lake" / TABLE)).to_pyarrow_table(columns=["id", "name"]).to_pylist()
    expected = {n: "later" if n % 7 == 0 else f"order {n}" for n in range(1, ROWS + 1) if n % 11}
    assert {row["id"]: row["name"] for row in rows} == expected
    assert len(rows) == len(expected)
    with QueryReader(own_state(str(folder / "store"), "later"), "later") as reader, reader.snapshot() as view:
        record = SnapshotTables(Catalog.load(view), WriteBatch()).record(view, TABLE)
    assert record is not None
    assert record.phase is SnapshotPhase.LIVE
    assert not VersionedTable.open(str(folder / "store"), TABLE, folder / "tables").pins()
