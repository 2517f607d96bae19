"""``headwater sink`` and ``add-sink`` on a running pipeline: one sink is steered, the others go on.

Each query of Spark costs seconds, so this is one story, in the session that all tests share.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.conftest import StartPipeline
from tests.spark.pipeline.driven import SessionPipeline

from headwater.control.request import user_name
from headwater.sinks.parquet import read

SECOND = '[[sink]]\nname = "archive"\nkind = "parquet"\npath = "changes"\n'


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        "INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, 1000) n",
    )
    return newest_postgres


@pytest.fixture
def running(shop: Database, start_pipeline: StartPipeline) -> SessionPipeline:
    return start_pipeline(shop, '["orders"]', SECOND)


def sinks(running: SessionPipeline) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in running.status()["sinks"]}


def listed(running: SessionPipeline) -> dict[str, tuple[str, int]]:
    found = json.loads(running.ask("sink", "list", "--json"))
    return {row["name"]: (row["state"], row["lag_rows"]) for row in found}


def archived(folder: Path) -> list[tuple[int, str]]:
    rows = read(folder / "public.orders").to_pylist()
    return sorted((row["id"], row["_change_type"]) for row in rows)


def commands_of_run(running: SessionPipeline) -> set[tuple[str, str]]:
    """What the run was asked, and of which sink."""
    (run,) = json.loads(running.ask("runs", "--json"))
    assert all(command["asked_by"] == user_name() for command in run["commands"])
    return {(command["name"], command["detail"]["sink"]) for command in run["commands"]}


@pytest.mark.timeout(600)
def test_one_sink_is_steered_and_the_others_go_on(running: SessionPipeline, shop: Database) -> None:
    folder = running.folder
    running.wait_until_equal("public.orders")
    running.wait_for(lambda: len(archived(folder / "changes")) == 1000)

    running.ask("pause", "--sink", "archive")
    running.wait_for(lambda: sinks(running)["archive"]["state"] == "paused")
    shop.execute("INSERT INTO orders VALUES (2001, 'while paused')")
    running.wait_until_equal("public.orders")
    assert len(archived(folder / "changes")) == 1000
    running.wait_for(lambda: listed(running) == {"delta": ("running", 0), "archive": ("paused", 1)})
    shop.execute("ALTER TABLE orders ADD COLUMN note text")  # no row follows it
    running.wait_for(lambda: listed(running) == {"delta": ("running", 0), "archive": ("paused", 2)})
    running.ask("resume", "--sink", "archive")
    running.wait_for(lambda: archived(folder / "changes")[-1] == (2001, "insert"))

    wrong = running.headwater("add-sink", "parquet", "--set", "paht=more")
    assert wrong.returncode == 2
    assert "Did you mean path?" in wrong.stderr
    running.ask("add-sink", "parquet", "--name", "more", "--set", "path=more")
    running.wait_for(lambda: len(archived(folder / "more")) == 1001)
    assert sorted(sinks(running)) == ["archive", "delta", "more"]

    assert json.loads(running.ask("sink", "drop", "more", "--yes", "--json"))["tables"] == ["public.orders"]
    running.wait_for(lambda: sinks(running)["more"]["state"] == "dropped")

    # a sink that is restored from a backup says so, and is given what it lacks
    running.ask("pause", "--sink", "delta")
    shutil.copytree(folder / "lake", folder / "backup")
    running.ask("resume", "--sink", "delta")
    shop.execute("INSERT INTO orders VALUES (2002, 'after the backup')")
    running.wait_until_equal("public.orders")
    running.ask("pause", "--sink", "delta")
    shop.execute("INSERT INTO orders VALUES (2003, 'not delivered yet')")
    shutil.rmtree(folder / "lake")
    shutil.copytree(folder / "backup", folder / "lake")
    running.ask("resume", "--sink", "delta")
    running.wait_for(lambda: sinks(running)["delta"]["state"] == "failed")
    assert "restored from a backup" in sinks(running)["delta"]["error"]
    rewound = running.headwater("sink", "rewind", "delta")
    if rewound.returncode == 0:
        running.wait_until_equal("public.orders")
    else:  # the log had been truncated already, which is what the message must say
        assert "the log no longer has" in rewound.stderr.lower(), rewound.stderr
    running.wait_for(lambda: archived(folder / "changes")[-1] == (2003, "insert"))
    running.ask("sink", "retry", "archive")
    missing = running.headwater("pause", "--sink", "nothing")
    assert missing.returncode == 2
    assert "archive" in missing.stderr
    running.ask("throttle", "5000", "orders", "--sink", "archive")
    running.wait_for(lambda: ("throttle_backfill", "archive") in commands_of_run(running))
    assert {("pause_sinks", "archive"), ("resume_sinks", "delta"), ("drop_sink", "more")} < commands_of_run(running)
    noted = [line for file in (folder / "headwater").rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert {"archive", "more", "delta"} == {one["sink"] for one in map(json.loads, noted) if one.get("to") == "done"}
