"""Sinks that are added to a running pipeline: one with history from the kept tables, one with changes since an epoch.

Each query of Spark costs seconds, so this is one story, in the session that all tests share.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from tests.servers.postgres import Database
from typer.testing import CliRunner

from headwater import Pipeline
from headwater.cli.main import app
from headwater.pipeline.errors import PipelineFailed
from headwater.pipeline.status import SinkStatus, TableStatus
from headwater.pipeline.tables import captured_tables
from headwater.sinks.parquet import read
from headwater.versioned import VersionedTable
from headwater.versioned.errors import NotComplete

ROWS = 2000
TABLE = "public.orders"
SECONDS = 180.0
PIPELINE = """
[pipeline]
name = "shop"
[source]
dsn_env = "SHOP_DSN"
tables = ["orders"]
heartbeat_seconds = 0.5
[backfill]
split_rows = 200
interval_seconds = 0.2
[[sink]]
kind = "table"
interval_seconds = 0.5
"""


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
    )
    return newest_postgres


@pytest.fixture
def pipeline(spark: Any, shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_DSN", shop.dsn)
    Path("pipeline.toml").write_text(PIPELINE)
    made = Pipeline.from_toml("pipeline.toml").start(spark)
    yield made
    if made.is_running:
        with suppress(PipelineFailed):  # the test tells why
            made.stop()


@contextmanager
def _writer(dsn: str) -> Iterator[None]:
    """Somebody who updates, deletes and inserts all the time."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as session:
            for number in range(1, 1_000_000):
                if stop.wait(0.01):
                    return
                key = number * 7919 % (2 * ROWS) + 1
                with session.transaction():
                    session.execute("UPDATE orders SET name = %s WHERE id = %s", [str(number), key])
                    session.execute("DELETE FROM orders WHERE id = %s", [key + 10])
                    session.execute("INSERT INTO orders VALUES (%s, 'again') ON CONFLICT DO NOTHING", [key + 20])

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def _wait(done: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def _sink(pipeline: Pipeline, name: str) -> SinkStatus:
    return next(one for one in pipeline.status().sinks if one.name == name)


def _table(pipeline: Pipeline, sink: str) -> TableStatus:
    return next(iter(_sink(pipeline, sink).tables), TableStatus(TABLE, ""))


def _is_whole(pipeline: Pipeline, folder: Path) -> bool:
    """Whether the kept table shows an epoch: the first one that is committed after its history."""
    try:
        with closing(VersionedTable.open(pipeline.config.store, TABLE, folder)) as kept:
            kept.pin("a look").release()
    except NotComplete:
        return False
    return True


def _added(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["add-sink", *arguments, "--json"])
    assert done.exit_code == 0, done.stderr or done.exception
    told = json.loads(done.stdout)
    assert told["running"]
    return str(told["sink"])


def _mirrored() -> dict[int, str]:
    found = DeltaTable(f"lake/{TABLE}").to_pyarrow_table(columns=["id", "name"]).to_pydict()
    return dict(zip(found["id"], found["name"], strict=True))


def _followed(rows: dict[int, str]) -> dict[int, str]:
    """*rows* after the changes that the sink of changes has; each must fit. A commit of the writer has a key once."""
    now = dict(rows)
    for row in sorted(read(Path("changes") / TABLE).to_pylist(), key=lambda row: row["_commit_version"]):
        match row["_change_type"]:
            case "insert":
                assert row["id"] not in now
                now[row["id"]] = row["name"]
            case "update_postimage":
                assert row["id"] in now
                now[row["id"]] = row["name"]
            case "delete":
                del now[row["id"]]
    return now


@pytest.mark.timeout(400)
def test_sinks_that_are_added_later_come_from_kept_tables_or_have_changes_since_an_epoch(
    pipeline: Pipeline, shop: Database
) -> None:
    _wait(lambda: _table(pipeline, "table").phase == "live")
    folder = Path(pipeline.config.sink[0].options["path"])
    _wait(lambda: _is_whole(pipeline, folder))
    with closing(VersionedTable.open(pipeline.config.store, TABLE, folder)) as kept, kept.pin("a report") as pin:
        before = {
            row["id"]: row["name"]
            for batch in kept.snapshot(pin.epoch, (0, kept.vnode_count))
            for row in batch.to_pylist()
        }
        assert len(before) == ROWS
        with _writer(shop.dsn):
            assert pipeline.add_sink("delta", path=Path("lake"), **{"from": "tables"}) == "delta"
            assert (
                _added("parquet", "--name", "changes", "--set", "path=changes", "--since", str(pin.epoch)) == "changes"
            )
            assert (
                _added("parquet", "--name", "late", "--set", "path=late", "--since", "2020-01-01T00:00:00Z") == "late"
            )
            _wait(lambda: _table(pipeline, "delta").phase == "live")
            assert _table(pipeline, "delta").origin == "tables"
            _wait(lambda: _sink(pipeline, "changes").epoch > pin.epoch)
        truth: dict[int, str] = dict(shop.execute("SELECT id, name FROM orders"))
        _wait(lambda: _mirrored() == truth)
        _wait(lambda: _followed(before) == truth)
    (found,) = pipeline.verify(["orders"], ["delta"])
    assert found.is_right
    assert (found.sink, found.source_rows, found.mirror_rows) == ("delta", len(truth), len(truth))
    shop.execute("CREATE TABLE stock (id bigint PRIMARY KEY)")
    pipeline.add_table("stock")
    assert set(captured_tables(pipeline.config.store)) == {TABLE, "public.stock"}
    _wait(lambda: _sink(pipeline, "late").state == "failed")
    late = _sink(pipeline, "late")
    assert "is not all there any more" in str(late.error)
    assert "leave since out" in str(late.next_step)
    assert _sink(pipeline, "delta").state == _sink(pipeline, "changes").state == "running", "the others go on"
    assert CliRunner().invoke(app, ["sink", "drop", "late", "--yes"]).exit_code == 0
    pipeline.stop()
