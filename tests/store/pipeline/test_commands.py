"""The commands of a pipeline that does not run: each says so, and what to do."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater import Pipeline
from headwater.cli.main import app
from headwater.control.command import (
    PauseBackfill,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ThrottleBackfill,
)
from headwater.control.errors import NoSuchRequest
from headwater.control.request import queued, user_name
from headwater.errors import FencedError, InputError, NotFoundError
from headwater.pipeline.config import load
from headwater.pipeline.errors import AlreadyRunning, ConfigError, ConfigNotFound, NotStarted
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.pipeline.status import read_status
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER, STATUS, Supervisor
from headwater.state.board import open_board
from headwater.system.owner_lock import OwnerLock

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a pipeline, as a person stands in it."""
    (tmp_path / "pipeline.toml").write_text(
        '[pipeline]\nname = "shop"\n[source]\ndsn = "postgresql://app@127.0.0.1:1/shop"\ntables = ["public.orders"]\n'
        '[[sink]]\nkind = "delta"\npath = "lake"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_status_of_a_pipeline_that_never_ran_says_so(folder: Path) -> None:
    shown = runner.invoke(app, ["status"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert "shop · not running (never run)" in shown.stdout
    told = json.loads(runner.invoke(app, ["status", "--json"]).stdout)
    assert (told["running"], told["state"], told["live"]) == (False, "never run", False)
    assert told["sinks"][0]["state"] == "not running"
    assert not (folder / "headwater").exists()


def test_status_tells_an_interrupted_run_and_its_error(folder: Path) -> None:
    failure = {"kind": "X", "remedy": "retry", "message": "The disk is full.", "next_step": "Make room."}
    facts = {
        "state": "running",
        "failure": None,
        "capture": {"state": "running", "rows": 5, "lag_seconds": 0.5, "wal_held_bytes": 2048},
        "sinks": {"delta": {"state": "waiting", "failure": failure, "restarts": 3, "batches": 7, "epoch": 0}},
    }
    open_board(load().state).write(STATUS, json.dumps(facts).encode())
    shown = runner.invoke(app, ["status"], env={"COLUMNS": "120"}).stdout
    assert "not running (interrupted)" in shown
    assert "WAL held 2.0 KiB" in shown
    assert "3 restarts" in shown
    assert "The disk is full." in shown
    assert "next: Make room." in shown


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["pause", "--backfill"], PauseBackfill()),
        (["resume", "--backfill", "--sink", "delta"], ResumeBackfill()),
        (["throttle", "1000"], ThrottleBackfill(1000)),
        (["throttle", "none"], ThrottleBackfill(None)),
        (["resnapshot"], ResnapshotTable()),
    ],
)
def test_what_is_asked_of_a_backfill_while_nothing_runs_is_queued_or_withdrawn(
    folder: Path, command: list[str], asked: QueryCommand
) -> None:
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    (request,) = queued(load().state)
    assert (request.command, request.target) == (asked, "shop-delta")
    advice = f"headwater requests --store {load().state} --withdraw {request.id}"
    assert f"delta: queued until it runs. To withdraw it: {advice}" in done.output
    (listed,) = json.loads(runner.invoke(app, ["requests", "--json"]).stdout)
    assert (listed["id"], listed["asked_by"]) == (request.id, user_name())
    assert request.id[:16] in runner.invoke(app, ["requests"], env={"COLUMNS": "200"}).stdout
    withdrawn = runner.invoke(app, advice.split()[1:])
    assert withdrawn.exit_code == 0, withdrawn.output
    assert json.loads(runner.invoke(app, ["requests", "--json"]).stdout) == []
    assert isinstance(runner.invoke(app, ["requests", "--withdraw", request.id]).exception, NoSuchRequest)


def test_the_delivery_of_one_table_cannot_be_paused(folder: Path) -> None:
    for command in (["pause", "public.orders"], ["resume", "public.orders", "--sink", "delta"]):
        error = runner.invoke(app, command).exception
        assert isinstance(error, InputError)
        assert "delivered together" in error.message
        assert "--backfill" in str(error.next_step)
    for command in (["pause", "public.orders", "--backfill"], ["resnapshot", "public.orders", "--from", "1"]):
        error = runner.invoke(app, command).exception
        assert isinstance(error, InputError)
        assert error.next_step == "Start the pipeline first: headwater run"


def test_the_delivery_is_paused_also_while_nothing_runs(folder: Path) -> None:
    config = load()

    def desired() -> DesiredState:
        with closing(SinkControl(config.state)) as control:
            return control.desired_state("delta")

    assert "delta: paused; changes wait in the log" in runner.invoke(app, ["pause"]).output
    assert desired() is DesiredState.PAUSED
    assert runner.invoke(app, ["resume", "--sink", "delta"]).exit_code == 0
    assert desired() is DesiredState.RUNNING
    assert runner.invoke(app, ["sink", "drop", "delta", "--yes"]).exit_code == 0
    assert "delta: dropped" in runner.invoke(app, ["resume"]).output  # only by its name
    assert desired() is DesiredState.DROPPED
    assert "delta: dropped" in runner.invoke(app, ["pause"]).output
    assert runner.invoke(app, ["resume", "--sink", "delta"]).exit_code == 0
    assert desired() is DesiredState.RUNNING
    assert isinstance(runner.invoke(app, ["pause", "--sink", "nothing"]).exception, ConfigError)


def test_a_pipeline_is_asked_from_python_as_from_the_command_line(folder: Path) -> None:
    pipeline = Pipeline.from_toml()
    (outcome,) = pipeline.pause(backfill=True)
    assert (outcome.sink, outcome.table) == ("delta", None)
    (throttled,) = pipeline.throttle(500, sink="delta")
    assert [request.command for request in pipeline.requests()] == [PauseBackfill(), ThrottleBackfill(500)]
    pipeline.withdraw(str(outcome.queued))
    assert [request.id for request in pipeline.requests()] == [throttled.queued]
    assert [outcome.text for outcome in pipeline.pause()] == ["paused; changes wait in the log"]
    assert [outcome.sink for outcome in pipeline.resume()] == ["delta"]
    with pytest.raises(NotStarted, match="not running"):
        pipeline.stop()


def test_sinks_are_added_from_python_as_from_the_command_line(folder: Path) -> None:
    pipeline = Pipeline.from_toml()
    assert pipeline.add_sink("parquet", name="archive", path=Path("archive"), mode="changes") == "archive"
    assert [sink.label for sink in pipeline.config.sink] == ["delta", "archive"] == [s.label for s in load().sink]
    before = (folder / "pipeline.toml").read_text()
    with pytest.raises(ConfigError, match="archive"):
        pipeline.add_sink("delta", name="archive", path="lake2")
    assert (folder / "pipeline.toml").read_text() == before
    assert pipeline.sink("delta", name="third", path="lake3").config.sink[2].label == "third"
    assert runner.invoke(app, ["add-sink", "delta", "--name", "last", "--set", "path=lake4"]).exit_code == 0
    assert [sink.label for sink in load().sink] == ["delta", "archive", "last"]


def test_a_derivation_is_added_from_python_as_from_the_command_line(folder: Path) -> None:
    pipeline = Pipeline.from_toml()
    pipeline.add_sink("table")
    assert pipeline.add_derivation("totals", "jobs:totals", ["orders"], by=["customer"], sink="delta") == "totals"
    (section,) = load().derive
    assert (section.tables, section.by, section.sink) == (["public.orders"], ["customer"], "delta")


def test_a_pipeline_without_a_file_is_extended_before_its_start(folder: Path) -> None:
    pipeline = Pipeline(source="postgresql://app@127.0.0.1:1/shop", tables=["public.orders"])
    refusal = r"from_toml\(\), or sink\(\) and derive\(\) before start"
    with pytest.raises(InputError, match=refusal):
        pipeline.add_sink("delta", path="lake")
    with pytest.raises(InputError, match=refusal):
        pipeline.add_derivation("totals", "jobs:totals", ["orders"], by=["customer"])


def test_what_needs_a_pipeline_that_runs_says_so_from_python(folder: Path) -> None:
    pipeline = Pipeline.from_toml()
    assert pipeline.dead_letters("delta") == {}
    with pytest.raises(NotStarted, match="headwater run"):
        pipeline.replay("delta")
    with pytest.raises(NotFoundError):
        pipeline.add_table("stock")
    with pytest.raises(ConfigError, match="no sink 'nothing'"):
        pipeline.dead_letters("nothing")


def test_a_pipeline_that_does_not_run_cannot_be_stopped(folder: Path) -> None:
    assert isinstance(runner.invoke(app, ["stop"]).exception, NotStarted)
    assert json.loads(runner.invoke(app, ["requests", "--json"]).stdout) == []


def test_there_is_nothing_to_compare_before_the_first_run(folder: Path) -> None:
    asked = runner.invoke(app, ["verify"])
    assert isinstance(asked.exception, NotStarted)
    assert asked.exception.next_step == "Run: headwater run"


def test_a_statement_that_mends_something_is_one_line_to_copy(folder: Path) -> None:
    statement = f"Run: {' '.join(['ALTER TABLE'] * 30)}"
    failure = {"kind": "X", "remedy": "person", "message": "It failed.", "next_step": statement}
    facts = {"state": "failed", "failure": failure, "capture": {}, "sinks": {}}
    open_board(load().state).write(STATUS, json.dumps(facts).encode())
    told = runner.invoke(app, ["status"], env={"COLUMNS": "80"})
    assert told.exit_code == 1
    assert statement in told.output


def test_throttle_takes_a_number_or_none(folder: Path) -> None:
    assert isinstance(runner.invoke(app, ["throttle", "fast"]).exception, InputError)


def test_commands_name_the_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["status"], ["pause"], ["run"]):
        assert isinstance(runner.invoke(app, command).exception, ConfigNotFound)


def test_a_second_run_is_refused_with_the_owner(folder: Path) -> None:
    config = load()
    run = config.work / RUN_FOLDER
    run.mkdir(parents=True)
    with OwnerLock(run / LOCK_FILE, "x") as lock:
        assert read_status(config).running
        with pytest.raises(AlreadyRunning, match=f"process {lock.owner.pid} on") as caught:
            Supervisor(config).run()
        assert isinstance(caught.value, FencedError)
        with pytest.raises(AlreadyRunning):
            Pipeline.from_toml().start()
    assert not read_status(config).running


def test_a_pipeline_from_python_is_checked_at_once(tmp_path: Path) -> None:
    pipeline = Pipeline(source="postgresql://x", tables=["a"], store=tmp_path / "store", name="shop")
    with pytest.raises(ConfigError, match="no sink"):
        pipeline.start()
    with pytest.raises(ConfigError, match="kind"):
        pipeline.sink("delat", path="lake")
    assert pipeline.sink("delta", path=tmp_path / "lake").config.sink[0].label == "delta"
    with pytest.raises(NotStarted):
        pipeline.stop()
    assert pipeline.status().state == "never run"


def test_doctor_looks_at_the_machine_and_the_sinks_also_when_the_database_is_gone(folder: Path) -> None:
    told = runner.invoke(app, ["doctor", "--json"])
    assert told.exit_code == 1
    findings = json.loads(told.stdout)["findings"]
    assert sum(one["level"] == "problem" for one in findings) == 1
    levels = {(one["check"], one["level"]) for one in findings}
    assert {("java", "ok"), ("spark", "ok"), ("store", "ok"), ("sink", "ok"), ("connection", "problem")} <= levels
    assert not (folder / "headwater").exists()


def test_a_run_that_waits_for_its_database_says_so_and_stops_when_it_is_told(tmp_path: Path) -> None:
    pipeline = Pipeline(source="postgresql://app@127.0.0.1:1/shop", tables=["public.*"], store=tmp_path / "store")
    pipeline.sink("delta", path=tmp_path / "lake").start()
    end = time.monotonic() + 30
    while pipeline.status().error is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert pipeline.is_running
    Pipeline.of(pipeline.config).stop()  # as another process does
    assert pipeline.wait(30)
    assert pipeline.status().state == "stopped"
    assert pipeline.requests() == []
