"""``headwater run`` into a Delta mirror, with a real database, real Spark and everything that happens meanwhile.

Each start of Spark costs seconds, so two stories share what they start: one of a person who asks the running
pipeline for things, one of kills.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline, are_gone
from tests.spark.pipeline.leftovers import content, open_to_others, secrets_in

from headwater import failpoints
from headwater.control.request import user_name
from headwater.sinks import coordinator

ROWS = 20_000
END_SESSIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headwater'"
    " AND datname = current_database()"
)


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
        "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 100) n",
        "CREATE TABLE keyless (name text)",
        "CREATE TABLE vouchers (id bigint PRIMARY KEY, worth numeric(8,2))",
        "ANALYZE",
    )
    return newest_postgres


@pytest.fixture
def slow(tmp_path: Path, shop: Database) -> Iterator[RunningPipeline]:
    """A pipeline that reads its history slowly enough to be asked meanwhile; one of its sinks cannot be written to."""
    broken = '[[sink]]\nname = "broken"\nkind = "delta"\npath = "pipeline.toml/lake"\n'
    rate = "[backfill]\nrows_per_second = 500\ninterval_seconds = 0.5\n"
    events = f'[spark.conf]\n"spark.eventLog.enabled" = "true"\n"spark.eventLog.dir" = "{tmp_path}"\n'
    plain = '"spark.eventLog.compress" = "false"\n'
    made = RunningPipeline(tmp_path, shop, '["public.*"]', broken + rate + events + plain)
    yield made
    made.close()


@pytest.fixture
def quick(tmp_path: Path, shop: Database) -> Iterator[RunningPipeline]:
    made = RunningPipeline(tmp_path, shop, '["orders", "customers"]')
    yield made
    made.close()


def write(database: Database, first: int) -> None:
    """A little of everything."""
    database.execute(
        f"INSERT INTO orders SELECT n, 'new ' || n FROM generate_series({ROWS + first}, {ROWS + first + 99}) n",
        f"UPDATE orders SET name = 'changed' WHERE id BETWEEN {first} AND {first + 49}",
        f"DELETE FROM orders WHERE id BETWEEN {first + 50} AND {first + 99}",
        f"UPDATE orders SET id = -id WHERE id BETWEEN {first + 100} AND {first + 109}",
        f"DELETE FROM customers WHERE id = {first % 100 + 1}",
    )


@pytest.mark.timeout(600)
def test_a_person_asks_a_running_pipeline(slow: RunningPipeline, shop: Database) -> None:
    slow.start()
    slow.wait_for(lambda: slow.table("public.orders")["rows"] > 0)

    paused = slow.headwater("pause", "--backfill")
    assert paused.returncode == 0, paused.stderr
    assert "delta: the backfill is paused" in paused.stderr
    assert "broken: queued until it runs" in paused.stderr
    slow.wait_for(lambda: slow.table("public.orders")["paused"])
    write(shop, 1)
    shown = slow.headwater("status").stdout
    for words in ("shop · running", "capture running", "paused", "public.keyless is left out", "broken (failed)"):
        assert words in shown, shown
    held = slow.table("public.orders")["rows"]
    assert held < ROWS

    second = slow.headwater("run")
    assert second.returncode == 1
    assert f"process {slow.pid} on" in second.stderr

    wrong = slow.headwater("throttle", "1000", "public.nothing")
    assert wrong.returncode == 2
    assert "public.orders" in wrong.stderr

    assert "no limit" in slow.headwater("throttle", "none").stderr
    assert slow.table("public.orders")["rows"] == held
    shop.execute("ALTER TABLE orders ADD COLUMN grade int DEFAULT 7", END_SESSIONS)  # M25, M21
    assert "the backfill is resumed" in slow.headwater("resume", "--backfill").stderr
    write(shop, 1001)
    slow.wait_for(lambda: slow.table("public.orders")["phase"] == "live")
    slow.wait_until_equal("public.orders", "public.customers")
    slow.wait_for(lambda: slow.table("public.vouchers")["phase"] == "live")
    vouchers = DeltaTable(str(slow.folder / "lake/public.vouchers")).to_pyarrow_table()
    assert (vouchers.num_rows, vouchers.schema.names) == (0, ["id", "worth"])
    graded = shop.value("SELECT count(*) FROM orders WHERE grade = 7")
    slow.wait_for(lambda: slow.column("public.orders", "grade").count(7) == graded)

    DeltaTable(str(slow.folder / "lake/public.orders")).delete("id BETWEEN 2000 AND 2099")
    DeltaTable(str(slow.folder / "lake/public.orders")).delete("id BETWEEN 3000 AND 3099")
    slow.ask("resnapshot", "orders", "--from", "2000", "--to", "2099")
    slow.wait_for(lambda: len(slow.mirror("public.orders")) == shop.value("SELECT count(*) - 100 FROM orders"))
    slow.ask("resnapshot", "public.orders")
    slow.wait_until_equal("public.orders")

    children = slow.children()
    assert slow.stop() == 1, slow.complaints()
    assert "pipeline.toml" in (slow.folder / "err").read_text()
    assert are_gone(children)
    assert "not running (failed)" in slow.headwater("status").stdout
    assert slow.headwater("stop").returncode == 1
    assert "shop" in slow.ask("journal", "list", "--root", "headwater/shop/journal")
    (run,) = json.loads(slow.ask("runs", "--json"))
    assert (run["number"], run["state"], run["started_by"]) == (1, "failed", user_name())
    assert run["rows"]["delta"] > ROWS
    assert "broken" in [error["part"] for error in run["errors"]]
    traces = {trace["part"]: trace["trace"] for trace in json.loads(slow.ask("runs", "--trace", "--json"))}
    assert 'File "' in traces["broken"]
    assert 'File "' in traces["pipeline"]
    asked = [(command["name"], command["asked_by"], command["problem"]) for command in run["commands"]]
    for name in ("pause_backfill", "throttle_backfill", "resume_backfill", "resnapshot_table"):
        assert (name, user_name(), None) in asked
    assert f"delta: {run['rows']['delta']:,} rows delivered" in slow.ask("runs", "1")
    password = {"password": shop.server.password}
    assert [name for name, data in content(slow.folder) if list(secrets_in(data, password))] == []
    assert sorted(open_to_others(slow.folder / "headwater/shop")) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_whatever_is_killed_the_next_run_goes_on(quick: RunningPipeline, shop: Database) -> None:
    quick.start()
    quick.wait_for(lambda: any((quick.folder / "lake").rglob("*.parquet")))  # in the first batch
    write(shop, 1)
    children = quick.children()
    quick.kill9()
    assert are_gone(children)
    assert "not running (interrupted)" in quick.headwater("status").stdout
    write(shop, 1001)

    quick.start()
    quick.wait_until_equal("public.orders", "public.customers")
    capture = quick.status()["capture"]["pid"]
    os.kill(capture, signal.SIGKILL)
    write(shop, 2001)
    quick.wait_for(lambda: quick.status()["capture"].get("pid") not in (None, capture))
    quick.wait_until_equal("public.orders")

    (java,) = quick.named(b"org.apache.spark.deploy.SparkSubmit")
    os.kill(java, signal.SIGKILL)
    write(shop, 4001)
    quick.wait_until_equal("public.orders")
    assert quick.stop(signal.SIGTERM) == 0, quick.complaints()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_sigterm_ends_all_processes_within_ten_seconds_also_while_a_batch_hangs(
    quick: RunningPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"{coordinator.BEFORE_PENDING}=sleep:300")
    quick.start()
    quick.wait_for(lambda: any((quick.folder / "lake").rglob("*.parquet")))  # staged, and the commit hangs
    children = quick.children()
    os.kill(quick.pid, signal.SIGTERM)
    assert are_gone(children[:1], 10)
    assert quick.wait() == 0
    assert are_gone(children, 2)
    monkeypatch.delenv(failpoints.VARIABLE)
    quick.start()
    quick.wait_until_equal("public.orders", "public.customers")
