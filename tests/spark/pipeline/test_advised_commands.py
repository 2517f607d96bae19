"""What the status advises leads back to live: each state is produced on a real server, and its advice followed.

A case is one table of one pipeline, so that all of them cost about one start. A new reason to stop gets a line here.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.db.capture.captured import drop_slot
from tests.sampled import SOAK
from tests.servers.postgres import Database
from tests.spark.pipeline.conftest import StartPipeline
from tests.spark.pipeline.driven import SessionPipeline

ROWS = 50
STEP = re.compile(r"\b[Rr]un: (.+?)(?=,? (?:[Tt]hen )?[Rr]un: |$)")


@dataclass(frozen=True)
class Case:
    """How a table comes to its state.

    :ivar change: statements, with ``{t}`` for the table. :ivar repair: what a person does first, as the advice says.
    :ivar key: of the table before.
    """

    change: str
    repair: str = ""
    key: str = "id"


CREATE = "CREATE TABLE {t} (id bigint NOT NULL, code bigint NOT NULL, name text, PRIMARY KEY ({key}))"
FILL = "INSERT INTO {t} (id, code, name) SELECT n, n, 'row ' || n FROM generate_series(1, {rows}) n"
REMAKE = f"{CREATE.replace('{key}', 'id')}; {FILL.replace('{rows}', '7')}"
CASES = {
    "key_changed": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (code)"),
    "key_column_dropped": Case("ALTER TABLE {t} DROP COLUMN code, ADD PRIMARY KEY (id)", key="code"),
    "key_lost": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", "ALTER TABLE {t} ADD PRIMARY KEY (id)"),
    "retyped": Case("ALTER TABLE {t} ALTER COLUMN code TYPE smallint"),
    "renamed": Case("ALTER TABLE {t} RENAME TO elsewhere", "ALTER TABLE elsewhere RENAME TO {t}"),
    "made_again": Case(f"DROP TABLE {{t}}; {REMAKE}"),
    "dropped": Case("DROP TABLE {t}", REMAKE),
    "unpublished": Case("ALTER PUBLICATION headwater DROP TABLE {t}"),
    "published_again": Case("ALTER PUBLICATION headwater DROP TABLE {t}; ALTER PUBLICATION headwater ADD TABLE {t}"),
    "no_identity": Case("ALTER TABLE {t} REPLICA IDENTITY NOTHING", "ALTER TABLE {t} REPLICA IDENTITY DEFAULT"),
}


def perform(shop: Database, table: str, statements: str) -> None:
    shop.execute(*filter(None, (one.strip() for one in statements.replace("{t}", table).split(";"))))


def follow(pipeline: SessionPipeline, shop: Database, next_step: str) -> list[str]:
    """Do just what *next_step* says: statements at the server, commands of ours; the commands."""
    steps = [one.strip().rstrip(";") for one in STEP.findall(next_step)]
    assert steps, f"this names nothing to run: {next_step}"
    commands = [one for one in steps if one.startswith("headwater ")]
    assert commands, f"this names no command: {next_step}"
    for step in steps:
        if step in commands:
            pipeline.ask(*shlex.split(step)[1:])
        else:
            shop.execute(step)
    return commands


def by_name(pipeline: SessionPipeline) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for sink in pipeline.status()["sinks"] for one in sink["tables"]}


@pytest.mark.timeout(600)
def test_what_the_status_advises_leads_back_to_live(start_pipeline: StartPipeline, newest_postgres: Database) -> None:
    shop = newest_postgres
    for table, case in CASES.items():
        shop.execute(CREATE.format(t=table, key=case.key), FILL.format(t=table, rows=ROWS))
    pipeline = start_pipeline(shop, '["public.*"]')
    names = {f"public.{table}": case for table, case in CASES.items()}

    phases: set[str] = set()

    def are_live() -> bool:
        found = pipeline.status()
        phases.update(one["phase"] for one in found["sinks"][0]["tables"])
        return bool(found["live"]) and {one["name"] for one in found["sinks"][0]["tables"]} == set(names)

    def equal(name: str) -> bool:
        return pipeline.mirror(name) == sorted(shop.execute(f"SELECT id, name FROM {name}"))

    pipeline.wait_for(are_live)
    for table, case in CASES.items():
        perform(shop, table, case.change)
        if shop.value(f"SELECT to_regclass('{table}') IS NOT NULL"):
            columns = "id, name" if table == "key_column_dropped" else "id, code, name"
            values = "1001, 'new'" if table == "key_column_dropped" else "1001, 1001, 'new'"
            shop.execute(f"INSERT INTO {table} ({columns}) VALUES ({values})")
    for name, case in names.items():
        # what is repaired without a person is live and equal again, what is not has stopped: nothing else, for good
        pipeline.wait_for(
            lambda name=name, case=case: (
                by_name(pipeline)[name]["phase"] == "stopped"  # type: ignore[misc]
                or (not case.repair and by_name(pipeline)[name]["phase"] == "live" and equal(name))
            )
        )
    assert not pipeline.status()["live"]
    stopped = {name: one for name, one in by_name(pipeline).items() if one["phase"] == "stopped"}
    assert {name: one["reason"] for name, one in stopped.items() if "headwater " not in (one["next_step"] or "")} == {}
    followed = {}
    for name, case in names.items():
        told = by_name(pipeline)[name]
        if told["phase"] == "stopped":
            assert told["reason"]
            perform(shop, name.partition(".")[2], case.repair)
            followed[name] = follow(pipeline, shop, told["next_step"])
    assert "public.unpublished" in followed
    pipeline.wait_for(are_live)
    for name in names:
        pipeline.wait_for(lambda name=name: equal(name))  # type: ignore[misc]
    assert all(one["reason"] is None for one in by_name(pipeline).values())
    assert "rereading" in phases

    drop_publication = partial(Database.execute, shop, "DROP PUBLICATION headwater")
    for damage in (partial(drop_slot, shop), drop_publication) if SOAK else (partial(drop_slot, shop),):
        damage()
        shop.execute("INSERT INTO unpublished VALUES ((SELECT max(id) + 1 FROM unpublished), 5, 'in the gap')")
        pipeline.wait_for_end()
        found = pipeline.status()
        assert found["state"] == "failed"
        follow(pipeline, shop, found["next_step"])
        pipeline.start()
        pipeline.wait_for(are_live)
        pipeline.wait_for(lambda: equal("public.unpublished"))
        assert pipeline.status()["error"] is None
