"""What the status advises leads back to live: each state is produced on a real server, and its advice followed.

The states are in :mod:`tests.spark.pipeline.advised`. Rows and tables that a sink other than Delta refuses are followed
back to live in test_parked.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.servers.postgres import Database
from tests.spark.pipeline.advised import STARTED, AdvisedSource, Postgres
from tests.spark.pipeline.conftest import StartPipeline
from tests.spark.pipeline.driven import SessionPipeline

from headwater.pipeline.config import load
from headwater.pipeline.tables import captured_tables

STOPPED = ("stopped", "incomplete")
COMMAND = "headwater "


def steps(next_step: str) -> Iterator[str]:
    """The statements and commands that *next_step* says to run, in order.

    >>> list(steps("Run: ALTER TABLE a SET LOGGED; Then run: headwater resnapshot a.b. It takes long."))
    ['ALTER TABLE a SET LOGGED', 'headwater resnapshot a.b']
    """
    for part in re.split(r"\b[Rr]un: ", next_step)[1:]:
        if part.startswith(COMMAND):
            yield re.split(r"[.,;]?\s+(?=[A-Z]|then\b)", part)[0]
        else:
            assert ";" in part, f"this statement has no end: {next_step}"
            yield from filter(None, (one.strip() for one in part[: part.rindex(";")].split(";")))


class Followed:
    """The advice of one table, or of the pipeline: its statements and its commands."""

    def __init__(self, source: AdvisedSource, stopped: dict[str, Any]) -> None:
        self._source = source
        self._reason = str(stopped.get("reason") or stopped.get("error"))
        found = list(steps(stopped["next_step"] or ""))
        self._statements = [one for one in found if not one.startswith(COMMAND)]
        self._commands = [shlex.split(one)[1:] for one in found if one.startswith(COMMAND)]
        assert self._commands, f"this names no command: {stopped}"
        assert found[-1].startswith(COMMAND), f"this does not end with a command: {stopped}"

    def run_statements(self) -> None:
        for one in self._statements:
            self._source.advised(one, self._reason)

    def is_retry(self) -> bool:
        """Whether it only starts the sink again."""
        return all(command[:2] == ["sink", "retry"] for command in self._commands)

    def run_commands(self) -> None:
        for command in self._commands:
            if command != ["run"]:
                self._source.pipeline.ask(*command)


def tables(pipeline: SessionPipeline) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for sink in pipeline.status()["sinks"] for one in sink["tables"]}


def beginnings(pipeline: SessionPipeline) -> dict[str, str]:
    """Where the log of each table begins: it moves when the table is captured and read again, however quickly."""
    config = load(pipeline.folder / "pipeline.toml")
    return {name: json.dumps(table.since.to_json()) for name, table in captured_tables(config.store).items()}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[AdvisedSource]:
    kind, _, on_rewrite = request.param.partition(" ")
    if kind == "postgres":
        database: Database = request.getfixturevalue("newest_postgres")
        yield Postgres(database, on_rewrite)
        return
    with STARTED[kind]() as started:
        yield started


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "source",
    [
        "postgres reread",
        pytest.param("postgres stop", marks=pytest.mark.soak),
        "mariadb",
        pytest.param("mysql", marks=pytest.mark.soak),
        "mongodb",
        "sqlserver",
        pytest.param("citus", marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_what_the_status_advises_leads_back_to_live(
    source: AdvisedSource, start_pipeline: StartPipeline, tmp_path: Path
) -> None:
    names = {table: source.name(table) for table in source.cases}
    for table, case in source.cases.items():
        source.create(table, case)
        source.perform(table, case.before)
        if case.blocked:
            write_deltalake(tmp_path / "lake" / names[table], pa.table({"of": ["others"]}))
    captured = f'{json.dumps(list(names.values()))}\non_rewrite = "{source.on_rewrite}"'
    pipeline = source.pipeline = start_pipeline(source.database, captured, source.settings)

    def are_live() -> bool:
        found = pipeline.status()
        return bool(found["live"]) and {one["name"] for one in found["sinks"][0]["tables"]} == set(names.values())

    def equal(table: str) -> bool:
        return pipeline.mirror(names[table]) == source.rows(table)

    def has_come_to_rest(table: str) -> bool:
        """What is repaired without a person is live and equal again, what is not has stopped: nothing else."""
        case, phase = source.cases[table], tables(pipeline).get(names[table], {"phase": ""})["phase"]
        by_itself = source.on_rewrite == "reread" and not case.must_stop
        return phase in STOPPED or (by_itself and phase == "live" and equal(table))

    for table, case in source.cases.items():
        phase = "stopped" if case.starts_stopped else "live"
        pipeline.wait_for(lambda: tables(pipeline).get(names[table], {"phase": ""})["phase"] == phase)  # noqa: B023
    begun = beginnings(pipeline)
    for table, case in source.cases.items():
        source.perform(table, case.change)
        if case.writes:
            source.write(table, 1001)
    for table in source.cases:
        pipeline.wait_for(lambda: has_come_to_rest(table))  # noqa: B023
    assert not pipeline.status()["live"]

    stopped = {name: one for name, one in tables(pipeline).items() if one["phase"] in STOPPED}
    assert [name for name, one in stopped.items() if not one["reason"]] == []
    followed = [Followed(source, one) for one in stopped.values()]
    for table, case in source.cases.items():
        source.perform(table, case.repair)
        if case.blocked:
            shutil.rmtree(tmp_path / "lake" / names[table])
    for one in followed:
        one.run_statements()
    set_by_person = [case.setting.replace("{n}", names[table]) for table, case in source.cases.items() if case.setting]
    if set_by_person:
        pipeline.end()
        pipeline.configure(lambda text: "\n".join([text, *set_by_person]))
        pipeline.start()
    # A retry brings every parked table back, so the repair of each comes first.
    for one in sorted(followed, key=Followed.is_retry):
        one.run_commands()
    pipeline.wait_for(are_live)
    for table in source.cases:
        pipeline.wait_for(lambda: equal(table))  # noqa: B023
    assert {name: one["reason"] for name, one in tables(pipeline).items() if one["reason"]} == {}
    assert beginnings(pipeline).items() - begun.items(), "some tables were read again"

    for failure in source.failures:
        failure.damage(source)
        pipeline.wait_for_end()
        found = pipeline.status()
        assert found["state"] == "failed"
        advice = Followed(source, found)
        failure.repair(source)
        advice.run_statements()
        advice.run_commands()
        pipeline.start()
        pipeline.wait_for(are_live)
        for table in source.cases:
            pipeline.wait_for(lambda: equal(table))  # noqa: B023
        assert pipeline.status()["error"] is None
