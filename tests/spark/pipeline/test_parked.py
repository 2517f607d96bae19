"""Rows and tables that a sink refuses are parked with the reason, and the rest flows; later they come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline

from headwater import Pipeline
from headwater.pipeline.config import load
from headwater.pipeline.metrics import pipeline_metrics


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute(
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.orders (id bigint PRIMARY KEY, name text)",
        "INSERT INTO shop.orders SELECT n, 'order ' || n FROM generate_series(1, 100) n",
        "CREATE TABLE shop.notes (id bigint PRIMARY KEY, name text)",
        "INSERT INTO shop.notes SELECT n, 'note ' || n FROM generate_series(1, 100) n",
        "CREATE SCHEMA shown",  # the sink is another schema of the same database
        "CREATE TABLE shown.notes (id text PRIMARY KEY)",  # not the column that is needed
    )
    return newest_postgres


@pytest.fixture
def running(tmp_path: Path, shop: Database) -> Iterator[RunningPipeline]:
    more = '[[sink]]\nkind = "postgres"\nname = "warehouse"\ndsn = "${SHOP_DSN}"\nschema = "shown"\nbad_rows = "park"\n'
    made = RunningPipeline(tmp_path, shop, '["shop.*"]', more)
    made.start()
    yield made
    made.close()


def table(running: RunningPipeline, name: str) -> dict[str, Any]:
    sinks = {one["name"]: one for one in running.status()["sinks"]}
    tables: list[dict[str, Any]] = sinks.get("warehouse", {"tables": []})["tables"]
    return next((one for one in tables if one["name"] == name), {"phase": ""})


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_the_sink_refuses_is_parked_and_comes_back(
    running: RunningPipeline, shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.wait_for(lambda: table(running, "shop.notes")["phase"] == "stopped")
    assert "shop.notes" in table(running, "shop.notes")["reason"]
    assert table(running, "shop.notes")["next_step"].endswith("run: headwater sink retry warehouse")
    running.wait_for(lambda: table(running, "shop.orders")["phase"] == "live")
    assert shop.value("SELECT count(*) FROM shown.orders") == 100

    shop.execute(
        "ALTER TABLE shown.orders ADD CONSTRAINT short CHECK (length(name) < 20)",
        "INSERT INTO shop.orders VALUES (201, 'short'), (202, 'much too long for the sink'), (203, 'short, too')",
        "UPDATE shop.orders SET name = 'changed' WHERE id = 1",
    )
    running.wait_for(lambda: shop.value("SELECT count(*) FROM shown.orders") == 102)
    assert shop.value("SELECT name FROM shown.orders WHERE id = 1") == "changed"
    letters = json.loads(running.headwater("sink", "letters", "warehouse", "--rows", "5", "--json").stdout)
    assert [(one["table"], one["rows"]) for one in letters] == [("shop.orders", 1)]
    assert letters[0]["shown"][0]["id"] == "202"
    assert "much too long" not in running.complaints()
    running.wait_for(lambda: table(running, "shop.orders")["phase"] == "incomplete")
    assert table(running, "shop.orders")["next_step"].endswith("run: headwater sink replay warehouse")

    monkeypatch.setenv("SHOP_DSN", shop.dsn)
    figures = {
        (one.name, dict(one.labels).get("sink")): one.value
        for one in pipeline_metrics(load(running.folder / "pipeline.toml"))
    }
    assert figures["pipeline_up", None] == 1
    assert figures["sink_up", "warehouse"] == figures["sink_up", "delta"] == 1
    assert figures["sink_parked_tables", "warehouse"] == figures["sink_refused_rows", "warehouse"] == 1
    assert figures["sink_parked_tables", "delta"] == 0
    assert figures["sink_table_phase", "warehouse"] == 1

    shop.execute("ALTER TABLE shown.orders DROP CONSTRAINT short")
    pipeline = Pipeline.from_toml(running.folder / "pipeline.toml")
    assert pipeline.dead_letters("warehouse")["shop.orders"]["id"].to_pylist() == [202]
    assert pipeline.replay("warehouse") == {"shop.orders": 1}
    running.wait_for(lambda: shop.value("SELECT count(*) FROM shown.orders WHERE id = 202") == 1)
    assert json.loads(running.headwater("sink", "letters", "warehouse", "--json").stdout) == []
    running.wait_for(lambda: table(running, "shop.orders")["phase"] == "live")

    shop.execute("DROP TABLE shown.notes", "INSERT INTO shop.notes VALUES (300, 'while parked')")
    again = running.headwater("sink", "retry", "warehouse")
    assert again.returncode == 0, again.stderr
    assert "shop.notes" in again.stderr
    running.wait_for(lambda: table(running, "shop.notes")["phase"] == "live")
    running.wait_for(lambda: shop.value("SELECT count(*) FROM shown.notes") == 101)
    assert running.stop() == 0, running.complaints()
